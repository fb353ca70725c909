"""gpt-oss in Hugging Face checkpoints: config.json and tensors, whose experts may be in MXFP4."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from jspec.checkpoints import mxfp4
from jspec.checkpoints.config import (
    describe_shape,
    describe_yarn,
    parse_yarn,
    read_eps,
    read_head_dim,
    read_layer_count,
    read_length,
    reading,
)
from jspec.checkpoints.family import Family
from jspec.checkpoints.fields import MOST_LENGTH, MOST_NUMBER, Fields, refuse
from jspec.checkpoints.files import on_device
from jspec.checkpoints.llama import read_heads
from jspec.checkpoints.split import copy_heads
from jspec.checkpoints.tensors import Tensors, named_leaf
from jspec.models.gpt_oss import BiasedExperts, GptOss, GptOssLayerParams, GptOssParams
from jspec.models.moe import Routed
from jspec.models.router import Router

ARCHITECTURES = {"GptOssForCausalLM": "gpt_oss"}
"""Classes of `transformers` -> model_type."""
_SLIDING, _FULL = "sliding_attention", "full_attention"
_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 128}
"""What keys mean that are missing."""


def parse_config(config: Fields) -> GptOss:
    """The model that a config.json of either generation describes.

    Raises:
      CheckpointError: an unsupported option, or a key that is missing, of the wrong type or out of bounds.
    """
    mxfp4.is_mxfp4(config)
    config = config.with_defaults(_DEFAULTS)
    refuse(config.where, config.unsupported({"hidden_act": ("silu",)}))
    heads, kv_heads = read_heads(config)
    scalings = [config.section(name) for name in ("rope_parameters", "rope_scaling")]
    if not any(each.has("rope_theta") for each in (config, *scalings)):
        config.read_number("rope_theta")  # the families' default is not this one's
    theta, scaling = parse_yarn(config)
    with reading(config.where):
        return GptOss(
            vocab_size=config.read_int("vocab_size"),
            hidden_size=config.read_int("hidden_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=read_head_dim(config),
            windows=_parse_windows(config),
            max_length=read_length(config),
            experts=Routed(
                Router(config.read_int("num_local_experts"), config.read_int("num_experts_per_tok"), normalize=True),
                config.read_int("intermediate_size"),
            ),
            rms_norm_eps=read_eps(config),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=config.read_flag("tie_word_embeddings", False),
            attention_bias=config.read_flag("attention_bias", True),
            gate_limit=config.read_number("swiglu_limit", 7.0, above=0, most=MOST_NUMBER),
            gate_slope=config.read_number("swiglu_alpha", 1.702, above=0, most=MOST_NUMBER),
        )


def _parse_windows(config: Fields) -> tuple[int | None, ...]:
    """The window of each layer; if the file does not list them, every second layer is a full one."""
    count = read_layer_count(config)
    types = config.optional_texts("layer_types") or tuple((_SLIDING, _FULL)[i % 2] for i in range(count))
    if len(types) != count or not set(types) <= {_SLIDING, _FULL}:
        raise config.wrong("layer_types", list(types), f"must be {count} of {_SLIDING}, {_FULL}")
    return tuple(config.read_int("sliding_window", most=MOST_LENGTH) if kind == _SLIDING else None for kind in types)


def describe(config: GptOss) -> dict[str, Any]:
    """The config.json of a model, in the newer generation's format."""
    router = config.experts.router
    raw = describe_shape("GptOssForCausalLM", ARCHITECTURES["GptOssForCausalLM"], config) | {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "layer_types": [_FULL if window is None else _SLIDING for window in config.windows],
        "sliding_window": next((window for window in config.windows if window is not None), None),
        "num_local_experts": router.count,
        "num_experts_per_tok": router.chosen,
        "rope_parameters": describe_yarn(config.rope_theta, config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "swiglu_limit": config.gate_limit,
        "swiglu_alpha": config.gate_slope,
        "hidden_act": "silu",
    }
    return raw


def read_params(config: GptOss, tensors: Tensors) -> GptOssParams:
    """The weights of a model.

    Raises:
      CheckpointError: a tensor is missing, has an unexpected shape, or is not used.
    """
    width, vocabulary = config.hidden_size, config.vocab_size
    embed = tensors.device("model.embed_tokens.weight", vocabulary, width, options=named_leaf("embed"))
    head = (
        None if config.tie_embeddings else tensors.fused([("lm_head.weight", vocabulary)], width, named_leaf("lm_head"))
    )
    layers = tuple(_read_layer(config, tensors, f"model.layers.{index}.") for index in range(config.num_layers))
    params = GptOssParams(embed, layers, tensors.device("model.norm.weight", width), head)
    if config.tie_embeddings:
        tensors.compare_head("model.embed_tokens.weight", vocabulary, width)
    tensors.refuse_unread("model")
    return params


def _read_layer(config: GptOss, tensors: Tensors, prefix: str) -> GptOssLayerParams:
    width, attention = config.hidden_size, prefix + "self_attn."
    outs = _projections(config)
    copies = partial(copy_heads, kv_heads=config.num_kv_heads, devices=config.tensor)
    bias = [tensors.read(f"{attention}{name}_proj.bias", out) for name, out in outs] if config.attention_bias else None
    weights = [tensors.read(f"{attention}{name}_proj.weight", out, width, transpose=True) for name, out in outs]
    return GptOssLayerParams(
        attention_norm=tensors.device(prefix + "input_layernorm.weight", width),
        qkv=tensors.put(named_leaf("qkv"), copies(weights)),
        qkv_bias=None if bias is None else tensors.put(named_leaf("qkv_bias"), copies(bias)),
        sinks=tensors.device(attention + "sinks", config.num_heads, options=named_leaf("sinks")),
        o=tensors.fused([(attention + "o_proj.weight", width)], outs[0][1], named_leaf("o")),
        o_bias=tensors.device(attention + "o_proj.bias", width) if config.attention_bias else None,
        mlp_norm=tensors.device(prefix + "post_attention_layernorm.weight", width),
        experts=_read_experts(config, tensors, prefix + "mlp.", width),
    )


def _projections(config: GptOss) -> list[tuple[str, int]]:
    """The parts of a layer's fused projection: letter and width of each."""
    keys = config.num_kv_heads * config.head_dim
    return [("q", config.num_heads * config.head_dim), ("k", keys), ("v", keys)]


def _read_experts(config: GptOss, tensors: Tensors, prefix: str, width: int) -> BiasedExperts:
    count, inner, own = config.experts.router.count, config.experts.width, prefix + "experts."
    tensors.expect(own + "gate_up_proj", count, width, 2 * inner)
    tensors.expect(own + "down_proj", count, inner, width)
    router = [tensors.stored(prefix + "router.weight", count, width), tensors.stored(prefix + "router.bias", count)]
    gate_up = tensors.read(own + "gate_up_proj", count, width, 2 * inner)
    bias = tensors.read(own + "gate_up_proj_bias", count, 2 * inner)
    down = tensors.read(own + "down_proj", count, inner, width)
    halves, biases = [gate_up[:, :, first::2] for first in (0, 1)], [bias[:, first::2] for first in (0, 1)]
    if filler := config.filler:
        halves, down = [half.filled(0, filler) for half in halves], down.filled(filler, 0)
        biases = [np.pad(half, ((0, 0), (0, filler))) for half in biases]
    return BiasedExperts(
        *(on_device(part.astype(np.float32)) for part in router),
        gate_up=tensors.put(named_leaf("gate_up"), halves),
        gate_up_bias=tensors.put(named_leaf("gate_up_bias"), biases),
        down=tensors.put(named_leaf("down"), [down]),
        down_bias=tensors.device(own + "down_proj_bias", count, width),
    )


def named_tensors(config: GptOss, params: GptOssParams) -> Iterator[tuple[str, Any]]:
    """All weights under their Hugging Face names, [out, in], and matrices of experts [experts, in, out]."""
    yield "model.embed_tokens.weight", params.embed
    for index, layer in enumerate(params.layers):
        for name, tensor in _name_layer(config, layer):
            yield f"model.layers.{index}.{name}", tensor
    yield "model.norm.weight", params.norm
    if params.lm_head is not None:
        yield "lm_head.weight", np.asarray(params.lm_head).T


def _name_layer(config: GptOss, layer: GptOssLayerParams) -> Iterator[tuple[str, Any]]:
    letters, sizes = zip(*_projections(config), strict=True)
    splits = np.cumsum(sizes)[:-1]
    yield "input_layernorm.weight", layer.attention_norm
    for letter, part in zip(letters, np.split(np.asarray(layer.qkv).T, splits), strict=True):
        yield f"self_attn.{letter}_proj.weight", part
    if layer.qkv_bias is not None:
        for letter, part in zip(letters, np.split(np.asarray(layer.qkv_bias), splits), strict=True):
            yield f"self_attn.{letter}_proj.bias", part
    yield "self_attn.sinks", layer.sinks
    yield "self_attn.o_proj.weight", np.asarray(layer.o).T
    if layer.o_bias is not None:
        yield "self_attn.o_proj.bias", layer.o_bias
    yield "post_attention_layernorm.weight", layer.mlp_norm
    experts = layer.experts
    yield "mlp.router.weight", experts.router
    yield "mlp.router.bias", experts.router_bias
    yield "mlp.experts.gate_up_proj", _interleaved(np.asarray(experts.gate_up))
    yield "mlp.experts.gate_up_proj_bias", _interleaved(np.asarray(experts.gate_up_bias))
    yield "mlp.experts.down_proj", experts.down
    yield "mlp.experts.down_proj_bias", experts.down_bias


def _interleaved(fused: np.ndarray) -> np.ndarray:
    """The columns of the gate and of the other half by turns, as checkpoints have them."""
    return np.stack(np.split(fused, 2, axis=-1), axis=-1).reshape(fused.shape)


def as_stored(config: GptOss, tensors: Tensors) -> GptOss:
    """The configuration whose experts, if they stay in blocks with a scale, are split by whole blocks."""
    blocks = isinstance(tensors, mxfp4.Mxfp4Tensors) and tensors.weights is None
    return config.with_whole_groups(mxfp4.BLOCK) if blocks else config


FAMILY = Family(
    GptOss,
    ARCHITECTURES,
    parse_config,
    describe,
    read_params,
    named_tensors,
    open_tensors=mxfp4.open_tensors,
    as_stored=as_stored,
)
