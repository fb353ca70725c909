"""Trains a language model from scratch, or a small one as a draft by distillation from a teacher."""

import argparse
import dataclasses
import math
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

from jspec.checkpoints import atomic, fields, language_model, llama
from jspec.checkpoints.files import DTYPES
from jspec.models import LlamaParams
from jspec.models.llama import require_llama
from jspec.train import batches, card, data, fingerprint, lm_card, loop, model, objective, options, tokenizer, trainer
from jspec.train.batches import Source
from jspec.train.objective import LmSetup
from jspec.train.recipe import DEFAULT_INTERVALS, Intervals, LmRecipe
from jspec.train.run_directory import Metrics, Record
from jspec.train.trainer import State

MAX_SHARD_BYTES = 9_000_000
"""Weight files are split at this size, so that a source repository can hold them."""


@dataclasses.dataclass(frozen=True)
class Heldout:
    """Text to evaluate on: its tokens, UInt[tokens], and how many bytes of text each id of the vocabulary encodes.

    Raises:
      TypeError, ValueError: arrays that are not ints along one axis.
    """

    tokens: np.ndarray
    byte_counts: np.ndarray

    def __post_init__(self):
        for name in ("tokens", "byte_counts"):
            array = batches.check_tokens(f"Heldout.{name}", getattr(self, name), axes=(1,))
            object.__setattr__(self, name, array)


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
      directory: for metrics and checkpoints, see `run_directory`.
      resume: continue from the newest checkpoint in `directory` that is whole; the result equals that of an
        uninterrupted run.

    Raises:
      ValueError: a model, data and recipe that do not fit together, or a checkpoint of another recipe or other data.
      FileNotFoundError: no checkpoint to resume from.
      FileExistsError: `directory` has checkpoints and `resume` is False.
      OSError: metrics or a checkpoint cannot be written.
    """
    check(setup, sources, heldout, teacher)
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
        schedule=trainer.schedule(recipe),
        record=_record(setup, sources, heldout, teacher),
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


def check(setup: LmSetup, sources: tuple[Source, ...], heldout: Heldout, teacher: LlamaParams | None = None) -> None:
    """Checks that model, teacher, data and recipe fit together, so that no run ends in the middle.

    teacher: its weights.

    Raises:
      ValueError: sequences longer than a model's context, vocabularies that differ, texts that are too short, or a
        teacher without weights.
    """
    config, shape, recipe = setup.config, setup.teacher, setup.recipe
    if setup.dtype not in DTYPES:
        raise ValueError(f"dtype={setup.dtype!r}: must be one of {', '.join(DTYPES)}")
    if shape is None and recipe.cross_entropy:
        raise ValueError(f"cross_entropy={recipe.cross_entropy}: has an effect only with a teacher; must be 0")
    for name, other in (("model", config), ("teacher", shape)):
        if other is not None and recipe.length > other.max_length:
            raise ValueError(f"length={recipe.length}: exceeds the {name}'s context of {other.max_length} tokens")
    if shape is not None and shape.vocab_size != config.vocab_size:
        raise ValueError(
            f"the teacher's vocabulary has {shape.vocab_size} tokens and the model's {config.vocab_size}: "
            "they must be the same"
        )
    if len(heldout.byte_counts) != config.vocab_size:
        raise ValueError(
            f"vocab_size={config.vocab_size}: must be {len(heldout.byte_counts)}, the tokenizer's vocabulary"
        )
    if (shape is None) != (teacher is None):
        raise ValueError("teacher: its configuration (in the setup) and its weights must be given together")
    context = min(other.max_length for other in (config, shape) if other is not None)
    batches.check_sources(sources, length=recipe.length, context=context, vocab_size=config.vocab_size)
    batches.check_memory(recipe.batch_tokens, config.vocab_size)
    batches.check_ids("heldout", heldout.tokens, config.vocab_size)
    windows = batches.count_windows(heldout.tokens, recipe.length)
    if not heldout.byte_counts[heldout.tokens[1 : windows * recipe.length + 1]].any():
        raise ValueError("the held-out text has no bytes: all of its tokens are special ones")


def _record(setup: LmSetup, sources: tuple[Source, ...], heldout: Heldout, teacher: LlamaParams | None) -> Record:
    """Everything that determines a run."""
    return {
        **dataclasses.asdict(setup.recipe),
        **dataclasses.asdict(setup.config),
        "dtype": setup.dtype,
        "teacher": None if teacher is None else fingerprint.of_model(setup.teacher, teacher),
        **fingerprint.of_sources(sources),
        "heldout": fingerprint.of_array(heldout.tokens),
        "byte_counts": fingerprint.of_array(heldout.byte_counts),
    }


def main(args: argparse.Namespace) -> int:
    """Runs `jspec train lm`; returns its exit status.

    Raises:
      ValueError, OSError: bad input; the message names it.
    """
    if (args.shape is None) == (args.config is None):
        raise ValueError("exactly one of --shape and --config must be given")
    if args.cross_entropy and args.teacher is None:
        raise ValueError(f"--cross-entropy={args.cross_entropy}: has an effect only with --teacher")
    options.check_run(args, {"--teacher": args.teacher, "--config": args.config})
    # The model, its teacher and the data.
    recipe, manifest = options.recipe(args, LmRecipe), data.read_manifest(args.data)
    bpe = tokenizer.load(args.data)
    config = (
        model.SHAPES[args.shape] if args.shape else llama.parse_config(fields.read_fields(args.config / "config.json"))
    )
    sources = options.sources(args, config.vocab_size)
    heldout_tokens = batches.open_tokens(args.data / "heldout.npy", vocab_size=config.vocab_size, axes=(1,))
    heldout = Heldout(heldout_tokens, tokenizer.byte_counts(bpe))
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    teacher = None
    if args.teacher is not None:
        tokenizer.check_same(bpe, args.data, args.teacher)
        teacher = language_model.load(args.teacher, dtype=dtype)
    shape = None if teacher is None else require_llama(teacher.config, "the teacher of jspec train lm")
    setup = LmSetup(config, recipe, shape, dtype)
    # A card is tried now, so that a run that cannot have one does not begin.
    inputs = card.inputs(manifest, sources, options.rows_share(args))
    weights = model.count(jax.eval_shape(lambda: objective.init(setup).params))
    device = jax.devices()[0].device_kind
    lm_card.write(setup, inputs, lm_card.EXAMPLE, args, steps=recipe.steps, weights=weights, device=device)
    # The run.
    state = train(
        setup,
        sources,
        heldout,
        teacher=None if teacher is None else teacher.params,
        directory=args.work,
        resume=args.resume,
        intervals=options.intervals(args),
        stop_after=args.stop_after,
    )
    final = card.final_metrics(args.work, "heldout_bits_per_byte")
    text = lm_card.write(setup, inputs, final, args, steps=int(state.step), weights=weights, device=device)
    export(args.out, setup, state, bpe, text)
    return 0


def export(out: Path, setup: LmSetup, state: State, bpe: Tokenizer, text: str) -> None:
    """Writes the model as a Hugging Face directory: weights in bfloat16, tokenizer, and `text` as its model card."""
    end = tokenizer.end_of_text(bpe)
    eos = () if end is None else (bpe.get_vocab()[end],)
    with atomic.staged(out, key="config.json", replaced=(*atomic.WEIGHTS, "generation_config.json")) as stage:
        language_model.save(stage, setup.config, state.params, eos=eos, max_shard_bytes=MAX_SHARD_BYTES)
        tokenizer.save(bpe, stage, setup.config.max_length)
        (stage / "README.md").write_text(text, encoding="utf-8")
