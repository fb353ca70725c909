"""Runs a command that trains a draft of any kind: `jspec train eagle3`, `dspark`, `frozen-kv-mtp`."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jspec.checkpoints import atomic
from jspec.engine.hub import locate
from jspec.engine.model import load
from jspec.models import Decoder
from jspec.text.tokenizer import Tokenizer
from jspec.train import card, data, distill, draft_card, options
from jspec.train.arguments import DEFAULT_PROMPTS
from jspec.train.card import Inputs
from jspec.train.learner import DraftSetup, DraftState, Learner
from jspec.train.model import count
from jspec.train.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class DraftKind:
    """What one kind of draft adds to the command.

    name: of the command.
    noun: what such a draft is called.
    shape: the names of the options that give the draft's shape.
    recipe: the kind of recipe that it is trained by.
    make_learner: (the target's configuration, the options) -> the draft to train.
    save: (directory, learner, weights in float32, the target's name, options) writes the checkpoint.
    describe: (learner, number of weights, the target's name, options) -> the sentence of the card that describes it.
    """

    name: str
    noun: str
    shape: tuple[str, ...]
    recipe: type[Recipe]
    make_learner: Callable[[Decoder, argparse.Namespace], Learner]
    save: Callable[[Path, Learner, PyTree, str, argparse.Namespace], None]
    describe: Callable[[Learner, int, str, argparse.Namespace], str]


def main(kind: DraftKind, args: argparse.Namespace) -> int:
    """Runs the command; returns its exit status.

    Raises:
      ValueError, OSError: bad input; the message names it.
    """
    directory = locate(args.target)
    options.check_run(args, {"--target": directory})
    # The data and the target.
    manifest = data.read_manifest(args.data)
    prompts = data.read_heldout_prompts(args.data, args.prompts, DEFAULT_PROMPTS)
    _check_tokenizer(args, directory)
    model = load(args.target)
    if manifest["kind"] == "chats":
        assert model.tokenizer is not None
        prompts = [model.tokenizer.encode(prompt, special=False) for prompt in prompts]
    learner = kind.make_learner(model.target, args)
    recipe, vocab_size = options.recipe(args, kind.recipe), model.target.vocab_size
    setup = DraftSetup(learner, recipe, str(model.params.target.embed.dtype))
    sources = options.sources(args, vocab_size)
    heldout, heldout_mask = options.heldout(args, vocab_size)
    inputs = card.inputs(manifest, sources, args, len(prompts))
    # A card is tried now, so that a run that cannot have one does not begin.
    target = model.params.target
    distill.check(setup, sources, heldout)
    distill.check_evaluation(model, learner.config, prompts, args.depth)
    weights = count(jax.eval_shape(lambda: distill.init(setup, target, sources).params))
    _card(kind, args, setup, inputs, draft_card.EXAMPLE, recipe.steps, weights)

    def measure(params: PyTree) -> distill.Metrics:
        return distill.accept_length(model, learner.config, params, prompts, depth=args.depth)

    state = distill.train(
        setup,
        target,
        sources,
        heldout,
        directory=args.work,
        measure_draft=measure,
        resume=args.resume,
        intervals=options.intervals(args),
        stop_after=args.stop_after,
        heldout_mask=heldout_mask,
    )
    final = card.final_metrics(args.work, "heldout_agreement")
    _export(kind, args, learner, state, _card(kind, args, setup, inputs, final, int(state.step), weights))
    return 0


def _check_tokenizer(args: argparse.Namespace, directory: Path) -> None:
    """Raises if the tokenizer of --data is not that of --target."""
    path = args.data / "tokenizer.json"
    of_data, of_target = Tokenizer.load(args.data), Tokenizer.load(directory)
    if of_data is None or of_target is None or of_data.vocabulary() != of_target.vocabulary():
        raise ValueError(f"{path}: the tokenizer is not that of {args.target}; see jspec train data --tokenizer")


def _card(
    kind: DraftKind,
    args: argparse.Namespace,
    setup: DraftSetup,
    inputs: Inputs,
    final: card.FinalMetrics,
    steps: int,
    weights: int,
) -> str:
    return draft_card.write(
        setup,
        inputs,
        final,
        args,
        steps=steps,
        command=kind.name,
        noun=kind.noun,
        architecture=kind.describe(setup.learner, weights, data.public_name(args.target), args),
        shape=draft_card.given(args, kind.shape),
    )


def _export(kind: DraftKind, args: argparse.Namespace, learner: Learner, state: DraftState, text: str) -> None:
    """Writes the draft's checkpoint with `text` as its card."""
    with atomic.staged(args.out, key="config.json", replaced=atomic.WEIGHTS) as stage:
        kind.save(stage, learner, state.serve(jnp.float32), data.public_name(args.target), args)
        (stage / "README.md").write_text(text, encoding="utf-8")
