"""Tensors of Gemma 4's text models in Hugging Face checkpoints, alone or within the multimodal ones."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jspec.checkpoints.experts import name_mlp, read_mlp, read_stacked
from jspec.checkpoints.files import Tensors
from jspec.models.gemma4 import (
    ExpertParams,
    Gemma4,
    Gemma4LayerParams,
    Gemma4Params,
    PerLayerInputParams,
    PerLayerParams,
)
from jspec.models.moe import Routed

OTHER_MODALITIES = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
"""Beginnings of the names of tensors that text does not need."""
NORMS = {
    "attention_norm": "input_layernorm.weight",
    "attention_out_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}
"""The norms of a layer's weights, as this package and as checkpoints call them."""
_EXPERT_NORMS = {
    "norm": "pre_feedforward_layernorm_2.weight",
    "out_norm": "post_feedforward_layernorm_2.weight",
    "mlp_out_norm": "post_feedforward_layernorm_1.weight",
}


def read_params(config: Gemma4, tensors: Tensors) -> Gemma4Params:
    """The weights of a text model.

    Raises:
      CheckpointError: a tensor that is missing, has another shape than the configuration says, or that nothing reads.
    """
    names = tensors.names()
    wrapped = any(name.startswith("model.language_model.") for name in names)
    root, width = "model.language_model." if wrapped else "model.", config.hidden_size
    params = Gemma4Params(
        embed=tensors.device(root + "embed_tokens.weight", config.vocab_size, width),
        per_layer=_read_per_layer_inputs(config, tensors, root) if config.per_layer_size else None,
        layers=tuple(_read_layer(config, tensors, i, f"{root}layers.{i}.") for i in range(config.num_layers)),
        norm=tensors.device(root + "norm.weight", width),
    )
    # Some tied checkpoints hold the head all the same, and some hold projections that sharing layers do not use.
    spare = {"lm_head.weight"} | {
        f"{root}layers.{i}.self_attn.{part}.weight"
        for i in range(config.num_layers)
        if config.source(i) != i
        for part in ("k_proj", "v_proj", "k_norm")
    }
    tensors.refuse_unread("text model", lambda name: name in spare or name.startswith(OTHER_MODALITIES))
    return params


def _read_per_layer_inputs(config: Gemma4, tensors: Tensors, root: str) -> PerLayerInputParams:
    size = config.num_layers * config.per_layer_size
    return PerLayerInputParams(
        embed=tensors.device(root + "embed_tokens_per_layer.weight", config.vocab_size, size),
        projection=tensors.fused([(root + "per_layer_model_projection.weight", size)], config.hidden_size),
        norm=tensors.device(root + "per_layer_projection_norm.weight", config.per_layer_size),
    )


def _read_layer(config: Gemma4, tensors: Tensors, index: int, prefix: str) -> Gemma4LayerParams:
    kind, width, mlp = config.attention[index], config.hidden_size, config.mlp_width(index)
    query = config.num_heads * kind.head_dim
    own = config.source(index) == index
    outs = [(f"{prefix}self_attn.{name}_proj.weight", out) for name, out in _projections(config, index)]
    per_layer = None
    if size := config.per_layer_size:
        per_layer = PerLayerParams(
            gate=tensors.fused([(prefix + "per_layer_input_gate.weight", size)], width),
            out=tensors.fused([(prefix + "per_layer_projection.weight", width)], size),
            norm=tensors.device(prefix + "post_per_layer_input_norm.weight", width),
        )
    return Gemma4LayerParams(
        **{field: tensors.device(prefix + name, width) for field, name in NORMS.items()},
        qkv=tensors.fused(outs, width),
        q_norm=tensors.device(prefix + "self_attn.q_norm.weight", kind.head_dim),
        k_norm=tensors.device(prefix + "self_attn.k_norm.weight", kind.head_dim) if own else None,
        o=tensors.fused([(prefix + "self_attn.o_proj.weight", width)], query),
        **read_mlp(tensors, prefix + "mlp.", mlp, width),
        experts=None if config.experts is None else _read_experts(config.experts, tensors, prefix, width),
        per_layer=per_layer,
        scalar=tensors.device(prefix + "layer_scalar", 1).reshape(()),
    )


def _projections(config: Gemma4, index: int) -> list[tuple[str, int]]:
    """The letters of a layer's projections, which are one matrix here, and how many numbers each makes."""
    kind = config.attention[index]
    keys = kind.kv_heads * kind.head_dim
    made = "q" if config.source(index) != index else "qk" if kind.values_are_keys else "qkv"
    return [(name, config.num_heads * kind.head_dim if name == "q" else keys) for name in made]


def _read_experts(experts: Routed, tensors: Tensors, prefix: str, width: int) -> ExpertParams:
    count, inner = experts.router.count, experts.width
    return ExpertParams(
        **{field: tensors.device(prefix + name, width) for field, name in _EXPERT_NORMS.items()},
        router_scale=tensors.device(prefix + "router.scale", width),
        router=tensors.device(prefix + "router.proj.weight", count, width),
        scales=tensors.device(prefix + "router.per_expert_scale", count),
        **read_stacked(tensors, prefix + "experts.", count, inner, width),
    )


def named_tensors(config: Gemma4, params: Gemma4Params) -> Iterator[tuple[str, Any]]:
    """All weights under their Hugging Face names, [out, in]."""
    yield "model.embed_tokens.weight", params.embed
    if params.per_layer is not None:
        yield "model.embed_tokens_per_layer.weight", params.per_layer.embed
        yield "model.per_layer_model_projection.weight", np.asarray(params.per_layer.projection).T
        yield "model.per_layer_projection_norm.weight", params.per_layer.norm
    for index, layer in enumerate(params.layers):
        for name, tensor in _name_layer(config, index, layer):
            yield f"model.layers.{index}.{name}", tensor
    yield "model.norm.weight", params.norm


def _name_layer(config: Gemma4, index: int, layer: Gemma4LayerParams) -> Iterator[tuple[str, Any]]:
    for field, name in NORMS.items():
        yield name, getattr(layer, field)
    letters, sizes = zip(*_projections(config, index), strict=True)
    for letter, part in zip(letters, np.split(np.asarray(layer.qkv).T, np.cumsum(sizes)[:-1]), strict=True):
        yield f"self_attn.{letter}_proj.weight", part
    yield "self_attn.q_norm.weight", layer.q_norm
    if layer.k_norm is not None:
        yield "self_attn.k_norm.weight", layer.k_norm
    yield "self_attn.o_proj.weight", np.asarray(layer.o).T
    yield from name_mlp("mlp.", layer.gate_up, layer.down)
    yield "layer_scalar", np.asarray(layer.scalar).reshape(1)
    if layer.per_layer is not None:
        yield "per_layer_input_gate.weight", np.asarray(layer.per_layer.gate).T
        yield "per_layer_projection.weight", np.asarray(layer.per_layer.out).T
        yield "post_per_layer_input_norm.weight", layer.per_layer.norm
    if layer.experts is not None:
        for field, name in _EXPERT_NORMS.items():
            yield name, getattr(layer.experts, field)
        yield "router.scale", layer.experts.router_scale
        yield "router.proj.weight", layer.experts.router
        yield "router.per_expert_scale", layer.experts.scales
        yield "experts.gate_up_proj", np.asarray(layer.experts.gate_up).swapaxes(1, 2)
        yield "experts.down_proj", np.asarray(layer.experts.down).swapaxes(1, 2)
