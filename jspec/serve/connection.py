"""A connection of HTTP: uvicorn's, with a limit of time for headers, and JSON for what is no HTTP."""

import asyncio
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from jspec.serve.fields import ApiError

HEADER_SECONDS = 30.0
"""How long a client may take for the first bytes and the headers of a request."""


class _Chunks(h11.Connection):
    """Writes the chunks of an answer without the checks of h11."""

    _is_chunked = False

    def send(self, event: Any) -> Any:
        """As h11's."""
        if self._is_chunked and type(event) is h11.Data and event.data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        written = super().send(event)
        if isinstance(event, h11.Response):
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in (written or b"").lower()
        return written


class Connection(H11Protocol):
    """A connection that is closed if no whole headers arrive in time.

    uvicorn closes one that is idle after an answer, but lets others wait or send headers byte by byte for any time.
    """

    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.conn = _Chunks(h11.SERVER)  # with the default bound of headers, as uvicorn's

    def connection_made(self, transport: Any) -> None:
        """As uvicorn's; the time for headers begins."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """As uvicorn's; the time ends with the headers."""
        super().data_received(data)
        if self._deadline is not None and self.cycle is not None and not self.cycle.response_complete:
            self._deadline.cancel()

    def on_response_complete(self) -> None:
        """As uvicorn's; the time for the next headers begins."""
        super().on_response_complete()
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, in OpenAI's format of errors."""
        content = msgspec.json.encode(ApiError(f"request: must be valid HTTP ({msg.rstrip('.')})").body())
        headers = [("content-type", "application/json"), ("content-length", str(len(content))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=content), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _expect(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._expire)

    def _expire(self) -> None:
        # A pipelined request may have begun meanwhile.
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()
