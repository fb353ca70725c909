"""Adaptive drafting: picks one of several drafters every round, by acceptance and cost."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PyTree

from jspec.core import optional, tree
from jspec.core.checks import check_int, shorten
from jspec.core.options import check_options, option, set_checked
from jspec.core.returned import check_unchanged
from jspec.core.struct import struct
from jspec.core.types import Committed, DecodeState, Drafter, DraftNeeds, DraftTree, Params, Target
from jspec.drafters import policy
from jspec.drafters.base import bound, check_drafter
from jspec.drafters.costs import check_costs, interpolated
from jspec.drafters.ngram import Ngram
from jspec.drafters.plain import Plain
from jspec.drafters.table import PROPOSING

MOST = 8
"""Maximum drafters of one `Adaptive`; the loop's program contains a round of each."""
DEPTHS = (1, 2, 5, 8)
"""Depths of the default drafters with a draft."""
WITHOUT_DRAFT = (Plain(), Ngram(depth=3), Ngram(depth=6))
"""The default drafters without one."""
WITHOUT_DRAFT_DEPTHS = {4: 6}
"""Their `depths`: the time of a round grows with its tokens where these are more than about 32, as on a CPU."""


@struct
class AdaptiveState:
    """The states of the drafters and of the policy, per sequence. Zeros at the beginning of a sequence."""

    states: tuple[PyTree, ...]
    """States of the drafters with one of their own; the others draft from these, too."""
    evidence: policy.Evidence
    best: Int[Array, " B"]
    """1 + the best choice in the last round; 0: none."""
    taken: Int[Array, " B"]
    """1 + the choice of the last round; 0: none."""


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Picks the drafter with the most expected tokens per unit of cost, in every round, on the device.

    All sequences of a batch, or of a group of devices, share the choice; finished ones have no influence. Drafters of
    one draft share its cache, which absorbs the committed tokens of every round, whichever drafter proposed them.

    drafters: at most 8, each a drafter, or None for plain decoding. None: plain decoding and chains of 1, 2, 5 and 8
      tokens, as far as it goes, by the drafter for the loaded draft; without one, n-grams of 3 and 6 tokens.
    costs: cost of a round with each drafter, in milliseconds or any other unit: by batch, such as
      {1: (5.6, 6.9), 32: (6.5, 11.2)}, or one sequence for all batches. Interpolated between batches, and constant
      beyond the first or last. `jspec.measure_costs` measures them. None: `jspec.generate`, `jspec.Engine` and what is
      built on them measure them once (docs/guide/models.md); in `jspec.generate_ids`, all rounds cost the same.
    rate: from 0 to 1: discount of each older observation of a draft; 0.1 is a memory of about 10 rounds.
    prior: conditional acceptance before the first round, from 0 to 1.
    hysteresis: another choice must be better by this share, at least 0.
    probe: one round in this number probes another choice; at least 2.
    watch: whether drafters with the attribute `reads_tokens_alone`, such as `Ngram`, are judged in every round, by
      comparing their drafts with the tokens appended. So repetitive text is noticed at once and without probes, for a
      lookup per round.
    urgency: how much more those sequences count that need the most rounds to their limit, at least 0: a batch ends with
      its last one. An engine takes 0, since other requests take the places of those that end.
    depths: sequences -> depth. A program of up to this many sequences has, of each kind, only the deepest drafter that
      is no deeper; a program of more has the shallowest. This saves the time of compiling the others, and with a
      single kind there is nothing to choose. None: programs have all drafters.
    target: the configuration of the target; set by `bind`.
    """

    drafters: Any = None
    costs: Any = None
    rate: float = option(0.1, least=0.0, most=1.0)
    prior: float = option(0.7, least=0.0, most=1.0)
    hysteresis: float = option(0.03, least=0.0)
    probe: int = option(32, least=2)
    watch: bool = option(True)
    urgency: float = option(12.0, least=0.0)
    depths: Any = None
    target: Target | None = None

    def __post_init__(self):
        check_options(self, "Adaptive")
        drafters = None if self.drafters is None else _check_drafters(self.drafters)
        costs = None if self.costs is None else check_costs("Adaptive", self.costs)
        if drafters is not None and costs is not None and len(costs[0][1]) != len(drafters):
            raise ValueError(
                f"Adaptive: costs of {len(costs[0][1])} drafters; must be those of the {len(drafters)} in `drafters`"
            )
        depths = None if self.depths is None else _check_depths(self.depths)
        set_checked(self, drafters=drafters, costs=costs, depths=depths)

    # The drafters

    @property
    def branches(self) -> tuple[Drafter, ...]:
        """The drafters, bound."""
        bound(self, self.target)
        return self.drafters

    @property
    def depth(self) -> int:
        """That of the deepest drafter; ValueError before `bind`."""
        return max(branch.depth for branch in self.branches)

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Layers read by the drafters with a draft model; ValueError before `bind`."""
        return next((branch.capture_layers for branch in self.branches if branch.capture_layers), ())

    @property
    def packs(self) -> bool:
        """Whether all drafters read pieces of prompts."""
        return all(map(optional.packs, self.branches))

    @property
    def max_length(self) -> int:
        """The longest context of a draft; that of the target where some drafter has none of its own."""
        longest = bound(self, self.target).max_length
        return max(longest if context is None else context for context in map(optional.max_length, self.branches))

    @property
    def model(self) -> object:
        """The configuration of the draft; None if no drafter has one."""
        return next(
            (model for drafter in self.branches if (model := getattr(drafter, "model", None)) is not None), None
        )

    def bind(self, target: Target, draft: object) -> "Adaptive":
        """Binds each drafter to the two models."""
        if self.drafters is None:
            drafters = _defaults(target, draft)
        else:
            drafters = [drafter.bind(target, draft) for drafter in self.drafters]
        # Drafters share the captured hidden states.
        layers = {drafter.capture_layers for drafter in drafters if drafter.capture_layers}
        if len(layers) > 1:
            raise ValueError(f"Adaptive: its drafters read different layers of the target, {sorted(layers)}")
        return dataclasses.replace(self, drafters=drafters, target=target)

    def adapt(self, needs: DraftNeeds) -> "Adaptive":
        """Adapts each drafter to the acceptance rule. The choice depends on past rounds only, as every rule allows."""
        if self.drafters is None:
            # `bind` would choose them without knowing the rule.
            raise ValueError("Adaptive(drafters=None): name the drafters for this acceptance rule")
        return dataclasses.replace(self, drafters=tuple(optional.adapted(drafter, needs) for drafter in self.drafters))

    def continuous(self) -> "Adaptive":
        """With equal sequences: where others take the places of those that end, all tokens count the same."""
        return dataclasses.replace(self, urgency=0.0)

    # The state

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> AdaptiveState:
        """The states of the drafters; no evidence."""
        states = tuple(owner.init(params, batch, capacity, page_size) for owner in self._owners)
        shape = batch, len(self._choices.quality), max(self.depth, 1)
        evidence = policy.Evidence(jnp.zeros(shape), jnp.zeros(shape))
        return AdaptiveState(states, evidence, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))

    def states(self, state: AdaptiveState) -> tuple[PyTree, ...]:
        """The state of each drafter: its own or a shared one."""
        # The first owner with a suitable state.
        pairs = list(zip(self._owners, state.states, strict=True))
        return tuple(next(part for owner, part in pairs if optional.shares(x, owner)) for x in self.branches)

    def parts(self, state: AdaptiveState) -> tuple[tuple[Drafter, PyTree], ...]:
        """The distinct states, each with the drafter that extends it."""
        return tuple(zip(self._owners, state.states, strict=True))

    def with_parts(self, state: AdaptiveState, parts: tuple[PyTree, ...]) -> AdaptiveState:
        """Replaces the distinct states."""
        return dataclasses.replace(state, states=parts)

    # A round

    def costs_at(self, batch: int) -> list[float] | None:
        """The costs of a round with each drafter, interpolated at a batch; None: they are to be measured."""
        if self.costs is None:
            return None if self._chooses else [1.0] * len(self.branches)
        return interpolated(self.costs, batch)

    def offered(self, batch: int) -> list[int]:
        """The drafters of programs for this many sequences."""
        if self.depths is None:
            return list(range(len(self.branches)))
        choices, best = self._choices, {}
        most = next((depth for size, depth in self.depths if batch <= size), 0)
        for index in np.argsort(choices.depth, kind="stable").tolist():
            kind = index if choices.kind[index] < 0 else ("kind", choices.kind[index])
            if kind not in best or choices.depth[index] <= most:
                best[kind] = index
        return sorted(best.values())

    @property
    def _chooses(self) -> bool:
        """Whether some program has several drafters."""
        return self.depths is None or len({*self._choices.kind.tolist()}) > 1 or -1 in self._choices.kind

    def choose(self, params: Params, s: DecodeState) -> tuple[Int[Array, ""], AdaptiveState]:
        """Chooses the drafter of this round; returns it with the new state."""
        state: AdaptiveState = s.draft
        if not self._chooses:
            return jnp.int32(self.offered(s.length.shape[0])[0]), state
        assert s.costs is not None
        choices, live, rows, remaining = self._choices, ~s.done, self._rows(state), s.limit - s.length
        depth = self._depth(s)
        offered = np.isin(np.arange(len(choices.depth)), self.offered(s.length.shape[0]))

        def tokens_of(weight: Array) -> Array:
            """The expected tokens of each sequence with each drafter, by the evidence of some sequences."""
            acceptance = policy.conditional_acceptance(state.evidence, weight, self.prior * choices.quality)
            return jnp.where(offered, policy.expected_tokens(acceptance, rows, choices, depth), 0.0)

        # Expected tokens per cost, over live sequences: those beyond the limit of a sequence do not count.
        likely = tokens_of(live.astype(jnp.float32)).max(1)
        progress = remaining, s.stats.rounds, s.length - s.prompt_length
        weights = policy.weights(live, *progress, likely, self.urgency)
        value, most = (
            weights @ jnp.minimum(tokens, remaining[:, None].astype(jnp.float32)) / s.costs
            for tokens in (tokens_of(weights), jnp.where(offered, depth + 1, 0).astype(jnp.float32))
        )
        previous = jnp.where(live, state.best, 0).max() - 1
        evidence = value, most, previous, s.round_index, choices
        index, best = policy.choose(*evidence, hysteresis=self.hysteresis, probe=self.probe)
        return index, self.mark(state, live, index, best)

    def mark(self, state: AdaptiveState, live: Array, index: Int[Array, ""], best: Int[Array, ""]) -> AdaptiveState:
        """Records the choice `index` and the best choice in live sequences."""
        best, taken = jnp.where(live, best + 1, state.best), jnp.where(live, index + 1, state.taken)
        return dataclasses.replace(state, best=best, taken=taken)

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, AdaptiveState]:
        """The tree of this round's drafter, padded to the widest tree, for inspection.

        A round of `jspec.core.round` verifies the tree unpadded. Padding repeats the first draft, or the last token, to
        no effect.
        """
        index, state = self.choose(params, s)

        def tree_of(drafter: Drafter, part: PyTree) -> tuple[Array, Array]:
            drafted, after = drafter.draft(params, dataclasses.replace(s, draft=part))
            check_unchanged(drafter, part, after)
            return drafted.tokens, tree.parents_of(drafted)

        # Pad every tree to the widest of the offered ones.
        offered, states = self.offered(s.length.shape[0]), self.states(state)
        pairs = [(self.branches[branch], states[branch]) for branch in offered]
        nodes = max(jax.eval_shape(lambda pair=pair: tree_of(*pair))[0].shape[1] for pair in pairs)

        def padded(drafter: Drafter, part: PyTree) -> tuple[Array, Array]:
            tokens, parents = tree_of(drafter, part)
            missing = nodes - tokens.shape[1]
            again = jnp.broadcast_to(tokens[:, :2][:, -1:], (tokens.shape[0], missing))
            return jnp.concatenate([tokens, again], axis=1), jnp.pad(parents, ((0, 0), (0, missing)))

        place = jnp.searchsorted(jnp.asarray(offered, jnp.int32), index, method="compare_all")
        tokens, parents = lax.switch(place, [lambda pair=pair: padded(*pair) for pair in pairs])
        return DraftTree(tokens, parents, depth=self.depth), state

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> AdaptiveState:
        """Extends all states, and observes the acceptance."""
        state: AdaptiveState = s.draft
        # Every state absorbs the committed tokens.
        states = []
        for drafter, part in self.parts(state):
            hidden = committed.hidden if drafter.capture_layers else None
            absorbed = dataclasses.replace(committed, hidden=hidden)
            states.append(drafter.extend(params, dataclasses.replace(s, draft=part), absorbed))
        if not self._chooses:
            return dataclasses.replace(state, states=tuple(states))
        # Evidence about the drafter of this round.
        rows = self._rows(state)
        taken, depth = state.taken - 1, self._depth(s)
        evidence = policy.observe(state.evidence, self._choices, depth, rows, taken, committed.length, self.rate)
        # Evidence about watched drafters. Prompts are no rounds: sequences in prefill have no choice yet.
        appended = jnp.where(state.taken > 0, committed.length, 0)
        length = committed.start + 1
        column = jnp.arange(s.tokens.shape[1], dtype=jnp.int32)[None]
        before = dataclasses.replace(s, tokens=jnp.where(column < length[:, None], s.tokens, 0), length=length)
        for kind, (drafter, part) in self._deepest(state).items():
            if not self._choices.watched[kind]:
                continue
            drafted, _ = drafter.draft(params, dataclasses.replace(before, draft=part))
            matched = tree.longest_match(drafted, committed.tokens, appended)
            judged = jnp.minimum(appended, drafter.depth)
            evidence = policy.judge(evidence, rows[:, kind], judged, matched, self.rate)
        return dataclasses.replace(state, states=tuple(states), evidence=evidence)

    def _deepest(self, state: AdaptiveState) -> dict[int, tuple[Drafter, PyTree]]:
        """The deepest drafter of each kind and its state, by ascending kind."""
        deepest: dict[int, tuple[Drafter, PyTree]] = {}
        for kind, drafter, part in zip(self._choices.kind.tolist(), self.branches, self.states(state), strict=True):
            if kind >= 0 and (kind not in deepest or drafter.depth > deepest[kind][0].depth):
                deepest[kind] = drafter, part
        return dict(sorted(deepest.items()))

    def _depth(self, s: DecodeState) -> Int[Array, "#B K"]:
        """The drafts that each sequence may take of each drafter."""
        depth = jnp.asarray(self._choices.depth)[None]
        return depth if s.draft_limits is None else jnp.minimum(depth, s.draft_limits)

    def _rows(self, state: AdaptiveState) -> Int[Array, "B F"]:
        """The rows of evidence of the next proposals."""
        batch = state.best.shape[0]
        grades = [optional.grade(drafter, part, batch) for drafter, part in self._deepest(state).values()]
        return self._choices.rows(jnp.stack(grades or [jnp.zeros(batch, jnp.int32)], axis=1))

    @property
    def _owners(self) -> tuple[Drafter, ...]:
        """The fewest drafters whose states serve all."""
        owners: list[Drafter] = []
        for drafter in self.branches:
            if not any(optional.shares(drafter, owner) for owner in owners):
                owners = [owner for owner in owners if not optional.shares(owner, drafter)] + [drafter]
        return tuple(owners)

    @property
    def _choices(self) -> policy.Choices:
        """The drafters as choices of the policy."""
        kinds = [_kind(drafter) for drafter in self.branches]
        # Number the kinds, and find those to watch.
        known = list(dict.fromkeys(kind for kind in kinds if kind is not None))
        index = np.array([-1 if kind is None else known.index(kind) for kind in kinds], np.int32)
        reading = [self.watch and getattr(drafter, "reads_tokens_alone", False) for drafter in self.branches]
        watched = np.array([any(reading[i] for i in np.flatnonzero(index == kind)) for kind in range(len(known))], bool)
        graded = dict(zip(kinds, map(optional.grades, self.branches), strict=True))
        depth = np.array([drafter.depth for drafter in self.branches], np.int32)
        return policy.Choices(index, depth, watched, np.array([graded[kind] for kind in known], np.int32))


def _kind(drafter: Drafter) -> object:
    """Groups drafters of equal conditional acceptance: chains of different depths. None: no drafts."""
    if not drafter.depth:
        return None
    if getattr(drafter, "width", None) != 1 or not dataclasses.is_dataclass(drafter):
        return drafter
    names = [field.name for field in dataclasses.fields(drafter) if field.name not in ("depth", "num_nodes")]
    return type(drafter), *(getattr(drafter, name) for name in names)


def _defaults(target: Target, draft: object) -> list[Drafter]:
    """The default drafters, bound."""
    if draft is None:
        return list(WITHOUT_DRAFT)
    kind = PROPOSING[getattr(draft, "drafter", "suffix")]
    defaults: list[Drafter] = [Plain()]
    for depth in DEPTHS:
        try:
            defaults.append((kind(depth=depth, width=1)).bind(target, draft))
        except ValueError:
            if len(defaults) == 1:
                raise
            break
    return defaults


def _check_depths(depths: object) -> tuple[tuple[int, int], ...]:
    """The pairs of sequences and depth, ascending; TypeError or ValueError unless they are positive."""
    if not isinstance(depths, Mapping | tuple) or not depths:
        raise TypeError(f"Adaptive: depths={shorten(depths)}: must be depths by number of sequences")
    check = partial(check_int, "depths", least=1, owner="Adaptive")
    return tuple(sorted((check(size), check(depth)) for size, depth in dict(depths).items()))


def _check_drafters(drafters: object) -> tuple[Drafter, ...]:
    """The drafters as a tuple, plain decoding in place of None; TypeError or ValueError unless they differ."""
    if not isinstance(drafters, Sequence) or isinstance(drafters, str):
        raise TypeError(f"Adaptive(drafters={shorten(drafters)}): must be a list of drafters, or None")
    checked = tuple(Plain() if drafter is None else drafter for drafter in drafters)
    for index, drafter in enumerate(checked):
        check_drafter(f"Adaptive: drafters[{index}]", drafter)
        if hasattr(type(drafter), "branches"):
            raise ValueError("Adaptive: drafters contains a drafter that chooses among others itself")
    if not 2 <= len(checked) <= MOST:
        raise ValueError(f"Adaptive: {len(checked)} drafters; must be from 2 to {MOST}")
    for index, drafter in enumerate(checked):
        if drafter in checked[:index]:
            raise ValueError(f"Adaptive: drafters contains {drafter!r} twice")
    return checked
