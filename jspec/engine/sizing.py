"""How much of everything an engine has, by the memory that there is; and the shapes that it works with."""

import dataclasses
from functools import partial

import jax

from jspec.core import slots
from jspec.core.types import DecodeState, Params
from jspec.engine import memory, programs
from jspec.engine.executor import Static
from jspec.engine.run import bucket
from jspec.models.sizes import tree_bytes

SNAPSHOT_SHARE = 0.1
"""Share of snapshots in the memory that is left beside the slots and the pages of one sequence."""


@dataclasses.dataclass(frozen=True)
class Room:
    """What an engine has room for.

    pages: of each pool, page 0 included.
    snapshots: places for what the target's cache keeps of a sequence outside of pages; 0 if it keeps nothing, or where
      nothing is shared.
    shares: whether sequences share prefixes.
    """

    pages: int
    snapshots: int
    shares: bool


def read_shapes(slots: int, context: int, prefill_tokens: int, least: int) -> list[tuple[int, int]]:
    """Shapes (sequences, columns) of the programs that read: few long chunks or many short ones.

    least: columns of the smallest.
    """
    areas = {rows: prefill_tokens // rows for rows in (1, 2, 4, 8, 16)}
    halves = {rows: size // 2 for rows, size in areas.items() if rows <= 4}
    wanted = [*areas.items(), *halves.items(), (1, prefill_tokens // 4)]
    return sorted({(rows, max(min(size, bucket(context)), least)) for rows, size in wanted if rows <= slots})


def fit(
    params: Params,
    parts: Static,
    sizes: dict[str, int],
    *,
    pages: int | None,
    fraction: float,
    share: bool,
    free: tuple[int, int] | None,
) -> Room:
    """The room that there is.

    Args:
      sizes: samples, num_slots, context and page_size, as of `programs.empty_state`.
      pages: None: as many as all slots can use, or as fit; at least enough for one sequence.
      fraction: of the memory of each device that may be in use.
      share: whether sequences may share prefixes. Where the target's cache keeps more than pages they do if there is
        memory for a snapshot; there is at most one per slot.
      free: bytes that are free on each device, and its limit; None if they are unknown.

    Raises:
      ValueError: `pages`, or the pages of one sequence, do not fit.
    """
    num_slots, context, placement = sizes["num_slots"], sizes["context"], parts.get("placement")
    of_each = "" if placement is None else f" on each of {len(placement.devices)} devices"
    each = -(-context // sizes["page_size"])
    least, wanted = each + 2, max(num_slots * each + 1, each + 2)
    one = _state(params, parts, sizes)
    of_page = tree_bytes(jax.eval_shape(partial(_pooled, pages=2), one)) - tree_bytes(one)
    fixed = tree_bytes(one) + memory.logit_bytes(parts["target"], parts["drafter"], num_slots, context)
    of_snapshot = tree_bytes(programs.kept_states(one.cache))
    share = share and programs.sharing(one, parts["drafter"]) is not None
    snapshots = num_slots if share and of_snapshot else 0
    budget = None if free is None else free[0] - int((1 - fraction) * free[1])
    needed = fixed + ((least if pages is None else pages) - 1) * of_page
    if budget is not None and snapshots:
        snapshots = min(num_slots, max(0, int(SNAPSHOT_SHARE * (budget - needed))) // of_snapshot)
    if pages is not None and free is not None and needed > free[0]:
        raise ValueError(
            f"pages={pages}, slots={num_slots}: the state takes {memory.gigabytes(needed)}{of_each}, "
            f"{memory.gigabytes(free[0])} are free; use fewer pages or slots"
        )
    if pages is None:
        pages = wanted
        if budget is not None:
            pages = min(wanted, 1 + (budget - fixed - snapshots * of_snapshot) // max(of_page, 1))
            if pages < least:
                raise ValueError(
                    f"slots={num_slots}, context={context}: the state takes {memory.gigabytes(needed)}{of_each} "
                    f"with pages for one sequence, {memory.gigabytes(max(0, budget))} are available at "
                    f"memory_fraction={fraction}; use fewer slots or a shorter context"
                )
    return Room(pages, snapshots, share and (snapshots > 0 or not of_snapshot))


def _state(params: Params, parts: Static, sizes: dict[str, int]) -> DecodeState:
    """The shapes of the state of all slots, with one page; of each device's part if the model is split."""
    shapes = jax.eval_shape(partial(programs.empty_state, **parts, **sizes, pages=1), params)
    placement = parts.get("placement")
    return shapes if placement is None else placement.local(shapes)


def _pooled(s: DecodeState, *, pages: int) -> DecodeState:
    """The state with pools of `pages` pages."""
    return slots.map_parts(lambda cache: cache.pooled(pages), lambda x: x, s)
