"""The model card of a draft, and what it shares with those of other models."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jspec.train import rows
from jspec.train.batches import Source
from jspec.train.data import CardTexts, Manifest, public_name
from jspec.train.distill import DraftSetup
from jspec.train.kinds import Kind
from jspec.train.options import DraftRun, Run, describe
from jspec.train.recipe import Recipe
from jspec.train.rows import Made

FinalMetrics = Mapping[str, Any]
"""The last line of metrics.jsonl with the metrics of an evaluation, as JSON."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run reads, as far as its card describes it; read before the run, so nothing is missing at its end.

    manifest: the data.
    rows_shape: sequences of --rows and their length; None: there is no --rows.
    rows_share: the fraction of batches from --rows.
    rows_made: how `jspec train text` made --rows; None: it did not.
    num_prompts: held-out prompts in each evaluation.
    length: tokens of the sequences of the data; None: it is text, cut into the sequences of the recipe.
    """

    manifest: Manifest
    rows_shape: tuple[int, int] | None = None
    rows_share: float = 0.0
    rows_made: Made | None = None
    num_prompts: int = 0
    length: int | None = None


_HEADER = """---
{front}library_name: jspec
{pipeline}tags: [{tags}]
---
# {name}"""


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

    Args:
      name: what the model is called.
      architecture: a sentence about it.
      training: items of the section on its training.
      sections: further sections, after it.
      commands: what makes the model again.
      texts: what the data has for cards.
      pipeline: the hub's name for what the model does; None: it does nothing by itself.
      tags: for the hub, beyond the usual ones.
    """
    header = _HEADER.format(
        name=name,
        front=texts["front"],
        pipeline="" if pipeline is None else f"pipeline_tag: {pipeline}\n",
        tags=", ".join(tag for tag in (texts["tags"], "speculative-decoding", *tags) if tag),
    )
    items = "\n".join(f"- {line}" for line in training)
    reproduce = "## Reproduce\n\n```\n" + "\n".join(commands) + "\n```"
    parts = [header, architecture, f"## Training\n\n{items}", *sections, reproduce, texts["section"]]
    return "\n\n".join(parts) + "\n"


def inputs(manifest: Manifest, sources: Sequence[Source], run: Run, num_prompts: int = 0) -> Inputs:
    """The inputs of a run whose sources are the text of the data and, if given, those of --rows.

    Raises:
      ValueError: the description beside --rows is damaged.
    """
    shape, how_made = None, None if run.rows is None else rows.read(run.rows)
    if len(sources) > 1:
        count, width = sources[1].tokens.shape
        shape = count, width
    text = sources[0].tokens
    return Inputs(manifest, shape, run.share, how_made, num_prompts, text.shape[1] if text.ndim == 2 else None)


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


def describe_rows(inputs: Inputs) -> str:
    """The share of the batches from --rows, and how those were made."""
    how = "greedily itself"
    if inputs.rows_made is not None and inputs.rows_made.sampled_share:
        how = f"itself, {inputs.rows_made.sampled_share:.0%} of it sampled at temperature 1 and the rest greedy"
    return f"{inputs.rows_share:.0%} of the batches are text that the target wrote {how}"


def text_command(inputs: Inputs, model_name: str) -> str:
    """The command for the model to write the token file of --rows, named rows.npy."""
    assert inputs.rows_shape is not None
    count, width = inputs.rows_shape
    prompts = "data/train_prompts.json"
    line = f"jspec train text --model {model_name} --prompts {prompts} --out rows.npy --rows {count} --width {width}"
    if inputs.rows_made is not None and inputs.rows_made.sampled_share:
        line += f" --sampled-share {inputs.rows_made.sampled_share} --seed {inputs.rows_made.seed}"
    return line


_USE = """## Use

A draft for {target}, useless without it: `jspec.load("{target}", draft="{name}")`, then
`jspec.generate(model, prompts, drafter="{drafter}")`. The output is the target's own; the {noun} only makes it
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
class DraftCard:
    """The card of a draft, but for what the run finds out.

    weights: number of weights.
    shape, output: of the dataclasses of the kind; None: it has no options about the checkpoint.
    """

    kind: Kind
    setup: DraftSetup
    inputs: Inputs
    run: DraftRun
    shape: Any
    output: Any | None
    weights: int

    def write(self, final: FinalMetrics, steps: int) -> str:
        """The card in Markdown, from the last metrics and the number of trained steps."""
        target, name, noun = public_name(self.run.target), self.run.out.name, self.kind.noun
        drafter = self.setup.learner.config.drafter
        layout = "" if self.output is None else f", in the layout `{self.output.layout}`"
        return assemble(
            name,
            tags=[self.kind.name],
            architecture=f"{self.setup.learner.describe(self.weights, target)}{layout}.",
            training=self._training(final, steps),
            sections=[self._results(final), _USE.format(target=target, name=name, drafter=drafter, noun=noun)],
            commands=self._commands(target, name),
            texts=self.inputs.manifest["card"],
        )

    def _training(self, final: FinalMetrics, steps: int) -> list[str]:
        recipe, share = self.setup.recipe, self.inputs.rows_share
        texts = [describe_rows(self.inputs)] if share else []
        if share < 1:
            texts.append(f"{1 - share:.0%} are {self.inputs.manifest['card']['summary']}")
        return [
            f"data: {'; '.join(texts)}",
            f"loss: {self.setup.learner.describe_loss(recipe)}",
            optimization(recipe, steps, self.inputs.length),
            hardware(final),
        ]

    def _results(self, final: FinalMetrics) -> str:
        shares = " ".join(f"{share:.3f}" for share in final["heldout_agreement"])
        lines = [
            f"- {self.setup.learner.test} on held-out text: agreement with the target's choice by step: {shares}; "
            f"{final['heldout_chain']:.2f} tokens per round on this text"
        ]
        if "accept_length" in final:
            positions = " ".join(f"{share:.3f}" for share in final["acceptance_by_position"])
            lines.append(
                f"- **accept length {final['accept_length']:.2f}**, bonus token included, in greedy decoding with "
                f"chains of {self.run.depth} drafts, on {self.inputs.num_prompts} held-out prompts; acceptance by "
                f"draft position: {positions}; {final['repeated']:.0%} of that text repeats earlier text"
            )
        return "## Results\n\n" + "\n".join(lines)

    def _commands(self, target: str, name: str) -> list[str]:
        """The commands for making this draft again, with relative paths."""
        lines = [self.inputs.manifest["card"]["command"]]
        train = f"jspec train {self.kind.name} --data data --target {target} --work runs/{name} --out {name}"
        if self.inputs.rows_shape is not None:
            lines.append(text_command(self.inputs, target))
            train += f" --rows rows.npy --rows-share {self.inputs.rows_share}"
        options = [self.shape, self.setup.recipe]
        options = options if self.output is None else [self.output, *options]
        return [*lines, train + "".join(map(describe, options))]
