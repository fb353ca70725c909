"""`measure_costs`: measures the time per round of each drafter of an `Adaptive` on this machine."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jspec.cache.pages import contiguous_table, fit_page_size
from jspec.core import slots
from jspec.core.accept import greedy
from jspec.core.checks import check_int
from jspec.core.loop import fastest
from jspec.core.method import Method
from jspec.core.struct import struct
from jspec.core.types import Accept, Committed, DecodeState, Drafter, DraftTree, Params, Target
from jspec.drafters import Adaptive
from jspec.drafters.adaptive import AdaptiveState
from jspec.engine import memory
from jspec.engine.method import bind_drafter
from jspec.engine.model import Model, refuse_split
from jspec.engine.options import DEFAULT_PAGE_SIZE
from jspec.engine.run import check_model
from jspec.engine.slot_state import Sizes, empty_state

WARM_UP = 2
"""Untimed calls: the first compiles, the second runs before command buffers are captured."""


@struct
class SteeredState:
    """The state of an `Adaptive`, and its steering.

    forced: in every sequence, 1 + the index of the drafter; 0: the policy chooses.
    costs: in every sequence, the costs for the policy.
    """

    state: AdaptiveState
    forced: Int[Array, " B"]
    costs: Float[Array, "B K"]


@dataclasses.dataclass(frozen=True)
class Steered:
    """A bound `Adaptive` with its choice and costs in the state, so one program measures all drafters."""

    adaptive: Adaptive

    @property
    def depth(self) -> int:
        """The depth of the deepest drafter."""
        return self.adaptive.depth

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The captured layers of all drafters."""
        return self.adaptive.capture_layers

    @property
    def branches(self) -> tuple[Drafter, ...]:
        """The drafters."""
        return self.adaptive.branches

    def bind(self, target: Target, draft: object) -> "Steered":
        """Returns itself; it is already bound."""
        return self

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> SteeredState:
        """The state of the `Adaptive`; the policy chooses."""
        state = self.adaptive.init(params, batch, capacity, page_size)
        return SteeredState(state, jnp.zeros(batch, jnp.int32), jnp.ones((batch, len(self.branches))))

    def choose(self, params: Params, s: DecodeState) -> tuple[Int[Array, ""], SteeredState]:
        """Choose the forced drafter, or by the policy with the costs of the state."""
        steered: SteeredState = s.draft
        index, best = self.adaptive.decide(s, steered.state, steered.costs[0])
        forced = steered.forced[0]
        index = jnp.where(forced > 0, forced - 1, index)
        return index, dataclasses.replace(steered, state=self.adaptive.mark(steered.state, ~s.done, index, best))

    def states(self, state: SteeredState) -> tuple[PyTree, ...]:
        """As of `Adaptive`."""
        return self.adaptive.states(state.state)

    def parts(self, state: SteeredState) -> tuple[tuple[Drafter, PyTree], ...]:
        """As of `Adaptive`."""
        return self.adaptive.parts(state.state)

    def with_parts(self, state: SteeredState, parts: tuple[PyTree, ...]) -> SteeredState:
        """As of `Adaptive`."""
        return dataclasses.replace(state, state=self.adaptive.with_parts(state.state, parts))

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, SteeredState]:
        """Draft the padded tree of the policy's choice."""
        tree, state = self.adaptive.draft(params, dataclasses.replace(s, draft=s.draft.state))
        return tree, dataclasses.replace(s.draft, state=state)

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> SteeredState:
        """As of `Adaptive`."""
        bare = dataclasses.replace(s, draft=s.draft.state)
        return dataclasses.replace(s.draft, state=self.adaptive.extend(params, bare, committed))


def measure_costs(
    model: Model,
    drafter: Adaptive,
    batches: Sequence[int] = (1, 8, 32),
    *,
    context: int = 512,
    rounds: int = 16,
    repeats: int = 3,
) -> dict[int, tuple[float, ...]]:
    """Measure the milliseconds of a round with each drafter of an `Adaptive`, by batch, for its `costs`.

    One program of all drafters is compiled per batch. Times are of whole rounds, for sequences of `context` tokens. The
    caches are empty, as their contents change no time except of experts.

        costs = jspec.measure_costs(model, jspec.Adaptive())
        jspec.generate(model, prompts, drafter=jspec.Adaptive(costs=costs))

    Args:
      batches: batch sizes.
      context: tokens of each sequence.
      rounds: rounds of a timed call.
      repeats: timed calls; their median counts.

    Raises:
      TypeError, ValueError: the drafter is no `Adaptive` or does not fit the model, the model is split over devices, or
        a state does not fit in memory.
    """
    check_model(model)
    refuse_split(model, "measure_costs")
    if not isinstance(drafter, Adaptive):
        raise TypeError(f"drafter is of type {type(drafter).__name__}: must be a jspec.Adaptive")
    for name, value in (("context", context), ("rounds", rounds), ("repeats", repeats)):
        check_int(name, value, least=1)
    bound = bind_drafter(drafter, model.target, model.draft)
    assert isinstance(bound, Adaptive)
    costs = {}
    for batch in batches:
        batch = check_int("batches", batch, least=1)
        case = Case(model.params, model.target, Steered(bound), greedy, batch, context, rounds)
        costs[batch] = tuple(1e3 * case.seconds(index, repeats) for index in range(len(bound.branches)))
    return costs


class Case:
    """Rounds of one batch, timed from the host, always from the same context.

    Attributes:
      state: the decode state after the last call.
    """

    def __init__(
        self,
        params: Params,
        target: Target,
        drafter: Drafter,
        rule: Accept,
        batch: int,
        context: int,
        rounds: int,
    ):
        capacity = context + rounds * (drafter.depth + 1) + drafter.depth + 2
        if capacity > target.max_length:
            raise ValueError(f"context={context}: {rounds} rounds need {capacity} tokens, not {target.max_length}")
        memory.fit(params, target, drafter, batch, DEFAULT_PAGE_SIZE, capacity, capacity)
        self.params, self.rounds = params, rounds
        self._batch, self._context, self._capacity = batch, context, capacity
        self._method = Method(target, drafter, rule)
        sizes = Sizes(batch, capacity, fit_page_size(DEFAULT_PAGE_SIZE, capacity))
        table = contiguous_table(batch, sizes.pages_per_slot)
        sizes = dataclasses.replace(sizes, pages=batch * sizes.pages_per_slot)
        empty = partial(empty_state, method=self._method, sizes=sizes, samples=False)
        self._make = jax.jit(lambda params: slots.with_table(empty(params), table))
        self._shapes = jax.eval_shape(self._make, params)
        self._program = None
        self.state: DecodeState | None = None

    def lower(self):
        """Trace and lower the program of the rounds."""
        loop = fastest(self.params, self._shapes, self._method)
        return loop.lower(self.params, self._shapes, jax.ShapeDtypeStruct((), jnp.int32), method=self._method)

    def use(self, compiled) -> None:
        """Set the compiled program, and make the state."""
        self._program, self.state = compiled, self._make(self.params)

    def run(self, key: Array | None = None) -> float:
        """Run `rounds` rounds from the context on; returns the seconds of one. The drafter's state continues.

        key: keys of the sequences; None: unchanged.
        """
        if self._program is None:
            self.use(self.lower().compile())
        s = self.state
        assert s is not None and self._program is not None
        # Reset the lengths; move them to the device before the clock starts.
        columns = np.full(self._batch, self._context, np.int32), np.full(self._batch, self._capacity, np.int32)
        length, limit, finish = jax.device_put((*columns, np.zeros(self._batch, np.int32)))
        s = dataclasses.replace(s, length=length, limit=limit, finish_code=finish, key=s.key if key is None else key)
        until = jnp.int32(int(s.round_index) + self.rounds)
        jax.block_until_ready((s, until))
        began = time.perf_counter()
        self.state = jax.block_until_ready(self._program(self.params, s, until))
        return (time.perf_counter() - began) / self.rounds

    def steer(self, *, forced: int | None, costs: Sequence[float] | None = None) -> None:
        """Set the drafter of the next calls (None: the policy chooses), and the policy's costs."""
        if self._program is None:
            self.use(self.lower().compile())
        assert self.state is not None
        draft: SteeredState = self.state.draft
        draft = dataclasses.replace(draft, forced=jnp.full_like(draft.forced, 0 if forced is None else forced + 1))
        if costs is not None:
            draft = dataclasses.replace(draft, costs=jnp.tile(jnp.asarray(costs, jnp.float32), (self._batch, 1)))
        self.state = dataclasses.replace(self.state, draft=draft)

    def seconds(self, index: int, repeats: int) -> float:
        """The median time of a round with the drafter `index` of a `Steered`."""
        self.steer(forced=index)
        return statistics.median([self.run() for _ in range(WARM_UP + repeats)][WARM_UP:])
