"""Hugging Face checkpoint directories: reading them into a configuration and weights, and writing them.

Reading takes one tensor at a time from the memory-mapped files to the device, so that the host never holds the model.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspec.checkpoints import (
    block_scaled,
    deepseek,
    deepseek_config,
    gemma4,
    gemma4_config,
    llama,
    qwen3_next,
    qwen3_next_config,
)
from jspec.checkpoints.config import family_of
from jspec.checkpoints.files import DTYPES, CheckpointError, Tensors, read_json, resolve_dtype, write_shards
from jspec.models import Deepseek, Gemma4, LanguageModel, Qwen3Next


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded model and what its directory says of its use."""

    config: LanguageModel
    params: Any
    """The family's own: `LlamaParams`, `Gemma4Params`, ..."""
    eos: tuple[int, ...]


def load(directory: str | Path, *, dtype: str | None = None, mtp: bool = True) -> Checkpoint:
    """Loads a Llama, Qwen3, Gemma 4, DeepSeek, Qwen3-Next or Qwen3.5 checkpoint onto the default device.

    Args:
      directory: holds config.json and model.safetensors, or its shards with model.safetensors.index.json.
      dtype: "bfloat16", "float16" or "float32"; None is bfloat16 on an accelerator and float32 on a CPU.
      mtp: whether heads for multi-token prediction are read where there are some.

    Raises:
      CheckpointError: a file that is missing or damaged, an unsupported architecture or option, a tensor that is
        missing or has another shape than the configuration says, or in the families that have modules of their own one
        that nothing reads.
      ValueError: an unknown dtype.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    raw = read_json(directory / "config.json")
    where = str(directory / "config.json")
    with _open(directory, raw, resolve_dtype(dtype), where) as tensors:
        if family_of(raw, deepseek_config.ARCHITECTURES):
            config = deepseek.with_mtp_of(deepseek_config.parse_config(raw, where), tensors, mtp)
            params = deepseek.read_params(config, tensors)
        elif family_of(raw, gemma4_config.ARCHITECTURES):
            config = gemma4_config.parse_config(raw, where)
            params = gemma4.read_params(config, tensors)
        elif family_of(raw, qwen3_next_config.ARCHITECTURES):
            config = qwen3_next.with_mtp_of(qwen3_next_config.parse_config(raw, where), tensors, mtp)
            params = qwen3_next.read_params(config, tensors)
        elif family_of(raw, llama.ARCHITECTURES):
            config = llama.parse_config(raw, where)
            params = llama.read_params(config, tensors)
        else:
            families = (llama, gemma4_config, deepseek_config, qwen3_next_config)
            known = ", ".join(name for family in families for name in family.ARCHITECTURES)
            architectures = raw.get("architectures") or []
            raise CheckpointError(f"{where}: architectures={architectures} is not supported; must be one of {known}")
    return Checkpoint(config, params, _read_eos(directory, raw))


def _open(directory: Path, raw: Mapping[str, Any], dtype: Any, where: str) -> Tensors:
    """The tensors of a checkpoint, widened as they are read where they are block-scaled ones of DeepSeek."""
    block = block_scaled.parse_block(raw, where) if family_of(raw, deepseek_config.ARCHITECTURES) else None
    return Tensors(directory, dtype) if block is None else block_scaled.BlockScaledTensors(directory, dtype, block)


def _read_eos(directory: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """All ids that end a text: config.json may know fewer of them than generation_config.json."""
    found: set[int] = set()
    generation = directory / "generation_config.json"
    for source in (raw, raw.get("text_config") or {}, read_json(generation) if generation.exists() else {}):
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))


def save(
    directory: str | Path,
    config: LanguageModel,
    params: Any,
    *,
    dtype: str = "bfloat16",
    eos: tuple[int, ...] = (),
    max_shard_bytes: int | None = None,
) -> None:
    """Writes config.json, generation_config.json and the weights as a Hugging Face directory, which is made if needed.

    Args:
      dtype: precision of the stored weights.
      eos: ids that end a text.
      max_shard_bytes: starts a new file where the next tensor would make one larger than this; None: one file.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(config, Gemma4):
        raw, named = gemma4_config.describe(config), gemma4.named_tensors(config, params)
    elif isinstance(config, Qwen3Next):
        raw, named = qwen3_next_config.describe(config), qwen3_next.named_tensors(config, params)
    elif isinstance(config, Deepseek):
        raw, named = deepseek_config.describe(config), deepseek.named_tensors(config, params)
    else:
        raw, named = llama.describe(config), llama.named_tensors(config, params)
    raw["dtype"] = dtype
    if eos:
        raw["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    write_shards(directory, named, DTYPES[dtype], max_shard_bytes)
