"""The model card of a draft, and what it shares with those of other models."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jspec.train.batches import Source
from jspec.train.data import CardTexts, Manifest, public_name
from jspec.train.kinds import Kind
from jspec.train.learner import Learner
from jspec.train.options import DraftRun, Run, describe
from jspec.train.recipe import Recipe
from jspec.train.text import Sampled

FinalMetrics = Mapping[str, Any]
"""The last line of metrics.jsonl with the metrics of an evaluation, as JSON."""

_CARD = """\
---
{front}library_name: jspec
{pipeline}tags: [{tags}]
---
# {name}

{architecture}

## Training

{training}

{sections}

## Reproduce

```
{commands}
```

{section}
"""
_USE = """## Use

A draft for {target}, useless without it: `jspec.load("{target}", draft="{name}")`, then
`jspec.generate(model, prompts, drafter="{drafter}")`. The output is the target's own; the draft only makes it
faster."""
EXAMPLE: FinalMetrics = {
    "seconds": 0.0,
    "heldout_agreement": [0.0],
    "heldout_chain": 0.0,
    "accept_length": 0.0,
    "acceptance_by_position": [0.0],
    "repeated": 0.0,
}
"""Metrics to try a card with before the run."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """A file of --rows: sequences and their length, and how `jspec train text` sampled it; None: it did not."""

    name: str
    count: int
    width: int
    sampled: Sampled | None


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run reads, as far as its card describes it; read before the run, so nothing is missing at its end.

    num_prompts: held-out prompts in each evaluation.
    length: tokens of the sequences of the data; None: it is text, cut into the sequences of the recipe.
    """

    manifest: Manifest
    rows: tuple[Rows, ...] = ()
    rows_share: float = 0.0
    num_prompts: int = 0
    length: int | None = None

    @classmethod
    def of(cls, manifest: Manifest, sources: Sequence[Source], run: Run, num_prompts: int = 0) -> "Inputs":
        """The inputs of a run whose first source is the text of the data."""
        rows = []
        for path in run.rows or ():
            count, width = np.load(path, mmap_mode="r").shape
            rows.append(Rows(path.name, count, width, Sampled.read(path)))
        text = sources[0].tokens
        return cls(manifest, tuple(rows), run.share, num_prompts, text.shape[1] if text.ndim == 2 else None)

    def describe_rows(self) -> str:
        """The share of the batches from --rows, and how those were made."""
        sampled = sum(rows.count * rows.sampled.sampled_share for rows in self.rows if rows.sampled is not None)
        sampled /= sum(rows.count for rows in self.rows)
        how = (
            f"itself, {sampled:.0%} of it sampled at temperature 1 and the rest greedy"
            if sampled
            else "greedily itself"
        )
        return f"{self.rows_share:.0%} of the batches are text that the target wrote {how}"

    def rows_commands(self, model_name: str) -> tuple[list[str], str]:
        """The commands for the model to write the files of --rows, and the options of a training that reads them."""
        lines, names = [], ["rows.npy"]
        if len(self.rows) > 1:
            names = [f"rows-{number}.npy" for number in range(1, len(self.rows) + 1)]
        for rows, name in zip(self.rows, names, strict=True):
            line = f"jspec train text --model {model_name} --prompts data/train_prompts.json --out {name}"
            lines.append(f"{line} --rows {rows.count} --width {rows.width}{describe(rows.sampled or Sampled())}")
        return lines, f" --rows {' '.join(names)} --rows-share {self.rows_share}"


def assemble(
    name: str,
    *,
    architecture: str,
    training: Sequence[str],
    sections: Sequence[str],
    commands: Sequence[str],
    texts: CardTexts,
    pipeline: str | None = None,
    tags: Sequence[str] = (),
) -> str:
    """A card in Markdown.

    training: items of the section on its training, before the other `sections`.
    commands: what makes the model again.
    pipeline: the hub's name for what the model does; None: it does nothing by itself.
    tags: for the hub, beyond the usual ones.
    """
    return _CARD.format(
        name=name,
        front=texts["front"],
        pipeline="" if pipeline is None else f"pipeline_tag: {pipeline}\n",
        tags=", ".join(tag for tag in (texts["tags"], "speculative-decoding", *tags) if tag),
        architecture=architecture,
        training="\n".join(f"- {line}" for line in training),
        sections="\n\n".join(sections),
        commands="\n".join(commands),
        section=texts["section"],
    )


def final_metrics(work: Path, metric: str) -> FinalMetrics:
    """The last line of a run's metrics with `metric`."""
    lines = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in reversed(lines) if metric in line)


def optimization(recipe: Recipe, steps: int, length: int | None) -> str:
    """The optimizer and the steps of a run. length: as in `Inputs`."""
    decay = f"weight decay {recipe.weight_decay:g}" if recipe.weight_decay else "no weight decay"
    return (
        f"{steps:,} steps of {recipe.batch_tokens:,} tokens ({steps * recipe.batch_tokens:,} tokens in total), "
        f"sequences of {length or recipe.length}, AdamW at a peak of {recipe.learning_rate:g} with {recipe.warmup} "
        f"steps of warmup and a cosine to zero, {decay}, gradients clipped at {recipe.clip:g}, seed {recipe.seed}"
    )


def hardware(final: FinalMetrics) -> str:
    """Where a run took place and how long it took."""
    device = jax.devices()[0].device_kind
    return f"hardware and time: one {device}, {final['seconds']:,.0f} s, including evaluation and checkpoints"


@dataclasses.dataclass(frozen=True)
class DraftCard:
    """The card of a draft, but for what the run finds out.

    weights: number of weights.
    shape, output: of the dataclasses of the kind; `output` is None if there are no options about the checkpoint.
    """

    kind: Kind
    learner: Learner
    inputs: Inputs
    run: DraftRun
    shape: Any
    output: Any | None
    weights: int

    def write(self, final: FinalMetrics, steps: int) -> str:
        """The card in Markdown, from the last metrics and the number of trained steps."""
        target, name, recipe, config = self.target, self.run.out.name, self.learner.recipe, self.learner.config
        share, texts = self.inputs.rows_share, self.inputs.manifest["card"]
        data = [self.inputs.describe_rows()] if share else []
        data += [f"{1 - share:.0%} are {texts['summary']}"] if share < 1 else []
        title, details = self.learner.describe(target)
        stored = "bfloat16"
        if self.output is not None:
            stored = f"{'int8' if self.output.int8 else 'bfloat16'}, in the layout `{self.output.layout}`"
        return assemble(
            name,
            tags=[self.kind.name],
            architecture=f"{title}: {self.weights:,} parameters, {config.num_layers} layers of width "
            f"{config.hidden_size} ({config.num_heads} heads, MLP of {config.intermediate_size}) {details}, weights in "
            f"{stored}.",
            training=[
                f"data: {'; '.join(data)}",
                f"loss: {self.learner.describe_loss()}",
                optimization(recipe, steps, self.inputs.length),
                hardware(final),
            ],
            sections=[self._results(final), _USE.format(target=target, name=name, drafter=config.drafter)],
            commands=self._commands(),
            texts=texts,
        )

    @property
    def target(self) -> str:
        """The target's name."""
        return public_name(self.run.target)

    def _results(self, final: FinalMetrics) -> str:
        shares, positions = (
            " ".join(f"{share:.3f}" for share in final[name])
            for name in ("heldout_agreement", "acceptance_by_position")
        )
        return (
            f"## Results\n\n- {self.learner.test} on held-out text: agreement with the target's choice by step: "
            f"{shares}; {final['heldout_chain']:.2f} tokens per round on this text\n"
            f"- **accept length {final['accept_length']:.2f}**, bonus token included, in greedy decoding with chains "
            f"of {self.run.depth} drafts, on {self.inputs.num_prompts} held-out prompts; acceptance by draft position: "
            f"{positions}; {final['repeated']:.0%} of that text repeats earlier text"
        )

    def _commands(self) -> list[str]:
        """The commands for making this draft again, with relative paths."""
        name = self.run.out.name
        train = f"jspec train {self.kind.name} --data data --target {self.target} --work runs/{name} --out {name}"
        written, options = self.inputs.rows_commands(self.target) if self.inputs.rows else ([], "")
        options += "" if self.output is None else describe(self.output)
        options += describe(self.shape) + describe(self.learner.recipe)
        return [self.inputs.manifest["card"]["command"], *written, train + options]
