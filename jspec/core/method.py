"""`Method`: the static half of a generation, as one value."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

from jspec.core.sharding import Placement, over
from jspec.core.types import Accept, Drafter, Target

T = TypeVar("T")


class Records(NamedTuple):
    """What is recorded with each new token, beside its log-probability.

    top: how many of the most probable tokens.
    support: how many ids of possible tokens (`jspec.core.types.Support`); 0: none.
    """

    top: int = 0
    support: int = 0


@dataclasses.dataclass(frozen=True)
class Method:
    """How a generation is done; everything of it that a compiled program depends on, apart from shapes.

    It is hashed by value and goes into every program as a static argument. Weights are never part of it.

    target: verifies; its configuration.
    drafter: proposes; bound to the target and the draft model (`Drafter.bind`).
    accept: the acceptance rule.
    placement: of the weights over devices; None: they are on one.
    record: what is recorded with each new token; None: nothing.
    watch: the last positions of each sequence whose hidden states are kept for a learner; None: none.
    """

    target: Target
    drafter: Drafter
    accept: Accept
    placement: Placement | None = None
    record: Records | None = None
    watch: int | None = None

    @property
    def devices(self) -> int:
        """Devices with parts of the weights, in each group."""
        return 1 if self.placement is None else self.placement.size

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The target's layers to capture in its forwards."""
        layers = self.drafter.capture_layers
        return layers if self.watch is None else with_last(self.target, layers)


def with_last(target: Target, layers: tuple[int, ...]) -> tuple[int, ...]:
    """The layers, and the state after the final norm as the last one."""
    last = target.num_layers + 1
    return layers if last in layers else (*layers, last)


def on_devices(function: Callable[..., T], *, shared: Collection[int] = (0,)) -> Callable[..., T]:
    """`function(*arrays, method=..., **static)` as a program of every device of `method.placement`.

    Each device has its part of the weights and caches; all decide alike (`jspec.core.sharding.over`).

    shared: indices of the arrays that groups of devices have in common.
    """

    @functools.wraps(function)
    def on_each(*arrays: Any, method: Method, **static: Any) -> T:
        program = functools.partial(function, method=method, **static)
        return over(method.placement, program, *arrays, shared=shared)

    return on_each
