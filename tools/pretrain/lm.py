"""Trains a language model from scratch, or distills a small one from a teacher, as a draft.

Writes a Hugging Face directory with a model card, metrics as JSON lines, and checkpoints to resume from.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

from jspec.checkpoints import atomic, fields, language_model, llama
from jspec.checkpoints.files import DTYPES
from jspec.core.options import option
from jspec.loading.fingerprint import of_array, of_model
from jspec.models import ModelParams
from jspec.models.llama import require_llama
from jspec.text.tokenizer import Tokenizer as TextTokenizer
from jspec.train import batches, data, trainer
from jspec.train import card as cards
from jspec.train import tokenizer as files
from jspec.train.batches import Source
from jspec.train.model import count
from jspec.train.options import Run, check_one
from jspec.train.run_directory import Metrics, Record
from jspec.train.trainer import State
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


@dataclasses.dataclass(frozen=True, eq=False)
class Pretraining:
    """The training of a language model, a `trainer.Task`.

    teacher: the weights of the setup's teacher.

    Raises:
      ValueError: a mismatch of model, data and recipe.
    """

    setup: LmSetup
    sources: tuple[Source, ...]
    heldout: Heldout
    teacher: ModelParams | None = None

    def __post_init__(self):
        check(self.setup, self.sources, self.heldout, self.teacher)

    @property
    def recipe(self) -> LmRecipe:
        """The hyperparameters."""
        return self.setup.recipe

    @property
    def record(self) -> Record:
        """Everything that determines the run."""
        setup, teacher = self.setup, self.teacher
        return {
            **dataclasses.asdict(setup.recipe),
            **dataclasses.asdict(setup.config),
            "dtype": setup.dtype,
            "teacher": None if teacher is None else of_model(setup.teacher, teacher),
            **batches.fingerprints(self.sources, self.heldout.source),
            "byte_counts": of_array(self.heldout.byte_counts),
        }

    def init(self) -> State:
        """The state before the first step."""
        return objective.init(self.setup)

    def advance(self, state: State, step: int) -> tuple[State, jax.Array, jax.Array]:
        """The next state, the loss, and the norm of the gradient."""
        recipe = self.recipe
        batch = batches.sample(
            self.sources, seed=recipe.seed, step=step, batch_tokens=recipe.batch_tokens, length=recipe.length
        )
        return trainer.train_step(state, self.teacher, jax.device_put(batch), step, setup=self.setup)

    def evaluate(self, state: State) -> Metrics:
        """Metrics on the held-out text."""
        return evaluate(state.params, self.heldout, self.setup, self.teacher)


def evaluate(params: ModelParams, heldout: Heldout, setup: LmSetup, teacher: ModelParams | None = None) -> Metrics:
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


def check(setup: LmSetup, sources: tuple[Source, ...], heldout: Heldout, teacher: ModelParams | None = None) -> None:
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
    batches.check_sources(sources, length=recipe.length, vocab_size=config.vocab_size)
    batches.check_ids("heldout", heldout.source.tokens, config.vocab_size)
    for source in (*sources, heldout.source):
        width = 0 if source.tokens.ndim == 1 else source.tokens.shape[1]
        if width - 1 > context:
            raise ValueError(f"{source.name}: has sequences of {width} tokens, but the model's context holds {context}")
    if not any(
        (heldout.byte_counts[tokens] * (1 if mask is None else mask))[:, 1:].any()
        for tokens, mask in heldout.batches(recipe)
    ):
        raise ValueError("the held-out text has no bytes: all of its tokens are special ones")


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
    setup = LmSetup(recipe, dtype, config, shape, chunk_tokens=chunk)
    task = Pretraining(setup, sources, heldout, None if teacher is None else teacher.params)
    # Try a card now: a run that cannot have one must not begin.
    inputs = cards.Inputs.of(manifest, sources, run)
    weights = count(jax.eval_shape(lambda: objective.init(setup).params))
    card.write(setup, inputs, card.EXAMPLE, run, steps=recipe.steps, weights=weights)
    # The run.
    state = trainer.run(task, run.work, resume=run.resume, intervals=run, stop_after=run.stop_after)
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
