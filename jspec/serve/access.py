"""Middleware: request ids, the access log, and CORS."""

import re
import sys
import time
import uuid
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jspec.serve.errors import answer_error
from jspec.serve.fields import REQUEST_ID, ApiError

POLLED = ("/health", "/ping", "/metrics", "/load", "/version")
"""Paths polled by monitoring: logged only for errors, and open to requests without a key."""
_HEADER = "x-request-id"
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def check_keys(keys: Sequence[str]) -> None:
    """Raises ValueError where one is empty or has spaces."""
    if any(not key or key != "".join(key.split()) for key in keys):
        raise ValueError("api_key: must have at least one character, and no spaces")


def check_origins(origins: Sequence[str]) -> None:
    """Raises ValueError where one is not "*" or the beginning of addresses, such as https://example.com:8443."""
    for origin in origins:
        parts = urlsplit(origin)
        if origin != "*" and (not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"):
            raise ValueError(f"allowed_origin={origin!r}: must be '*' or such as 'https://example.com'")


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Add CORS headers for pages of these origins."""
    headers = ["authorization", "content-type", "x-api-key", "anthropic-version", _HEADER]
    exposed = [_HEADER, "retry-after"]
    methods = ["GET", "POST"]
    return CORSMiddleware(app, origins, allow_methods=methods, allow_headers=headers, expose_headers=exposed)


class Access:
    """Give each request an id: that of the header X-Request-Id, or a random one.

    The id is in the same header of the answer, in the bodies of errors and in the log.

    Args:
      log: whether to print a line for each request: id, method, path, status, milliseconds, tokens, error.
    """

    def __init__(self, app: ASGIApp, *, log: bool):
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # The id, which is the context's from here on.
        began, status = time.perf_counter(), 500
        name = Headers(scope=scope).get(_HEADER)
        valid = name is None or bool(_ID.fullmatch(name))
        request_id = name if name and valid else uuid.uuid4().hex
        REQUEST_ID.set(request_id)

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[_HEADER] = request_id
            await send(message)

        # The answer, and its line.
        try:
            app = self._app if valid else _refuse
            await app(scope, receive, send_named)
        finally:
            if self._log and (status >= 400 or scope["path"] not in POLLED):
                print(_line(scope, request_id, status, time.perf_counter() - began), file=sys.stderr, flush=True)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(f"{_HEADER}: must have 1 to 128 letters, digits, '_', '.', ':' and '-'", param=_HEADER)
    await answer_error(Request(scope), error)(scope, receive, send)


def _line(scope: Scope, request_id: str, status: int, seconds: float) -> str:
    """The line of a request; endpoints put the rest into the scope."""
    path = scope.get("raw_path", b"").decode("latin-1")[:200]
    line = f"jspec: {request_id} {scope['method']} {path} {status} {1000 * seconds:.0f} ms"
    if (tokens := scope.get("jspec.tokens")) is not None:
        line += ", {} + {} tokens".format(*tokens())
    error = "".join(character if character.isprintable() else "?" for character in scope.get("jspec.error", "")[:200])
    return f"{line}, {error}" if error else line
