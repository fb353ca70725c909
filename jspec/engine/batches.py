"""Splits prompts into batches of one size, so that all run the same programs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jspec.core.sampling import each_of
from jspec.generation.options import GenerateOptions
from jspec.generation.result import Generations
from jspec.generation.run import Prompt, Run
from jspec.loading.model import Model


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts that run together.

    prompts: as many as in every other batch; after the first `count`, copies of the last one are padding.
    options: those of the batch, with the seed of each prompt.
    count: prompts without padding.
    left: prompts of this batch and of all later ones.
    """

    prompts: list[Prompt]
    options: GenerateOptions
    count: int
    left: int

    def run(self, model: Model) -> Generations:
        """The results of the first `count` prompts, and their counters. Copies take as many rounds as the original."""
        out = Run(model, self.prompts, self.options, plan=f"{self.left} prompts in batches").finish()
        return Generations(out.items[: self.count], out.stats.of_first(self.count))


def split(prompts: Sequence[Prompt], options: GenerateOptions, size: int) -> list[Batch]:
    """The prompts in order, `size` at a time; fewer if there are fewer of them in total.

    options: of all prompts, or in lists with one entry for each; one seed becomes `(seed, i)` for prompt i.

    Raises:
      ValueError, TypeError: another number of entries than of prompts.
    """
    count = len(prompts)
    seeds, limits = options.seeds(count), options.limits(count)
    samplings = each_of(options.sampling, count)
    size = min(size, count)
    batches = []
    for start in range(0, count, size):
        # Indices beyond the last prompt repeat it.
        index = [min(i, count - 1) for i in range(start, start + size)]
        per_prompt: dict[str, Any] = {
            "seed": [seeds[i] for i in index],
            "max_new_tokens": [limits[i] for i in index],
            "sampling": [samplings[i] for i in index],
        }
        batch, left = [prompts[i] for i in index], count - start
        batches.append(Batch(batch, dataclasses.replace(options, **per_prompt), min(size, left), left))
    return batches
