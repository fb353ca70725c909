"""Acceptance rules: accept drafted tokens, and choose the token after them. Arrays only.

p is the target's distribution at a node, the softmax of its processed logits (`sampling.process`); q is the
distribution from which a draft was sampled. A rule is lossless if its tokens have the distribution p along their path,
for any draft. All random draws of a sequence are functions of its key and of positions.

A round ends at `DraftTree.limit`: drafts accepted beyond it are dropped. A rule with residual distributions treats
the drafts there as not proposed, so the token after the limit has the distribution p.
"""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jspec.core import sampling, tree
from jspec.core.options import check_options, option
from jspec.core.types import Accept, Acceptance, DraftNeeds, DraftTree

Memory = Array | None
"""State of a rule between siblings: q without the tried tokens, [B, V], or the mass of the tried tokens, [B]."""
Judge = Callable[[Array, Memory, Array, Array, Array], tuple[Array, Memory, Array]]
"""(coin, memory, residual distribution, token, node) -> (accepted, then after a rejection: memory, residual)."""


def greedy(
    key: Key[Array, " B"], draft_tree: DraftTree, logits: Float[Array, "B N V"], position: Int[Array, " B"]
) -> Acceptance:
    """Accept drafts equal to the target's argmax: the output is the target's own greedy output.

    Walks from the root: while the current node has a child with the target's most probable token, go to that child.
    For chains: Stern, Shazeer and Uszkoreit, arXiv 1811.03115, section 3; for trees: Miao et al., arXiv 2305.09781.
    """
    del key, position
    return follow(draft_tree, jnp.argmax(logits, axis=-1).astype(jnp.int32))


def coupled(
    key: Key[Array, " B"], draft_tree: DraftTree, logits: Float[Array, "B N V"], position: Int[Array, " B"]
) -> Acceptance:
    """Sample the target's choice after each node with the noise of its position, and follow the choices.

    The argmax of log p plus Gumbel noise has the distribution p, and the noise is a function of the sequence's key and
    the position alone. So the output equals plain sampling with this key, token for token, for any draft
    (drafter-invariant coupling; Daliri, Musco and Suresh, arXiv 2408.07978, section 3).
    """
    noise = sampling.gumbel(key, sampling.NOISE, position, draft_tree.generations + 1, logits.shape[-1])
    if draft_tree.parents is not None:
        noise = jnp.take_along_axis(noise, tree.depths(draft_tree)[:, :, None], axis=1)
    return follow(draft_tree, jnp.argmax(logits + noise, axis=-1).astype(jnp.int32))


def follow(draft_tree: DraftTree, choice: Int[Array, "B N"]) -> Acceptance:
    """Walk the tree along `choice`, the target's token after each node."""
    tokens, parents = draft_tree.tokens, draft_tree.parents
    # Chain: the longest prefix that agrees.
    if parents is None:
        agrees = tokens[:, 1:] == choice[:, :-1]
        accepted = jnp.cumprod(agrees, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
        return Acceptance(None, choice, accepted + 1)
    # Tree: one generation per iteration; sequences whose walk has ended stay at their last node.
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]  # [1, N]
    node = jnp.zeros(tokens.shape[0], jnp.int32)
    path, steps = [node], []
    for _ in range(draft_tree.generations):
        target_token = jnp.take_along_axis(choice, node[:, None], axis=1)
        child = (parents == node[:, None]) & (index > 0) & (tokens == target_token)  # [B, N]
        walking = child.any(1)
        node = jnp.where(walking, jnp.argmax(child, axis=1).astype(jnp.int32), node)
        path.append(node)
        steps.append(walking)
    # The target's choices along the path: the accepted drafts, then the bonus token.
    path = jnp.stack(path, axis=1)
    following = tree.take_path(choice, path)
    assert following is not None
    length = sum((step.astype(jnp.int32) for step in steps), jnp.ones_like(node))
    return Acceptance(path, following, length)


def rejection(
    key: Key[Array, " B"], draft_tree: DraftTree, logits: Float[Array, "B N V"], position: Int[Array, " B"]
) -> Acceptance:
    """Accept a draft x with probability min(1, p(x) / q(x)); otherwise sample from the residual distribution.

    On a chain this is Leviathan, Kalman and Matias, arXiv 2211.17192, section 2.3. In a tree the children of a node
    are tried in the order in which they were sampled without replacement: after each rejection p becomes the residual
    distribution norm(max(p - q, 0)), and q the distribution of the next draft, without the rejected token (Jeon et al.,
    arXiv 2402.14160, section 3.2). If the tree has no `probs`, each q is 1 at its draft.
    """
    p = jax.nn.softmax(logits, axis=-1)
    if draft_tree.parents is not None:
        return _reject_in_tree(key, draft_tree, p, position)
    # coin q(x) < p(x) has the probability min(1, p(x) / q(x)).
    drafts = draft_tree.tokens[:, 1:]
    q, proposed = _chain_probs(draft_tree, p), _proposed(draft_tree)
    coin = _coins(key, position, drafts.shape[1])
    passes = (coin * _at(q, drafts) < _at(p[:, :-1], drafts)) & proposed
    accepted = jnp.cumprod(passes, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
    # The residual distribution after each number of accepted drafts; after all of them, p itself.
    residual = jnp.concatenate([_normalize(jnp.maximum(p[:, :-1] - q, 0.0), p[:, :-1]), p[:, -1:]], axis=1)
    return _finish_chain(key, draft_tree, residual, accepted, position)


def block(
    key: Key[Array, " B"], draft_tree: DraftTree, logits: Float[Array, "B N V"], position: Int[Array, " B"]
) -> Acceptance:
    """Judge the drafts of a chain together; accepts on average at least as many as `rejection`.

    Block verification: Sun et al., arXiv 2403.10444, algorithm 2.

    Raises:
      ValueError: a tree.
    """
    if draft_tree.parents is not None:
        raise ValueError("accept='block' judges chains only: give the drafter width=1, or use another rule")
    p = jax.nn.softmax(logits, axis=-1)
    drafts, q = draft_tree.tokens[:, 1:], _chain_probs(draft_tree, p)
    if not drafts.shape[1]:
        return _finish_chain(key, draft_tree, p, jnp.zeros_like(position), position)
    # weight[:, i]: the probability that the first i + 1 drafts are kept, judged together.
    coin = _coins(key, position, drafts.shape[1])
    ratio = _at(p[:, :-1], drafts) / jnp.maximum(_at(q, drafts), jnp.finfo(q.dtype).tiny)
    weight, weights = jnp.ones_like(ratio[:, 0]), []
    for i in range(drafts.shape[1]):
        weight = jnp.minimum(weight * ratio[:, i], 1.0)
        weights.append(weight)
    weight = jnp.stack(weights, axis=1)
    # residual[:, i]: the unnormalized residual distribution after i accepted drafts; after all of them, p itself.
    scaled = jnp.concatenate([jnp.ones_like(weight[:, :1]), weight[:, :-1]], axis=1)
    residual = jnp.maximum(scaled[:, :, None] * p[:, :-1] - q, 0.0)
    mass = residual.sum(-1)[:, 1:]
    inner = mass / jnp.maximum(mass + 1.0 - weight[:, :-1], jnp.finfo(q.dtype).tiny)
    # The longest prefix that passes is accepted.
    passes = (coin < jnp.concatenate([inner, weight[:, -1:]], axis=1)) & _proposed(draft_tree)
    count = jnp.arange(1, drafts.shape[1] + 1, dtype=jnp.int32)[None]
    accepted = jnp.where(passes, count, 0).max(1)
    residual = jnp.concatenate([_normalize(residual, p[:, :-1]), p[:, -1:]], axis=1)
    return _finish_chain(key, draft_tree, residual, accepted, position)


@dataclasses.dataclass(frozen=True)
class LossyThresholds:
    """SGLang's acceptance by thresholds: **not lossless** unless both are 1. Never the default.

    A draft x is accepted if p(x) >= single, or if the sum of p over x and the siblings tried before it exceeds
    total times a uniform random number that all siblings share.

    single: from 0 to 1; with 1, this condition adds nothing.
    total: above 0 and at most 1; with 1, no probability is raised.
    """

    single: float = option(1.0, least=0.0, most=1.0)
    total: float = option(1.0, above=0.0, most=1.0)

    def __post_init__(self):
        check_options(self, "LossyThresholds")

    def __call__(
        self, key: Key[Array, " B"], draft_tree: DraftTree, logits: Float[Array, "B N V"], position: Int[Array, " B"]
    ) -> Acceptance:
        """Accept drafts by the processed logits after each node."""
        p = jax.nn.softmax(logits, axis=-1)

        def judge(coin: Array, tried: Memory, residual: Array, token: Array, node: Array):
            del node
            assert tried is not None
            tried = tried + _row(residual, token)
            accepted = (_row(residual, token) > 0) & (
                (coin < tried / self.total) | (_row(residual, token) >= self.single)
            )
            return accepted, tried, _without(residual, token)

        if draft_tree.parents is None:
            width = 1 if draft_tree.generations else None
            draft_tree = dataclasses.replace(draft_tree, parents=tree.parents_of(draft_tree), width=width)
        return _walk(key, draft_tree, p, position, judge, jnp.zeros_like(position, jnp.float32))


@dataclasses.dataclass(frozen=True)
class Imposed:
    """Accepts a fixed number of drafts, right or wrong: **the output is not the target's**. Only for benchmarks.

    The round does its full work, so with random weights it costs as much as with trained weights of this accept length.

    tokens_per_round: mean number of appended tokens, bonus included; from 1 to 1000. Each round appends the integer
      below or above it, at most the path to the tree's deepest node and the bonus token.
    """

    tokens_per_round: float = option(
        bounds={"least": 1.0, "most": 1000.0, "valid": "from 1, which is the bonus token, to 1000"}
    )
    for_greedy: ClassVar[bool] = True
    """Greedy sequences keep their unprocessed logits."""

    def __post_init__(self):
        check_options(self, "Imposed")

    def __call__(
        self, key: Key[Array, " B"], draft_tree: DraftTree, logits: Float[Array, "B N V"], position: Int[Array, " B"]
    ) -> Acceptance:
        """Accept the path to the first node of the imposed depth, or the greatest; the target's argmax follows."""
        del key
        drafts = self._tokens(position) - 1
        choice = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        # XLA could simplify the program for a constant number of drafts, but not for real accept lengths.
        choice, drafts = lax.optimization_barrier((choice, drafts))
        column = jnp.arange(draft_tree.generations + 1, dtype=jnp.int32)[None]
        if draft_tree.parents is None:
            path, drafts = None, jnp.minimum(drafts, column.shape[1] - 1)
        else:
            # The path consists of the ancestors of the first node at the imposed depth, one per column.
            mask, depths = tree.ancestor_mask(draft_tree), tree.depths(draft_tree)
            assert mask is not None
            drafts = jnp.minimum(drafts, depths.max(1))
            last = jnp.argmax(depths == drafts[:, None], axis=1).astype(jnp.int32)
            above = jnp.take_along_axis(mask, last[:, None, None], axis=1)
            depth = jnp.minimum(column, drafts[:, None])
            path = jnp.argmax(above & (depths[:, None] == depth[:, :, None]), axis=2).astype(jnp.int32)
        # The drafts along the path, then the target's choice after the last of them.
        following, drafted = tree.take_path(choice, path), tree.take_path(draft_tree.tokens, path)
        assert following is not None and drafted is not None
        drafted = jnp.roll(drafted, -1, axis=1)
        return Acceptance(path, jnp.where(column == drafts[:, None], following, drafted), drafts + 1)

    def _tokens(self, position: Int[Array, " B"]) -> Int[Array, " B"]:
        """The integer below or above tokens_per_round, such that rounds end at positions floor(k * tokens_per_round).

        From any other position, rounds append the integer above until they reach such a position. So the total after
        any number of rounds is exact to within tokens_per_round. Random draws would be less exact.
        """
        mean = Fraction(self.tokens_per_round).limit_denominator(1000)
        n, d = mean.numerator, mean.denominator
        # q = floor(k n / d) for some k if and only if the first multiple of n from q d on is before (q + 1) d.
        meets = (-(position + n // d) * d) % n < d
        return jnp.where(meets, n // d, -(-n // d)).astype(jnp.int32)


def _reject_in_tree(
    key: Key[Array, " B"], draft_tree: DraftTree, p: Float[Array, "B N V"], position: Int[Array, " B"]
) -> Acceptance:
    """`rejection` in a tree."""

    def judge(coin: Array, q: Memory, residual: Array, token: Array, node: Array):
        del node
        if q is None:
            return coin < _row(residual, token), q, _normalize(_without(residual, token), residual)
        # If q has fewer tokens than the node has children, the last children were not sampled.
        accepted = (_row(q, token) > 0) & (coin * _row(q, token) < _row(residual, token))
        rest = _normalize(jnp.maximum(residual - q, 0.0), residual)
        without = _without(q, token)
        return accepted, _normalize(without, without), rest

    return _walk(key, draft_tree, p, position, judge, draft_tree.probs)


def _walk(
    key: Key[Array, " B"],
    draft_tree: DraftTree,
    p: Float[Array, "B N V"],
    position: Int[Array, " B"],
    judge: Judge,
    memory: Memory,
) -> Acceptance:
    """Descend from the root, trying the children of each node in order; then sample from the residual distribution.

    memory: initial state of `judge` at the first child of a node: the node's row of a [B, N, V] array, or a [B] array.
    """
    tokens = draft_tree.tokens
    batch, nodes = tokens.shape
    coins = _coins(key, position, nodes)
    node, walking = jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool)
    residual = p[:, 0]
    path, drafts, length = [node], [], jnp.ones(batch, jnp.int32)
    for generation in range(draft_tree.generations):
        if draft_tree.limit is not None:
            walking = walking & (generation < draft_tree.limit)
        notes = _row(memory, node) if memory is not None and memory.ndim == 3 else memory
        # Go down to the accepted child; where there is none, the walk ends.
        walking, node, residual = _try_children(draft_tree, node, walking, residual, notes, coins, judge)
        residual = jnp.where(walking[:, None], _row(p, node), residual)
        length = length + walking.astype(jnp.int32)
        path.append(node)
        drafts.append(_row(tokens, node))
    # The bonus token comes after the last accepted draft.
    bonus = _sample(key, residual, position)
    column = jnp.arange(len(path), dtype=jnp.int32)[None]
    following = jnp.where(column == length[:, None] - 1, bonus[:, None], jnp.stack([*drafts, bonus], axis=1))
    return Acceptance(jnp.stack(path, axis=1), following, length)


def _try_children(
    draft_tree: DraftTree,
    parent: Int[Array, " B"],
    walking: Bool[Array, " B"],
    residual: Float[Array, "B V"],
    memory: Memory,
    coins: Float[Array, "B N"],
    judge: Judge,
) -> tuple[Bool[Array, " B"], Int[Array, " B"], Float[Array, "B V"]]:
    """Try the children of a node in order until one is accepted, in sequences that are still walking.

    Returns whether one was accepted, that child (otherwise `parent`), and the residual distribution.
    """
    tokens, parents = draft_tree.tokens, draft_tree.parents
    batch, nodes = tokens.shape
    index = jnp.arange(nodes, dtype=jnp.int32)[None]
    node, last, descended = parent, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
    shared = _row(coins, parent)
    for _ in range(nodes - 1 if draft_tree.width is None else draft_tree.width):
        # The next child in the order of nodes, [B].
        child = (parents == parent[:, None]) & (index > last[:, None])
        trying = walking & ~descended & child.any(1)
        last = jnp.where(trying, jnp.argmax(child, axis=1).astype(jnp.int32), last)
        token = _row(tokens, last)
        # A rule that compares one coin with the growing mass of siblings uses the parent's coin; other rules use one
        # coin per child.
        coin = shared if memory is not None and memory.ndim == 1 else _row(coins, last)
        passes, after, rest = judge(coin, memory, residual, token, parent)
        # An accepted child ends the search; a rejected one changes the residual distribution and the memory.
        accepted, failed = trying & passes, trying & ~passes
        descended, node = descended | accepted, jnp.where(accepted, last, node)
        residual = jnp.where(failed[:, None], rest, residual)
        if memory is not None and after is not None:
            memory = jnp.where(failed.reshape(-1, *[1] * (memory.ndim - 1)), after, memory)
    return walking & descended, node, residual


def _finish_chain(
    key: Key[Array, " B"],
    draft_tree: DraftTree,
    residual: Float[Array, "B N V"],
    accepted: Int[Array, " B"],
    position: Int[Array, " B"],
) -> Acceptance:
    """The accepted drafts of a chain, then a token sampled from the residual distribution after them."""
    bonus = _sample(key, _row(residual, accepted), position)
    column = jnp.arange(residual.shape[1], dtype=jnp.int32)[None]
    drafts = jnp.concatenate([draft_tree.tokens[:, 1:], bonus[:, None]], axis=1)
    return Acceptance(None, jnp.where(column == accepted[:, None], bonus[:, None], drafts), accepted + 1)


def _chain_probs(draft_tree: DraftTree, p: Float[Array, "B N V"]) -> Float[Array, "B D V"]:
    """q at each node with a draft; 0 where none is proposed, as p is the residual distribution there."""
    q = draft_tree.probs
    q = jax.nn.one_hot(draft_tree.tokens[:, 1:], p.shape[-1], dtype=p.dtype) if q is None else q[:, :-1]
    return jnp.where(_proposed(draft_tree)[:, :, None], q, 0.0)


def _proposed(draft_tree: DraftTree) -> Bool[Array, "#B D"]:
    """Whether each draft of a chain counts as proposed."""
    generation = jnp.arange(draft_tree.tokens.shape[1] - 1, dtype=jnp.int32)[None]
    return generation >= 0 if draft_tree.limit is None else generation < draft_tree.limit[:, None]


def _coins(key: Key[Array, " B"], position: Int[Array, " B"], count: int) -> Float[Array, "B count"]:
    keys = sampling.stream(key, sampling.COINS, position)
    return jax.vmap(lambda key: jax.random.uniform(key, (count,), jnp.float32))(keys)


def _sample(key: Key[Array, " B"], distribution: Float[Array, "B V"], position: Int[Array, " B"]) -> Int[Array, " B"]:
    noise = sampling.gumbel(key, sampling.FINAL, position, 1, distribution.shape[-1])[:, 0]
    return jnp.argmax(jnp.log(distribution) + noise, axis=-1).astype(jnp.int32)


def _normalize(distribution: Float[Array, "*B V"], otherwise: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """The normalized distribution; `otherwise` where the mass is 0."""
    mass = distribution.sum(-1, keepdims=True)
    return jnp.where(mass > 0, distribution / jnp.maximum(mass, jnp.finfo(distribution.dtype).tiny), otherwise)


def _at(x: Float[Array, "B D V"], tokens: Int[Array, "B D"]) -> Float[Array, "B D"]:
    return jnp.take_along_axis(x, tokens[:, :, None], axis=2)[:, :, 0]


def _row(x: Array, index: Int[Array, " B"]) -> Array:
    """x[b, index[b]] for each b."""
    return jnp.take_along_axis(x, index.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]


def _without(distribution: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, "B V"]:
    return jnp.where(jnp.arange(distribution.shape[1])[None] == token[:, None], 0.0, distribution)


RULES: dict[str, Accept] = {"greedy": greedy, "coupled": coupled, "rejection": rejection, "block": block}
"""Name -> rule; all of them are lossless."""
REPEATING = (None, "greedy", "coupled")
"""Rules, by name or by default, whose tokens are those of plain decoding with the same seed."""
FOR_SAMPLES = ("rejection", "coupled", "block")
"""Rules for sequences with a temperature."""
NEEDS = {"rejection": DraftNeeds(sampled=True), "block": DraftNeeds(sampled=True, chains=True)}
"""Name -> requirements of a rule on the drafts; unlisted rules take any drafts."""
