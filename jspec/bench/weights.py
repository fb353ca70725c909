"""Weights without a checkpoint: the shapes that a configuration asks for, random arrays of them, and bytes read."""

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cache import LayerKeys
from jspec.cache.mla import UpProjections
from jspec.core.types import Params
from jspec.engine.memory import tree_bytes
from jspec.models import (
    Assistant,
    AssistantParams,
    Deepseek,
    DeepseekParams,
    EagleHead,
    EagleParams,
    Gemma4,
    Gemma4Params,
    LanguageModel,
    Llama,
    LlamaParams,
    Qwen3Next,
    Qwen3NextParams,
)
from jspec.models.assistant import AssistantLayerParams, ClusterParams
from jspec.models.deepseek import DeepseekLayerParams
from jspec.models.gemma4 import ExpertParams, Gemma4LayerParams, PerLayerInputParams, PerLayerParams
from jspec.models.llama import LayerParams
from jspec.models.moe import Routed, RoutedParams
from jspec.models.qwen3_next import AttentionParams, DeltaParams, Qwen3NextLayerParams

SPREAD = 0.02
"""Standard deviation of random matrices: activations stay finite through any depth."""
LOGIT_SPREAD = 6.0
"""Standard deviation of random logits. Even logits would grow best-first trees two generations deep, however deep they
may be; with these the likeliest tokens stand out as those of a trained draft do."""

P = TypeVar("P")


def shapes_of(config: LanguageModel | EagleHead | Assistant, dtype: Any) -> Any:
    """The weights of a model as `jax.ShapeDtypeStruct`s."""
    if isinstance(config, Llama):
        return llama_shapes(config, dtype)
    if isinstance(config, Gemma4):
        return gemma4_shapes(config, dtype)
    if isinstance(config, Qwen3Next):
        return qwen3_next_shapes(config, dtype)
    if isinstance(config, Deepseek):
        return deepseek_shapes(config, dtype)
    return head_shapes(config, dtype) if isinstance(config, EagleHead) else assistant_shapes(config, dtype)


def llama_shapes(config: Llama, dtype: Any) -> LlamaParams:
    """The weights of a model as `jax.ShapeDtypeStruct`s."""
    shape = _shape_of(dtype)
    vocabulary, width = config.vocab_size, config.hidden_size
    layers = tuple(
        _layer_shapes(config, width, dtype, config.layer_experts(index)) for index in range(config.num_layers)
    )
    head = None if config.tie_embeddings else shape((width, vocabulary))
    return LlamaParams(shape((vocabulary, width)), layers, shape((width,)), head)


def head_shapes(config: EagleHead, dtype: Any) -> EagleParams:
    """The weights of an EAGLE-3 head with its own LM head and the target's embedding, as `jax.ShapeDtypeStruct`s."""
    shape = _shape_of(dtype)
    width = config.hidden_size
    captured = len(config.capture_layers) * config.target_hidden_size
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


def gemma4_shapes(config: Gemma4, dtype: Any) -> Gemma4Params:
    """The weights of a model as `jax.ShapeDtypeStruct`s."""
    shape, width, size = _shape_of(dtype), config.hidden_size, config.per_layer_size
    layers = []
    for index, kind in enumerate(config.attention):
        own, mlp, query = config.source(index) == index, config.mlp_width(index), config.num_heads * kind.head_dim
        made = 0 if not own else kind.kv_heads * kind.head_dim * (1 if kind.values_are_keys else 2)
        per_layer = PerLayerParams(shape((width, size)), shape((size, width)), shape((width,))) if size else None
        layer = Gemma4LayerParams(
            **_norm_shapes(width, dtype),
            qkv=shape((width, query + made)),
            q_norm=shape((kind.head_dim,)),
            k_norm=shape((kind.head_dim,)) if own else None,
            o=shape((query, width)),
            gate_up=shape((width, 2 * mlp)),
            down=shape((mlp, width)),
            experts=_gemma4_expert_shapes(config, dtype),
            per_layer=per_layer,
            scalar=shape(()),
        )
        layers.append(layer)
    vocabulary, inputs = config.vocab_size, None
    if size:
        every = config.num_layers * size
        inputs = PerLayerInputParams(shape((vocabulary, every)), shape((width, every)), shape((size,)))
    return Gemma4Params(shape((vocabulary, width)), inputs, tuple(layers), shape((width,)))


def qwen3_next_shapes(config: Qwen3Next, dtype: Any) -> Qwen3NextParams:
    """The weights of a model without its head for multi-token prediction as `jax.ShapeDtypeStruct`s."""
    shape, width, dim, state = _shape_of(dtype), config.hidden_size, config.head_dim, config.state
    wide = _shape_of(jnp.float32)
    values = state.value_heads * state.value_dim
    delta = DeltaParams(
        projection=shape((width, state.channels + values + 2 * state.value_heads)),
        conv=shape((state.kernel, state.channels)),
        log_rate=wide((state.value_heads,)),
        rate_bias=wide((state.value_heads,)),
        norm=shape((state.value_dim,)),
        out=shape((values, width)),
    )
    attention = AttentionParams(
        projection=shape((width, 2 * (config.num_heads + config.num_kv_heads) * dim)),
        q_norm=wide((dim,)),
        k_norm=wide((dim,)),
        out=shape((config.num_heads * dim, width)),
    )
    layers = []
    for index, full in enumerate(config.full):
        experts = config.layer_experts(index)
        layer = Qwen3NextLayerParams(
            mixer_norm=wide((width,)),
            mixer=attention if full else delta,
            mlp_norm=wide((width,)),
            **_mlp_shapes(experts, config.intermediate_size, width, dtype),
        )
        layers.append(layer)
    head = None if config.tie_embeddings else shape((width, config.vocab_size))
    return Qwen3NextParams(shape((config.vocab_size, width)), tuple(layers), wide((width,)), head)


def _gemma4_expert_shapes(config: Gemma4, dtype: Any) -> ExpertParams | None:
    if config.experts is None:
        return None
    shape, width, count, inner = _shape_of(dtype), config.hidden_size, config.experts.router.count, config.experts.width
    return ExpertParams(
        router_scale=shape((width,)),
        router=shape((count, width)),
        scales=shape((count,)),
        gate_up=shape((count, width, 2 * inner)),
        down=shape((count, inner, width)),
        norm=shape((width,)),
        out_norm=shape((width,)),
        mlp_out_norm=shape((width,)),
    )


def deepseek_shapes(config: Deepseek, dtype: Any) -> DeepseekParams:
    """The weights of a model as `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: it has layers for multi-token prediction or indexers, of which no preset has any.
    """
    if config.mtp_layers or config.indexer:
        raise ValueError("random weights are made of DeepSeek V2 and V3 without layers for multi-token prediction only")
    shape, width, latent = _shape_of(dtype), config.hidden_size, config.latent
    queries = config.num_heads * (latent.key + latent.rope)
    layers = []
    for index in range(config.num_layers):
        layer = DeepseekLayerParams(
            attention_norm=shape((width,)),
            down_projection=shape((width, (latent.query or queries) + latent.width)),
            query_norm=shape((latent.query,)) if latent.query else None,
            query=shape((latent.query, queries)) if latent.query else None,
            latent_norm=shape((latent.size,)),
            up=UpProjections(
                shape((config.num_heads, latent.key, latent.size)), shape((config.num_heads, latent.size, latent.value))
            ),
            o=shape((config.num_heads * latent.value, width)),
            mlp_norm=shape((width,)),
            **_mlp_shapes(config.layer_experts(index), config.intermediate_size, width, dtype),
        )
        layers.append(layer)
    vocabulary = config.vocab_size
    head = None if config.tie_embeddings else shape((width, vocabulary))
    return DeepseekParams(shape((vocabulary, width)), tuple(layers), shape((width,)), head)


def _mlp_shapes(experts: Routed | None, inner: int, width: int, dtype: Any) -> dict[str, Any]:
    """The MLP of a layer, or the experts in its place."""
    shape = _shape_of(dtype)
    if experts is None:
        return {"gate_up": shape((width, 2 * inner)), "down": shape((inner, width)), "experts": None}
    inner, router, count = experts.width, experts.router, experts.router.count + experts.shared
    routed = RoutedParams(
        router=shape((router.count, width), dtype=jnp.float32),
        bias=shape((router.count,), dtype=jnp.float32) if router.sigmoid else None,
        gate_up=shape((count, width, 2 * inner)),
        down=shape((count, inner, width)),
        shared_gate=shape((width, 1)) if experts.shared_gate else None,
    )
    return {"gate_up": None, "down": None, "experts": routed}


def assistant_shapes(config: Assistant, dtype: Any) -> AssistantParams:
    """The weights of an assistant as `jax.ShapeDtypeStruct`s."""
    shape, width, mlp, outer = _shape_of(dtype), config.hidden_size, config.intermediate_size, config.target_hidden_size
    layers = tuple(
        AssistantLayerParams(
            **_norm_shapes(width, dtype),
            q=shape((width, config.num_heads * head_dim)),
            q_norm=shape((head_dim,)),
            o=shape((config.num_heads * head_dim, width)),
            gate_up=shape((width, 2 * mlp)),
            down=shape((mlp, width)),
            scalar=shape(()),
        )
        for head_dim in config.head_dims
    )
    head, clusters = None if config.target_head else shape((config.vocab_size, width)), None
    if config.clusters is not None:
        count = config.clusters.count
        tokens = (count, config.vocab_size // count)
        ids = shape(tokens, dtype=jnp.int32)
        head, clusters = None, ClusterParams(shape((width, count)), ids, shape((*tokens, width)))
    return AssistantParams(shape((2 * outer, width)), layers, shape((width,)), shape((width, outer)), head, clusters)


def _norm_shapes(width: int, dtype: Any) -> dict[str, Any]:
    """Of a layer of Gemma 4 or of an assistant."""
    names = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
    return {name: jax.ShapeDtypeStruct((width,), dtype) for name in names}


def _layer_shapes(config: Any, read: int, dtype: Any, experts: Routed | None = None) -> LayerParams:
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
        **_mlp_shapes(experts, config.intermediate_size, width, dtype),
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
            ids = np.arange(leaf.size) * (vocab_size // leaf.size)
            made.append(jnp.asarray(ids.reshape(leaf.shape), leaf.dtype))
        elif leaf.ndim <= 1:
            made.append(jnp.ones(leaf.shape, leaf.dtype))
        else:
            # The dimension that logits are summed over.
            width = {"embed": leaf.shape[-1], "head": leaf.shape[-1], "lm_head": leaf.shape[0]}.get(path[-1].name)
            spread = SPREAD if width is None else LOGIT_SPREAD * width**-0.5
            made.append(_normal(jax.random.fold_in(key, index), spread, shape=leaf.shape, dtype=leaf.dtype))
    return jax.tree.unflatten(structure, made)


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key, spread, *, shape, dtype):
    return jax.random.normal(key, shape, dtype) * spread.astype(dtype)


def count(tree: Any) -> int:
    """Parameters: numbers in all floating-point arrays, or shapes, in a pytree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating))


def forward_bytes(params: Any, config: Any = None, tokens: int = 1) -> int:
    """Weights that one forward reads: layers, norm and LM head. The embedding is a gather, unless it is the LM head.

    Of experts those that so many tokens choose, on average, where each expert is as likely as the others.

    config: the model's, which is needed where it has experts.
    """
    experts = [layer.experts for layer in params.layers if layer.experts is not None]
    if experts:
        router = config.experts.router
        unread = (1 - router.chosen / router.count) ** tokens * router.count / (router.count + config.experts.shared)
        spared = int(unread * tree_bytes([(each.gate_up, each.down) for each in experts]))
        return _all_bytes(params) - spared
    return _all_bytes(params)


def _all_bytes(params: Any) -> int:
    if isinstance(params, Gemma4Params):
        inputs = None if params.per_layer is None else (params.per_layer.projection, params.per_layer.norm)
        return tree_bytes((params.layers, params.norm, params.embed, inputs))
    head = params.embed if params.lm_head is None else params.lm_head
    return tree_bytes((params.layers, params.norm, head))


def draft_step_bytes(params: Params, config: Any = None) -> int:
    """Weights that one forward of the draft reads while it drafts.

    config: the draft's, which is needed where it has experts, or chooses among clusters of tokens.
    """
    draft = params.draft
    if isinstance(draft, LlamaParams | Gemma4Params | DeepseekParams | Qwen3NextParams):
        return forward_bytes(draft, config)
    if isinstance(draft, AssistantParams):
        head = tree_bytes(draft.head)
        if draft.clusters is not None:
            rows = tree_bytes(draft.clusters.head) * config.clusters.chosen // config.clusters.count
            head = tree_bytes(draft.clusters.centroids) + rows
        return head + tree_bytes((draft.pre_projection, draft.layers, draft.norm, draft.post_projection))
    shared = params.target.embed if params.target.lm_head is None else params.target.lm_head
    head = shared if draft.lm_head is None else draft.lm_head
    # EAGLE-1 joins token and feature in every step by `fc`.
    every_step = draft.fc if draft.hidden_norm is None else None
    return tree_bytes((draft.layers, draft.norm, draft.hidden_norm, every_step, head))


def extend_bytes(params: Params, config: Any = None) -> int:
    """Weights that the draft reads after a round: those of a step, and what fuses the target's hidden states.

    config: as in `draft_step_bytes`.
    """
    draft = params.draft
    if isinstance(draft, AssistantParams):
        return 0
    fuses = isinstance(draft, EagleParams) and draft.hidden_norm is not None
    return draft_step_bytes(params, config) + (tree_bytes((draft.fc, draft.fc_bias, draft.fc_norms)) if fuses else 0)


def kv_bytes(config: Any, context: int, itemsize: int, target: Any = None) -> int:
    """Keys and values that one forward reads of a sequence of `context` tokens, of which windows leave out some.

    Recurrent layers have none, see `state_bytes`.

    target: the configuration of the model whose keys an assistant reads.
    """
    if isinstance(config, Assistant):
        keys = [target.layer_keys(layer) for layer in config.reads]
    elif isinstance(config, EagleHead):
        keys = [LayerKeys(config.num_kv_heads, config.head_dim)] * config.num_layers
    else:
        full = getattr(config, "full", (True,) * config.num_layers)
        keys = [config.layer_keys(layer) for layer in range(config.num_layers) if full[layer]]
    return sum(layer.width * min(context, layer.window or context) for layer in keys) * itemsize


def state_bytes(config: Any, itemsize: int) -> int:
    """What the recurrent layers of a model keep of a sequence; 0 of a model without any."""
    if not isinstance(config, Qwen3Next):
        return 0
    state, layers = config.state, config.full.count(False)
    window = (state.kernel - 1) * state.channels * itemsize
    return layers * (4 * state.value_heads * state.key_dim * state.value_dim + window)


def round_bytes(
    params: Params,
    target: LanguageModel,
    draft: LanguageModel | EagleHead | Assistant | None,
    *,
    depth: int,
    batch: int,
    context: int,
    nodes: int | None = None,
) -> int:
    """The least that a round reads: each forward its weights and the keys and values of its context, once, and the
    commit the states of recurrent layers, once more. Of a mixture of experts those that `nodes` tokens a row choose.

    draft, depth: what drafts, and how many tokens deep; with depth 0 it is plain decoding. A round has a forward of the
      target and as many of the draft as tokens, of which the first is its extension, but for an assistant.
    nodes: of the tree that the target verifies, root included; None: those of a chain.
    """
    itemsize = params.target.embed.dtype.itemsize
    tokens = batch * (nodes or depth + 1)
    total = forward_bytes(params.target, target, tokens) + batch * kv_bytes(target, context, itemsize)
    total += 2 * batch * state_bytes(target, itemsize)
    if not depth:
        return total
    assert draft is not None
    own = depth * batch * kv_bytes(draft, context, itemsize, target)
    extends = extend_bytes(params, draft)
    return total + (depth - bool(extends)) * draft_step_bytes(params, draft) + extends + own
