"""Trains a draft of any kind for a target, with checkpoints in a directory or in memory."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float, Int, PyTree
from tqdm import tqdm

from jspec.analysis.evaluate import evaluate
from jspec.core.checks import check_flag
from jspec.core.types import Params
from jspec.drafters import DRAFTERS
from jspec.engine.model import Model, refuse_split
from jspec.engine.run import Prompt
from jspec.models import Assistant, BlockHead, EagleHead
from jspec.train import batches, fingerprint, learner, loop, trainer
from jspec.train.batches import Source
from jspec.train.learner import DraftSetup, DraftState, Learner
from jspec.train.recipe import DEFAULT_INTERVALS, Intervals
from jspec.train.run_directory import Metrics, Record

NEW_TOKENS = 128
"""Tokens that are decoded after each held-out prompt."""

_MAX_HELDOUT_TOKENS = 2**18


def train(
    setup: DraftSetup,
    target: PyTree,
    sources: tuple[Source, ...],
    heldout: np.ndarray,
    *,
    directory: Path,
    measure_draft: Callable[[PyTree], Metrics] | None = None,
    resume: bool = False,
    intervals: Intervals = DEFAULT_INTERVALS,
    stop_after: int | None = None,
    heldout_mask: np.ndarray | None = None,
) -> DraftState:
    """Trains to the recipe's last step, or to step `stop_after`, and writes a checkpoint there.

    Args:
      target: the target's weights, in the setup's precision.
      sources: text to train on; best, text that the target wrote itself.
      heldout: text to evaluate on, [tokens], or whole sequences, [sequences, T].
      directory: for metrics and checkpoints, see `run_directory`.
      measure_draft: from the draft's weights as they are served, more metrics to log at each evaluation, such as
        `accept_length`.
      resume: continue from the newest checkpoint in `directory` that is whole; the result equals that of an
        uninterrupted run.
      heldout_mask: [sequences, T], as `Source.mask`.

    Raises:
      ValueError: a target, data and recipe that do not fit together, or a checkpoint of another recipe or other data.
      FileNotFoundError: no checkpoint to resume from.
      FileExistsError: `directory` has checkpoints and `resume` is False.
      OSError: metrics or a checkpoint cannot be written.
    """
    heldout = batches.check_tokens("heldout", heldout)
    if heldout_mask is not None:
        heldout_mask = batches.check_mask("heldout_mask", heldout_mask, heldout)
    check(setup, sources, heldout)
    ids = setup.learner.vocabulary(sources)

    def evaluate_state(state: DraftState) -> Metrics:
        served = state.serve(setup.dtype)
        found = agreement(Params(target, served), heldout, setup, state.ids, mask=heldout_mask)
        return found | ({} if measure_draft is None else measure_draft(served))

    return loop.run(
        directory,
        init=lambda: learner.init(setup, target, ids),
        advance=lambda state, step: _advance(setup, target, sources, state, step),
        evaluate=evaluate_state,
        steps=setup.recipe.steps,
        schedule=trainer.schedule(setup.recipe),
        record=_record(setup, target, sources, heldout, heldout_mask),
        resume=resume,
        intervals=intervals,
        stop_after=stop_after,
    )


def init(setup: DraftSetup, target: PyTree, sources: tuple[Source, ...]) -> DraftState:
    """The state before the first step, for the vocabulary that the draft has of these sources."""
    return learner.init(setup, target, setup.learner.vocabulary(sources))


def _record(
    setup: DraftSetup, target: PyTree, sources: tuple[Source, ...], heldout: np.ndarray, mask: np.ndarray | None
) -> Record:
    """Everything that determines a run."""
    return {
        **dataclasses.asdict(setup.recipe),
        **dataclasses.asdict(setup.learner.config),
        "dtype": setup.dtype,
        "draft": type(setup.learner.config).__name__,
        "target": fingerprint.of_model(setup.target, target),
        **fingerprint.of_sources(sources),
        "heldout": fingerprint.of_array(heldout),
        **({} if mask is None else {"heldout_mask": fingerprint.of_array(mask)}),
    }


def require_model(model: Model) -> None:
    """Checks that a target was loaded or made as a `Model`.

    Raises:
      TypeError: it was not.
      ValueError: it is split over devices.
    """
    if not isinstance(model, Model):
        raise TypeError(f"model is of type {type(model).__name__}: must be a jspec.Model, as jspec.load returns it")
    refuse_split(model, "training")


def train_in_memory(
    draft: Learner,
    model: Model,
    sequences: np.ndarray,
    *,
    steps: int,
    batch_tokens: int,
    progress: bool,
    mask: np.ndarray | None = None,
    **recipe_options: float,
) -> Model:
    """The model with the trained draft instead of its own.

    Args:
      sequences: Int[sequences, T] text to train on.
      steps, batch_tokens, recipe_options: fields of the draft's kind of recipe.
      progress: show a bar with the loss.
      mask: [sequences, T]: 1 for tokens that count for the loss; None: all count.

    Raises:
      TypeError: an argument of another type, or a field that the recipe does not have.
      ValueError: a target, text and recipe that do not fit together.
    """
    check_flag("progress", progress)
    names = {field.name for field in dataclasses.fields(draft.recipe_kind)} - {"steps", "batch_tokens", "length"}
    for name, value in recipe_options.items():
        if name not in names:
            raise TypeError(f"{name}={value!r}: no such argument; recipe options are {', '.join(sorted(names))}")
    sequences = batches.check_tokens("sequences", sequences, axes=(2,))
    # Widths that no recipe has are refused by `check`, as the widths of sequences.
    length = max(3, sequences.shape[1])
    recipe = draft.recipe_kind(steps=steps, batch_tokens=batch_tokens, length=length, **recipe_options)  # pyright: ignore[reportArgumentType]
    sources, target = (Source(sequences, name="sequences", mask=mask),), model.params.target
    setup = DraftSetup(draft, recipe, str(target.embed.dtype))
    check(setup, sources)
    state = init(setup, target, sources)
    bar = tqdm(range(steps), disable=not progress)
    for step in bar:
        state, loss, _ = _advance(setup, target, sources, state, step)
        if progress and step % 10 == 0:
            bar.set_postfix(loss=f"{float(loss):.3f}")
        if step == steps - 1 and not np.isfinite(loss):
            raise ValueError(f"loss={float(loss)} after {steps} steps: it diverged; try a lower learning_rate")
    return dataclasses.replace(model, params=Params(target, state.serve(setup.dtype)), draft=draft.config)


def agreement(
    params: Params,
    heldout: np.ndarray,
    setup: DraftSetup,
    ids: Int[Array, " Vd"] | None = None,
    *,
    mask: np.ndarray | None = None,
) -> Metrics:
    """Metrics of a draft on held-out text, in windows of the recipe's length.

    They are those of each step of the training-time test, or of each prediction of a block.

    Args:
      params: both models' weights, in the setup's precision.
      heldout: [tokens], or whole sequences, [sequences, T].
      ids: the draft's vocabulary; None: all.
      mask: [sequences, T], the tokens that count; None: all.

    Returns:
      heldout_loss, heldout_agreement: for each step, the loss in nats and the share of rows where draft and target
        choose the same token.
      heldout_chain: tokens per round of a chain of as many drafts as there are steps, bonus included, if the target
        wrote the held-out text; heldout_estimate: the same from the agreements a_k alone, as if the steps were
        independent: 1 + a_0 + a_0 a_1 + ...
    """
    # Sums over all windows.
    recipe, sums, sizes = setup.recipe, [], []
    size = min(recipe.length, len(heldout))
    kept = heldout[: max(1, _MAX_HELDOUT_TOKENS // int(np.prod(heldout.shape[1:], dtype=np.int64)))]
    for batch, counts in batches.heldout_batches(kept, mask, batch_tokens=recipe.batch_tokens, length=size - 1):
        found = learner.measure(params, ids, *_with_row_mask(setup, batch, counts), setup=setup)
        sums.append(jax.device_get(found))
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
    config: EagleHead | BlockHead | Assistant,
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


def check_evaluation(
    model: Model, config: EagleHead | BlockHead | Assistant, prompts: Sequence[Prompt], depth: int
) -> None:
    """Checks that `accept_length` can decode after all prompts.

    Raises:
      ValueError: a depth that the drafter or the draft does not have, or a prompt that is empty or too long for the
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


def check(setup: DraftSetup, sources: tuple[Source, ...], heldout: np.ndarray | None = None) -> None:
    """Checks that target, data and recipe fit together, so that no run ends in the middle.

    Raises:
      ValueError: sequences longer than the target's context, short texts, or ids outside of the vocabulary.
    """
    recipe, limit = setup.recipe, setup.target.max_length
    texts = [(source.name or "sources", source.tokens) for source in sources]
    texts += [] if heldout is None else [("the held-out sequences", heldout)]
    lengths = [(f"length of {name}", tokens.shape[1]) for name, tokens in texts if tokens.ndim == 2]
    if any(tokens.ndim == 1 for _, tokens in texts):
        lengths.append(("length", recipe.length))
    for name, length in lengths:
        if not 2 < length <= limit:
            raise ValueError(f"{name}={length}: must be between 3 and {limit}, the target's context")
    vocab_size = setup.target.vocab_size
    batches.check_sources(sources, length=recipe.length - 1, context=limit, vocab_size=vocab_size)
    batches.check_memory(recipe.batch_tokens, vocab_size)
    if heldout is not None:
        if heldout.ndim == 1 and len(heldout) < 3:
            raise ValueError(f"the held-out text has {len(heldout)} tokens: at least 3 are needed")
        batches.check_ids("heldout", heldout, vocab_size)


def _advance(setup: DraftSetup, target: PyTree, sources: tuple[Source, ...], state: DraftState, step: int):
    recipe = setup.recipe
    # One token fewer than a language model's batch, whose last column is only predicted.
    batch, mask = batches.sample_masked(
        sources, seed=recipe.seed, step=step, batch_tokens=recipe.batch_tokens, length=recipe.length - 1
    )
    return trainer.train_step(state, target, _with_row_mask(setup, batch, mask), setup=setup)


def _with_row_mask(
    setup: DraftSetup, batch: np.ndarray, mask: np.ndarray | None
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """The tokens of a batch, and the mask of its rows."""
    tokens = jax.device_put(batch)
    return tokens, setup.learner.count_rows(tokens, mask)
