"""What `generate` and `stream` return, and how it shows itself."""

import dataclasses
import itertools
from typing import Any

import numpy as np

from jspec.text import highlight
from jspec.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """What a generation took. The first token of each row comes of reading its prompt, and so of no round.

    rounds: [B] rounds in which each row was active.
    accept_counts: [B, depth + 1]; accept_counts[b, i] counts the rounds that appended i + 1 tokens.
    seconds: wall time of the rounds, without prefill and compilation.
    """

    rounds: np.ndarray
    accept_counts: np.ndarray
    seconds: float

    @property
    def new_tokens(self) -> int:
        """New tokens of all rows."""
        return len(self.rounds) + self._in_rounds

    @property
    def accept_length(self) -> float:
        """Mean tokens a round, bonus token included: 1 is plain decoding, depth + 1 the most there can be."""
        return self._in_rounds / max(int(self.rounds.sum()), 1)

    @property
    def acceptance_by_position(self) -> np.ndarray:
        """[depth] share of the rounds that kept the draft token at each position."""
        at_least = np.cumsum(self.accept_counts.sum(0)[::-1])[::-1]
        return at_least[1:] / max(int(self.rounds.sum()), 1)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rounds and rows over `seconds`."""
        return self._in_rounds / self.seconds if self.seconds else float("nan")

    @property
    def _in_rounds(self) -> int:
        return int((self.accept_counts * np.arange(1, self.accept_counts.shape[1] + 1)).sum())


@dataclasses.dataclass(frozen=True, repr=False)
class Generation:
    """The result of `generate`. A single prompt gives single values, a list of prompts gives lists.

    In a notebook it shows each token in the colour of where it came from; `to_ansi` does so for a terminal.

    tokens: new ids, with the EOS id or up to the token that completes a stop string.
    text: their text without special tokens and without the stop string; None for a checkpoint without a tokenizer.
    finish_reason: "eos", "stop" (a stop string) or "length".
    origin: where each token came from: the depth of the draft that was accepted, or 0 for the target's own.
    logprobs: log-probability of each token under the target's own logits, unprocessed; None unless asked for.
    prompt: ids of the prompt.
    tokenizer: the model's, to show tokens with; or None.
    """

    tokens: list
    text: Any
    finish_reason: Any
    stats: GenerationStats
    origin: list
    logprobs: list | None
    prompt: list
    tokenizer: Tokenizer | None

    @property
    def token_texts(self) -> list:
        """The text of each token, for a reader: special tokens are named, and without a tokenizer it is the id."""
        rows = zip(*self._rows(self.prompt, self.tokens), strict=True)
        texts = [highlight.token_texts(self.tokenizer, prompt, tokens) for prompt, tokens in rows]
        return texts if self._several else texts[0]

    def rounds_of(self, row: int = 0) -> list[int]:
        """Tokens that each round appended to a row, behind its first one. The last round may have been cut."""
        origin = self._rows(self.origin)[0][row]
        ends = [i + 1 for i, depth in enumerate(origin) if depth == 0]
        ends += [len(origin)] * (not ends or ends[-1] < len(origin))
        return [end - start for start, end in itertools.pairwise(ends)]

    def to_ansi(self) -> str:
        """Prompts and tokens in colour, and a last line that says what the colours mean."""
        rows = self._shown()
        texts = [highlight.to_ansi(row, self._depth) for row in rows]
        if self._several:
            texts = [f"{row.heading}\n{text}\n" for row, text in zip(rows, texts, strict=True)]
        return "\n".join([*texts, highlight.ansi_legend(self._depth)])

    def _repr_html_(self) -> str:
        return highlight.to_html(self._shown(), self._depth)

    def __repr__(self) -> str:
        contents, reasons = self._rows(self.tokens if self.text is None else self.text, self.finish_reason)
        shown = [_beginning(content) for content in contents[:3]] + ["..."] * (len(contents) > 3)
        content = f"{len(contents)} rows: [{', '.join(shown)}]" if self._several else shown[0]
        ends = ", ".join(f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))
        return (
            f"Generation({content}, {self.stats.new_tokens} new tokens in {int(self.stats.rounds.sum())} rounds, "
            f"accept length {self.stats.accept_length:.2f}, {self.stats.tokens_per_second:.1f} tokens/s, "
            f"finish: {ends if self._several else reasons[0]})"
        )

    @property
    def _several(self) -> bool:
        return isinstance(self.finish_reason, list)

    @property
    def _depth(self) -> int:
        return self.stats.accept_counts.shape[1] - 1

    def _rows(self, *columns) -> list[list]:
        return list(columns) if self._several else [[column] for column in columns]

    def _shown(self) -> list[highlight.Row]:
        columns = self._rows(self.tokens, self.token_texts, self.origin, self.finish_reason, self.prompt)
        rows = []
        for i, (tokens, texts, origin, reason, prompt) in enumerate(zip(*columns, strict=True)):
            rounds = int(self.stats.rounds[i])
            heading = (
                f"{f'row {i}: ' if self._several else ''}{len(tokens)} new tokens in {rounds} rounds, "
                f"accept length {(len(tokens) - 1) / max(rounds, 1):.2f}, finish: {reason}"
            )
            before = "".join(highlight.token_texts(self.tokenizer, (), prompt))
            rows.append(highlight.Row(tokens, texts, origin, heading, before))
        return rows


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text and ids of one row; what `stream` yields."""

    row: int
    text: str
    tokens: list[int]


def _beginning(content, most: int = 40) -> str:
    """The first characters of a text, or the first ids."""
    if isinstance(content, str):
        return repr(content) if len(content) <= most else repr(content[:most]) + "..."
    return repr(content) if len(content) <= most // 4 else f"[{', '.join(map(str, content[: most // 4]))}, ...]"
