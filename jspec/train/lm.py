"""`jspec train lm`: trains a language model from scratch, or a small one as a draft by distillation from a teacher.

Writes a Hugging Face directory with a model card, metrics as JSON lines, and checkpoints to resume from.
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
from jspec.train import batches, lm_card, loop, model, objective, options, tokenizer, trainer
from jspec.train.batches import Source
from jspec.train.loop import DEFAULT_INTERVALS, Intervals, Metrics
from jspec.train.objective import LmRecipe, LmSetup
from jspec.train.trainer import State

MAX_SHARD_BYTES = 9_000_000
"""Weight files are split at this size, so that a source repository can hold them."""


@dataclasses.dataclass(frozen=True)
class Heldout:
    """Text to evaluate on: its tokens, UInt[tokens], and how many bytes of text each id of the vocabulary encodes."""

    tokens: np.ndarray
    byte_counts: np.ndarray


def train(
    setup: LmSetup,
    sources: tuple[Source, ...],
    heldout: Heldout,
    *,
    teacher: LlamaParams | None = None,
    directory: Path,
    resume: bool = False,
    intervals: Intervals = DEFAULT_INTERVALS,
    stop_after: int | None = None,
) -> State:
    """Trains to the recipe's last step, or to step `stop_after`, and writes a checkpoint there.

    Args:
      directory: where metrics.jsonl, recipe.json and the checkpoints are written.
      resume: continue from the latest checkpoint in `directory`; the result equals that of an uninterrupted run.

    Raises:
      ValueError: a model, data and recipe that do not fit together, or a checkpoint of another recipe.
      FileNotFoundError: no checkpoint to resume from.
      FileExistsError: `directory` has checkpoints and `resume` is False.
    """
    check(setup, heldout)
    recipe = setup.recipe

    def advance(state: State, step: int):
        batch = batches.sample(
            sources, seed=recipe.seed, step=step, batch_tokens=recipe.batch_tokens, length=recipe.length
        )
        return trainer.train_step(state, teacher, jax.device_put(batch), setup=setup)

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


def evaluate(params: LlamaParams, heldout: Heldout, setup: LmSetup, teacher: LlamaParams | None = None) -> Metrics:
    """Bits per byte of the held-out text, in windows of the recipe's length; with a teacher, also the distance to it.

    heldout_divergence is in nats per token; heldout_agreement is the share of positions where both models choose the
    same token.
    """
    nats = distance = agreed = tokens = size = 0.0
    recipe = setup.recipe
    for batch in batches.windows(heldout.tokens, batch_tokens=recipe.batch_tokens, length=recipe.length):
        sums = objective.measure(params, teacher, jax.device_put(batch), setup=setup)
        nats, distance, agreed = (float(new) + old for new, old in zip(sums, (nats, distance, agreed), strict=True))
        tokens += batch[:, 1:].size
        size += float(heldout.byte_counts[batch[:, 1:]].sum())
    result: Metrics = {"heldout_bits_per_byte": nats / math.log(2) / size, "heldout_nats_per_token": nats / tokens}
    if teacher is not None:
        result |= {"heldout_divergence": distance / tokens, "heldout_agreement": agreed / tokens}
    return result


def check(setup: LmSetup, heldout: Heldout) -> None:
    """Checks that model, teacher, data and recipe fit together.

    Raises:
      ValueError: sequences longer than a model's context, vocabularies that differ, or fewer than 2 steps.
    """
    config, teacher, recipe = setup.config, setup.teacher, setup.recipe
    for name, other in (("model", config), ("teacher", teacher)):
        if other is not None and recipe.length > other.max_length:
            raise ValueError(f"length={recipe.length}: exceeds the {name}'s context of {other.max_length} tokens")
    if teacher is not None and teacher.vocab_size != config.vocab_size:
        raise ValueError(
            f"the teacher's vocabulary has {teacher.vocab_size} tokens and the model's {config.vocab_size}: "
            "they must be the same"
        )
    if len(heldout.byte_counts) != config.vocab_size:
        raise ValueError(
            f"vocab_size={config.vocab_size}: must be {len(heldout.byte_counts)}, the tokenizer's vocabulary"
        )
    if recipe.steps < 2:
        raise ValueError(f"steps={recipe.steps}: must be at least 2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jspec train lm`."""
    options.add(parser, LmRecipe)
    parser.add_argument("--shape", choices=sorted(model.SHAPES), help="a bundled model whose shape to use")
    parser.add_argument("--config", type=Path, help="directory with the config.json of the model, instead of --shape")
    parser.add_argument("--teacher", type=Path, help="directory of the model to distill from (default: none)")


def main(args: argparse.Namespace) -> int:
    """Runs `jspec train lm`; returns its exit status."""
    if (args.shape is None) == (args.config is None):
        raise ValueError("exactly one of --shape and --config must be given")
    # The model, its teacher and the data.
    recipe = options.recipe(args, LmRecipe)
    bpe = tokenizer.load(args.data)
    config = model.SHAPES[args.shape] if args.shape else llama.parse_config(read_json(args.config / "config.json"))
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    teacher = None if args.teacher is None else language_model.load(args.teacher, dtype=dtype)
    heldout = Heldout(
        batches.open_tokens(args.data / "heldout.npy", vocab_size=config.vocab_size), tokenizer.byte_counts(bpe)
    )
    shape = None if teacher is None else require_llama(teacher.config, "the teacher of jspec train lm")
    # The run.
    setup = LmSetup(config, recipe, shape, dtype)
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


def export(out: Path, setup: LmSetup, state: State, args: argparse.Namespace) -> None:
    """Writes the model as a Hugging Face directory: weights in bfloat16, tokenizer, model card."""
    bpe = tokenizer.load(args.data)
    end = tokenizer.end_of_text(bpe)
    eos = () if end is None else (bpe.get_vocab()[end],)
    language_model.save(out, setup.config, state.params, eos=eos, max_shard_bytes=MAX_SHARD_BYTES)
    tokenizer.save(bpe, out, setup.config.max_length)
    (out / "README.md").write_text(
        lm_card.write(setup, state, args, device=jax.devices()[0].device_kind), encoding="utf-8"
    )
