"""Reads prompts and conversations from files of JSON."""

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from jspec.core.checks import check_text, shorten

STANDARD_INPUT = "-"
"""Names standard input where a file is expected."""
_PROMPT_FILE = "a JSON list, or one JSON value per line, of strings or of objects with the key 'prompt' or 'turns'"


def read_prompts(path: str | Path) -> list[str]:
    """Read the prompts of a file; formats and errors as in `read_records`."""
    return [record["prompt"] for record in read_records(path)]


def read_records(path: str | Path, *, conversations: bool = False) -> list[dict[str, Any]]:
    """Read prompts from a file: a JSON list, or one JSON value per line, of strings or of objects.

    An object has the key `prompt`, or the key `turns`, a list of the user's messages, as in Spec-Bench (Xia et al.,
    https://arxiv.org/abs/2401.07851). If its `rendered` is true, a chat template has rendered the prompt, and no
    special tokens are added.

    Args:
      path: the file; "-" is standard input.
      conversations: whether an object may have several turns.

    Returns:
      The objects. The key `prompt` of each has the prompt, or the first turn. A string becomes an object with only
      this key.

    Raises:
      ValueError: the file cannot be read, or has other content; the message names the file and the line or index.
    """
    if str(path) == STANDARD_INPUT:
        where, text = "standard input", read_standard_input()
    else:
        where, text = str(path), read_text(Path(path))
    if text.lstrip().startswith("["):
        listed = _parse_json(text, where)
        values = [(f"{where}, prompt {i}", value) for i, value in enumerate(listed, 1)]
    else:
        lines = [(f"{where}, line {i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        values = [(name, _parse_json(line, name)) for name, line in lines]
    if not values:
        raise ValueError(f"{where}: has no prompts; must be {_PROMPT_FILE}")
    return [_record(name, value, conversations) for name, value in values]


def read_standard_input() -> str:
    """Read standard input; ValueError if it cannot be read, or is not UTF-8."""
    if sys.stdin is None:
        raise ValueError("standard input: is closed")
    try:
        content = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read()
    except OSError as error:  # for example a directory
        raise ValueError(f"standard input: cannot be read ({error.strerror or error})") from None
    return content if isinstance(content, str) else _decode(content, "standard input")


def read_text(path: Path) -> str:
    """Read a text file; ValueError if it cannot be read, or is not UTF-8."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{path}: cannot be read ({reason})") from None
    return _decode(content, str(path))


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: byte {error.start} is not UTF-8; must be UTF-8 text") from None


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); must be {_PROMPT_FILE}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _record(where: str, value: object, conversations: bool) -> dict[str, Any]:
    """Check a value, and return it as an object with a prompt."""
    record = dict(value) if isinstance(value, dict) else {"prompt": value}
    turns = _turns(where, record, conversations) if "turns" in record else [record.get("prompt")]
    for turn in turns:
        if not isinstance(turn, str):
            raise ValueError(
                f"{where}: must be a string, or an object whose key 'prompt' is a string or whose key 'turns' is a "
                "list of strings"
            )
        try:
            check_text("prompt", turn)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return {**record, "prompt": turns[0]}


def _turns(where: str, record: dict[str, Any], conversations: bool) -> list[object]:
    """Check the turns of an object, at least one."""
    if "prompt" in record:
        raise ValueError(f"{where}: must have one of the keys 'prompt' and 'turns', not both")
    turns = record["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: turns={shorten(turns)}: must be a list of at least one string")
    if len(turns) > 1 and not conversations:
        raise ValueError(f"{where}: has {len(turns)} turns; must have one, except for `jspec evaluate --chat`")
    return turns
