"""DeepSeek V2, V2-Lite, V3 and V3.2 in Hugging Face checkpoints: config.json and tensors, including MTP heads.

Checkpoints rotate pairs (2 i, 2 i + 1) of dimensions and this package pairs (i, i + R/2): the rotated outputs of the
projections of queries and keys are permuted alike, so products of queries and keys do not change.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jspec.cache.mla import UpProjections
from jspec.checkpoints import scaled
from jspec.checkpoints.config import (
    describe_shape,
    describe_yarn,
    family_of,
    parse_yarn,
    read_eps,
    read_layer_count,
    read_length,
    reading,
    unknown_family,
)
from jspec.checkpoints.experts import name_layer_mlp, read_layer_mlp
from jspec.checkpoints.family import Family
from jspec.checkpoints.fields import MOST_LENGTH, MOST_NUMBER, Fields, refuse
from jspec.checkpoints.files import on_device
from jspec.checkpoints.tensors import Tensors, named_leaf
from jspec.models.deepseek import Deepseek, DeepseekLayerParams, DeepseekParams, Indexer, IndexerParams, Latent
from jspec.models.moe import Routed
from jspec.models.mtp_head import MtpParams
from jspec.models.router import Router

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
}
"""Classes of `transformers` -> model_type."""
_SUPPORTED = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "moe_layer_freq": (1,),
    "pretraining_tp": (1,),
    "rope_interleave": (True,),
}
"""Keys that may be missing or null -> their supported values, in all families."""
_MOST_MTP = 64
_SUPPORTED_OF = {
    "deepseek_v2": {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        # Implementations disagree on how to normalize the weights.
        "norm_topk_prob": (False,),
    },
    "deepseek_v3": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    "deepseek_v32": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
}
"""The same for each family."""


def parse_config(config: Fields) -> Deepseek:
    """The model that a config.json of either generation describes.

    Raises:
      CheckpointError: an unsupported architecture or option, or a key that is missing, of the wrong type or out of
        bounds.
    """
    family = family_of(config, ARCHITECTURES)
    if family is None:
        raise unknown_family(config, ARCHITECTURES)
    _refuse_options(config, family)
    latent, heads = _parse_latent(config), config.read_int("num_attention_heads")
    if config.read_int("num_key_value_heads", heads) != heads:
        raise config.wrong("num_attention_heads", heads, "must equal num_key_value_heads in latent attention")
    theta, scaling = parse_yarn(config)
    with reading(config.where):
        return Deepseek(
            vocab_size=config.read_int("vocab_size"),
            hidden_size=config.read_int("hidden_size"),
            intermediate_size=config.read_int("intermediate_size"),
            num_layers=read_layer_count(config),
            num_heads=heads,
            latent=latent,
            experts=_parse_experts(config, family),
            dense_layers=_parse_dense(config),
            max_length=read_length(config),
            rms_norm_eps=read_eps(config),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=config.read_flag("tie_word_embeddings", False),
            mtp_layers=config.read_int("num_nextn_predict_layers", 0, least=0, most=_MOST_MTP),
            indexer=_parse_indexer(config, latent) if family == "deepseek_v32" else None,
        )


def _refuse_options(config: Fields, family: str) -> None:
    wrong = config.unsupported({**_SUPPORTED, **_SUPPORTED_OF[family]})
    if family == "deepseek_v32" and not config.has("q_lora_rank"):
        # Indexers read the input of the queries' second step.
        wrong.append(config.describe("q_lora_rank"))
    if not config.read_int("n_shared_experts", 0, least=0):
        wrong.append(config.describe("n_shared_experts"))
    refuse(config.where, wrong, family)


def _parse_dense(config: Fields) -> int:
    """The number of first layers without experts; V3.2 may list them."""
    count, types = read_layer_count(config), config.optional_texts("mlp_layer_types")
    if types is None:
        return config.read_int("first_k_dense_replace", least=0, most=count)
    dense = sum(each == "dense" for each in types)
    if list(types) != ["dense"] * dense + ["sparse"] * (count - dense):
        raise config.wrong("mlp_layer_types", list(types), "must have one entry per layer, dense ones first")
    return dense


def _parse_indexer(config: Fields, latent: Latent) -> Indexer:
    heads, size = config.read_int("index_n_heads"), config.read_int("index_head_dim")
    if size < latent.rope_dim:
        raise config.wrong("index_head_dim", size, f"must be at least qk_rope_head_dim={latent.rope_dim}")
    return Indexer(heads, size, config.read_int("index_topk", most=MOST_LENGTH))


def _parse_latent(config: Fields) -> Latent:
    rope_dim = config.read_int("qk_rope_head_dim")
    if rope_dim % 2:
        raise config.wrong("qk_rope_head_dim", rope_dim, "must be even")
    return Latent(
        q_rank=config.optional_int("q_lora_rank"),
        kv_rank=config.read_int("kv_lora_rank"),
        nope_dim=config.read_int("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=config.read_int("v_head_dim"),
    )


def _parse_experts(config: Fields, family: str) -> Routed:
    """The experts. A group's score is that of its best expert in V2, and the sum of its two best in V3."""
    of_v3 = family != "deepseek_v2"
    grouped = of_v3 or config.optional_text("topk_method") == "group_limited_greedy"
    router = Router(
        count=config.read_int("n_routed_experts"),
        chosen=config.read_int("num_experts_per_tok"),
        sigmoid=of_v3,
        groups=config.read_int("n_group") if grouped else 1,
        kept_groups=config.read_int("topk_group") if grouped else 1,
        best_of_group=2 if of_v3 else 1,
        normalize=of_v3 and config.read_flag("norm_topk_prob"),
        scale=config.read_number("routed_scaling_factor", above=0, most=MOST_NUMBER),
    )
    width = config.read_int("moe_intermediate_size")
    return Routed(router, width, config.read_int("n_shared_experts") * width)


def describe(config: Deepseek) -> dict[str, Any]:
    """The config.json of a model, in the newer generation's format."""
    latent, router = config.latent, config.experts.router
    family = "deepseek_v32" if config.indexer else "deepseek_v3" if router.sigmoid else "deepseek_v2"
    architecture = next(name for name, value in ARCHITECTURES.items() if value == family)
    raw = describe_shape(architecture, family, config) | {
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "first_k_dense_replace": config.dense_layers,
        "n_routed_experts": router.count,
        "n_shared_experts": config.experts.shared_width // config.experts.width,
        "num_experts_per_tok": router.chosen,
        "moe_intermediate_size": config.experts.width,
        "routed_scaling_factor": router.scale,
        "norm_topk_prob": router.normalize,
        "rope_parameters": describe_yarn(config.rope_theta, config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "num_nextn_predict_layers": config.mtp_layers,
        "attention_bias": False,
        "hidden_act": "silu",
    }
    if family == "deepseek_v2":
        raw["topk_method"] = "group_limited_greedy" if router.groups > 1 else "greedy"
    if router.groups > 1 or router.sigmoid:
        raw |= {"n_group": router.groups, "topk_group": router.kept_groups}
    if config.indexer is not None:
        sizes = config.indexer
        raw |= {"index_n_heads": sizes.heads, "index_head_dim": sizes.size, "index_topk": sizes.top_k}
    return raw


SHARED = "shared_experts."
"""Prefix of the MLP that every token goes through."""


def with_mtp(config: Deepseek, tensors: Tensors, wanted: bool) -> Deepseek:
    """The configuration with all of its MTP heads, or with none if they are not wanted or have no tensors.

    Checkpoints written by `transformers` declare heads but have no tensors of them.
    """
    prefixes = tuple(f"model.layers.{config.num_layers + index}." for index in range(config.mtp_layers))
    if wanted and any(name.startswith(prefixes) for name in tensors.names()):
        return config
    tensors.leave(*prefixes)
    return dataclasses.replace(config, mtp_layers=0)


def read_params(config: Deepseek, tensors: Tensors) -> DeepseekParams:
    """The weights of a model.

    Raises:
      CheckpointError: a tensor is missing, has an unexpected shape, or is not used.
    """
    width, vocabulary = config.hidden_size, config.vocab_size
    embed = tensors.device("model.embed_tokens.weight", vocabulary, width, options=named_leaf("embed"))
    head = (
        None if config.tie_embeddings else tensors.fused([("lm_head.weight", vocabulary)], width, named_leaf("lm_head"))
    )
    count = config.num_layers
    params = DeepseekParams(
        embed=embed,
        layers=tuple(_read_layer(config, tensors, index) for index in range(count)),
        norm=tensors.device("model.norm.weight", width),
        lm_head=head,
        mtp=tuple(_read_mtp(config, tensors, index) for index in range(count, count + config.mtp_layers)),
    )
    if config.tie_embeddings:
        tensors.compare_head("model.embed_tokens.weight", vocabulary, width)
    tensors.refuse_unread("model")
    return params


def _read_layer(config: Deepseek, tensors: Tensors, index: int) -> DeepseekLayerParams:
    """A layer; those after the last are the layers of MTP heads."""
    prefix, width, mlp = f"model.layers.{index}.", config.hidden_size, config.intermediate_size
    latent, attention = config.latent, prefix + "self_attn."
    up = tensors.read(
        attention + "kv_b_proj.weight", config.num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank
    ).reshape(config.num_heads, -1, latent.kv_rank)
    query, query_norm, first = _read_queries(config, tensors, attention)
    rows = tensors.read(attention + "kv_a_proj_with_mqa.weight", latent.width, width)
    # Each device has the whole row; and the whole first step of queries, unless it is their only one.
    down = [np.tile(_halves(rows[None], latent.rope_dim)[0].T, config.tensor)]
    down = [first.T if latent.q_rank is None else np.tile(first.T, config.tensor), *down]
    return DeepseekLayerParams(
        attention_norm=tensors.device(prefix + "input_layernorm.weight", width),
        down_projection=tensors.put(named_leaf("down_projection"), down),
        query_norm=query_norm,
        query=query,
        latent_norm=tensors.device(attention + "kv_a_layernorm.weight", latent.kv_rank),
        up=UpProjections(
            tensors.put(named_leaf("keys"), [up[:, : latent.nope_dim]]),
            tensors.put(named_leaf("values"), [up[:, latent.nope_dim :].swapaxes(1, 2)]),
        ),
        o=tensors.fused([(attention + "o_proj.weight", width)], config.num_heads * latent.value_dim, named_leaf("o")),
        mlp_norm=tensors.device(prefix + "post_attention_layernorm.weight", width),
        **read_layer_mlp(config.layer_experts(index), tensors, prefix + "mlp.", mlp, width, SHARED),
        indexer=None
        if config.indexer is None
        else _read_indexer(config, config.indexer, tensors, attention + "indexer."),
    )


def _read_queries(
    config: Deepseek, tensors: Tensors, prefix: str
) -> tuple[jax.Array | None, jax.Array | None, np.ndarray]:
    """The second step of queries and the norm before it, or None and None, and the first step, [out, in]."""
    latent, width = config.latent, config.hidden_size
    name = "q_proj" if latent.q_rank is None else "q_b_proj"
    size = latent.nope_dim + latent.rope_dim
    last = tensors.read(f"{prefix}{name}.weight", config.num_heads * size, latent.q_rank or width)
    last = _halves(last.reshape(config.num_heads, size, -1), latent.rope_dim).reshape(last.shape)
    if latent.q_rank is None:
        return None, None, last
    norm = tensors.device(prefix + "q_a_layernorm.weight", latent.q_rank)
    return (
        tensors.put(named_leaf("query"), [last.T]),
        norm,
        tensors.read(prefix + "q_a_proj.weight", latent.q_rank, width),
    )


def _read_indexer(config: Deepseek, sizes: Indexer, tensors: Tensors, prefix: str) -> IndexerParams:
    """A layer's indexer, whose rotated dimensions are pairs (i, i + R/2) in checkpoints too."""
    width, query = config.hidden_size, config.latent.q_rank
    assert query is not None
    weights = tensors.stored(prefix + "weights_proj.weight", sizes.heads, width).T
    return IndexerParams(
        query=tensors.fused([(prefix + "wq_b.weight", sizes.heads * sizes.size)], query),
        key=tensors.fused([(prefix + "wk.weight", sizes.size)], width),
        key_norm=tensors.device(prefix + "k_norm.weight", sizes.size),
        key_norm_bias=tensors.device(prefix + "k_norm.bias", sizes.size),
        weights=on_device(weights.astype(np.float32)),
    )


def _read_mtp(config: Deepseek, tensors: Tensors, index: int) -> MtpParams:
    """An MTP head, with its embedding and LM head if they differ from the target's."""
    prefix, width = f"model.layers.{index}.", config.hidden_size
    target = "model.embed_tokens.weight"
    embed = _unless_equal(config, tensors, prefix + "embed_tokens.weight", target)
    target = target if config.tie_embeddings else "lm_head.weight"
    head = _unless_equal(config, tensors, prefix + "shared_head.head.weight", target)
    return MtpParams(
        token_norm=tensors.device(prefix + "enorm.weight", width),
        hidden_norm=tensors.device(prefix + "hnorm.weight", width),
        projection=tensors.fused([(prefix + "eh_proj.weight", width)], 2 * width, named_leaf("projection")),
        layer=_read_layer(config, tensors, index),
        norm=tensors.device(prefix + "shared_head.norm.weight", width),
        embed=None if embed is None else tensors.put(named_leaf("embed"), [embed]),
        lm_head=None if head is None else tensors.put(named_leaf("lm_head"), [head.T]),
    )


def _unless_equal(config: Deepseek, tensors: Tensors, name: str, shared: str) -> np.ndarray | None:
    """A tensor [vocabulary, width]; None if it is missing or equals `shared`."""
    if name not in tensors.names():
        return None
    own, others = (tensors.read(each, config.vocab_size, config.hidden_size) for each in (name, shared))
    return None if np.array_equal(own, others) else own


def _halves(weight: np.ndarray, rope: int) -> np.ndarray:
    """[heads, out, in] with the pairs of each head's last `rope` outputs split: first elements, then second ones."""
    order = np.arange(weight.shape[1])
    order[-rope:] = order[-rope:].reshape(-1, 2).T.reshape(-1)
    return weight[:, order]


def _pairs(weight: np.ndarray, rope: int) -> np.ndarray:
    """The inverse of `_halves`."""
    order = np.arange(weight.shape[1])
    order[-rope:] = order[-rope:].reshape(2, -1).T.reshape(-1)
    return weight[:, order]


def named_tensors(config: Deepseek, params: DeepseekParams) -> Iterator[tuple[str, Any]]:
    """All weights under their Hugging Face names, [out, in]; MTP heads without what they share with the target."""
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
    last = _pairs(last.reshape(config.num_heads, -1, last.shape[1]), latent.rope_dim).reshape(last.shape)
    yield attention + ("q_proj.weight" if layer.query is None else "q_b_proj.weight"), last
    if layer.query is not None:
        yield attention + "q_a_proj.weight", first
        yield attention + "q_a_layernorm.weight", layer.query_norm
    yield attention + "kv_a_proj_with_mqa.weight", _pairs(rows[None], latent.rope_dim)[0]
    yield attention + "kv_a_layernorm.weight", layer.latent_norm
    up = np.concatenate([layer.up.keys, np.asarray(layer.up.values).swapaxes(1, 2)], axis=1)
    yield attention + "kv_b_proj.weight", up.reshape(-1, latent.kv_rank)
    yield attention + "o_proj.weight", np.asarray(layer.o).T
    if layer.indexer is not None:
        yield attention + "indexer.wq_b.weight", np.asarray(layer.indexer.query).T
        yield attention + "indexer.wk.weight", np.asarray(layer.indexer.key).T
        yield attention + "indexer.k_norm.weight", layer.indexer.key_norm
        yield attention + "indexer.k_norm.bias", layer.indexer.key_norm_bias
        yield attention + "indexer.weights_proj.weight", np.asarray(layer.indexer.weights).T
    yield prefix + "post_attention_layernorm.weight", layer.mlp_norm
    yield from name_layer_mlp(layer, config.experts, prefix + "mlp.", SHARED)


FAMILY = Family(
    Deepseek,
    ARCHITECTURES,
    parse_config,
    describe,
    read_params,
    named_tensors,
    open_tensors=scaled.open_tensors,
    with_mtp=with_mtp,
)
