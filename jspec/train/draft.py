"""Trains a draft of any kind, in memory or by a command of `jspec train`."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from tqdm import tqdm

from jspec.checkpoints import atomic, drafts
from jspec.checkpoints.files import read_json
from jspec.core.checks import check_flag
from jspec.core.options import options_of
from jspec.core.types import Params
from jspec.loading.hub import locate
from jspec.loading.model import Model, load, refuse_split
from jspec.text.tokenizer import Tokenizer
from jspec.train import batches, data, distill, trainer
from jspec.train.batches import Source
from jspec.train.card import EXAMPLE, DraftCard, Inputs, final_metrics
from jspec.train.distill import Distillation
from jspec.train.kinds import KINDS, Kind
from jspec.train.model import count
from jspec.train.options import DEFAULT_PROMPTS, DraftRun
from jspec.train.recipe import Recipe
from jspec.train.run_directory import Metrics


def train_draft(
    kind: str,
    model: Model,
    sequences: np.ndarray,
    *,
    steps: int,
    mask: np.ndarray | None = None,
    batch_tokens: int = 2048,
    progress: bool = True,
    **options: Any,
) -> Model:
    """Trains a draft in memory and returns the model with it as its draft, for `jspec.generate`.

    Args:
      kind: "eagle3" for an EAGLE-3 head, "dspark" for a block draft (DSpark or DFlash), or "frozen-kv-mtp" for an
        assistant.
      model: the target; the result is without its present draft.
      sequences: Int[sequences, T] text by the target itself, such as `jspec.train.text.complete` returns.
      steps: training steps, at least 2.
      mask: [sequences, T]: 1 for tokens of the loss, 0 for others and for padding; None: all count.
      batch_tokens: tokens per step.
      progress: show a bar with the loss.
      options: fields of the draft's shape and of its recipe, except for `length`, T here: those of `HeadShape` and
        `DraftRecipe`, `BlockShape` and `BlockRecipe`, or `AssistantShape` and `DraftRecipe`, in `jspec.train.recipe`.

    Raises:
      TypeError, ValueError: an argument of another type or out of bounds, or arguments at odds with each other.
    """
    # The arguments.
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(KINDS)}")
    if not isinstance(model, Model):
        raise TypeError(f"model is of type {type(model).__name__}: must be a jspec.Model, as jspec.load returns it")
    refuse_split(model, "training")
    check_flag("progress", progress)
    shape, hyperparameters = _split_options(KINDS[kind], options)
    sequences = batches.check_tokens("sequences", sequences, axes=(2,))
    # The task, which refuses a length below the least and names the sequences.
    recipe = KINDS[kind].recipe(
        steps=steps, batch_tokens=batch_tokens, length=max(3, sequences.shape[1]), **hyperparameters
    )
    target = model.params.target
    learner = KINDS[kind].load().make(model.target, KINDS[kind].shape(**shape), recipe, str(target.embed.dtype))
    task = Distillation(learner, target, (Source(sequences, name="sequences", mask=mask),))
    # The steps.
    state = task.init()
    bar = tqdm(range(steps), disable=not progress)
    for step in bar:
        state, loss, _ = task.advance(state, step)
        if progress and step % 10 == 0:
            bar.set_postfix(loss=f"{float(loss):.3f}")
        if step == steps - 1 and not np.isfinite(loss):
            raise ValueError(f"loss={float(loss)} after {steps} steps: it diverged; try a lower learning_rate")
    return dataclasses.replace(model, params=Params(target, state.serve(learner.dtype)), draft=learner.config)


def _split_options(kind: Kind, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the shape, and those of the recipe."""
    recipe = {*options_of(kind.recipe)} - {"steps", "batch_tokens", "length"}
    for name, value in options.items():
        if name not in recipe and name not in options_of(kind.shape):
            raise TypeError(
                f"{name}={value!r}: no such argument; recipe options are {', '.join(sorted(recipe))}; shape options "
                f"are {', '.join(options_of(kind.shape))}"
            )
    shape = {name: value for name, value in options.items() if name not in recipe}
    return shape, {name: value for name, value in options.items() if name in recipe}


def main(kind: Kind, run: DraftRun, recipe: Recipe, shape: Any, output: Any | None = None) -> int:
    """Runs a command; returns its exit status."""
    began, directory = time.monotonic(), locate(run.target)
    run.check(recipe.steps, target=directory)
    # The data and the target.
    manifest = data.read_manifest(run.data)
    prompts = data.read_heldout_prompts(run.data, run.prompts, DEFAULT_PROMPTS)
    _check_tokenizer(run, directory)
    model = load(run.target, exact=False)
    if manifest["kind"] == "chats":
        assert model.tokenizer is not None
        prompts = [model.tokenizer.encode(prompt, special=False) for prompt in prompts]
    target = model.params.target
    learner = kind.load().make(model.target, shape, recipe, str(target.embed.dtype))

    def measure(params: PyTree) -> Metrics:
        return distill.accept_length(model, learner.config, params, prompts, depth=run.depth)

    sources, heldout = run.sources(model.target.vocab_size), run.heldout(model.target.vocab_size)
    task = Distillation(learner, target, sources, heldout, measure)
    distill.check_evaluation(model, learner.config, prompts, run.depth)
    if run.minutes is not None:
        # A resumed run keeps its schedule.
        steps = read_json(run.work / "recipe.json")["steps"] if run.resume else None
        steps = int(steps or task.fit_steps(run, began + 60 * run.minutes))
        learner = dataclasses.replace(learner, recipe=dataclasses.replace(recipe, steps=steps))
        task = dataclasses.replace(task, learner=learner)
    # Try the layout and the card before the run, not after it.
    inputs, begun = Inputs.of(manifest, sources, run, len(prompts)), jax.eval_shape(task.init)
    if output is not None and hasattr(output, "layout"):
        output = dataclasses.replace(output, layout=drafts.choose_layout(learner.config, begun.params, output.layout))
    card = DraftCard(kind, learner, inputs, run, shape, output, count(begun.params))
    card.write(EXAMPLE, task.recipe.steps)
    # The run, and the checkpoint with its card.
    print(f"jspec: {task.recipe.steps:,} steps of {recipe.batch_tokens:,} tokens, {learner.chunk_tokens:,} at a time")
    state = trainer.run(task, run.work, resume=run.resume, intervals=run, stop_after=run.stop_after)
    text = card.write(final_metrics(run.work, "heldout_agreement"), int(state.step))
    with atomic.staged(run.out, key="config.json", replaced=atomic.WEIGHTS) as stage:
        stored = {} if output is None else {"layout": output.layout, "weights": "int8" if output.int8 else None}
        drafts.save(stage, learner.config, state.serve(jnp.float32), verifier=card.target, **stored)
        (stage / "README.md").write_text(text, encoding="utf-8")
    return 0


def _check_tokenizer(run: DraftRun, directory: Path) -> None:
    """Raises if the tokenizers of --data and --target differ."""
    path = run.data / "tokenizer.json"
    of_data, of_target = Tokenizer.load(run.data), Tokenizer.load(directory)
    if of_data is None or of_target is None or of_data.vocabulary() != of_target.vocabulary():
        raise ValueError(f"{path}: the tokenizer is not that of {run.target}; see jspec train data --tokenizer")
