"""Grouped products: backends and shared checks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.dispatch import Operation
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.packed_matmul.layout import INTEGERS, STRIDE, UNITS, word_rows

OPERATION = Operation("grouped_matmul", "pallas_kernels.grouped_matmul", reference.grouped_matmul, ("triton",))


def grouped_matmul(
    x: Float[Array, "T K"],
    weight: Shaped[Array, "X W N"],
    sizes: Int[Array, " X"],
    *,
    scale: Shaped[Array, "X G N"] | None = None,
    group: int | None = None,
    codes: str | None = None,
    zero: Int[Array, "X G N"] | None = None,
    rows: Int[Array, " S"] | None = None,
    activation: Callable[[Array], Array] | None = None,
    exact: bool = False,
    backend: str | None = None,
) -> Float[Array, "S M"]:
    """Multiply the first sizes[0] rows by weight[0], the next sizes[1] by weight[1], and so on.

    Like `lax.ragged_dot`, but the kernel reads only matrices with rows; XLA on a GPU reads all of them. Products of
    float32 run in full float32 on every platform.

    Args:
      weight: in the dtype of x, or in one of 8 bits with a scale, W = K; or words of values of 4 bits, int32, as
        `packed_matmul.pack` makes them of the K rows. Widened inside the kernel.
      sizes: they add up to S.
      scale: factors of each matrix, applied to sums: of whole columns, G = 1, or of groups of their rows. In float32;
        of words also in uint8, exponents of 2 with a bias of 127.
      group: rows of a matrix that share a factor, in a column; the last group may be shorter. None: all. Of words, a
        multiple of 16 or at least K.
      codes: what the values in words mean, a key of `packed_matmul.UNITS`. None: `weight` has no words.
      zero: of words of integers, the value that stands for 0, from 0 to 16, in int8; None: 8 everywhere.
      rows: index in `x` of each row; None: the rows of `x`, S = T.
      activation: of a gated MLP, whose matrices have the columns of the gate first, then the others: the result is
        activation(gate) * other, rounded once, M = N / 2. None: the products themselves, M = N.
      exact: a row's result does not depend on the other rows, to the bit (see `exact_matmul`).
      backend: as in `dispatch.Operation.run`.

    Raises:
      ValueError: the backend is unknown or cannot run, or the arguments do not fit together.
    """
    if codes is not None and (codes not in UNITS or weight.dtype != jnp.int32):
        raise ValueError(
            f"codes={codes!r} of a weight {weight.dtype}{list(weight.shape)}: must be one of {', '.join(UNITS)}, of "
            "words in int32, or None"
        )
    stored = x.shape[1] if codes is None else word_rows(x.shape[1])
    if stored != weight.shape[1] or sizes.shape != weight.shape[:1]:
        height = "K" if codes is None else f"{stored}"
        raise ValueError(
            f"x {x.shape}, weight {weight.shape} and sizes {sizes.shape}: must be [T, K], [X, {height}, N] and [X]"
        )
    if scale is None and codes is None and x.dtype != weight.dtype:
        raise ValueError(f"x and weight must have the same dtype, not {x.dtype} and {weight.dtype}")
    groups = 1 if group is None else -(-x.shape[1] // group)
    expected = (weight.shape[0], groups, weight.shape[2])
    if codes is not None:
        _check_parts(x, scale, zero, group, codes, expected)
    elif zero is not None:
        raise ValueError("zero: requires words of integers, with codes='int4'")
    elif scale is not None and (weight.dtype.itemsize != 1 or scale.shape != expected):
        raise ValueError(
            f"scale {scale.shape} of a weight {weight.dtype}{list(weight.shape)}, group={group}: must be "
            f"{list(expected)}, of 8-bit weights"
        )
    if scale is not None and exact:
        raise ValueError("exact=True: requires a weight of 16 or 32 bits, without scale")
    if activation is not None and weight.shape[2] % 2:
        raise ValueError(f"weight {weight.shape}: must have an even number of columns with an activation")
    options = {"scale": scale, "group": group, "codes": codes, "zero": zero, "rows": rows}
    return OPERATION.run(backend, x, weight, sizes, **options, activation=activation, exact=exact)


def _check_parts(
    x: jax.Array,
    scale: jax.Array | None,
    zero: jax.Array | None,
    group: int | None,
    codes: str,
    expected: tuple[int, ...],
) -> None:
    """Raises ValueError unless scales and zero points of packed matrices have this shape, and types of theirs."""
    if group is not None and (group < 1 or (group < x.shape[1] and group % STRIDE)):
        raise ValueError(f"group={group}: must be a multiple of {STRIDE}, or at least {x.shape[1]}, or None")
    if scale is None or scale.dtype not in (jnp.float32, jnp.uint8) or scale.shape != expected:
        shown = None if scale is None else f"{scale.dtype}{list(scale.shape)}"
        raise ValueError(f"scale {shown}, group={group}: must be float32 or uint8{list(expected)}")
    if zero is not None and (codes != INTEGERS or zero.dtype != jnp.int8 or zero.shape != expected):
        raise ValueError(
            f"zero {zero.dtype}{list(zero.shape)}, codes={codes!r}: must be int8{list(expected)}, with "
            f"codes={INTEGERS!r}"
        )
