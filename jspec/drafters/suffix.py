"""Suffix drafts without weights: earlier occurrences of the last tokens vote on a tree of continuations."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jspec.core import grow, tree
from jspec.core.options import option
from jspec.core.struct import struct
from jspec.core.types import DecodeState, DraftNeeds, DraftTree, Params
from jspec.drafters.base import TokenDrafter, check_needs

MAX_MATCH = 16
"""Tokens of the longest match. The votes of all occurrences, 64 times 2^16 at most, are exact in float32."""
DISCOUNT = 0.8
"""Discount per token of a copy, because the text may leave the copy anywhere."""
_BLOCK = 128
"""Columns searched together."""


@struct
class Corpus:
    """Texts for a `Suffix` drafter to copy from, besides each sequence itself; `jspec.with_corpus` makes one.

    A corpus changes the speed but never the output, and one of the same size needs no compilation.
    """

    tokens: Int[Array, " S"]
    """The ids of all texts, with -1 after each of them."""


@dataclasses.dataclass(frozen=True)
class Suffix(TokenDrafter):
    """Proposes a tree of continuations of earlier occurrences of a sequence's last tokens, in it and in a corpus.

    Needs no weights and no state. The best occurrences vote: the longest matches, of equally long ones the latest. A
    match of m tokens gives 2^m votes to each beginning of its continuation, less 20% for each token after the first,
    and the beginnings with the most votes are the nodes. This is the frequency trie of suffix decoding (Oliaro et al.,
    SuffixDecoding, arXiv 2411.04975, section 3), built anew in each round and from these occurrences only. Without a
    match it proposes repetitions of the last token.

    n: tokens of the longest match to search for, from 1 to 16.
    depth: tokens of the longest chain, from 1 to 64.
    width: number of voting occurrences, and so the maximum children of a node, from 1 to 64; 1 is a chain, the
      continuation of the best one.
    num_nodes: nodes of the tree, root included; None: 32, or depth + 1 if that is more.
    """

    n: int = option(16, least=1, most=MAX_MATCH)
    depth: int = option(31, least=1, most=grow.MAX_DEPTH)
    width: int = option(32, least=1, most=grow.MAX_WIDTH)
    num_nodes: int | None = option(None, least=1)
    reads_tokens_alone = packs = True

    def __post_init__(self):
        super().__post_init__()
        nodes, most = self.num_nodes, self._most_nodes
        if nodes is not None and not self.depth < nodes <= most:
            raise ValueError(
                f"Suffix(depth={self.depth}, width={self.width}, num_nodes={nodes}): num_nodes, root included, must be "
                f"at least depth + 1 = {self.depth + 1} and at most {most}"
            )

    @property
    def _most_nodes(self) -> int:
        return 1 + self.depth * self.width

    def adapt(self, needs: DraftNeeds) -> "Suffix":
        """Itself: its drafts are not sampled. ValueError if the rule needs chains."""
        check_needs(self, self.width, needs)
        return self

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, None]:
        """The tree of each sequence; the corpus is `params.draft`, if that is one."""
        corpus = params.draft.tokens if isinstance(params.draft, Corpus) else None
        copies = continuations(s.tokens, s.length, corpus, n=self.n, depth=self.depth, count=self.width)
        if self.width == 1:
            return tree.chain(copy(s.root, *copies)), None
        nodes = min(max(32, self.depth + 1), self._most_nodes) if self.num_nodes is None else self.num_nodes
        return vote(s.root[:, 0], *copies, num_nodes=nodes), None


def continuations(
    tokens: Int[Array, "B C"],
    length: Int[Array, " B"],
    corpus: Int[Array, " S"] | None,
    *,
    n: int,
    depth: int,
    count: int,
) -> tuple[Int[Array, "B K depth"], Int[Array, "B K"]]:
    """Finds the continuations of the best occurrences of the last tokens, best first, and the length of each match.

    A token of -1 ends a continuation; a missing occurrence matches 0 tokens. The longest matches are the best, among
    them the latest ones in the sequence, and then the last ones in the corpus.
    """
    # Matches in the sequence and in the corpus.
    last = jnp.maximum(length, 1)[:, None] - 1
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    matched = count_matched(tokens, tokens, last, n) * (column < last).astype(jnp.int32)
    others = 0 if corpus is None else corpus.shape[0]
    if corpus is not None:
        after = jnp.concatenate([corpus[1:], jnp.full_like(corpus[:1], -1)])[None]
        in_corpus = count_matched(corpus[None], tokens, last, n) * (after >= 0).astype(jnp.int32)
        matched = jnp.concatenate([in_corpus, matched], axis=1)
    place, matched = _best(matched, n, count)
    # A copy up to the end of the sequence continues with the tokens copied so far: it repeats with this period.
    local = place - others
    period = jnp.where((matched > 0) & (local >= 0), last - local, 1)[:, :, None]
    offset = jnp.arange(depth, dtype=jnp.int32)[None, None]
    at = last[:, :, None] - period + 1 + offset % period
    continued = jnp.take_along_axis(tokens[:, None], at, axis=2)
    if corpus is not None:
        at = place[:, :, None] + 1 + offset
        copied = corpus.at[at].get(mode="fill", fill_value=-1)
        continued = jnp.where(local[:, :, None] >= 0, continued, copied)
        # Another text begins after the end of one.
        end = jnp.where(continued < 0, offset, depth).min(2, keepdims=True)
        continued = jnp.where(offset < end, continued, -1)
    return continued, matched


def copy(root: Int[Array, "B 1"], continued: Int[Array, "B 1 depth"], matched: Int[Array, "B 1"]) -> Int[Array, "B N"]:
    """The last token and its continuation, or repetitions of the last token."""
    exists = (continued[:, 0] >= 0) & (matched > 0)
    return jnp.concatenate([root, jnp.where(exists, continued[:, 0], root)], axis=1)


def vote(
    root: Int[Array, " B"], continued: Int[Array, "B K depth"], matched: Int[Array, "B K"], *, num_nodes: int
) -> DraftTree:
    """Builds the tree of the beginnings with the most votes.

    Ties: the shorter beginning, then that of the better occurrence. Repetitions of the last token are one more
    continuation, without votes.
    """
    # Add repetitions of the last token, without votes.
    depth, last = continued.shape[2], root[:, None, None]
    continued = jnp.concatenate([continued, jnp.broadcast_to(last, (root.shape[0], 1, depth))], axis=1)
    exists = jnp.pad(matched > 0, ((0, 0), (0, 1)), constant_values=True)[:, :, None] & (continued >= 0)
    votes = jnp.pad(jnp.left_shift(1, matched), ((0, 0), (0, 1)))
    generation = jnp.arange(depth, dtype=jnp.int32)[None, None]
    # same[b, i, k, g]: occurrences i and k agree in g + 1 tokens. A beginning belongs to the first one that has it.
    equal = (continued[:, :, None] == continued[:, None]) & exists[:, :, None] & exists[:, None]
    same = generation[None] < jnp.where(equal, depth, generation[None]).min(3, keepdims=True)
    total = jnp.where(same, votes[:, None, :, None], 0).sum(2, dtype=jnp.int32).astype(jnp.float32)
    weight = total * jnp.asarray(DISCOUNT ** np.arange(depth), jnp.float32)[None, None]
    owner = jnp.argmax(same, axis=2).astype(jnp.int32)
    number = jnp.arange(continued.shape[1], dtype=jnp.int32)[None, :, None]
    first = exists & (owner == number)
    # Duplicates and ended continuations repeat the last token under the root: they remain only if there are fewer
    # beginnings than nodes, and then an equal sibling before them wins.
    above = jnp.pad(owner[:, :, :-1], ((0, 0), (0, 0), (1, 0)))
    parent = jnp.where(generation == 0, -1, above + (generation - 1) * continued.shape[1])
    parts = jnp.where(first, continued, last), jnp.where(first, weight, -1.0), jnp.where(first, parent, -1)
    # Candidates are numbered generation by generation.
    tokens, scores, parents = (jnp.swapaxes(part, 1, 2).reshape(root.shape[0], -1) for part in parts)
    # Votes are no probabilities.
    return dataclasses.replace(grow.keep_best(root, tokens, scores, parents, depth, num_nodes), scores=None)


def count_matched(
    text: Int[Array, "_ S"], tokens: Int[Array, "B C"], last: Int[Array, "B 1"], n: int
) -> Int[Array, "B S"]:
    """Counts, for each column of the text, how many of the last n tokens of each sequence match up to it."""
    batch, columns = tokens.shape[0], text.shape[1]
    equal, matched = jnp.ones((batch, columns), bool), jnp.zeros((batch, columns), jnp.int32)
    for back in range(min(n, columns, tokens.shape[1])):
        shifted = jnp.pad(text[:, : columns - back], ((0, 0), (back, 0)), constant_values=-1)
        token = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)
        equal = equal & (shifted == jnp.where(last >= back, token, -2))
        matched = matched + equal.astype(jnp.int32)
    return matched


def _best(matched: Int[Array, "B S"], n: int, count: int) -> tuple[Int[Array, "B K"], Int[Array, "B K"]]:
    """Selects the `count` longest matches, of equally long ones the last; returns places and lengths, best first.

    Takes all matches of the longest lengths, as long as there are fewer than `count`, and the last ones of the next
    shorter length. A sort would keep a GPU from running the loop as one graph.
    """
    # The shortest length of which not all matches are taken.
    lengths = jnp.arange(1, n + 1, dtype=jnp.int32)
    at_least = (matched[:, None] >= lengths[None, :, None]).sum(2, dtype=jnp.int32)
    border = (at_least >= count).sum(1, keepdims=True, dtype=jnp.int32)
    longer, some = matched > border, (matched == border) & (border > 0)
    number = jnp.arange(count, dtype=jnp.int32)[None]
    above = longer.sum(1, keepdims=True, dtype=jnp.int32)
    first, rest = _last_marked(longer, count), _last_marked(some, count)
    rest = jnp.take_along_axis(rest, jnp.clip(number - above, 0, count - 1), axis=1)
    place = jnp.where(number < above, first, rest)
    length = jnp.where(place >= 0, jnp.take_along_axis(matched, jnp.maximum(place, 0), axis=1), 0)
    # Best first.
    ranked = grow.highest(length.astype(jnp.float32), count)
    return jnp.take_along_axis(place, ranked, axis=1), jnp.take_along_axis(length, ranked, axis=1)


def _last_marked(marked: Bool[Array, "B S"], count: int) -> Int[Array, "B K"]:
    """The last `count` marked columns, the last one first; -1 where there are fewer."""
    # Blocks, and the marked columns up to the end of each.
    batch, columns = marked.shape
    padded = jnp.pad(marked, ((0, 0), (-columns % _BLOCK, 0)))[:, ::-1]
    blocks = padded.reshape(batch, -1, _BLOCK)
    until = _running_sum(blocks.sum(2, dtype=jnp.int32))
    number = jnp.arange(count, dtype=jnp.int32)[None]
    block = (until[:, None] <= number[:, :, None]).sum(2, dtype=jnp.int32)
    exists = block < until.shape[1]
    block = jnp.minimum(block, until.shape[1] - 1)
    # The column within the block.
    inside = jnp.take_along_axis(blocks, block[:, :, None], axis=1)
    before = jnp.take_along_axis(until, block, axis=1) - inside.sum(2, dtype=jnp.int32)
    order = _running_sum(inside.astype(jnp.int32))
    column = (order <= (number - before)[:, :, None]).sum(2, dtype=jnp.int32)
    return jnp.where(exists, columns - 1 - (block * _BLOCK + column), -1)


def _running_sum(x: Int[Array, "*batch n"]) -> Int[Array, "*batch n"]:
    """Inclusive sums of the elements so far, block by block."""
    length = x.shape[-1]
    if length <= _BLOCK:
        number = jnp.arange(length, dtype=jnp.int32)
        through = (number[:, None] >= number[None]).reshape(*[1] * (x.ndim - 1), length, length)
        return jnp.where(through, x[..., None, :], 0).sum(-1, dtype=jnp.int32)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % _BLOCK)])
    inner = _running_sum(padded.reshape(*x.shape[:-1], -1, _BLOCK))
    totals = inner[..., -1]
    sums = inner + (_running_sum(totals) - totals)[..., None]
    return sums.reshape(*x.shape[:-1], -1)[..., :length]
