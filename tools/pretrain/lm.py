"""Trains a language model from scratch, or distills a small one from a teacher, as a draft.

Writes a Hugging Face directory with a model card, metrics as JSON lines, and checkpoints to resume from.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Unpack

import jax
import numpy as np
from tokenizers import Tokenizer

from jspec.checkpoints import atomic, fields, language_model, llama
from jspec.checkpoints.files import DTYPES
from jspec.core.options import option
from jspec.models import LlamaParams
from jspec.models.llama import require_llama
from jspec.text.tokenizer import Tokenizer as TextTokenizer
from jspec.train import batches, data, fingerprint, trainer
from jspec.train import card as cards
from jspec.train import tokenizer as files
from jspec.train.batches import Source
from jspec.train.model import count
from jspec.train.options import Run, check_one
from jspec.train.run_directory import Metrics, Record
from jspec.train.trainer import RunOptions, State
from pallas_kernels import platform
from tools.pretrain import card, model, objective, tokenizer
from tools.pretrain.objective import LmRecipe, LmSetup

MAX_SHARD_BYTES = 9_000_000
"""Weight files are split at this size, to fit in a source repository."""


@dataclasses.dataclass(frozen=True)
class Heldout:
    """Text to evaluate on, and how many bytes of text each id of the vocabulary encodes, Int[V].

    Raises:
      TypeError, ValueError: an array of another type than ints.
    """

    source: Source
    byte_counts: np.ndarray

    def __post_init__(self):
        counts = batches.check_tokens("Heldout.byte_counts", self.byte_counts, axes=(1,))
        object.__setattr__(self, "byte_counts", counts)

    def batches(self, recipe: LmRecipe) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """All tokens once, see `batches.heldout_batches`."""
        tokens, mask = self.source.tokens, self.source.mask
        return batches.heldout_batches(tokens, mask, batch_tokens=recipe.batch_tokens, length=recipe.length)


def train(
    setup: LmSetup,
    sources: tuple[Source, ...],
    heldout: Heldout,
    *,
    teacher: LlamaParams | None = None,
    **run_options: Unpack[RunOptions],
) -> State:
    """Trains to the recipe's last step, or to step `stop_after`, and writes a checkpoint there.

    run_options: see `trainer.RunOptions`.

    Raises:
      ValueError: a mismatch of model, data and recipe; also as `trainer.run`.
    """
    check(setup, sources, heldout, teacher)
    recipe = setup.recipe

    def advance(state: State, step: int):
        batch = batches.sample(
            sources, seed=recipe.seed, step=step, batch_tokens=recipe.batch_tokens, length=recipe.length
        )
        return trainer.train_step(state, teacher, jax.device_put(batch), step, setup=setup)

    task = trainer.Task(
        init=lambda: objective.init(setup),
        advance=advance,
        evaluate=lambda state: evaluate(state.params, heldout, setup, teacher),
        recipe=recipe,
        record=_record(setup, sources, heldout, teacher),
    )
    return trainer.run(task, **run_options)


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
    """Checks model, teacher, data and recipe against each other, before a run would end in the middle.

    teacher: its weights.

    Raises:
      ValueError: sequences longer than a model's context, different vocabularies, too short texts, or a
        teacher without weights.
    """
    config, shape, recipe = setup.config, setup.teacher, setup.recipe
    if setup.dtype not in DTYPES:
        raise ValueError(f"dtype={setup.dtype!r}: must be one of {', '.join(DTYPES)}")
    if shape is None and recipe.cross_entropy:
        raise ValueError(f"cross_entropy={recipe.cross_entropy}: has an effect only with a teacher; must be 0")
    cut = any(tokens.ndim == 1 for tokens in (heldout.source.tokens, *(source.tokens for source in sources)))
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
    batches.check_ids("heldout", heldout.source.tokens, config.vocab_size)
    text = heldout.source.tokens
    if text.ndim == 2 and text.shape[1] - 1 > context:
        raise ValueError(f"the held-out sequences have {text.shape[1]} tokens, but the model's context holds {context}")
    if text.ndim == 1:
        batches.count_windows(text, recipe.length)
    if not any(
        (heldout.byte_counts[tokens] * (1 if mask is None else mask))[:, 1:].any()
        for tokens, mask in heldout.batches(recipe)
    ):
        raise ValueError("the held-out text has no bytes: all of its tokens are special ones")


def _record(setup: LmSetup, sources: tuple[Source, ...], heldout: Heldout, teacher: LlamaParams | None) -> Record:
    """The parameters of a run."""
    return {
        **dataclasses.asdict(setup.recipe),
        **dataclasses.asdict(setup.config),
        "dtype": setup.dtype,
        "teacher": None if teacher is None else fingerprint.of_model(setup.teacher, teacher),
        **fingerprint.of_sources(sources),
        **fingerprint.of_heldout(heldout.source),
        "byte_counts": fingerprint.of_array(heldout.byte_counts),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmRun(Run):
    """Input and output of the training of a language model.

    Raises:
      TypeError, ValueError: as `Run`, or not exactly one of `shape` and `config`.
    """

    shape: str | None = option(None, "a bundled model whose shape to use", choices=sorted(model.SHAPES))
    config: Path | None = option(None, "directory with the config.json of the model, instead of --shape")
    teacher: Path | None = option(None, "directory of the model to distill from (default: none)")

    def __post_init__(self):
        super().__post_init__()
        check_one(self, "shape", "config")


OPTIONS = (LmRun, LmRecipe)


def main(run: LmRun, recipe: LmRecipe) -> int:
    """Runs the command; returns its exit status.

    Raises:
      ValueError, OSError: bad input; the message names it.
    """
    if recipe.cross_entropy and run.teacher is None:
        raise ValueError(f"--cross-entropy={recipe.cross_entropy}: has an effect only with --teacher")
    run.check(recipe.steps, teacher=run.teacher, config=run.config)
    # The model, its teacher and the data.
    manifest, bpe = data.read_manifest(run.data), files.load(run.data)
    if run.config is None:
        config = model.SHAPES[run.shape or ""]
    else:
        config = llama.parse_config(fields.read_fields(run.config / "config.json"))
    sources = run.sources(config.vocab_size)
    heldout = Heldout(run.heldout(config.vocab_size), tokenizer.byte_counts(bpe))
    dtype = "float32" if platform.platform() == "cpu" else "bfloat16"
    teacher = None
    if run.teacher is not None:
        tokenizer.check_same(bpe, run.data, run.teacher)
        teacher = language_model.load(run.teacher, dtype=dtype)
    shape = None if teacher is None else require_llama(teacher.config, "the teacher of a language model")
    # Logits with their gradients, and those of a teacher, in float32.
    chunk = batches.fit_chunk(recipe.batch_tokens, recipe.length, 4 * 6 * config.vocab_size)
    setup = LmSetup(config, recipe, shape, dtype, chunk)
    # Try a card now: a run that cannot have one must not begin.
    inputs = cards.inputs(manifest, sources, run)
    weights = count(jax.eval_shape(lambda: objective.init(setup).params))
    card.write(setup, inputs, card.EXAMPLE, run, steps=recipe.steps, weights=weights)
    # The run.
    state = train(
        setup,
        sources,
        heldout,
        teacher=None if teacher is None else teacher.params,
        directory=run.work,
        resume=run.resume,
        intervals=run.intervals,
        stop_after=run.stop_after,
    )
    final = cards.final_metrics(run.work, "heldout_bits_per_byte")
    text = card.write(setup, inputs, final, run, steps=int(state.step), weights=weights)
    export(run.out, setup, state, bpe, text, TextTokenizer.load(run.data))
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
        # The learned replies end with this token.
        end = special.get("eos_token", end)
    eos = () if end is None or end not in bpe.get_vocab() else (bpe.get_vocab()[end],)
    with atomic.staged(out, key="config.json", replaced=(*atomic.WEIGHTS, "generation_config.json")) as stage:
        language_model.save(stage, setup.config, state.params, eos=eos, max_shard_bytes=MAX_SHARD_BYTES)
        files.save(bpe, stage, setup.config.max_length, special if templates else None, templates)
        (stage / "README.md").write_text(text, encoding="utf-8")
