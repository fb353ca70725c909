"""Finds misread drafts: compares a draft with what its target writes, also under neighboring readings of the draft."""

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from jspec.core.types import Params, Target
from jspec.drafters.readings import Reading, View, as_read, other_readings, predict, write
from jspec.models.draft import Draft
from jspec.text.tokenizer import Tokenizer

PROMPTS = (
    "The weather in the mountains changes quickly, so hikers should always",
    "def read_lines(path):\n    with open(path) as file:\n        return",
    "In the spring of that year the first trains began to run between",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def",
    "Dear customer, thank you for your message. We are happy to",
    "import os\nimport sys\n\n\ndef main(arguments):\n    parser =",
)
"""Beginnings of texts of several kinds, for the target to continue."""
_WIDTH, _NEW = 8, 24
"""Tokens of each prompt, and choices after it: too few for a text to repeat itself."""
_CLEARLY = 3.3
"""Least lead of another reading in expected acceptance, in standard errors: 1 in 2,000 has it by chance."""
DOCS = "docs/guide/drafts.md"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Another reading beside the checkpoint's.

    name, field: as of `Reading`.
    tokens: the compared ones of each proposal: "first" or "second".
    total: number of compared tokens.
    right, read_right: the target's choices among them, under this reading and under the checkpoint's.
    least: right ones that a draft for this target has at least.
    overlap, read_overlap: expected acceptance of a sampled draft, from 0 to 1.
    errors: the difference of the two, in standard errors of the mean over positions.
    """

    name: str
    field: str
    tokens: str
    total: int
    right: int
    read_right: int
    least: int
    overlap: float
    read_overlap: float
    errors: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a draft fits its target.

    total: compared first tokens; `right`, `least` and `overlap` as of `Comparison`.
    others: the neighboring readings.
    seconds: time of all forwards.
    """

    total: int
    right: int
    least: int
    overlap: float
    others: tuple[Comparison, ...]
    seconds: float

    @property
    def better(self) -> Comparison | None:
        """The best reading with a clearly better fit; None: there is none."""
        clear = [other for other in self.others if other.errors > _CLEARLY and other.right >= other.least]
        return max(clear, key=lambda other: other.overlap - other.read_overlap, default=None)

    def warning(self, name: str) -> str | None:
        """One line about a draft of this name, misread or for another target; None: it fits."""
        text, better = "draft {}: {} of {} {} tokens are right as read, {}; see {}", self.better
        if better is not None:
            other = (
                f"{better.right} with {better.name} (acceptance {better.overlap:.2f}, not {better.read_overlap:.2f})"
            )
            other += better.field and f": check {better.field} in config.json"
            return text.format(name, better.read_right, better.total, better.tokens, other, DOCS)
        if self.right < self.least:
            other = f"under {self.least}, and no reading fits better: is it a draft for this target?"
            return text.format(name, self.right, self.total, "first", other, DOCS)
        return None


def probe_fit(params: Params, target: Target, draft: Draft, prompts: Int[np.ndarray, "B P"], eos: Sequence[int]) -> Fit:
    """Compares a draft with its target over a few tokens written by the target, under all readings of the draft.

    prompts: as `make_prompts`.
    eos: ends of texts; later tokens do not count.
    """
    begin = time.perf_counter()
    text, view = write(params, prompts, target=target, new=_NEW), as_read(params, target, draft)
    choices = np.asarray(text.choices)
    ends = np.isin(choices, list(eos))
    counted = np.cumsum(ends, axis=1) - ends == 0

    def score(view: View) -> _Score:
        out = predict(view, target, text)
        counts = counted[:, -out.tokens.shape[1] :]
        proposed, target_ids = np.asarray(out.tokens)[counts], choices[:, -counts.shape[1] :][counts]
        return _Score(proposed == target_ids, np.asarray(out.overlap)[counts], _least(proposed, target_ids))

    read = {False: score(view)}
    others = []
    for reading, other in other_readings(view, target):
        if other.second not in read:
            read[other.second] = score(dataclasses.replace(view, second=other.second))
        others.append(_compare(reading, other.second, score(other), read[other.second]))
    first, seconds = read[False], time.perf_counter() - begin
    return Fit(
        first.right.size, int(first.right.sum()), first.least, float(first.overlap.mean()), tuple(others), seconds
    )


def make_prompts(tokenizer: Tokenizer | None, vocab_size: int) -> Int[np.ndarray, "B P"]:
    """Beginnings of `PROMPTS`, of equal length; without a tokenizer, random ids.

    With a chat template they are a user's messages: drafts of chat models are trained on chats, and predict other texts
    too badly to tell readings apart.
    """
    if tokenizer is None:
        return np.random.default_rng(0).integers(0, vocab_size, (len(PROMPTS), _WIDTH), np.int32)
    encoded, before, after = [tokenizer.encode(prompt) for prompt in PROMPTS], 0, 0
    try:
        chats = [tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    except ValueError:  # no template, or one that refuses these chats
        chats = []
    if chats and len(set(map(tuple, chats))) == len(PROMPTS):
        # What the template writes around a message stays whole.
        encoded, before, after = chats, _shared(chats), _shared([ids[::-1] for ids in chats])
    width = min(_WIDTH, *(len(ids) - before - after for ids in encoded))
    return np.array([ids[: before + width] + ids[len(ids) - after :] for ids in encoded], np.int32)


def _shared(sequences: Sequence[Sequence[int]]) -> int:
    """The number of first tokens that all sequences share."""
    columns = zip(*sequences, strict=False)
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), min(map(len, sequences)))


@dataclasses.dataclass(frozen=True)
class _Score:
    """What a draft proposes: for each counted token whether it is right and its overlap, and `least` as of `Fit`."""

    right: Bool[np.ndarray, " n"]
    overlap: Float[np.ndarray, " n"]
    least: int


def _least(proposed: Int[np.ndarray, " n"], target_ids: Int[np.ndarray, " n"]) -> int:
    """Right tokens beyond chance: of a draft with these tokens in any other order, but from a tenth to half of all."""
    size = max(proposed.max(), target_ids.max()) + 1
    share = np.bincount(proposed, minlength=size) @ np.bincount(target_ids, minlength=size) / target_ids.size**2
    most = target_ids.size * share + _CLEARLY * math.sqrt(target_ids.size * share * (1 - share))
    return math.ceil(min(max(most, target_ids.size / 10), target_ids.size / 2))


def _compare(reading: Reading, second: bool, other: _Score, read: _Score) -> Comparison:
    """Compares position by position: the noise of the text itself is in both."""
    gain = other.overlap - read.overlap
    error = float(gain.std(ddof=1)) / math.sqrt(gain.size) if gain.size > 1 else 0.0
    return Comparison(
        name=reading.name,
        field=reading.field,
        tokens="second" if second else "first",
        total=other.right.size,
        right=int(other.right.sum()),
        read_right=int(read.right.sum()),
        least=other.least,
        overlap=float(other.overlap.mean()),
        read_overlap=float(read.overlap.mean()),
        errors=float(gain.mean()) / error if error else 0.0,
    )
