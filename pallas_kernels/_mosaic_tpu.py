"""Shared parts of TPU kernels: padding, double buffers, a loop with copies one step ahead, softmax."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._types import Ref

LANES, SUBLANES = 128, 8

State = tuple[jax.Array, jax.Array, jax.Array]
"""Peak [..., M, 1], total [..., M, 1] and weighted sum [..., M, D] of a softmax over M query rows."""
Copies = Callable[[jax.Array | int], tuple[jax.Array | int, Callable[[jax.Array | int], Any]]]
"""The number of copies of a step, and a function for the j-th one."""


def round_up(size: int, multiple: int) -> int:
    """The next multiple."""
    return pl.cdiv(size, multiple) * multiple


def pad(x: jax.Array, axis: int, size: int, mode: str = "constant") -> jax.Array:
    """An array whose axis has `size` elements; the new ones as in `jnp.pad`, zeros by default."""
    return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)], mode=mode)


def double_buffer(shape: tuple[int, ...], dtype: jnp.dtype) -> tuple:
    """Memory for the current step and the next one, and a semaphore for each."""
    return pltpu.VMEM((2, *shape), dtype), pltpu.SemaphoreType.DMA((2,))


def stream(
    begin: jax.Array | int,
    end: jax.Array | int,
    kinds: Sequence[Copies],
    take: Callable[[Any, State], State],
    state: State,
) -> State:
    """The state after `take(i, state)` for each step, while the copies of the next step run; `kinds` has all copies."""

    def run(i, act):
        for copies in kinds:
            count, copy = copies(i)
            lax.fori_loop(0, count, lambda j, _, copy=copy: act(copy(j)), None)

    @pl.when(begin < end)
    def _():
        run(begin, lambda copy: copy.start())

    def step(i, state):
        @pl.when(i + 1 < end)
        def _():
            run(i + 1, lambda copy: copy.start())

        run(i, lambda copy: copy.wait())
        return take(i, state)

    return lax.fori_loop(begin, end, step, state)


def empty_state(rows: tuple[int, ...], dim: int) -> State:
    """The state of an empty softmax."""
    peak, total = jnp.full((*rows, 1), -jnp.inf, jnp.float32), jnp.zeros((*rows, 1), jnp.float32)
    return peak, total, jnp.zeros((*rows, dim), jnp.float32)


def absorb(scores: jax.Array, weigh: Callable[[jax.Array], jax.Array], state: State) -> State:
    """The state after more keys.

    Args:
      scores: [..., M, keys] in base 2; -inf where a row does not see a key.
      weigh: the sum of the values with weights [..., M, keys].
    """
    peak, total, summed = state
    higher = jnp.maximum(peak, scores.max(-1, keepdims=True))
    # A row without visible keys yet has no peak to subtract.
    base = jnp.where(higher == -jnp.inf, 0.0, higher)
    weights, fade = jnp.exp2(scores - base), jnp.exp2(peak - base)
    return higher, total * fade + weights.sum(-1, keepdims=True), summed * fade + weigh(weights)


def own_rows_end(mask_ref: Ref | None, rows: int, last_seen: int, last_node: jax.Array) -> jax.Array | int:
    """How many of the round's own rows a tile of queries sees; without a mask, node n sees up to `last_seen` + n."""
    return rows if mask_ref is not None else jnp.minimum(rows, last_seen + last_node + 1)


def sees_own_rows(
    mask_ref: Ref | None,
    step: jax.Array,
    step_rows: int,
    first_row: jax.Array,
    rows: int,
    group: int,
    last_seen: int,
) -> jax.Array:
    """Which of a step's own rows each of `rows` query rows sees, Bool[rows, step_rows]; `group` of them are a node."""
    if mask_ref is None:
        node = (first_row + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)) // group
        position = step * step_rows + lax.broadcasted_iota(jnp.int32, (1, step_rows), 1)
        return position <= last_seen + node
    if step_rows == mask_ref.shape[1]:
        return mask_ref[...] != 0
    return mask_ref[:, pl.ds(pl.multiple_of(step * step_rows, step_rows), step_rows)] != 0


def page_positions(pages: int, page_size: int, trailing: int) -> jax.Array:
    """Positions of the rows of several pages, [pages, page, 1, ...]."""
    shape = (pages, page_size, *[1] * trailing)
    return lax.broadcasted_iota(jnp.int32, shape, 0) * page_size + lax.broadcasted_iota(jnp.int32, shape, 1)
