"""The data of a training, a directory by `jspec train data`:

tokenizer.json, tokenizer_config.json   the tokenizer
train.npy, heldout.npy                  of texts, UInt[tokens], each text followed by the end-of-text token; of chats,
                                        UInt[sequences, T], each from the beginning of its chat; ids have 16 bits, or
                                        32 if the vocabulary needs them
train_mask.npy, heldout_mask.npy        of chats, UInt8[sequences, T]: 1 for tokens of the loss
heldout_prompts.json                    prompts for evaluations, a list of {prompt}
train_prompts.json                      prompts for `jspec train text`, in the same format; chats have none
data.json                               the counts, what was dropped, and what model cards quote
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast, get_origin, get_type_hints, is_typeddict

import numpy as np
import tokenizers

from jspec.analysis.records import read_prompts
from jspec.checkpoints import atomic
from jspec.checkpoints.files import CheckpointError, read_json
from jspec.train import tokenizer

_REPLACED = ("train_mask.npy", "heldout_mask.npy", "train_prompts.json")
"""Optional files, to remove from earlier data."""


class Counts(TypedDict):
    """Sizes of the training data or of the held-out data; files are the texts or chats."""

    files: int
    bytes: int
    tokens: int
    learned: NotRequired[int]
    """Tokens of the loss."""


class CardTexts(TypedDict):
    """What a model card quotes about the data.

    front: lines of YAML for its head, such as the license.
    tags: for the hub, separated by commas.
    summary: what the data is, in a few words.
    command: makes the data again.
    section: lists the origins of the data, in Markdown.
    """

    front: str
    tags: str
    summary: str
    command: str
    section: str


class Manifest(TypedDict):
    """The contents of data.json; the prompts of the kind "chats" are rendered by a chat template."""

    train: Counts
    heldout: Counts
    vocab_size: int
    skipped: dict[str, int]
    kind: str
    card: CardTexts


@dataclasses.dataclass(frozen=True)
class Half:
    """One side of the split: the text to train on, or the held-out text.

    tokens, mask: as `batches.Source` has them.
    prompts: objects with the key "prompt".
    """

    tokens: np.ndarray
    mask: np.ndarray | None
    prompts: list[dict[str, Any]]
    counts: Counts


def write(
    directory: Path,
    halves: tuple[Half, Half],
    manifest: Mapping[str, Any],
    bpe: tokenizers.Tokenizer,
    **tokenizer_options: Any,
) -> dict[str, Any]:
    """Writes all files into `directory`, created if needed, or none; returns the contents of data.json.

    Args:
      halves: to train on, and held out.
      manifest: the fields of `Manifest` beyond those of `halves` and `bpe`, and any others.
      tokenizer_options: of `tokenizer.save`.

    Raises:
      OSError: the files cannot be written; those of an earlier call are as before.
    """
    train, heldout = halves
    manifest = {"train": train.counts, "heldout": heldout.counts, "vocab_size": bpe.get_vocab_size(), **manifest}
    with atomic.staged(directory, key="data.json", replaced=_REPLACED) as stage:
        tokenizer.save(bpe, stage, **tokenizer_options)
        for name, half in (("train", train), ("heldout", heldout)):
            np.save(stage / f"{name}.npy", half.tokens)
            if half.mask is not None:
                np.save(stage / f"{name}_mask.npy", half.mask)
            if half.prompts:
                atomic.write_json(stage / f"{name}_prompts.json", half.prompts, indent=1)
        atomic.write_json(stage / "data.json", manifest, indent=1)
    return {**manifest, "heldout_prompts": len(heldout.prompts)}


def read_manifest(directory: Path) -> Manifest:
    """The manifest in a directory of data."""
    path = Path(directory) / "data.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; `jspec train data` writes it, and the model card describes the data by it"
        )
    manifest = read_json(path)
    _check(path, "", manifest, Manifest)
    return cast(Manifest, manifest)


def _check(path: Path, name: str, value: Any, kind: Any) -> None:
    """Check a value of the manifest against its type: a TypedDict, dict[str, int], int or str."""
    typed, counted = is_typeddict(kind), get_origin(kind) is dict
    expected = dict if typed or counted else kind
    if type(value) is not expected:
        raise CheckpointError(f"{path}: {name} must be of type {expected.__name__}, but is {value!r:.60}")
    fields = get_type_hints(kind) if typed else dict.fromkeys(value, int) if counted else {}
    for key, field in fields.items():
        if key in value or not typed or key in kind.__required_keys__:
            _check(path, f"{name}.{key}".lstrip("."), value.get(key), field)


def read_heldout_prompts(directory: Path, count: int | None, default: int) -> list[str]:
    """The first prompts of heldout_prompts.json, none of which may be in train_prompts.json, if that exists.

    count: how many; None: `default`, or all if there are fewer.
    """
    path, trained = directory / "heldout_prompts.json", directory / "train_prompts.json"
    prompts = read_prompts(path)
    twice = [prompt for prompt, times in Counter(prompts).items() if times > 1]
    both = sorted({*prompts} & {*read_prompts(trained)}) if trained.exists() else []
    for repeated, where in ((twice, "twice in this file"), (both, f"also in {trained}")):
        if repeated:
            raise ValueError(f"{path}: {len(repeated)} prompts are {where}, such as {repeated[0]!r:.60}; remove them")
    if count is not None and count > len(prompts):
        raise ValueError(f"--prompts={count}: {path} has only {len(prompts)}")
    return prompts[: default if count is None else count]


def public_name(source: str | Path) -> str:
    """A model's name without the path of its directory."""
    return Path(source).name if Path(source).is_dir() else str(source)


def list_skipped(skipped: Mapping[str, int], title: str) -> str:
    """What was left out of the data and why, for the section of a card; empty if nothing was."""
    lines = "\n".join(f"- {reason}: {count:,}" for reason, count in sorted(skipped.items()))
    return f"\n\n{title}:\n\n{lines}" if lines else ""
