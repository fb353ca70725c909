"""DeepSeek V2, V2-Lite, V3 and V3.2 in Hugging Face checkpoints: config.json and tensors, including MTP heads.

Checkpoints rotate pairs (2 i, 2 i + 1) of dimensions and this package pairs (i, i + R/2): the rotated outputs of the
projections of queries and keys are permuted alike, so products of queries and keys do not change.
"""

import dataclasses
from collections.abc import Iterator, Set
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jspec.checkpoints import config as common
from jspec.checkpoints import scaled
from jspec.checkpoints.family import Family
from jspec.checkpoints.fields import MOST_LENGTH, MOST_NUMBER, Fields, describe_fields, refuse
from jspec.checkpoints.rope import describe_rope, parse_rope
from jspec.checkpoints.tensors import HEAD, Tensors
from jspec.core.struct import Leaf
from jspec.models.decoder import ModelParams
from jspec.models.deepseek import Deepseek, Indexer, Latent
from jspec.models.moe import Routed, Router
from jspec.models.weights import Weight, linear, plain

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "kimi_k2": "deepseek_v3",
}
"""Classes of `transformers` -> model_type, and the model_type of Kimi-K2, whose class is that of V3."""
_SUPPORTED = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
}
"""Optional or null keys -> their supported values, in all families."""
_MOST_MTP = 64
_LATENT = {
    **{"kv_lora_rank": "kv_rank", "qk_nope_head_dim": "nope_dim"},
    **{"qk_rope_head_dim": "rope_dim", "v_head_dim": "value_dim"},
}
"""Keys of latent attention -> fields of `Latent`."""
_INDEXER = {"index_n_heads": "heads", "index_head_dim": "size", "index_topk": "top_k"}
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
    """The model that a config.json of either generation describes."""
    family = common.family_of(config, ARCHITECTURES)
    if family is None:
        raise common.unknown_family(config, ARCHITECTURES)
    # Options and shapes of other forwards.
    _refuse_options(config, family)
    latent, heads = parse_latent(config), config.read_int("num_attention_heads")
    if common.read_kv_heads(config) != heads:
        raise config.wrong("num_attention_heads", heads, "must equal num_key_value_heads in latent attention")
    # The configuration.
    rope = parse_rope(config, latent.rope_dim)
    return Deepseek(
        **common.read_shape(config, rope),
        intermediate_size=config.read_int("intermediate_size"),
        num_layers=common.read_layer_count(config),
        latent=latent,
        experts=_parse_experts(config, family),
        dense_layers=_parse_dense(config),
        rope=rope,
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
    count, types = common.read_layer_count(config), config.read_texts("mlp_layer_types", None)
    if types is None:
        return config.read_int("first_k_dense_replace", least=0, most=count)
    dense = sum(kind == "dense" for kind in types)
    if list(types) != ["dense"] * dense + ["sparse"] * (count - dense):
        raise config.wrong("mlp_layer_types", list(types), "must have one entry per layer, dense ones first")
    return dense


def _parse_indexer(config: Fields, latent: Latent) -> Indexer:
    heads, size = config.read_int("index_n_heads"), config.read_int("index_head_dim")
    if size < latent.rope_dim:
        raise config.wrong("index_head_dim", size, f"must be at least qk_rope_head_dim={latent.rope_dim}")
    return Indexer(heads, size, config.read_int("index_topk", most=MOST_LENGTH))


def parse_latent(config: Fields) -> Latent:
    """Read the sizes of latent attention, in a model or a draft."""
    rope_dim = config.read_int("qk_rope_head_dim")
    if rope_dim % 2:
        raise config.wrong("qk_rope_head_dim", rope_dim, "must be even")
    return Latent(q_rank=config.read_int("q_lora_rank", None), **config.read_sizes(_LATENT))


def describe_latent(latent: Latent) -> dict[str, Any]:
    """The keys of these sizes."""
    return {"q_lora_rank": latent.q_rank, **describe_fields(latent, _LATENT)}


def _parse_experts(config: Fields, family: str) -> Routed:
    """The experts. A group's score is that of its best expert in V2, and the sum of its two best in V3."""
    of_v3 = family != "deepseek_v2"
    grouped = of_v3 or config.read_text("topk_method", None) == "group_limited_greedy"
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
    # The family follows from the layers.
    assert config.experts is not None, "a model has experts"
    router = config.experts.router
    family = "deepseek_v32" if config.indexer else "deepseek_v3" if router.sigmoid else "deepseek_v2"
    architecture = next(name for name, value in ARCHITECTURES.items() if value == family)
    raw = common.describe_shape(architecture, family, config) | {
        "num_key_value_heads": config.num_heads,
        **describe_latent(config.latent),
        "first_k_dense_replace": config.dense_layers,
        "n_routed_experts": router.count,
        "n_shared_experts": config.experts.shared_width // config.experts.width,
        "num_experts_per_tok": router.chosen,
        "moe_intermediate_size": config.experts.width,
        "routed_scaling_factor": router.scale,
        "norm_topk_prob": router.normalize,
        "rope_parameters": describe_rope(config.rope),
        "tie_word_embeddings": config.tie_embeddings,
        "num_nextn_predict_layers": config.mtp_layers,
        "attention_bias": False,
        "hidden_act": "silu",
    }
    # Keys of some families.
    if family == "deepseek_v2":
        raw["topk_method"] = "group_limited_greedy" if router.groups > 1 else "greedy"
    if router.groups > 1 or router.sigmoid:
        raw |= {"n_group": router.groups, "topk_group": router.kept_groups}
    if config.indexer is not None:
        raw |= describe_fields(config.indexer, _INDEXER)
    return raw


def with_mtp(config: Deepseek, tensors: Tensors, enabled: bool) -> Deepseek:
    """The configuration with all of its MTP heads, or with none if they are not wanted or have no tensors.

    Checkpoints written by `transformers` declare heads but have no tensors of them.
    """
    prefixes = tuple(f"model.layers.{config.num_layers + index}." for index in range(config.mtp_layers))
    if enabled and any(name.startswith(prefixes) for name in tensors.names()):
        return config
    tensors.leave(*prefixes)
    return dataclasses.replace(config, mtp_layers=0)


@dataclasses.dataclass(frozen=True)
class Unshared:
    """The entry of an optional embedding or LM head of an MTP head.

    shared: the tensor of the target's.
    weight: its own entry.
    """

    shared: str
    weight: Weight

    def shapes(self, dtype: DTypeLike) -> None:
        """None: a configuration does not state whether there is one."""

    def check(self, tensors: Tensors) -> None:
        """As in `Entry`; there may be none."""
        if set(self.weight.tensors) <= tensors.names():
            self.weight.check(tensors)

    def read(self, tensors: Tensors, options: Leaf) -> Any:
        """The weight; None: it is missing or equals the target's."""
        ((name, shape),) = self.weight.tensors.items()
        if name not in tensors.names():
            return None
        if np.array_equal(tensors.read(name, *shape), tensors.read(self.shared, *shape)):
            return None
        return self.weight.read(tensors, options)

    def write(self, value: Any) -> Iterator[tuple[str, Any]]:
        """As in `Entry`."""
        if value is not None:
            yield from self.weight.write(value)


def table(config: Deepseek, names: Set[str]) -> ModelParams:
    """The table of the weights, with optional embeddings and LM heads of MTP heads."""
    vocabulary, width, embedding = config.vocab_size, config.hidden_size, "model.embed_tokens.weight"
    weights = config.weights()
    mtp = []
    # Give each head the embedding and LM head under its own names.
    for index, head in enumerate(weights.mtp, config.num_layers):
        prefix = f"model.layers.{index}."
        embed = plain(prefix + "embed_tokens.weight", vocabulary, width)
        lm_head = linear(width, {prefix + "shared_head.head.weight": vocabulary})
        shared = embedding if config.tie_embeddings else HEAD
        mtp.append(dataclasses.replace(head, embed=Unshared(embedding, embed), lm_head=Unshared(shared, lm_head)))
    return dataclasses.replace(weights, mtp=tuple(mtp))


FAMILY = Family(
    Deepseek, ARCHITECTURES, parse_config, describe, table=table, open_tensors=scaled.open_tensors, with_mtp=with_mtp
)
