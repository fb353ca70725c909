"""Fields of a JSON object, each checked by name, and errors in OpenAI's format."""

import difflib
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

_LOG = logging.getLogger("jspec.serve")
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is answered with an error in OpenAI's format.

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
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Fields:
    """The fields of a JSON object, taken one by one; those that nobody took are refused in the end. `null` is none.

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
        """The same for a field that must be there."""
        value = self.take(name, check, **bounds)
        if value is None:
            raise ApiError(f"{self._where}{name}: is required", param=self._where + name)
        return value

    def end(
        self, refused: Mapping[str, tuple[object, ...]] = MappingProxyType({}), *, ignore_unknown: bool = False
    ) -> None:
        """Refuses the fields that are left; an unknown one with the closest of those that were taken.

        refused: fields that are not supported -> values that ask for nothing and are allowed.
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


def checked(name: str, check: Callable[..., Any], value: object, **bounds: Any) -> Any:
    """`check(name, value, **bounds)`, whose errors become an `ApiError` about the field `name`."""
    try:
        return check(name, value, **bounds)
    except (TypeError, ValueError) as error:
        raise ApiError(str(error), param=name) from None


def check_object(name: str, value: object) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise TypeError(f"{name}: must be an object")
    return value
