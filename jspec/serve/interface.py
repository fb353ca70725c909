"""What the server uses of an engine."""

import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from jspec.core.sampling import Sampling
from jspec.engine.model import Model

SECONDS = (0.1, 1.0)
Histogram = Metrics = Any


class QueueFull(RuntimeError):
    """The queue has no space for another request."""


class EngineError(RuntimeError):
    """The engine failed."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text and ids of one sequence."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    finish_reason: str | None = None


class Handle(Protocol):
    """One sequence."""

    def __aiter__(self) -> AsyncIterator[Piece]: ...

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the end."""
        ...

    def cancel(self) -> None:
        """Ends it."""
        ...


class Engine(Protocol):
    """An engine."""

    model: Model
    context: int

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        logprobs: bool | int = False,
        priority: int = 0,
        salt: str = "",
    ) -> Handle:
        """Queues a sequence."""
        ...

    def metrics(self) -> Any:
        """Counters."""
        ...

    def close(self) -> None:
        """Ends everything."""
        ...
