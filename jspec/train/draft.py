"""The command that trains a draft of any kind: `jspec train eagle3`, `jspec train frozen-kv-mtp`."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jspec.analysis.evaluate import read_prompts
from jspec.engine.model import Model, load, locate
from jspec.models import Decoder
from jspec.text.tokenizer import Tokenizer
from jspec.train import batches, data, distill, draft_card, options
from jspec.train.learner import DraftRecipe, DraftSetup, DraftState, Learner
from jspec.train.model import count


@dataclasses.dataclass(frozen=True)
class DraftKind:
    """What one kind of draft adds to the command.

    name: of the command.
    noun: what such a draft is called.
    add_shape: adds the options that give the draft's shape.
    shape: the names of those options.
    make_learner: (the target's configuration, the options) -> the draft to train.
    save: (directory, learner, weights in float32, the target's name, options) writes the checkpoint.
    describe: (learner, number of weights, the target's name, options) -> the sentence of the card that describes it.
    """

    name: str
    noun: str
    add_shape: Callable[[argparse.ArgumentParser], None]
    shape: tuple[str, ...]
    make_learner: Callable[[Decoder, argparse.Namespace], Learner]
    save: Callable[[Path, Learner, PyTree, str, argparse.Namespace], None]
    describe: Callable[[Learner, int, str, argparse.Namespace], str]


def add_arguments(kind: DraftKind, parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    options.add(parser, DraftRecipe)
    parser.add_argument("--target", required=True, help="bundled:NAME, a Hugging Face directory or a hub id")
    parser.add_argument("--depth", type=int, default=5, help="drafts per round in evaluations (default: 5)")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts in each evaluation (default: 32)")
    kind.add_shape(parser)


def main(kind: DraftKind, args: argparse.Namespace) -> int:
    """Runs the command; returns its exit status.

    Raises:
      ValueError, OSError: bad input; the message names it.
    """
    model = _load_target(args)
    learner = kind.make_learner(model.target, args)
    setup, state = _train(learner, model, args)
    # The checkpoint, and the card beside it.
    name = data.public_name(args.target)
    kind.save(args.out, learner, state.serve(jnp.float32), name, args)
    card = draft_card.write(
        setup,
        state,
        args,
        command=kind.name,
        noun=kind.noun,
        architecture=kind.describe(learner, count(state.params), name, args),
        shape=draft_card.given(args, kind.shape),
        device=jax.devices()[0].device_kind,
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")
    return 0


def _load_target(args: argparse.Namespace) -> Model:
    """The model of --target.

    Raises:
      ValueError: its tokenizer is not that of --data.
    """
    model = load(args.target)
    ours, theirs = Tokenizer.load(args.data), Tokenizer.load(locate(args.target))
    if ours is None or theirs is None or ours.vocabulary() != theirs.vocabulary():
        raise ValueError(f"{args.data}: the tokenizer is not that of {args.target}; see jspec train data --tokenizer")
    return model


def _train(learner: Learner, model: Model, args: argparse.Namespace) -> tuple[DraftSetup, DraftState]:
    target = model.params.target
    setup = DraftSetup(learner, options.recipe(args, DraftRecipe), str(target.embed.dtype))
    vocab_size = setup.target.vocab_size
    prompts = read_prompts(args.data / "heldout_prompts.json")[: args.prompts]
    state = distill.train(
        setup,
        target,
        options.sources(args, vocab_size),
        batches.open_tokens(args.data / "heldout.npy", vocab_size=vocab_size),
        directory=args.work,
        measure_draft=lambda params: distill.accept_length(model, learner.config, params, prompts, depth=args.depth),
        resume=args.resume,
        intervals=options.intervals(args),
        stop_after=args.stop_after,
    )
    return setup, state
