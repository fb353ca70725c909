"""Weights without a checkpoint: the shapes that a configuration asks for, random arrays of them, and bytes read."""

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jspec.memory import tree_bytes
from jspec.models import EagleHead, EagleParams, Llama, LlamaParams
from jspec.models.llama import LayerParams
from jspec.types import Params

SPREAD = 0.02
"""Standard deviation of random matrices: activations stay finite through any depth."""
LOGIT_SPREAD = 6.0
"""Standard deviation of random logits. Even logits would grow best-first trees two generations deep, however deep they
may be; with these the likeliest tokens stand out as those of a trained draft do."""

P = TypeVar("P")


def llama_shapes(config: Llama, dtype: Any) -> LlamaParams:
    """The weights of a model as `jax.ShapeDtypeStruct`s."""
    shape = _shape_of(dtype)
    vocabulary, width = config.vocab_size, config.hidden_size
    layers = tuple(_layer_shapes(config, width, dtype) for _ in range(config.num_layers))
    head = None if config.tie_embeddings else shape((width, vocabulary))
    return LlamaParams(shape((vocabulary, width)), layers, shape((width,)), head)


def head_shapes(config: EagleHead, dtype: Any) -> EagleParams:
    """The weights of an EAGLE-3 head with its own LM head and the target's embedding, as `jax.ShapeDtypeStruct`s."""
    shape = _shape_of(dtype)
    width = config.hidden_size
    captured = len(config.capture) * config.target_hidden_size
    layers = tuple(
        _layer_shapes(config, width if index else config.target_hidden_size + width, dtype)
        for index in range(config.num_layers)
    )
    return EagleParams(
        embed=None,
        fc=shape((captured, width)),
        fc_bias=None,
        fc_norms=None,
        input_norm=None,
        hidden_norm=shape((width,)),
        layers=layers,
        norm=shape((width,)),
        lm_head=shape((width, config.draft_vocab_size)),
        ids=shape((config.draft_vocab_size,), dtype=jnp.int32),
    )


def _layer_shapes(config: Any, read: int, dtype: Any) -> LayerParams:
    """read: width of what the attention reads."""
    shape = _shape_of(dtype)
    width, heads, dim = config.hidden_size, config.num_heads, config.head_dim
    norm = shape((dim,)) if getattr(config, "qk_norm", False) else None
    return LayerParams(
        attention_norm=shape((width,)),
        qkv=shape((read, (heads + 2 * config.num_kv_heads) * dim)),
        qkv_bias=None,
        q_norm=norm,
        k_norm=norm,
        o=shape((heads * dim, width)),
        o_bias=None,
        mlp_norm=shape((width,)),
        gate_up=shape((width, 2 * config.intermediate_size)),
        down=shape((config.intermediate_size, width)),
    )


def _shape_of(dtype: Any) -> Any:
    """A function of dimensions; its result stands for an array of them."""
    return partial(jax.ShapeDtypeStruct, dtype=dtype)


def random_weights(shapes: P, vocab_size: int, seed: int = 0) -> P:
    """Arrays of these shapes, made on the device one by one: norms of ones, matrices with SPREAD.

    shapes: leaves that are arrays already are kept.
    vocab_size: the target's, over which the draft's vocabulary is spread evenly.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    key = jax.random.key(seed)
    made = []
    for index, (path, leaf) in enumerate(leaves):
        if isinstance(leaf, jax.Array):
            made.append(leaf)
        elif jnp.issubdtype(leaf.dtype, jnp.integer):
            made.append(jnp.asarray(np.arange(leaf.size) * (vocab_size // leaf.size), leaf.dtype))
        elif leaf.ndim == 1:
            made.append(jnp.ones(leaf.shape, leaf.dtype))
        else:
            width = min(leaf.shape)
            spread = LOGIT_SPREAD * width**-0.5 if path[-1].name in ("embed", "lm_head") else SPREAD
            made.append(_normal(jax.random.fold_in(key, index), spread, shape=leaf.shape, dtype=leaf.dtype))
    return jax.tree.unflatten(structure, made)


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key, spread, *, shape, dtype):
    return jax.random.normal(key, shape, dtype) * spread.astype(dtype)


def count(tree: Any) -> int:
    """Parameters: numbers in all floating-point arrays, or shapes, in a pytree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating))


def forward_bytes(params: LlamaParams) -> int:
    """Weights that one forward reads: layers, norm and LM head. The embedding is a gather, unless it is the LM head."""
    head = params.embed if params.lm_head is None else params.lm_head
    return tree_bytes((params.layers, params.norm, head))


def draft_step_bytes(params: Params) -> int:
    """Weights that one forward of the draft reads while it drafts."""
    draft = params.draft
    if isinstance(draft, LlamaParams):
        return forward_bytes(draft)
    shared = params.target.embed if params.target.lm_head is None else params.target.lm_head
    head = shared if draft.lm_head is None else draft.lm_head
    # EAGLE-1 joins token and feature in every step by `fc`.
    every_step = draft.fc if draft.hidden_norm is None else None
    return tree_bytes((draft.layers, draft.norm, draft.hidden_norm, every_step, head))


def extend_bytes(params: Params) -> int:
    """Weights that the draft reads after a round: those of a step, and what fuses the target's hidden states."""
    draft = params.draft
    fuses = isinstance(draft, EagleParams) and draft.hidden_norm is not None
    return draft_step_bytes(params) + (tree_bytes((draft.fc, draft.fc_bias, draft.fc_norms)) if fuses else 0)


def kv_token_bytes(config: Any, itemsize: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def round_bytes(
    params: Params, target: Llama, draft: Llama | EagleHead | None, *, depth: int, batch: int, context: int
) -> int:
    """The least that a round reads: each forward its weights and the keys and values of its context, once.

    draft, depth: what drafts, and how many tokens deep; with depth 0 it is plain decoding. A round has a forward of the
      target, depth - 1 steps of the draft and an extension, which proposes the first draft.
    """
    itemsize, tokens = params.target.embed.dtype.itemsize, batch * context
    total = forward_bytes(params.target) + tokens * kv_token_bytes(target, itemsize)
    if not depth:
        return total
    assert draft is not None
    own = depth * tokens * kv_token_bytes(draft, itemsize)
    return total + (depth - 1) * draft_step_bytes(params) + extend_bytes(params) + own
