"""Chooses the sizes of an engine by the memory available, and the shapes of its programs."""

import dataclasses
from functools import partial

import jax

from jspec.core import slots
from jspec.core.method import Method
from jspec.core.types import DecodeState, Params
from jspec.generation.options import EngineOptions
from jspec.generation.run import bucket
from jspec.loading import memory
from jspec.models.sizes import tree_bytes
from jspec.runner.slot_state import Sizes, empty_state, lookahead, slot_states

SNAPSHOT_SHARE = 0.1
"""Share of snapshots in the memory left after the slots and the pages of one sequence."""


PIECE = 32
"""Tokens of a piece of a prompt: with four query heads to a key head, it fills a tile of an attention kernel."""


def slot_buckets(num_slots: int, *, fine: bool) -> list[int]:
    """Slot counts for which rounds are compiled, ascending; the last is all of them.

    Rounds of few sequences take about equally long, because reading the weights dominates; those of many take longer
    with each row, also an empty one.

    fine: every 8 up to 64, then every 16; otherwise powers of two.
    """
    powers = [16 << index for index in range(num_slots.bit_length())]
    sizes = [1, 4, *range(8, 64, 8), *range(64, num_slots, 16)] if fine else [1, 4, *powers]
    return [*(size for size in sizes if size < num_slots), num_slots]


def piece_shapes(slots: int, context: int, prefill_tokens: int, least: int) -> list[tuple[int, int]]:
    """Shapes (pieces, columns) of the read programs of a method that reads pieces of prompts: full, half, a quarter.

    least: columns of a piece.
    """
    size = max(min(PIECE, prefill_tokens // 4), least)
    most = slots * -(-context // size)
    return sorted({(max(min(prefill_tokens // part // size, most), 1), size) for part in (1, 2, 4)})


def read_shapes(slots: int, context: int, prefill_tokens: int, least: int) -> list[tuple[int, int]]:
    """Shapes (sequences, columns) of the read programs: few long chunks or many short ones.

    least: columns of the smallest.
    """
    # Full and half programs, and a quarter for one sequence.
    areas = {rows: prefill_tokens // rows for rows in (1, 2, 4, 8, 16)}
    halves = {rows: size // 2 for rows, size in areas.items() if rows <= 4}
    shapes = [*areas.items(), *halves.items(), (1, prefill_tokens // 4)]
    return sorted({(rows, max(min(size, bucket(context)), least)) for rows, size in shapes if rows <= slots})


def fit(
    params: Params, method: Method, sizes: Sizes, options: EngineOptions, free: tuple[int, int] | None
) -> tuple[Sizes, bool]:
    """Adds the pages and snapshots that fit to the sizes; returns them and whether sequences share prefixes.

    If the target's cache has slot state, sharing needs memory for a snapshot; there is at most one per slot.

    Args:
      sizes: slots, context, page size, and whether every burst samples.
      options: made for the model. pages None: as many as all slots can use, or as fit; at least those of one sequence.
      free: free bytes of each device, and its limit; None if unknown.

    Raises:
      ValueError: `options.pages`, or the pages of one sequence, do not fit.
    """
    assert options.memory_fraction is not None
    devices = "" if method.placement is None else f" on each of {len(method.placement.devices)} devices"
    pages = options.pages
    # Bytes of a page, of a snapshot, and of everything else.
    one = _state(params, method, sizes)
    of_page = tree_bytes(jax.eval_shape(partial(_pooled, pages=2), one)) - tree_bytes(one)
    of_snapshot = tree_bytes(slot_states(one.cache))
    fixed = tree_bytes(one) + memory.logit_bytes(method.target, method.drafter, sizes.slots, sizes.context)
    # Snapshots get a share of what is left beside the pages of one sequence.
    least = sizes.pages_per_slot + 2
    share = options.prefix_cache and lookahead(one, method.drafter) is not None
    snapshots = sizes.slots if share and of_snapshot else 0
    available = None if free is None else free[0] - int((1 - options.memory_fraction) * free[1])
    needed = fixed + ((least if pages is None else pages) - 1) * of_page
    if available is not None and snapshots:
        snapshots = min(sizes.slots, max(0, int(SNAPSHOT_SHARE * (available - needed))) // of_snapshot)
    # Pages get the rest.
    if pages is not None and free is not None and needed > free[0]:
        raise ValueError(
            f"pages={pages}, slots={sizes.slots}: the state takes {memory.gigabytes(needed)}{devices}, "
            f"{memory.gigabytes(free[0])} are free; use fewer pages or slots"
        )
    if pages is None:
        pages = max(sizes.slots * sizes.pages_per_slot + 1, least)
        if available is not None:
            pages = min(pages, 1 + (available - fixed - snapshots * of_snapshot) // max(of_page, 1))
            if pages < least:
                raise ValueError(
                    f"slots={sizes.slots}, context={sizes.context}: the state takes {memory.gigabytes(needed)}"
                    f"{devices} with pages for one sequence, {memory.gigabytes(max(0, available))} are available at "
                    f"memory_fraction={options.memory_fraction}; use fewer slots or a shorter context"
                )
    fitting = dataclasses.replace(sizes, pages=pages, snapshots=snapshots)
    return fitting, share and (snapshots > 0 or not of_snapshot)


def _state(params: Params, method: Method, sizes: Sizes) -> DecodeState:
    """The shapes of the state of all slots, with one page; of each device's part if the model is split."""
    shapes = jax.eval_shape(partial(empty_state, method=method, sizes=sizes), params)
    return shapes if method.placement is None else method.placement.local(shapes)


def _pooled(s: DecodeState, *, pages: int) -> DecodeState:
    """The state with pools of `pages` pages."""
    return slots.map_parts(lambda cache: cache.pooled(pages), lambda x: x, s)
