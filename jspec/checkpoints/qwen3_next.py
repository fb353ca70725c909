"""Tensors of Qwen3-Next and Qwen3.5 in Hugging Face checkpoints, alone or within the multimodal ones.

The two lay out the projections of a gated delta net differently; what is read becomes one layout.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jspec.checkpoints.experts import name_layer_mlp, read_layer_mlp
from jspec.checkpoints.files import Tensors, on_device
from jspec.models.moe import Routed
from jspec.models.mtp_head import MtpParams
from jspec.models.qwen3_next import (
    AttentionParams,
    DeltaParams,
    Qwen3Next,
    Qwen3NextLayerParams,
    Qwen3NextParams,
)

OTHER_MODALITIES = "model.visual."
"""Beginning of the names of tensors that text does not need."""
MTP = "mtp."
"""Beginning of the names of the tensors of the head for multi-token prediction."""


def with_mtp_of(config: Qwen3Next, tensors: Tensors, wanted: bool) -> Qwen3Next:
    """The configuration with the head for multi-token prediction that is read: none where it is not wanted, and else
    the one that there are tensors of.

    Checkpoints that `transformers` has written hold none, whatever config.json says.
    """
    found = any(name.startswith(MTP) for name in tensors.names())
    if not wanted:
        tensors.leave(MTP)
    return dataclasses.replace(config, mtp_layers=int(found and wanted))


def read_params(config: Qwen3Next, tensors: Tensors) -> Qwen3NextParams:
    """The weights of a text model.

    Raises:
      CheckpointError: a tensor that is missing, has another shape than the configuration says, or that nothing reads.
    """
    names = tensors.names()
    wrapped = any(name.startswith("model.language_model.") for name in names)
    root, width = "model.language_model." if wrapped else "model.", config.hidden_size
    head = None if config.tie_embeddings else tensors.fused([("lm_head.weight", config.vocab_size)], width)
    params = Qwen3NextParams(
        embed=tensors.device(root + "embed_tokens.weight", config.vocab_size, width),
        layers=tuple(
            _read_layer(config, tensors, f"{root}layers.{i}.", full=full, experts=config.layer_experts(i))
            for i, full in enumerate(config.full)
        ),
        norm=_centered(tensors, root + "norm.weight", width),
        lm_head=head,
        mtp=tuple(_read_mtp(config, tensors) for _ in range(config.mtp_layers)),
    )
    # Some tied checkpoints hold the head all the same.
    tensors.refuse_unread("text model", lambda name: name == "lm_head.weight" or name.startswith(OTHER_MODALITIES))
    return params


def _read_mtp(config: Qwen3Next, tensors: Tensors) -> MtpParams:
    """The head for multi-token prediction. Its layer attends to all tokens; it has experts where the model has some."""
    width = config.hidden_size
    return MtpParams(
        token_norm=_centered(tensors, MTP + "pre_fc_norm_embedding.weight", width),
        hidden_norm=_centered(tensors, MTP + "pre_fc_norm_hidden.weight", width),
        projection=tensors.fused([(MTP + "fc.weight", width)], 2 * width),
        layer=_read_layer(config, tensors, MTP + "layers.0.", full=True, experts=config.experts),
        norm=_centered(tensors, MTP + "norm.weight", width),
    )


def _centered(tensors: Tensors, name: str, size: int) -> jax.Array:
    """A norm's weight, 1 + w in float32: the sum that would else be made, in that precision, at each use."""
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
    parts = (q[:, order], k, v, gate)
    return AttentionParams(
        projection=_fused(*(part.reshape(-1, width) for part in parts)),
        q_norm=_centered(tensors, prefix + "q_norm.weight", dim)[order],
        k_norm=_centered(tensors, prefix + "k_norm.weight", dim)[order],
        out=tensors.fused([(prefix + "o_proj.weight", width)], heads * dim),
    )


def head_order(config: Qwen3Next) -> np.ndarray:
    """Where in a checkpoint's head the dimensions of a query or key head stand here.

    There the first ones rotate, in pairs (i, i + r/2) of r. Here all of D are pairs (i, i + D/2), rotating ones first.
    Queries and keys are in one order, so their products are the same.
    """
    rotary, dim = config.rotary_dim, config.head_dim
    index = np.arange(dim)
    turning, still = index[:rotary].reshape(2, -1), index[rotary:].reshape(2, -1)
    return np.concatenate([turning, still], axis=1).reshape(-1)


def _read_delta(config: Qwen3Next, tensors: Tensors, prefix: str) -> DeltaParams:
    state, width = config.state, config.hidden_size
    made, count = state.value_heads * state.value_dim, state.value_heads
    grouped = prefix + "in_proj_qkvz.weight" in tensors.names()
    parts = _grouped_parts(config, tensors, prefix) if grouped else _plain_parts(config, tensors, prefix)
    conv = tensors.read(prefix + "conv1d.weight", state.channels, 1, state.kernel)
    return DeltaParams(
        projection=_fused(*parts),
        conv=on_device(np.ascontiguousarray(conv[:, 0].T)),
        log_rate=on_device(tensors.stored(prefix + "A_log", count).astype(np.float32)),
        rate_bias=on_device(tensors.stored(prefix + "dt_bias", count).astype(np.float32)),
        norm=tensors.device(prefix + "norm.weight", state.value_dim),
        out=tensors.fused([(prefix + "out_proj.weight", width)], made),
    )


def _plain_parts(config: Qwen3Next, tensors: Tensors, prefix: str) -> list[np.ndarray]:
    """Qwen3.5's projections, [out, in], in the order of `DeltaParams.projection`."""
    state, width = config.state, config.hidden_size
    made, count = state.value_heads * state.value_dim, state.value_heads
    outs = {"qkv": state.channels, "z": made, "b": count, "a": count}
    return [tensors.read(f"{prefix}in_proj_{name}.weight", out, width) for name, out in outs.items()]


def _grouped_parts(config: Qwen3Next, tensors: Tensors, prefix: str) -> list[np.ndarray]:
    """Qwen3-Next's projections, the same; there, all that belongs to a key head stands together."""
    state, width, heads = config.state, config.hidden_size, config.state.key_heads
    made, count = state.value_heads * state.value_dim, state.value_heads
    qkvz = tensors.read(prefix + "in_proj_qkvz.weight", state.channels + made, width).reshape(heads, -1, width)
    ba = tensors.read(prefix + "in_proj_ba.weight", 2 * count, width).reshape(heads, -1, width)
    ends = np.cumsum([state.key_dim, state.key_dim, made // heads])
    parts = [*np.split(qkvz, ends, axis=1), *np.split(ba, 2, axis=1)]
    return [part.reshape(-1, width) for part in parts]


def _fused(*parts: np.ndarray) -> jax.Array:
    """Weights [out, in] with one input, as one weight [in, sum of outs] on the device."""
    return on_device(np.ascontiguousarray(np.concatenate(parts).T))


def named_tensors(config: Qwen3Next, params: Qwen3NextParams) -> Iterator[tuple[str, Any]]:
    """All weights under their Hugging Face names, [out, in]: of Qwen3-Next where there are experts, else of Qwen3.5."""
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


def _offset(norm: Any) -> np.ndarray:
    """What `_centered` has read."""
    return np.asarray(norm) - 1


def _name_layer(config: Qwen3Next, layer: Qwen3NextLayerParams, prefix: str) -> Iterator[tuple[str, Any]]:
    yield prefix + "input_layernorm.weight", _offset(layer.mixer_norm)
    yield prefix + "post_attention_layernorm.weight", _offset(layer.mlp_norm)
    if isinstance(layer.mixer, AttentionParams):
        yield from _name_attention(config, layer.mixer, prefix + "self_attn.")
    else:
        yield from _name_delta(config, layer.mixer, prefix + "linear_attn.")
    yield from name_layer_mlp(layer, config, prefix + "mlp.")


def _name_attention(config: Qwen3Next, mixer: AttentionParams, prefix: str) -> Iterator[tuple[str, Any]]:
    heads, kv_heads, back = config.num_heads, config.num_kv_heads, np.argsort(head_order(config))
    made = np.asarray(mixer.projection).T.reshape(-1, config.head_dim, config.hidden_size)
    q, k, v, gate = np.split(made, np.cumsum([heads, kv_heads, kv_heads]))
    parts = {"q": np.concatenate([q[:, back], gate], axis=1), "k": k[:, back], "v": v}
    for name, part in parts.items():
        yield f"{prefix}{name}_proj.weight", part.reshape(-1, config.hidden_size)
    yield prefix + "q_norm.weight", _offset(mixer.q_norm)[back]
    yield prefix + "k_norm.weight", _offset(mixer.k_norm)[back]
    yield prefix + "o_proj.weight", np.asarray(mixer.out).T


def _name_delta(config: Qwen3Next, mixer: DeltaParams, prefix: str) -> Iterator[tuple[str, Any]]:
    state, width = config.state, config.hidden_size
    keys, values = state.key_heads * state.key_dim, state.value_heads * state.value_dim
    sizes = [keys, keys, values, values, state.value_heads, state.value_heads]
    parts = np.split(np.asarray(mixer.projection).T, np.cumsum(sizes)[:-1])
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
    yield prefix + "out_proj.weight", np.asarray(mixer.out).T
