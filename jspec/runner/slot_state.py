"""The initial on-device state of an engine's S slots, and its caches.

All slots share the pools of pages. All other state of a sequence in caches and drafters is slot state: it can be copied
to a snapshot at the end of a prefix, but not shared.
"""

import dataclasses
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jspec.core import branches, optional, sharding, slots
from jspec.core.automaton import Automaton
from jspec.core.method import Method, on_devices
from jspec.core.prefill import prefill
from jspec.core.sampling import seeds_to_keys
from jspec.core.types import Cache, DecodeState, Drafter, Params, Prompts, RowSampling

WAITING, EMPTY = 8, 9
"""Finish codes of idle slots: waiting for prefill; empty."""
MAX_ROUNDS = 32
"""Rounds of the longest burst."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of an engine on each group of devices.

    slots: maximum number of running sequences.
    context: tokens of the longest sequence.
    page_size: rows per page.
    pages: pages of each pool, page 0 included.
    snapshots: maximum number of snapshots; 0 without slot state or prefix sharing.
    samples: whether all programs take a temperature, even if no sequence samples: because of the drafter
      (`always_samples`) or the acceptance rule.
    max_rounds: maximum rounds of a burst.
    """

    slots: int
    context: int
    page_size: int
    pages: int = 1
    snapshots: int = 0
    samples: bool = False
    max_rounds: int = MAX_ROUNDS

    @property
    def pages_per_slot(self) -> int:
        """Entries of a sequence's block table."""
        return -(-self.context // self.page_size)


@on_devices
def empty_state(params: Params, *, method: Method, sizes: Sizes) -> DecodeState:
    """A state of empty slots, with pools of free pages."""
    # Everything except the caches: zeros, in the shapes of a state after prefill.
    like = dataclasses.replace(_prefilled_shapes(params, method, sizes), sampling=None)
    target_cache = method.target.init_cache(params.target, sizes.slots, sizes.context, sizes.page_size)
    draft_state = method.drafter.init(params, sizes.slots, sizes.context, sizes.page_size)
    # Pools of pages.
    caches = iter(all_caches((target_cache, draft_state)))
    s = slots.map_parts(lambda _: next(caches).pooled(sizes.pages), zeros, like)
    return dataclasses.replace(s, length=jnp.ones_like(s.length), finish_code=jnp.full_like(s.finish_code, EMPTY))


def always_samples(params: Params, *, method: Method, sizes: Sizes) -> bool:
    """Whether programs need a temperature even if no sequence samples.

    A sampling drafter keeps the distributions of its drafts, so its state then has other parts.
    """

    @on_devices
    def prefilled(params: Params, *, method: Method, samples: bool) -> DecodeState:
        return jax.tree.map(zeros, _prefilled_shapes(params, method, dataclasses.replace(sizes, samples=samples)))

    states = (jax.eval_shape(partial(prefilled, method=method, samples=samples), params) for samples in (False, True))
    without, with_temperature = (jax.tree.structure(state.draft) for state in states)
    return without != with_temperature


def _prefilled_shapes(params: Params, method: Method, sizes: Sizes) -> DecodeState:
    """The shapes of `_prefilled`: a drafter's state has all its parts only after a prefill."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda params: params, params))
    # The shapes do not depend on these sizes, so they should not miss the cache.
    sizes = dataclasses.replace(sizes, pages=1, snapshots=0, max_rounds=MAX_ROUNDS)
    return _shapes_once(structure, tuple((x.shape, x.dtype) for x in leaves), method, sizes)


@lru_cache(maxsize=32)
def _shapes_once(structure: Any, leaves: tuple[tuple[Any, Any], ...], method: Method, sizes: Sizes) -> DecodeState:
    """Cached, because tracing a forward is slow, and an engine needs the same shapes several times."""
    params = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves])
    return jax.eval_shape(partial(_prefilled, method=method, sizes=sizes), params)


def _prefilled(params: Params, *, method: Method, sizes: Sizes) -> DecodeState:
    """The state after prompts of 4 tokens, prefilled in two chunks."""
    count = sizes.slots
    ids, length = jnp.zeros((count, 4), jnp.int32), jnp.full(count, 4, jnp.int32)
    keys, stop = seeds_to_keys(jnp.zeros((count, 2), jnp.uint32)), Automaton(state=jnp.zeros(count, jnp.int16))
    sampling = RowSampling(temperature=jnp.zeros(count)) if sizes.samples else None
    limits = jnp.zeros((count, branches.count(method.drafter)), jnp.int32)
    prompts = Prompts(ids, length, length + 1, keys, stop, sampling, stop, limits)
    return prefill(params, prompts, method=method, capacity=sizes.context, page_size=sizes.page_size, chunk=2)


# Caches of a state


def all_caches(tree: PyTree) -> list[slots.SlotCache]:
    """The caches in a state or in a part of it."""
    return [x for x in jax.tree.leaves(tree, is_leaf=slots.is_slot_cache) if slots.is_slot_cache(x)]


def without_slots(params: Params, method: Method) -> set[str]:
    """The class names of caches of target and draft that lack methods of `slots.SlotCache`."""

    def lacks(x: PyTree) -> bool:
        return hasattr(x, "commit") and not slots.is_slot_cache(x)

    def caches(params: Params) -> PyTree:
        return method.target.init_cache(params.target, 1, 16, 16), method.drafter.init(params, 1, 16, 16)

    leaves = jax.tree.leaves(jax.eval_shape(caches, params), is_leaf=lacks)
    return {type(x).__name__ for x in leaves if lacks(x)}


def slot_states(caches: PyTree) -> list[PyTree]:
    """The shapes of the slot state of each cache in a state, or in a part of it."""
    return [jax.eval_shape(lambda cache: cache.state_of(jnp.int32(0)), cache) for cache in all_caches(caches)]


def empty_snapshots(cache: Cache, count: int, placement: sharding.Placement | None = None) -> list[PyTree]:
    """`count` empty snapshots of the target's cache: its slot states with a new first axis."""

    def empty(cache: Cache) -> list[PyTree]:
        return jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), slot_states(cache))

    return sharding.over(placement, empty, cache)


def lookahead(s: DecodeState, drafter: Drafter) -> int | None:
    """Lookahead of a cache row, in tokens, or None if prefix sharing is impossible.

    Rows are shared only if these later tokens agree as well. If the target's cache has slot state, prefixes with a
    snapshot can be shared. A drafter's cache may have more rows than the target's, so its slot state would belong to
    another prefix: a drafter with slot state rules out sharing.
    """
    # The maximum over the parts; None if one has none.
    tokens = [_lookahead(part, state) for part, state in _parts(drafter, s.draft)]
    known = [number for number in tokens if number is not None]
    return max(known, default=0) if len(known) == len(tokens) else None


def extra_rows(s: DecodeState, drafter: Drafter) -> int:
    """Additional rows of a sequence in the drafter's caches, compared with the target's."""
    return max(
        optional.extra_rows(part, default=int(bool(all_caches(state)))) for part, state in _parts(drafter, s.draft)
    )


def _parts(drafter: Drafter, state: PyTree) -> tuple[tuple[Drafter, PyTree], ...]:
    """The drafter with its state, or its distinct parts if it has branches."""
    branching = optional.as_branching(drafter)
    return ((drafter, state),) if branching is None else branching.parts(state)


def _lookahead(drafter: Drafter, state: PyTree) -> int | None:
    """`lookahead` of one part of a drafter."""
    if jax.tree.leaves(slot_states(state)):
        return None
    tokens = optional.lookahead(drafter)
    return 0 if tokens is None and not all_caches(state) else tokens


def zeros(x: jax.ShapeDtypeStruct) -> Array:
    """An array of zeros; of random keys, those of seed 0."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return seeds_to_keys(jnp.zeros((*x.shape, 2), jnp.uint32))
    return jnp.zeros(x.shape, x.dtype)
