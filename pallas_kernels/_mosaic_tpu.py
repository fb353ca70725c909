"""Shared parts of TPU kernels: padding, double buffers, a loop with copies one step ahead, softmax, attention."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import platform
from pallas_kernels._types import Ref
from pallas_kernels.attention import scores_in_base_2

LANES, SUBLANES = 128, 8
DTYPES = ("bfloat16", "float32")
"""Types of the operands of attention."""

State = tuple[jax.Array, jax.Array, jax.Array]
"""Peak [..., M, 1], total [..., M, 1] and weighted sum [..., M, D] of a softmax over M query rows."""
Copies = Callable[[jax.Array | int], tuple[jax.Array | int, Callable[[jax.Array | int], Any]]]
"""The number of copies of a step, and a function for the j-th one."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call of attention is divided."""

    block_m: int
    """Query rows of a program."""
    step_pages: int
    """Pages of the prefix per step."""
    step_rows: int
    """The round's own rows per step."""


def refuse_dtypes(**arrays: jax.Array | None) -> str | None:
    """Why the compiled kernel cannot take one of these arrays; None if it can."""
    for name, array in arrays.items():
        if array is not None and array.dtype.name not in DTYPES:
            return f"{name} is {array.dtype.name}: must be one of {', '.join(DTYPES)}"
    return None


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


Planes = tuple[tuple[int, ...], ...]
KEYS_AND_VALUES: Planes = ((0,), (1,))
"""Where rows are in their arrays: two planes."""
LATENTS: Planes = ((),)
"""One plane, without an axis of its own: keys are also the values."""


def all_of(planes: Planes) -> tuple[slice, ...]:
    """The index of all planes."""
    return (slice(None),) * len(planes[0])


def mask_operand(
    mask: jax.Array | None, group: int, folded: int, rows: int, block_m: int
) -> tuple[jax.Array | None, pl.BlockSpec | None]:
    """The mask of own rows, with a row for each of `folded` query rows, `group` of them a node, and its part of a tile.

    rows: the round's own, padded.
    """
    if mask is None:
        return None, None
    shared = mask.shape[0] == 1
    mask = pad(pad(jnp.repeat(mask.astype(jnp.int8), group, axis=1), 1, folded), 2, rows)
    return mask, pl.BlockSpec((None, block_m, rows), lambda b, t, *_: (0 if shared else b, t, 0))


@dataclasses.dataclass(frozen=True)
class Steps:
    """How a program copies rows, step by step, to a double buffer and its semaphores.

    planes: where rows are in the buffer.
    """

    buffer: Ref
    semaphores: Ref
    planes: Planes

    @property
    def shape(self) -> tuple[int, ...]:
        """What a step has of a plane: rows, or pages and rows, and the shape of a row."""
        return self.buffer.shape[1 + len(self.planes[0]) :]

    def place(self, i: jax.Array | int, *of_step: jax.Array | int) -> tuple[Any, Any]:
        """The place of step i in the buffer, or a place of the step, and its semaphore."""
        at = self.buffer.at[i % 2, *all_of(self.planes), *of_step] if of_step else self.buffer.at[i % 2]
        return at, self.semaphores.at[i % 2]

    def read(self, i: jax.Array | int, *shape: int) -> list[jax.Array]:
        """The planes of step i, of this shape if it is not empty."""
        rows = [self.buffer[i % 2, *plane] for plane in self.planes]
        return [plane.reshape(shape) for plane in rows] if shape else rows

    def keep(self, i: jax.Array | int, used: jax.Array) -> None:
        """Masks the values of step i: 0 * NaN is NaN, and a free page or an old buffer may hold it."""
        values = self.buffer[i % 2, *self.planes[-1]]
        self.buffer[i % 2, *self.planes[-1]] = jnp.where(used, values, jnp.zeros_like(values))


@dataclasses.dataclass(frozen=True)
class Seen:
    """The positions of the prefix that the rows of a tile see.

    upper: the committed ones.
    lower: the first one that a row sees; None: 0.
    start_ref: where the window of each row begins; None: at `lower`.
    keep_first: positions at the beginning that are seen, too.
    node_masks: the copies of a step's masks, and the mask of the step for each row; None: all positions are seen.
    """

    upper: jax.Array
    lower: jax.Array | None = None
    start_ref: Ref | None = None
    keep_first: int = 0
    node_masks: tuple[Copies, Callable[[jax.Array | int], jax.Array]] | None = None

    def within(self, position: jax.Array, start: jax.Array | None) -> jax.Array:
        """Whether these positions are committed, and after `start` or among the first ones."""
        if start is None:
            return position < self.upper
        within = position >= start
        within = within | (position < self.keep_first) if self.keep_first else within
        return within & (position < self.upper)

    def of_step(self, i: jax.Array | int, position: jax.Array) -> jax.Array:
        """The positions of step i that each row sees."""
        visible = self.within(position, self.lower if self.start_ref is None else self.start_ref[...])
        return visible if self.node_masks is None else visible & self.node_masks[1](i)


def attend_prefix(
    page_at: Callable[[jax.Array], Ref], pages: Steps, seen: Seen, take: Callable[..., State], state: State
) -> State:
    """The state after the visible positions of the prefix, in steps of several pages.

    If the windows begin after the steps of the first positions, the loop counts those as if they were just before the
    first step of the windows, so that the next step is always the next copy.

    page_at: a page of the sequence in the pool.
    """
    step_pages, page_size, *row = pages.shape
    keys, upper, lower, keep_first = step_pages * page_size, seen.upper, seen.lower, seen.keep_first
    first = first_steps = 0
    if lower is not None:
        lower = jnp.clip(lower, 0, upper)
        seen = dataclasses.replace(seen, lower=lower)
        first = lower // keys
        first_steps = jnp.minimum(pl.cdiv(keep_first, keys), first) if keep_first else 0

    def place(i):
        return i - jnp.where(i < first, first - first_steps, 0) if keep_first else i

    def copies(i):
        page = place(i) * step_pages
        end = jnp.where(i < first, keep_first, upper) if keep_first else upper

        def copy(j):
            return pltpu.make_async_copy(page_at(page + j), *pages.place(i, j))

        return jnp.minimum(pl.cdiv(end, page_size) - page, step_pages), copy

    def step(i, state):
        at = place(i) * keys

        @pl.when(at + keys > upper if lower is None else (at < lower) | (at + keys > upper))
        def _():
            pages.keep(i, seen.within(at + page_positions(step_pages, page_size, len(row)), lower))

        visible = seen.of_step(i, at + lax.broadcasted_iota(jnp.int32, (1, keys), 1))
        return take(*pages.read(i, keys, *row), visible, state)

    kinds = (copies,) if seen.node_masks is None else (copies, seen.node_masks[0])
    return stream(first - first_steps, pl.cdiv(upper, keys), kinds, step, state)


def attend_own_rows(
    own_ref: Ref,
    mask_ref: Ref | None,
    steps: Steps,
    first_row: jax.Array,
    last_seen: int,
    group: int,
    take: Callable[..., State],
    state: State,
    *,
    shared: bool = False,
) -> State:
    """The state after the round's own rows; without a mask, node n sees the rows up to `last_seen` + n.

    shared: whether some rows, of keys and values, are those of other sequences.
    """
    planes, step_rows, block_m = all_of(steps.planes), steps.shape[0], state[0].shape[-2]
    rows = own_ref.shape[len(planes)]

    def copies(i):
        rows_of_step = own_ref.at[*planes, pl.ds(pl.multiple_of(i * step_rows, step_rows), step_rows)]
        return 1, lambda _: pltpu.make_async_copy(rows_of_step, *steps.place(i))

    def step(i, state):
        visible = sees_own_rows(mask_ref, i, step_rows, first_row, block_m, group, last_seen)
        if not shared:
            return take(*steps.read(i), visible, state)
        # They may hold anything, and 0 * NaN is NaN.
        keys, values = steps.read(i)
        return take(keys, jnp.where(visible.any(0)[:, None, None], values, 0), visible, state)

    last_node = (first_row + block_m - 1) // group
    end = rows if mask_ref is not None else jnp.minimum(rows, last_seen + last_node + 1)
    return stream(0, pl.cdiv(end, step_rows), (copies,), step, state)


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


def absorb_rows(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
    state: State,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> State:
    """The state of queries [M, D] or [K, M, D] after keys and values, [keys, D] or [keys, K, D] each, some visible."""
    heads = ((0,), (1,)) if q.ndim == 3 else ((), ())

    def dot(a, b, axis):
        dims, exact = (((a.ndim - 1,), (axis,)), heads), platform.exactness(a)
        return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)

    scores = scores_in_base_2(dot(q, keys.astype(q.dtype), keys.ndim - 1), scale, soft_cap)
    scores = jnp.where(visible if q.ndim == 2 else visible[None], scores, -jnp.inf)
    return absorb(scores, lambda weights: dot(weights.astype(q.dtype), values.astype(q.dtype), 0), state)


def page_positions(pages: int, page_size: int, trailing: int) -> jax.Array:
    """Positions of the rows of several pages, [pages, page, 1, ...]."""
    shape = (pages, page_size, *[1] * trailing)
    return lax.broadcasted_iota(jnp.int32, shape, 0) * page_size + lax.broadcasted_iota(jnp.int32, shape, 1)
