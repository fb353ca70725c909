"""A run that trains a draft for a target, of whatever kind the draft is: to a directory, in memory, or as a command."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jspec.analysis.evaluate import evaluate, read_prompts
from jspec.core.types import Params
from jspec.drafters import DRAFTERS
from jspec.engine.model import Model, load, locate
from jspec.text.tokenizer import Tokenizer
from jspec.train import batches, learner, loop, options
from jspec.train.batches import Source
from jspec.train.learner import DraftRecipe, DraftSetup, DraftState, Learner
from jspec.train.loop import DEFAULT_INTERVALS, Intervals

_HELDOUT_TOKENS = 2**18

Judge = Callable[[Any], dict[str, Any]]
"""Figures of a draft, given its weights as they are served, to be logged beside those of the training-time test."""


def train(
    setup: DraftSetup,
    target: Any,
    sources: tuple[Source, ...],
    heldout: np.ndarray,
    *,
    directory: Path,
    judge: Judge | None = None,
    resume: bool = False,
    intervals: Intervals = DEFAULT_INTERVALS,
    stop_after: int | None = None,
) -> DraftState:
    """Trains to the recipe's last step, or to step `stop_after`, and leaves a checkpoint there.

    Args:
      target: the target's weights, in the setup's precision.
      sources: text to train on; best, what the target wrote itself.
      heldout: text to evaluate on, [tokens].
      directory: gets metrics.jsonl, recipe.json and the checkpoints.
      judge: more figures to log at each evaluation, given the draft as it is served; such as `accept_length`.
      resume: continue from the latest checkpoint in `directory`; the steps are those of an unbroken run.

    Raises:
      ValueError: a target, data and recipe that do not fit together, or a checkpoint of another recipe.
      FileNotFoundError: nothing to resume from.
      FileExistsError: checkpoints there, and `resume` not asked for.
    """
    check(setup, sources)
    ids = setup.learner.vocabulary(sources)

    def evaluate_state(state: DraftState) -> dict[str, Any]:
        served = state.serve(setup.dtype)
        found = agreement(Params(target, served), heldout, setup, state.ids)
        return found | ({} if judge is None else judge(served))

    return loop.run(
        directory,
        init=lambda: learner.init(setup, target, ids),
        advance=lambda state, step: _advance(setup, target, sources, state, step),
        evaluate=evaluate_state,
        steps=setup.recipe.steps,
        schedule=setup.recipe.schedule(),
        recipe=dataclasses.asdict(setup.recipe) | dataclasses.asdict(setup.learner.config),
        resume=resume,
        intervals=intervals,
        stop_after=stop_after,
    )


def train_in_memory(setup: DraftSetup, model: Model, rows: np.ndarray, *, progress: bool) -> Model:
    """The model with the trained draft in place of its own.

    Args:
      rows: Int[rows, T] text to train on.
      progress: shows a bar with the loss.

    Raises:
      ValueError: a target, rows and recipe that do not fit together.
    """
    sources, target = (Source(np.asarray(rows)),), model.params.target
    check(setup, sources)
    state = learner.init(setup, target, setup.learner.vocabulary(sources))
    bar = tqdm(range(setup.recipe.steps), disable=not progress)
    for step in bar:
        state, loss, _ = _advance(setup, target, sources, state, step)
        if progress and step % 10 == 0:
            bar.set_postfix(loss=f"{float(loss):.3f}")
    return dataclasses.replace(model, params=Params(target, state.serve(setup.dtype)), draft=setup.learner.config)


def agreement(
    params: Params, heldout: np.ndarray, setup: DraftSetup, ids: Any = None
) -> dict[str, float | list[float]]:
    """How a draft does in the training-time test on held-out text, in windows of the recipe's length.

    Args:
      params: both models' weights, in the setup's precision.
      ids: the draft's vocabulary, Int[Vd]; None: all.

    Returns:
      heldout_loss, heldout_agreement: of each step, the loss in nats and the share of rows where the draft's choice is
        the target's.
      heldout_chain: tokens a round that a chain of `ttt_steps` drafts would give, bonus included, if the target's own
        text were the held-out one; and heldout_estimate, the same from the agreements a_k alone, as though the steps
        were independent: 1 + a_0 + a_0 a_1 + ...
    """
    recipe, sums, rows = setup.recipe, [], []
    size = min(recipe.length, len(heldout))
    for batch in batches.windows(heldout[:_HELDOUT_TOKENS], batch_tokens=recipe.batch_tokens, length=size - 1):
        tokens = jax.device_put(batch)
        found = learner.measure(params, ids, tokens, learner.text_mask(tokens), setup=setup)
        sums.append(jax.device_get(found))
        rows.append(len(batch))
    agreed, chained, counted = (
        np.sum([getattr(s, name) for s in sums], 0) for name in ("agreed", "chained", "counted")
    )
    share = agreed / np.maximum(counted, 1)
    return {
        "heldout_loss": np.average([s.loss for s in sums], axis=0, weights=rows).tolist(),
        "heldout_agreement": share.tolist(),
        "heldout_chain": 1 + float(np.sum(chained / np.maximum(counted, 1))),
        "heldout_estimate": 1 + float(np.cumprod(share).sum()),
    }


def accept_length(
    model: Model,
    config: Any,
    params: Any,
    prompts: Sequence[str],
    *,
    depth: int = 5,
    max_new_tokens: int = 128,
    batch: int = 32,
) -> dict[str, Any]:
    """Speculative decoding after each prompt, with chains of `depth` drafts: tokens a round, and how often each
    position of the draft stands.

    config, params: of the draft.
    """
    drafted = dataclasses.replace(model, params=Params(model.params.target, params), draft=config)
    drafter: Any = DRAFTERS[config.drafter]
    out = evaluate(drafted, prompts, drafter(depth=depth), max_new_tokens=max_new_tokens, batch=batch)
    return {
        "accept_length": out.accept_length,
        "acceptance_by_position": out.acceptance_by_position.tolist(),
        "repeated": out.repeated,
    }


def check(setup: DraftSetup, sources: tuple[Source, ...]) -> None:
    """Refuses what cannot be trained.

    Raises:
      ValueError: sequences longer than the target's context, or numbers that are out of range.
    """
    recipe, limit = setup.recipe, setup.target.max_length
    widths = [source.tokens.shape[1] for source in sources if source.tokens.ndim == 2]
    for name, length in [("length", recipe.length), *(("the rows' width", width) for width in widths)]:
        if not 2 < length <= limit:
            raise ValueError(f"{name}={length}: give 3 to {limit}, the target's context")
    if recipe.steps < 2:
        raise ValueError(f"steps={recipe.steps}: give at least 2")
    if recipe.ttt_steps < 1:
        raise ValueError(f"ttt_steps={recipe.ttt_steps}: give at least 1")


def _advance(setup: DraftSetup, target: Any, sources: tuple[Source, ...], state: DraftState, step: int):
    recipe = setup.recipe
    # One token less than a language model's batch, whose last column is predicted only.
    batch = batches.draw(
        sources, seed=recipe.seed, step=step, batch_tokens=recipe.batch_tokens, length=recipe.length - 1
    )
    tokens = jax.device_put(batch)
    return learner.train_step(state, target, tokens, learner.text_mask(tokens), setup=setup)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that the training of any draft has."""
    options.add(parser, DraftRecipe)
    parser.add_argument("--target", required=True, help="bundled:NAME, a Hugging Face directory or a hub id")
    parser.add_argument("--depth", type=int, default=5, help="drafts a round in evaluations (default: 5)")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts to decode in each (default: 32)")


def load_target(args: argparse.Namespace) -> Model:
    """The model of --target.

    Raises:
      ValueError: its tokenizer is not that of --data.
    """
    model = load(args.target)
    own, theirs = Tokenizer.load(args.data), Tokenizer.load(locate(args.target))
    if own is None or theirs is None or own.vocabulary() != theirs.vocabulary():
        raise ValueError(f"{args.data}: has another tokenizer than {args.target}; see jspec train data --tokenizer")
    return model


def run(draft: Learner, model: Model, args: argparse.Namespace) -> tuple[DraftSetup, DraftState]:
    """Trains as the options say."""
    target = model.params.target
    setup = DraftSetup(draft, options.recipe(args, DraftRecipe), str(target.embed.dtype))
    size = setup.target.vocab_size
    prompts = read_prompts(args.data / "heldout_prompts.json")[: args.prompts]
    state = train(
        setup,
        target,
        options.sources(args, size),
        batches.open_tokens(args.data / "heldout.npy", vocab_size=size),
        directory=args.work,
        judge=lambda params: accept_length(model, draft.config, params, prompts, depth=args.depth),
        resume=args.resume,
        intervals=options.intervals(args),
        stop_after=args.stop_after,
    )
    return setup, state
