"""A griffe extension for the API pages: reads the short form of our docstrings.

Classes and functions document their fields and parameters as lines such as `depth: tokens of the longest chain`, and
several names may share a line. The Google style of griffe wants a section around these lines and one entry per name.
"""

import functools
import importlib
import inspect
import re
from collections.abc import Iterable
from typing import Any

import griffe

_ENTRY = re.compile(r"(\w+(?:, \w+)*): (.*)")


def add_section(text: str, names: Iterable[str], section: str) -> str:
    """Puts the entries of known names, which begin at the margin, into a section."""
    lines, inside = [], False
    for line in text.split("\n"):
        entry = _ENTRY.fullmatch(line)
        if entry and set(entry[1].split(", ")) <= set(names):
            if not inside:
                lines += ["", f"{section}:"]
            inside = True
        elif line and not line.startswith(" "):
            inside = False
        lines.append(f"  {line}" if inside and line else line)
    return "\n".join(lines)


def split_entries(text: str) -> str:
    """One entry per name, where several share one."""
    pattern = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +\S.*)*)", re.MULTILINE)
    return pattern.sub(lambda m: "\n".join(f"{m[1]}{name}: {m[3]}" for name in m[2].split(", ")), text)


def expand_options(func: griffe.Function) -> None:
    """Shows the keywords of a function that takes the fields of a dataclass (`jspec.generation.options.takes`)."""
    if not any(str(decorator.value).startswith("takes(") for decorator in func.decorators):
        return
    module = importlib.import_module(func.module.path)
    path = func.path.removeprefix(f"{func.module.path}.").split(".")
    signature = inspect.signature(functools.reduce(getattr, path, module))
    named = [parameter for parameter in func.parameters if parameter.kind is not griffe.ParameterKind.var_keyword]
    known = {parameter.name for parameter in named}
    keywords = [
        griffe.Parameter(
            name,
            annotation=re.sub(r"(?:\w+\.)+(\w)", r"\1", inspect.formatannotation(parameter.annotation)),
            kind=griffe.ParameterKind.keyword_only,
            default=None if parameter.default is parameter.empty else repr(parameter.default),
        )
        for name, parameter in signature.parameters.items()
        if name not in known
    ]
    func.parameters = griffe.Parameters(*named, *keywords)


class ShortDocstrings(griffe.Extension):
    """Rewrites docstrings as they are collected."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Fields become a section of attributes."""
        if cls.docstring:
            cls.docstring.value = split_entries(add_section(cls.docstring.value, cls.members, "Attributes"))

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Parameters become a section of arguments."""
        expand_options(func)
        if func.docstring:
            names = [parameter.name for parameter in func.parameters]
            func.docstring.value = split_entries(add_section(func.docstring.value, names, "Args"))
