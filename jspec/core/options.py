"""Options as data: a field of a frozen dataclass states the default, the bounds and the help of an option.

`check_options` derives the checks of values from the fields, and `jspec.cli.arguments` the command line.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jspec.core.checks import check_flag, check_int, check_number, check_sequence, shown

_KEY = "option"
LONGER = {"window": "draft_window"}
"""Options with longer names on the command line, where options of several objects meet."""


@dataclasses.dataclass(frozen=True)
class Option:
    """Settings of a field besides its type and its default.

    help: for the command line; the default is appended to it, unless it names one.
    bounds: arguments of `check_int` or `check_number`.
    choices: the valid texts; empty: any.
    metavar: name of the value in the help.
    positional: whether the command line takes the value without a name.
    repeated: whether the option is repeated on the command line, with one value each time.
    """

    help: str = ""
    bounds: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    choices: Sequence[str] = ()
    metavar: str | None = None
    positional: bool = False
    repeated: bool = False


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    choices: Sequence[str] = (),
    metavar: str | None = None,
    positional: bool = False,
    repeated: bool = False,
    bounds: Mapping[str, Any] = types.MappingProxyType({}),
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """A field with an `Option`; required without a default.

    bounds: shared by several options, instead of `least`, `above` and `most`.
    """
    limits = {"least": least, "above": above, "most": most}
    bounds = {**bounds, **{name: bound for name, bound in limits.items() if bound is not None}}
    spec = Option(help, bounds, tuple(choices), metavar, positional, repeated)
    return dataclasses.field(default=default, metadata={_KEY: spec})


@dataclasses.dataclass(frozen=True)
class Kind:
    """The type of an option.

    type: of one value: int, float, bool, str or Path.
    many: whether it takes several values.
    optional: whether it may be None.
    """

    type: type
    many: bool = False
    optional: bool = False


def options_of(owner: Any) -> dict[str, tuple[dataclasses.Field[Any], Option]]:
    """The options of a dataclass, or of an instance, by name."""
    return {field.name: (field, field.metadata[_KEY]) for field in dataclasses.fields(owner) if _KEY in field.metadata}


def kind_of(field: dataclasses.Field[Any]) -> Kind:
    """The kind of a field annotated as `T`, `tuple[T, ...]`, or one of them or None."""
    annotation, optional = field.type, False
    if isinstance(annotation, types.UnionType):
        (annotation,) = (part for part in typing.get_args(annotation) if part is not type(None))
        optional = True
    many = typing.get_origin(annotation) is tuple
    one = typing.get_args(annotation)[0] if many else annotation
    assert isinstance(one, type), f"{field.name}: {field.type} is no type of an option"
    return Kind(one, many, optional)


def check_options(values: Any, owner: str = "") -> None:
    """Checks the options of an instance and sets them to plain values; TypeError or ValueError names an invalid one.

    owner: as in `check_int`.
    """
    for name, (field, spec) in options_of(values).items():
        value, kind = getattr(values, name), kind_of(field)
        if value is None and kind.optional:
            continue
        if not kind.many:
            checked = _check(name, value, kind.type, spec, owner)
        else:
            items = check_sequence(name, value, items=f"a list of {kind.type.__name__}", owner=owner)
            checked = tuple(_check(f"{name}[{i}]", item, kind.type, spec, owner) for i, item in enumerate(items))
        object.__setattr__(values, name, checked)


def set_checked(options: object, **values: object) -> None:
    """Sets fields of a frozen dataclass; for `__post_init__`."""
    for name, value in values.items():
        object.__setattr__(options, name, value)


def _check(name: str, value: object, kind: type, spec: Option, owner: str) -> object:
    if kind is bool:
        return check_flag(name, value, owner=owner)
    if kind is int:
        return check_int(name, value, owner=owner, **spec.bounds)
    if kind is float:
        return check_number(name, value, owner=owner, **spec.bounds)
    if not isinstance(value, str | Path):
        raise TypeError(f"{shown(name, value, owner)}: must be a str")
    if spec.choices and value not in spec.choices:
        raise ValueError(f"{shown(name, value, owner)}: must be one of {', '.join(spec.choices)}")
    return value


def option_of(name: str) -> str:
    """An option as the command line spells it."""
    return f"--{LONGER.get(name, name).replace('_', '-')}"


def typed(values: Any, name: str) -> str:
    """An option of an instance with its value, as typed on the command line."""
    value = getattr(values, name)
    if isinstance(value, bool):
        return option_of(name if value else f"no_{name}")
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    return f"{option_of(name)} {value:g}" if isinstance(value, float) else f"{option_of(name)} {value}"
