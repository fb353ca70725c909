"""Models in training: random weights, and attention over whole sequences without a cache."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Key, PyTree

from jspec.models.decoder import Decoder
from pallas_kernels import platform

_MAX_FUSED_HEAD_DIM = 128
"""The largest head dimension of attention by cuDNN on all of its GPUs."""

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


def attend_to_two(
    q: Float[Array, "B A n H D"],
    text: tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]],
    group: tuple[Float[Array, "B A m K D"], Float[Array, "B A m K D"]],
    seen: Bool[Array, "#B #A #n T"],
    scale: float,
    within: Bool[Array, "n m"] | None = None,
) -> Float[Array, "B A n H D"]:
    """Attention of n rows in each of A groups to a text and to m rows of their own group.

    text, group: keys and values.
    seen: the rows of the text to attend to.
    within: those of the group; None: all.
    """
    kv_heads, dot = group[0].shape[3], partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    dot = partial(dot, preferred_element_type=jnp.float32)
    query = q.reshape(*q.shape[:3], kv_heads, -1, q.shape[-1])
    before = jnp.where(seen[:, None, None], dot("banhgd,bthd->bhgant", query, text[0]) * scale, -jnp.inf)
    inside = dot("banhgd,bamhd->bhganm", query, group[0]) * scale
    if within is not None:
        inside = jnp.where(within, inside, -jnp.inf)
    # One softmax over both, without concatenating them.
    highest = jnp.maximum(before.max(-1, keepdims=True), inside.max(-1, keepdims=True, initial=-jnp.inf))
    before, inside = (jnp.exp(scores - lax.stop_gradient(highest)) for scores in (before, inside))
    total = before.sum(-1) + inside.sum(-1)
    out = dot("bhgant,bthd->banhgd", before.astype(q.dtype), text[1])
    out = out + dot("bhganm,bamhd->banhgd", inside.astype(q.dtype), group[1])
    return (out / jnp.moveaxis(total, (1, 2), (3, 4))[..., None]).astype(q.dtype).reshape(q.shape)


def init_matrix(key: Key[Array, ""], rows: int, columns: int, factor: float = 1.0) -> Float[Array, "rows columns"]:
    """Random weights in float32 with a standard deviation of factor * rows^-0.5."""
    return jax.random.normal(key, (rows, columns), jnp.float32) * (factor * rows**-0.5)


def init_layer(shapes: L, keys: Iterator[Key[Array, ""]], *, branch: float = 1.0) -> L:
    """Random weights of a layer in float32: matrices with a standard deviation of in^-0.5, unit norms, zero biases.

    shapes: the layer's part of `param_shapes`.
    keys: one is used for each matrix.
    branch: scale of the last matrices of a residual branch, `o` and `down`.
    """

    def init(path, leaf: jax.ShapeDtypeStruct) -> Array:
        name = path[-1].name
        if len(leaf.shape) == 2:
            rows, columns = leaf.shape
            return init_matrix(next(keys), rows, columns, branch if name in ("o", "down") else 1.0)
        return (jnp.zeros if name.endswith("_bias") else jnp.ones)(leaf.shape, jnp.float32)

    return jax.tree_util.tree_map_with_path(init, shapes)


def check_capture(layers: tuple[int, ...] | None, default: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The captured layers of a target of `count` layers, ascending; `count` is the output of the last."""
    layers = default if layers is None else layers
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= count:
        raise ValueError(f"capture_layers={layers}: must be ascending, each between 0 and {count}")
    return layers


@partial(jax.jit, static_argnames=("dtype",))
def cast(params: L, dtype: DTypeLike) -> L:
    """A copy of weights, with floats in `dtype`."""

    def copy(leaf: Array) -> Array:
        return jnp.copy(leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf)

    return jax.tree.map(copy, params)


def count(params: PyTree) -> int:
    """The number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def causal_attention(config: Decoder, dtype: str) -> CausalAttention:
    """The fastest `CausalAttention` for a model on this machine in this precision."""
    windows = tuple(config.layer_keys(layer).window for layer in range(config.num_layers))
    return CausalAttention(windows, fused=platform.platform() == "gpu" and dtype != "float32")
