"""Metrics of drafters on a set of prompts: accept length, speed, and how much of the text is repeated."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tqdm import tqdm

from jspec import drafters
from jspec.core.checks import check_flag, check_int, check_text, shorten
from jspec.core.package import ASSETS
from jspec.core.sampling import Sampling
from jspec.core.types import Accept, Drafter
from jspec.engine.batches import split
from jspec.engine.model import Model
from jspec.engine.options import GenerateOptions, check_fits, choose_drafter
from jspec.engine.result import Generations, GenerationStats
from jspec.engine.run import Prompt, encode_prompts

REPEAT_LENGTH = 16
"""Tokens that must occur again for a text to count as repeated."""
STANDARD_INPUT = "-"
"""Names standard input where a file is expected."""
_PROMPT_FILE = "a JSON list, or one JSON value per line, of strings or of objects with the key 'prompt'"


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """Metrics of a drafter over all prompts.

    drafter: its class with its depth and the options that are set, or "plain".
    accept_length: mean number of tokens per round, bonus token included.
    acceptance_by_position: [depth] share of rounds that accepted the draft token at each position.
    tokens_per_second: new tokens over the time of the rounds, without prefill and compilation.
    new_tokens: in total.
    repeated: share of the new tokens that end a run of REPEAT_LENGTH tokens that occurred earlier in their sequence.
    generations: the output of each batch.
    """

    drafter: str
    accept_length: float
    acceptance_by_position: np.ndarray
    tokens_per_second: float
    new_tokens: int
    repeated: float
    generations: list[Generations] = dataclasses.field(repr=False)

    @property
    def tokens(self) -> list[list[int]]:
        """New ids of each prompt."""
        return [generation.tokens for batch in self.generations for generation in batch]


def heldout_prompts() -> list[str]:
    """The prompts that ship with the bundled models, from packages that were not used to train them."""
    path = ASSETS / "heldout_prompts.json"
    return [record["prompt"] for record in json.loads(path.read_text(encoding="utf-8"))]


def read_prompts(path: str | Path) -> list[str]:
    """The prompts of a file, see `read_records`."""
    return [record["prompt"] for record in read_records(path)]


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Prompts from a file: a JSON list, or one JSON value per line, of strings or of objects with the key `prompt`.

    An object whose `rendered` is true has the text of a chat template, to which no special tokens are added.

    path: the file; "-" is standard input.

    Returns:
      The objects; a string as an object that has the key `prompt` only.

    Raises:
      ValueError: the file cannot be read, or has other content; the message has the file and the line or the index.
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
    return [_record(name, value) for name, value in values]


def read_standard_input() -> str:
    """All text of standard input.

    Raises:
      ValueError: it cannot be read, or is not UTF-8.
    """
    stream = sys.stdin
    if stream is None:
        raise ValueError("standard input: is closed")
    try:
        content = stream.buffer.read() if hasattr(stream, "buffer") else stream.read()
    except OSError as error:  # for example a directory
        raise ValueError(f"standard input: cannot be read ({error.strerror or error})") from None
    return content if isinstance(content, str) else _decode(content, "standard input")


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
      ValueError: it cannot be read, or is not UTF-8.
    """
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


def _record(where: str, value: object) -> dict[str, Any]:
    """A prompt and what came with it."""
    record = value if isinstance(value, dict) else {"prompt": value}
    if not isinstance(record.get("prompt"), str):
        raise ValueError(f"{where}: must be a string, or an object whose key 'prompt' is a string")
    try:
        check_text("prompt", record["prompt"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return record


def evaluate(
    model: Model,
    prompts: Sequence[Prompt],
    drafter: str | Drafter | None,
    *,
    max_new_tokens: int = 128,
    batch: int = 1,
    progress: bool = False,
    sampling: Sampling | None = None,
    accept: str | Accept | None = None,
    seed: int = 0,
) -> Evaluation:
    """Continues the prompts, `batch` of them at a time, with one drafter.

    The first batch runs twice and is measured once, so that the time contains no warm-up. Prompt i uses `seed + i` for
    every batch size. Copies of the last prompt fill up the last batch, so that it runs the same program; they are
    neither returned nor counted, but the time of their batch includes them.

    Args:
      drafter, max_new_tokens, sampling, accept, seed: as in `jspec.generate`.
      progress: whether to show a progress bar.

    Raises:
      ValueError, TypeError: as in `jspec.generate`; or no prompts.
    """
    check_int("max_new_tokens", max_new_tokens, least=1)
    options = GenerateOptions(
        drafter=drafter, max_new_tokens=max_new_tokens, sampling=sampling, accept=accept, seed=seed
    )
    batch, progress = check_int("batch", batch, least=1), check_flag("progress", progress)
    if sampling is not None and not isinstance(sampling, Sampling):
        raise TypeError(f"sampling={shorten(sampling)}: must be a jspec.Sampling, or None (greedy)")
    check_int("seed", seed, least=0)
    # What is wrong with the last prompt must not be found after the others have been measured.
    single, ids = encode_prompts(model, prompts)
    if single:
        raise ValueError(f"prompts={shorten(prompts)}: must be a list of prompts")
    check_fits(model.target, max(map(len, ids)), max_new_tokens)
    name = drafters.describe(choose_drafter(drafter, model))
    batches = split(prompts, options, batch)
    outputs = []
    with tqdm(total=len(batches), desc=f"{name}: compiling", disable=not progress) as bar:
        batches[0].run(model)
        bar.set_description(name)
        for each in batches:
            outputs.append(each.run(model))
            bar.update()
    parts = [out.stats for out in outputs]
    stats = GenerationStats.total(parts, sum(part.seconds for part in parts))
    repeated = sum(count_repeated(item.prompt, item.tokens) for out in outputs for item in out)
    return Evaluation(
        drafter=name,
        accept_length=stats.accept_length,
        acceptance_by_position=stats.acceptance_by_position,
        tokens_per_second=stats.tokens_per_second,
        new_tokens=stats.new_tokens,
        repeated=repeated / stats.new_tokens,
        generations=outputs,
    )


def count_repeated(prompt: Sequence[int], new: Sequence[int]) -> int:
    """How many of the new tokens end a run of REPEAT_LENGTH tokens that occurred earlier in the sequence."""
    tokens, seen, repeated = [*prompt, *new], set(), 0
    for end in range(REPEAT_LENGTH, len(tokens) + 1):
        run = tuple(tokens[end - REPEAT_LENGTH : end])
        repeated += run in seen and end > len(prompt)
        seen.add(run)
    return repeated
