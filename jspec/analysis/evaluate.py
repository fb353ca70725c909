"""Measures a drafter on a set of prompts: accept length, speed and repetition."""

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from jspec import drafters
from jspec.core.checks import check_flag, check_int, shorten
from jspec.core.package import ASSETS
from jspec.core.sampling import Sampling
from jspec.core.types import Accept, Drafter
from jspec.generation.method import choose_drafter
from jspec.generation.options import GenerateOptions
from jspec.generation.result import Generations, GenerationStats
from jspec.generation.run import Prompt, check, encode_prompts, in_batches
from jspec.loading.model import Model

REPEAT_LENGTH = 16
"""Length of a run of tokens whose second occurrence counts as repetition."""


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """Metrics of a drafter over all prompts.

    drafter: its class with its depth and non-default options, or "plain".
    accept_length: mean number of tokens per round, bonus token included.
    acceptance_by_position: [depth] share of rounds with an accepted draft token at each position.
    conditional_acceptance: [depth] the same among rounds with all earlier tokens accepted; NaN without any.
    tokens_per_second: new tokens over the time of the rounds, without prefill and compilation.
    new_tokens: in total.
    repeated: share of the new tokens at the end of a repeated run of REPEAT_LENGTH tokens.
    stats: the counters of all batches.
    generations: the output of each batch.
    """

    drafter: str
    accept_length: float
    acceptance_by_position: np.ndarray
    conditional_acceptance: np.ndarray
    tokens_per_second: float
    new_tokens: int
    repeated: float
    stats: GenerationStats = dataclasses.field(repr=False)
    generations: list[Generations] = dataclasses.field(repr=False)

    @property
    def tokens(self) -> list[list[int]]:
        """New ids of each prompt."""
        return [generation.tokens for batch in self.generations for generation in batch]

    @classmethod
    def total(cls, parts: "Sequence[Evaluation]") -> "Evaluation":
        """Combine evaluations of one drafter over several sets of prompts."""
        return cls.of(parts[0].drafter, [batch for part in parts for batch in part.generations])

    @classmethod
    def of(cls, drafter: str, generations: list[Generations]) -> "Evaluation":
        """Compute the metrics from the outputs of batches."""
        parts = [out.stats for out in generations]
        stats = GenerationStats.total(parts, sum(part.seconds for part in parts))
        repeated = sum(count_repeated(item.prompt, item.tokens) for out in generations for item in out)
        return cls(
            drafter=drafter,
            accept_length=stats.accept_length,
            acceptance_by_position=stats.acceptance_by_position,
            conditional_acceptance=stats.conditional_acceptance,
            tokens_per_second=stats.tokens_per_second,
            new_tokens=stats.new_tokens,
            repeated=repeated / stats.new_tokens,
            stats=stats,
            generations=generations,
        )


def heldout_prompts() -> list[str]:
    """The prompts of the bundled models, from packages outside of their training data."""
    path = ASSETS / "heldout_prompts.json"
    return [record["prompt"] for record in json.loads(path.read_text(encoding="utf-8"))]


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
    seed: int | Sequence[int | tuple[int, int]] = 0,
) -> Evaluation:
    """Continue the prompts with one drafter, `batch` at a time, and measure it.

    The first batch runs twice and is measured once, so the time contains no warm-up. Prompt i uses `(seed, i)` for
    every batch size. Copies of the last prompt fill the last batch, so it runs the same program; they are neither
    returned nor counted, but the time of their batch includes them.

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
    # Validate everything before measuring anything.
    single, ids = encode_prompts(model, prompts)
    if single:
        raise ValueError(f"prompts={shorten(prompts)}: must be a list of prompts")
    check(model, ids, options)
    name = drafters.describe(choose_drafter(drafter, model))
    outputs = []
    with tqdm(total=-(-len(ids) // batch), desc=f"{name}: compiling", disable=not progress) as bar:
        # Compile, and capture graphs.
        next(in_batches(model, ids, options, batch))
        bar.set_description(name)
        for out in in_batches(model, ids, options, batch):
            outputs.append(out)
            bar.update()
    return Evaluation.of(name, outputs)


def count_repeated(prompt: Sequence[int], new: Sequence[int]) -> int:
    """Count the new tokens at the end of a run of REPEAT_LENGTH tokens with an earlier occurrence in the sequence."""
    tokens, runs, repeated = [*prompt, *new], set(), 0
    for end in range(REPEAT_LENGTH, len(tokens) + 1):
        run = tuple(tokens[end - REPEAT_LENGTH : end])
        repeated += run in runs and end > len(prompt)
        runs.add(run)
    return repeated
