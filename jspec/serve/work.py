"""Threads for the work before the engine, so the event loop always answers."""

import contextlib
import ctypes
from asyncio import Event, shield, timeout, wrap_future
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jspec.serve.fields import ApiError

Result = TypeVar("Result")
LONG = 2**18
"""Bytes of a body from which on it is read in the pool of long ones."""
_THREADS = {"short": 2, "long": 1, "grammar": 2}
"""Threads of each pool: of bodies below `LONG`, of others, and of requests with a grammar."""
_MOST_WAITING = 1024
"""Calls in a pool."""
_RETRY = {"retry-after": "1"}


def queue_is_full(reason: object = "try again later") -> ApiError:
    """The error of a request that the server has no room for."""
    return ApiError(f"the queue is full: {reason}", status=429, code="queue_full", headers=_RETRY)


class Work:
    """Pools of threads, and the bytes of bodies in memory.

    most: bound of these bytes, but for the body of the oldest request.
    seconds: how long a request waits until those of others are fewer.
    """

    def __init__(self, most: int, seconds: float):
        self._most, self._seconds = most, seconds
        self._bytes: dict[object, int] = {}
        self._fewer = Event()
        self._pools = {name: ThreadPoolExecutor(count, f"jspec {name}") for name, count in _THREADS.items()}
        self._waiting = dict.fromkeys(_THREADS, 0)

    @contextlib.contextmanager
    def receiving(self) -> Iterator[Callable[[int], Awaitable[None]]]:
        """Counts bytes of a body, by the yielded function, until the context ends.

        Raises:
          ApiError: by this function: the bodies of all requests are too large together for too long.
        """
        request = object()
        self._bytes[request] = 0

        async def take(count: int) -> None:
            # The oldest request never waits, so one of them always gets on.
            try:
                async with timeout(self._seconds):
                    while sum(self._bytes.values()) + count > self._most and next(iter(self._bytes)) is not request:
                        await self._fewer.wait()
            except TimeoutError:
                message = f"body: those of all requests have over {self._most} bytes; try again later"
                headers = {**_RETRY, "connection": "close"}
                raise ApiError(message, status=429, code="queue_full", headers=headers) from None
            self._bytes[request] += count

        try:
            yield take
        finally:
            del self._bytes[request]
            self._fewer.set()
            self._fewer = Event()

    async def run(self, pool: str, function: Callable[[], Result]) -> Result:
        """The result of a function in a thread of a pool. It goes on if its caller is cancelled.

        Raises:
          ApiError: of the function, or too many calls wait.
        """
        if self._waiting[pool] >= _MOST_WAITING:
            raise queue_is_full()
        self._waiting[pool] += 1
        future = self._pools[pool].submit(_without_frames, function)
        try:
            result = await shield(wrap_future(future))
        finally:
            self._waiting[pool] -= 1
        if isinstance(result, ApiError):
            raise result
        return result

    async def read(self, size: int, function: Callable[[], Result]) -> Result:
        """As `run`, in the pool for a body of this many bytes."""
        if size < LONG:
            return await self.run("short", function)
        try:
            return await self.run("long", function)
        finally:
            self._pools["long"].submit(_trim)


def _without_frames(function: Callable[[], Result]) -> Result | ApiError:
    """The result of a function, or its error without references to what the function has worked on."""
    try:
        return function()
    except ApiError as error:
        error.__context__ = error.__cause__ = None
        return error.with_traceback(None)


def _trim() -> None:
    """Gives freed memory back to the system; glibc does not do so for the heaps of threads."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
