"""Checkpoint directories of language models of all families: reading and writing them.

Reading copies one tensor at a time from the memory-mapped files to the device, so the host never holds the whole model.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from jspec.checkpoints import atomic, deepseek, gemma4, llama, qwen3_next
from jspec.checkpoints.config import family_of
from jspec.checkpoints.family import Family
from jspec.checkpoints.files import DTYPES, CheckpointError, Json, read_json, resolve_dtype, write_shards
from jspec.checkpoints.source import Source
from jspec.models.decoder import Decoder

FAMILIES: tuple[Family[Any], ...] = (llama.FAMILY, gemma4.FAMILY, deepseek.FAMILY, qwen3_next.FAMILY)
"""All families of language models; a new one is one more entry."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded language model."""

    config: Decoder
    params: PyTree
    """The family's own, such as `LlamaParams`."""
    eos: tuple[int, ...]
    """Ids that end a text."""


def load(directory: str | Path, *, dtype: str | None = None, mtp: bool = True) -> Checkpoint:
    """Loads a checkpoint of any family in `FAMILIES` onto the default device.

    Args:
      directory: holds config.json and model.safetensors, or its shards with model.safetensors.index.json.
      dtype: "bfloat16", "float16" or "float32"; None is bfloat16 on an accelerator and float32 on a CPU.
      mtp: whether to read MTP heads, if there are any.

    Raises:
      CheckpointError: a file is missing or damaged, the architecture or an option is not supported, a tensor is missing
        or has an unexpected shape, or, in all families but Llama, a tensor is not used.
      ValueError: an unknown dtype.
    """
    return read(Source(directory), dtype=dtype, mtp=mtp)


def read(
    source: Source, *, dtype: str | None = None, mtp: bool = True, check: Callable[[PyTree], None] | None = None
) -> Checkpoint:
    """`load` from an open directory. `check`: called with the shapes of the weights before any of them is read."""
    family = _family_of(source.raw, source.where)
    tensors = family.open_tensors(source, resolve_dtype(dtype))
    config = family.with_mtp(family.parse_config(source.raw, source.where), tensors, mtp)
    if check is not None:
        check(config.param_shapes(tensors.dtype))
    return Checkpoint(config, family.read_params(config, tensors), _read_eos(source))


def parse_config(raw: Json, where: str = "config.json") -> Decoder:
    """The configuration that a config.json describes.

    Raises:
      CheckpointError: an unsupported architecture or option, or a key that is missing or of the wrong type.
    """
    return _family_of(raw, where).parse_config(raw, where)


def describe(config: Decoder) -> dict[str, Any]:
    """The config.json of a configuration."""
    return _family_by_config(config).describe(config)


def _family_of(raw: Json, where: str) -> Family[Any]:
    for family in FAMILIES:
        if family_of(raw, family.architectures) is not None:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    architectures = raw.get("architectures") or []
    raise CheckpointError(f"{where}: architectures={architectures} is not supported; must be one of {known}")


def _family_by_config(config: Decoder) -> Family[Any]:
    for family in FAMILIES:
        if type(config) is family.config:
            return family
    raise ValueError(f"{type(config).__name__} is not the configuration of a family in FAMILIES")


def _read_eos(source: Source) -> tuple[int, ...]:
    """All ids that end a text: config.json may list fewer of them than generation_config.json."""
    found: set[int] = set()
    generation = source.directory / "generation_config.json"
    texts = source.raw.get("text_config") or {}
    for raw in (source.raw, texts, read_json(generation) if generation.exists() else {}):
        ids = raw.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))


def save(
    directory: str | Path,
    config: Decoder,
    params: PyTree,
    *,
    dtype: str = "bfloat16",
    eos: tuple[int, ...] = (),
    max_shard_bytes: int | None = None,
) -> None:
    """Writes config.json, generation_config.json and the weights to a directory, which is created if needed.

    A write that fails, on a full disk say, leaves the directory as it was.

    Args:
      dtype: precision of the stored weights.
      eos: ids that end a text.
      max_shard_bytes: a new file is started before the next tensor would exceed this size; None: one file.
    """
    family = _family_by_config(config)
    raw = family.describe(config) | {"dtype": dtype}
    if eos:
        raw["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
    replaced = (*atomic.WEIGHTS, "generation_config.json")
    with atomic.staged(directory, key="config.json", replaced=replaced) as stage:
        if eos:
            (stage / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}, indent=2) + "\n")
        (stage / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        write_shards(stage, family.named_tensors(config, params), DTYPES[dtype], max_shard_bytes)
