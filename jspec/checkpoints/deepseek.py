"""Tensors of DeepSeek in Hugging Face checkpoints, the layers for multi-token prediction included.

Checkpoints rotate pairs (2 i, 2 i + 1) of dimensions and this package pairs (i, i + R/2): the rotated outputs of the
projections of queries and keys are put in that order, which no product of a query and a key notices.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jspec.cache.mla import UpProjections
from jspec.checkpoints.experts import name_layer_mlp, read_layer_mlp
from jspec.checkpoints.files import Tensors, on_device
from jspec.models.deepseek import Deepseek, DeepseekLayerParams, DeepseekParams, Indexer, IndexerParams
from jspec.models.mtp_head import MtpParams

SHARED = "shared_experts."
"""Where the MLP stands that every token goes through."""


def with_mtp_of(config: Deepseek, tensors: Tensors, wanted: bool) -> Deepseek:
    """The configuration with as many layers for multi-token prediction as are read: none where they are not wanted, and
    else as many as there are tensors of, all or none.

    Checkpoints that `transformers` has written name a number of them, and hold none.
    """
    prefixes = tuple(f"model.layers.{config.num_layers + index}." for index in range(config.mtp_layers))
    if wanted and any(name.startswith(prefixes) for name in tensors.names()):
        return config
    tensors.leave(*prefixes)
    return dataclasses.replace(config, mtp_layers=0)


def read_params(config: Deepseek, tensors: Tensors) -> DeepseekParams:
    """The weights of a model.

    Raises:
      CheckpointError: a tensor that is missing, has another shape than the configuration says, or that nothing reads.
    """
    width, vocabulary = config.hidden_size, config.vocab_size
    embed = tensors.device("model.embed_tokens.weight", vocabulary, width)
    head = None if config.tie_embeddings else tensors.fused([("lm_head.weight", vocabulary)], width)
    count = config.num_layers
    params = DeepseekParams(
        embed=embed,
        layers=tuple(_read_layer(config, tensors, index) for index in range(count)),
        norm=tensors.device("model.norm.weight", width),
        lm_head=head,
        mtp=tuple(_read_mtp(config, tensors, index) for index in range(count, count + config.mtp_layers)),
    )
    # Some checkpoints hold what is computed from the configuration, and some tied ones the head all the same.
    spare = {"lm_head.weight"} if config.tie_embeddings else set()
    tensors.refuse_unread("model", lambda name: name in spare or name.endswith(".rotary_emb.inv_freq"))
    return params


def _read_layer(config: Deepseek, tensors: Tensors, index: int) -> DeepseekLayerParams:
    """A layer; those behind the last are what is a layer in the ones for multi-token prediction."""
    prefix, width, mlp = f"model.layers.{index}.", config.hidden_size, config.intermediate_size
    latent, attention = config.latent, prefix + "self_attn."
    up = tensors.read(
        attention + "kv_b_proj.weight", config.num_heads * (latent.key + latent.value), latent.size
    ).reshape(config.num_heads, -1, latent.size)
    query, query_norm, first = _read_queries(config, tensors, attention)
    rows = tensors.read(attention + "kv_a_proj_with_mqa.weight", latent.width, width)
    down = np.concatenate([first, _halves(rows[None], latent.rope)[0]])
    return DeepseekLayerParams(
        attention_norm=tensors.device(prefix + "input_layernorm.weight", width),
        down_projection=_device(down.T),
        query_norm=query_norm,
        query=query,
        latent_norm=tensors.device(attention + "kv_a_layernorm.weight", latent.size),
        up=UpProjections(_device(up[:, : latent.key]), _device(up[:, latent.key :].swapaxes(1, 2))),
        o=tensors.fused([(attention + "o_proj.weight", width)], config.num_heads * latent.value),
        mlp_norm=tensors.device(prefix + "post_attention_layernorm.weight", width),
        **read_layer_mlp(config.layer_experts(index), tensors, prefix + "mlp.", mlp, width, SHARED),
        indexer=None
        if config.indexer is None
        else _read_indexer(config, config.indexer, tensors, attention + "indexer."),
    )


def _read_queries(
    config: Deepseek, tensors: Tensors, prefix: str
) -> tuple[jax.Array | None, jax.Array | None, np.ndarray]:
    """The second step of queries and the norm before it, None where there are none, and the first, [out, in]."""
    latent, width = config.latent, config.hidden_size
    name = "q_proj" if latent.query is None else "q_b_proj"
    size = latent.key + latent.rope
    last = tensors.read(f"{prefix}{name}.weight", config.num_heads * size, latent.query or width)
    last = _halves(last.reshape(config.num_heads, size, -1), latent.rope).reshape(last.shape)
    if latent.query is None:
        return None, None, last
    norm = tensors.device(prefix + "q_a_layernorm.weight", latent.query)
    return _device(last.T), norm, tensors.read(prefix + "q_a_proj.weight", latent.query, width)


def _read_indexer(config: Deepseek, sizes: Indexer, tensors: Tensors, prefix: str) -> IndexerParams:
    """A layer's indexer, whose rotated dimensions are pairs (i, i + R/2) in checkpoints, too."""
    width, query = config.hidden_size, config.latent.query
    assert query is not None
    weights = tensors.stored(prefix + "weights_proj.weight", sizes.heads, width).T
    return IndexerParams(
        query=tensors.fused([(prefix + "wq_b.weight", sizes.heads * sizes.size)], query),
        key=tensors.fused([(prefix + "wk.weight", sizes.size)], width),
        key_norm=tensors.device(prefix + "k_norm.weight", sizes.size),
        key_norm_bias=tensors.device(prefix + "k_norm.bias", sizes.size),
        weights=_device(weights.astype(np.float32)),
    )


def _read_mtp(config: Deepseek, tensors: Tensors, index: int) -> MtpParams:
    """A layer for multi-token prediction. Embedding and head are kept where they are not the target's."""
    prefix, width = f"model.layers.{index}.", config.hidden_size
    target = "model.embed_tokens.weight"
    embed = _unless_equal(config, tensors, prefix + "embed_tokens.weight", target)
    target = target if config.tie_embeddings else "lm_head.weight"
    head = _unless_equal(config, tensors, prefix + "shared_head.head.weight", target)
    return MtpParams(
        token_norm=tensors.device(prefix + "enorm.weight", width),
        hidden_norm=tensors.device(prefix + "hnorm.weight", width),
        projection=tensors.fused([(prefix + "eh_proj.weight", width)], 2 * width),
        layer=_read_layer(config, tensors, index),
        norm=tensors.device(prefix + "shared_head.norm.weight", width),
        embed=None if embed is None else _device(embed),
        lm_head=None if head is None else _device(head.T),
    )


def _unless_equal(config: Deepseek, tensors: Tensors, name: str, shared: str) -> np.ndarray | None:
    """A tensor of the vocabulary; None where it is missing, or equals `shared`."""
    if name not in tensors.names():
        return None
    own, others = (tensors.read(each, config.vocab_size, config.hidden_size) for each in (name, shared))
    return None if np.array_equal(own, others) else own


def _halves(weight: np.ndarray, rope: int) -> np.ndarray:
    """[heads, out, in] with each head's last `rope` outputs, which rotate in pairs, as first halves, then second."""
    order = np.arange(weight.shape[1])
    order[-rope:] = order[-rope:].reshape(-1, 2).T.reshape(-1)
    return weight[:, order]


def _pairs(weight: np.ndarray, rope: int) -> np.ndarray:
    """The inverse of `_halves`."""
    order = np.arange(weight.shape[1])
    order[-rope:] = order[-rope:].reshape(2, -1).T.reshape(-1)
    return weight[:, order]


def _device(weight: np.ndarray) -> jax.Array:
    return on_device(np.ascontiguousarray(weight))


def named_tensors(config: Deepseek, params: DeepseekParams) -> Iterator[tuple[str, Any]]:
    """All weights under their Hugging Face names, [out, in]. What a layer for prediction shares is not repeated."""
    yield "model.embed_tokens.weight", params.embed
    for index, layer in enumerate(params.layers):
        yield from _name_layer(config, layer, f"model.layers.{index}.")
    yield "model.norm.weight", params.norm
    if params.lm_head is not None:
        yield "lm_head.weight", np.asarray(params.lm_head).T
    for index, mtp in enumerate(params.mtp, config.num_layers):
        prefix = f"model.layers.{index}."
        yield from _name_layer(config, mtp.layer, prefix)
        yield prefix + "enorm.weight", mtp.token_norm
        yield prefix + "hnorm.weight", mtp.hidden_norm
        yield prefix + "eh_proj.weight", np.asarray(mtp.projection).T
        yield prefix + "shared_head.norm.weight", mtp.norm
        if mtp.embed is not None:
            yield prefix + "embed_tokens.weight", mtp.embed
        if mtp.lm_head is not None:
            yield prefix + "shared_head.head.weight", np.asarray(mtp.lm_head).T


def _name_layer(config: Deepseek, layer: DeepseekLayerParams, prefix: str) -> Iterator[tuple[str, Any]]:
    latent, attention = config.latent, prefix + "self_attn."
    yield prefix + "input_layernorm.weight", layer.attention_norm
    first, rows = np.split(np.asarray(layer.down_projection).T, [-latent.width])
    last = first if layer.query is None else np.asarray(layer.query).T
    last = _pairs(last.reshape(config.num_heads, -1, last.shape[1]), latent.rope).reshape(last.shape)
    yield attention + ("q_proj.weight" if layer.query is None else "q_b_proj.weight"), last
    if layer.query is not None:
        yield attention + "q_a_proj.weight", first
        yield attention + "q_a_layernorm.weight", layer.query_norm
    yield attention + "kv_a_proj_with_mqa.weight", _pairs(rows[None], latent.rope)[0]
    yield attention + "kv_a_layernorm.weight", layer.latent_norm
    up = np.concatenate([layer.up.keys, np.asarray(layer.up.values).swapaxes(1, 2)], axis=1)
    yield attention + "kv_b_proj.weight", up.reshape(-1, latent.size)
    yield attention + "o_proj.weight", np.asarray(layer.o).T
    if layer.indexer is not None:
        yield attention + "indexer.wq_b.weight", np.asarray(layer.indexer.query).T
        yield attention + "indexer.wk.weight", np.asarray(layer.indexer.key).T
        yield attention + "indexer.k_norm.weight", layer.indexer.key_norm
        yield attention + "indexer.k_norm.bias", layer.indexer.key_norm_bias
        yield attention + "indexer.weights_proj.weight", np.asarray(layer.indexer.weights).T
    yield prefix + "post_attention_layernorm.weight", layer.mlp_norm
    yield from name_layer_mlp(layer, config, prefix + "mlp.", SHARED)
