"""The caller's handle to a request: streaming, result, cancellation."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import numpy as np

from jspec.core import stopping
from jspec.core.types import Drafter
from jspec.generation.result import FINISH_REASONS, Branches, FinishReason, Generation, GenerationStats, Piece
from jspec.generation.speculation import draft_limits
from jspec.runner.plan import Output
from jspec.runner.request import CompilationError, EngineError, Request
from jspec.text.stream import TextStream
from jspec.text.tokenizer import Tokenizer

Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Event]
"""An event to set in its loop."""


@dataclasses.dataclass(eq=False)
class Times:
    """Times of a request, in seconds of `time.monotonic`; None: not yet."""

    submitted: float = dataclasses.field(default_factory=time.monotonic)
    admitted: float | None = None
    ended: float | None = None
    compiled: tuple[float, float] = 0.0, 0.0
    """What `Runner.compile_seconds` was at the first and at the last token."""
    arrivals: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    """Time and number of tokens of each output with tokens."""


class Handle:
    """A submitted request.

    Iterating, with `for` or `async for`, gives a `Piece` for each output of the device with new tokens, always from the
    first one on.

    Attributes:
      request: the scheduler's view.
      times: of its events.
      cached_tokens: of the prompt, found in the prefix cache.
      draft_limits: of `jspec.generation.speculation.draft_limits`.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, cancel: Callable[["Handle"], None], drafter: Drafter
    ):
        self.request, self.times = request, Times()
        self._tokenizer, self._cancel, self._drafter = tokenizer, cancel, drafter
        self.draft_limits = draft_limits(request.speculation, drafter)
        self._stream = None
        if tokenizer is not None:
            self._stream = TextStream(tokenizer, request.prompt, request.stop)
        self._changed = threading.Condition()
        self._waiters: list[Waiter] = []
        self._pieces: list[Piece] = []
        self._outputs = [Output(len(request.prompt), [], stopping.RUNNING, 0, [0] * (drafter.depth + 1))]
        self._ended, self.cached_tokens = False, 0
        self._error: BaseException | None = None
        self._finish: FinishReason | None = None

    @property
    def last(self) -> Output:
        """The last output; one without tokens before the first."""
        return self._outputs[-1]

    @property
    def done(self) -> bool:
        """Whether it has ended: finished, cancelled or failed."""
        return self._ended

    def __iter__(self) -> Iterator[Piece]:
        index = 0
        while new := self._after(index, wait=True):
            index += len(new)
            yield from new

    async def __aiter__(self) -> AsyncGenerator[Piece]:
        index, event, loop = 0, asyncio.Event(), asyncio.get_running_loop()
        waiter = loop, event
        with self._changed:
            self._waiters.append(waiter)
        try:
            while (new := self._after(index)) != []:
                if new is None:
                    await event.wait()
                    event.clear()
                    continue
                index += len(new)
                for piece in new:
                    yield piece
        finally:
            with self._changed:
                self._waiters.remove(waiter)

    def _after(self, index: int, *, wait: bool = False) -> list[Piece] | None:
        """The pieces from this index on; none at the end. None: there are none yet, and `wait` is False."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._ended or index < len(self._pieces))
            new, ended = self._pieces[index:], self._ended
        if not new and ended:
            self._raise()
        return new if new or ended else None

    def result(self, timeout: float | None = None) -> Generation:
        """Waits for its end; returns the generation, up to the cancellation if it was cancelled.

        timeout: seconds; None: no limit.

        Raises:
          TimeoutError: it has not ended by then.
          EngineError: the engine has failed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended, timeout):
                raise TimeoutError(f"the request has not ended after {timeout} seconds")
        self._raise()
        return self.generation()

    def generation(self) -> Generation:
        """The generation so far."""
        with self._changed:
            pieces, outputs = list(self._pieces), list(self._outputs)
        # Time between the first and the last token, without compilation.
        arrivals, (before, after) = list(self.times.arrivals), self.times.compiled
        seconds = arrivals[-1][0] - arrivals[0][0] - (after - before) if arrivals else 0.0
        # Counters.
        now = outputs[-1]
        by_branch = None if now.branch_counts is None else np.array([now.branch_counts], np.int32)
        counters = (np.array([x], np.int32) for x in (now.rounds, now.accept_counts, now.dropped, self.draft_limits))
        rounds, accept_counts, dropped, limits = counters
        branches = Branches.of(self._drafter, by_branch, 1)

        def joined(name: str) -> list[Any]:
            return [entry for output in outputs for entry in getattr(output, name) or ()]

        request = self.request
        return Generation(
            tokens=joined("tokens"),
            text=None if self._tokenizer is None else "".join(piece.text for piece in pieces),
            finish_reason=self._finish,
            stats=GenerationStats(rounds, accept_counts, seconds, dropped, branches, limits),
            origin=joined("origin"),
            logprobs=joined("logprobs") if request.logprobs else None,
            prompt=list(request.prompt),
            tokenizer=self._tokenizer,
            top_logprobs=joined("top_logprobs") if request.top_logprobs else None,
            sampled_logprobs=joined("sampled_logprobs") if request.logprobs else None,
            support=joined("support") if request.support else None,
        )

    def cancel(self) -> None:
        """Ends it; frees its slot and pages at once. No effect on an ended request."""
        self._cancel(self)

    # The engine's side. `deliver` and `end` return the waiters to wake, so that a loop is woken once per report.

    def deliver(self, output: Output, now: float, compiled: float) -> list[Waiter]:
        """Appends an output, and the end if it has one. compiled: the device's `Runner.compile_seconds`."""
        tokens, ends = output.tokens, output.finish_code != stopping.RUNNING
        if tokens:
            self.times.compiled = self.times.compiled[0] if self.times.arrivals else compiled, compiled
            self.times.arrivals.append((now, len(tokens)))
        # Text: whole characters only, and no beginning of a stop string.
        text, stopped_by = "", None
        if self._stream is not None:
            text = self._stream.push(tokens) + (self._stream.finish() if ends else "")
            stopped_by = self._stream.stopped_by if ends else None
        # Append, and wake all waiters.
        reason = FINISH_REASONS.get(output.finish_code)
        with self._changed:
            self._outputs.append(output)
            if tokens or text:
                logprobs = output.logprobs if self.request.logprobs else None
                about = logprobs, reason, output.top_logprobs, output.origin, stopped_by
                self._pieces.append(Piece(0, text, tokens, *about))
            return self._notify(reason, now)

    def end(self, error: BaseException | None = None) -> list[Waiter]:
        """Ends it without a finish code: cancelled, or failed with an error."""
        with self._changed:
            return self._notify("cancelled", time.monotonic(), error)

    def _notify(self, reason: FinishReason | None, now: float, error: BaseException | None = None) -> list[Waiter]:
        if reason is not None and not self._ended:
            self._finish, self._error, self._ended, self.times.ended = reason, error, True, now
        self._changed.notify_all()
        return list(self._waiters)

    def _raise(self) -> None:
        if isinstance(self._error, CompilationError):
            raise CompilationError(str(self._error)) from self._error
        if self._error is not None:
            raise EngineError(f"the engine has failed: {self._error}") from self._error


def wake(waiters: list[Waiter]) -> None:
    """Sets all events, with one call per event loop."""
    events: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for loop, event in waiters:
        events.setdefault(loop, []).append(event)

    def set_all(events: list[asyncio.Event]) -> None:
        for event in events:
            event.set()

    for loop, waiting in events.items():
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(set_all, waiting)
