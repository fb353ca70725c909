"""The phases of a round, each on its own and repeated inside one program, to see where a round's time goes."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jspec.bench.machine import WARM_UP
from jspec.cache import RecurrentCache
from jspec.core import decode
from jspec.core.types import Accept, Cache, Committed, DecodeState, Drafter, DraftTree, ForwardOutput, Params, Target
from jspec.core.xla_options import LoopProgram


@dataclasses.dataclass(frozen=True)
class Phases:
    """The steps of a round, as functions (params, inputs, cache that is written) -> (result, that cache).

    A drafter whose `draft` returns the state it was given, and whose state has its cache, if any, as `cache`, suits.
    """

    target: Target
    drafter: Drafter
    accept: Accept

    def draft(self, params: Params, given: DecodeState, cache: None) -> tuple[DraftTree, None]:
        """State -> tree."""
        draft_tree, _ = decode.draft(params, given, drafter=self.drafter)
        return draft_tree, cache

    def verify(self, params: Params, given: tuple[DecodeState, DraftTree], cache: None) -> tuple[ForwardOutput, None]:
        """State and tree -> the target's output."""
        return decode.verify(params, *given, target=self.target, drafter=self.drafter), cache

    def accept_commit(
        self, params: Params, given: tuple[DecodeState, DraftTree, ForwardOutput], cache: Cache
    ) -> tuple[tuple[DecodeState, Committed], Cache]:
        """State without caches, tree, output and the target's cache -> state, what was committed; the cache written."""
        s, draft_tree, out = given
        s = dataclasses.replace(s, cache=cache)
        decision = decode.accept_drafts(s, draft_tree, out, accept=self.accept)
        s, committed = decode.commit_round(s, out, decision)
        return (dataclasses.replace(s, cache=None), committed), s.cache

    def extend(self, params: Params, given: tuple[DecodeState, Committed], cache: Any) -> tuple[Any, Any]:
        """State whose draft lacks its cache, what was committed, and that cache -> the draft's state; cache written."""
        s, committed = given
        s = dataclasses.replace(s, draft=with_cache(s.draft, cache))
        return apart(decode.extend(params, s, committed, drafter=self.drafter).draft)


def apart(state: Any) -> tuple[Any, Any]:
    """A drafter's state without its cache, and that; None where it has none."""
    return (dataclasses.replace(state, cache=None), state.cache) if hasattr(state, "cache") else (state, None)


def with_cache(state: Any, cache: Any) -> Any:
    """The state that `apart` has taken apart."""
    return dataclasses.replace(state, cache=cache) if hasattr(state, "cache") else state


def _repeat(params: Params, given: Any, cache: Any, *, phase: Any, count: int) -> tuple[Any, Any]:
    """A phase `count` times, one after the other; the last result.

    What a compiler may do to such a loop would make the phase look cheaper than it is, so:
    - nothing can be hoisted: each run adds a zero to all that it is given, and that zero is computed from the result of
      the run before, so that XLA knows neither that it is one nor that the operands repeat. The addition is fused into
      what reads the operand. The pools of keys and values, too large for that, are read through page tables, which
      have it; weights are the same in every round of `decode`, too. Of recurrent layers the inputs of the convolution
      have it, which come before all that reads a state.
    - nothing can be left out: the whole result is carried by the loop and returned.
    - nothing can run at once with the next run, as that waits for the zero.
    """

    def body(_, loop):
        _, cache, zero = loop
        result, cache = phase(params, tie(given, zero), cache)
        return result, cache, zero_of(result)

    result, _ = jax.eval_shape(phase, params, given, cache)
    first = jax.tree.map(_blank, result)
    result, cache, _ = lax.fori_loop(0, count, body, (first, cache, jnp.int32(0)))
    return result, cache


repeat, repeat_many = (
    LoopProgram(_repeat, many=many, static_argnames=("phase", "count"), donate_argnames=("cache",))
    for many in (False, True)
)
"""As `decode` and `decode_many` are compiled."""


def tie(given: Any, zero: Int[Array, ""]) -> Any:
    """The same values, made to depend on `zero`."""

    def add(x):
        if isinstance(x, RecurrentCache):
            return dataclasses.replace(x, windows=x.windows + zero.astype(x.windows.dtype))
        if is_cache(x):
            return dataclasses.replace(x, page_table=x.page_table + zero)
        return x + zero.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.number) else x

    return jax.tree.map(add, given, is_leaf=is_cache)


def zero_of(result: Any) -> Int[Array, ""]:
    """0, as no token and no logit is so large; computed from the first number of the first array."""
    first = jax.tree.leaves(result)[0]
    return (first[(0,) * first.ndim].astype(jnp.float32) > 1e30).astype(jnp.int32)


def is_cache(x: Any) -> bool:
    """Whether a part of a state is a cache of one kind, and neither an array nor made of such caches."""
    return hasattr(x, "page_table") or isinstance(x, RecurrentCache)


def _blank(shape: Any) -> Array:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), shape.shape)
    return jnp.zeros(shape.shape, shape.dtype)


def time_phases(
    params: Params, s: DecodeState, phases: Phases, count: int, repeats: int
) -> tuple[dict[str, list[float]], DecodeState]:
    """Seconds of each phase of the round after `s`, `repeats` times the mean over `count` runs; the state after it.

    The buffers of `s` are used up.
    """
    seconds: dict[str, list[float]] = {}
    times = repeat_many if decode.verifies_many(params, s, phases.drafter) else repeat

    def run(name: str, given: Any, cache: Any = None) -> tuple[Any, Any]:
        seconds[name], result = [], None
        for turn in range(WARM_UP + repeats):
            result = None  # frees the one before
            began = time.perf_counter()
            phase = getattr(phases, name)
            result, cache = jax.block_until_ready(times(params, given, cache, phase=phase, count=count))
            if turn >= WARM_UP:
                seconds[name].append((time.perf_counter() - began) / count)
        return result, cache

    drafts = phases.drafter.depth > 0
    draft_tree, _ = run("draft", s)
    out, _ = run("verify", (s, draft_tree))
    bare = dataclasses.replace(s, cache=None, draft=None)
    (after, committed), cache = run("accept_commit", (bare, draft_tree, out), s.cache)
    state = s.draft
    if drafts:
        bare, draft_cache = apart(s.draft)
        given = dataclasses.replace(after, draft=bare), committed
        state, draft_cache = run("extend", given, draft_cache)
        state = with_cache(state, draft_cache)
    else:
        del seconds["draft"]
    return seconds, dataclasses.replace(after, cache=cache, draft=state)
