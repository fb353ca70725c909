"""`jspec train lm`: trains a language model from scratch, or as the draft of a teacher by distillation.

Writes an ordinary Hugging Face directory with a model card, metrics as JSON lines, and checkpoints to resume from.
"""

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from tqdm import tqdm

from jspec import checkpoint
from jspec.models import LlamaParams
from jspec.train import batches, card, model, objective, tokenizer
from jspec.train.batches import Source
from jspec.train.objective import Recipe, Setup, TrainState

MAX_SHARD_BYTES = 9_000_000
"""Weight files are cut so that they can live in a source repository."""


@dataclasses.dataclass(frozen=True)
class Heldout:
    """Text to evaluate on: its tokens, Uint16[tokens], and the bytes that each id of the vocabulary stands for."""

    tokens: np.ndarray
    byte_counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class Intervals:
    """After how many steps to log, to evaluate and to write a checkpoint."""

    log: int = 50
    evaluate: int = 500
    checkpoint: int = 1000


def train(
    setup: Setup,
    sources: tuple[Source, ...],
    heldout: Heldout,
    *,
    teacher: LlamaParams | None = None,
    directory: Path,
    resume: bool = False,
    intervals: Intervals = Intervals(),
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
    directory.mkdir(parents=True, exist_ok=True)
    recipe, last = setup.recipe, min(setup.recipe.steps, stop_after or setup.recipe.steps)
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    with ocp.CheckpointManager((directory / "checkpoints").resolve(), options=options) as manager:
        state = _start(manager, setup, directory, resume)
        log = Metrics(directory / "metrics.jsonl", keep=resume)
        for step in tqdm(
            range(int(state.step), last), initial=int(state.step), total=last, mininterval=5, disable=None
        ):
            batch = batches.draw(
                sources, seed=recipe.seed, step=step, batch_tokens=recipe.batch_tokens, length=recipe.length
            )
            state, loss, norm = objective.train_step(state, teacher, jnp.asarray(batch), setup=setup)
            done = step + 1
            if done % intervals.log == 0 or done == last:
                log.write(step=done, loss=float(loss), gradient_norm=float(norm), rate=_rate(recipe, step))
            if done % intervals.evaluate == 0 or done == last:
                log.write(step=done, **evaluate(state.params, heldout, setup, teacher))
            if done % intervals.checkpoint == 0 or done == last:
                manager.save(done, args=ocp.args.StandardSave(state))  # type: ignore[call-arg]
    return state


def evaluate(
    params: LlamaParams, heldout: Heldout, setup: Setup, teacher: LlamaParams | None = None
) -> dict[str, float]:
    """Bits per byte of the held-out text, in windows of the recipe's length; with a teacher, the distance to it too.

    `divergence` is in nats a token and `agreement` is the share of positions where both models choose one token.
    """
    nats = distance = agreed = tokens = size = 0.0
    recipe = setup.recipe
    for batch in batches.windows(heldout.tokens, batch_tokens=recipe.batch_tokens, length=recipe.length):
        sums = objective.measure(params, teacher, jnp.asarray(batch), setup=setup)
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


class Metrics:
    """Appends lines of JSON, each with the seconds trained so far, earlier runs included, and echoes evaluations."""

    def __init__(self, path: Path, *, keep: bool):
        self.path, self.began, self.before = path, time.monotonic(), 0.0
        if keep and path.exists():
            self.before = json.loads(path.read_text().splitlines()[-1])["seconds"]
        else:
            path.write_text("")

    def write(self, **values: Any) -> None:
        """Appends one line."""
        values["seconds"] = round(self.before + time.monotonic() - self.began, 1)
        line = json.dumps(values)
        with self.path.open("a") as file:
            file.write(line + "\n")
        if "heldout_bits_per_byte" in values:
            tqdm.write(line)


def _rate(recipe: Recipe, step: int) -> float:
    rate: Any = recipe.schedule()(step)
    return float(rate)


def _start(manager: ocp.CheckpointManager, setup: Setup, directory: Path, resume: bool) -> TrainState:
    """The state to begin with: fresh, or the latest checkpoint's if its recipe is this one."""
    numbers, path, latest = dataclasses.asdict(setup.recipe), directory / "recipe.json", manager.latest_step()
    if not resume:
        if latest is not None:
            raise FileExistsError(
                f"{directory}: holds a checkpoint of step {latest}; resume, or give another directory"
            )
        path.write_text(json.dumps(numbers, indent=2) + "\n")
        return objective.init(setup)
    if latest is None:
        raise FileNotFoundError(f"{directory}: no checkpoint to resume from")
    before = json.loads(path.read_text())
    changed = [
        f"{name}={numbers[name]} (was {before.get(name)})" for name in numbers if numbers[name] != before.get(name)
    ]
    if changed:
        raise ValueError(f"{directory}: the checkpoint was made with another recipe: {', '.join(changed)}")
    like = jax.eval_shape(lambda: objective.init(setup))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), like)
    return manager.restore(latest, args=ocp.args.StandardRestore(like))  # type: ignore[call-arg]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jspec train lm`."""
    parser.add_argument("--data", type=Path, required=True, help="directory that `jspec train data` wrote")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--work", type=Path, required=True, help="directory for checkpoints and metrics")
    parser.add_argument("--shape", choices=sorted(model.SHAPES), help="a shape by name")
    parser.add_argument("--config", type=Path, help="or a directory whose config.json describes the model")
    parser.add_argument("--teacher", type=Path, help="directory of a model to distil from (default: none)")
    parser.add_argument("--rows", type=Path, help="a token file of whole sequences, from `jspec train text`")
    parser.add_argument("--rows-share", type=float, default=0.5, help="share of batches from --rows (default: 0.5)")
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint in --work")
    parser.add_argument("--stop-after", type=int, help="end at this step; the schedule stays that of all steps")
    parser.add_argument("--eval-every", type=int, default=Intervals.evaluate, help="steps between evaluations")
    parser.add_argument("--checkpoint-every", type=int, default=Intervals.checkpoint, help="steps between checkpoints")
    for field in dataclasses.fields(Recipe):
        required = field.default is dataclasses.MISSING
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=float if field.type is float else int,
            required=required,
            default=None if required else field.default,
            help="" if required else f"(default: {field.default})",
        )


def main(args: argparse.Namespace) -> int:
    """Runs `jspec train lm`."""
    if (args.shape is None) == (args.config is None):
        raise ValueError("give --shape or --config, one of the two")
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Recipe)})
    bpe = tokenizer.load(args.data)
    config = (
        model.SHAPES[args.shape]
        if args.shape
        else checkpoint.parse_config(checkpoint.read_json(args.config / "config.json"))
    )
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    teacher = None if args.teacher is None else checkpoint.load(args.teacher, dtype=dtype)
    sources = (Source(batches.open_tokens(args.data / "train.npy", vocab_size=config.vocab_size)),)
    if args.rows is not None:
        rows = batches.open_tokens(args.rows, vocab_size=config.vocab_size)
        sources = (dataclasses.replace(sources[0], share=1 - args.rows_share), Source(rows, args.rows_share))
    heldout = Heldout(
        batches.open_tokens(args.data / "heldout.npy", vocab_size=config.vocab_size), tokenizer.byte_counts(bpe)
    )
    setup = Setup(config, recipe, None if teacher is None else teacher.config, dtype)
    state = train(
        setup,
        sources,
        heldout,
        teacher=None if teacher is None else teacher.params,
        directory=args.work,
        resume=args.resume,
        intervals=Intervals(evaluate=args.eval_every, checkpoint=args.checkpoint_every),
        stop_after=args.stop_after,
    )
    export(args.out, setup, state, args)
    return 0


def export(out: Path, setup: Setup, state: TrainState, args: argparse.Namespace) -> None:
    """Writes the model as a Hugging Face directory: weights in bfloat16, tokenizer, model card."""
    bpe = tokenizer.load(args.data)
    end = bpe.token_to_id(tokenizer.END_OF_TEXT)
    eos = () if end is None else (end,)
    checkpoint.save(out, setup.config, state.params, eos=eos, max_shard_bytes=MAX_SHARD_BYTES)
    tokenizer.save(bpe, out, setup.config.max_length)
    (out / "README.md").write_text(
        card.write(setup, state, args, device=jax.devices()[0].device_kind), encoding="utf-8"
    )
