"""Rules of acceptance: which drafted tokens stand, and which token follows them. Arrays only.

p is the target's law after a node, the softmax of its processed logits (`sampling.process`); q is the law from which a
draft was drawn. A rule is lossless if the tokens that it appends have the law p along their path, whatever was drafted.
All random numbers of a row are functions of its key and of positions.
"""

import dataclasses
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from jspec.core import sampling, tree
from jspec.core.types import Acceptance, DraftTree


def greedy(
    key: Key[Array, " B"], draft_tree: DraftTree, logits: Float[Array, "B N V"], position: Int[Array, " B"]
) -> Acceptance:
    """Keeps the drafts that equal the target's argmax, so that the output is the target's own greedy output.

    Walks from the root: while the current node has a child with the token that the target puts highest, go there.
    (Stern, Shazeer and Uszkoreit, arXiv 1811.03115, section 3, for chains; Miao et al., arXiv 2305.09781, for trees.)
    """
    del key, position
    return follow(draft_tree, jnp.argmax(logits, axis=-1).astype(jnp.int32))


def coupled(
    key: Key[Array, " B"], draft_tree: DraftTree, logits: Float[Array, "B N V"], position: Int[Array, " B"]
) -> Acceptance:
    """Draws the target's choice after each node with noise that belongs to the position, and follows the choices.

    The argmax of log p plus Gumbel noise has the law p, and the noise is a function of the row's key and the position
    alone: so the output is that of plain sampling with this key, token for token, whatever was drafted
    (drafter-invariant coupling; Daliri, Musco and Suresh, arXiv 2408.07978, section 3).
    """
    noise = sampling.gumbel(key, sampling.NOISE, position, _generations(draft_tree) + 1, logits.shape[-1])
    if draft_tree.parents is not None:
        noise = jnp.take_along_axis(noise, tree.depths(draft_tree)[:, :, None], axis=1)
    return follow(draft_tree, jnp.argmax(logits + noise, axis=-1).astype(jnp.int32))


def follow(draft_tree: DraftTree, choice: Int[Array, "B N"]) -> Acceptance:
    """Walks the tree along `choice`, the token that the target wants after each node."""
    tokens, parents = draft_tree.tokens, draft_tree.parents
    if parents is None:
        agrees = tokens[:, 1:] == choice[:, :-1]
        accepted = jnp.cumprod(agrees, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
        return Acceptance(None, choice, accepted + 1)
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    node = jnp.zeros(tokens.shape[0], jnp.int32)
    walking = jnp.ones(tokens.shape[0], bool)
    path, steps = [node], []
    for _ in range(_generations(draft_tree)):
        wanted = jnp.take_along_axis(choice, node[:, None], axis=1)
        child = (parents == node[:, None]) & (index > 0) & (tokens == wanted)
        walking = walking & child.any(1)
        node = jnp.where(walking, jnp.argmax(child, axis=1).astype(jnp.int32), node)
        path.append(node)
        steps.append(walking)
    path = jnp.stack(path, axis=1)
    following = tree.take_path(choice, path)
    assert following is not None
    length = sum((step.astype(jnp.int32) for step in steps), jnp.ones_like(node))
    return Acceptance(path, following, length)


def rejection(
    key: Key[Array, " B"], draft_tree: DraftTree, logits: Float[Array, "B N V"], position: Int[Array, " B"]
) -> Acceptance:
    """Takes a draft x with probability min(1, p(x) / q(x)), and draws from what is left of p where it takes none.

    On a chain this is Leviathan, Kalman and Matias, arXiv 2211.17192, section 2.3. In a tree the children of a node
    are tried in the order in which they were drawn without replacement: after each rejection p becomes what is left,
    norm(max(p - q, 0)), and q the law of the next draw, without the token that was rejected (Jeon et al., arXiv
    2402.14160, section 3.2). Where the tree has no `probs` its tokens are certain: q is 1 at the draft.
    """
    p = jax.nn.softmax(logits, axis=-1)
    if draft_tree.parents is not None:
        return _reject_in_tree(key, draft_tree, p, position)
    drafts = draft_tree.tokens[:, 1:]
    q = _chain_probs(draft_tree, p)
    coin = _coins(key, position, drafts.shape[1])
    stands = coin * _at(q, drafts) < _at(p[:, :-1], drafts)
    accepted = jnp.cumprod(stands, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
    left = jnp.concatenate([_normalised(jnp.maximum(p[:, :-1] - q, 0.0), p[:, :-1]), p[:, -1:]], axis=1)
    return _finish_chain(key, draft_tree, left, accepted, position)


def block(
    key: Key[Array, " B"], draft_tree: DraftTree, logits: Float[Array, "B N V"], position: Int[Array, " B"]
) -> Acceptance:
    """Judges the drafts of a chain together, and accepts at least as many as `rejection` on average.

    (Block verification; Sun et al., arXiv 2403.10444, algorithm 2.)

    Raises:
      ValueError: a tree.
    """
    if draft_tree.parents is not None:
        raise ValueError("accept='block' judges chains only: give the drafter width=1, or another rule")
    p = jax.nn.softmax(logits, axis=-1)
    drafts, q = draft_tree.tokens[:, 1:], _chain_probs(draft_tree, p)
    if not drafts.shape[1]:
        return _finish_chain(key, draft_tree, p, jnp.zeros_like(position), position)
    coin = _coins(key, position, drafts.shape[1])
    ratio = _at(p[:, :-1], drafts) / jnp.maximum(_at(q, drafts), jnp.finfo(q.dtype).tiny)
    weight, weights = jnp.ones_like(ratio[:, 0]), []
    for i in range(drafts.shape[1]):
        weight = jnp.minimum(weight * ratio[:, i], 1.0)
        weights.append(weight)
    weight = jnp.stack(weights, axis=1)
    # left[:, i]: what is left of p after i accepted drafts; after all of them, p itself.
    scaled = jnp.concatenate([jnp.ones_like(weight[:, :1]), weight[:, :-1]], axis=1)
    left = jnp.maximum(scaled[:, :, None] * p[:, :-1] - q, 0.0)
    mass = left.sum(-1)[:, 1:]
    inner = mass / jnp.maximum(mass + 1.0 - weight[:, :-1], jnp.finfo(q.dtype).tiny)
    stands = coin < jnp.concatenate([inner, weight[:, -1:]], axis=1)
    count = jnp.arange(1, drafts.shape[1] + 1, dtype=jnp.int32)[None]
    accepted = jnp.where(stands, count, 0).max(1)
    left = jnp.concatenate([_normalised(left, p[:, :-1]), p[:, -1:]], axis=1)
    return _finish_chain(key, draft_tree, left, accepted, position)


@dataclasses.dataclass(frozen=True)
class LossyThresholds:
    """SGLang's acceptance by thresholds: **not lossless** unless both are 1. Never chosen by itself.

    A draft x stands if p(x) >= single, or if a coin falls below (the mass of the siblings tried so far and x) / total.

    single: from 0 to 1; 1 accepts no draft for its probability alone.
    total: above 0 to 1; 1 raises no probability.
    """

    single: float = 1.0
    total: float = 1.0

    def __post_init__(self):
        for name, value, good in (("single", self.single, self.single >= 0), ("total", self.total, self.total > 0)):
            if not good or value > 1:
                raise ValueError(f"LossyThresholds({name}={value}): give a number up to 1, and total above 0")

    def __call__(
        self,
        key: Key[Array, " B"],
        draft_tree: DraftTree,
        logits: Float[Array, "B N V"],
        position: Int[Array, " B"],
    ) -> Acceptance:
        """Decides, from the processed logits after each node, which of them stand."""
        p = jax.nn.softmax(logits, axis=-1)

        def judge(coin, tried, left, token, _):
            tried = tried + _one(left, token)
            chosen = (_one(left, token) > 0) & ((coin < tried / self.total) | (_one(left, token) >= self.single))
            return chosen, tried, _without(left, token)

        return _walk(key, _with_parents(draft_tree), p, position, judge, jnp.zeros_like(position, jnp.float32))


@dataclasses.dataclass(frozen=True)
class Imposed:
    """Accepts a given number of drafts, right or wrong: **the output is not the target's**. For measuring engines only.

    The round does its full work, so that with random weights it costs what it costs with trained ones that reach this
    accept length.

    tokens_per_round: mean of the tokens that a round appends, bonus included; at least 1. A round appends the whole
      number below it or above it, but no more than the path to the tree's deepest node and the bonus token.
    """

    tokens_per_round: float

    def __post_init__(self):
        if not 1 <= self.tokens_per_round < math.inf:
            raise ValueError(
                f"Imposed(tokens_per_round={self.tokens_per_round}): give a finite number from 1 up, "
                "as the bonus token is one of them"
            )

    def __call__(
        self,
        key: Key[Array, " B"],
        draft_tree: DraftTree,
        logits: Float[Array, "B N V"],
        position: Int[Array, " B"],
    ) -> Acceptance:
        """Keeps the path to the first node of the wanted depth, or of the greatest; then the target's argmax."""
        del key
        drafts = self._tokens(position) - 1
        choice = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        # A whole figure is a constant, by which XLA could make a simpler program than that of real accept lengths.
        choice, drafts = lax.optimization_barrier((choice, drafts))
        column = jnp.arange(_generations(draft_tree) + 1, dtype=jnp.int32)[None]
        if draft_tree.parents is None:
            path, drafts = None, jnp.minimum(drafts, column.shape[1] - 1)
        else:
            mask, depths = tree.ancestor_mask(draft_tree), tree.depths(draft_tree)
            assert mask is not None
            drafts = jnp.minimum(drafts, depths.max(1))
            last = jnp.argmax(depths == drafts[:, None], axis=1).astype(jnp.int32)
            above = jnp.take_along_axis(mask, last[:, None, None], axis=1)
            wanted = jnp.minimum(column, drafts[:, None])
            path = jnp.argmax(above & (depths[:, None] == wanted[:, :, None]), axis=2).astype(jnp.int32)
        following, kept = tree.take_path(choice, path), tree.take_path(draft_tree.tokens, path)
        assert following is not None and kept is not None
        kept = jnp.roll(kept, -1, axis=1)
        return Acceptance(path, jnp.where(column == drafts[:, None], following, kept), drafts + 1)

    def _tokens(self, position: Int[Array, " B"]) -> Int[Array, " B"]:
        """The whole number below or above, such that rounds end at floor(k * tokens_per_round), k = 0, 1, ...

        From a position between two of these, rounds take the number above until they meet one. So the tokens of any
        number of rounds are their mean's to within tokens_per_round; a coin would be off by 0.05 a round after 85.
        """
        figure = Fraction(self.tokens_per_round).limit_denominator(1000)
        n, d = figure.numerator, figure.denominator
        # q = floor(k n / d) for some k if and only if the multiple of n at or behind q d lies before (q + 1) d.
        meets = (-(position + n // d) * d) % n < d
        return jnp.where(meets, n // d, -(-n // d)).astype(jnp.int32)


def _reject_in_tree(key, draft_tree: DraftTree, p, position) -> Acceptance:
    def judge(coin, q, left, token, node):
        if draft_tree.probs is None:
            return coin < _one(left, token), q, _normalised(_without(left, token), left)
        # Where q has fewer tokens than the node has children, the last of these were not drawn.
        stands = (_one(q, token) > 0) & (coin * _one(q, token) < _one(left, token))
        rest = _normalised(jnp.maximum(left - q, 0.0), left)
        without = _without(q, token)
        return stands, _normalised(without, without), rest

    return _walk(key, draft_tree, p, position, judge, draft_tree.probs)


def _walk(key, draft_tree: DraftTree, p: Float[Array, "B N V"], position, judge, memory) -> Acceptance:
    """From the root down, trying the children of each node in order; then a token from what is left of p.

    judge: (coin, memory, what is left of p, token, node) -> (the token stands, memory, what is left if not). The memory
      starts anew at each node: from its row of a [B, N, V] array, or as it is given.
    """
    tokens, parents = draft_tree.tokens, draft_tree.parents
    batch, nodes = tokens.shape
    index = jnp.arange(nodes, dtype=jnp.int32)[None]
    coins = _coins(key, position, nodes)
    node, walking = jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool)
    left = p[:, 0]
    path, drafts, length = [node], [], jnp.ones(batch, jnp.int32)
    tried_most = nodes - 1 if draft_tree.width is None else draft_tree.width
    for _ in range(_generations(draft_tree)):
        last, taken = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
        notes = _row(memory, node) if memory is not None and memory.ndim == 3 else memory
        parent, shared = node, _one(coins, node)
        for _ in range(tried_most):
            child = (parents == parent[:, None]) & (index > last[:, None])
            trying = walking & ~taken & child.any(1)
            last = jnp.where(trying, jnp.argmax(child, axis=1).astype(jnp.int32), last)
            token = _one(tokens, last)
            # A rule that compares one coin with the growing mass of siblings uses its parent's; the others each theirs.
            coin = shared if notes is not None and notes.ndim == 1 else _one(coins, last)
            stands, after, rest = judge(coin, notes, left, token, parent)
            stands = trying & stands
            taken, node = taken | stands, jnp.where(stands, last, node)
            failed = trying & ~stands
            left = jnp.where(failed[:, None], rest, left)
            if notes is not None:
                notes = jnp.where(failed.reshape(-1, *[1] * (notes.ndim - 1)), after, notes)
        walking = walking & taken
        left = jnp.where(walking[:, None], _row(p, node), left)
        length = length + walking.astype(jnp.int32)
        path.append(node)
        drafts.append(_one(tokens, node))
    drawn = _draw(key, left, position)
    column = jnp.arange(len(path), dtype=jnp.int32)[None]
    drafts = jnp.stack([*drafts, drawn], axis=1)
    following = jnp.where(column == length[:, None] - 1, drawn[:, None], drafts)
    return Acceptance(jnp.stack(path, axis=1), following, length)


def _finish_chain(key, draft_tree: DraftTree, left: Float[Array, "B N V"], accepted, position) -> Acceptance:
    drawn = _draw(key, _row(left, accepted), position)
    column = jnp.arange(left.shape[1], dtype=jnp.int32)[None]
    drafts = jnp.concatenate([draft_tree.tokens[:, 1:], drawn[:, None]], axis=1)
    return Acceptance(None, jnp.where(column == accepted[:, None], drawn[:, None], drafts), accepted + 1)


def _chain_probs(draft_tree: DraftTree, p: Float[Array, "B N V"]) -> Float[Array, "B D V"]:
    if draft_tree.probs is not None:
        return draft_tree.probs[:, :-1]
    return jax.nn.one_hot(draft_tree.tokens[:, 1:], p.shape[-1], dtype=p.dtype)


def _with_parents(draft_tree: DraftTree) -> DraftTree:
    if draft_tree.parents is not None:
        return draft_tree
    above = jnp.maximum(jnp.arange(draft_tree.tokens.shape[1], dtype=jnp.int32) - 1, 0)
    return dataclasses.replace(
        draft_tree, parents=jnp.broadcast_to(above[None], draft_tree.tokens.shape), width=1 if above.size > 1 else None
    )


def _generations(draft_tree: DraftTree) -> int:
    return draft_tree.tokens.shape[1] - 1 if draft_tree.depth is None else draft_tree.depth


def _coins(key: Key[Array, " B"], position: Int[Array, " B"], count: int) -> Float[Array, "B count"]:
    keys = sampling.stream(key, sampling.COINS, position)
    return jax.vmap(lambda key: jax.random.uniform(key, (count,), jnp.float32))(keys)


def _draw(key: Key[Array, " B"], law: Float[Array, "B V"], position: Int[Array, " B"]) -> Int[Array, " B"]:
    noise = sampling.gumbel(key, sampling.FINAL, position, 1, law.shape[-1])[:, 0]
    return jnp.argmax(jnp.log(law) + noise, axis=-1).astype(jnp.int32)


def _normalised(law: Float[Array, "*B V"], otherwise: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """A law of the same proportions; `otherwise` where nothing is left, which only rounding brings about."""
    mass = law.sum(-1, keepdims=True)
    return jnp.where(mass > 0, law / jnp.maximum(mass, jnp.finfo(law.dtype).tiny), otherwise)


def _at(x: Float[Array, "B D V"], tokens: Int[Array, "B D"]) -> Float[Array, "B D"]:
    return jnp.take_along_axis(x, tokens[:, :, None], axis=2)[:, :, 0]


def _one(x: Array, index: Int[Array, " B"]) -> Array:
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]


def _row(x: Float[Array, "B N V"], index: Int[Array, " B"]) -> Float[Array, "B V"]:
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def _without(law: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, "B V"]:
    return jnp.where(jnp.arange(law.shape[1])[None] == token[:, None], 0.0, law)


RULES = {"greedy": greedy, "coupled": coupled, "rejection": rejection, "block": block}
"""Name -> rule; all of them lossless."""
