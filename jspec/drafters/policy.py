"""Chooses one of several drafters for a round, by past acceptance and cost. Arrays only.

Drafters of one kind, such as chains of several depths of one draft, have the same conditional acceptance: the
probability of accepting a draft if all before it are accepted. It gives the expected tokens of a round for any depth,
and the best drafter has the most of them per unit of cost (goodput: Liu et al., SmartSpec, arXiv 2406.14066, section
3). The moving average of acceptance is that of SGLang's adaptive depth, but per position instead of over accepted
lengths: so evidence about a shallow draft also serves a deeper one. Proposals of several grades, such as copies after a
long match and after a short one, have averages of their own.

A batch ends with its last sequence, so those that need the most rounds weigh most: their tokens, and their
observations. Sequences with accepted drafts are ahead of the others, whose rounds they do not shorten.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jspec.core.struct import struct

WEIGHT = 2.0
"""Weight of the prior, in drafts."""
STEADY = 8
"""Rounds at the expected tokens of the next one, counted into the pace of a sequence."""


@struct
class Evidence:
    """Moving averages of acceptance, per sequence, grade of a kind of drafter and draft position.

    Zeros before the first round. The latest observation counts 1 and older ones less.
    """

    reached: Float[Array, "B G D"]
    """Rounds with a draft at the position and all before it accepted."""
    accepted: Float[Array, "B G D"]
    """Rounds among these with this draft accepted, too."""


@struct
class Choices:
    """The drafters of a policy, as constants of a program."""

    kind: Int[np.ndarray, " K"]
    """Groups of equal conditional acceptance, from 0; -1: no proposal."""
    depth: Int[np.ndarray, " K"]
    watched: Bool[np.ndarray, " F"]
    """Kinds whose drafts are compared with the appended tokens in every round."""
    grades: Int[np.ndarray, " F"]
    """Grades of the proposals of each kind, at least 1."""

    @property
    def kinds(self) -> int:
        """F: different kinds."""
        return int(self.kind.max(initial=-1)) + 1

    @property
    def quality(self) -> Float[np.ndarray, " G"]:
        """The grade of each of the G rows of evidence, as a share of the best grade of its kind."""
        return np.concatenate(
            [np.arange(1, count + 1, dtype=np.float32) / count for count in self.grades] or [np.ones(1)]
        )

    def rows(self, grade: Int[Array, "B F"]) -> Int[Array, "B F"]:
        """The row of evidence of each sequence's proposal of each kind; -1: it has none, grade 0."""
        first = np.cumsum(self.grades) - self.grades
        return jnp.where(grade > 0, grade - 1 + first[None], -1).astype(jnp.int32)


def observe(
    evidence: Evidence,
    choices: Choices,
    depth: Int[Array, "#B K"],
    rows: Int[Array, "B F"],
    taken: Int[Array, " B"],
    appended: Int[Array, " B"],
    rate: float,
) -> Evidence:
    """Updates the evidence of unwatched kinds after a round.

    depth: `Choices.depth`, or less in sequences with limits.
    rows: of the proposals (`Choices.rows`).
    taken: choice of each sequence's round; -1: none.
    appended: tokens added by the round, bonus token included; 0: none.
    rate: discount of each older observation.
    """
    index = jnp.maximum(taken, 0)
    # As an index, -1 is the last entry.
    known = np.where(np.append(choices.watched, True)[choices.kind], -1, choices.kind)
    kind = jnp.where(taken >= 0, jnp.asarray(known)[index], -1)
    row = jnp.where(kind >= 0, jnp.take_along_axis(rows, jnp.maximum(kind, 0)[:, None], axis=1)[:, 0], -1)
    depth = jnp.broadcast_to(depth, (len(index), depth.shape[1]))
    return judge(evidence, row, jnp.take_along_axis(depth, index[:, None], axis=1)[:, 0], appended - 1, rate)


def judge(
    evidence: Evidence, row: Int[Array, " B"], depth: Int[Array, " B"], drafts: Int[Array, " B"], rate: float
) -> Evidence:
    """Adds a round to the evidence.

    row: of the proposal of each sequence; -1: none.
    depth: number of drafts judged; 0: none.
    drafts: number of drafts accepted, or equal to the appended tokens.
    """
    rows, positions = (jnp.arange(size, dtype=jnp.int32) for size in evidence.reached.shape[1:])
    row, depth, drafts = (x[:, None, None] for x in (row, depth, drafts))
    judged = (rows[None, :, None] == row) & (positions[None, None] < depth)
    reached, accepted = judged & (drafts >= positions[None, None]), judged & (drafts > positions[None, None])
    keep = jnp.where(reached, 1.0 - rate, 1.0)
    return Evidence(
        keep * evidence.reached + reached.astype(jnp.float32), keep * evidence.accepted + accepted.astype(jnp.float32)
    )


def conditional_acceptance(
    evidence: Evidence, weight: Float[Array, " B"], prior: Float[np.ndarray, " G"]
) -> Float[Array, "G D"]:
    """Estimates the probability of accepting each draft if all before it are accepted, over all sequences.

    weight: of each sequence; 0 for those that are done.
    prior: probability of the first draft before any round. The prior of a deeper draft is the estimate before it.
    """
    reached, accepted = ((weight[:, None, None] * x).sum(0) for x in (evidence.reached, evidence.accepted))
    before, estimates = jnp.asarray(prior, jnp.float32), []
    for position in range(reached.shape[1]):
        before = (accepted[:, position] + WEIGHT * before) / (reached[:, position] + WEIGHT)
        estimates.append(before)
    return jnp.stack(estimates, axis=1)


def expected_tokens(
    acceptance: Float[Array, "G D"], rows: Int[Array, "B F"], choices: Choices, depth: Int[Array, "#B K"]
) -> Float[Array, "B K"]:
    """Expected tokens per round of each sequence with each drafter, bonus token included.

    rows: of the proposals; a sequence without one gets the bonus token alone.
    depth: as of `observe`.
    """
    if not choices.kinds:
        return jnp.ones((rows.shape[0], len(choices.depth)), jnp.float32)
    survival = jnp.cumsum(jnp.cumprod(acceptance, axis=1), axis=1)
    row = rows[:, np.maximum(choices.kind, 0)]
    drafts = survival[jnp.maximum(row, 0), jnp.maximum(depth - 1, 0)]
    return 1.0 + jnp.where((row >= 0) & (depth > 0), drafts, 0.0)


def weights(
    live: Bool[Array, " B"],
    remaining: Int[Array, " B"],
    rounds: Int[Array, " B"],
    tokens: Int[Array, " B"],
    expected: Float[Array, " B"],
    urgency: float,
) -> Float[Array, " B"]:
    """Weights of sequences by the rounds that they need at their pace: the last one to end decides when a batch ends.

    remaining: tokens up to the limit of each.
    rounds, tokens: the rounds so far, and the tokens from them.
    expected: tokens of the next round, where drafts bring most.
    urgency: exponent of the rounds that a sequence needs, as a share of the most; 0: all weigh the same.
    """
    pace = (rounds + STEADY).astype(jnp.float32) / (tokens.astype(jnp.float32) + STEADY * expected)
    needed = jnp.where(live, remaining, 0).astype(jnp.float32) * pace
    return jnp.where(live, (needed / jnp.maximum(needed.max(), 1e-6)) ** urgency, 0.0)


def choose(
    value: Float[Array, " K"],
    most: Float[Array, " K"],
    previous: Int[Array, ""],
    round_index: Int[Array, ""],
    choices: Choices,
    *,
    hysteresis: float,
    probe: int,
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Chooses the drafter of a round; returns it and the best one, different in rounds that probe.

    value: expected tokens per unit of cost.
    most: the same if all drafts were accepted; a choice that could not be the best even then is not probed.
    previous: the best one so far; stays unless another is better by the share `hysteresis`; -1: none.
    probe: every `probe`-th round probes a choice beyond the best one: by turns, for each unwatched kind of drafter, the
      next deeper one of the same kind, or the best one of another kind.
    """
    # The best choice, with hysteresis.
    best = jnp.argmax(value).astype(jnp.int32)
    stays = (previous >= 0) & (value[best] <= (1.0 + hysteresis) * value[jnp.maximum(previous, 0)])
    best = jnp.where(stays, previous, best)
    if not choices.kinds:
        return best, best
    # The choice of a probing round.
    turn = (round_index // probe) % choices.kinds
    deeper = jnp.asarray(_next_deeper(choices.kind, choices.depth))[best]
    kind = jnp.asarray(choices.kind)
    other = jnp.argmax(jnp.where(kind == turn, value, -jnp.inf)).astype(jnp.int32)
    probed = jnp.where(kind[best] == turn, deeper, other)
    probed = jnp.where(jnp.asarray(choices.watched)[turn], best, probed)
    probes = (round_index % probe == probe - 1) & (most[probed] > value[best])
    return jnp.where(probes, probed, best), best


def _next_deeper(kind: Sequence[int] | Int[np.ndarray, " K"], depth: Int[np.ndarray, " K"]) -> Int[np.ndarray, " K"]:
    """The next deeper choice of the same kind; itself if there is none."""
    following = []
    for index, (group, least) in enumerate(zip(kind, depth, strict=True)):
        deeper = [(depth[other], other) for other in range(len(depth)) if kind[other] == group and depth[other] > least]
        following.append(min(deeper)[1] if deeper else index)
    return np.array(following, np.int32)
