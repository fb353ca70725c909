"""Hugging Face checkpoint directories: reading them into a configuration and weights, and writing them.

Reading takes one tensor at a time from the memory-mapped files to the device, so that the host never holds the model.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jspec.checkpoints import (
    block_scaled,
    deepseek,
    deepseek_config,
    gemma4,
    gemma4_config,
    qwen3_next,
    qwen3_next_config,
)
from jspec.checkpoints.config import describe_experts, family_of, parse_dense_layers, parse_experts, read_rope, reading
from jspec.checkpoints.experts import name_layer_mlp, read_layer_mlp
from jspec.checkpoints.files import DTYPES, CheckpointError, Tensors, read_json, resolve_dtype, write_shards
from jspec.models import Deepseek, Gemma4, LanguageModel, Qwen3Next
from jspec.models.layers import Llama3Rope
from jspec.models.llama import LayerParams, Llama, LlamaParams
from jspec.models.moe import Routed

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
"""Classes of `transformers` that `Llama` is for -> model_type; the modules of other families have theirs."""


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
        else:
            config = parse_config(raw, where=where)
            params = _read_params(config, tensors)
    return Checkpoint(config, params, _read_eos(directory, raw))


def _open(directory: Path, raw: Mapping[str, Any], dtype: Any, where: str) -> Tensors:
    """The tensors of a checkpoint, widened as they are read where they are block-scaled ones of DeepSeek."""
    block = block_scaled.parse_block(raw, where) if family_of(raw, deepseek_config.ARCHITECTURES) else None
    return Tensors(directory, dtype) if block is None else block_scaled.BlockScaledTensors(directory, dtype, block)


def parse_config(raw: Mapping[str, Any], *, where: str = "config.json") -> Llama:
    """The Llama or Qwen3 model, dense or with experts, that a config.json describes, of either generation.

    Raises:
      CheckpointError: an unsupported architecture or option, or a key that is missing or of the wrong type.
    """
    family = family_of(raw, ARCHITECTURES)
    if family is None:
        architectures = raw.get("architectures") or []
        own = (gemma4_config, deepseek_config, qwen3_next_config)
        known = ", ".join([*ARCHITECTURES, *(name for family in own for name in family.ARCHITECTURES)])
        raise CheckpointError(f"{where}: architectures={architectures} is not supported; there are {known}")
    refuse_options(raw, where)
    with reading(where):
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
            qk_norm=family != "llama",
            attention_bias=bool(raw.get("attention_bias", False)),
            **_parse_experts(raw, family),
        )
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads={config.num_heads} is no multiple of "
            f"num_key_value_heads={config.num_kv_heads}"
        )
    return config


def _parse_experts(raw: Mapping[str, Any], family: str) -> dict[str, Any]:
    """What a config.json says of experts, and of the layers that have none."""
    count = raw.get("num_experts", raw.get("num_local_experts"))
    if family != "qwen3_moe" or count == 0:
        return {}
    if count is None:
        raise KeyError("num_experts")
    return {"experts": parse_experts(raw, int(count), normalize=False), "dense_layers": parse_dense_layers(raw)}


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
    kind, theta, rope = read_rope(raw)
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
    for source in (raw, raw.get("text_config") or {}, read_json(generation) if generation.exists() else {}):
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))


def _read_params(config: Llama, tensors: Tensors) -> LlamaParams:
    width = config.hidden_size
    embed = tensors.device("model.embed_tokens.weight", config.vocab_size, width)
    head = None
    if not config.tie_embeddings:
        head = tensors.fused([("lm_head.weight", config.vocab_size)], width)
    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        norm, bias = tensors.device(prefix + "input_layernorm.weight", width), config.attention_bias
        options = {"qkv_bias": bias, "o_bias": bias, "qk_norm": config.qk_norm, "experts": config.layer_experts(index)}
        layers.append(read_layer(config, tensors, prefix, norm, reads=width, **options))
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
    experts: Routed | None = None,
) -> LayerParams:
    """One decoder layer, whose names start with `prefix`.

    Args:
      config: says hidden_size, intermediate_size, num_heads, num_kv_heads and head_dim.
      attention_norm: becomes the layer's; where it stands depends on the model.
      reads: the width of what its attention reads.
      qkv_bias, o_bias, qk_norm: which optional weights there are.
      experts: those that the layer has in place of an MLP.

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
        **read_layer_mlp(experts, tensors, prefix + "mlp.", mlp, width),
    )


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
        raw, named = describe(config), _named_tensors(config, params)
    raw["dtype"] = dtype
    if eos:
        raw["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    write_shards(directory, named, DTYPES[dtype], max_shard_bytes)


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
    """The config.json of a Llama or Qwen3 model, of the newer generation."""
    family = "qwen3_moe" if config.experts else "qwen3" if config.qk_norm else "llama"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= describe_scaling(config.rope_scaling)
    raw = {
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
    return raw | (describe_experts(config.experts, config.dense_layers) if config.experts else {})


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

    config: says num_heads, num_kv_heads, head_dim and, for a layer with experts, experts.
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
    yield from name_layer_mlp(layer, config, prefix + "mlp.")
