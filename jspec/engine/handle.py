"""The caller's handle to a request: streaming, result, cancellation."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

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
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    compiled: tuple[float, float] = 0.0, 0.0
    """What `Runner.compile_seconds` was at the first and at the last token."""
    arrivals: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    """Time and number of tokens of each arrival."""


class Handle:
    """A submitted request.

    Iterating, with `for` or `async for`, gives a `Piece` for each output of the device with new tokens, always from the
    first one on.

    Attributes:
      request: the scheduler's view.
      times: of its events.
      cached_tokens: of the prompt, found in the prefix cache.
      draft_limits: of `jspec.generation.speculation.draft_limits`.
      counted: rounds, accept counts, drafts and rounds with drafts already in the engine's counters.
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
        self._origin: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[list[tuple[int, float]]] = []
        self._sampled_logprobs: list[float] = []
        self._ended, self._dropped, self.cached_tokens = False, 0, 0
        self._error: BaseException | None = None
        self._finish: FinishReason | None = None
        self.counted: tuple[int, list[int], int, int] = 0, [0] * (drafter.depth + 1), 0, 0

    @property
    def done(self) -> bool:
        """Whether it has ended: finished, cancelled or failed."""
        return self._ended

    def __iter__(self) -> Iterator[Piece]:
        index = 0
        while True:
            with self._changed:
                while index >= len(self._pieces) and not self._ended:
                    self._changed.wait()
                new = self._pieces[index:]
            if not new:
                self._raise()
                return
            index += len(new)
            yield from new

    async def __aiter__(self) -> AsyncIterator[Piece]:
        index, event, loop = 0, asyncio.Event(), asyncio.get_running_loop()
        waiter = loop, event
        with self._changed:
            self._waiters.append(waiter)
        try:
            while True:
                event.clear()
                new = self._pieces[index:]
                if not new and not self._ended:
                    await event.wait()
                    continue
                if not new:
                    self._raise()
                    return
                index += len(new)
                for piece in new:
                    yield piece
        finally:
            with self._changed:
                self._waiters.remove(waiter)

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
        # Counters.
        request = self.request
        counts = np.zeros((1, self._drafter.depth + 1), np.int32)
        if request.accept_counts:
            counts[0] = request.accept_counts
        by_branch = None if request.branch_counts is None else np.array([request.branch_counts], np.int32)
        # Time between the first and the last token, without compilation.
        first, last, (before, after) = self.times.first_token, self.times.last_token, self.times.compiled
        seconds = 0.0 if first is None or last is None else last - first - (after - before)
        with self._changed:
            pieces = list(self._pieces)
        return Generation(
            tokens=[token for piece in pieces for token in piece.tokens],
            text=None if self._tokenizer is None else "".join(piece.text for piece in pieces),
            finish_reason=self._finish,
            stats=GenerationStats(
                np.array([request.rounds], np.int32),
                counts,
                seconds,
                np.array([self._dropped], np.int32),
                Branches.of(self._drafter, by_branch, 1),
                np.array([self.draft_limits], np.int32),
            ),
            origin=list(self._origin),
            logprobs=list(self._logprobs) if request.logprobs else None,
            prompt=list(request.prompt),
            tokenizer=self._tokenizer,
            top_logprobs=list(self._top_logprobs) if request.top_logprobs else None,
            sampled_logprobs=list(self._sampled_logprobs) if request.logprobs else None,
        )

    def cancel(self) -> None:
        """Ends it; frees its slot and pages at once. No effect on an ended request."""
        self._cancel(self)

    # The engine's side. `deliver` and `end` return the waiters to wake, so that a loop is woken once per report.

    def deliver(self, output: Output, now: float, compiled: float) -> list[Waiter]:
        """Appends an output, and the end if it has one. compiled: the device's `Runner.compile_seconds`."""
        tokens, ends = output.tokens, output.finish_code != stopping.RUNNING
        if tokens:
            self._origin += output.origin
            self._logprobs += output.logprobs or []
            self._top_logprobs += output.top_logprobs or []
            self._sampled_logprobs += output.sampled_logprobs or []
            before = compiled if self.times.first_token is None else self.times.compiled[0]
            self.times.first_token = self.times.first_token or now
            self.times.last_token, self.times.compiled = now, (before, compiled)
            self.times.arrivals.append((now, len(tokens)))
        # Text: whole characters only, and no beginning of a stop string.
        text, stopped_by = "", None
        if self._stream is not None:
            text = self._stream.push(tokens) + (self._stream.finish() if ends else "")
            stopped_by = self._stream.stopped_by if ends else None
        # Append, and wake all waiters.
        reason = FINISH_REASONS.get(output.finish_code)
        with self._changed:
            if tokens or text:
                logprobs = output.logprobs if self.request.logprobs else None
                about = logprobs, reason, output.top_logprobs, output.origin, stopped_by
                self._pieces.append(Piece(0, text, tokens, *about))
            if ends:
                self._dropped = output.dropped
                self._finish, self._ended, self.times.ended = reason, True, now
            self._changed.notify_all()
            return list(self._waiters)

    def end(self, error: BaseException | None = None) -> list[Waiter]:
        """Ends it without a finish code: cancelled, or failed with an error."""
        with self._changed:
            if not self._ended:
                self._finish, self._error, self._ended = "cancelled", error, True
                self.times.ended = time.monotonic()
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
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_all, waiting)
