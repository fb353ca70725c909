"""Trains a language model from scratch, or distills a small one from a teacher, as a draft.

Writes a Hugging Face directory with a model card, metrics as JSON lines, and checkpoints to resume from.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

from jspec.checkpoints import atomic, fields, language_model, llama
from jspec.checkpoints.files import DTYPES
from jspec.models import LlamaParams
from jspec.models.llama import require_llama
from jspec.text.tokenizer import Tokenizer as TextTokenizer
from jspec.train import batches, data, fingerprint, loop, options, trainer
from jspec.train import card as cards
from jspec.train import tokenizer as files
from jspec.train.batches import Source
from jspec.train.model import count
from jspec.train.recipe import DEFAULT_INTERVALS, Intervals
from jspec.train.run_directory import Metrics, Record
from jspec.train.trainer import State
from pallas_kernels import platform
from tools.pretrain import card, model, objective, tokenizer
from tools.pretrain.objective import LmRecipe, LmSetup

MAX_SHARD_BYTES = 9_000_000
"""Weight files are split at this size, so that a source repository can hold them."""


@dataclasses.dataclass(frozen=True)
class Heldout:
    """Text to evaluate on: its tokens, UInt[tokens] or UInt[sequences, T], and how many bytes of text each id of the
    vocabulary encodes.

    Raises:
      TypeError, ValueError: arrays that are not ints, or a mask that does not fit the tokens.
    """

    tokens: np.ndarray
    byte_counts: np.ndarray
    mask: np.ndarray | None = None
    """[sequences, T], as `Source.mask`."""

    def __post_init__(self):
        for name, axes in (("tokens", (1, 2)), ("byte_counts", (1,))):
            array = batches.check_tokens(f"Heldout.{name}", getattr(self, name), axes=axes)
            object.__setattr__(self, name, array)
        if self.mask is not None:
            object.__setattr__(self, "mask", batches.check_mask("Heldout.mask", self.mask, self.tokens))

    def batches(self, recipe: LmRecipe) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """All tokens once, see `batches.heldout_batches`."""
        return batches.heldout_batches(self.tokens, self.mask, batch_tokens=recipe.batch_tokens, length=recipe.length)


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
        batch = batches.sample_masked(
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
    for batch, mask in heldout.batches(recipe):
        sums = objective.measure(params, teacher, jax.device_put((batch, mask)), setup=setup)
        nats, distance, agreed = (float(new) + old for new, old in zip(sums, (nats, distance, agreed), strict=True))
        counted = np.ones(batch.shape, np.float32) if mask is None else mask
        tokens += float(counted[:, 1:].sum())
        size += float((counted * heldout.byte_counts[batch])[:, 1:].sum())
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
    cut = any(tokens.ndim == 1 for tokens in (heldout.tokens, *(source.tokens for source in sources)))
    for name, other in (("model", config), ("teacher", shape)) if cut else ():
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
    if heldout.tokens.ndim == 2 and heldout.tokens.shape[1] - 1 > context:
        raise ValueError(
            f"the held-out sequences have {heldout.tokens.shape[1]} tokens, but the model's context holds {context}"
        )
    if heldout.tokens.ndim == 1:
        batches.count_windows(heldout.tokens, recipe.length)
    if not any(
        (heldout.byte_counts[tokens] * (1 if mask is None else mask))[:, 1:].any()
        for tokens, mask in heldout.batches(recipe)
    ):
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
        **({} if heldout.mask is None else {"heldout_mask": fingerprint.of_array(heldout.mask)}),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    options.add(parser, LmRecipe)
    parser.add_argument("--shape", choices=sorted(model.SHAPES), help="a bundled model whose shape to use")
    parser.add_argument("--config", type=Path, help="directory with the config.json of the model, instead of --shape")
    parser.add_argument("--teacher", type=Path, help="directory of the model to distill from (default: none)")


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit status.

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
    bpe = files.load(args.data)
    config = (
        model.SHAPES[args.shape] if args.shape else llama.parse_config(fields.read_fields(args.config / "config.json"))
    )
    sources = options.sources(args, config.vocab_size)
    heldout_tokens, heldout_mask = options.heldout(args, config.vocab_size)
    heldout = Heldout(heldout_tokens, tokenizer.byte_counts(bpe), heldout_mask)
    dtype = "float32" if platform.platform() == "cpu" else "bfloat16"
    teacher = None
    if args.teacher is not None:
        tokenizer.check_same(bpe, args.data, args.teacher)
        teacher = language_model.load(args.teacher, dtype=dtype)
    shape = None if teacher is None else require_llama(teacher.config, "the teacher of a language model")
    setup = LmSetup(config, recipe, shape, dtype)
    # A card is tried now, so that a run that cannot have one does not begin.
    inputs = cards.inputs(manifest, sources, args)
    weights = count(jax.eval_shape(lambda: objective.init(setup).params))
    card.write(setup, inputs, card.EXAMPLE, args, steps=recipe.steps, weights=weights)
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
    final = cards.final_metrics(args.work, "heldout_bits_per_byte")
    text = card.write(setup, inputs, final, args, steps=int(state.step), weights=weights)
    export(args.out, setup, state, bpe, text, TextTokenizer.load(args.data))
    return 0


def export(
    out: Path, setup: LmSetup, state: State, bpe: Tokenizer, text: str, chat: TextTokenizer | None = None
) -> None:
    """Writes the model as a Hugging Face directory: weights in bfloat16, tokenizer, and `text` as its model card.

    chat: a tokenizer whose special tokens and chat templates the model gets; None, or without templates: none.
    """
    end = files.end_of_text(bpe)
    special, templates = (None, None) if chat is None else (chat.special_roles, chat.templates)
    if templates and special is not None:
        # The replies that it learned end with this token.
        end = special.get("eos_token", end)
    eos = () if end is None or end not in bpe.get_vocab() else (bpe.get_vocab()[end],)
    with atomic.staged(out, key="config.json", replaced=(*atomic.WEIGHTS, "generation_config.json")) as stage:
        language_model.save(stage, setup.config, state.params, eos=eos, max_shard_bytes=MAX_SHARD_BYTES)
        files.save(bpe, stage, setup.config.max_length, special if templates else None, templates)
        (stage / "README.md").write_text(text, encoding="utf-8")
