"""Many prompts in batches of one size, so that all of them run the same programs."""

import dataclasses
from collections.abc import Sequence

from jspec.engine.model import Model
from jspec.engine.options import GenerateOptions
from jspec.engine.result import Generations
from jspec.engine.run import Prompt, Run


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts that run together.

    prompts: as many as every other batch has; after the first `count`, copies of the last one fill it up.
    options: those of the batch, with the seed of each prompt.
    count: prompts whose results are wanted.
    """

    prompts: list[Prompt]
    options: GenerateOptions
    count: int

    def run(self, model: Model) -> Generations:
        """The results of the first `count` prompts, and their counters. Copies take as many rounds as the original."""
        out = Run(model, self.prompts, self.options).finish()
        return Generations(out.items[: self.count], out.stats.of_first(self.count))


def split(prompts: Sequence[Prompt], options: GenerateOptions, size: int) -> list[Batch]:
    """The prompts in order, `size` at a time; fewer if there are fewer of them in total.

    options: with one seed, which becomes `seed + i` for prompt i, or one for each prompt. Sampling parameters are
      those of all prompts.

    Raises:
      ValueError, TypeError: seeds that are too large, or not one for each prompt.
    """
    seeds = [int(seed) for seed in options.seeds(len(prompts))]
    size = min(size, len(prompts))
    batches = []
    for start in range(0, len(prompts), size):
        given, own = list(prompts[start : start + size]), seeds[start : start + size]
        missing = size - len(given)
        filled = dataclasses.replace(options, seed=tuple(own + own[-1:] * missing))
        batches.append(Batch(given + given[-1:] * missing, filled, len(given)))
    return batches
