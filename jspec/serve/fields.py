"""Fields of a JSON object, each checked by name, and errors in OpenAI's format."""

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from jspec.serve.checks import any_of, check_any, check_items
from jspec.text.grammar.keywords import same

_LOG = logging.getLogger("jspec.serve")
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the current request."""
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request answered with an error in OpenAI's format.

    message: names the field, its value and what is valid.
    param: the field.
    code: a word for programs, such as "context_length_exceeded".
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, object]:
        """The JSON of the answer."""
        kind = "server_error" if self.status >= 500 else _KINDS.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        request_id = REQUEST_ID.get()
        return {"error": error} if request_id is None else {"error": error, "request_id": request_id}


def unsupported(name: str, value: object, valid: Iterable[str], reason: str = "") -> ApiError:
    """An error for a value other than `valid`. reason: where these apply, added to the message."""
    return ApiError(
        f"{name}={str(value)[:40]!r}: not supported by this server{reason}; must be {any_of(valid)}", param=name
    )


class Row(NamedTuple):
    """How to read a field of a JSON object.

    check: a function of the field's name, its value and the bounds; the table of an object; or a list with the table
      of its items.
    default: the value if the field is absent or null; `REQUIRED`: an error then.
    bounds: keywords of the check; a string names a limit, see `take_fields`.
    """

    check: "Callable[..., Any] | Table | list[Table]"
    default: Any
    bounds: Mapping[str, Any]


Table: TypeAlias = Mapping[str, Row]
REQUIRED: Any = object()


def row(check: "Callable[..., Any] | Table | list[Table]", default: Any = None, **bounds: Any) -> Row:
    """A `Row` with these bounds."""
    return Row(check, default, bounds)


def hint(check: Callable[..., Any], **bounds: Any) -> Row:
    """A field to check and then ignore: its value becomes None."""

    def run(name: str, value: object, **bounds: Any) -> None:
        check(name, value, **bounds)

    return Row(run, None, bounds)


def refused(*neutral: object) -> Row:
    """An unsupported field: an error unless it has a neutral value, such as False."""
    return Row(_check_neutral, None, {"neutral": neutral})


def _check_neutral(name: str, value: object, *, neutral: Sequence[object]) -> None:
    if not any(same(value, other) for other in neutral):
        valid = "".join(f" or {other!r}" for other in neutral)
        message = f"{name}: not supported by this server; must be omitted{valid}"
        raise ApiError(message, param=name, code="unsupported_field")


def take_fields(
    where: str, body: object, table: Table, limits: Mapping[str, Any] = MappingProxyType({})
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checked values of the fields in a table, and the other fields; ApiError if one is invalid or missing.

    where: the path of the object, the beginning of the names of its fields; "" for a request body.
    limits: name -> value, for bounds with the name of a limit.
    """
    if not isinstance(body, dict):
        raise ApiError(f"{where or 'body'}: must be a JSON object", param=where or None)
    values, rest, prefix = {}, present(body), where and f"{where}."
    for name, (check, default, bounds) in table.items():
        path, value = f"{prefix}{name}", rest.pop(name, None)
        if value is None and default is REQUIRED:
            raise ApiError(f"{path}: is required", param=path)
        bounds = {key: limits[bound] if isinstance(bound, str) else bound for key, bound in bounds.items()}
        values[name] = default if value is None else _checked(path, check, value, bounds)
    return values, rest


def read_object(
    where: str,
    body: object,
    table: Table,
    limits: Mapping[str, Any] = MappingProxyType({}),
    *,
    ignore_unknown: bool = False,
) -> dict[str, Any]:
    """The checked values of an object. Another field is an ApiError with the most similar name.

    where, limits: as in `take_fields`.
    ignore_unknown: log other fields instead.
    """
    values, rest = take_fields(where, body, table, limits)
    for name in rest:
        path = f"{where and where + '.'}{name}"
        if ignore_unknown:
            _LOG.warning("jspec: ignored the unknown field %r", path[:200])
            continue
        supported = [field for field, (check, *_) in table.items() if check is not _check_neutral]
        close = difflib.get_close_matches(name[:64], supported, 1)
        suggestion = f"; did you mean {path.removesuffix(name)}{close[0]}?" if close else ""
        raise ApiError(f"{path[:200]}: unknown field{suggestion}", param=path, code="unknown_field")
    return values


def read_variant(
    where: str,
    body: object,
    tables: Mapping[str, Table],
    *,
    key: str = "type",
    default: str | None = None,
    reason: str = "",
) -> tuple[str, dict[str, Any]]:
    """The kind of an object, in its field `key`, and its checked values by the table of this kind.

    default: the kind of an object without one. reason: as in `unsupported`.
    """
    table = {key: row(check_any, REQUIRED if default is None else default)}
    values, rest = take_fields(where, body, table)
    kind = values[key]
    if not isinstance(kind, str) or kind not in tables:
        raise unsupported(f"{where}.{key}", kind, tables, reason)
    return kind, read_object(where, rest, tables[kind])


def present(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields whose value is not None."""
    return {name: value for name, value in values.items() if value is not None}


def _checked(name: str, check: Any, value: object, bounds: Mapping[str, Any]) -> Any:
    """The checked value of the field `name`; ValueError and TypeError of a check become an `ApiError`."""
    if isinstance(check, Mapping):
        return read_object(name, value, check)
    try:
        if isinstance(check, list):
            return [read_object(f"{name}[{i}]", item, check[0]) for i, item in enumerate(check_items(name, value))]
        return check(name, value, **bounds)
    except (TypeError, ValueError) as error:
        raise ApiError(str(error), param=name) from None
