"""Language models in training: initial weights, and the forward over whole sequences without a cache."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from jspec.core.checks import check_int
from jspec.models import Llama, LlamaParams
from jspec.models.decoder import Decoder
from pallas_kernels import platform

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

L = TypeVar("L")


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
    shapes = config.param_shapes(jnp.float32)
    keys = iter(jax.random.split(key, 4 * config.num_layers + 2))
    branch = (2 * config.num_layers) ** -0.5
    embed = jax.random.normal(next(keys), shapes.embed.shape, jnp.float32) * EMBEDDING_SPREAD
    head = None if shapes.lm_head is None else init_matrix(next(keys), *shapes.lm_head.shape)
    stack = tuple(init_layer(layer, keys, branch=branch) for layer in shapes.layers)
    return LlamaParams(embed, stack, jnp.ones(shapes.norm.shape, jnp.float32), head)


def init_matrix(key: Key[Array, ""], rows: int, columns: int, factor: float = 1.0) -> Float[Array, "rows columns"]:
    """Random weights in float32 with a standard deviation of factor * rows^-0.5."""
    return jax.random.normal(key, (rows, columns), jnp.float32) * (factor * rows**-0.5)


def init_layer(shapes: L, keys: Iterator[Key[Array, ""]], *, branch: float = 1.0) -> L:
    """Random weights of a layer in float32: matrices with a standard deviation of in^-0.5, unit norms, zero biases.

    shapes: the layer's part of `param_shapes`.
    keys: one is used for each matrix.
    branch: scale of the matrices that end a residual branch, `o` and `down`.
    """

    def init(path, leaf: jax.ShapeDtypeStruct) -> Array:
        name = path[-1].name
        if len(leaf.shape) == 2:
            rows, columns = leaf.shape
            return init_matrix(next(keys), rows, columns, branch if name in ("o", "down") else 1.0)
        return (jnp.zeros if name.endswith("_bias") else jnp.ones)(leaf.shape, jnp.float32)

    return jax.tree_util.tree_map_with_path(init, shapes)


def check_layers(name: str, layers: Sequence[int]) -> tuple[int, ...]:
    """Indices of layers as plain ints; the caller checks that the model has them.

    Raises:
      TypeError: not a tuple or list of ints.
    """
    if not isinstance(layers, tuple | list):
        raise TypeError(f"{name}={layers!r}: must be a tuple of ints")
    return tuple(check_int(name, layer, least=-(2**31)) for layer in layers)


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
    return CausalAttention(windows, fused=platform.platform() == "gpu" and dtype != "float32")
