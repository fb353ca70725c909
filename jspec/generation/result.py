"""Results of `generate` and `stream`, and their display."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np
from jaxtyping import Bool, Int

from jspec.core import stopping
from jspec.core.optional import as_branching
from jspec.core.types import Drafter, TopTokens
from jspec.drafters import describe
from jspec.generation.support import TokenSupport
from jspec.text import highlight
from jspec.text.tokenizer import Tokenizer

FinishReason: TypeAlias = Literal["eos", "stop", "length", "cancelled"]
FINISH_REASONS: dict[int, FinishReason] = {stopping.EOS: "eos", stopping.STOP: "stop", stopping.LENGTH: "length"}
"""Finish codes of completed sequences."""


class GeneratedToken(NamedTuple):
    """A new token, with its entries in the lists of a `Generation`.

    id: in the vocabulary.
    text: for display, as in `Generation.token_texts`.
    origin: depth of its accepted draft, or 0 for the target's own token.
    logprob: under the target's own, unprocessed logits; None unless requested.
    """

    id: int
    text: str
    origin: int
    logprob: float | None


@dataclasses.dataclass(frozen=True, eq=False)
class Branches:
    """Counters of a generation by the drafter of each round.

    drafters: the drafters in a few words.
    depths: tokens of the longest chain of each.
    counts: [B, K, depth + 1]; counts[b, k, i] is the number of rounds of drafter k with i accepted drafts.
    """

    drafters: tuple[str, ...]
    depths: tuple[int, ...]
    counts: Int[np.ndarray, "B K A"]

    @classmethod
    def of(cls, drafter: Drafter, counts: Int[np.ndarray, "B K A"] | None, batch: int) -> "Branches | None":
        """The counters of a drafter (counts None: no round yet); None if it has no branches."""
        branching = as_branching(drafter)
        if branching is None:
            return None
        depths = tuple(branch.depth for branch in branching.branches)
        if counts is None:
            counts = np.zeros((batch, len(depths), max(depths) + 1), np.int32)
        return cls(tuple(map(describe, branching.branches)), depths, counts)

    @property
    def rounds(self) -> dict[str, int]:
        """Rounds of all sequences by drafter."""
        return dict(zip(self.drafters, self.counts.sum((0, 2)).tolist(), strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class GenerationStats:
    """Counters of a generation of B sequences. The first token of each comes from prefill, not from a round.

    rounds: [B] rounds in which each sequence was active.
    accept_counts: [B, depth + 1]; accept_counts[b, i] is the number of rounds with i accepted drafts, `dropped` ones
      included. A round appends i + 1 tokens, the last one without `dropped`.
    seconds: wall time of all rounds, without prefill and compilation; where sequences take turns, in an engine or of
      more than 64 prompts, it includes the prefills between rounds.
    dropped: [B] tokens of the last round of each sequence, bonus token included, after the end of the text or limit.
    branches: the counters by drafter, where each round took one of several; None for other drafters.
    limits: [B, K] drafts of the longest chain of each sequence, by drafter; None: those of the drafters.
    """

    rounds: Int[np.ndarray, " B"]
    accept_counts: Int[np.ndarray, "B A"]
    seconds: float
    dropped: Int[np.ndarray, " B"]
    branches: Branches | None = None
    limits: Int[np.ndarray, "B K"] | None = None

    @property
    def new_tokens(self) -> int:
        """New tokens of all sequences."""
        return len(self.rounds) + self._tokens_of_rounds

    @property
    def accept_length(self) -> float:
        """Mean number of tokens per round, bonus token included: 1 for plain decoding, at most depth + 1."""
        return self._tokens_of_rounds / max(int(self.rounds.sum()), 1)

    @property
    def accept_rate(self) -> float:
        """Share of accepted drafts of the longest chains: `accepted / drafted`; 0 for plain decoding."""
        return self.accepted / max(self.drafted, 1)

    @property
    def accepted(self) -> int:
        """Drafts accepted by the rule, those after the end of the text or beyond the limit included."""
        return int((self.accept_counts * np.arange(self.depth + 1)).sum())

    @property
    def drafted(self) -> int:
        """Drafts of the longest chains: in each round `depth`, that of its drafter, or the limit of the sequence."""
        return int((self._counts.sum(2) * self._limits).sum())

    @property
    def acceptance_by_position(self) -> np.ndarray:
        """[depth] share of rounds with the draft token at each position accepted, of sequences with drafts there."""
        at_least = np.cumsum(self.accept_counts.sum(0)[::-1])[::-1]
        return at_least[1:] / np.maximum((self._proposed.any(1) * self.rounds[:, None]).sum(0), 1)

    @property
    def conditional_acceptance(self) -> np.ndarray:
        """[depth] probability of accepting the draft at each position if all before it are accepted.

        NaN at a position never reached. Rounds without a draft there do not count.
        """
        # Rounds with at least i accepted drafts.
        at_least = np.cumsum(self._counts[..., ::-1], axis=2)[..., ::-1].astype(float)
        reached, accepted = (
            np.where(self._proposed, rounds, 0.0).sum((0, 1)) for rounds in (at_least[..., :-1], at_least[..., 1:])
        )
        return np.divide(accepted, reached, out=np.full(self.depth, np.nan), where=reached > 0)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rounds and sequences per second."""
        return self._tokens_of_rounds / self.seconds if self.seconds else float("nan")

    @property
    def depth(self) -> int:
        """Tokens of the longest chain drafted; 0 for plain decoding."""
        return self.accept_counts.shape[1] - 1

    def of_sequence(self, index: int) -> "GenerationStats":
        """The counters of one sequence; `seconds` remains the time of all."""
        return self._taken([index])

    def of_first(self, count: int) -> "GenerationStats":
        """The counters of the first sequences; `seconds` remains the time of all."""
        return self._taken(slice(count))

    def _taken(self, index: "slice | list[int]") -> "GenerationStats":
        branches = self.branches
        if branches is not None:
            branches = dataclasses.replace(branches, counts=branches.counts[index])
        counters = self.rounds[index], self.accept_counts[index], self.seconds, self.dropped[index]
        return GenerationStats(*counters, branches, self._limits[index])

    @classmethod
    def total(cls, parts: "Sequence[GenerationStats]", seconds: float) -> "GenerationStats":
        """The counters of all sequences of several generations; `seconds` is their time in total."""

        def joined(name: str) -> np.ndarray:
            return np.concatenate([getattr(part, name) for part in parts])

        branched, branches = [part.branches for part in parts if part.branches is not None], None
        if branched:
            branches = dataclasses.replace(branched[0], counts=np.concatenate([one.counts for one in branched]))
        counters = joined("rounds"), joined("accept_counts"), seconds, joined("dropped")
        return cls(*counters, branches, joined("_limits"))

    @property
    def _counts(self) -> Int[np.ndarray, "B K A"]:
        """Rounds by sequence, drafter and accepted drafts."""
        return self.accept_counts[:, None] if self.branches is None else self.branches.counts

    @property
    def _limits(self) -> Int[np.ndarray, "B K"]:
        if self.limits is not None:
            return self.limits
        depths = (self.depth,) if self.branches is None else self.branches.depths
        return np.broadcast_to(np.array(depths), (len(self.rounds), len(depths)))

    @property
    def _proposed(self) -> Bool[np.ndarray, "B K depth"]:
        """Whether rounds have a draft at each position."""
        return self._limits[:, :, None] > np.arange(self.depth)

    @property
    def _tokens_of_rounds(self) -> int:
        return self.accepted + int(self.rounds.sum()) - int(self.dropped.sum())


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Generation:
    """The continuation of one prompt. A notebook displays its tokens colored by origin; `to_ansi` is for a terminal.

    Indexing and iteration give the new tokens, each a `GeneratedToken`; `len` is how many there are.

    tokens: new ids, up to and including the EOS id or the last token of a stop string.
    text: text of the new tokens, without special tokens and the stop string; None if the model has no tokenizer.
    finish_reason: "eos", "stop" (a stop string), "length" or "cancelled"; None while the generation runs.
    stats: counters of this sequence; its `seconds` are those of the whole batch.
    origin: for each new token the depth of its accepted draft, or 0 for the target's own token.
    logprobs: log-probability of each new token under the target's own, unprocessed logits; None unless requested.
    prompt: ids of the prompt.
    tokenizer: the model's, for display; or None.
    top_logprobs: for each new token the most probable ids in its place with their log-probabilities, the most probable
      first, under the same logits; None unless requested.
    sampled_logprobs: log-probability of each new token under its sampling distribution: after
      penalties, bias, temperature and truncation, so 0 where the sequence is greedy. None unless `logprobs` are
      requested.
    support: for each new token the possible tokens in its place; None unless requested.
    """

    tokens: list[int]
    text: str | None
    finish_reason: FinishReason | None
    stats: GenerationStats
    origin: list[int]
    logprobs: list[float] | None
    prompt: list[int]
    tokenizer: Tokenizer | None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    sampled_logprobs: list[float] | None = None
    support: list[TokenSupport] | None = None

    @overload
    def __getitem__(self, index: int) -> GeneratedToken: ...

    @overload
    def __getitem__(self, index: slice) -> list[GeneratedToken]: ...

    def __getitem__(self, index: int | slice) -> GeneratedToken | list[GeneratedToken]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[GeneratedToken]:
        return iter(self._items)

    @cached_property
    def _items(self) -> list[GeneratedToken]:
        logprobs = [None] * len(self.tokens) if self.logprobs is None else self.logprobs
        columns = self.tokens, self.token_texts, self.origin, logprobs
        return [GeneratedToken(*item) for item in zip(*columns, strict=True)]

    @property
    def token_texts(self) -> list[str]:
        """The text of each new token, for display: special tokens by name; ids if there is no tokenizer."""
        return highlight.token_texts(self.tokenizer, self.prompt, self.tokens)

    @property
    def tokens_per_round(self) -> list[int]:
        """How many tokens each round appended. The first new token comes from prefill; the last round may be cut off
        by the end of the text.
        """
        ends = [i + 1 for i, depth in enumerate(self.origin) if depth == 0]
        if not ends or ends[-1] < len(self.origin):
            ends.append(len(self.origin))
        return [end - start for start, end in itertools.pairwise(ends)]

    def to_ansi(self) -> str:
        """The prompt and the new tokens in color, and a legend as the last line."""
        depth = self.stats.depth
        return f"{highlight.to_ansi(_displayed(self), depth)}\n{highlight.ansi_legend(depth)}"

    def _repr_html_(self) -> str:
        return highlight.to_html([_displayed(self)], self.stats.depth)

    def __repr__(self) -> str:
        return f"Generation({_beginning(self)}, {_summary(self.stats)}, finish: {self.finish_reason})"


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Generations(Sequence[Generation]):
    """The continuations of a list of prompts: indexing and iteration give a `Generation` for each prompt.

    The properties are lists with one entry per prompt. A notebook displays the tokens of all sequences, colored by
    origin.

    items: the continuation of each prompt.
    stats: counters of the whole batch.
    """

    items: Sequence[Generation]
    stats: GenerationStats

    @overload
    def __getitem__(self, index: int) -> Generation: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Generation]: ...

    def __getitem__(self, index: int | slice) -> Generation | Sequence[Generation]:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def tokens(self) -> list[list[int]]:
        """New ids."""
        return [item.tokens for item in self.items]

    @property
    def text(self) -> list[str] | None:
        """Texts of the new tokens; None if the model has no tokenizer."""
        return self._all("text")

    @property
    def finish_reason(self) -> list[FinishReason | None]:
        """Why each sequence ended."""
        return [item.finish_reason for item in self.items]

    @property
    def origin(self) -> list[list[int]]:
        """Where each new token comes from, as in `Generation.origin`."""
        return [item.origin for item in self.items]

    @property
    def logprobs(self) -> list[list[float]] | None:
        """Log-probabilities of the new tokens; None unless requested."""
        return self._all("logprobs")

    @property
    def sampled_logprobs(self) -> list[list[float]] | None:
        """Under the sampling distributions, as in `Generation.sampled_logprobs`."""
        return self._all("sampled_logprobs")

    @property
    def support(self) -> list[list[TokenSupport]] | None:
        """The possible tokens, as in `Generation.support`; None unless requested."""
        return self._all("support")

    @property
    def top_logprobs(self) -> list[list[list[tuple[int, float]]]] | None:
        """The most probable tokens in each place, as in `Generation.top_logprobs`; None unless requested."""
        return self._all("top_logprobs")

    @property
    def prompt(self) -> list[list[int]]:
        """Ids of the prompts."""
        return [item.prompt for item in self.items]

    @property
    def token_texts(self) -> list[list[str]]:
        """Texts of the new tokens one by one, as in `Generation.token_texts`."""
        return [item.token_texts for item in self.items]

    @property
    def tokens_per_round(self) -> list[list[int]]:
        """How many tokens each round appended, as in `Generation.tokens_per_round`."""
        return [item.tokens_per_round for item in self.items]

    def to_ansi(self) -> str:
        """The prompts and the new tokens in color, and a legend as the last line."""
        depth = self.stats.depth
        shown = [f"{entry.heading}\n{highlight.to_ansi(entry, depth)}\n" for entry in self._displayed()]
        return "\n".join([*shown, highlight.ansi_legend(depth)])

    def _repr_html_(self) -> str:
        return highlight.to_html(self._displayed(), self.stats.depth)

    def __repr__(self) -> str:
        shown = [_beginning(item) for item in self.items[:3]] + ["..."] * (len(self.items) > 3)
        reasons = self.finish_reason
        ends = ", ".join(f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))
        content = f"{len(self.items)} sequences: [{', '.join(shown)}]"
        return f"Generations({content}, {_summary(self.stats)}, finish: {ends})"

    def _all(self, name: str) -> list[Any] | None:
        """A field of all sequences; None unless each has one."""
        values = [getattr(item, name) for item in self.items]
        return None if any(value is None for value in values) else values

    def _displayed(self) -> list[highlight.DisplayedSequence]:
        return [_displayed(item, f"sequence {i}: ") for i, item in enumerate(self.items)]


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text and ids of one sequence; yielded by `stream`.

    index: of the sequence in the batch.
    logprobs: of each new token; None if they are not recorded, or not until the end.
    finish_reason: in the last piece of a request to an engine, why it ended.
    top_logprobs: for each new token the most probable tokens with their log-probabilities, if they are recorded.
    origin: for each new token of a request to an engine, as in `Generation`.
    stopped_by: in the last piece of a request to an engine, the stop string or id that ended it.
    """

    index: int
    text: str
    tokens: list[int]
    logprobs: list[float] | None = None
    finish_reason: FinishReason | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    origin: list[int] | None = None
    stopped_by: str | int | None = None


def top_pairs(top: TopTokens, k: int) -> list[list[tuple[int, float]]]:
    """The k most probable tokens of each distribution with their log-probabilities.

    top: NumPy arrays [n, at least k], as `device_get` returns them.
    """
    both = zip(top.ids[:, :k].tolist(), top.logprobs[:, :k].tolist(), strict=True)
    return [list(zip(*entry, strict=True)) for entry in both]


def _summary(stats: GenerationStats) -> str:
    return (
        f"{stats.new_tokens} new tokens in {int(stats.rounds.sum())} rounds, "
        f"accept length {stats.accept_length:.2f}, {stats.tokens_per_second:.1f} tokens/s"
    )


def _displayed(generation: Generation, name: str = "") -> highlight.DisplayedSequence:
    new_tokens, rounds = len(generation.tokens), int(generation.stats.rounds.sum())
    heading = (
        f"{name}{new_tokens} new tokens in {rounds} rounds, "
        f"accept length {(new_tokens - 1) / max(rounds, 1):.2f}, finish: {generation.finish_reason}"
    )
    prompt = "".join(highlight.token_texts(generation.tokenizer, (), generation.prompt))
    return highlight.DisplayedSequence(
        generation.tokens, generation.token_texts, generation.origin, heading=heading, prompt=prompt
    )


def _beginning(generation: Generation) -> str:
    """The first 40 characters of the text, or the first 10 ids if there is no text."""
    text, tokens = generation.text, generation.tokens
    if text is not None:
        return repr(text) if len(text) <= 40 else f"{text[:40]!r}..."
    return repr(tokens) if len(tokens) <= 10 else f"[{', '.join(map(str, tokens[:10]))}, ...]"
