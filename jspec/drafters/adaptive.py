"""Adaptive drafting: each round takes one of several drafters, by the acceptance and the cost of each."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from jspec.core import optional, tree
from jspec.core.checks import check_flag, check_int, check_number, shorten
from jspec.core.returned import check_unchanged
from jspec.core.struct import struct
from jspec.core.types import (
    DRAFTER_PARTS,
    Committed,
    DecodeState,
    Drafter,
    DraftNeeds,
    DraftTree,
    Params,
    Target,
)
from jspec.drafters import costs as round_costs
from jspec.drafters import policy
from jspec.drafters.base import bound, set_checked
from jspec.drafters.plain import Plain
from jspec.drafters.table import PROPOSING

MOST = 8
"""Drafters of one `Adaptive`; the loop's program contains a round of each."""
DEPTHS = (1, 3, 5, 8)
"""Depths of the drafters that None stands for."""
WITHOUT_DRAFT = "suffix"
"""The name of these drafters where no draft is loaded."""


@struct
class AdaptiveState:
    """The states of the drafters, and what the policy knows.

    All of it belongs to sequences, and zeros mean that nothing is known, as where a sequence begins.
    """

    states: tuple[PyTree, ...]
    """Those of the drafters that extend one; the others draft from these, too."""
    evidence: policy.Evidence
    best: Int[Array, " B"]
    """1 + the best choice in the last round; 0: none."""
    taken: Int[Array, " B"]
    """1 + the choice that the last round took; 0: none."""


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Takes in each round the drafter with the most expected tokens per unit of cost.

    All sequences of a batch, or of a group of devices, share the choice; those that have finished have no influence on
    it. Drafters of one draft share its cache: it absorbs what was committed in every round, whatever was taken.

    drafters: at most 8, each a drafter, or None for plain decoding. None: plain decoding and chains of 1, 3, 5 and 8
      tokens, as far as it goes, by the drafter for the loaded draft, or by "suffix" if there is none.
    costs: what a round with each of the drafters costs, in milliseconds or any other unit: by batch, such as
      {1: (5.6, 6.9), 32: (6.5, 11.2)}, or one sequence for all batches. Between batches they are interpolated, and
      beyond the first or last they are those of that one. `jspec.measure_costs` measures them. None: an estimate from
      the bytes and the operations of target and draft, for each batch.
    rate: from 0 to 1: how much less each older observation of a draft counts; 0.1 is a memory of about 10 rounds.
    prior: conditional acceptance that is assumed before the first round, from 0 to 1.
    hysteresis: another choice must be better by this share, at least 0.
    probe: every round of this number takes another choice to learn about it; at least 2.
    watch: whether drafters with the attribute `reads_tokens_alone`, such as `Ngram`, are judged in every round: what
      they would have drafted is compared with what the round has appended, whatever it took. So text that repeats is
      noticed at once and without probes, for a lookup per round.
    target: the configuration of the target; set by `bind`.
    """

    drafters: Any = None
    costs: Any = None
    rate: float = 0.1
    prior: float = 0.7
    hysteresis: float = 0.03
    probe: int = 32
    watch: bool = True
    target: Target | None = None

    def __post_init__(self):
        if self.drafters is not None:
            set_checked(self, drafters=_check_drafters(self.drafters))
        set_checked(
            self,
            costs=_check_costs(self.costs),
            rate=check_number("rate", self.rate, least=0.0, most=1.0, owner="Adaptive"),
            prior=check_number("prior", self.prior, least=0.0, most=1.0, owner="Adaptive"),
            hysteresis=check_number("hysteresis", self.hysteresis, least=0.0, owner="Adaptive"),
            probe=check_int("probe", self.probe, least=2, owner="Adaptive"),
            watch=check_flag("watch", self.watch, owner="Adaptive"),
        )
        if self.drafters is not None and self.costs is not None:
            _check_count(self.costs, len(self.drafters))

    # The drafters

    @property
    def branches(self) -> tuple[Drafter, ...]:
        """The drafters, bound."""
        bound(self, self.target)
        return self.drafters

    @property
    def depth(self) -> int:
        """That of the deepest drafter.

        Raises:
          ValueError: before `bind`.
        """
        return max(each.depth for each in self.branches)

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The layers that the drafters with a draft model read.

        Raises:
          ValueError: before `bind`.
        """
        return next((each.capture_layers for each in self.branches if each.capture_layers), ())

    @property
    def max_length(self) -> int:
        """The shortest context of a draft, or the target's."""
        contexts = [bound(self, self.target).max_length, *map(optional.max_length, self.branches)]
        return min(context for context in contexts if context is not None)

    @property
    def model(self) -> object:
        """The configuration of the draft; None if no drafter has one."""
        return next((model for each in self.branches if (model := getattr(each, "model", None)) is not None), None)

    def bind(self, target: Target, draft: object) -> "Adaptive":
        """Binds each drafter to the two models."""
        chosen = (
            _defaults(target, draft) if self.drafters is None else [each.bind(target, draft) for each in self.drafters]
        )
        drafters = _check_drafters(chosen)
        layers = {each.capture_layers for each in drafters if each.capture_layers}
        if len(layers) > 1:
            raise ValueError(f"Adaptive: its drafters read different layers of the target, {sorted(layers)}")
        if self.costs is not None:
            _check_count(self.costs, len(drafters))
        return dataclasses.replace(self, drafters=drafters, target=target)

    def adapt(self, needs: DraftNeeds) -> "Adaptive":
        """Adapts each drafter to the acceptance rule. The choice depends on past rounds only, as every rule allows."""
        if self.drafters is None:
            # `bind` would choose them without knowing the rule.
            raise ValueError("Adaptive(drafters=None): name the drafters for this acceptance rule")
        return dataclasses.replace(self, drafters=tuple(optional.adapted(drafter, needs) for drafter in self.drafters))

    # The state

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> AdaptiveState:
        """The states of the drafters; no evidence."""
        states = tuple(each.init(params, batch, capacity, page_size) for each in self._owners)
        shape = batch, max(self._choices.kinds, 1), max(self.depth, 1)
        evidence = policy.Evidence(jnp.zeros(shape), jnp.zeros(shape))
        return AdaptiveState(states, evidence, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))

    def states(self, state: AdaptiveState) -> tuple[PyTree, ...]:
        """The state from which each drafter drafts: its own, or one that it shares."""
        pairs = list(zip(self._owners, state.states, strict=True))
        return tuple(next(part for owner, part in pairs if optional.shares(x, owner)) for x in self.branches)

    def parts(self, state: AdaptiveState) -> tuple[tuple[Drafter, PyTree], ...]:
        """The states that are extended, each with the drafter that extends it."""
        return tuple(zip(self._owners, state.states, strict=True))

    def with_parts(self, state: AdaptiveState, parts: tuple[PyTree, ...]) -> AdaptiveState:
        """The state with others in place of these."""
        return dataclasses.replace(state, states=parts)

    # A round

    def choose(self, params: Params, s: DecodeState) -> tuple[Int[Array, ""], AdaptiveState]:
        """The drafter of this round, and the state with that choice."""
        costs = jnp.asarray(self.round_costs(params, s), jnp.float32)
        index, best = self.decide(s, s.draft, costs)
        return index, self.mark(s.draft, ~s.done, index, best)

    def decide(
        self, s: DecodeState, state: AdaptiveState, costs: Float[Array, " K"]
    ) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """The choice of this round and the best one, given what a round with each drafter costs."""
        choices, live = self._choices, ~s.done
        acceptance = policy.conditional_acceptance(state.evidence, live, self.prior)
        value = policy.expected_tokens(acceptance, choices) / costs
        previous = jnp.where(live, state.best, 0).max() - 1
        return policy.choose(value, previous, s.round_index, choices, hysteresis=self.hysteresis, probe=self.probe)

    def mark(self, state: AdaptiveState, live: Array, index: Int[Array, ""], best: Int[Array, ""]) -> AdaptiveState:
        """The state in whose live sequences this round takes the drafter `index`, while `best` is the best one."""
        best, taken = jnp.where(live, best + 1, state.best), jnp.where(live, index + 1, state.taken)
        return dataclasses.replace(state, best=best, taken=taken)

    def round_costs(self, params: Params, s: DecodeState) -> list[float]:
        """The costs of a round with each drafter at the batch of this state: those given, or the estimate."""
        if self.costs is not None:
            return round_costs.interpolate(self.costs, s.length.shape[0])
        each = [dataclasses.replace(s, draft=state) for state in self.states(s.draft)]
        return round_costs.estimate(params, bound(self, self.target), self.branches, each, self.depth)

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, AdaptiveState]:
        """The tree of this round's drafter, padded to the widest: for tools that inspect trees.

        A round of `jspec.core.round` verifies the tree as it is. Padding repeats the first draft, which changes
        nothing; where there is none, it is the last token.
        """
        index, state = self.choose(params, s)

        def tree_of(drafter: Drafter, own: PyTree) -> tuple[Array, Array]:
            drafted, after = drafter.draft(params, dataclasses.replace(s, draft=own))
            check_unchanged(drafter, own, after)
            tokens, parents = drafted.tokens, drafted.parents
            if parents is None:
                above = jnp.maximum(jnp.arange(tokens.shape[1], dtype=jnp.int32) - 1, 0)
                parents = jnp.broadcast_to(above[None], tokens.shape)
            return tokens, parents

        each = list(zip(self.branches, self.states(state), strict=True))
        nodes = max(jax.eval_shape(lambda pair=pair: tree_of(*pair))[0].shape[1] for pair in each)

        def padded(drafter: Drafter, own: PyTree) -> tuple[Array, Array]:
            tokens, parents = tree_of(drafter, own)
            missing = nodes - tokens.shape[1]
            again = jnp.broadcast_to(tokens[:, :2][:, -1:], (tokens.shape[0], missing))
            return jnp.concatenate([tokens, again], axis=1), jnp.pad(parents, ((0, 0), (0, missing)))

        tokens, parents = lax.switch(index, [lambda pair=pair: padded(*pair) for pair in each])
        return DraftTree(tokens, parents, depth=self.depth), state

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> AdaptiveState:
        """Extends all states, and observes what was accepted."""
        state: AdaptiveState = s.draft
        states = []
        for drafter, own in self.parts(state):
            hidden = committed.hidden if drafter.capture_layers else None
            absorbed = dataclasses.replace(committed, hidden=hidden)
            states.append(drafter.extend(params, dataclasses.replace(s, draft=own), absorbed))
        evidence = policy.observe(state.evidence, self._choices, state.taken - 1, committed.length, self.rate)
        # Prompts are no rounds: the states of sequences that are being read have no choice yet.
        appended = jnp.where(state.taken > 0, committed.length, 0)
        length = committed.start + 1
        column = jnp.arange(s.tokens.shape[1], dtype=jnp.int32)[None]
        before = dataclasses.replace(s, tokens=jnp.where(column < length[:, None], s.tokens, 0), length=length)
        for kind, drafter, own in self._watched(state):
            drafted, _ = drafter.draft(params, dataclasses.replace(before, draft=own))
            matched = tree.longest_match(drafted, committed.tokens, appended)
            evidence = policy.watch(evidence, kind, matched, jnp.minimum(appended, drafter.depth), self.rate)
        return dataclasses.replace(state, states=tuple(states), evidence=evidence)

    def _watched(self, state: AdaptiveState) -> list[tuple[int, Drafter, PyTree]]:
        """The number of each kind that is watched, with its deepest drafter and the state of that."""
        choices = self._choices
        found: dict[int, tuple[int, Drafter, PyTree]] = {}
        for kind, each, own in zip(choices.kind.tolist(), self.branches, self.states(state), strict=True):
            deeper = kind not in found or each.depth > found[kind][1].depth
            if kind >= 0 and choices.watched[kind] and deeper:
                found[kind] = kind, each, own
        return list(found.values())

    @property
    def _owners(self) -> tuple[Drafter, ...]:
        """The fewest drafters from whose states all draft."""
        owners: list[Drafter] = []
        for drafter in self.branches:
            if not any(optional.shares(drafter, owner) for owner in owners):
                owners = [owner for owner in owners if not optional.shares(owner, drafter)] + [drafter]
        return tuple(owners)

    @property
    def _choices(self) -> policy.Choices:
        """The drafters as the policy knows them."""
        kinds = [_kind(each) for each in self.branches]
        known = list(dict.fromkeys(kind for kind in kinds if kind is not None))
        index = np.array([-1 if kind is None else known.index(kind) for kind in kinds], np.int32)
        reading = [self.watch and getattr(each, "reads_tokens_alone", False) for each in self.branches]
        watched = np.array([any(reading[i] for i in np.flatnonzero(index == kind)) for kind in range(len(known))], bool)
        return policy.Choices(index, np.array([each.depth for each in self.branches], np.int32), watched)


def _kind(drafter: Drafter) -> object:
    """Equal for drafters whose drafts are accepted alike: chains that differ in their depth only. None: no drafts."""
    if not drafter.depth:
        return None
    if getattr(drafter, "width", None) != 1 or not dataclasses.is_dataclass(drafter):
        return drafter
    names = [field.name for field in dataclasses.fields(drafter) if field.name not in ("depth", "num_nodes")]
    return type(drafter), *(getattr(drafter, name) for name in names)


def _defaults(target: Target, draft: object) -> list[Drafter]:
    """The drafters that None stands for, bound."""
    kind = PROPOSING[getattr(draft, "drafter", WITHOUT_DRAFT)]
    found: list[Drafter] = [Plain()]
    for depth in DEPTHS:
        try:
            found.append((kind(depth=depth, width=1)).bind(target, draft))
        except ValueError:
            if len(found) == 1:
                raise
            break
    return found


def _check_drafters(drafters: object) -> tuple[Drafter, ...]:
    """The drafters as a tuple, plain decoding in place of None.

    Raises:
      TypeError, ValueError: not a list of different drafters.
    """
    if not isinstance(drafters, Sequence) or isinstance(drafters, str):
        raise TypeError(f"Adaptive(drafters={shorten(drafters)}): must be a list of drafters, or None")
    chosen = tuple(Plain() if each is None else each for each in drafters)
    for each in chosen:
        missing = [name for name in DRAFTER_PARTS if name not in dir(each)]
        if isinstance(each, type) or missing:
            given = each.__name__ if isinstance(each, type) else shorten(each)
            raise TypeError(f"Adaptive: drafters contains {given}, which is not a drafter: give objects, or None")
        if hasattr(type(each), "branches"):
            raise ValueError("Adaptive: drafters contains a drafter that chooses among others itself")
    if not 2 <= len(chosen) <= MOST:
        raise ValueError(f"Adaptive: {len(chosen)} drafters; must be from 2 to {MOST}")
    for index, each in enumerate(chosen):
        if each in chosen[:index]:
            raise ValueError(f"Adaptive: drafters contains {each!r} twice")
    return chosen


Costs = tuple[tuple[int, tuple[float, ...]], ...]
"""Batch and costs, by ascending batch."""


def _check_costs(given: object) -> Costs | None:
    """The table of costs as a tuple.

    Raises:
      TypeError, ValueError: not such a table.
    """
    if given is None:
        return None
    if isinstance(given, Mapping):
        rows = list(given.items())
    elif isinstance(given, tuple) and given and all(isinstance(row, tuple) and len(row) == 2 for row in given):
        rows = list(given)
    else:
        rows = [(1, given)]
    table: dict[int, tuple[float, ...]] = {}
    for batch, row in rows:
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise TypeError(f"Adaptive: costs={shorten(given)}: must be a number for each drafter, or those by batch")
        batch = check_int("costs", batch, least=1, owner="Adaptive")
        table[batch] = tuple(check_number("costs", cost, above=0.0, owner="Adaptive") for cost in row)
    if not table or len({len(row) for row in table.values()}) != 1:
        raise ValueError(f"Adaptive: costs={shorten(given)}: must be one cost for each drafter in every batch")
    return tuple(sorted(table.items()))


def _check_count(costs: Costs, count: int) -> None:
    """Raises ValueError unless there are costs for this number of drafters."""
    if len(costs[0][1]) != count:
        raise ValueError(f"Adaptive: costs of {len(costs[0][1])} drafters; must be those of the {count} in `drafters`")
