"""Chooses the method of a generation: the drafter, bound to its models, and the acceptance rule."""

import dataclasses

import jax.numpy as jnp

from jspec import drafters
from jspec.core import optional
from jspec.core.accept import NEEDS, RULES, LossyThresholds, greedy
from jspec.core.checks import check_int
from jspec.core.method import Method, Records
from jspec.core.sharding import Placement
from jspec.core.types import DRAFTER_PARTS, Accept, Drafter, RowSampling, Target
from jspec.drafters.base import MAX_DEPTH
from jspec.generation.options import check_rule
from jspec.loading.model import Model
from pallas_kernels import platform

MOST_WHOLE = 16
"""Maximum sequences of a round with the whole depth of an engine's default chains."""
SHORTER = {"gpu": {48: 3, 96: 2}}
"""Platform -> maximum sequences of a round -> depth of an engine's default chains; 1 with more sequences. Beyond about
150 tokens, the time of a round grows with their number."""


def choose_drafter(drafter: str | Drafter | None, model: Model) -> Drafter:
    """Resolves a drafter. "auto" is that of the loaded draft; without a draft, plain decoding or n-grams by cost."""
    if isinstance(drafter, str) and drafter == "auto":
        if model.draft is None:
            return drafters.Adaptive(drafters.WITHOUT_DRAFT, depths=drafters.WITHOUT_DRAFT_DEPTHS)
        drafter = model.draft.drafter
    return drafters.resolve(drafter)


def by_sequences(drafter: Drafter, model: Model) -> Drafter:
    """The default drafter of an engine: that of `choose_drafter`, with shorter chains in rounds of many sequences."""
    table = SHORTER.get(platform.platform())
    if table is None or getattr(drafter, "width", None) != 1 or not dataclasses.is_dataclass(drafter):
        return drafter
    depth = drafter.bind(model.target, model.draft).depth
    if depth < 2:
        return drafter
    shorter = [size for size in sorted({1, *table.values()}) if size < depth]
    chains = [dataclasses.replace(drafter, depth=size) for size in shorter]
    depths = {MOST_WHOLE: depth, **{count: min(size, depth) for count, size in table.items()}}
    return drafters.Adaptive((*chains, drafter), depths=depths)


def knows_greedy(rule: str | Accept | None) -> bool:
    """Whether a rule handles greedy sequences: by its name, or by itself (`for_greedy`).

    Other rules, such as those of users, read distributions only: those of greedy sequences must be point masses.
    """
    return rule is None or isinstance(rule, str) or getattr(rule, "for_greedy", False)


def with_point_masses(rule: str | Accept | None, sampling: RowSampling | None, batch: int) -> RowSampling | None:
    """The sampling parameters of `batch` sequences, with a temperature of 0 if the rule needs one."""
    # `choose_rule` refuses thresholds if nothing is sampled.
    if knows_greedy(rule) or isinstance(rule, LossyThresholds):
        return sampling
    if sampling is not None and sampling.temperature is not None:
        return sampling
    zeros = jnp.zeros(batch, jnp.float32)
    return RowSampling(temperature=zeros) if sampling is None else dataclasses.replace(sampling, temperature=zeros)


def choose_rule(
    rule: str | Accept | None, row_sampling: RowSampling | None, drafter: Drafter
) -> tuple[Accept, Drafter]:
    """Chooses the rule for sampling parameters, and adapts the drafter; ValueError or TypeError for no such rule."""
    # The default: coupled sampling if any sequence samples.
    check_rule(rule)
    all_greedy = row_sampling is None or row_sampling.temperature is None
    if rule is None:
        rule = "greedy" if all_greedy else "coupled"
    if not isinstance(rule, str):
        if all_greedy and isinstance(rule, LossyThresholds):
            raise ValueError(f"accept={rule}: LossyThresholds has no effect when every sequence is greedy; omit it")
        return rule, drafter
    # Without sampling, any rule by name is the greedy one.
    if all_greedy:
        return greedy, drafter
    if rule == "greedy":
        raise ValueError("accept='greedy' ignores the temperature; omit it, or use 'coupled'")
    return RULES[rule], optional.adapted(drafter, NEEDS[rule]) if rule in NEEDS else drafter


def choose_method(
    target: Target,
    draft: object,
    drafter: Drafter,
    accept: str | Accept | None,
    sampling: RowSampling | None,
    *,
    batch: int = 1,
    placement: Placement | None = None,
    record: Records | None = None,
) -> tuple[Method, RowSampling | None]:
    """The method of a batch, with a bound drafter, and the sampling parameters for its rule.

    record: as in `Method`. Raises as `choose_rule` and `bind_drafter`.
    """
    sampling = with_point_masses(accept, sampling, batch)
    rule, adapted = choose_rule(accept, sampling, drafter)
    return Method(target, bind_drafter(adapted, target, draft), rule, placement, record), sampling


def bind_drafter(drafter: Drafter, target: Target, draft: object) -> Drafter:
    """The drafter bound to these models; ValueError or TypeError if they do not fit, or chains are too long."""
    bound = drafter.bind(target, draft)
    kind, bound_kind = type(drafter).__name__, type(bound).__name__
    # A user's drafter may lack a part, or have one of another type.
    if missing := [part for part in DRAFTER_PARTS if not hasattr(bound, part)]:
        raise TypeError(f"{kind}.bind: must return a drafter, but this {bound_kind} has no {', '.join(missing)}")
    if not isinstance(bound.capture_layers, tuple):
        raise TypeError(
            f"{bound_kind}(capture_layers={bound.capture_layers!r}): must be a tuple of layers, () for none"
        )
    for layer in bound.capture_layers:
        check_int("capture_layers", layer, least=0, most=target.num_layers + 1, owner=bound_kind)
    check_int("depth", bound.depth, least=0, most=MAX_DEPTH, owner=type(bound).__name__)
    return bound
