"""Weights of 8 or 4 bits: matrices with a scale for each output column, or for groups of its rows.

A `Quantized` takes the place of an array in a pytree of weights. On a GPU the narrow matrix is widened inside the
matrix product, so a round reads the narrow bytes alone (docs/quantization.md).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree, Shaped

from jspec.core.struct import Leaf, leaf, map_leaves, struct
from pallas_kernels.packed_matmul import BLOCK, INTEGERS, PER_WORD, UNITS, centered, factors, pack, packed_matmul
from pallas_kernels.platform import exactness, platform
from pallas_kernels.scaled_matmul import scaled_matmul

WIDE = "wide"
"""Value of `weights` for weights in `dtype`, however a checkpoint stores them."""
FORMATS: dict[str, np.dtype] = {
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
    "int4": np.dtype(ml_dtypes.int4),
}
"""Name -> type of the values."""
PACKED = "int4"
"""The format whose values are packed, eight in a word."""
BLOCKS = "fp8-blocks"
"""What `jspec.bench` calls fp8 with a scale for each 128 rows of a column, as block-scaled checkpoints have it."""
ZERO = 8
"""The packed value of 0, where there are no zero points."""
LARGEST = {FORMATS["fp8"]: 448.0, FORMATS["int8"]: 127.0}
"""The largest value of each type of 8 bits: the largest of a column, or group, divided by its scale."""
WIDEN_ROWS = {"gpu": 256}
"""Rows from which a product with a matrix of groups is faster on a platform if a wide copy of it is made first."""
_FRACTIONS = tuple(1 - 0.05 * step for step in range(9))
"""Candidate factors of the scale of a group of 4 bits; 1 represents its largest value exactly."""


@struct
class Quantized:
    """A matrix, or a stack of them, as narrow values times scales.

    narrow: fp8 (e4m3) or int8; or words of eight values of 4 bits (`pallas_kernels.packed_matmul.layout`) in int32.
    scale: of each output column, or of each group of its rows, in float32; of packed values also in uint8, exponents of
      2 with a bias of 127.
    dtype: of the wide weight, and of caches in the precision of the weights.
    group: rows with one scale, in a column, as in block-scaled checkpoints; None: all of the column.
    zero: the packed value of 0, of each column or group, in int8; None: `ZERO`.
    filling: padding rows of the last block of a packed matrix, or of the last one of each device;
      None: it is not packed.
    codes: what packed values mean, a key of `pallas_kernels.packed_matmul.UNITS`.
    """

    narrow: Shaped[Array, "*stack stored out"]
    scale: Shaped[Array, "*stack groups out"] = leaf(if_many=True)
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    group: int | None = dataclasses.field(default=None, metadata={"static": True})
    zero: Int[Array, "*stack groups out"] | None = leaf(if_many=True, default=None)
    filling: int | None = dataclasses.field(default=None, metadata={"static": True})
    codes: str = dataclasses.field(default=INTEGERS, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        if self.filling is None:
            return self.narrow.shape
        *stack, words, columns = self.narrow.shape
        rows = words * PER_WORD - self.filling
        if self.group is not None and BLOCK % self.group == 0:
            # Blocks may be filled on several devices. Groups are not, but for the last one of a matrix.
            rows = self.scale.shape[-2] * self.group - self.filling % self.group
        return *stack, rows, columns

    def __getitem__(self, index: tuple[slice, ...]) -> "Quantized":
        """Some columns, as the last slice has them; those before it take everything."""
        zero = None if self.zero is None else self.zero[index]
        return dataclasses.replace(self, narrow=self.narrow[index], scale=self.scale[index], zero=zero)

    @property
    def size(self) -> int:
        """Elements of the matrix."""
        return math.prod(self.shape)


Weight: TypeAlias = Float[Array, "*stack in out"] | Quantized
"""A matrix of a linear layer."""


def check_weights(weights: object, *others: str) -> None:
    """Raises ValueError if this is neither the name of a format, nor one of `others`, nor None."""
    known = (*FORMATS, *others)
    if weights is not None and (not isinstance(weights, str) or weights not in known):
        raise ValueError(f"weights={weights!r}: must be one of {', '.join(known)}, or None")


def quantize(weight: Float[Array, "*stack in out"], weights: str) -> Quantized:
    """A matrix, or a stack of them, in a format: each column is scaled to the format's largest value.

    weights: a key of `FORMATS` (`PACKED` has groups); or `BLOCKS`, for random weights.
    """
    if weights == BLOCKS:
        return _quantize_groups(weight, "fp8")
    if weights == PACKED:
        values = _quantize_groups(weight, PACKED)
        packed = pack(values.narrow + ZERO)
        return dataclasses.replace(values, narrow=packed, filling=-weight.shape[-2] % BLOCK)
    return _quantize_columns(weight, weights)


def _quantize_columns(weight: Float[Array, "*stack in out"], weights: str) -> Quantized:
    """A matrix in a format, with a scale for each column."""
    kind = FORMATS[weights]
    wide = weight.astype(jnp.float32)
    if weights == PACKED:
        scale = _scale_of_4_bits(wide)
        # Not all platforms have arrays of 4 bits.
        return Quantized(_rounded_to_4_bits(wide, scale).astype(np.int8), scale, np.dtype(weight.dtype))
    # Eight bits: the largest value of a column gets the largest code.
    largest = jnp.max(jnp.abs(wide), axis=-2, keepdims=True)
    scale = jnp.where(largest > 0, largest / LARGEST[kind], 1.0)
    scaled = jnp.clip(wide / scale, -LARGEST[kind], LARGEST[kind])
    narrow = (scaled if weights == "fp8" else jnp.round(scaled)).astype(kind)
    return Quantized(narrow, scale, np.dtype(weight.dtype))


def _scale_of_4_bits(wide: Float[Array, "*stack in out"]) -> Float[Array, "*stack 1 out"]:
    """The scale of each column with the least squared error, of a few (Choukroun et al., arXiv 1902.06822).

    4 bits reach from -8 to 7, so the largest value becomes -8, by a negative scale if it is positive. A smaller scale
    clips this value and a few others, and rounds the rest more finely.
    """
    # Four bits: the outermost value is -8, times the fraction with the least error.
    place = jnp.argmax(jnp.abs(wide), axis=-2, keepdims=True)
    outermost = jnp.take_along_axis(wide, place, axis=-2)
    unit = jnp.where(outermost != 0, outermost / -8, 1.0)

    def error(fraction: float) -> Float[Array, "*stack 1 out"]:
        scale = unit * fraction
        return jnp.sum((_rounded_to_4_bits(wide, scale) * scale - wide) ** 2, axis=-2, keepdims=True)

    best = jnp.argmin(jnp.stack([error(fraction) for fraction in _FRACTIONS]), axis=0)
    return unit * jnp.asarray(_FRACTIONS, jnp.float32)[best]


def _rounded_to_4_bits(
    wide: Float[Array, "*stack in out"], scale: Float[Array, "*stack 1 out"]
) -> Float[Array, "*stack in out"]:
    """The nearest multiples of the scale within 4 bits."""
    return jnp.clip(jnp.round(wide / scale), -8, 7)


def _quantize_groups(weight: Float[Array, "*stack in out"], weights: str) -> Quantized:
    """A format with a scale for each `BLOCK` rows of a column, or for the whole column if it has no more."""
    *stack, rows, columns = weight.shape
    if rows <= BLOCK:
        return _quantize_columns(weight, weights)
    padded = jnp.pad(weight, [(0, 0)] * len(stack) + [(0, -rows % BLOCK), (0, 0)])
    quantized = _quantize_columns(padded.reshape(*stack, -1, BLOCK, columns), weights)
    narrow = quantized.narrow.reshape(*stack, -1, columns)[..., :rows, :]
    return Quantized(narrow, quantized.scale[..., 0, :], quantized.dtype, BLOCK)


def widen(weight: Weight) -> Float[Array, "*stack in out"]:
    """The wide matrix, in float32, of narrow values and their scales; of an array, itself."""
    if not isinstance(weight, Quantized):
        return weight

    rows, narrow, scale = weight.shape[-2], weight.narrow, factors(weight.scale)
    # Unpack words.
    if weight.filling is not None:
        if rows != narrow.shape[-2] * PER_WORD - weight.filling:
            raise ValueError("the rows of a packed matrix are split over devices; widen it on one of them")
        narrow = centered(narrow, rows, weight.zero, group=weight.group, codes=weight.codes)
    # Scales of groups.
    if weight.group is not None:
        scale = jnp.repeat(scale, weight.group, axis=-2)[..., :rows, :]
    return narrow.astype(jnp.float32) * UNITS[weight.codes] * scale


def quantized_product(x: Float[Array, "*batch in"], weight: Quantized) -> Float[Array, "*batch out"]:
    """x @ weight, with sums in float32; the scales are applied to the sums, or of many rows to the matrix."""
    rows, inner = x.reshape(-1, x.shape[-1]), x.shape[-1]
    assert weight.codes == INTEGERS, "others are those of experts"
    if weight.group is not None and len(rows) >= WIDEN_ROWS.get(platform(), math.inf):
        # XLA must neither hoist the copies of all layers out of a loop nor widen again in each tile of the product.
        rows, narrow = lax.optimization_barrier((rows, weight.narrow))
        wide = lax.optimization_barrier(widen(dataclasses.replace(weight, narrow=narrow)).astype(x.dtype))
        out = jnp.matmul(rows, wide, precision=exactness(x))
    elif weight.filling is None:
        out = scaled_matmul(rows, weight.narrow, weight.scale, group=weight.group or inner)
    else:
        out = packed_matmul(rows, weight.narrow, weight.scale, weight.zero, group=weight.group or inner)
    return out.reshape(*x.shape[:-1], -1)


def quantize_shapes(shapes: PyTree, weights: str | None) -> PyTree:
    """The `jax.ShapeDtypeStruct`s of weights whose linear layers are in a format; anything else: as they are."""
    if weights not in (*FORMATS, BLOCKS):
        return shapes

    @functools.cache  # Layers are alike.
    def of(shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return jax.eval_shape(partial(quantize, weights=weights), jax.ShapeDtypeStruct(shape, dtype))

    return map_leaves(lambda options, shape: of(shape.shape, shape.dtype) if options.linear else shape, shapes)


def check_whole_groups(
    field: str, rows: int, group: int | None, devices: int, packed: bool, fits: Callable[[int], bool]
) -> None:
    """Raises ValueError if a split of the rows over devices would cut groups, or packed blocks.

    field: of the weights, for the message.
    fits: whether the rest of the model can be split over a number of devices.
    """
    # Devices hold whole groups.
    unit = math.lcm(group or 1, BLOCK if packed else 1)
    if devices == 1 or rows % (devices * unit) == 0:
        return
    fitting = [str(n) for n in range(1, max(1, rows // unit) + 1) if n == 1 or (rows % (n * unit) == 0 and fits(n))]
    reason = f"one scale for each {group}" if unit == group else f"{unit} packed together"
    raise ValueError(
        f"tensor={devices}: {field} has {rows} rows with {reason}; must be {', '.join(fitting)}; weights='wide' and "
        "formats of 8 bits have no such groups"
    )


def check_split_groups(shapes: PyTree, devices: int) -> None:
    """Raises ValueError if a split of the rows over devices would cut groups, or packed blocks.

    shapes: what `quantize_shapes` returns.
    """

    def check(options: Leaf, matrix: Any) -> None:
        if isinstance(matrix, Quantized) and options.split == -2:
            packed = matrix.filling is not None
            check_whole_groups(options.name, matrix.shape[-2], matrix.group, devices, packed, fits=lambda _: True)

    map_leaves(check, shapes, is_leaf=is_matrix)


def largest_matrix(shapes: PyTree) -> jax.ShapeDtypeStruct | None:
    """The largest matrix before it is quantized: in memory for a moment while reading; None: none is."""
    leaves = jax.tree.leaves(shapes, is_leaf=is_matrix)
    wide = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Quantized)]
    return max(wide, key=lambda leaf: leaf.size * leaf.dtype.itemsize, default=None)


def is_matrix(node: object) -> bool:
    """Whether a node of a pytree of weights is a `Quantized`."""
    return isinstance(node, Quantized)


def dtype_names(params: PyTree) -> list[str]:
    """The dtypes of weights, or of their shapes; for packed values, of the value and not of its words."""
    leaves = jax.tree.leaves(params, is_leaf=is_matrix)
    packed = [leaf for leaf in leaves if isinstance(leaf, Quantized) and leaf.filling is not None]
    others = [leaf for leaf in leaves if not any(leaf is words for words in packed)]
    names = {str(leaf.dtype) for leaf in jax.tree.leaves(others) if hasattr(leaf, "dtype")}
    return sorted(names | {name for leaf in packed for name in (str(leaf.scale.dtype), leaf.codes)})


def has_quantized(params: PyTree) -> bool:
    """Whether some weights are quantized."""
    return any(isinstance(node, Quantized) for node in jax.tree.leaves(params, is_leaf=is_matrix))


def refuse_quantized(params: PyTree, user: str) -> None:
    """Raises ValueError if weights are quantized; `user` does not support it."""
    if has_quantized(params):
        raise ValueError(f"the weights are quantized, which {user} does not support: load them with weights='wide'")
