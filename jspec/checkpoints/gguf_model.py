"""Models in GGUF files: the metadata as the values of a config.json, and the tensors by their Hugging Face names.

So families read, split and check them as those of a directory. What is stored in another way there is put back: the
rows of queries and keys that rotate together alternate (`permute` in llama.cpp's convert_hf_to_gguf.py), and some norms
are stored with 1 added.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jspec.checkpoints.deferred import Part, as_slice
from jspec.checkpoints.fields import MOST_NUMBER, Fields, refuse
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.gguf_file import GgufFile
from jspec.checkpoints.tensors import TensorFiles


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How the files of one `general.architecture` are read.

    model: class of `transformers`.
    keys, tensors: what it has beyond `_KEYS` and `_TENSORS`.
    implied: what the other values of a config.json imply in this architecture.
    alternates: whether the rows of queries and keys that rotate together alternate, in place of two halves of a head.
    norm_offset: what is added to the weights of norms.
    narrow: whether the family has matrices of 8 and 4 bits.
    """

    model: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    implied: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    alternates: bool = False
    norm_offset: float = 0.0
    narrow: bool = True


_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""Key of the metadata, after the architecture -> key of config.json."""
_REQUIRED = ("block_count", "context_length", "embedding_length", "attention.head_count")
_OTHERS = {
    *("vocab_size", "rope.dimension_count", "rope.scaling.finetuned", "attention.value_length", "attention.causal"),
    "tensor_data_layout",
}
"""Further keys: read elsewhere, checked, or without a meaning for the forward."""
_ORIGINAL = "original_max_position_embeddings"
_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": _ORIGINAL,
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "attn_factor": "attention_factor",
}
"""Key of the metadata, after `rope.scaling.` -> key of rope_scaling in config.json."""
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Name of a tensor of the model, or of a layer -> its Hugging Face name, but for `.weight` or `.bias`."""
_WINDOWS = {f"attention.{key}": key for key in ("sliding_window", "sliding_window_pattern")}
"""Keys of the metadata for the windows of layers -> their keys in config.json."""
_EXPERTS = {f"ffn_{part}_exps": f"{part}_proj" for part in ("gate", "up", "down")}
"""Name of a stack of experts -> name of a matrix of one."""


def _query_scalar(config: Mapping[str, Any]) -> int:
    """What Gemma divides queries by, squared: the files of 27B do not state its value, which is another one."""
    is_27b = config["num_hidden_layers"] == 62
    return config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]


def _olmo(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a window implies: OLMo 3, whose files state for each layer whether it has it."""
    if "sliding_window" not in config:
        return {}
    kinds, pattern = {True: "sliding_attention", False: "full_attention"}, config.get("sliding_window_pattern")
    types = [kinds.get(sliding, sliding) for sliding in pattern] if isinstance(pattern, list) else pattern
    return {"architectures": ["Olmo3ForCausalLM"], "layer_types": types}


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", alternates=True),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        tensors={"ffn_gate_inp": "mlp.gate"},
        implied=lambda config: {"norm_topk_prob": True},
    ),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "smollm3": Architecture("SmolLM3ForCausalLM", alternates=True),
    "granite": Architecture(
        "GraniteForCausalLM",
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        alternates=True,
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        keys=_WINDOWS,
        tensors={"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
        implied=_olmo,
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        keys=_WINDOWS,
        tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        implied=lambda config: {"sliding_window": config.get("sliding_window") or None},
        narrow=False,
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        tensors={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        narrow=False,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        keys={
            **_WINDOWS,
            "rope.freq_base_swa": "rope_local_base_freq",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        tensors={
            "ffn_norm": "pre_feedforward_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        implied=lambda config: {"query_pre_attn_scalar": _query_scalar(config)},
        norm_offset=1.0,
        narrow=False,
    ),
}
"""`general.architecture` -> how its files are read."""

KEPT = {"Q8_0": 8, "Q4_0": 4}
"""Types whose values and scales are kept as they are stored -> bits of a value."""
GROUP = 32
"""Values with one scale in these types."""
_FREQUENCIES = "rope_freqs.weight"
"""Factors of the wavelengths of the rotary positions, in place of metadata."""
_FACTORS = {f"rope_factors_{name}.weight": f"{name}_factor" for name in ("short", "long")}
"""Further tensors of such factors -> their keys in rope_scaling."""
_ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>")
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The scaling of all models with such factors."""


class GgufModel(TensorFiles):
    """A file as a checkpoint: `config`, and its tensors."""

    def __init__(self, path: Path):
        self.directory, self._file = path, GgufFile(path)
        metadata = self._file.metadata
        if metadata.read_int("split.no", 0, least=0):
            raise CheckpointError(f"{path}: {metadata.describe('split.no')}: must be 0, the first file of the set")
        name = metadata.read_text("general.architecture")
        if name not in ARCHITECTURES:
            raise CheckpointError(
                f"{path}: general.architecture={name!r} is not supported; must be one of {', '.join(ARCHITECTURES)}"
            )
        self._row = ARCHITECTURES[name]
        config = _read_config(self._file, name, self._row)
        self._heads = {"q": config["num_attention_heads"], "k": config.get("num_key_value_heads")}
        self._places = dict(_places(self._file, self._row))
        self._narrow = config.get("quantization_config") is not None
        self.config = Fields(config, str(path))
        """What a config.json has."""

    def names(self) -> set[str]:
        """As in `TensorFiles`."""
        return set(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """As in `TensorFiles`; also of the scales of a tensor."""
        stored, shape, _ = self._place(name)
        return (shape[0], shape[1] // GROUP) if name not in self._places and stored else shape

    def dtype(self, name: str) -> np.dtype:
        """The type of one tensor: int8 if it is kept in 8 or 4 bits."""
        is_narrow = self._narrow and name in self._places and self._file.tensors[self._place(name)[0]].kind in KEPT
        return np.dtype(np.int8 if is_narrow else np.float32)

    def get(self, name: str) -> np.ndarray:
        """One tensor, widened to float32, or as integers in int8 if its type is kept."""
        return self.part(name, tuple(map(range, self.shape(name))))

    def has_parts(self, name: str) -> bool:
        """True: of any tensor."""
        return True

    def part(self, name: str, part: Part) -> np.ndarray:
        """A part of one tensor. Rows are widened as they are read."""
        stored, shape, first = self._place(name)
        rows = self._rows(name, np.asarray(part[0]))
        # A vector is one row.
        if len(shape) == 1:
            offset = self._row.norm_offset if name.endswith("norm.weight") else 0
            return self._file.rows(stored, slice(0, 1))[0, rows] - np.float32(offset)
        columns = as_slice(part[1])
        if self.dtype(name.removesuffix("_scale")) != np.int8:
            return self._file.rows(stored, first + rows)[:, columns]
        values, scales = _split_blocks(self._file.blocks(stored, first + rows), self._file.tensors[stored].kind)
        return (values if name in self._places else scales)[:, columns]

    def _place(self, name: str) -> tuple[str, tuple[int, ...], int]:
        """The stored name of a tensor or of its scales, its shape, and its first row."""
        place = self._places.get(name) or self._places.get(name.removesuffix("_scale"))
        if place is None:
            raise CheckpointError(f"{self.directory}: the tensor {name!r} is missing")
        return place

    def _rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Where the rows of a tensor are stored."""
        match = re.search(r"self_attn\.([qk])_proj\.", name)
        if match is None or not self._row.alternates:
            return rows
        size = self.shape(name)[0] // (self._heads[match[1]] or self._heads["q"])
        head, (half, pair) = rows // size, np.divmod(rows % size, size // 2)
        return head * size + 2 * pair + half


def _split_blocks(blocks: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The integers of rows in int8, and the scales of their groups in float32. Blocks begin with their scale."""
    split = blocks.reshape(len(blocks), -1, 2 + GROUP * KEPT[kind] // 8)
    scales, values = split[..., :2].view("<f2")[..., 0].astype(np.float32), split[..., 2:]
    if KEPT[kind] == 4:
        values = np.concatenate([values & 15, values >> 4], axis=-1) - np.uint8(8)
    return np.ascontiguousarray(values).view(np.int8).reshape(len(blocks), -1), scales


def _places(file: GgufFile, row: Architecture) -> Iterator[tuple[str, tuple[str, tuple[int, ...], int]]]:
    """Hugging Face name -> stored name, shape and first row, of all tensors; unknown ones keep their name."""
    names = _TENSORS | dict(row.tensors)
    for stored, entry in file.tensors.items():
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored)
        layer, name, end = match.groups() if match else (None, "", "")
        prefix = "" if layer is None else f"model.layers.{layer}."
        if name in _EXPERTS and len(entry.shape) == 3:
            for expert in range(entry.shape[0]):
                place = stored, entry.shape[1:], expert * entry.shape[1]
                yield f"{prefix}mlp.experts.{expert}.{_EXPERTS[name]}.{end}", place
        elif stored not in (_FREQUENCIES, *_FACTORS):
            yield f"{prefix}{names[name]}.{end}" if name in names else stored, (stored, entry.shape, 0)


def _read_config(file: GgufFile, name: str, row: Architecture) -> dict[str, Any]:
    """The values of a config.json."""
    # What is stated, by key.
    metadata, names = file.metadata, _KEYS | dict(row.keys)
    stated = {key.removeprefix(f"{name}."): key for key in metadata.keys() if key.startswith(f"{name}.")}
    for key in _REQUIRED:
        metadata.read_int(f"{name}.{key}")
    scaling = {key: stated.pop(f"rope.scaling.{key}") for key in _SCALING if f"rope.scaling.{key}" in stated}
    refuse(metadata.where, [metadata.describe(key) for short, key in stated.items() if short not in {*names, *_OTHERS}])
    config = {names[short]: metadata.value(key) for short, key in stated.items() if short in names}
    config |= {"architectures": [row.model], "eos_token_id": _ends(metadata)}
    # What the tensors imply.
    if (embedding := file.tensors.get("token_embd.weight")) is None:
        raise CheckpointError(f"{metadata.where}: the tensor 'token_embd.weight' is missing")
    config |= {"vocab_size": embedding.shape[0], "tie_word_embeddings": "output.weight" not in file.tensors}
    config |= _read_heads(metadata, name, config)
    config |= row.implied(config)
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    kinds = {entry.kind for key, entry in file.tensors.items() if key.startswith("blk.") and len(entry.shape) > 1}
    if row.narrow and len(kinds) == 1 and kinds < KEPT.keys():
        config["quantization_config"] = {"quant_method": "gguf", "bits": KEPT[kinds.pop()]}
    # The rotation.
    if scaling:
        config["rope_scaling"] = rope = _read_scaling(file, scaling)
        config[_ORIGINAL] = (rope or {}).get(_ORIGINAL)
    if _FREQUENCIES in file.tensors:
        config["rope_scaling"] = _read_frequencies(file, config)
    return config


def _read_heads(metadata: Fields, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The dimensions of heads, all of which rotate, or the part that does."""
    size = metadata.read_int(f"{name}.attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    if (values := metadata.read_int(f"{name}.attention.value_length", size)) != size:
        raise metadata.wrong(f"{name}.attention.value_length", values, f"must be {size}, as attention.key_length")
    if not metadata.read_flag(f"{name}.attention.causal", True):
        raise metadata.wrong(f"{name}.attention.causal", False, "must be true")
    rotated = metadata.read_int(f"{name}.rope.dimension_count", size)
    return {"head_dim": size} | ({} if rotated == size else {"partial_rotary_factor": rotated / size})


def _read_scaling(file: GgufFile, keys: Mapping[str, str]) -> dict[str, Any] | None:
    """The rope_scaling of a config.json; None: positions are not scaled."""
    scaling = {_SCALING[short]: file.metadata.value(key) for short, key in keys.items()}
    if file.tensors.keys() >= _FACTORS.keys():
        factors = {key: file.rows(name, slice(0, 1))[0].tolist() for name, key in _FACTORS.items()}
        return {**scaling, "rope_type": "longrope", **factors}
    # With other scalings, llama.cpp multiplies what they imply.
    if (factor := scaling.pop("attention_factor", 1.0)) != 1:
        raise file.metadata.wrong(keys["attn_factor"], factor, "must be 1 without the tensors rope_factors")
    return None if scaling.get("rope_type", "none") == "none" else scaling


def _read_frequencies(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope_scaling of Llama 3, whose factors are a tensor; CheckpointError if they are of another scaling."""
    factors = file.rows(_FREQUENCIES, slice(0, 1))[0]
    wavelengths = 2 * np.pi * np.power(config["rope_theta"], np.arange(0, config["head_dim"], 2) / config["head_dim"])
    low, high, length = _LLAMA_3.values()
    share = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    factor = float(factors.max(initial=1))
    expected = 1 / ((1 - share) / factor + share)
    if factors.shape != expected.shape or not 1 <= factor <= MOST_NUMBER or not np.allclose(factors, expected, 1e-4):
        raise CheckpointError(
            f"{file.path}: {_FREQUENCIES} does not have the factors of rope_type='llama3' with {_LLAMA_3}, the only "
            "ones supported"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA_3}


def _ends(metadata: Fields) -> list[int]:
    """The ids that end a text or a turn. A file that states no end of turn has it by its text, as llama.cpp does."""
    keys = [f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")]
    ends = [i for key in keys for i in metadata.int_or_ints(key, least=0, most=2**31 - 1)]
    if not metadata.has("tokenizer.ggml.eot_token_id"):
        tokens = metadata.read_texts("tokenizer.ggml.tokens", ())
        ends += [i for i, token in enumerate(tokens) if token in _ENDS_OF_TURN]
    return sorted(set(ends))
