"""What the model cards of language models and of drafts have in common."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jspec.train.batches import Source
from jspec.train.data import Manifest
from jspec.train.recipe import Recipe

FinalMetrics = Mapping[str, Any]
"""The last line of metrics.jsonl that has the metrics of an evaluation, as JSON."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run reads, as far as its card describes it; read before the run, so that nothing is missing at its end.

    manifest: the data.
    rows_shape: sequences of --rows and their length; None: there is no --rows.
    rows_share: the fraction of batches from --rows.
    num_prompts: held-out prompts in each evaluation.
    """

    manifest: Manifest
    rows_shape: tuple[int, int] | None = None
    rows_share: float = 0.0
    num_prompts: int = 0


_HEADER = """---
license: apache-2.0
library_name: jspec
{pipeline}language: [code]
tags: [{tags}]
---
# {name}"""


def assemble(
    name: str,
    *,
    architecture: str,
    training: Sequence[str],
    sections: Sequence[str],
    commands: Sequence[str],
    manifest: Manifest,
    pipeline: str | None = None,
    tags: Sequence[str] = (),
) -> str:
    """A card in Markdown.

    Args:
      name: what the model is called.
      architecture: the sentence that describes it.
      training: items of the section on its training.
      sections: further sections, after that one.
      commands: what makes the model again.
      manifest: the data.
      pipeline: the hub's name for what the model does; None: it does nothing by itself.
      tags: for the hub, beyond the usual ones.
    """
    header = _HEADER.format(
        name=name,
        pipeline="" if pipeline is None else f"pipeline_tag: {pipeline}\n",
        tags=", ".join(["python", "speculative-decoding", *tags]),
    )
    items = "\n".join(f"- {line}" for line in training)
    reproduce = "## Reproduce\n\n```\n" + "\n".join(commands) + "\n```"
    parts = [header, architecture, f"## Training\n\n{items}", *sections, reproduce, _packages(manifest)]
    return "\n\n".join(parts) + "\n"


def inputs(manifest: Manifest, sources: Sequence[Source], rows_share: float, num_prompts: int = 0) -> Inputs:
    """The inputs of a run whose sources are the text of the data and, if given, those of --rows."""
    shape = None
    if len(sources) > 1:
        count, width = sources[1].tokens.shape
        shape = count, width
    return Inputs(manifest, shape, rows_share, num_prompts)


def final_metrics(work: Path, metric: str) -> FinalMetrics:
    """The last line of a run's metrics that has `metric`."""
    lines = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in reversed(lines) if metric in line)


def optimization(recipe: Recipe, steps: int) -> str:
    """How many steps of which optimizer a run took."""
    decay = f"weight decay {recipe.weight_decay:g}" if recipe.weight_decay else "no weight decay"
    return (
        f"{steps:,} steps of {recipe.batch_tokens:,} tokens ({steps * recipe.batch_tokens:,} tokens in total), "
        f"sequences of {recipe.length}, AdamW at a peak of {recipe.learning_rate:g} with {recipe.warmup} steps of "
        f"warmup and a cosine to zero, {decay}, gradients clipped at {recipe.clip:g}, seed {recipe.seed}"
    )


def hardware(device: str, final: FinalMetrics) -> str:
    """Where a run took place and how long it took."""
    return f"hardware and time: one {device}, {final['seconds']:,.0f} s, including evaluation and checkpoints"


def data_command(manifest: Manifest) -> str:
    """The command that makes the data again."""
    heldout = " ".join(package["name"] for package in manifest["packages"] if package["heldout"])
    given = manifest.get("tokenizer")
    vocabulary = f"--tokenizer {given}" if given else f"--vocab-size {manifest['vocab_size']}"
    return f"jspec train data --out data {vocabulary} --heldout {heldout}"


def text_command(shape: tuple[int, int], model_name: str) -> str:
    """The command that has the model write a token file of this shape, named rows.npy."""
    count, width = shape
    prompts = "data/train_prompts.json"
    return f"jspec train text --model {model_name} --prompts {prompts} --out rows.npy --rows {count} --width {width}"


def _packages(manifest: Manifest) -> str:
    """The section that lists each package of the data, with its license."""
    rows = [
        f"| {package['name']} | {package['version']} | {package['license']} | {package['files']:,} | "
        f"{package['bytes']:,} | {'held out' if package['heldout'] else 'train'} |"
        for package in manifest["packages"]
    ]
    table = "\n".join(["| package | version | license | files | bytes | use |", "|---|---|---|---|---|---|", *rows])
    skipped = "\n".join(f"- {reason}: {count:,}" for reason, count in sorted(manifest["skipped"].items()))
    return f"## Packages\n\nLicenses as stated in the packages' metadata.\n\n{table}\n\nExcluded:\n\n{skipped}"
