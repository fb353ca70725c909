"""Prompts for completion: a function's signature and docstring, without its body."""

import ast
import dataclasses
import warnings

from jspec.core.checks import check_int

MIN_STATEMENTS = 3
"""Shorter bodies, not counting the docstring, give too little to complete."""


@dataclasses.dataclass(frozen=True)
class PromptLimits:
    """How many prompts to write, and their lengths in tokens.

    Raises:
      TypeError, ValueError: a value other than an int or below 1, or a minimum above the maximum.
    """

    heldout: int = 128
    train: int = 65536
    min_tokens: int = 4
    max_tokens: int = 400

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_int(field.name, getattr(self, field.name), least=1, owner="PromptLimits")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens}: must be at most {self.max_tokens}, max_tokens")


def from_source(source: str) -> list[str]:
    """The prompts in a module: its functions, and the methods of its classes, each after a `class` line.

    Source that does not parse has none. Decorators are omitted.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    # `str.splitlines` also breaks at form feeds, which `ast` does not count.
    lines = source.split("\n")
    prompts = []
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            prompts.append(_cut(lines, node))
        elif isinstance(node, ast.ClassDef):
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
            prompts += [_cut(lines, method, f"class {node.name}:\n") for method in methods]
    return [prompt for prompt in prompts if prompt is not None]


def _cut(lines: list[str], node: ast.FunctionDef, before: str = "") -> str | None:
    """The lines from `def` to the end of the docstring; None for a function that is not suitable."""
    if len(node.body) <= MIN_STATEMENTS or ast.get_docstring(node) is None:
        return None
    docstring = node.body[0]
    assert docstring.end_lineno is not None and docstring.end_col_offset is not None
    if docstring.lineno == node.lineno:
        return None
    text = lines[node.lineno - 1 : docstring.end_lineno]
    # Offsets of `ast` count bytes of UTF-8.
    text[-1] = text[-1].encode()[: docstring.end_col_offset].decode()
    prompt = before + "\n".join(text)
    return prompt if prompt.endswith(('"""', "'''")) else None
