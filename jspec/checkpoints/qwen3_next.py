"""Qwen3-Next and Qwen3.5's text models in Hugging Face checkpoints, alone or within the multimodal ones.

The two families lay out the projections of a gated delta net differently; both are read into one layout.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jspec.cache import RecurrentLayer
from jspec.checkpoints.config import (
    describe_experts,
    describe_shape,
    parse_dense_layers,
    parse_experts,
    read_eps,
    read_head_dim,
    read_layer_count,
    read_length,
    read_rope,
    reading,
)
from jspec.checkpoints.experts import name_layer_mlp, read_layer_mlp
from jspec.checkpoints.family import Family
from jspec.checkpoints.fields import Fields, refuse
from jspec.checkpoints.files import CheckpointError, on_device
from jspec.checkpoints.split import copy_heads
from jspec.checkpoints.tensors import HEAD, Tensors, named_leaf
from jspec.models.moe import Routed
from jspec.models.mtp_head import MtpParams
from jspec.models.qwen3_next import (
    AttentionParams,
    DeltaParams,
    Qwen3Next,
    Qwen3NextLayerParams,
    Qwen3NextParams,
)

ARCHITECTURES = {
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
"""Classes of `transformers` -> model_type."""
_TYPES = ("linear_attention", "full_attention")
_ROPE_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}


def parse_config(config: Fields) -> Qwen3Next:
    """The text model that a config.json describes.

    Raises:
      CheckpointError: an unsupported option, or a key that is missing, of the wrong type or out of bounds.
    """
    text = config.section("text_config")
    text = text if text.keys() else config
    _refuse_options(config, text)
    head_dim, heads = read_head_dim(text), text.read_int("num_attention_heads")
    theta, share = _parse_rope(text, head_dim)
    with reading(config.where):
        experts = _parse_experts(text)
        dense = () if experts is None else parse_dense_layers(text)
        # Models with experts in all layers have no MLP.
        needs_mlp = experts is None or bool(dense)
        inner = text.read_int("intermediate_size") if needs_mlp else text.read_int("intermediate_size", 0)
        return Qwen3Next(
            vocab_size=text.read_int("vocab_size"),
            hidden_size=text.read_int("hidden_size"),
            intermediate_size=inner,
            num_heads=heads,
            num_kv_heads=text.read_int("num_key_value_heads"),
            head_dim=head_dim,
            is_full_attention=_parse_layers(text),
            state=RecurrentLayer(
                key_heads=text.read_int("linear_num_key_heads"),
                value_heads=text.read_int("linear_num_value_heads"),
                key_dim=text.read_int("linear_key_head_dim"),
                value_dim=text.read_int("linear_value_head_dim"),
                kernel=text.read_int("linear_conv_kernel_dim"),
            ),
            max_length=read_length(text),
            experts=experts,
            dense_layers=dense,
            rms_norm_eps=read_eps(text),
            rope_theta=theta,
            rotary_share=share,
            tie_embeddings=text.read_flag("tie_word_embeddings", config.read_flag("tie_word_embeddings", False)),
        )


def _refuse_options(config: Fields, text: Fields) -> None:
    wrong = text.unsupported(
        {
            "attention_bias": (False,),
            "use_sliding_window": (False,),
            "hidden_act": ("silu",),
            "attn_output_gate": (True,),
            "mamba_ssm_dtype": ("float32",),
            # Of the norm after recurrent layers, not of attention.
            "output_gate_type": ("swish", "silu"),
        }
    )
    if config.section("quantization_config").keys() or text.section("quantization_config").keys():
        wrong.append("quantization_config")
    refuse(config.where, wrong)


def _parse_rope(text: Fields, head_dim: int) -> tuple[float, float]:
    """The base, and the share of the dimensions that rotate.

    `mrope_section` can be ignored: the several positions of a token only differ in images.
    """
    _, theta, rope = read_rope(text, "default", "mrope")
    if not set(rope.keys()) <= _ROPE_KEYS:
        raise CheckpointError(
            f"{text.where}: rope_parameters with the keys {rope.keys()} are not supported; must be among "
            f"{', '.join(sorted(_ROPE_KEYS))}"
        )
    shares = [each.optional_number("partial_rotary_factor", above=0, most=1) for each in (rope, text)]
    share = next((each for each in shares if each is not None), 0.25)
    rotary = int(head_dim * share)
    if rotary % 2 or (head_dim - rotary) % 2 or not rotary:
        raise CheckpointError(
            f"{text.where}: partial_rotary_factor={share}: must rotate a positive, even number of the {head_dim} "
            "dimensions of a head, and leave an even number"
        )
    return theta, share


def _parse_layers(text: Fields) -> tuple[bool, ...]:
    """For each layer, whether it attends to all tokens."""
    count, every = read_layer_count(text), text.read_int("full_attention_interval", 4)
    types = text.optional_texts("layer_types") or tuple(_TYPES[(i + 1) % every == 0] for i in range(count))
    if len(types) != count or not set(types) <= set(_TYPES):
        raise text.wrong("layer_types", list(types), f"must be {count} of {', '.join(_TYPES)}")
    return tuple(name == "full_attention" for name in types)


def _parse_experts(text: Fields) -> Routed | None:
    count = text.read_int("num_experts", 0, least=0)
    if not count:
        return None
    # Qwen3.5 has no key for the normalization of weights; they are normalized.
    width = text.read_int("shared_expert_intermediate_size")
    return parse_experts(text, count, normalize=True, shared_width=width)


def describe(config: Qwen3Next) -> dict[str, Any]:
    """The config.json of a text model: Qwen3-Next's if there are experts, otherwise Qwen3.5's."""
    name = "Qwen3_5ForCausalLM" if config.experts is None else "Qwen3NextForCausalLM"
    rope = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": config.rotary_share}
    raw = describe_shape(name, ARCHITECTURES[name], config) | {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "layer_types": [_TYPES[full] for full in config.is_full_attention],
        "linear_num_key_heads": config.state.key_heads,
        "linear_num_value_heads": config.state.value_heads,
        "linear_key_head_dim": config.state.key_dim,
        "linear_value_head_dim": config.state.value_dim,
        "linear_conv_kernel_dim": config.state.kernel,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "hidden_act": "silu",
    }
    if config.experts is not None:
        raw |= describe_experts(config.experts, config.dense_layers)
        raw["shared_expert_intermediate_size"] = config.experts.shared_width
    return raw


OTHER_MODALITIES = "model.visual."
"""Prefix of tensors that text does not need."""
MTP = "mtp."
"""Prefix of the tensors of the MTP head."""


def with_mtp(config: Qwen3Next, tensors: Tensors, wanted: bool) -> Qwen3Next:
    """The configuration with its MTP head, or without if it is not wanted or has no tensors.

    Checkpoints written by `transformers` never have one, whatever config.json declares.
    """
    found = any(name.startswith(MTP) for name in tensors.names())
    if not wanted:
        tensors.leave(MTP)
    return dataclasses.replace(config, mtp_layers=int(found and wanted))


def read_params(config: Qwen3Next, tensors: Tensors) -> Qwen3NextParams:
    """The weights of a text model.

    Raises:
      CheckpointError: a tensor is missing, has an unexpected shape, or is not used.
    """
    names = tensors.names()
    wrapped = any(name.startswith("model.language_model.") for name in names)
    root, width = "model.language_model." if wrapped else "model.", config.hidden_size
    head = None if config.tie_embeddings else tensors.fused([(HEAD, config.vocab_size)], width, named_leaf("lm_head"))
    params = Qwen3NextParams(
        embed=tensors.device(root + "embed_tokens.weight", config.vocab_size, width, options=named_leaf("embed")),
        layers=tuple(
            _read_layer(config, tensors, f"{root}layers.{i}.", full=full, experts=config.layer_experts(i))
            for i, full in enumerate(config.is_full_attention)
        ),
        norm=_centered(tensors, root + "norm.weight", width),
        lm_head=head,
        mtp=tuple(_read_mtp(config, tensors) for _ in range(config.mtp_layers)),
    )
    if config.tie_embeddings:
        tensors.compare_head(root + "embed_tokens.weight", config.vocab_size, width)
    tensors.refuse_unread("text model", lambda name: name.startswith(OTHER_MODALITIES))
    return params


def _read_mtp(config: Qwen3Next, tensors: Tensors) -> MtpParams:
    """The MTP head. Its layer attends to all tokens, and has experts if the model has any."""
    width = config.hidden_size
    return MtpParams(
        token_norm=_centered(tensors, MTP + "pre_fc_norm_embedding.weight", width),
        hidden_norm=_centered(tensors, MTP + "pre_fc_norm_hidden.weight", width),
        projection=tensors.fused([(MTP + "fc.weight", width)], 2 * width, named_leaf("projection")),
        layer=_read_layer(config, tensors, MTP + "layers.0.", full=True, experts=config.experts),
        norm=_centered(tensors, MTP + "norm.weight", width),
    )


def _centered(tensors: Tensors, name: str, size: int) -> jax.Array:
    """A norm's weight as 1 + w in float32, which saves the sum at each use."""
    return on_device(1 + tensors.stored(name, size).astype(np.float32))


def _read_layer(
    config: Qwen3Next, tensors: Tensors, prefix: str, *, full: bool, experts: Routed | None
) -> Qwen3NextLayerParams:
    width = config.hidden_size
    if full:
        mixer = _read_attention(config, tensors, prefix + "self_attn.")
    else:
        mixer = _read_delta(config, tensors, prefix + "linear_attn.")
    return Qwen3NextLayerParams(
        mixer_norm=_centered(tensors, prefix + "input_layernorm.weight", width),
        mixer=mixer,
        mlp_norm=_centered(tensors, prefix + "post_attention_layernorm.weight", width),
        **read_layer_mlp(experts, tensors, prefix + "mlp.", config.intermediate_size, width),
    )


def _read_attention(config: Qwen3Next, tensors: Tensors, prefix: str) -> AttentionParams:
    heads, kv_heads, dim, width = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
    order = head_order(config)
    q, gate = np.split(
        tensors.read(prefix + "q_proj.weight", 2 * heads * dim, width).reshape(heads, 2 * dim, width), 2, 1
    )
    k, v = (tensors.read(f"{prefix}{name}_proj.weight", kv_heads * dim, width) for name in "kv")
    k = k.reshape(kv_heads, dim, width)[:, order]
    q, k, v, gate = (part.reshape(-1, width).T for part in (q[:, order], k, v, gate))
    return AttentionParams(
        qkv=tensors.put(named_leaf("qkv"), [*copy_heads([q, k, v], kv_heads=kv_heads, devices=config.tensor), gate]),
        q_norm=_centered(tensors, prefix + "q_norm.weight", dim)[order],
        k_norm=_centered(tensors, prefix + "k_norm.weight", dim)[order],
        o=tensors.fused([(prefix + "o_proj.weight", width)], heads * dim, named_leaf("o")),
    )


def head_order(config: Qwen3Next) -> np.ndarray:
    """For each dimension of a query or key head here, its index in the checkpoint's head.

    There the first ones rotate, in pairs (i, i + r/2) of r. Here all of D are pairs (i, i + D/2), rotating ones first.
    Queries and keys are in one order, so their products are the same.
    """
    rotary, dim = config.rotary_dim, config.head_dim
    index = np.arange(dim)
    turning, still = index[:rotary].reshape(2, -1), index[rotary:].reshape(2, -1)
    return np.concatenate([turning, still], axis=1).reshape(-1)


def _read_delta(config: Qwen3Next, tensors: Tensors, prefix: str) -> DeltaParams:
    state, width = config.state, config.hidden_size
    keys, made, count = state.key_heads * state.key_dim, state.value_heads * state.value_dim, state.value_heads
    grouped = prefix + "in_proj_qkvz.weight" in tensors.names()
    parts = _grouped_parts(config, tensors, prefix) if grouped else _plain_parts(config, tensors, prefix)
    conv = tensors.read(prefix + "conv1d.weight", state.channels, 1, state.kernel)[:, 0].T
    return DeltaParams(
        qkv=tensors.put(named_leaf("qkv"), [part.T for part in parts]),
        conv=tensors.put(named_leaf("conv"), np.split(conv, [keys, 2 * keys], axis=-1)),
        log_rate=tensors.put(named_leaf("log_rate"), [tensors.stored(prefix + "A_log", count).astype(np.float32)]),
        rate_bias=tensors.put(named_leaf("rate_bias"), [tensors.stored(prefix + "dt_bias", count).astype(np.float32)]),
        norm=tensors.device(prefix + "norm.weight", state.value_dim),
        o=tensors.fused([(prefix + "out_proj.weight", width)], made, named_leaf("o")),
    )


def _plain_parts(config: Qwen3Next, tensors: Tensors, prefix: str) -> list[np.ndarray]:
    """Qwen3.5's projections, [out, in], in the order of `DeltaParams.qkv`: queries, keys, values and the others."""
    state, width = config.state, config.hidden_size
    keys, made, count = state.key_heads * state.key_dim, state.value_heads * state.value_dim, state.value_heads
    outs = {"qkv": state.channels, "z": made, "b": count, "a": count}
    mixed, *others = (tensors.read(f"{prefix}in_proj_{name}.weight", out, width) for name, out in outs.items())
    return [*np.split(mixed, [keys, 2 * keys]), *others]


def _grouped_parts(config: Qwen3Next, tensors: Tensors, prefix: str) -> list[np.ndarray]:
    """Qwen3-Next's projections, the same parts; the checkpoint groups all rows by key head."""
    state, width, heads = config.state, config.hidden_size, config.state.key_heads
    made, count = state.value_heads * state.value_dim, state.value_heads
    qkvz = tensors.read(prefix + "in_proj_qkvz.weight", state.channels + made, width).reshape(heads, -1, width)
    ba = tensors.read(prefix + "in_proj_ba.weight", 2 * count, width).reshape(heads, -1, width)
    ends = np.cumsum([state.key_dim, state.key_dim, made // heads])
    parts = [*np.split(qkvz, ends, axis=1), *np.split(ba, 2, axis=1)]
    return [part.reshape(-1, width) for part in parts]


def named_tensors(config: Qwen3Next, params: Qwen3NextParams) -> Iterator[tuple[str, Any]]:
    """All weights under their Hugging Face names, [out, in]: Qwen3-Next's if there are experts, otherwise Qwen3.5's."""
    yield "model.embed_tokens.weight", params.embed
    for index, layer in enumerate(params.layers):
        yield from _name_layer(config, layer, f"model.layers.{index}.")
    yield "model.norm.weight", _offset(params.norm)
    if params.lm_head is not None:
        yield "lm_head.weight", np.asarray(params.lm_head).T
    for head in params.mtp:
        yield MTP + "pre_fc_norm_embedding.weight", _offset(head.token_norm)
        yield MTP + "pre_fc_norm_hidden.weight", _offset(head.hidden_norm)
        yield MTP + "fc.weight", np.asarray(head.projection).T
        yield from _name_layer(config, head.layer, MTP + "layers.0.")
        yield MTP + "norm.weight", _offset(head.norm)


def _offset(norm: ArrayLike) -> np.ndarray:
    """The inverse of `_centered`."""
    return np.asarray(norm) - 1


def _name_layer(config: Qwen3Next, layer: Qwen3NextLayerParams, prefix: str) -> Iterator[tuple[str, Any]]:
    yield prefix + "input_layernorm.weight", _offset(layer.mixer_norm)
    yield prefix + "post_attention_layernorm.weight", _offset(layer.mlp_norm)
    if isinstance(layer.mixer, AttentionParams):
        yield from _name_attention(config, layer.mixer, prefix + "self_attn.")
    else:
        yield from _name_delta(config, layer.mixer, prefix + "linear_attn.")
    yield from name_layer_mlp(layer, config.experts, prefix + "mlp.")


def _name_attention(config: Qwen3Next, mixer: AttentionParams, prefix: str) -> Iterator[tuple[str, Any]]:
    heads, kv_heads, back = config.num_heads, config.num_kv_heads, np.argsort(head_order(config))
    made = np.asarray(mixer.qkv).T.reshape(-1, config.head_dim, config.hidden_size)
    q, k, v, gate = np.split(made, np.cumsum([heads, kv_heads, kv_heads]))
    parts = {"q": np.concatenate([q[:, back], gate], axis=1), "k": k[:, back], "v": v}
    for name, part in parts.items():
        yield f"{prefix}{name}_proj.weight", part.reshape(-1, config.hidden_size)
    yield prefix + "q_norm.weight", _offset(mixer.q_norm)[back]
    yield prefix + "k_norm.weight", _offset(mixer.k_norm)[back]
    yield prefix + "o_proj.weight", np.asarray(mixer.o).T


def _name_delta(config: Qwen3Next, mixer: DeltaParams, prefix: str) -> Iterator[tuple[str, Any]]:
    state, width = config.state, config.hidden_size
    keys, values = state.key_heads * state.key_dim, state.value_heads * state.value_dim
    sizes = [keys, keys, values, values, state.value_heads, state.value_heads]
    parts = np.split(np.asarray(mixer.qkv).T, np.cumsum(sizes)[:-1])
    if config.experts is None:
        named = {"qkv": parts[:3], "z": parts[3:4], "b": parts[4:5], "a": parts[5:]}
        for name, some in named.items():
            yield f"{prefix}in_proj_{name}.weight", np.concatenate(some)
    else:
        for name, some in {"qkvz": parts[:4], "ba": parts[4:]}.items():
            grouped = [part.reshape(state.key_heads, -1, width) for part in some]
            yield f"{prefix}in_proj_{name}.weight", np.concatenate(grouped, axis=1).reshape(-1, width)
    yield prefix + "conv1d.weight", np.asarray(mixer.conv).T[:, None]
    yield prefix + "A_log", mixer.log_rate
    yield prefix + "dt_bias", mixer.rate_bias
    yield prefix + "norm.weight", mixer.norm
    yield prefix + "out_proj.weight", np.asarray(mixer.o).T


FAMILY = Family(Qwen3Next, ARCHITECTURES, parse_config, describe, read_params, named_tensors, with_mtp=with_mtp)
