"""`measure_costs`: measures the time per round of each drafter of an `Adaptive` on this machine."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jspec.cache.pages import contiguous_table, fit_page_size
from jspec.core import slots
from jspec.core.accept import greedy
from jspec.core.checks import check_int
from jspec.core.loop import fastest
from jspec.core.method import Method
from jspec.core.types import DecodeState, Params
from jspec.drafters import Adaptive
from jspec.generation import costs
from jspec.generation.method import bind_drafter
from jspec.generation.options import DEFAULT_PAGE_SIZE
from jspec.generation.run import check_model
from jspec.loading import memory
from jspec.loading.model import Model, refuse_split
from jspec.runner.slot_state import Sizes, empty_state

WARM_UP = 2
"""Untimed calls: the first compiles, the second runs before command buffers are captured."""


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
    table = {}
    for batch in batches:
        batch = check_int("batches", batch, least=1)
        case = Case(model.params, Method(model.target, bound, greedy), batch, context, rounds)
        table[batch] = tuple(1e3 * case.seconds(index, repeats) for index in range(len(bound.branches)))
    return table


class Case:
    """Rounds of one batch, timed from the host, always from the same context.

    Attributes:
      state: the decode state after the last call.
    """

    def __init__(self, params: Params, method: Method, batch: int, context: int, rounds: int):
        depth = method.drafter.depth
        capacity = context + rounds * (depth + 1) + depth + 2
        if capacity > method.target.max_length:
            most = method.target.max_length
            raise ValueError(f"context={context}: {rounds} rounds need {capacity} tokens, not {most}")
        memory.fit(params, method.target, method.drafter, batch, DEFAULT_PAGE_SIZE, capacity, capacity)
        sizes = Sizes(batch, capacity, fit_page_size(DEFAULT_PAGE_SIZE, capacity))
        table = contiguous_table(batch, sizes.pages_per_slot)
        sizes = dataclasses.replace(sizes, pages=batch * sizes.pages_per_slot)
        empty = partial(empty_state, method=method, sizes=sizes)
        self._make = jax.jit(lambda params: slots.with_table(empty(params), table))
        self.params, self.rounds, self._method = params, rounds, method
        self._batch, self._context, self._capacity = batch, context, capacity
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

    def steer(self, table: Sequence[float]) -> None:
        """Set the costs that the policy of the next calls goes by."""
        if self._program is None:
            self.use(self.lower().compile())
        assert self.state is not None
        self.state = costs.with_costs(self.state, table)

    def seconds(self, index: int, repeats: int) -> float:
        """The median time of a round in the branch `index`."""
        assert self._shapes.costs is not None
        self.steer(costs.only(index, self._shapes.costs.shape[0]))
        return statistics.median([self.run() for _ in range(WARM_UP + repeats)][WARM_UP:])
