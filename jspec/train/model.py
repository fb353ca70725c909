"""Language models in training: initial weights, and the forward over whole sequences without a cache."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from jspec.models import Llama, LlamaParams
from jspec.models.decoder import Decoder
from jspec.models.llama import LayerParams

SHAPES = {
    "python-small": Llama(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_length=1024,
        tie_embeddings=True,
        qk_norm=True,
    ),
    "python-tiny": Llama(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=384,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        max_length=1024,
        tie_embeddings=True,
    ),
}
"""The shapes of the bundled models, by name."""

_MAX_FUSED_HEAD_DIM = 128
"""Head dimension up to which cuDNN has attention on every GPU that it supports."""

EMBEDDING_SPREAD = 0.02
"""Standard deviation of initial embeddings."""


@dataclasses.dataclass(frozen=True)
class CausalAttention:
    """Takes the place of a cache: each token attends to its sequence up to itself, and nothing is stored.

    windows: for each layer, how many positions a token attends to, its own included; None: all.
    fused: use cuDNN for layers without a window and with heads of up to 128 dimensions, and XLA for the others.
    """

    windows: tuple[int | None, ...]
    fused: bool = False

    def attend(self, layer, q, k, v, start, mask, scale: float, positions=None) -> Float[Array, "B N H D"]:
        """Causal attention among the N tokens; `start` and `mask` must be None, and `positions` consecutive."""
        assert start is None and mask is None
        length, window = q.shape[1], self.windows[layer]
        fused = self.fused and window is None and q.shape[-1] <= _MAX_FUSED_HEAD_DIM
        # cuDNN's backward pass needs an even length; with causal attention no token sees the padding.
        q, k, v = (jnp.pad(x, ((0, 0), (0, length % 2), (0, 0), (0, 0))) for x in (q, k, v))
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn" if fused else None,
        )
        return out[:, :length]


@partial(jax.jit, static_argnames=("config",))
def init_params(config: Llama, key: Key[Array, ""]) -> LlamaParams:
    """Random weights in float32: matrices with a standard deviation of in^-0.5, smaller at the end of a branch."""
    keys = iter(jax.random.split(key, 4 * config.num_layers + 2))
    width = config.hidden_size
    branch = (2 * config.num_layers) ** -0.5
    embed = jax.random.normal(next(keys), (config.vocab_size, width), jnp.float32) * EMBEDDING_SPREAD
    head = None if config.tie_embeddings else init_matrix(next(keys), width, config.vocab_size)
    flags = {"qk_norm": config.qk_norm, "bias": config.attention_bias}
    stack = tuple(init_layer(config, keys, read=width, branch=branch, **flags) for _ in range(config.num_layers))
    return LlamaParams(embed, stack, jnp.ones(width, jnp.float32), head)


def init_matrix(key: Key[Array, ""], rows: int, columns: int, factor: float = 1.0) -> Float[Array, "rows columns"]:
    """Random weights in float32 with a standard deviation of factor * rows^-0.5."""
    return jax.random.normal(key, (rows, columns), jnp.float32) * (factor * rows**-0.5)


class LayerShape(Protocol):
    """The configuration of a model, as far as a decoder layer needs it."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""
        ...

    @property
    def num_heads(self) -> int:
        """Query heads."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        ...

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        ...


def init_layer(
    config: LayerShape,
    keys: Iterator[Key[Array, ""]],
    *,
    read: int,
    branch: float,
    qk_norm: bool = False,
    bias: bool = False,
) -> LayerParams:
    """Random weights of a decoder layer.

    keys: four of them are used.
    read: width of the input of the attention.
    branch: scale of the matrices that end a residual branch.
    """
    width, mlp, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries = config.num_heads * dim
    projected = queries + 2 * config.num_kv_heads * dim
    return LayerParams(
        attention_norm=jnp.ones(width, jnp.float32),
        qkv=init_matrix(next(keys), read, projected),
        qkv_bias=jnp.zeros(projected, jnp.float32) if bias else None,
        q_norm=jnp.ones(dim, jnp.float32) if qk_norm else None,
        k_norm=jnp.ones(dim, jnp.float32) if qk_norm else None,
        o=init_matrix(next(keys), queries, width, branch),
        o_bias=jnp.zeros(width, jnp.float32) if bias else None,
        mlp_norm=jnp.ones(width, jnp.float32),
        gate_up=init_matrix(next(keys), width, 2 * mlp),
        down=init_matrix(next(keys), mlp, width, branch),
    )


def count(params: PyTree) -> int:
    """The number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def logits(config: Llama, params: LlamaParams, tokens: Int[Array, "B N"], dtype: str) -> Float[Array, "B N V"]:
    """Logits in float32 of sequences that start at position 0, computed in `dtype` from weights of any precision."""
    batch, length = tokens.shape
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    # Embedded outside of the cast, so that the gradient of a frequent token is summed in the precision of the weights.
    rows = jnp.take(params.embed, tokens.reshape(-1), axis=0, mode="clip").astype(dtype)
    head = cast.embed.T if cast.lm_head is None else cast.lm_head
    cast = dataclasses.replace(cast, embed=rows, lm_head=head)
    index = jnp.arange(batch * length, dtype=jnp.int32).reshape(batch, length)
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    return config.apply(cast, index, positions, causal_attention(config, dtype), None).logits


def causal_attention(config: Decoder, dtype: str) -> CausalAttention:
    """The fastest `CausalAttention` for a model on this machine in this precision."""
    windows = tuple(config.layer_keys(layer).window for layer in range(config.num_layers))
    return CausalAttention(windows, fused=jax.default_backend() == "gpu" and dtype != "float32")
