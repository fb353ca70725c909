"""Typed, bounded reading of the values in a JSON file of a checkpoint.

Parsers get a `Fields` and never the JSON itself: no value is used without a type and bounds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Never, TypeVar, cast

from jspec.checkpoints.files import CheckpointError, Json, read_json
from jspec.core.checks import check_flag, check_int, check_number, check_text

T = TypeVar("T")
D = TypeVar("D")

MOST_LAYERS = 4096
MOST_SIZE = 2**24
"""Bound of widths, counts and vocabularies. No product of a few of them overflows 64 bits."""
MOST_LENGTH = 2**31 - 1
"""Bound of positions: 32-bit integers on the device."""
MOST_NUMBER = 1e12
"""Bound of factors and bases."""
_REQUIRED = cast(Never, object())


class Fields:
    """The values of a JSON object. A null counts as a missing key.

    where: the file, for errors.
    path: the keys from the top of the file to the object, each followed by a dot.
    names: how errors call keys whose names in the file are others; all others follow `path`.
    reads: the names of the keys whose values were read, of all objects of a file.
    """

    def __init__(
        self,
        raw: Json,
        where: str = "config.json",
        path: str = "",
        names: Mapping[str, str] = MappingProxyType({}),
        reads: set[str] | None = None,
    ):
        self._raw, self.where, self.path, self._names = raw, where, path, names
        self.reads = set[str]() if reads is None else reads

    @classmethod
    def flattened(cls, objects: "Sequence[Fields]", names: Mapping[str, str]) -> "Fields":
        """One object with values of several ones in a file, which must not contradict each other.

        names: key, or path of a key -> its name in the result; all others are left out.
        """
        raw: dict[str, Any] = {}
        shown: dict[str, str] = {}
        for fields in objects:
            for key in fields.keys():
                path, value = fields.path + key, fields._raw[key]
                name = names.get(path, names.get(key))
                if name is None:
                    continue
                if name in raw and raw[name] != value:
                    first = _shown(shown[name], raw[name])
                    raise CheckpointError(f"{fields.where}: {first}, but {_shown(path, value)}: must be the same")
                raw[name], shown[name] = value, path
        return cls(raw, objects[0].where, "", shown)

    def with_defaults(self, values: Mapping[str, Any]) -> "Fields":
        """Add keys where the object lacks them."""
        return Fields({**values, **self._raw}, self.where, self.path, self._names, self.reads)

    def replaced(self, **values: Any) -> "Fields":
        """The same object with other values."""
        return Fields({**self._raw, **values}, self.where, self.path, self._names, self.reads)

    def merged(self, other: "Fields") -> "Fields":
        """The values of both objects; those of `other`, whose path errors name, take precedence."""
        return Fields({**self._raw, **other._raw}, other.where, (other if other._raw else self).path)

    def joined(self, other: "Fields") -> "Fields":
        """The values of both objects, which must not contradict each other; errors name the path of `other`."""
        for key in self.keys():
            if other.has(key) and self._raw[key] != other._raw[key]:
                raise CheckpointError(f"{self.where}: {self.describe(key)}, but {other.describe(key)}")
        return self.merged(other)

    def has(self, key: str) -> bool:
        """Whether there is a value other than null."""
        return self._raw.get(key) is not None

    def is_set(self, key: str) -> bool:
        """Whether there is a value other than false, zero or empty; for options whose values do not matter."""
        return bool(self._raw.get(key))

    def is_off(self, key: str) -> bool:
        """Whether the value is false."""
        return self._raw.get(key) is False

    def is_empty(self, key: str) -> bool:
        """Whether the value is an empty string, list or object."""
        return self._raw.get(key) in ("", [], {})

    def name(self, key: str) -> str:
        """A key as it is in the file, after the keys to its object."""
        return self._names.get(key, self.path + key)

    def keys(self) -> list[str]:
        """The keys whose value is not null."""
        return [key for key in self._raw if self.has(key)]

    def value(self, key: str) -> Any:
        """A value that another object is to hold, unchecked."""
        return self._raw.get(key)

    def wrong(self, key: str, value: object, problem: str) -> CheckpointError:
        """The error about a value of the right type in contradiction to others."""
        return CheckpointError(f"{self.where}: {self.name(key)}={value}: {problem}")

    def read_int(self, key: str, default: D = _REQUIRED, *, least: int = 1, most: int = MOST_SIZE) -> int | D:
        """An integer from `least` to `most`; `default` if the key is missing.

        Raises:
          CheckpointError: not such a value, or missing without a default. The same holds for the other methods.
        """
        return self._read(key, default, partial(check_int, least=least, most=most))

    def read_sizes(self, names: Mapping[str, str]) -> dict[str, int]:
        """Sizes, by the names of a table: key -> name; see `describe_fields`."""
        return {name: self.read_int(key) for key, name in names.items()}

    def read_number(
        self,
        key: str,
        default: D = _REQUIRED,
        *,
        least: float | None = None,
        above: float | None = None,
        most: float | None = None,
    ) -> float | D:
        """A finite number within bounds that hold in float32, see `check_number`."""
        return self._read(key, default, partial(check_number, least=least, above=above, most=most))

    def read_flag(self, key: str, default: D = _REQUIRED) -> bool | D:
        """True or false."""
        return self._read(key, default, check_flag)

    def read_text(self, key: str, default: D = _REQUIRED) -> str | D:
        """A string."""
        return self._read(key, default, check_text)

    def text_or_flag(self, key: str) -> str | bool:
        """A string, or true or false."""
        return self.read_flag(key) if isinstance(self._raw.get(key), bool) else self.read_text(key)

    def read_texts(self, key: str, default: D = _REQUIRED) -> tuple[str, ...] | D:
        """A list of strings."""
        return self._read_list(key, default, check_text)

    def read_ints(
        self, key: str, default: D = _REQUIRED, *, least: int = 0, most: int = MOST_SIZE, count: int = MOST_SIZE
    ) -> tuple[int, ...] | D:
        """A list of at most `count` integers from `least` to `most`."""
        return self._read_list(key, default, partial(check_int, least=least, most=most), count)

    def read_floats(self, key: str, *, above: float, most: float) -> tuple[float, ...]:
        """A list of at most `MOST_SIZE` values above `above` and up to `most`."""
        return self._read_list(key, _REQUIRED, partial(check_number, above=above, most=most), MOST_SIZE)

    def int_or_ints(self, key: str, *, least: int, most: int) -> tuple[int, ...]:
        """One integer or a list of them; empty if it is missing."""
        if isinstance(self._raw.get(key), list):
            return self.read_ints(key, least=least, most=most)
        return (self.read_int(key, least=least, most=most),) if self.has(key) else ()

    def section(self, key: str) -> "Fields":
        """An object within this one; empty if it is missing."""
        value = self._raw.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {_shown(self.name(key), value)}: must be an object")
        return Fields(value, self.where, f"{self.name(key)}.", reads=self.reads)

    def optional_sections(self, key: str) -> "list[Fields] | None":
        """The objects of a list; None if the value is a string or missing."""
        value = self._raw.get(key)
        if value is None or isinstance(value, str):
            return None
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise CheckpointError(f"{self.where}: {key} must be a string or a list of objects")
        return [Fields(item, self.where, f"{self.path}{key}[{index}].") for index, item in enumerate(value)]

    def token_text(self, key: str) -> str | None:
        """The text of a special token, a string or an object with its `content`; None if it is something else."""
        if isinstance(self._raw.get(key), dict):
            return self.section(key).token_text("content")
        return self.read_text(key) if isinstance(self._raw.get(key), str) else None

    def texts_or_objects(self, key: str) -> list[str]:
        """The texts of a list of special tokens, see `token_text`; entries of other types are left out."""
        value = self._raw.get(key)
        items = [Fields({"item": item}, self.where) for item in value] if isinstance(value, list) else []
        return [text for item in items if (text := item.token_text("item")) is not None]

    def required_section(self, key: str) -> "Fields":
        """An object within this one."""
        return self.section(key) if self.has(key) else self._missing(key)

    def describe(self, key: str) -> str:
        """`key=value` for errors about unsupported options."""
        return _shown(self.name(key), self._raw.get(key))

    def unsupported(self, supported: Mapping[str, Iterable[object]]) -> list[str]:
        """List options with unsupported values; missing ones are supported.

        supported: the values of each key, all of one type, which is then the key's.
        """
        wrong = []
        for key, allowed in supported.items():
            values = tuple(allowed)
            # The type of the allowed values tells how to read the key.
            readers = {
                bool: self.read_flag,
                str: self.read_text,
                int: partial(self.read_int, least=0),
                float: self.read_number,
            }
            value = readers[type(values[0])](key, None)
            if value is not None and value not in values:
                wrong.append(f"{self.describe(key)} (must be {' or '.join(map(repr, values))})")
        return wrong

    def _read(self, key: str, default: D, check: Callable[[str, Any], T]) -> T | D:
        value = self._raw.get(key)
        self.reads.add(self.name(key))
        # Null counts as absent if there is a default.
        if value is None:
            if default is not _REQUIRED:
                return default
            if key not in self._raw:
                self._missing(key)
        return self._checked(self.name(key), value, check)

    def _read_list(
        self, key: str, default: D, check: Callable[[str, Any], T], count: int = MOST_SIZE
    ) -> tuple[T, ...] | D:
        value, name = self._raw.get(key), self.name(key)
        if value is None:
            return self._missing(key) if default is _REQUIRED else default
        # Check the length before the items.
        if not isinstance(value, list):
            raise CheckpointError(f"{self.where}: {_shown(name, value)}: must be a list")
        if len(value) > count:
            raise CheckpointError(f"{self.where}: {name} has {len(value)} entries: must have at most {count}")
        return tuple(self._checked(f"{name}[{index}]", item, check) for index, item in enumerate(value))

    def _checked(self, name: str, value: object, check: Callable[[str, Any], T]) -> T:
        try:
            return check(name, value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{self.where}: {error}") from None

    def _missing(self, key: str) -> Any:
        raise CheckpointError(f"{self.where}: the key {self.name(key)!r} is missing")


def describe_fields(value: object, names: Mapping[str, str]) -> dict[str, Any]:
    """The attributes of a value, by the keys of a table: key -> name."""
    return {key: getattr(value, name) for key, name in names.items()}


def read_fields(path: Path) -> Fields:
    """The values in a JSON file."""
    return Fields(read_json(path), str(path))


def refuse(where: str, options: list[str], owner: str = "") -> None:
    """Raises CheckpointError with all unsupported options, if there are any. owner: the kind of model without them."""
    if options:
        context = f" in {owner}" if owner else ""
        raise CheckpointError(f"{where}: not supported{context}: {', '.join(dict.fromkeys(options))}")


def _shown(name: str, value: object) -> str:
    text = repr(value)
    return f"{name}={text if len(text) <= 200 else text[:200] + '...'}"
