"""Command-line arguments from dataclasses of options, checks of output files, and errors in the words of a shell."""

import argparse
import contextlib
import dataclasses
import difflib
import importlib.util
import os
import re
import stat
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from jspec.bench import report
from jspec.core import package
from jspec.core.checks import check_int, check_number
from jspec.core.options import kind_of, option_of, options_of

T = TypeVar("T")
_OPEN_LIMIT = 80
"""Characters of a value in a message."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        text = printable(" ".join(message.split()))
        if near := self._nearest(message):
            text += f"; did you mean {near}?"
        self.exit(2, f"{self.prog}: {text} ({self.prog} --help lists the options)\n")

    def _nearest(self, message: str) -> str | None:
        """The nearest command or option to a misspelled one in an error message."""
        wrong = re.match(
            r"argument (?:COMMAND|command): invalid choice: '([^']+)'|unrecognized arguments: (--[\w-]+)", message
        )
        groups = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        commands = {name: parser for group in groups for name, parser in (group.choices or {}).items()}
        known = [*commands]
        if wrong and wrong[2]:
            known = [option for parser in (self, *commands.values()) for option in parser._option_string_actions]
        return next(iter(difflib.get_close_matches(wrong[1] or wrong[2], known, 1)), None) if wrong else None


def set_options(
    parser: argparse.ArgumentParser, kind: type[T], run: Callable[[T], int], groups: Mapping[str, Sequence[str]]
) -> None:
    """Gives a parser the options of a dataclass, and what runs with them.

    kind: its field `command`, if it has one, gets what was typed.
    run: gets the options; returns the exit status.
    groups: title, and perhaps a text after a colon and a line break -> the options below it.
    """
    # Options outside of all groups come first.
    grouped = {option for names in groups.values() for option in names}
    add_options(parser, kind, [option for option in options_of(kind) if option not in grouped])
    for title, names in groups.items():
        head, _, text = title.partition(":\n")
        add_options(parser.add_argument_group(head, text or None), kind, names)
    parser.set_defaults(run=lambda arguments: run(read_options(arguments, kind)))


def add_options(
    parser: "argparse.ArgumentParser | argparse._ArgumentGroup", kind: type, names: Iterable[str] | None = None
) -> None:
    """Adds an argument for each option of a dataclass, see `jspec.core.options`.

    A value is checked against the bounds of its field when it is parsed. A flag of default True becomes --no-NAME,
    and one of default None both.

    names: those of the options to add; None: all.
    """
    fields = options_of(kind)
    for name in fields if names is None else names:
        field, spec = fields[name]
        value, required, text = kind_of(field), field.default is dataclasses.MISSING, spec.help.replace("%", "%%")
        if value.type is bool:
            flag, action = (f"no_{name}", "store_false") if field.default is True else (name, "store_true")
            action = argparse.BooleanOptionalAction if value.optional else action
            parser.add_argument(option_of(flag), dest=name, action=action, help=text)
            continue

        # The default is part of the help, unless that explains it.
        settings: dict[str, Any] = {"default": None, "help": text}
        if not required and field.default not in (None, ()):
            settings["default"] = field.default
            settings["help"] += "" if "(default" in spec.help else " (default: %(default)s)"

        # One value or several.
        if spec.choices:
            settings["choices"] = spec.choices
        else:
            settings["type"] = _parse(value.type, spec.bounds)
            settings["metavar"] = spec.metavar or {int: "N", float: "X"}.get(value.type, name.upper())
        if spec.repeated:
            settings["action"] = "append"
        elif value.many:
            settings["nargs"] = "+"

        if not spec.positional:
            parser.add_argument(option_of(name), **settings, dest=name, required=required)
        elif required:
            parser.add_argument(name, **settings)
        else:
            parser.add_argument(name, **settings, nargs="?")


def read_options(arguments: argparse.Namespace, kind: type[T]) -> T:
    """The dataclass whose options `add_options` added."""
    typed: dict[str, Any] = {name: getattr(arguments, name) for name in options_of(kind)}
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in typed.items() if x is not None}
    if "command" in (field.name for field in dataclasses.fields(kind)):  # pyright: ignore[reportArgumentType]
        values["command"] = report.command(arguments.program, arguments.arguments)
    return kind(**values)


def _parse(kind: type, bounds: Mapping[str, float]) -> Callable[[str], Any]:
    """Parses a value of this type within bounds."""

    def parse(text: str) -> Any:
        if kind not in (int, float):
            return kind(text)
        try:
            value = kind(text)
        except ValueError:
            required = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{_shown(text)}: must be {required}") from None
        try:
            return check_int("", value, **bounds) if kind is int else check_number("", value, **bounds)  # pyright: ignore
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{_shown(text)}: {str(error).partition(': ')[2]}") from None

    return parse


def check_output(option: str, path: Path) -> None:
    """Checks for permission to write a file, and leaves it as it is, or missing."""
    existed = os.path.lexists(path)
    try:
        # Opening a pipe without a reader would wait; with O_NONBLOCK it is an error.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(path, flags, 0o666)
    except FileNotFoundError:
        raise ValueError(f"{option} {path}: the directory {path.parent} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{option} {_shown(str(path))}: cannot be written ({reason})") from None
    # Remove the new file again; pipes and devices stay.
    regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
    os.close(descriptor)
    if regular and not existed:
        path.unlink()


def check_plot(path: Path) -> None:
    """Raises a ValueError if a picture cannot be written to this file."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot {path}: requires matplotlib: {package.install('notebooks')}")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise ValueError(
            f"--plot {path}: the name must end in one of {', '.join(f'.{kind}' for kind in sorted(kinds))}"
        )
    check_output("--plot", path)


@contextlib.contextmanager
def naming_models(sources: Mapping[str, str | None]) -> Generator[None, None, None]:
    """Adds the option with the name of a model to errors of the `with` block. given: option -> its value."""
    try:
        yield
    except (ValueError, OSError) as error:
        message = str(error)
        for option, value in sources.items():
            if value is not None and message.startswith((f"{value}:", repr(value))):
                raise ValueError(f"{option} {message}") from None
        typed = " ".join(f"{option} {value}" for option, value in sources.items() if value is not None)
        raise ValueError(f"{typed}: {message}") from None


def printable(text: str) -> str:
    """A message without the middle of very long words, and without what a terminal cannot show.

    Lone surrogates, from bytes of an argument beside text, are escaped.
    """
    text = re.sub(r"\S{200,}", lambda word: f"{word[0][:120]}...{word[0][-20:]}", text)
    return text.encode(errors="backslashreplace").decode()


def in_options(message: str, names: Iterable[str]) -> str:
    """An error message of the Python API in the words of the command line: `max_new_tokens=0` is `--max-new-tokens 0`.

    names: the options of the command, spelled as arguments in Python.
    """
    # Long names first: no name is a part of an earlier one.
    ordered = sorted(names, key=len, reverse=True)
    name = "|".join(map(re.escape, ordered))
    if not name:
        return message
    value = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,:;()]+(?:\([^()]*\))?"""
    assignment = rf"(?<![\w.])({name})=({value})"
    # Eagle(depth=0) names the class that takes the option, and jspec.load(..., draft="...") the function.
    call = rf"\b(?:jspec\.\w+|[A-Z]\w*)\((?:\.\.\., )?((?:{assignment}(?:, )?)+)\)"
    message = re.sub(call, lambda match: re.sub(r",(?= \w+=)", "", re.sub(r"(, )?\w+=None", "", match[1])), message)
    message = re.sub(assignment, lambda match: _typed(match[1], match[2]), message)
    # The name alone, where it cannot be an ordinary word.
    spelled = "|".join(option for option in ordered if "_" in option)
    if spelled:
        message = re.sub(rf"(?<![\w.=-])({spelled})(?![\w=])", lambda match: option_of(match[1]), message)
    return message.replace("jspec.load(...)", "this command")


def _typed(name: str, value: str) -> str:
    """An option with its value, as typed in a shell."""
    if value == "True":
        return option_of(name)
    if value == "None":
        return "--drafter plain" if name == "drafter" else f"no {option_of(name)}"
    plain = value[1:-1] if value[0] in "'\"" else value
    plain = "MODEL" if plain == "..." else plain
    return f"{option_of(name)} {plain if plain and not any(map(str.isspace, plain)) else value}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _OPEN_LIMIT else text[: _OPEN_LIMIT - 3] + "...")
