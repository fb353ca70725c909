"""Metrics of drafters on a set of prompts: accept length, speed, and how much of the text is repeated."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jspec.core.checks import check_flag, check_int, shorten
from jspec.core.package import ASSETS
from jspec.core.sampling import Sampling
from jspec.core.types import Accept, Drafter
from jspec.engine.model import Model
from jspec.engine.options import GenerateOptions, check_fits, choose_drafter
from jspec.engine.result import Generations, GenerationStats
from jspec.engine.run import Run, encode_prompts

REPEAT_LENGTH = 16
"""Tokens that must occur again for a text to count as repeated."""


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """Metrics of a drafter over all prompts.

    drafter: its repr, with all options.
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


def read_prompts(path: Path) -> list[str]:
    """Prompts from a JSON list of strings, or of objects with the key `prompt`.

    Raises:
      ValueError: any other content.
    """
    records = json.loads(path.read_text(encoding="utf-8"))
    given = [record.get("prompt") if isinstance(record, dict) else record for record in records]
    prompts = [prompt for prompt in given if isinstance(prompt, str)]
    if not given or len(prompts) < len(given):
        raise ValueError(f"{path}: must be a JSON list of strings, or of objects with the key 'prompt'")
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
    """Continues the prompts, `batch` of them at a time, with one drafter.

    The first batch runs twice and is measured once, so that the time contains no warm-up. Prompt i uses `seed + i` for
    every batch size.

    Args:
      drafter, max_new_tokens, sampling, accept, seed: as in `jspec.generate`.
      progress: whether to show a progress bar.

    Raises:
      ValueError, TypeError: as in `jspec.generate`.
    """
    options = GenerateOptions(
        drafter=drafter, max_new_tokens=max_new_tokens, sampling=sampling, accept=accept, seed=seed
    )
    batch, progress = check_int("batch", batch, least=1), check_flag("progress", progress)
    if sampling is not None and not isinstance(sampling, Sampling):
        raise TypeError(f"sampling={shorten(sampling)}: must be a jspec.Sampling, or None (greedy)")
    seed = check_int("seed", seed, least=0)
    # What is wrong with the last prompt must not be found after the others have been measured.
    single, ids = encode_prompts(model, prompts)
    if single:
        raise ValueError(f"prompts={shorten(prompts)}: must be a list of prompts")
    options.seeds(len(ids))
    check_fits(model.target, max(map(len, ids)), options.max_new_tokens)
    batches = [list(prompts[i : i + batch]) for i in range(0, len(prompts), batch)]
    outputs = []
    with tqdm(total=len(batches), desc=f"{drafter}: compiling", disable=not progress) as bar:
        Run(model, batches[0], options).finish()
        bar.set_description(str(drafter))
        for i, texts in enumerate(batches):
            outputs.append(Run(model, texts, dataclasses.replace(options, seed=seed + i * batch)).finish())
            bar.update()
    stats = GenerationStats(
        rounds=np.concatenate([out.stats.rounds for out in outputs]),
        accept_counts=np.concatenate([out.stats.accept_counts for out in outputs]),
        seconds=sum(out.stats.seconds for out in outputs),
        dropped=np.concatenate([out.stats.dropped for out in outputs]),
    )
    repeated = sum(count_repeated(item.prompt, item.tokens) for out in outputs for item in out)
    return Evaluation(
        drafter=repr(choose_drafter(drafter, model)),
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
