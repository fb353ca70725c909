"""Which of several drafters a round takes, from the acceptance in past rounds and the cost of each. Arrays only.

Drafters of one kind, such as chains of several depths of one draft, have the same conditional acceptance: the
probability that a draft is accepted if all before it are. From it follow the expected tokens of a round for any depth,
and the best drafter has the most of them per unit of cost (goodput: Liu et al., SmartSpec, arXiv 2406.14066, section
3). The moving average of what was accepted is that of SGLang's adaptive depth, which averages accepted lengths, but
per position: a deeper draft is then judged by what is known of a shallower one.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jspec.core.struct import struct

WEIGHT = 2.0
"""Drafts that the estimate before the first observation counts for."""


@struct
class Evidence:
    """What past rounds have shown, in each sequence, for each kind of drafter and each position of a draft.

    Zeros before the first round. The latest observation counts 1 and older ones less.
    """

    reached: Float[Array, "B F D"]
    """Rounds that have judged a draft at the position: those before it were accepted."""
    accepted: Float[Array, "B F D"]
    """Those of these rounds that accepted it."""


@struct
class Choices:
    """The drafters among which a policy chooses, as constants of a program."""

    kind: Int[np.ndarray, " K"]
    """Which drafters have the same conditional acceptance, from 0; -1: it proposes nothing."""
    depth: Int[np.ndarray, " K"]
    watched: Bool[np.ndarray, " F"]
    """Kinds whose drafts are compared with what each round appends, whatever it took."""

    @property
    def kinds(self) -> int:
        """F: different kinds."""
        return int(self.kind.max(initial=-1)) + 1


def observe(
    evidence: Evidence,
    choices: Choices,
    taken: Int[Array, " B"],
    appended: Int[Array, " B"],
    rate: float,
) -> Evidence:
    """The evidence after a round, of kinds that are not watched.

    taken: the choice of each sequence's round; -1: it had none.
    appended: tokens that the round has added, bonus token included; 0: none.
    rate: how much less each older observation counts.
    """
    index = jnp.maximum(taken, 0)
    # As an index, -1 is the last entry.
    known = np.where(np.append(choices.watched, True)[choices.kind], -1, choices.kind)
    kind = jnp.where(taken >= 0, jnp.asarray(known)[index], -1)
    return _judged(evidence, kind, jnp.asarray(choices.depth)[index], appended - 1, rate)


def watch(
    evidence: Evidence,
    kind: int,
    matched: Int[Array, " B"],
    judged: Int[Array, " B"],
    rate: float,
) -> Evidence:
    """The evidence after a round that has been compared with drafts of a kind, which it need not have taken.

    matched: how many of the first drafts are the tokens that the round has appended.
    judged: how many drafts there are to compare; 0: none.
    """
    return _judged(evidence, jnp.full_like(matched, kind), judged, matched, rate)


def _judged(
    evidence: Evidence, kind: Int[Array, " B"], depth: Int[Array, " B"], drafts: Int[Array, " B"], rate: float
) -> Evidence:
    """The evidence with one more round.

    kind: that of the drafts that the round has judged, in each sequence; -1: none.
    depth: how many of them it could judge.
    drafts: how many it has accepted.
    """
    kinds, positions = (jnp.arange(size, dtype=jnp.int32) for size in evidence.reached.shape[1:])
    kind, depth, drafts = (x[:, None, None] for x in (kind, depth, drafts))
    own = (kinds[None, :, None] == kind) & (positions[None, None] < depth)
    reached, accepted = own & (drafts >= positions[None, None]), own & (drafts > positions[None, None])
    keep = jnp.where(reached, 1.0 - rate, 1.0)
    return Evidence(
        keep * evidence.reached + reached.astype(jnp.float32), keep * evidence.accepted + accepted.astype(jnp.float32)
    )


def conditional_acceptance(evidence: Evidence, live: Bool[Array, " B"], prior: float) -> Float[Array, "F D"]:
    """The probability that each draft is accepted if all before it are, over all live sequences.

    prior: that of the first draft before any round. A deeper one is expected to be accepted as often as the draft
      before it.
    """
    reached, accepted = (jnp.where(live[:, None, None], x, 0.0).sum(0) for x in (evidence.reached, evidence.accepted))
    before, found = jnp.full(reached.shape[0], prior, jnp.float32), []
    for position in range(reached.shape[1]):
        before = (accepted[:, position] + WEIGHT * before) / (reached[:, position] + WEIGHT)
        found.append(before)
    return jnp.stack(found, axis=1)


def expected_tokens(acceptance: Float[Array, "F D"], choices: Choices) -> Float[Array, " K"]:
    """Tokens that a round is expected to add to a sequence with each drafter, bonus token included."""
    survival = jnp.cumsum(jnp.cumprod(acceptance, axis=1), axis=1)
    drafts = survival[np.maximum(choices.kind, 0), np.maximum(choices.depth - 1, 0)]
    return 1.0 + jnp.where(jnp.asarray(choices.depth) > 0, drafts, 0.0)


def choose(
    value: Float[Array, " K"],
    previous: Int[Array, ""],
    round_index: Int[Array, ""],
    choices: Choices,
    *,
    hysteresis: float,
    probe: int,
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """The choice of a round, and the best one, which is another in rounds that probe.

    value: expected tokens per unit of cost.
    previous: the best one so far, which stays unless another is better by this share (`hysteresis`); -1: none.
    probe: every `probe`-th round takes a choice that shows what the best one does not: by turns, for each kind of
      drafter, the next deeper one of the same kind, or the best one of another kind. Nothing if the kind is watched.
    """
    best = jnp.argmax(value).astype(jnp.int32)
    stays = (previous >= 0) & (value[best] <= (1.0 + hysteresis) * value[jnp.maximum(previous, 0)])
    best = jnp.where(stays, previous, best)
    if not choices.kinds:
        return best, best
    turn = (round_index // probe) % choices.kinds
    deeper = jnp.asarray(_next_deeper(choices.kind, choices.depth))[best]
    kind = jnp.asarray(choices.kind)
    other = jnp.argmax(jnp.where(kind == turn, value, -jnp.inf)).astype(jnp.int32)
    probed = jnp.where(kind[best] == turn, deeper, other)
    probed = jnp.where(jnp.asarray(choices.watched)[turn], best, probed)
    return jnp.where(round_index % probe == probe - 1, probed, best), best


def _next_deeper(kind: Sequence[int] | Int[np.ndarray, " K"], depth: Int[np.ndarray, " K"]) -> Int[np.ndarray, " K"]:
    """The next deeper choice of the same kind; itself if there is none."""
    found = []
    for index, (own, least) in enumerate(zip(kind, depth, strict=True)):
        deeper = [(depth[other], other) for other in range(len(depth)) if kind[other] == own and depth[other] > least]
        found.append(min(deeper)[1] if deeper else index)
    return np.array(found, np.int32)
