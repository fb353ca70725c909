"""What `verify` compares: a model with a drafter beside plain decoding."""

import dataclasses
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jspec.analysis.contract import Outcome, difference, in_float32
from jspec.analysis.evaluate import heldout_prompts
from jspec.core.accept import REPEATING
from jspec.core.sampling import Sampling
from jspec.core.types import Accept, Drafter
from jspec.generation.method import choose_drafter
from jspec.generation.options import GenerateOptions
from jspec.generation.result import Generation, Generations
from jspec.generation.run import Run
from jspec.generation.score import score
from jspec.loading.model import Model
from pallas_kernels import platform

Out = TypeVar("Out")
LENGTHS = (1, 40, 3, 16, 8, 64, 33, 5)
"""Tokens of the default prompts."""
NEAR_TIE = {"float32": 2e-3}
"""Dtype -> largest difference of two logits whose order rounding may change."""
NEAR_TIE_ELSEWHERE = 0.25
"""The same for other dtypes."""

Texts = Sequence[Sequence[int]]


@dataclasses.dataclass
class Subject:
    """A model with a drafter, prompts as ids, and options of all generations. sampling: per prompt; None: greedy."""

    model: Model
    drafter: Any
    prompts: list[list[int]]
    accept: str | Accept | None
    new: int
    seed: int
    sampling: Sequence[Sampling] | None = None

    def __post_init__(self):
        self.drafter = choose_drafter(self.drafter, self.model)
        self._results: dict[Any, Any] = {}
        self._locks: defaultdict[Any, threading.Lock] = defaultdict(threading.Lock)

    @property
    def exact(self) -> bool:
        """Whether the bits of logits depend on their context alone."""
        return bool(getattr(self.model.target, "exact", False))

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the target's first weights."""
        return jax.tree.leaves(self.model.params.target)[0].dtype

    def once(self, key: Any, make: Callable[[], Out]) -> Out:
        """`make()`, cached by the key; cases in other threads wait for the first call."""
        with self._locks[key]:
            if key not in self._results:
                self._results[key] = make()
        return self._results[key]

    @property
    def wide(self) -> Model:
        """The model in float32."""
        return self.model if self.dtype == jnp.float32 else self.once("wide", partial(in_float32, self.model))

    @property
    def precise(self) -> Model:
        """The model for checks without near-ties."""
        return self.model if self.exact else self.wide

    @property
    def longest(self) -> int:
        """The index of the longest prompt, which determines the shapes of the program."""
        return max(range(len(self.prompts)), key=lambda index: len(self.prompts[index]))

    @property
    def repeats_plain(self) -> bool:
        """Whether samples must equal those of plain decoding."""
        return self.accept in REPEATING

    def options(self, **changes: Any) -> GenerateOptions:
        """Options of a generation; the acceptance rule only with sampling."""
        values = {"drafter": self.drafter, "max_new_tokens": self.new, "seed": self.seed, "sampling": self.sampling}
        rule = {} if {**values, **changes}["sampling"] is None else {"accept": self.accept}
        return GenerateOptions(**{**values, **rule, **changes})

    def run(self, model: Model | None = None, texts: list[list[int]] | None = None, **changes: Any) -> Generations:
        """Generates for all prompts, or for `texts`, in one batch."""
        return Run(model or self.model, texts or self.prompts, self.options(**changes)).finish()

    def plain(self, model: Model | None = None) -> Generations:
        """The results of plain decoding, cached by model."""
        model = model or self.model
        return self.once(("plain", id(model)), partial(self.run, model, drafter=None))

    def drafted(self, model: Model | None = None) -> Generations:
        """The results with the drafter, cached by model: the reference for rounds."""
        model = model or self.model
        return self.once(("drafted", id(model)), partial(self.run, model))

    def compare(self, new: Texts, expected: Texts, model: Model | None = None) -> Outcome:
        """Compares the tokens of all prompts with the expected ones; tells near-ties from other differences."""
        near, compared = "", sum(map(len, expected))
        for index, (ours, theirs) in enumerate(zip(new, expected, strict=True)):
            at = difference(ours, theirs)
            if at is None:
                continue
            if at == min(len(ours), len(theirs)):
                return Outcome("failed", compared, f"sequence {index} has {len(ours)} tokens instead of {len(theirs)}")
            where = (
                f"sequence {index} differs from plain decoding at new token {at}: {ours[at]} instead of {theirs[at]}"
            )
            if self.sampling is not None and self.sampling[index].temperature:
                return Outcome("failed", compared, f"{where}, sampled with the same seed")
            ids = [*self.prompts[index], *theirs[:at]]
            scores = score(self.wide, [[*ids, ours[at]], [*ids, theirs[at]]])
            gap = float(scores[1].logprobs[-1] or 0.0) - float(scores[0].logprobs[-1] or 0.0)
            where += f", whose logit in float32 is {gap:.2g} higher"
            dtype = "float32" if model is self.wide else str(self.dtype)
            # On a CPU, float32 rounds alike for any number of tokens, up to the last bits.
            strict = self.exact or (model is self.wide and platform.platform() == "cpu")
            if strict or abs(gap) > NEAR_TIE.get(dtype, NEAR_TIE_ELSEWHERE):
                return Outcome("failed", compared, where)
            near = near or where
        return Outcome("near-tie" if near else "passed", compared, near)


def check_counters(out: Sequence[Generation]) -> Outcome:
    """Checks counters of rounds and accepted drafts against the tokens of each sequence."""
    for index, item in enumerate(out):
        counts, size = item.stats, len(item.tokens)
        rounds, dropped = int(counts.rounds.sum()), int(counts.dropped.sum())
        total = 1 + counts.accepted + rounds - dropped
        problem, origin = "", [0, *item.origin]
        if size != total or counts.new_tokens != total:
            problem = f"1 + {counts.accepted} accepted + {rounds} rounds - {dropped} dropped = {total}"
        elif any(depth not in (0, before + 1) for before, depth in itertools.pairwise(origin)):
            problem = f"origins that no rounds have: {item.origin}"
        elif len(item.tokens_per_round) != rounds or sum(depth > 0 for depth in item.origin) > counts.accepted:
            problem = f"{rounds} rounds and {counts.accepted} accepted drafts, but was made in others"
        if problem:
            return Outcome("failed", 0, f"sequence {index} has {size} new tokens, and counts {problem}")
    return Outcome("passed", sum(map(len, out)))


def stop_problem(item: Generation, whole: Generation, stops: Sequence[str]) -> str:
    """What is wrong with `item`, if it must be `whole` up to the first of these strings; "" if nothing is."""
    text, got = whole.text or "", item.text or ""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    expected, reason = text[: min(ends, default=len(text))], "stop" if ends else whole.finish_reason
    if got != expected:
        at = difference(got, expected) or 0
        return f"has another text at character {at}: {got[at:][:20]!r} instead of {expected[at:][:20]!r}"
    # The device must stop, too, at the token that completes the string.
    assert item.tokenizer is not None
    beyond = item.tokenizer.decode(item.tokens[:-1])
    if item.finish_reason != reason or any(stop in beyond for stop in stops):
        return f"goes on after a stop string, to {item.finish_reason!r}"
    return ""


def default_prompts(model: Model, new: int) -> list[list[int]]:
    """Eight prompts of different lengths; random ids without a tokenizer."""
    most = model.target.max_length - new
    lengths = [min(length, most) for length in LENGTHS]
    if model.tokenizer is None:
        rng = np.random.default_rng(0)
        return [rng.integers(0, model.target.vocab_size, length).tolist() for length in lengths]
    ids = itertools.chain.from_iterable(model.tokenizer.encode(text) for text in heldout_prompts())
    return [list(itertools.islice(ids, length)) for length in lengths]


def reshaped(drafter: Drafter, depth: int, width: int = 1, num_nodes: int | None = None) -> Drafter | None:
    """The drafter in another shape; None if it does not support the shape."""
    names = {field.name for field in dataclasses.fields(drafter)}  # pyright: ignore[reportArgumentType]
    if "depth" not in names or (width > 1 and "width" not in names):
        return None
    shape = {"depth": depth, "width": width, "num_nodes": num_nodes}
    try:
        return dataclasses.replace(drafter, **{name: shape[name] for name in shape.keys() & names})  # pyright: ignore[reportArgumentType, reportCallIssue]
    except ValueError:
        return None
