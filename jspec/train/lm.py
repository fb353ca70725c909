"""`jspec train lm`: trains a language model from scratch, or as the draft of a teacher by distillation.

Writes an ordinary Hugging Face directory with a model card, metrics as JSON lines, and checkpoints to resume from.
"""

import argparse
import dataclasses
import math
from pathlib import Path

import jax
import numpy as np

from jspec.checkpoints import language_model, llama
from jspec.checkpoints.files import read_json
from jspec.models import LlamaParams
from jspec.models.llama import require_llama
from jspec.train import batches, card, loop, model, objective, options, tokenizer
from jspec.train.batches import Source
from jspec.train.loop import DEFAULT_INTERVALS, Intervals
from jspec.train.objective import Recipe, Setup, TrainState

MAX_SHARD_BYTES = 9_000_000
"""Weight files are cut so that they can live in a source repository."""


@dataclasses.dataclass(frozen=True)
class Heldout:
    """Text to evaluate on: its tokens, UInt[tokens], and the bytes that each id of the vocabulary stands for."""

    tokens: np.ndarray
    byte_counts: np.ndarray


def train(
    setup: Setup,
    sources: tuple[Source, ...],
    heldout: Heldout,
    *,
    teacher: LlamaParams | None = None,
    directory: Path,
    resume: bool = False,
    intervals: Intervals = DEFAULT_INTERVALS,
    stop_after: int | None = None,
) -> TrainState:
    """Trains to the recipe's last step, or to step `stop_after`, and leaves a checkpoint there.

    Args:
      directory: gets metrics.jsonl, recipe.json and the checkpoints.
      resume: continue from the latest checkpoint in `directory`; the steps are those of an unbroken run.

    Raises:
      ValueError: a model, data and recipe that do not fit together, or a checkpoint of another recipe.
      FileNotFoundError: nothing to resume from.
      FileExistsError: checkpoints there, and `resume` not asked for.
    """
    check(setup, heldout)
    recipe = setup.recipe

    def advance(state: TrainState, step: int):
        batch = batches.draw(
            sources, seed=recipe.seed, step=step, batch_tokens=recipe.batch_tokens, length=recipe.length
        )
        return objective.train_step(state, teacher, jax.device_put(batch), setup=setup)

    return loop.run(
        directory,
        init=lambda: objective.init(setup),
        advance=advance,
        evaluate=lambda state: evaluate(state.params, heldout, setup, teacher),
        steps=recipe.steps,
        schedule=recipe.schedule(),
        recipe=dataclasses.asdict(recipe),
        resume=resume,
        intervals=intervals,
        stop_after=stop_after,
    )


def evaluate(
    params: LlamaParams, heldout: Heldout, setup: Setup, teacher: LlamaParams | None = None
) -> dict[str, float]:
    """Bits per byte of the held-out text, in windows of the recipe's length; with a teacher, the distance to it too.

    `divergence` is in nats a token and `agreement` is the share of positions where both models choose one token.
    """
    nats = distance = agreed = tokens = size = 0.0
    recipe = setup.recipe
    for batch in batches.windows(heldout.tokens, batch_tokens=recipe.batch_tokens, length=recipe.length):
        sums = objective.measure(params, teacher, jax.device_put(batch), setup=setup)
        nats, distance, agreed = (float(new) + old for new, old in zip(sums, (nats, distance, agreed), strict=True))
        tokens += batch[:, 1:].size
        size += float(heldout.byte_counts[batch[:, 1:]].sum())
    result = {"heldout_bits_per_byte": nats / math.log(2) / size, "heldout_nats_per_token": nats / tokens}
    if teacher is not None:
        result |= {"heldout_divergence": distance / tokens, "heldout_agreement": agreed / tokens}
    return result


def check(setup: Setup, heldout: Heldout) -> None:
    """Refuses what cannot be trained.

    Raises:
      ValueError: sequences longer than the model's context, or vocabularies that differ.
    """
    config, teacher, recipe = setup.config, setup.teacher, setup.recipe
    for name, other in (("model", config), ("teacher", teacher)):
        if other is not None and recipe.length > other.max_length:
            raise ValueError(f"length={recipe.length}: the {name}'s context is {other.max_length} tokens")
    if teacher is not None and teacher.vocab_size != config.vocab_size:
        raise ValueError(
            f"the teacher's vocabulary has {teacher.vocab_size} tokens and the model's {config.vocab_size}: "
            "distillation needs one vocabulary"
        )
    if len(heldout.byte_counts) != config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(heldout.byte_counts)} tokens and the model vocab_size={config.vocab_size}"
        )
    if recipe.steps < 2:
        raise ValueError(f"steps={recipe.steps}: give at least 2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jspec train lm`."""
    options.add(parser, Recipe)
    parser.add_argument("--shape", choices=sorted(model.SHAPES), help="a shape by name")
    parser.add_argument("--config", type=Path, help="or a directory whose config.json describes the model")
    parser.add_argument("--teacher", type=Path, help="directory of a model to distil from (default: none)")


def main(args: argparse.Namespace) -> int:
    """Runs `jspec train lm`."""
    if (args.shape is None) == (args.config is None):
        raise ValueError("give --shape or --config, one of the two")
    recipe = options.recipe(args, Recipe)
    bpe = tokenizer.load(args.data)
    config = model.SHAPES[args.shape] if args.shape else llama.parse_config(read_json(args.config / "config.json"))
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    teacher = None if args.teacher is None else language_model.load(args.teacher, dtype=dtype)
    heldout = Heldout(
        batches.open_tokens(args.data / "heldout.npy", vocab_size=config.vocab_size), tokenizer.byte_counts(bpe)
    )
    shape = None if teacher is None else require_llama(teacher.config, "the teacher of jspec train lm")
    setup = Setup(config, recipe, shape, dtype)
    state = train(
        setup,
        options.sources(args, config.vocab_size),
        heldout,
        teacher=None if teacher is None else teacher.params,
        directory=args.work,
        resume=args.resume,
        intervals=options.intervals(args),
        stop_after=args.stop_after,
    )
    export(args.out, setup, state, args)
    return 0


def export(out: Path, setup: Setup, state: TrainState, args: argparse.Namespace) -> None:
    """Writes the model as a Hugging Face directory: weights in bfloat16, tokenizer, model card."""
    bpe = tokenizer.load(args.data)
    end = tokenizer.end_of_text(bpe)
    eos = () if end is None else (bpe.get_vocab()[end],)
    language_model.save(out, setup.config, state.params, eos=eos, max_shard_bytes=MAX_SHARD_BYTES)
    tokenizer.save(bpe, out, setup.config.max_length)
    (out / "README.md").write_text(
        card.write(setup, state, args, device=jax.devices()[0].device_kind), encoding="utf-8"
    )
