"""Distills a draft of any kind from its target: the state, the training step, the run, and what is measured.

Each kind of draft is a `Learner`; most learn in the training-time test (`ttt`).
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jspec.analysis.evaluate import evaluate
from jspec.core.types import ForwardOutput, Params
from jspec.drafters import DRAFTERS
from jspec.generation.run import Prompt
from jspec.loading.model import Model
from jspec.models import Assistant, BlockHead, EagleHead
from jspec.models.decoder import Decoder
from jspec.train import batches, fingerprint, model, trainer
from jspec.train.batches import Source
from jspec.train.learner import Learner, StepMetrics, Texts
from jspec.train.recipe import Intervals, Recipe
from jspec.train.run_directory import Metrics, Record
from jspec.train.trainer import RunOptions, State

P = TypeVar("P")
DraftConfig: TypeAlias = EagleHead | BlockHead | Assistant

MeasureDraft: TypeAlias = Callable[[PyTree], Metrics]
"""From a draft's weights as they are served to more metrics of an evaluation, such as `accept_length`."""
Batch: TypeAlias = tuple[Int[Array, "B T"], Float[Array, "B T"], Int[Array, " B"]]
"""Tokens, the result of `Learner.count_rows`, and the index of each sequence in the batch."""

NEW_TOKENS = 128
"""Tokens to decode after each held-out prompt."""
_MAX_HELDOUT_TOKENS = 2**18
_TRIAL_STEPS = 16


class DraftState(State):
    """The state of a draft; `params` are float32 and do not contain the integers `ids`."""

    ids: Int[Array, " Vd"] | None
    """The draft's vocabulary, as target ids; None: all."""

    def serve(self, dtype: DTypeLike) -> PyTree:
        """The draft's weights for serving, in `dtype`: a copy, to outlive the donation of the state."""
        params, ids = _copied((self.params, self.ids), dtype=dtype)
        return params if ids is None else dataclasses.replace(params, ids=ids)


@partial(jax.jit, static_argnames=("dtype",))
def _copied(weights: P, *, dtype: DTypeLike) -> P:
    def copy(leaf):
        return jnp.copy(leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf)

    return jax.tree.map(copy, weights)


@dataclasses.dataclass(frozen=True)
class DraftSetup:
    """Everything static in a training step of a draft, as `trainer.Setup`."""

    learner: Learner
    recipe: Recipe
    dtype: str
    """Precision of the forward and backward pass; the draft's weights themselves are float32."""
    chunk_tokens: int | None = None
    """As `trainer.Setup.chunk_tokens`."""

    @property
    def target(self) -> Decoder:
        """The target's configuration."""
        return self.learner.target

    @property
    def apply(self) -> Callable[..., PyTree]:
        """`Learner.forward`."""
        return self.learner.forward

    def loss(self, state: DraftState, frozen: PyTree, batch: Batch) -> tuple[Float[Array, ""], Float[ArrayLike, ""]]:
        """The mean loss in nats, and its weight, see `Learner.learn`.

        frozen: the target's weights, in the setup's precision.
        """
        params = Params(frozen, jax.tree.map(lambda leaf: leaf.astype(self.dtype), state.params))
        texts, out = _texts(self, batch, state.ids, state.step), run_target(self, frozen, batch[0])
        return self.learner.learn(params, texts, out, self.recipe)[:2]


def set_up(learner: Learner, recipe: Recipe, dtype: str) -> DraftSetup:
    """A setup whose chunks fit into the free memory, see `batches.fit_chunk`.

    Raises:
      ValueError: one sequence does not fit.
    """
    target = learner.target
    scores = recipe.length * target.num_heads
    # Arrays of float32: logits of the target, those of the draft with their gradients, and scores of attention.
    size = 4 * round(3 * target.vocab_size + 8 * learner.logits_per_token(recipe) + 3 * scores)
    return DraftSetup(learner, recipe, dtype, batches.fit_chunk(recipe.batch_tokens, recipe.length, size))


def _texts(setup: DraftSetup, batch: Batch, ids: Int[Array, " Vd"] | None, step: Int[ArrayLike, ""]) -> Texts:
    """The texts of a batch. The key of each follows from its step and its index, wherever chunks begin."""
    tokens, mask, index = batch
    key = jax.random.fold_in(jax.random.key(setup.recipe.seed), step)
    return Texts(tokens, mask, ids, jax.vmap(jax.random.fold_in, (None, 0))(key, index))


def init(setup: DraftSetup, target: PyTree, ids: np.ndarray | None) -> DraftState:
    """The state before the first step, from the recipe's seed. It shares no memory with the target's weights.

    ids: the draft's vocabulary, Int[Vd]; None: all.
    """
    return _init(target, None if ids is None else np.asarray(ids, np.int32), setup=trainer.timeless(setup))


@partial(jax.jit, static_argnames=("setup",))
def _init(target: PyTree, ids: Int[Array, " Vd"] | None, *, setup: DraftSetup) -> DraftState:
    params = setup.learner.init(target, ids, jax.random.key(setup.recipe.seed))
    return trainer.begin(DraftState, setup, params, ids=ids)


@partial(jax.jit, static_argnames=("setup",))
def measure(
    params: Params,
    ids: Int[Array, " Vd"] | None,
    batch: Batch,
    *,
    setup: DraftSetup,
) -> StepMetrics:
    """The metrics of a batch. Both models' weights are in the setup's precision."""
    out = run_target(setup, params.target, batch[0])
    return setup.learner.learn(params, _texts(setup, batch, ids, 0), out, setup.recipe)[2]


def run_target(setup: DraftSetup, target: PyTree, tokens: Int[Array, "B T"]) -> ForwardOutput:
    """The target's forward over a text, with the captured hidden states."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    attention = model.causal_attention(setup.target, setup.dtype)
    return setup.target.apply(target, tokens, positions, attention, None, capture_layers=setup.learner.capture_layers)


def train(
    setup: DraftSetup,
    target: PyTree,
    sources: tuple[Source, ...],
    heldout: Source,
    *,
    measure_draft: MeasureDraft | None = None,
    **run_options: Unpack[RunOptions],
) -> DraftState:
    """Trains to the recipe's last step, or to step `stop_after`, and writes a checkpoint there.

    Args:
      target: the target's weights, in the setup's precision.
      sources: text to train on; best, text by the target itself.
      heldout: text to evaluate on.
      measure_draft: measures more at each evaluation.
      run_options: see `trainer.RunOptions`.

    Raises:
      ValueError: a target, data and recipe that do not fit together; also as `trainer.run`.
    """
    check(setup, sources, heldout)
    ids = setup.learner.vocabulary(sources)
    task = trainer.Task(
        init=lambda: init(setup, target, ids),
        advance=lambda state, step: advance(setup, target, sources, state, step),
        evaluate=lambda state: _evaluate(setup, target, heldout, measure_draft, state),
        recipe=setup.recipe,
        record=_record(setup, target, sources, heldout),
    )
    return trainer.run(task, **run_options)


def _evaluate(
    setup: DraftSetup, target: PyTree, heldout: Source, measure_draft: MeasureDraft | None, state: DraftState
) -> Metrics:
    served = state.serve(setup.dtype)
    metrics = agreement(Params(target, served), heldout, setup, state.ids)
    return metrics | ({} if measure_draft is None else measure_draft(served))


def fit_steps(
    setup: DraftSetup,
    target: PyTree,
    sources: tuple[Source, ...],
    heldout: Source,
    measure_draft: MeasureDraft,
    intervals: Intervals,
    ends: float,
) -> int:
    """How many steps of a run, with its evaluations, fit into a time, at most those of the recipe.

    A trial of a few steps and of two evaluations measures it and compiles the programs of the run.

    Args:
      measure_draft: as in `train`.
      ends: in seconds of `time.monotonic`.
    """

    def timed(call: Callable[[], Any]) -> float:
        began = time.monotonic()
        jax.block_until_ready(call())
        return time.monotonic() - began

    state = init(setup, target, setup.learner.vocabulary(sources))

    def step(index: int) -> Array:
        nonlocal state
        state, loss, _ = advance(setup, target, sources, state, index)
        return loss

    steps = [timed(partial(step, index)) for index in range(_TRIAL_STEPS)]
    evaluations = [timed(lambda: _evaluate(setup, target, heldout, measure_draft, state)) for _ in range(2)]
    # The last evaluation is that of the last step.
    left = ends - time.monotonic() - evaluations[1]
    fitting = int(left / (float(np.median(steps)) + evaluations[1] / intervals.evaluate))
    return max(2, min(fitting, setup.recipe.steps))


def _record(setup: DraftSetup, target: PyTree, sources: tuple[Source, ...], heldout: Source) -> Record:
    """Everything that determines a run."""
    return {
        **dataclasses.asdict(setup.recipe),
        **dataclasses.asdict(setup.learner.config),
        "dtype": setup.dtype,
        "draft": type(setup.learner.config).__name__,
        "target": fingerprint.of_model(setup.target, target),
        **fingerprint.of_sources(sources),
        **fingerprint.of_heldout(heldout),
    }


def advance(setup: DraftSetup, target: PyTree, sources: tuple[Source, ...], state: DraftState, step: int):
    """The next state, the loss, and the norm of the gradient; see `trainer.train_step`."""
    recipe = setup.recipe
    # One token fewer than a language model's batch, whose last column is only predicted.
    batch, mask = batches.sample(
        sources, seed=recipe.seed, step=step, batch_tokens=recipe.batch_tokens, length=recipe.length - 1
    )
    return trainer.train_step(state, target, make_batch(setup, batch, mask), step, setup=setup)


def agreement(
    params: Params,
    heldout: Source,
    setup: DraftSetup,
    ids: Int[Array, " Vd"] | None = None,
) -> Metrics:
    """Metrics of a draft on held-out text, in windows of the recipe's length.

    They are those of each step of the training-time test, or of each prediction of a block.

    Args:
      params: both models' weights, in the setup's precision.
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
    recipe, tokens, sums, sizes = setup.recipe, heldout.tokens, [], []
    length = min(recipe.length, len(tokens)) - 1
    tokens = tokens[: max(1, _MAX_HELDOUT_TOKENS // int(np.prod(tokens.shape[1:], dtype=np.int64)))]
    size = recipe.batch_tokens if setup.chunk_tokens is None else setup.chunk_tokens
    for batch, mask in batches.heldout_batches(tokens, heldout.mask, batch_tokens=size, length=length):
        sums.append(jax.device_get(measure(params, ids, make_batch(setup, batch, mask), setup=trainer.timeless(setup))))
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
    """Checks that `accept_length` can decode after all prompts.

    Raises:
      ValueError: a depth beyond the drafter or the draft, or a prompt that is empty or too long for the
        target.
    """
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


def check(setup: DraftSetup, sources: tuple[Source, ...], heldout: Source | None = None) -> None:
    """Checks that target, data and recipe fit together, so that no run ends in the middle.

    Raises:
      ValueError: sequences longer than the target's context, short texts, or ids outside of the vocabulary.
    """
    recipe, limit = setup.recipe, setup.target.max_length
    texts = [(source.name or "sources", source.tokens) for source in sources]
    texts += [] if heldout is None else [("the held-out sequences", heldout.tokens)]
    lengths = [(f"length of {name}", tokens.shape[1]) for name, tokens in texts if tokens.ndim == 2]
    if any(tokens.ndim == 1 for _, tokens in texts):
        lengths.append(("length", recipe.length))
    for name, length in lengths:
        if not 2 < length <= limit:
            raise ValueError(f"{name}={length}: must be between 3 and {limit}, the target's context")
    vocab_size = setup.target.vocab_size
    batches.check_sources(sources, length=recipe.length - 1, context=limit, vocab_size=vocab_size)
    if heldout is not None:
        if heldout.tokens.ndim == 1 and len(heldout.tokens) < 3:
            raise ValueError(f"the held-out text has {len(heldout.tokens)} tokens: at least 3 are needed")
        batches.check_ids("heldout", heldout.tokens, vocab_size)


def make_batch(setup: DraftSetup, texts: np.ndarray, mask: np.ndarray | None) -> Batch:
    """A batch on the device. mask: 1 for the tokens of the loss; None: all count."""
    tokens = jax.device_put(texts)
    return tokens, setup.learner.count_rows(tokens, mask), jax.device_put(np.arange(len(texts), dtype=np.int32))
