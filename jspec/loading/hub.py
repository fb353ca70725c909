"""Where checkpoints are: bundled models, directories, and the Hugging Face hub."""

import re
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError

from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.gguf_file import is_gguf
from jspec.core.checks import shorten
from jspec.core.package import ASSETS

BUNDLED = {
    "python-small": {
        "eagle": "python-eagle3",
        "block": "python-block",
        "standalone": "python-tiny",
        "frozen-kv-mtp": "python-assistant",
    },
    "python-tiny": {},
}
"""Bundled models -> drafter -> its bundled draft; the first is the default."""

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
OTHER_FILES = ["original/*", "metal/*", "onnx/*", "consolidated*"]
"""Patterns of copies in other formats."""
# Some EAGLE heads are published only in the older format, and the mask of some block drafts. A repository with both
# formats doubles the download, but drafts are small.
DRAFT_FILES = [*HUB_FILES, "pytorch_model.bin", "mask_embedding.pt"]
ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"]


def bundled_draft(source: str | Path, drafter: str | None = None) -> str | None:
    """Name the bundled draft of a bundled model, for a drafter (None: the default draft); None if there is none."""
    drafts = BUNDLED.get(str(source).removeprefix("bundled:"), {}) if str(source).startswith("bundled:") else {}
    name = next(iter(drafts.values()), None) if drafter is None else drafts.get(drafter)
    return name and f"bundled:{name}"


def locate(source: str | Path, files: Sequence[str] = HUB_FILES, argument: str = "source") -> Path:
    """Find the directory of a checkpoint, or its GGUF file; download it first if `source` is a hub id.

    files: patterns of the files to download.
    argument: what `source` is called, for messages.

    Raises:
      TypeError: neither a str nor a Path.
      ValueError: an unknown bundled model, or an empty name.
      CheckpointError: neither a directory nor a hub id, or the download failed.
    """
    if not isinstance(source, str | Path):
        raise TypeError(f"{argument}={shorten(source)}: must be a str or a Path")
    name = str(source)
    if not name.strip():
        raise ValueError(
            f"{argument}={name!r}: must be bundled:NAME, a Hugging Face directory, a .gguf file or a hub id; '.' is "
            "this directory"
        )
    # A bundled model.
    if name.startswith("bundled:"):
        short = name.removeprefix("bundled:")
        names = sorted({*BUNDLED, *(draft for drafts in BUNDLED.values() for draft in drafts.values())})
        if short not in names:
            raise ValueError(f"{name!r} is unknown; bundled models: {', '.join(names)}")
        return ASSETS / short
    # A directory or a file.
    try:
        if Path(source).is_dir() or (is_gguf(Path(source)) and Path(source).exists()):
            return Path(source)
    except (OSError, ValueError) as error:  # A name that is too long, or has a NUL character.
        raise CheckpointError(
            f"{argument}={shorten(name)}: cannot be opened ({getattr(error, 'strerror', None) or error})"
        ) from None
    shown = name if len(name) <= 200 else shorten(name)
    if Path(source).exists():
        raise CheckpointError(f"{shown}: is a file; must be a directory, a .gguf file or a hub id")
    if isinstance(source, Path) or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise CheckpointError(f'{shown}: no such directory (and not a hub id of the form "organization/name")')
    # A hub id.
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files), ignore_patterns=OTHER_FILES))
    except Exception as error:
        problem, reason = "and the download from the hub failed", error
        if isinstance(error, LocalEntryNotFoundError):  # Its cause is the hub's reason.
            problem, reason = "not in the hub's cache, and the hub cannot be reached", error.__cause__ or error
        raise CheckpointError(f"{name}: no such directory, {problem} ({reason})") from error
