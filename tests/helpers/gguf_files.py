"""GGUF files of tiny models, written by the package `gguf` from directories in the format of Hugging Face."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

ALTERNATING = ("llama", "smollm3", "granite")
"""Architectures whose rows of queries and keys alternate in a file."""
SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
OFFSET = ("gemma3",)
"""Architectures whose norms have 1 added in a file."""


def alternate(tensor: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows of a file, of the two halves of each head."""
    split = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
    return split.swapaxes(1, 2).reshape(tensor.shape)


def write(
    path: Path,
    directory: Path,
    architecture: str,
    *,
    kinds: Mapping[str, Kind] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the model of a directory.

    kinds: pattern in the name of a matrix -> its type; F32 otherwise.
    metadata, tensors: more of them, by their stored names.
    """
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_dimension_count(int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    factors = _add_positions(writer, architecture, config, rope)
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for key, value in SCALES.items():
        if key in config:
            writer.add_float32(f"{architecture}.{value}", config[key])
    for key, value in (metadata or {}).items():
        add(writer, key, value)
    for name, tensor in {**_named(directory, architecture, config), **factors, **(tensors or {})}.items():
        kind = next(
            (kind for part, kind in (kinds or {}).items() if re.search(part, name) and tensor.ndim > 1), Kind.F32
        )
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    return close(writer)


def _add_positions(
    writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any], rope: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Add scalings of rotary positions, and windows; returns the tensors of scalings."""
    kinds = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
    if rope["rope_type"] in kinds:
        writer.add_rope_scaling_type(kinds[rope["rope_type"]])
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.get("sliding_window") and architecture in ("olmo2", "phi3", "gemma3"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "olmo2" and "layer_types" in config:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if architecture == "gemma3":
        writer.add_sliding_window_pattern(config["layer_types"].index("full_attention") + 1)
    if rope["rope_type"] != "longrope":
        return {}
    writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    return {f"rope_factors_{key}.weight": np.float32(rope[f"{key}_factor"]) for key in ("short", "long")}


def _named(directory: Path, architecture: str, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a directory by their names in a file."""
    model = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names, named = gguf.get_tensor_name_map(model, config["num_hidden_layers"]), {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        tensor = tensor.astype(np.float32) + np.float32(architecture in OFFSET and name.endswith("norm.weight"))
        if architecture in ALTERNATING and (match := re.search(r"\.([qk])_proj\.", name)):
            tensor = alternate(tensor, config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"])
        expert = re.search(r"experts\.(\d+)\.", name)
        stored = names.get_name(re.sub(r"experts\.\d+\.", "experts.", name), (".weight", ".bias"))
        assert stored is not None, name
        if expert:
            experts.setdefault(stored, {})[int(expert[1])] = tensor
        else:
            named[stored] = tensor
    return named | {name: np.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value of any type."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def close(writer: gguf.GGUFWriter) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (path,) = writer.path if isinstance(writer.path, list) else (writer.path,)
    return Path(path)


def tokenizer_metadata(tokens: Mapping[str, int], pre: str, **values: Any) -> dict[str, Any]:
    """The metadata of a byte-level tokenizer. values: further ones, after `tokenizer.ggml.`."""
    ordered = sorted(tokens, key=tokens.__getitem__)
    raw = {"model": "gpt2", "pre": pre, "tokens": ordered, "token_type": [1] * len(ordered), **values}
    return {f"tokenizer.ggml.{key}": value for key, value in raw.items()}
