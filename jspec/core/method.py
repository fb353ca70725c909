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
    """

    target: Target
    drafter: Drafter
    accept: Accept
    placement: Placement | None = None
    record: Records | None = None

    @property
    def devices(self) -> int:
        """Devices that the weights are split over, in each group."""
        return 1 if self.placement is None else self.placement.size


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
