"""Hugging Face checkpoint directories: reading them into a configuration and weights, and writing them.

Reading takes one tensor at a time from the memory-mapped files to the device, so that the host never holds the model.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jspec.models.layers import Llama3Rope
from jspec.models.llama import LayerParams, Llama, LlamaParams

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or of a kind that is not supported."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded model and what its directory says of its use."""

    config: Llama
    params: LlamaParams
    eos: tuple[int, ...]


def load(directory: str | Path, *, dtype: str | None = None) -> Checkpoint:
    """Loads a Llama or Qwen3 checkpoint onto the default device.

    Args:
      directory: holds config.json and model.safetensors, or its shards with model.safetensors.index.json.
      dtype: "bfloat16", "float16" or "float32"; None is bfloat16 on an accelerator and float32 on a CPU.

    Raises:
      CheckpointError: a file that is missing or damaged, an unsupported architecture or option, a tensor that is
        missing or has another shape than the configuration says.
      ValueError: an unknown dtype.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    raw = read_json(directory / "config.json")
    config = parse_config(raw, where=str(directory / "config.json"))
    with Tensors(directory, resolve_dtype(dtype)) as tensors:
        params = _read_params(config, tensors)
    return Checkpoint(config, params, _read_eos(directory, raw))


def resolve_dtype(dtype: str | None) -> Any:
    """The numpy dtype that a name stands for, or the platform's default for None.

    Raises:
      ValueError: an unknown name.
    """
    if dtype is None:
        return DTYPES["float32" if jax.default_backend() == "cpu" else "bfloat16"]
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: give one of {', '.join(DTYPES)}, or None for the platform's default")
    return DTYPES[dtype]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint.

    Raises:
      CheckpointError: no such file, or no JSON object in it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


def parse_config(raw: Mapping[str, Any], *, where: str = "config.json") -> Llama:
    """The model that a config.json describes, of either generation.

    Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters` with both.

    Raises:
      CheckpointError: an unsupported architecture or option, or a key that is missing or of the wrong type.
    """
    architectures = raw.get("architectures") or []
    family = next((ARCHITECTURES[name] for name in architectures if name in ARCHITECTURES), None)
    if family is None and not architectures and raw.get("model_type") in ARCHITECTURES.values():
        family = raw["model_type"]
    if family is None:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{where}: architectures={architectures} is not supported; there are {known}")
    refuse_options(raw, where)
    try:
        heads = int(raw["num_attention_heads"])
        head_dim = raw.get("head_dim") or (128 if family == "qwen3" else int(raw["hidden_size"]) // heads)
        theta, scaling = parse_rope(raw, where)
        config = Llama(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(head_dim),
            max_length=int(raw["max_position_embeddings"]),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=family == "qwen3",
            attention_bias=bool(raw.get("attention_bias", False)),
        )
    except KeyError as error:
        raise CheckpointError(f"{where}: the key {error} is missing") from None
    except TypeError as error:
        raise CheckpointError(f"{where}: a value has the wrong type ({error})") from None
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads={config.num_heads} is no multiple of "
            f"num_key_value_heads={config.num_kv_heads}"
        )
    return config


def refuse_options(raw: Mapping[str, Any], where: str) -> None:
    """Raises where the configuration asks for something that the models here do not compute.

    Raises:
      CheckpointError: names the options, and `where` they stand.
    """
    wrong = []
    if raw.get("quantization_config"):
        wrong.append("quantization_config")
    if raw.get("mlp_bias"):
        wrong.append("mlp_bias=true")
    if raw.get("hidden_act", "silu") != "silu":
        wrong.append(f"hidden_act={raw['hidden_act']!r}")
    if raw.get("use_sliding_window"):
        wrong.append("use_sliding_window=true")
    if raw.get("pretraining_tp", 1) not in (None, 1):
        wrong.append(f"pretraining_tp={raw['pretraining_tp']}")
    if wrong:
        raise CheckpointError(f"{where}: not supported: {', '.join(wrong)}")


def parse_rope(raw: Mapping[str, Any], where: str) -> tuple[float, Llama3Rope | None]:
    """The base and the scaling of the rotary positions, from a config.json of either generation.

    Raises:
      CheckpointError: a kind of scaling that is not supported.
      KeyError: a number of the scaling is missing.
    """
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(f"{where}: rope_type={kind!r} is not supported; there are default and llama3")
    return theta, Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_length=int(rope["original_max_position_embeddings"]),
    )


def _read_eos(directory: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """All ids that end a text: config.json may know fewer of them than generation_config.json."""
    found: set[int] = set()
    generation = directory / "generation_config.json"
    for source in (raw, read_json(generation) if generation.exists() else {}):
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))


class Tensors:
    """The tensors of a checkpoint by name, each read from its memory-mapped file when asked for."""

    def __init__(self, directory: Path, dtype):
        self.directory, self.dtype = directory, dtype
        index = directory / "model.safetensors.index.json"
        if index.exists():
            self.weight_map = read_json(index).get("weight_map")
            if not isinstance(self.weight_map, dict):
                raise CheckpointError(f"{index}: the key 'weight_map' is missing")
        else:
            self.weight_map = None
        self.open_files: dict[str, Any] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.open_files.clear()

    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._open("model.safetensors").keys() if self.weight_map is None else self.weight_map)

    def get(self, name: str) -> np.ndarray:
        """One tensor as it is stored, of whatever shape; `stored`, `read`, `device` and `fused` all ask here."""
        file = self._open("model.safetensors" if self.weight_map is None else self._file_of(name))
        try:
            return file.get_tensor(name)
        except SafetensorError:
            raise CheckpointError(f"{self.directory}: the tensor {name!r} is missing") from None

    def stored(self, name: str, *shape: int) -> np.ndarray:
        """One tensor as it is stored, after a check of its shape: the one that config.json leads to.

        Raises:
          CheckpointError: it is missing, or has another shape.
        """
        tensor = self.get(name)
        if tensor.shape != shape:
            raise CheckpointError(f"{self.directory}: {name} has the shape {tensor.shape}, config.json says {shape}")
        return tensor

    def read(self, name: str, *shape: int, transpose: bool = False) -> np.ndarray:
        """One tensor in the chosen dtype, after a check of its shape as stored."""
        tensor = self.stored(name, *shape)
        return (tensor.T if transpose else tensor).astype(self.dtype, copy=False)

    def device(self, name: str, *shape: int) -> jax.Array:
        """One tensor on the device."""
        return jnp.asarray(self.read(name, *shape))

    def fused(self, parts: list[tuple[str, int]], width: int) -> jax.Array:
        """Weights [out, in] with one input, as one weight [in, sum of outs] on the device."""
        return jnp.asarray(np.concatenate([self.read(name, out, width, transpose=True) for name, out in parts], axis=1))

    def _file_of(self, name: str) -> str:
        assert self.weight_map is not None
        if name not in self.weight_map:
            raise CheckpointError(f"{self.directory}: the index names no file for the tensor {name!r}")
        return self.weight_map[name]

    def _open(self, file: str):
        if file not in self.open_files:
            path = self.directory / file
            if not path.exists():
                raise CheckpointError(f"{path}: no such file")
            try:
                self.open_files[file] = safe_open(path, "np")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: damaged ({error})") from None
        return self.open_files[file]


def _read_params(config: Llama, tensors: Tensors) -> LlamaParams:
    width = config.hidden_size
    embed = tensors.device("model.embed_tokens.weight", config.vocab_size, width)
    head = None
    if not config.tie_embeddings:
        head = tensors.fused([("lm_head.weight", config.vocab_size)], width)
    layers = []
    for prefix in (f"model.layers.{i}." for i in range(config.num_layers)):
        norm, bias = tensors.device(prefix + "input_layernorm.weight", width), config.attention_bias
        layer = read_layer(
            config, tensors, prefix, norm, reads=width, qkv_bias=bias, o_bias=bias, qk_norm=config.qk_norm
        )
        layers.append(layer)
    return LlamaParams(embed, tuple(layers), tensors.device("model.norm.weight", width), head)


def read_layer(
    config: Any,
    tensors: Tensors,
    prefix: str,
    attention_norm: Float[Array, " E"] | None,
    *,
    reads: int,
    qkv_bias: bool,
    o_bias: bool,
    qk_norm: bool,
) -> LayerParams:
    """One decoder layer, whose names start with `prefix`.

    Args:
      config: says hidden_size, intermediate_size, num_heads, num_kv_heads and head_dim.
      attention_norm: becomes the layer's; where it stands depends on the model.
      reads: the width of what its attention reads.
      qkv_bias, o_bias, qk_norm: which optional weights there are.

    Raises:
      CheckpointError: a tensor that is missing or has another shape than the configuration says.
    """
    width, mlp = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, outs = prefix + "self_attn.", [("q_proj", query), ("k_proj", kv), ("v_proj", kv)]
    bias = [tensors.device(f"{attention}{name}.bias", out) for name, out in outs] if qkv_bias else None
    return LayerParams(
        attention_norm=attention_norm,
        qkv=tensors.fused([(f"{attention}{name}.weight", out) for name, out in outs], reads),
        qkv_bias=None if bias is None else jnp.concatenate(bias),
        q_norm=tensors.device(f"{attention}q_norm.weight", config.head_dim) if qk_norm else None,
        k_norm=tensors.device(f"{attention}k_norm.weight", config.head_dim) if qk_norm else None,
        o=tensors.fused([(f"{attention}o_proj.weight", width)], query),
        o_bias=tensors.device(f"{attention}o_proj.bias", width) if o_bias else None,
        mlp_norm=tensors.device(prefix + "post_attention_layernorm.weight", width),
        gate_up=tensors.fused([(f"{prefix}mlp.{name}_proj.weight", mlp) for name in ("gate", "up")], width),
        down=tensors.fused([(f"{prefix}mlp.down_proj.weight", width)], mlp),
    )


def save(
    directory: str | Path,
    config: Llama,
    params: LlamaParams,
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
    raw = {**describe(config), "dtype": dtype}
    if eos:
        raw["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    shards: list[dict[str, np.ndarray]] = [{}]
    filled = 0
    for name, tensor in _named_tensors(config, params):
        tensor = np.ascontiguousarray(np.asarray(tensor).astype(DTYPES[dtype]))
        if shards[-1] and max_shard_bytes is not None and filled + tensor.nbytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        write_tensors(shards[0], directory / "model.safetensors")
        return
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(shard, directory / file)
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Writes a .safetensors file."""
    save_file(tensors, path, {"format": "pt"})
    path.chmod(0o644)  # the library makes files that only their owner reads


def describe_scaling(scaling: Llama3Rope) -> dict[str, Any]:
    """The keys of a config.json for scaled rotary frequencies."""
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    }


def describe(config: Llama) -> dict[str, Any]:
    """The config.json of a model, of the newer generation."""
    family = "qwen3" if config.qk_norm else "llama"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= describe_scaling(config.rope_scaling)
    return {
        "architectures": [next(name for name, value in ARCHITECTURES.items() if value == family)],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
        "bos_token_id": None,
    }


def _named_tensors(config: Llama, params: LlamaParams) -> Iterator[tuple[str, Any]]:
    """All weights under their Hugging Face names, [out, in]."""
    yield "model.embed_tokens.weight", params.embed
    for i, layer in enumerate(params.layers):
        yield from name_layer(config, layer, f"model.layers.{i}.")
        yield f"model.layers.{i}.input_layernorm.weight", layer.attention_norm
    yield "model.norm.weight", params.norm
    if params.lm_head is not None:
        yield "lm_head.weight", np.asarray(params.lm_head).T


def name_layer(config: Any, layer: LayerParams, prefix: str) -> Iterator[tuple[str, Any]]:
    """The weights of one layer but its attention norm, under their Hugging Face names, [out, in].

    config: says num_heads, num_kv_heads and head_dim.
    """
    splits = np.cumsum([config.num_heads, config.num_kv_heads]) * config.head_dim
    attention = prefix + "self_attn."
    for name, part in zip("qkv", np.split(np.asarray(layer.qkv).T, splits), strict=True):
        yield f"{attention}{name}_proj.weight", part
    if layer.qkv_bias is not None:
        for name, part in zip("qkv", np.split(np.asarray(layer.qkv_bias), splits), strict=True):
            yield f"{attention}{name}_proj.bias", part
    if layer.q_norm is not None:
        yield f"{attention}q_norm.weight", layer.q_norm
        yield f"{attention}k_norm.weight", layer.k_norm
    yield f"{attention}o_proj.weight", np.asarray(layer.o).T
    if layer.o_bias is not None:
        yield f"{attention}o_proj.bias", layer.o_bias
    yield f"{prefix}post_attention_layernorm.weight", layer.mlp_norm
    gate, up = np.split(np.asarray(layer.gate_up).T, 2)
    yield f"{prefix}mlp.gate_proj.weight", gate
    yield f"{prefix}mlp.up_proj.weight", up
    yield f"{prefix}mlp.down_proj.weight", np.asarray(layer.down).T
