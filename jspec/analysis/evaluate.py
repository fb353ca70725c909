"""Measures drafters on a set of prompts: accept length, speed beside plain decoding, repeated text."""

import dataclasses
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jspec.core.sampling import Sampling
from jspec.core.types import Accept, Drafter
from jspec.drafters import resolve
from jspec.engine.generate import generate
from jspec.engine.model import Model
from jspec.engine.result import Generation, GenerationStats

REPEAT = 16
"""Tokens that must recur for a text to count as repeated."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A drafter's figures over all prompts.

    drafter: how it was set.
    accept_length: mean tokens a round, bonus included.
    acceptance_by_position: [depth] share of rounds that kept the draft at each position.
    tokens_per_second: new tokens over the time of the rounds, without prefill and compilation.
    new_tokens: in all.
    repeated: share of the new tokens that end a run of REPEAT tokens seen before in their row.
    generations: the outputs, a batch each.
    """

    drafter: str
    accept_length: float
    acceptance_by_position: np.ndarray
    tokens_per_second: float
    new_tokens: int
    repeated: float
    generations: list[Generation] = dataclasses.field(repr=False)

    @property
    def tokens(self) -> list[list[int]]:
        """New ids of each prompt."""
        return [row for out in self.generations for row in out.tokens]


def heldout_prompts() -> list[str]:
    """The prompts that ship with the bundled models: from packages that those were not trained on."""
    path = resources.files("jspec") / "assets" / "heldout_prompts.json"
    return [record["prompt"] for record in json.loads(path.read_text(encoding="utf-8"))]


def read_prompts(path: Path) -> list[str]:
    """Prompts from a JSON list of strings, or of objects with the key `prompt`.

    Raises:
      ValueError: another content.
    """
    records = json.loads(path.read_text(encoding="utf-8"))
    given = [record.get("prompt") if isinstance(record, dict) else record for record in records]
    prompts = [prompt for prompt in given if isinstance(prompt, str)]
    if not given or len(prompts) < len(given):
        raise ValueError(f"{path}: give a JSON list of strings, or of objects with the key 'prompt'")
    return prompts


def evaluate(
    model: Model,
    prompts: Sequence[str],
    drafter: str | Drafter | None,
    *,
    max_new_tokens: int = 128,
    batch: int = 1,
    progress: bool = False,
    sampling: Sampling | None = None,
    accept: str | Accept | None = None,
    seed: int = 0,
) -> Evaluation:
    """Generates after each prompt, `batch` rows at a time, with one drafter.

    The first batch runs twice and counts once, so that no first use of anything is in the time. Prompt i has the seed
    `seed + i` in batches of any size.
    """
    batches = [list(prompts[i : i + batch]) for i in range(0, len(prompts), batch)]
    settings = {"drafter": drafter, "max_new_tokens": max_new_tokens, "sampling": sampling, "accept": accept}
    outputs = []
    with tqdm(total=len(batches), desc=f"{drafter}: compiling", disable=not progress) as bar:
        generate(model, batches[0], seed=seed, **settings)
        bar.set_description(str(drafter))
        for i, rows in enumerate(batches):
            outputs.append(generate(model, rows, seed=seed + i * batch, **settings))
            bar.update()
    stats = GenerationStats(
        rounds=np.concatenate([out.stats.rounds for out in outputs]),
        accept_counts=np.concatenate([out.stats.accept_counts for out in outputs]),
        seconds=sum(out.stats.seconds for out in outputs),
    )
    ids = [model.tokenizer.encode(prompt) if model.tokenizer else [] for prompt in prompts]
    rows = [row for out in outputs for row in out.tokens]
    repeated = sum(count_repeated(prompt, row) for prompt, row in zip(ids, rows, strict=True))
    return Evaluation(
        drafter=repr(resolve(drafter)),
        accept_length=stats.accept_length,
        acceptance_by_position=stats.acceptance_by_position,
        tokens_per_second=stats.tokens_per_second,
        new_tokens=stats.new_tokens,
        repeated=repeated / stats.new_tokens,
        generations=outputs,
    )


def count_repeated(prompt: Sequence[int], new: Sequence[int]) -> int:
    """How many of the new tokens end a run of REPEAT tokens that occurred earlier in the row."""
    row, seen, repeated = [*prompt, *new], set(), 0
    for end in range(REPEAT, len(row) + 1):
        run = tuple(row[end - REPEAT : end])
        repeated += run in seen and end > len(prompt)
        seen.add(run)
    return repeated
