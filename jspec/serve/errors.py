"""Answers of JSON, and errors as answers in the format of the API that a request is for."""

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jspec.runner.request import EngineError, QueueFull
from jspec.serve import anthropic
from jspec.serve.fields import ApiError
from jspec.serve.work import queue_is_full

_NOT_SERVED = (
    "not served here, as this server generates text and makes no embeddings; must be /v1/chat/completions, "
    "/v1/completions, /v1/responses, /v1/messages or a path of the documentation"
)
_PASSED_ON = {"ignore_eos", "seed", "speculation", "stop"}
CLIENT_LEFT = 499  # what proxies log; nobody receives it


def json_answer(content: object, status: int = 200, headers: Any = None) -> Response:
    """An answer with a JSON value."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def answer_error(request: Request, error: Exception) -> Response:
    """Any error as an answer: in Anthropic's format below /v1/messages, else in OpenAI's."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)
    if isinstance(error, HTTPException):
        is_api = error.status_code == 404 and request.url.path.startswith("/v1/")
        reason = _NOT_SERVED if is_api else error.detail
        message = f"{request.method} {request.url.path[:200]}: {reason}"
        error = ApiError(message, status=error.status_code, headers=error.headers)
    if not isinstance(error, ApiError):
        error = ApiError("internal error; the server's log has the details", status=500)
    # For the log.
    request.scope["jspec.error"] = str(error)
    body = anthropic.error_body(error) if request.url.path.startswith("/v1/messages") else error.body()
    return json_answer(body, error.status, error.headers)


def shutting_down() -> ApiError:
    """For requests that come or are cancelled in the end."""
    return ApiError("the server is shutting down", status=503, code="cancelled")


def engine_failed(error: EngineError) -> ApiError:
    """For all requests of an engine that has failed."""
    return ApiError(f"the engine failed: {error}", status=500, code="engine_error")


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """Errors of the engine as answers, which say whose fault it is."""
    try:
        yield
    except QueueFull as error:
        raise queue_is_full(error) from None
    except EngineError as error:
        raise engine_failed(error) from error
    except (ValueError, TypeError) as error:
        # A message begins with the argument; those passed on as they are have the field's name.
        name = str(error).partition("=")[0]
        raise ApiError(str(error), param=name if name.partition(".")[0] in _PASSED_ON else None) from None
