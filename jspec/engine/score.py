"""`score`: log-probabilities of given tokens, which a forward over them gives without generating anything."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, overload

import jax
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jspec.cache.pages import DEFAULT_PAGE_SIZE, fit_page_size
from jspec.core import groups, logprobs, tree
from jspec.core.checks import check_int
from jspec.core.commit import commit_rows
from jspec.core.processes import agreement, fetch, least
from jspec.core.sharding import Placement, over
from jspec.core.types import Cache, Target, TopTokens
from jspec.drafters import Plain
from jspec.engine import memory
from jspec.engine.model import Model
from jspec.engine.result import top_pairs
from jspec.engine.run import Prompt, bucket, check_model, encode_prompts, prefill_chunk
from jspec.text.tokenizer import Tokenizer

LOGITS_BYTES = 2**28
"""Bytes of the logits that one program computes, which bounds the tokens that it reads."""
COMPARED = ("prompts", "top_k", "page_size", "target")
"""What several processes must agree in."""
Found: TypeAlias = tuple[Float[Array, "B size"], TopTokens | None]
"""The log-probability of the token that follows each one that is read, and the most probable tokens there."""


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Scores:
    """The log-probabilities of the tokens of one prompt, under the target's own, unprocessed logits.

    All lists have an entry per token.

    tokens: ids of the prompt.
    logprobs: log-probability of each token after those before it; None for the first one, which follows nothing.
    top: the most probable tokens at the place of each token, with their log-probabilities, the most probable first;
      empty for the first token, and for all if none were requested.
    tokenizer: the model's, which displays the tokens; or None.
    """

    tokens: list[int]
    logprobs: list[float | None]
    top: list[list[tuple[int, float]]]
    tokenizer: Tokenizer | None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total(self) -> float:
        """Log-probability of all tokens after the first one together."""
        return float(sum(x for x in self.logprobs if x is not None))

    def __repr__(self) -> str:
        content = f"{len(self.tokens)} tokens, log-probability {self.total:.2f}"
        if self.tokenizer is None:
            return f"Scores({content})"
        text = self.tokenizer.decode(self.tokens)
        beginning = repr(text) if len(text) <= 40 else f"{text[:40]!r}..."
        return f"Scores({beginning}, {content})"


@overload
def score(  # pyright: ignore[reportOverlappingOverload]
    model: Model, prompts: str | Sequence[int], *, top_k: int = ..., page_size: int = ...
) -> Scores: ...


@overload
def score(model: Model, prompts: Sequence[Prompt], *, top_k: int = ..., page_size: int = ...) -> list[Scores]: ...


def score(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    top_k: int = 0,
    page_size: int = DEFAULT_PAGE_SIZE,
) -> Scores | list[Scores]:
    """The log-probability of each token of the prompts, given the tokens before it.

    The prompts are read in chunks, so memory is bounded by the logits of a chunk, at most 256 MiB, and the cache of one
    batch. Prompts whose lengths round up to one power of two run one program, and share batches if they are short.

    Args:
      model: from `jspec.load`. A draft is not used.
      prompts: one prompt or a list of any number of prompts, each as text or as token ids.
      top_k: how many of the most probable tokens to return at each place.
      page_size: rows per cache page.

    Returns:
      `Scores` for a single prompt, a list of them for a list of prompts.

    Raises:
      ValueError, TypeError: an invalid argument, a prompt longer than the model's context, a cache that does not fit in
        the memory of a device, or arguments that differ between processes. Arguments are checked before anything is
        compiled.
    """
    check_model(model)
    with agreement(model.placement, COMPARED) as compare:
        single, ids = encode_prompts(model, prompts)
        top_k, page_size = check_score(model, ids, top_k, page_size)
        batches = split(model, ids, top_k, page_size)
        compare({"prompts": ids, "top_k": top_k, "page_size": page_size, "target": model.target})
    results: dict[int, Scores] = {}
    scorer = Scorer(model.target, model.placement)
    for places, batch in batches:
        batch.capacity = least(model.placement, batch.capacity)
        for chunk in batch.chunks():
            batch.collect(scorer.read(model.params.target, chunk))
        results.update(zip(places, batch.scores(model.tokenizer), strict=True))
    return results[0] if single else [results[i] for i in range(len(ids))]


def check_score(model: Model, prompts: Sequence[Sequence[int]], top_k: object, page_size: object) -> tuple[int, int]:
    """`top_k` and `page_size` as plain ints.

    Raises:
      ValueError, TypeError: one of them is invalid, or a prompt does not fit in the model's context.
    """
    longest = max(map(len, prompts))
    if longest > model.target.max_length:
        raise ValueError(
            f"the longest prompt has {longest} tokens: must be at most {model.target.max_length}, the model's context"
        )
    top_k = check_int("top_k", top_k, least=0, most=model.target.vocab_size)
    return top_k, check_int("page_size", page_size, least=1)


def split(
    model: Model, prompts: Sequence[Sequence[int]], top_k: int, page_size: int
) -> "list[tuple[list[int], Batch]]":
    """The prompts in batches of one width, each with the places of its prompts."""
    # A power of two, so that it is a multiple of the widths of short prompts.
    tokens = 1 << (LOGITS_BYTES // (4 * model.target.vocab_size)).bit_length() >> 1
    tokens = min(max(tokens, 16), prefill_chunk(1))
    batches: list[tuple[list[int], Batch]] = []
    by_width: defaultdict[int, list[int]] = defaultdict(list)
    for place, prompt in enumerate(prompts):
        by_width[bucket(len(prompt))].append(place)
    for width, places in sorted(by_width.items()):
        rows = max(1, tokens // width) * groups.count(model.placement)
        for start in range(0, len(places), rows):
            chosen = places[start : start + rows]
            size = min(width, tokens)
            batches.append((chosen, Batch(model, [prompts[place] for place in chosen], width, size, top_k, page_size)))
    return batches


class Chunk(NamedTuple):
    """Columns of a batch that one program reads. Arrays have a first axis of groups of devices if there are several.

    tokens, following: what is read, and what follows each token.
    begin, lengths: the position of the first of them in each sequence, and how many of them it has.
    cache: sequences of a group, capacity and page size.
    top_k: how many of the most probable tokens are wanted.
    first, last: whether it begins or ends a batch.
    """

    tokens: Int[np.ndarray, "*groups B size"]
    following: Int[np.ndarray, "*groups B size"]
    begin: Int[np.ndarray, "*groups B"]
    lengths: Int[np.ndarray, "*groups B"]
    cache: tuple[int, int, int]
    top_k: int
    first: bool
    last: bool


class Scorer:
    """Reads one batch after another, chunk by chunk, with a cache that it keeps from the first one to the last."""

    def __init__(self, target: Target, placement: Placement | None):
        self._target, self._placement = target, placement
        self._cache: Cache | None = None

    def read(self, params: PyTree, chunk: Chunk) -> Found:
        """Dispatches a chunk. params: weights of the target."""
        static = {"target": self._target, "placement": self._placement}
        cache = _empty_cache(params, shape=chunk.cache, **static) if chunk.first else self._cache
        assert cache is not None
        arrays = chunk.tokens, chunk.following, chunk.begin, chunk.lengths
        self._cache, found = _read(params, cache, *arrays, **static, top_k=chunk.top_k)
        if chunk.last:
            self._cache = None
        return found


class Batch:
    """Prompts that are scored together, chunk by chunk.

    Args:
      model: whose devices will read them.
      width: columns of the longest prompt at most.
      size: columns that are read at once.

    Attributes:
      capacity: of the cache, in tokens per sequence; the same in all processes.
    """

    def __init__(
        self, model: Model, prompts: Sequence[Sequence[int]], width: int, size: int, top_k: int, page_size: int
    ):
        self._prompts, self._placement, self._size, self._top_k = prompts, model.placement, size, top_k
        own = bucket(groups.batch_of(model.placement, len(prompts)), least=1)
        self.capacity = memory.fit(model.params, model.target, Plain(), own, page_size, width, width)
        rows = own * groups.count(model.placement)
        self._ids = np.zeros((rows, width + size + 1), np.int32)
        # The last token is not read: it precedes nothing.
        self._unread = np.zeros(rows, np.int32)
        for row, prompt in enumerate(prompts):
            self._ids[row, : len(prompt)] = prompt
            self._unread[row] = len(prompt) - 1
        self._own, self._page_size = own, page_size
        self._parts: list[tuple[np.ndarray, TopTokens | None]] = []

    def chunks(self) -> Iterator[Chunk]:
        """What is to be read, in order; nothing if all prompts have one token."""
        cache = self._own, self.capacity, fit_page_size(self._page_size, self.capacity)
        end = int(self._unread.max())
        for start in range(0, end, self._size):
            tokens, following = (self._ids[:, at : at + self._size] for at in (start, start + 1))
            begin = np.minimum(self._unread, start)
            arrays = tokens, following, begin, np.minimum(self._unread - begin, self._size)
            own = groups.stack(self._placement, arrays)
            yield Chunk(*own, cache, self._top_k, start == 0, start + self._size >= end)

    def collect(self, found: Found) -> None:
        """Waits for what a chunk has given, and takes it to the host. All processes must call this alike."""
        self._parts.append(groups.unstack(self._placement, fetch(found), len(self._prompts)))

    def scores(self, tokenizer: Tokenizer | None) -> list[Scores]:
        """The scores of each prompt, when all is read."""
        results = []
        for row, prompt in enumerate(self._prompts):
            count = len(prompt) - 1
            values = [x for part, _ in self._parts for x in part[row].tolist()][:count]
            tops = [[] for _ in range(count)]
            if self._top_k:
                own = [TopTokens(top.ids[row], top.logprobs[row]) for _, top in self._parts if top is not None]
                tops = [entry for part in own for entry in top_pairs(part, self._top_k)][:count]
            results.append(Scores(list(prompt), [None, *values], [[], *tops], tokenizer))
        return results


@partial(jax.jit, static_argnames=("target", "shape", "placement"))
def _empty_cache(params: PyTree, *, target: Target, shape: tuple[int, int, int], placement: Placement | None) -> Cache:
    """An empty cache, of each group of devices."""
    return over(placement, lambda params: target.init_cache(params, *shape), params)


@partial(jax.jit, static_argnames=("target", "top_k", "placement"), donate_argnames=("cache",))
def _read(
    params: PyTree,
    cache: Cache,
    tokens: Int[Array, "*groups B size"],
    following: Int[Array, "*groups B size"],
    begin: Int[Array, "*groups B"],
    count: Int[Array, "*groups B"],
    *,
    target: Target,
    top_k: int,
    placement: Placement | None,
) -> tuple[Cache, Found]:
    """The cache after `count` more tokens of each sequence are read, from position `begin` on, and the log-probability
    of the token that follows each, with the most probable tokens there.
    """

    def read(
        params: PyTree,
        cache: Cache,
        tokens: Int[Array, "B size"],
        following: Int[Array, "B size"],
        begin: Int[Array, " B"],
        count: Int[Array, " B"],
    ) -> tuple[Cache, Found]:
        out = target.forward(params, tree.chain(tokens), cache, begin)
        cache = commit_rows(cache, out.rows, begin, None, count, after=out.logits)
        top = logprobs.most_probable(out.logits, top_k) if top_k else None
        return cache, (logprobs.of_tokens(out.logits, following), top)

    return over(placement, read, params, cache, tokens, following, begin, count)
