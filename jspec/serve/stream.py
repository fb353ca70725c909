"""Streams: merging the pieces of several sequences, server-sent events, disconnects, and bodies of requests."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jspec.engine.handle import Handle
from jspec.generation.result import Piece
from jspec.runner.request import EngineError
from jspec.serve.errors import engine_failed, shutting_down
from jspec.serve.fields import ApiError

Result = TypeVar("Result")


async def merge(handles: Sequence[Handle]) -> AsyncIterator[tuple[int, Piece]]:
    """Yields index of the handle and piece, as they arrive; ApiError if the engine fails or a sequence is cancelled."""
    # One sequence needs no task and no queue.
    if len(handles) == 1:
        async with contextlib.aclosing(_pieces(handles[0])) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    arrived: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()

    # A task per sequence puts its pieces into one queue.
    async def pump(index: int, handle: Handle) -> None:
        try:
            async for piece in _pieces(handle):
                arrived.put_nowait((index, piece))
        except Exception as error:
            arrived.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(i, handle)) for i, handle in enumerate(handles)]
    running = len(handles)
    # Yield until all have ended.
    try:
        while running:
            index, piece = await arrived.get()
            if isinstance(piece, Exception):
                raise piece
            running -= piece.finish_reason is not None
            yield index, piece
    # Leave no task when the client disconnects.
    finally:
        for task in tasks:
            task.cancel()


async def _pieces(handle: Handle) -> AsyncGenerator[Piece]:
    """The pieces of a sequence; raises as `merge`."""
    reason = None
    try:
        async with contextlib.aclosing(aiter(handle)) as pieces:
            async for piece in pieces:
                reason = piece.finish_reason
                if reason != "cancelled":
                    yield piece
    except EngineError as error:
        raise engine_failed(error) from error
    if reason in (None, "cancelled"):
        raise shutting_down()


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`; None if the client disconnects first and cancels it. receive: after the body."""
    tasks = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events of JSON, ended by [DONE]. An error becomes an event, because the status has been sent.

    Args:
      events: objects to send.
      resources: a context to enter and exit with the stream, also if it fails.
      named: name events by their field `type`, and omit [DONE].
    """

    def __init__(
        self,
        events: AsyncIterator[Mapping[str, object]],
        resources: contextlib.AbstractContextManager[Any],
        *,
        named: bool = False,
    ):
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(_encode(events, named=named), headers=headers, media_type="text/event-stream")
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all events; ends early if the client disconnects."""
        with self._resources:
            await super().__call__(scope, receive, send)


async def _encode(events: AsyncIterator[Mapping[str, object]], *, named: bool) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            name = f"event: {event['type']}\n".encode() if named else b""
            yield b"%bdata: %b\n\n" % (name, msgspec.json.encode(event))
        if not named:
            yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield b"data: %b\n\n" % msgspec.json.encode(error.body())


async def read_body(request: Request, most: int, seconds: float, take: Callable[[int], Awaitable[None]]) -> bytearray:
    """The body of a request.

    most: maximum bytes.
    seconds: maximum time for all of it to arrive.
    take: called with the number of bytes before they are stored; waits for room (`jspec.serve.work.Work.receiving`).

    Raises:
      ApiError: it is too large or too slow.
    """
    # Refuse by the header: at once if the client waits for an answer, or the body is too large to drop.
    close = {"connection": "close"}
    too_large = ApiError(f"body: must be at most {most} bytes", status=413, code="body_too_large", headers=close)
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > most:
        if "expect" not in request.headers and int(length[:20]) <= 2 * most:
            await _drop(request, 2 * most, seconds)
        raise too_large
    # Count while reading, because the header may be wrong or absent.
    data = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                await take(len(part))
                data += part
                if len(data) > most:
                    break
    except TimeoutError:
        raise ApiError(f"body: must arrive within {seconds:g} s", status=408, headers=close) from None
    if len(data) > most:
        await _drop(request, most, seconds)
        raise too_large
    return data


async def _drop(request: Request, most: int, seconds: float) -> None:
    """Reads up to `most` bytes: many clients read an answer only after they have sent the whole body."""
    with contextlib.suppress(TimeoutError, RuntimeError):  # RuntimeError: there is no more
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                most -= len(part)
                if most < 0:
                    return
