"""The options of a generation: defaults, the choice of drafter and rule of acceptance, and validation."""

import numpy as np

from jspec import drafters
from jspec.core import accept
from jspec.core.types import Accept, AdaptiveDrafter, Drafter, RowSampling, Target
from jspec.engine.model import Model

DEFAULT_PAGE_SIZE = 64


def choose(drafter: str | Drafter | None, model: Model) -> Drafter:
    """As `drafters.resolve`; "auto" is what the model's draft is made for, and ngram where it has none."""
    if isinstance(drafter, str) and drafter == "auto":
        drafter = "ngram" if model.draft is None else model.draft.drafter
    return drafters.resolve(drafter)


def choose_rule(rule: str | Accept | None, rows: RowSampling | None, drafter: Drafter) -> tuple[Accept, Drafter]:
    """The rule of acceptance for these parameters, and the drafter that drafts for it.

    Raises:
      ValueError: an unknown name, or a rule that would not keep the target's law.
      TypeError: neither a name nor a callable.
    """
    greedy = rows is None or rows.temperature is None
    if rule is None:
        rule = "greedy" if greedy else "coupled"
    if not isinstance(rule, str):
        if not callable(rule):
            raise TypeError(f"accept={rule!r}: give one of {', '.join(accept.RULES)}, or an object to call")
        if greedy and isinstance(rule, accept.LossyThresholds):
            raise ValueError(f"accept={rule}: thresholds change nothing where all rows are greedy; leave it out")
        return rule, drafter
    if rule not in accept.RULES:
        raise ValueError(f"accept={rule!r} is unknown; there are {', '.join(accept.RULES)}")
    if greedy:
        return accept.greedy, drafter
    if rule == "greedy":
        raise ValueError("accept='greedy' with a temperature above 0 would not sample: leave it out, or name 'coupled'")
    if rule in accept.NEEDS and isinstance(drafter, AdaptiveDrafter):
        drafter = drafter.adapt(accept.NEEDS[rule])
    return accept.RULES[rule], drafter


def check_int(name: str, value, least: int, why: str) -> None:
    """Raises unless `value` is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}={value!r}: give an int")
    if value < least:
        raise ValueError(f"{name}={value}: {why}")


def check_fits(target: Target, longest: int, max_new_tokens: int) -> None:
    """Raises unless the longest prompt and its new tokens fit the context of the model."""
    if longest >= target.max_length:
        raise ValueError(f"the longest prompt has {longest} tokens: the model's context holds {target.max_length}")
    if longest + max_new_tokens > target.max_length:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}: with a prompt of {longest} tokens that is {longest + max_new_tokens}, "
            f"and the model's context holds {target.max_length}; at most {target.max_length - longest} fit"
        )


def check_seeds(seed, batch: int) -> np.ndarray:
    """A seed for each row."""
    given = [seed + i for i in range(batch)] if isinstance(seed, int | np.integer) else list(seed)
    if len(given) != batch:
        raise ValueError(f"seed={seed!r}: {len(given)} seeds for {batch} rows; give one, or one for each row")
    for value in given:
        check_int("seed", value, 0, "seeds are not negative")
        if value > np.iinfo(np.uint32).max:
            raise ValueError(f"seed={value}: a seed is less than 2^32")
    return np.asarray(given, np.uint32)
