"""`score`: log-probabilities of the tokens of prompts, without generating."""

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
from jspec.core.accept import greedy
from jspec.core.checks import check_int
from jspec.core.commit import commit_rows
from jspec.core.method import Method, on_devices
from jspec.core.processes import agreement, fetch, least
from jspec.core.sharding import Placement
from jspec.core.types import Cache, Target, TopTokens
from jspec.drafters import Plain
from jspec.generation.result import top_pairs
from jspec.generation.run import Prompt, bucket, check_model, encode_prompts, prefill_chunk
from jspec.loading import memory
from jspec.loading.model import Model
from jspec.text.tokenizer import Tokenizer

LOGITS_BYTES = 2**28
"""Bound of the logits of one program in bytes; it limits the tokens of a chunk."""
COMPARED = ("prompts", "top_k", "page_size", "target")
"""Arguments that must be equal in all processes."""
TokenScores: TypeAlias = tuple[Float[Array, "B size"], TopTokens | None]
"""Log-probability of the token after each token read, and the most probable tokens there."""


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Scores:
    """Log-probabilities of the tokens of one prompt, under the target's own, unprocessed logits.

    All lists have an entry per token.

    tokens: ids of the prompt.
    logprobs: log-probability of each token given the tokens before it; None for the first one.
    top: the most probable tokens at each position with their log-probabilities, in descending order; empty for the
      first token, and for all if `top_k` is 0.
    tokenizer: the model's tokenizer, for display, or None.
    """

    tokens: list[int]
    logprobs: list[float | None]
    top: list[list[tuple[int, float]]]
    tokenizer: Tokenizer | None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total(self) -> float:
        """Sum of the log-probabilities."""
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
    model: Model, prompts: Prompt | Sequence[Prompt], *, top_k: int = 0, page_size: int = DEFAULT_PAGE_SIZE
) -> Scores | list[Scores]:
    """Compute the log-probability of each token of the prompts, given the tokens before it.

    The prompts are read in chunks, so memory is bounded by the logits of a chunk, at most 256 MiB, and the cache of one
    batch. Lengths are rounded up to a power of two; prompts of equal width share a program, and short ones a batch.

    Args:
      model: from `jspec.load`. A draft is not used.
      prompts: one prompt or a list of any number of prompts, each as text or as token ids.
      top_k: number of the most probable tokens to return at each position.
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
    for indices, batch in batches:
        batch.capacity = least(model.placement, batch.capacity)
        for chunk in batch.chunks():
            batch.collect(scorer.read(model.params.target, chunk))
        results.update(zip(indices, batch.scores(model.tokenizer), strict=True))
    return results[0] if single else [results[i] for i in range(len(ids))]


def check_score(model: Model, prompts: Sequence[Sequence[int]], top_k: object, page_size: object) -> tuple[int, int]:
    """Check `top_k`, `page_size` and the context; returns plain ints, or raises ValueError or TypeError."""
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
    """Split the prompts into batches of equal width. Returns pairs: the indices of its prompts, and the batch."""
    # Tokens of a chunk: a power of two, and so a multiple of the widths of short prompts.
    tokens = 1 << (LOGITS_BYTES // (4 * model.target.vocab_size)).bit_length() >> 1
    tokens = min(max(tokens, 16), prefill_chunk(1))
    # Group the prompts by width, then cut each group into batches.
    batches: list[tuple[list[int], Batch]] = []
    by_width: defaultdict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_width[bucket(len(prompt))].append(index)
    for width, indices in sorted(by_width.items()):
        sequences = max(1, tokens // width) * groups.count(model.placement)
        for start in range(0, len(indices), sequences):
            members = indices[start : start + sequences]
            batch = [prompts[index] for index in members]
            batches.append((members, Batch(model, batch, width, min(width, tokens), top_k, page_size)))
    return batches


class Chunk(NamedTuple):
    """The arguments of one program, for some columns of a batch. Several groups of devices add a first axis to arrays.

    tokens, following: the tokens to read, and the next token of each.
    begin, lengths: position of the first token and number of tokens, per sequence.
    cache: arguments of `Target.init_cache`: sequences of a group, capacity and page size.
    top_k: number of the most probable tokens to return.
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
    """Reads batches chunk by chunk, with one cache per batch."""

    def __init__(self, target: Target, placement: Placement | None):
        self._method = Method(target, Plain(), greedy, placement)
        self._cache: Cache | None = None

    def read(self, params: PyTree, chunk: Chunk) -> TokenScores:
        """Dispatch a chunk. params: weights of the target."""
        cache = _empty_cache(params, method=self._method, shape=chunk.cache) if chunk.first else self._cache
        assert cache is not None
        arrays = chunk.tokens, chunk.following, chunk.begin, chunk.lengths
        self._cache, scores = _read(params, cache, *arrays, method=self._method, top_k=chunk.top_k)
        if chunk.last:
            self._cache = None
        return scores


class Batch:
    """Prompts that share a program, scored chunk by chunk.

    Args:
      model: gives the devices and, for the memory, the weights.
      width: maximum length of the prompts.
      size: columns of a chunk.
      top_k, page_size: as in `score`.

    Attributes:
      capacity: tokens per sequence of the cache; equal in all processes.
    """

    def __init__(
        self, model: Model, prompts: Sequence[Sequence[int]], width: int, size: int, top_k: int, page_size: int
    ):
        self._prompts, self._placement, self._size, self._top_k = prompts, model.placement, size, top_k
        sequences = bucket(groups.batch_of(model.placement, len(prompts)), least=1)
        self.capacity = memory.fit(model.params, model.target, Plain(), sequences, page_size, width, width)
        slots = sequences * groups.count(model.placement)
        self._ids = np.zeros((slots, width + size + 1), np.int32)
        # Tokens to read: not the last one of a prompt, which predicts nothing.
        self._counts = np.zeros(slots, np.int32)
        for i, prompt in enumerate(prompts):
            self._ids[i, : len(prompt)] = prompt
            self._counts[i] = len(prompt) - 1
        self._sequences, self._page_size = sequences, page_size
        self._scores: list[tuple[np.ndarray, TopTokens | None]] = []

    def chunks(self) -> Iterator[Chunk]:
        """The chunks in order; none if all prompts have one token."""
        cache = self._sequences, self.capacity, fit_page_size(self._page_size, self.capacity)
        end = int(self._counts.max())
        for start in range(0, end, self._size):
            tokens, following = (self._ids[:, at : at + self._size] for at in (start, start + 1))
            # Sequences that have ended read 0 tokens.
            begin = np.minimum(self._counts, start)
            arrays = tokens, following, begin, np.minimum(self._counts - begin, self._size)
            grouped = groups.stack(self._placement, arrays)
            yield Chunk(*grouped, cache, self._top_k, start == 0, start + self._size >= end)

    def collect(self, scores: TokenScores) -> None:
        """Wait for the scores of a chunk and copy them to the host. All processes must call this in the same order."""
        self._scores.append(groups.unstack(self._placement, fetch(scores), len(self._prompts)))

    def scores(self, tokenizer: Tokenizer | None) -> list[Scores]:
        """The scores of each prompt, after all chunks."""
        results = []
        for i, prompt in enumerate(self._prompts):
            count = len(prompt) - 1
            values = [x for part, _ in self._scores for x in part[i].tolist()][:count]
            tops = [[] for _ in range(count)]
            if self._top_k:
                recorded = [TopTokens(top.ids[i], top.logprobs[i]) for _, top in self._scores if top is not None]
                tops = [entry for part in recorded for entry in top_pairs(part, self._top_k)][:count]
            results.append(Scores(list(prompt), [None, *values], [[], *tops], tokenizer))
        return results


@partial(jax.jit, static_argnames=("method", "shape"))
@on_devices
def _empty_cache(params: PyTree, *, method: Method, shape: tuple[int, int, int]) -> Cache:
    """An empty cache per group of devices."""
    return method.target.init_cache(params, *shape)


@partial(jax.jit, static_argnames=("method", "top_k"), donate_argnames=("cache",))
@on_devices
def _read(
    params: PyTree,
    cache: Cache,
    tokens: Int[Array, "B size"],
    following: Int[Array, "B size"],
    begin: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    method: Method,
    top_k: int,
) -> tuple[Cache, TokenScores]:
    """Read `count` tokens of each sequence from position `begin` on.

    Returns the cache after them, the log-probability of the token after each, and the most probable tokens there.
    """
    out = method.target.forward(params, tree.chain(tokens), cache, begin)
    cache = commit_rows(cache, out.rows, begin, None, count, after=out.logits)
    top = logprobs.most_probable(out.logits, top_k) if top_k else None
    return cache, (logprobs.of_tokens(out.logits, following), top)
