"""config.json of DeepSeek V2, V2-Lite, V3 and V3.2, read and written."""

from collections.abc import Mapping
from typing import Any

from jspec.checkpoints.config import family_of, read_rope, reading
from jspec.checkpoints.files import CheckpointError
from jspec.models.deepseek import Deepseek, Indexer, Latent
from jspec.models.layers import YarnRope
from jspec.models.moe import Routed
from jspec.models.router import Router

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
}
"""Classes of `transformers` -> model_type."""
_ONLY = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "moe_layer_freq": (1,),
    "pretraining_tp": (1,),
    "rope_interleave": (True,),
}
"""Keys that may be missing or null -> what else they may say, in all families."""
_ONLY_OF = {
    "deepseek_v2": {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        # Implementations differ in what becomes of the weights.
        "norm_topk_prob": (False,),
    },
    "deepseek_v3": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    "deepseek_v32": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
}
"""The same of each family."""


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> Deepseek:
    """The model that a config.json describes, of either generation.

    Raises:
      CheckpointError: no DeepSeek, an unsupported option, or a key that is missing or of the wrong type.
    """
    family = family_of(raw, ARCHITECTURES)
    if family is None:
        raise CheckpointError(
            f"{where}: architectures={raw.get('architectures')} is no DeepSeek; there are {', '.join(ARCHITECTURES)}"
        )
    _refuse_options(raw, family, where)
    with reading(where):
        theta, scaling = _parse_rope(raw, where)
        return Deepseek(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=int(raw["num_attention_heads"]),
            latent=_parse_latent(raw),
            experts=_parse_experts(raw, family),
            dense_layers=_parse_dense(raw, where),
            max_length=int(raw["max_position_embeddings"]),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            mtp_layers=int(raw.get("num_nextn_predict_layers") or 0),
            indexer=_parse_indexer(raw) if family == "deepseek_v32" else None,
        )


def _refuse_options(raw: Mapping[str, Any], family: str, where: str) -> None:
    wrong = [
        f"{key}={raw[key]!r}"
        for key, allowed in {**_ONLY, **_ONLY_OF[family]}.items()
        if raw.get(key) is not None and raw[key] not in allowed
    ]
    if family == "deepseek_v32" and raw.get("q_lora_rank") is None:
        # Its indexers read what the second step of queries reads.
        wrong.append("q_lora_rank=None")
    if not raw.get("n_shared_experts"):
        wrong.append(f"n_shared_experts={raw.get('n_shared_experts')}")
    if wrong:
        raise CheckpointError(f"{where}: not supported in {family}: {', '.join(wrong)}")


def _parse_dense(raw: Mapping[str, Any], where: str) -> int:
    """How many layers, the first ones, have no experts; V3.2 may say so of each."""
    types = raw.get("mlp_layer_types")
    if types is None:
        return int(raw["first_k_dense_replace"])
    dense = sum(each == "dense" for each in types)
    if list(types) != ["dense"] * dense + ["sparse"] * (int(raw["num_hidden_layers"]) - dense):
        raise CheckpointError(f"{where}: mlp_layer_types={types}: one for each layer, first the dense, then the sparse")
    return dense


def _parse_indexer(raw: Mapping[str, Any]) -> Indexer:
    return Indexer(int(raw["index_n_heads"]), int(raw["index_head_dim"]), int(raw["index_topk"]))


def _parse_latent(raw: Mapping[str, Any]) -> Latent:
    query = raw.get("q_lora_rank")
    return Latent(
        query=None if query is None else int(query),
        size=int(raw["kv_lora_rank"]),
        key=int(raw["qk_nope_head_dim"]),
        rope=int(raw["qk_rope_head_dim"]),
        value=int(raw["v_head_dim"]),
    )


def _parse_experts(raw: Mapping[str, Any], family: str) -> Routed:
    """A group's score is its best expert's in V2, and the sum of the two best in V3."""
    of_v3 = family != "deepseek_v2"
    grouped = of_v3 or raw.get("topk_method") == "group_limited_greedy"
    router = Router(
        count=int(raw["n_routed_experts"]),
        chosen=int(raw["num_experts_per_tok"]),
        sigmoid=of_v3,
        groups=int(raw["n_group"]) if grouped else 1,
        kept_groups=int(raw["topk_group"]) if grouped else 1,
        best_of_group=2 if of_v3 else 1,
        normalize=of_v3 and bool(raw["norm_topk_prob"]),
        scale=float(raw["routed_scaling_factor"]),
    )
    width = int(raw["moe_intermediate_size"])
    return Routed(router, width, int(raw["n_shared_experts"]) * width)


def _parse_rope(raw: Mapping[str, Any], where: str) -> tuple[float, YarnRope | None]:
    """The base and the scaling of the rotary positions, from a config.json of either generation."""
    kind, theta, rope = read_rope(raw)
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise CheckpointError(f"{where}: rope_type={kind!r} is not supported; there are default and yarn")
    original = int(rope["original_max_position_embeddings"])
    return theta, YarnRope(
        factor=float(rope.get("factor") or int(raw["max_position_embeddings"]) / original),
        original_length=original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        mscale=_float(rope.get("mscale")),
        mscale_all_dim=_float(rope.get("mscale_all_dim")),
        attention_factor=_float(rope.get("attention_factor")),
        truncate=bool(rope.get("truncate", True)),
    )


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def describe(config: Deepseek) -> dict[str, Any]:
    """The config.json of a model, of the newer generation."""
    latent, router = config.latent, config.experts.router
    family = "deepseek_v32" if config.indexer else "deepseek_v3" if router.sigmoid else "deepseek_v2"
    raw = {
        "architectures": [next(name for name, value in ARCHITECTURES.items() if value == family)],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": latent.query,
        "kv_lora_rank": latent.size,
        "qk_nope_head_dim": latent.key,
        "qk_rope_head_dim": latent.rope,
        "v_head_dim": latent.value,
        "first_k_dense_replace": config.dense_layers,
        "n_routed_experts": router.count,
        "n_shared_experts": config.experts.shared_width // config.experts.width,
        "num_experts_per_tok": router.chosen,
        "moe_intermediate_size": config.experts.width,
        "routed_scaling_factor": router.scale,
        "norm_topk_prob": router.normalize,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": _describe_rope(config),
        "tie_word_embeddings": config.tie_embeddings,
        "num_nextn_predict_layers": config.mtp_layers,
        "attention_bias": False,
        "hidden_act": "silu",
        "bos_token_id": None,
    }
    if family == "deepseek_v2":
        raw["topk_method"] = "group_limited_greedy" if router.groups > 1 else "greedy"
    if router.groups > 1 or router.sigmoid:
        raw |= {"n_group": router.groups, "topk_group": router.kept_groups}
    if config.indexer is not None:
        sizes = config.indexer
        raw |= {"index_n_heads": sizes.heads, "index_head_dim": sizes.size, "index_topk": sizes.top_k}
    return raw


def _describe_rope(config: Deepseek) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    raw = {
        "rope_type": "yarn",
        "rope_theta": config.rope_theta,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_length,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
    }
    optional = {name: getattr(scaling, name) for name in ("mscale", "mscale_all_dim", "attention_factor")}
    return raw | {name: value for name, value in optional.items() if value is not None}
