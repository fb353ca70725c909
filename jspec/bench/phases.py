"""The phases of a round, each repeated alone inside one program, to measure where the time of a round goes."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from jspec.bench.machine import WARM_UP
from jspec.cache import RecurrentCache
from jspec.core.loop import verifies_many
from jspec.core.method import Method
from jspec.core.round import accept_drafts, commit_round, draft, extend, verify
from jspec.core.types import Cache, Committed, DecodeState, DraftTree, ForwardOutput, Params
from jspec.core.xla_options import LoopProgram
from jspec.runner.slot_state import zeros


@dataclasses.dataclass(frozen=True)
class Phases:
    """The steps of a round, as functions (params, inputs, cache to write) -> (result, that cache).

    They work with drafters whose `draft` does not change the state and whose state has its cache, if any, in `cache`.
    """

    method: Method

    def draft(self, params: Params, inputs: DecodeState, cache: None) -> tuple[DraftTree, None]:
        """State -> tree."""
        draft_tree, _ = draft(params, inputs, method=self.method)
        return draft_tree, cache

    def verify(self, params: Params, inputs: tuple[DecodeState, DraftTree], cache: None) -> tuple[ForwardOutput, None]:
        """State and tree -> the target's output."""
        return verify(params, *inputs, method=self.method), cache

    def accept_commit(
        self, params: Params, inputs: tuple[DecodeState, DraftTree, ForwardOutput], cache: Cache
    ) -> tuple[tuple[DecodeState, Committed], Cache]:
        """State without caches, tree, output; the target's cache -> state and what was committed; the cache."""
        s, draft_tree, out = inputs
        s = dataclasses.replace(s, cache=cache)
        decision = accept_drafts(s, draft_tree, out, method=self.method)
        s, committed = commit_round(s, out, decision)
        return (dataclasses.replace(s, cache=None), committed), s.cache

    def extend(
        self, params: Params, inputs: tuple[DecodeState, Committed], cache: Cache | None
    ) -> tuple[PyTree, Cache | None]:
        """State without the drafter's cache, what was committed; the cache -> the drafter's state; the cache."""
        s, committed = inputs
        s = dataclasses.replace(s, draft=with_cache(s.draft, cache))
        return without_cache(extend(params, s, committed, method=self.method).draft)


def without_cache(state: PyTree) -> tuple[PyTree, Cache | None]:
    """A drafter's state without its cache, and the cache; None if it has none."""
    return (dataclasses.replace(state, cache=None), state.cache) if hasattr(state, "cache") else (state, None)


def with_cache(state: PyTree, cache: Cache | None) -> PyTree:
    """Puts a cache back into the state."""
    return dataclasses.replace(state, cache=cache) if hasattr(state, "cache") else state


Phase = Callable[[Params, PyTree, PyTree], tuple[PyTree, PyTree]]
"""A method of `Phases`."""


@partial(LoopProgram, static_argnames=("phase", "count"), donate_argnames=("cache",))
def repeat(
    params: Params, inputs: PyTree, cache: Cache | None, *, phase: Phase, count: int
) -> tuple[PyTree, Cache | None]:
    """Runs a phase `count` times in sequence; returns the last result.

    A compiler could make the phase look cheaper than it is, by optimizing such a loop. Therefore:
    - Nothing can be hoisted: each run adds a data-dependent zero to every input, computed from the previous result, so
      XLA knows neither the zero nor the repetition of inputs. The addition is fused into the readers of the input.
      The pools of keys and values are too large for it, and are read through page tables; the zero goes there; in
      recurrent layers the inputs of the convolution get it. Weights are the same in every round of `decode` as well.
    - Nothing can be omitted: the loop carries the whole result and returns it.
    - No run can overlap with the next one: it waits for the zero.
    """

    # Each run feeds a zero from its result to the next one.
    def body(_: int, loop: tuple[PyTree, Cache | None, Array]) -> tuple[PyTree, Cache | None, Array]:
        _, cache, zero = loop
        result, cache = phase(params, add_zero(inputs, zero), cache)
        return result, cache, zero_of(result)

    result, _ = jax.eval_shape(phase, params, inputs, cache)
    first = jax.tree.map(zeros, result)
    result, cache, _ = lax.fori_loop(0, count, body, (first, cache, jnp.int32(0)))
    return result, cache


def add_zero(inputs: PyTree, zero: Int[Array, ""]) -> PyTree:
    """The same values, made to depend on `zero`."""

    def add(x: PyTree) -> PyTree:
        # Caches are read through page tables; add the zero there.
        if isinstance(x, RecurrentCache):
            return dataclasses.replace(x, windows=x.windows + zero.astype(x.windows.dtype))
        if is_cache(x):
            return dataclasses.replace(x, page_table=x.page_table + zero)
        return x + zero.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.number) else x

    return jax.tree.map(add, inputs, is_leaf=is_cache)


def zero_of(result: PyTree) -> Int[Array, ""]:
    """0, computed from the first element of the first array: no token and no logit exceeds 1e30."""
    first = jax.tree.leaves(result)[0]
    return (first[(0,) * first.ndim].astype(jnp.float32) > 1e30).astype(jnp.int32)


def is_cache(x: object) -> bool:
    """Whether a part of a state is a cache of a single kind, not an array and not a `HybridCache`."""
    return hasattr(x, "page_table") or isinstance(x, RecurrentCache)


def time_phases(
    params: Params, s: DecodeState, phases: Phases, count: int, repeats: int
) -> tuple[dict[str, list[float]], DecodeState]:
    """Seconds of each phase of the round after `s`: `repeats` means over `count` runs. And the state after the round.

    The buffers of `s` are donated.
    """
    seconds: dict[str, list[float]] = {}
    times = repeat.variant(many=verifies_many(params, s, phases.method))

    # Time `repeats` runs after the warm-up.
    def run(name: str, inputs: PyTree, cache: PyTree = None) -> tuple[PyTree, PyTree]:
        seconds[name], result = [], None
        for turn in range(WARM_UP + repeats):
            result = None  # frees the previous one
            began = time.perf_counter()
            phase = getattr(phases, name)
            result, cache = jax.block_until_ready(times(params, inputs, cache, phase=phase, count=count))
            if turn >= WARM_UP:
                seconds[name].append((time.perf_counter() - began) / count)
        return result, cache

    # Each phase gets the result of the one before.
    drafts = phases.method.drafter.depth > 0
    draft_tree, _ = run("draft", s)
    out, _ = run("verify", (s, draft_tree))
    bare = dataclasses.replace(s, cache=None, draft=None)
    (after, committed), cache = run("accept_commit", (bare, draft_tree, out), s.cache)
    state = s.draft
    if drafts:
        bare, draft_cache = without_cache(s.draft)
        inputs = dataclasses.replace(after, draft=bare), committed
        state, draft_cache = run("extend", inputs, draft_cache)
        state = with_cache(state, draft_cache)
    else:
        del seconds["draft"]
    return seconds, dataclasses.replace(after, cache=cache, draft=state)
