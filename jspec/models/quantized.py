"""Weights of 8 bits: matrices in fp8 or int8 with a scale for each output column.

A `Quantized` takes the place of an array in a pytree of weights. Its products are XLA's: on a GPU the narrow matrix is
widened inside the kernel that multiplies, so that a round reads the narrow bytes alone (docs/quantization.md).
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree, Shaped

from pallas_kernels.platform import platform

Bits: TypeAlias = Literal["fp8", "int8"]
FORMATS: dict[str, np.dtype] = {"fp8": np.dtype(ml_dtypes.float8_e4m3fn), "int8": np.dtype(np.int8)}
"""Name -> type of the matrices."""
LARGEST = {FORMATS["fp8"]: 448.0, FORMATS["int8"]: 127.0}
"""The largest value of each type: that of a column after it is divided by its scale."""
LINEAR = {
    "qkv",
    "o",
    "gate_up",
    "down",
    "lm_head",
    "down_projection",
    "query",
    "projection",
    "out",
    "gate",
    "fc",
    "q",
    "pre_projection",
    "post_projection",
}
"""Fields of weights that are matrices of linear layers. All others keep their precision: embeddings, norms, routers,
biases, convolutions, and the two up-projections of latent attention."""
_WHOLE = {"indexer"}
"""Fields whose own fields keep their precision, too: an indexer ranks tokens by small differences."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix, or a stack of them, as narrow values times scales.

    narrow: fp8 (e4m3) or int8.
    scale: of each output column, in float32.
    dtype: what it has been made from, and the precision of caches that take theirs from weights.
    """

    narrow: Shaped[Array, "*stack in out"]
    scale: Float[Array, "*stack 1 out"]
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return self.narrow.shape

    def __getitem__(self, index: tuple[slice, ...]) -> "Quantized":
        """Some columns, as the last slice has them; those before it take everything."""
        return dataclasses.replace(self, narrow=self.narrow[index], scale=self.scale[index])

    @property
    def size(self) -> int:
        """Elements of the matrix."""
        return self.narrow.size


Weight: TypeAlias = Float[Array, "*stack in out"] | Quantized
"""A matrix of a linear layer."""


def check_weights(weights: object) -> None:
    """Raises ValueError if this is not the name of a format, or None."""
    if weights is not None and (not isinstance(weights, str) or weights not in FORMATS):
        raise ValueError(
            f"weights={weights!r}: must be one of {', '.join(FORMATS)}, or None for the precision of dtype"
        )


def quantize(weight: Float[Array, "*stack in out"], weights: str) -> Quantized:
    """A matrix, or a stack of them, in a format: each column is scaled so that its largest value is the format's.

    weights: a key of `FORMATS`.
    """
    kind = FORMATS[weights]
    wide = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-2, keepdims=True)
    scale = jnp.where(largest > 0, largest / LARGEST[kind], 1.0)
    scaled = jnp.clip(wide / scale, -LARGEST[kind], LARGEST[kind])
    narrow = (jnp.round(scaled) if kind == np.int8 else scaled).astype(kind)
    return Quantized(narrow, scale, np.dtype(weight.dtype))


def widen(weight: Weight) -> Float[Array, "*stack in out"]:
    """The matrix that the narrow values and their scales describe, in float32; of an array, itself."""
    if not isinstance(weight, Quantized):
        return weight
    return weight.narrow.astype(jnp.float32) * weight.scale


def quantized_product(x: Float[Array, "*batch in"], weight: Quantized) -> Float[Array, "*batch out"]:
    """x @ weight, with sums in float32, on which the scales are applied."""
    narrow = weight.narrow
    if platform() == "cpu":
        # Without the barrier, XLA widens all weights in front of the loop, and keeps them.
        x, narrow = lax.optimization_barrier((x, narrow))
    # In a narrow precision, HIGHEST would rule out the fastest products and gain nothing.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.matmul(x, narrow.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)
    return (out * weight.scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def is_quantized(path: Sequence[Any]) -> bool:
    """Whether a leaf of weights is a matrix of a linear layer, by its path."""
    names = [getattr(key, "name", None) for key in path]
    return bool(names) and names[-1] in LINEAR and not _WHOLE & set(names)


def quantize_shapes(shapes: PyTree, weights: str | None) -> PyTree:
    """The `jax.ShapeDtypeStruct`s of weights whose linear layers are in a format; None: as they are."""
    if weights is None:
        return shapes

    def quantized(path: Sequence[Any], leaf: Any) -> Any:
        return jax.eval_shape(partial(quantize, weights=weights), leaf) if is_quantized(path) else leaf

    return jax.tree_util.tree_map_with_path(quantized, shapes)


def largest_matrix(shapes: PyTree) -> jax.ShapeDtypeStruct | None:
    """The largest matrix before it is quantized, which is in memory for a moment as it is read; None: none is."""
    found = jax.tree.leaves(shapes, is_leaf=is_matrix)
    wide = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in found if isinstance(leaf, Quantized)]
    return max(wide, key=lambda leaf: leaf.size * leaf.dtype.itemsize, default=None)


def is_matrix(node: object) -> bool:
    """Whether a node of a pytree of weights is a `Quantized`."""
    return isinstance(node, Quantized)


def refuse_quantized(params: PyTree, user: str) -> None:
    """Raises ValueError if weights are quantized, which `user` does not support."""
    if any(isinstance(node, Quantized) for node in jax.tree.leaves(params, is_leaf=is_matrix)):
        raise ValueError(f"the weights have 8 bits, which {user} does not support: load them without weights=")
