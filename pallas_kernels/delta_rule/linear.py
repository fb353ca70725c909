"""What XLA and the kernels share: sums and inverses, and what kernels refuse."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped


def refuse_tree(
    most: int, state: jax.Array | None, q: jax.Array, *others: jax.Array | None, interpret: object = None
) -> str | None:
    """None, or why a kernel for `most` nodes cannot run these arguments of `tree_delta_rule`."""
    if q.shape[1] > most:
        return f"q has {q.shape[1]} nodes: must be at most {most}"
    _, _, _, _, _, earlier, *_ = (*others, None)
    return None if earlier is None else "earlier is given: must be None"


def suffix_sum(x: Shaped[Array, "*batch R"]) -> Shaped[Array, "*batch R"]:
    """For each element the sum of those after it."""
    moved = jnp.concatenate([x[..., 1:], jnp.zeros_like(x[..., :1])], axis=-1)
    return lax.cumsum(moved, axis=x.ndim - 1, reverse=True)


def unit_lower_inverse(lower: Float[Array, "*batch N N"], count: int | None = None) -> Float[Array, "*batch N N"]:
    """(I + lower)^-1 of strictly lower triangular matrices, by matrix products alone.

    Blocks on the diagonal are inverted, their size doubled each time: the inverse of [[P, 0], [M, Q]] holds P^-1, Q^-1
    and, below the diagonal, -Q^-1 M P^-1. No power of `lower` is taken: its entries may be large where those of the
    inverse are small.

    Args:
      count: rows before the first one that is all zeros, as are those after it; None: unknown.
    """
    # A TPU kernel has matrices only, no vectors.
    row, column = (lax.broadcasted_iota(jnp.int32, lower.shape[-2:], axis) for axis in (0, 1))
    inverse = jnp.broadcast_to((row == column).astype(lower.dtype), lower.shape)
    size = 1
    while size < (count or lower.shape[-1]):
        block = row // size
        below = jnp.where((block % 2 == 1) & (column // size == block - 1), lower, 0)
        if size == 1:
            inverse = inverse - below
        else:
            inverse = inverse - _matmul(_matmul(inverse, below), inverse)
        size *= 2
    return inverse


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
