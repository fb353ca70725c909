"""Fields of a JSON object, each checked by name, and errors in OpenAI's format."""

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

from jspec.core.checks import check_int

_LOG = logging.getLogger("jspec.serve")
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is being answered."""
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
    """An error for an unknown word. valid: the known ones. reason: where these are valid."""
    *words, last = map(repr, valid)
    listed = f"{', '.join(words)} or {last}" if words else last
    return ApiError(f"{name}={str(value)[:40]!r}: not supported by this server{reason}; must be {listed}", param=name)


class Row(NamedTuple):
    """A field in a table of fields.

    check: called with the name of the field, its value and the bounds.
    default: its value where it is absent or null; `REQUIRED`: it must be there.
    bounds: of the check; a text is the name of a limit.
    """

    check: Callable[..., Any]
    default: Any
    bounds: Mapping[str, Any]


REQUIRED: Any = object()


def row(check: Callable[..., Any], default: Any = None, **bounds: Any) -> Row:
    """A `Row`."""
    return Row(check, default, bounds)


class Fields:
    """The fields of a JSON object, taken one by one; the others are refused in the end. `null` is none.

    where: the path of the object, which begins the names of its fields.
    """

    def __init__(self, body: object, where: str = ""):
        if not isinstance(body, dict):
            raise ApiError(f"{where or 'body'}: must be a JSON object", param=where or None)
        self._where = where and f"{where}."
        self._left = {name: value for name, value in body.items() if value is not None}
        self._known: list[str] = []

    def take(self, name: str, check: Callable[..., Any], default: Any = None, **bounds: Any) -> Any:
        """The checked value of a field; `default` if it is absent or null."""
        self._known.append(name)
        value = self._left.pop(name, None)
        return default if value is None else checked(self._where + name, check, value, **bounds)

    def require(self, name: str, check: Callable[..., Any], **bounds: Any) -> Any:
        """The same for a required field."""
        value = self.take(name, check, **bounds)
        if value is None:
            raise ApiError(f"{self._where}{name}: is required", param=self._where + name)
        return value

    def read(self, table: Mapping[str, Row], limits: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """The checked values of all fields of a table. limits: by name, for the bounds."""
        values = {}
        for name, (check, default, bounds) in table.items():
            bounds = {key: limits[bound] if isinstance(bound, str) else bound for key, bound in bounds.items()}
            if default is REQUIRED:
                values[name] = self.require(name, check, **bounds)
            else:
                values[name] = self.take(name, check, default, **bounds)
        return values

    def rest(self) -> dict[str, Any]:
        """The other fields, for another reader."""
        left, self._left = self._left, {}
        return left

    def end(
        self, refused: Mapping[str, tuple[object, ...]] = MappingProxyType({}), *, ignore_unknown: bool = False
    ) -> None:
        """Refuses the other fields; an unknown one with the closest of the taken ones.

        refused: unsupported fields -> values which ask for nothing and are allowed.
        ignore_unknown: logs unknown fields instead.
        """
        for name, value in self._left.items():
            # Unknown: suggest the closest name.
            param = self._where + name
            if name not in refused and ignore_unknown:
                _LOG.warning("jspec: ignored the unknown field %r", param[:200])
                continue
            if name not in refused:
                close = difflib.get_close_matches(name[:64], self._known, 1)
                hint = f"; did you mean {self._where}{close[0]}?" if close else ""
                raise ApiError(f"{param[:200]}: unknown field{hint}", param=param, code="unknown_field")
            # Known but unsupported: only values without an effect may be sent.
            neutral = refused[name]
            if not any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in neutral):
                raise ApiError(
                    f"{param}: not supported by this server; must be omitted" + "".join(f" or {v!r}" for v in neutral),
                    param=param,
                    code="unsupported_field",
                )


def read_object(
    name: str, value: object, table: Mapping[str, Row], refused: Mapping[str, tuple[object, ...]] = MappingProxyType({})
) -> dict[str, Any]:
    """The checked values of an object inside a request. refused: as in `Fields.end`."""
    fields = Fields(value, name)
    values = fields.read(table)
    fields.end(refused)
    return values


def checked(name: str, check: Callable[..., Any], value: object, **bounds: Any) -> Any:
    """`check(name, value, **bounds)`, whose errors become an `ApiError` about the field `name`."""
    try:
        return check(name, value, **bounds)
    except (TypeError, ValueError) as error:
        raise ApiError(str(error), param=name) from None


def check_whole(name: str, value: object, *, least: int, most: int | None = None) -> int:
    """An integer; 5.0 is one, too."""
    return check_int(
        name, int(value) if isinstance(value, float) and value.is_integer() else value, least=least, most=most
    )


def check_object(name: str, value: object) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise TypeError(f"{name}: must be an object")
    return value
