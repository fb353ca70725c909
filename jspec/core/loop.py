"""The loop: one XLA program runs rounds on the device until every sequence is done."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify
from jaxtyping import Array, Bool, Int

from jspec.core import branches, optional, stopping
from jspec.core.method import Method, on_devices
from jspec.core.round import draft, step
from jspec.core.types import DecodeState, DraftTree, Params
from jspec.core.xla_options import LoopProgram, prefers_cublas
from pallas_kernels import platform

SHARED = (0, 2)
"""Arguments of `run_rounds` common to groups of devices; each group has its own state."""


def run_while(
    params: Params,
    s: DecodeState,
    going: Callable[[DecodeState], Bool[Array, ""]],
    *,
    method: Method,
    held: Callable[[DecodeState], Bool[Array, " B"]] | None = None,
    debug: bool = False,
) -> DecodeState:
    """Rounds while `going(s)` is true.

    held: unfinished sequences to skip in the next round; None: none.
    debug: check the invariants of every round.
    """

    def hold(s: DecodeState) -> tuple[Bool[Array, " B"], DecodeState]:
        """Marks held sequences, so a round treats them as finished."""
        assert held is not None
        mask = held(s)
        return mask, dataclasses.replace(s, finish_code=jnp.where(mask, stopping.HELD, s.finish_code))

    def take_round(branch: int | None, s: DecodeState) -> DecodeState:
        if held is None:
            return step(params, s, method=method, branch=branch, debug=debug)
        mask, s = hold(s)
        s = step(params, s, method=method, branch=branch, debug=debug)
        return dataclasses.replace(s, finish_code=jnp.where(mask, stopping.RUNNING, s.finish_code))

    # One loop, or one per branch inside of a loop over branches.
    branching = optional.as_branching(method.drafter)
    if branching is None:
        return lax.while_loop(going, partial(take_round, None), s)
    return branches.run_while(
        params,
        s,
        going,
        drafter=branching,
        one_round=take_round,
        without_held=lambda s: s if held is None else hold(s)[1],
        debug=debug,
    )


def one_round(params: Params, s: DecodeState, *, method: Method, debug: bool = False) -> DecodeState:
    """Runs one round of any drafter; one with branches chooses its branch."""
    last = s.round_index
    return run_while(params, s, lambda s: s.round_index == last, method=method, debug=debug)


def run_rounds(
    params: Params, s: DecodeState, until: Int[Array, ""], *, method: Method, debug: bool = False
) -> DecodeState:
    """Rounds until every sequence is done or `s.round_index` reaches `until`. Pure; `decode` is the same, jitted."""
    s = with_counters(s, method.drafter.depth)

    def going(s: DecodeState) -> Bool[Array, ""]:
        return ~jnp.all(s.done) & (s.round_index < until)

    return run_while(params, s, going, method=method, debug=debug)


def with_counters(s: DecodeState, depth: int) -> DecodeState:
    """Extends the counters to rounds of this depth, to continue with a deeper drafter."""
    counts = s.stats.accept_counts
    missing = depth + 1 - counts.shape[-1]
    if missing <= 0:
        return s
    counts = jnp.pad(counts, [*[(0, 0)] * (counts.ndim - 1), (0, missing)])
    return dataclasses.replace(s, stats=dataclasses.replace(s.stats, accept_counts=counts))


# Compiled


class _Decode(LoopProgram[..., DecodeState]):
    """Its state has the counters before the call: the donated buffer of shorter ones could not be used."""

    def __call__(self, params: Params, s: DecodeState, until: Int[Array, ""], *, method: Method) -> DecodeState:
        return super().__call__(params, with_counters(s, method.drafter.depth), until, method=method)


@partial(_Decode, static_argnames=("method",), donate_argnames=("s",))
@partial(on_devices, shared=SHARED)
def decode(params: Params, s: DecodeState, until: Int[Array, ""], *, method: Method) -> DecodeState:
    """Rounds on the device until every sequence is done or `s.round_index` reaches `until`; the state is donated.

    To stream, show progress or stop early, call it repeatedly with a growing `until`; the tokens are the same. The
    `variant`s of this program have compiler options for rounds of many tokens, and for several devices.
    """
    return run_rounds(params, s, until, method=method)


@partial(jax.jit, static_argnames=("method",))
@partial(on_devices, shared=SHARED)
def decode_checked(
    params: Params, s: DecodeState, until: Int[Array, ""], *, method: Method
) -> tuple[checkify.Error, DecodeState]:
    """`decode` with `check_round` in every round; `error.throw()` raises the first broken invariant."""
    rounds = partial(run_rounds, method=method, debug=True)
    return checkify.checkify(rounds, errors=checkify.user_checks)(params, s, until)


@partial(jax.jit, static_argnames=("method",))
@on_devices
def _draft_tree(params: Params, s: DecodeState, *, method: Method) -> DraftTree:
    return draft(params, s, method=method)[0]


def draft_shape(params: Params, s: DecodeState, method: Method) -> tuple[int, ...]:
    """The shape of a round's tree in one group of devices: sequences and nodes of each."""
    return _draft_tree.eval_shape(params, s, method=method).tokens.shape[-2:]


def verifies_many(params: Params, s: DecodeState, method: Method) -> bool:
    """Whether rounds of these shapes verify enough tokens for the options of `many` to be faster. Only affects GPUs."""
    return platform.platform() == "gpu" and prefers_cublas(params, math.prod(draft_shape(params, s, method)))


def fastest(params: Params, s: DecodeState, method: Method) -> LoopProgram[..., DecodeState]:
    """The fastest variant of `decode` for rounds of these shapes."""
    return decode.variant(many=verifies_many(params, s, method), devices=method.devices)
