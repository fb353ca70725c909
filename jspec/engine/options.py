"""The options of a generation: one frozen value, validated when it is built."""

import dataclasses
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from jaxtyping import UInt32

from jspec import drafters
from jspec.core.accept import NEEDS, RULES, LossyThresholds, greedy
from jspec.core.sampling import Sampling
from jspec.core.types import Accept, AdaptiveDrafter, Drafter, RowSampling, Target
from jspec.engine.model import Model
from jspec.text.stream import check_stop

DEFAULT_PAGE_SIZE = 64
"""Rows per cache page."""


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """The options of a generation. Their meaning is documented at `jspec.generate`, whose keywords they are.

    `generate` and `stream` build this value from their keywords; code that passes options on builds it itself and
    hands it to `jspec.engine.run.Run`. What depends on the model or on the prompts is validated there.

    Raises:
      ValueError, TypeError: an invalid option; the message has its name, its value and what is valid.
    """

    drafter: str | Drafter | None = "auto"
    max_new_tokens: int = 128
    sampling: Sampling | Sequence[Sampling | None] | None = None
    accept: str | Accept | None = None
    stop: str | Sequence[str] = ()
    seed: int | Sequence[int] = 0
    logprobs: bool = False
    page_size: int = DEFAULT_PAGE_SIZE
    debug: bool = False

    def __post_init__(self):
        check_int("max_new_tokens", self.max_new_tokens, least=1)
        check_int("page_size", self.page_size, least=1)
        if self.drafter != "auto":
            drafters.resolve(self.drafter)
        _check_rule(self.accept)
        object.__setattr__(self, "stop", tuple(check_stop(self.stop)))
        if isinstance(self.seed, int | np.integer):
            self.seeds(1)
        else:
            object.__setattr__(self, "seed", tuple(self.seed))
            self.seeds(len(self.seed))

    def seeds(self, batch: int) -> UInt32[np.ndarray, " B"]:
        """The seed of each of `batch` sequences: those given, or `seed + i` for sequence i.

        Raises:
          ValueError, TypeError: not one seed per sequence, or not an int from 0 to 2**32 - 1.
        """
        seeds = [self.seed + i for i in range(batch)] if isinstance(self.seed, int | np.integer) else list(self.seed)
        if len(seeds) != batch:
            raise ValueError(
                f"seed={self.seed!r}: {len(seeds)} seeds for {batch} sequences; give one int, or one seed per sequence"
            )
        for seed in seeds:
            check_int("seed", seed, least=0)
            if seed > np.iinfo(np.uint32).max:
                raise ValueError(f"seed={seed}: must be less than 2**32")
        return np.asarray(seeds, np.uint32)


class GenerateKeywords(TypedDict, total=False):
    """The fields of `GenerateOptions`, as keywords of a function."""

    drafter: str | Drafter | None
    max_new_tokens: int
    sampling: Sampling | Sequence[Sampling | None] | None
    accept: str | Accept | None
    stop: str | Sequence[str]
    seed: int | Sequence[int]
    logprobs: bool
    page_size: int
    debug: bool


def choose_drafter(drafter: str | Drafter | None, model: Model) -> Drafter:
    """As `drafters.resolve`; "auto" is the drafter that uses the loaded draft, or ngram if there is no draft."""
    if isinstance(drafter, str) and drafter == "auto":
        drafter = "ngram" if model.draft is None else model.draft.drafter
    return drafters.resolve(drafter)


def choose_rule(
    rule: str | Accept | None, row_sampling: RowSampling | None, drafter: Drafter
) -> tuple[Accept, Drafter]:
    """The acceptance rule for these sampling parameters, and the drafter configured for that rule.

    Raises:
      ValueError: an unknown name, or a rule that does not apply to these parameters or to this drafter.
      TypeError: neither a name nor a callable.
    """
    _check_rule(rule)
    all_greedy = row_sampling is None or row_sampling.temperature is None
    if rule is None:
        rule = "greedy" if all_greedy else "coupled"
    if not isinstance(rule, str):
        if all_greedy and isinstance(rule, LossyThresholds):
            raise ValueError(f"accept={rule}: LossyThresholds has no effect when every sequence is greedy; omit it")
        return rule, drafter
    if all_greedy:
        return greedy, drafter
    if rule == "greedy":
        raise ValueError("accept='greedy' ignores the temperature; omit it, or use 'coupled'")
    if rule in NEEDS and isinstance(drafter, AdaptiveDrafter):
        drafter = drafter.adapt(NEEDS[rule])
    return RULES[rule], drafter


def check_int(name: str, value: object, *, least: int) -> None:
    """Raises TypeError or ValueError unless `value` is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}={value!r}: must be an int")
    if value < least:
        raise ValueError(f"{name}={value}: must be at least {least}")


def check_fits(target: Target, longest: int, max_new_tokens: int) -> None:
    """Raises ValueError unless the longest prompt and its new tokens fit in the context of the model."""
    if longest >= target.max_length:
        raise ValueError(
            f"the longest prompt has {longest} tokens, which leaves no space for new ones in the model's context of "
            f"{target.max_length}"
        )
    if longest + max_new_tokens > target.max_length:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}: with a prompt of {longest} tokens, at most "
            f"{target.max_length - longest} fit in the model's context of {target.max_length}"
        )


def _check_rule(rule: str | Accept | None) -> None:
    if rule is None:
        return
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"accept={rule!r}: must be one of {', '.join(RULES)}")
    elif not callable(rule):
        raise TypeError(f"accept={rule!r}: must be one of {', '.join(RULES)}, or a callable")
