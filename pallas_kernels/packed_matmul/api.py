"""Products with packed 4-bit matrices: backends and shared checks."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Operation
from pallas_kernels.packed_matmul import reference
from pallas_kernels.packed_matmul.layout import STRIDE, word_rows

OPERATION = Operation("packed_matmul", "pallas_kernels.packed_matmul", reference.packed_matmul, ("triton",))


def packed_matmul(
    x: Float[Array, "T K"],
    words: Int[Array, "W N"],
    scale: Float[Array, "G N"],
    zero: Int[Array, "G N"] | None = None,
    *,
    group: int,
    backend: str | None = None,
) -> Float[Array, "T N"]:
    """x @ ((values - zero) * scale), with a scale and a zero point for each `group` rows of a column.

    The products of a group are summed in float32, then scaled. The kernel unpacks words in registers; XLA makes a copy
    of the matrix in 8 bits.

    Args:
      words: int32, as `layout.pack` makes them of the K rows.
      scale: float32; row g belongs to the rows from g * group on, and the last group may be shorter.
      zero: int8, the value that stands for 0, from 0 to 16; None: 8 everywhere.
      group: a multiple of 16; or at least K for one scale per column.
      backend: as in `dispatch.Operation.run`.

    Raises:
      ValueError: the backend is unknown or cannot run, or the arguments do not fit together.
    """
    inner = x.shape[1]
    if words.ndim != 2 or len(words) != word_rows(inner) or words.dtype != jnp.int32:
        raise ValueError(
            f"x {x.shape} and words {words.dtype}{list(words.shape)}: must be [T, K] and int32 [W, N], with "
            f"W = {word_rows(inner)} for K = {inner}"
        )
    if group < 1 or (group < inner and group % STRIDE):
        raise ValueError(f"group={group}: must be a multiple of {STRIDE}, or at least {inner}, the rows of the matrix")
    expected = (-(-inner // group), words.shape[1])
    if scale.shape != expected or (zero is not None and zero.shape != expected):
        raise ValueError(
            f"scale {scale.shape}, zero {None if zero is None else zero.shape}, words {words.shape}, group={group}: "
            f"scale and zero must be {expected}"
        )
    return OPERATION.run(backend, x, words, scale, zero, group=group)
