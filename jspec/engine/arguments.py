"""What the commands share: options and values, files that are written, and errors in the words of the command line."""

import argparse
import contextlib
import importlib.util
import os
import re
import stat
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from jspec.cache.narrow import KV_FORMATS
from jspec.core import package
from jspec.core.checks import check_number

_OPEN_LIMIT = 80
"""Characters of a value that a message shows."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        text = printable(" ".join(message.split()))
        self.exit(2, f"{self.prog}: {text} ({self.prog} --help lists the options)\n")


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Parses an integer within bounds, both included."""
    wanted = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            value = int(text)
            if value >= least and (most is None or value <= most):
                return value
        raise argparse.ArgumentTypeError(f"{_shown(text)}: must be {wanted}")

    return parse


def number(text: str) -> float:
    """Parses a number that is finite in float32; its bounds are checked where it is used."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{_shown(text)}: must be a number") from None
    try:
        return check_number("value", value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{_shown(text)}: must be finite, and not 0 by rounding, in float32") from None


def check_output(option: str, path: Path) -> None:
    """Checks that a file can be written, and leaves it as it is, or missing.

    Raises:
      ValueError: it cannot; the message has the option, the path and the reason.
    """
    existed = os.path.lexists(path)
    try:
        # Opening a pipe that nobody reads would wait; with O_NONBLOCK it is an error.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(path, flags, 0o666)
    except FileNotFoundError:
        raise ValueError(f"{option} {path}: the directory {path.parent} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{option} {_shown(str(path))}: cannot be written ({reason})") from None
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
def naming_models(options: Mapping[str, str | None]) -> Generator[None, None, None]:
    """Adds to errors of the `with` block, which loads models, the option that names the model.

    options: option -> its value.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        message = str(error)
        for option, value in options.items():
            if value is not None and message.startswith((f"{value}:", repr(value))):
                raise ValueError(f"{option} {message}") from None
        given = " ".join(f"{option} {value}" for option, value in options.items() if value is not None)
        raise ValueError(f"{given}: {message}") from None


def printable(text: str) -> str:
    """A message without the middle of very long words, and without what a terminal cannot show.

    Lone surrogates, which bytes of an argument become that are no text, are escaped.
    """
    text = re.sub(r"\S{200,}", lambda found: f"{found[0][:120]}...{found[0][-20:]}", text)
    return text.encode(errors="backslashreplace").decode()


MAX_TOKENS = 2**31 - 1
"""The largest count that an option takes."""
LONGER = {"window": "draft_window"}
"""Arguments whose options have longer names, because the options of all objects are together on the command line."""


def add_window(group: "argparse._ArgumentGroup") -> None:
    """Adds the options of the draft's window."""
    group.add_argument(
        "--draft-window",
        type=integer(1, MAX_TOKENS),
        dest="window",
        metavar="N",
        help="positions of the context that an EAGLE head, a block draft or a small model sees (default: all)",
    )
    group.add_argument(
        "--keep-first",
        type=integer(0, MAX_TOKENS),
        metavar="N",
        help="positions at the beginning that it sees in addition to --draft-window (default: 0)",
    )


def in_options(message: str, names: Iterable[str]) -> str:
    """An error message of the Python API in the words of the command line: `max_new_tokens=0` is `--max-new-tokens 0`.

    names: the options of the command, spelled as arguments in Python.
    """
    options = sorted(names, key=len, reverse=True)
    name = "|".join(map(re.escape, options))
    if not name:
        return message
    value = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,:;()]+(?:\([^()]*\))?"""
    given = rf"(?<![\w.])({name})=({value})"
    # Eagle(depth=0) names the class that takes the option, and jspec.load(..., draft="...") the function.
    call = rf"\b(?:jspec\.\w+|[A-Z]\w*)\((?:\.\.\., )?((?:{given}(?:, )?)+)\)"
    message = re.sub(call, lambda found: re.sub(r",(?= \w+=)", "", re.sub(r"(, )?\w+=None", "", found[1])), message)
    message = re.sub(given, lambda found: _typed(found[1], found[2]), message)
    # The name alone, where it cannot be an ordinary word.
    spelled = "|".join(option for option in options if "_" in option)
    if spelled:
        message = re.sub(rf"(?<![\w.=-])({spelled})(?![\w=])", lambda found: option_of(found[1]), message)
    return message.replace("jspec.load(...)", "this command")


def option_of(name: str) -> str:
    """The option for an argument of the Python API."""
    return f"--{LONGER.get(name, name).replace('_', '-')}"


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


def add_kv(parser: argparse.ArgumentParser) -> None:
    """Adds the option for caches of fewer bits."""
    parser.add_argument(
        "--kv",
        choices=tuple(KV_FORMATS),
        help="keep the target's keys and values in 8 bits (default: in the precision of the weights)",
    )
