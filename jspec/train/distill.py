"""Distills a draft of any kind from its target: the task, and what is measured."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Int, PyTree

from jspec.analysis.evaluate import evaluate
from jspec.core.types import Params
from jspec.drafters import DRAFTERS
from jspec.generation.run import Prompt
from jspec.loading.fingerprint import of_model
from jspec.loading.model import Model
from jspec.models import Assistant, BlockHead, EagleHead
from jspec.train import batches, trainer
from jspec.train.batches import Source
from jspec.train.learner import Batch, DraftState, Learner, StepMetrics
from jspec.train.recipe import Intervals, Recipe
from jspec.train.run_directory import Metrics, Record

DraftConfig: TypeAlias = EagleHead | BlockHead | Assistant

NEW_TOKENS = 128
"""Tokens to decode after each held-out prompt."""
_MAX_HELDOUT_TOKENS = 2**18
_TRIAL_STEPS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Distillation:
    """The training of a draft, a `trainer.Task`.

    target: the target's weights, in the learner's precision.
    sources: text to train on; best, text by the target itself.
    heldout: text to evaluate on; None: a training without evaluations.
    measure_draft: from a draft's weights as they are served to more metrics of an evaluation, such as `accept_length`.
    """

    learner: Learner
    target: PyTree
    sources: tuple[Source, ...]
    heldout: Source | None = None
    measure_draft: Callable[[PyTree], Metrics] = lambda _: {}

    def __post_init__(self):
        limit, vocab_size = self.learner.target.max_length, self.learner.target.vocab_size
        texts = [(source.name or "sources", source.tokens) for source in self.sources]
        texts += [] if self.heldout is None else [("the held-out sequences", self.heldout.tokens)]
        for name, tokens in texts:
            cut = tokens.ndim == 1
            shown, length = ("length", self.recipe.length) if cut else (f"length of {name}", tokens.shape[1])
            if not 2 < length <= limit:
                raise ValueError(f"{shown}={length}: must be between 3 and {limit}, the target's context")
        batches.check_sources(self.sources, length=self.recipe.length - 1, vocab_size=vocab_size)
        if self.heldout is not None:
            if self.heldout.tokens.ndim == 1 and len(self.heldout.tokens) < 3:
                raise ValueError(f"the held-out text has {len(self.heldout.tokens)} tokens: at least 3 are needed")
            batches.check_ids("heldout", self.heldout.tokens, vocab_size)

    @property
    def recipe(self) -> Recipe:
        """The hyperparameters."""
        return self.learner.recipe

    @functools.cached_property
    def ids(self) -> np.ndarray | None:
        """The draft's vocabulary, Int32[Vd]; None: all."""
        return self.learner.vocabulary(self.sources)

    @property
    def record(self) -> Record:
        """Everything that determines the run."""
        learner = self.learner
        return {
            **dataclasses.asdict(learner.recipe),
            **dataclasses.asdict(learner.config),
            "dtype": learner.dtype,
            "draft": type(learner.config).__name__,
            "target": of_model(learner.target, self.target),
            **batches.fingerprints(self.sources, self.heldout),
        }

    def init(self) -> DraftState:
        """The state before the first step, from the recipe's seed."""
        return init(self.learner, self.target, self.ids)

    def advance(self, state: DraftState, step: int) -> tuple[DraftState, Array, Array]:
        """The next state, the loss, and the norm of the gradient; see `trainer.train_step`."""
        # One token fewer than a language model's batch, whose last column is only predicted.
        recipe, length = self.recipe, self.recipe.length - 1
        batch, mask = batches.sample(
            self.sources, seed=recipe.seed, step=step, batch_tokens=recipe.batch_tokens, length=length
        )
        return trainer.train_step(state, self.target, make_batch(self.learner, batch, mask), step, setup=self.learner)

    def evaluate(self, state: DraftState) -> Metrics:
        """Metrics on the held-out text, and those of `measure_draft`."""
        assert self.heldout is not None
        served = state.serve(self.learner.dtype)
        metrics = agreement(Params(self.target, served), self.heldout, self.learner, state.ids)
        return metrics | self.measure_draft(served)

    def fit_steps(self, intervals: Intervals, ends: float) -> int:
        """How many steps, with evaluations, fit into a time, at most those of the recipe.

        A trial of a few steps and of two evaluations measures it and compiles the programs of the run.

        ends: in seconds of `time.monotonic`.
        """

        def timed(call: Callable[[], Any]) -> float:
            began = time.monotonic()
            jax.block_until_ready(call())
            return time.monotonic() - began

        state = self.init()

        def step(index: int) -> Array:
            nonlocal state
            state, loss, _ = self.advance(state, index)
            return loss

        # Both compile in the first call; a median leaves it out.
        steps = [timed(partial(step, index)) for index in range(_TRIAL_STEPS)]
        evaluations = [timed(lambda: self.evaluate(state)) for _ in range(2)]
        # The last evaluation is that of the last step.
        left = ends - time.monotonic() - evaluations[1]
        fitting = int(left / (float(np.median(steps)) + evaluations[1] / intervals.eval_every))
        return max(2, min(fitting, self.recipe.steps))


def init(learner: Learner, target: PyTree, ids: np.ndarray | None) -> DraftState:
    """The state before the first step, from the recipe's seed. It shares no memory with the target's weights.

    ids: the draft's vocabulary, Int[Vd]; None: all.
    """
    return _init(target, None if ids is None else np.asarray(ids, np.int32), learner=trainer.timeless(learner))


@partial(jax.jit, static_argnames=("learner",))
def _init(target: PyTree, ids: Int[Array, " Vd"] | None, *, learner: Learner) -> DraftState:
    params = learner.init(target, ids, jax.random.key(learner.recipe.seed))
    return trainer.begin(DraftState, learner, params, ids=ids)


@partial(jax.jit, static_argnames=("learner",))
def measure(params: Params, ids: Int[Array, " Vd"] | None, batch: Batch, *, learner: Learner) -> StepMetrics:
    """The metrics of a batch. Both models' weights are in the learner's precision."""
    return learner.learn_batch(params, batch, ids, 0)[2]


def make_batch(learner: Learner, texts: np.ndarray, mask: np.ndarray | None) -> Batch:
    """A batch on the device. mask: 1 for the tokens of the loss; None: all count."""
    tokens = jax.device_put(texts)
    return tokens, learner.count_rows(tokens, mask), jax.device_put(np.arange(len(texts), dtype=np.int32))


def agreement(params: Params, heldout: Source, learner: Learner, ids: Int[Array, " Vd"] | None = None) -> Metrics:
    """Metrics of a draft on held-out text, in windows of the recipe's length.

    They are those of each step of the training-time test, or of each prediction of a block.

    Args:
      params: both models' weights, in the learner's precision.
      heldout: a text, or whole sequences.
      ids: the draft's vocabulary; None: all.

    Returns:
      heldout_loss, heldout_agreement: for each step, the loss in nats and the share of rows where draft and target
        choose the same token.
      heldout_chain: tokens per round of a chain of as many drafts as there are steps, bonus included, if the target
        wrote the held-out text; heldout_estimate: the same from the agreements a_k alone, as if the steps were
        independent: 1 + a_0 + a_0 a_1 + ...
    """
    # Sums over all windows.
    recipe, tokens, sums, sizes = learner.recipe, heldout.tokens, [], []
    length = min(recipe.length, len(tokens)) - 1
    tokens = tokens[: max(1, _MAX_HELDOUT_TOKENS // int(np.prod(tokens.shape[1:], dtype=np.int64)))]
    size = recipe.batch_tokens if learner.chunk_tokens is None else learner.chunk_tokens
    for batch, mask in batches.heldout_batches(tokens, heldout.mask, batch_tokens=size, length=length):
        metrics = measure(params, ids, make_batch(learner, batch, mask), learner=trainer.timeless(learner))
        sums.append(jax.device_get(metrics))
        sizes.append(batch.size)
    # Averages: steps differ in how many rows count, and the last batch is smaller.
    agreed, chained, counted = (
        np.sum([getattr(s, name) for s in sums], 0) for name in ("agreed", "chained", "counted")
    )
    share = agreed / np.maximum(counted, 1)
    return {
        "heldout_loss": (np.dot(sizes, [s.loss for s in sums]) / np.maximum(counted, 1)).tolist(),
        "heldout_agreement": share.tolist(),
        "heldout_chain": 1 + float(np.sum(chained / np.maximum(counted, 1))),
        "heldout_estimate": 1 + float(np.cumprod(share).sum()),
    }


def accept_length(
    model: Model,
    config: DraftConfig,
    params: PyTree,
    prompts: Sequence[Prompt],
    *,
    depth: int = 5,
    max_new_tokens: int = NEW_TOKENS,
    batch: int = 32,
) -> Metrics:
    """Tokens per round and acceptance by draft position, of decoding after each prompt with chains of `depth` drafts.

    config, params: of the draft.
    """
    drafted = dataclasses.replace(model, params=Params(model.params.target, params), draft=config)
    chain = DRAFTERS[config.drafter](depth=depth)
    out = evaluate(drafted, prompts, chain, max_new_tokens=max_new_tokens, batch=batch)
    return {
        "accept_length": out.accept_length,
        "acceptance_by_position": out.acceptance_by_position.tolist(),
        "repeated": out.repeated,
    }


def check_evaluation(model: Model, config: DraftConfig, prompts: Sequence[Prompt], depth: int) -> None:
    """Checks that `accept_length` can decode after all prompts."""
    DRAFTERS[config.drafter](depth=depth).bind(model.target, config)
    assert model.tokenizer is not None
    most = model.target.max_length - NEW_TOKENS
    for index, prompt in enumerate(prompts):
        size = len(model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if not 0 < size <= most:
            raise ValueError(
                f"held-out prompt {index} has {size} tokens: must be from 1 to {most}, so that {NEW_TOKENS} new ones "
                f"fit into the target's context of {model.target.max_length}"
            )
