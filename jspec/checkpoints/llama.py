"""Llama and the families that differ from it by a few options: config.json and tensors, by one table of families."""

import dataclasses
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

from jspec.checkpoints import config as common
from jspec.checkpoints import scaled
from jspec.checkpoints.family import Family
from jspec.checkpoints.fields import MOST_LENGTH, MOST_NUMBER, Fields, describe_fields, refuse
from jspec.checkpoints.kv_scales import KvScales
from jspec.checkpoints.rope import describe_rope, parse_layer_ropes, parse_rope
from jspec.models.decoder import ModelParams
from jspec.models.llama import Llama
from jspec.models.llama_variant import LlamaVariant
from jspec.models.rope import LongRope

Windows = tuple[int | None, ...]


def _no_windows(config: Fields) -> Windows:
    types, wrong = config.read_texts("layer_types", ()), config.unsupported({"use_sliding_window": (False,)})
    refuse(config.where, [*wrong, *(f"layer_types: {kind}" for kind in types if kind != "full_attention")])
    if types and len(types) != (count := common.read_layer_count(config)):
        raise config.wrong("layer_types", list(types), f"must be {count} of full_attention")
    return ()


def _same_windows(config: Fields) -> Windows:
    """`sliding_window` holds in all layers."""
    refuse(config.where, [config.describe("layer_types")] if config.has("layer_types") else [])
    window = config.read_int("sliding_window", None, most=MOST_LENGTH)
    return () if window is None else (window,) * common.read_layer_count(config)


def _last_windows(config: Fields) -> Windows:
    """`use_sliding_window` switches windows on, in the last layers if they are not listed."""
    if not config.read_flag("use_sliding_window", False):
        return _no_windows(config)
    if config.has("layer_types"):
        return common.read_windows(config, 1)
    window = config.read_int("sliding_window", None, most=MOST_LENGTH)
    first, count = config.read_int("max_window_layers", least=0), common.read_layer_count(config)
    return tuple(None if index < first else window for index in range(count))


def _listed_windows(config: Fields) -> Windows:
    return common.read_windows(config, 4)


@dataclasses.dataclass(frozen=True)
class Row:
    """One family.

    architecture: class of `transformers`.
    fields: of its configurations.
    config: their class.
    experts: whether layers may have experts.
    defaults: what keys mean that are missing.
    bias: whether the projections to heads have biases; None: as the key `attention_bias` states.
    out_bias: whether `attention_bias` holds for the projection from heads, too.
    windows: the windows of the layers.
    scales: field -> key of a factor.
    window_rope: whether layers with windows rotate otherwise.
    rests: whether some layers have no positions.
    share: of rotated dimensions, if it is not stated; None: all, always.
    theta: base of the rotation, if it is not stated.
    """

    architecture: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bias: bool | None = None
    out_bias: bool = True
    windows: Callable[[Fields], Windows] = _no_windows
    scales: Mapping[str, str] = dataclasses.field(default_factory=dict)
    window_rope: bool = False
    rests: bool = False
    share: float | None = None
    theta: float = 10_000.0
    config: Callable[..., Llama] = LlamaVariant
    experts: bool = False


_GLM = {"interleaved": True, "fused": ("gate_up",)}
_OLMO = {"norms": "after", "wide_qk_norm": True}
_GLM_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1.5625e-7}
_SCALES = {
    "embed_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "score_scale": "attention_multiplier",
    "logit_divisor": "logits_scaling",
}
ROWS = {
    "llama": Row("LlamaForCausalLM", config=Llama),
    "qwen3": Row("Qwen3ForCausalLM", {"qk_norm": True}, {"head_dim": 128}, config=Llama),
    "qwen3_moe": Row("Qwen3MoeForCausalLM", {"qk_norm": True}, config=Llama, experts=True),
    "qwen2": Row(
        "Qwen2ForCausalLM", defaults={"sliding_window": 4096, "max_window_layers": 28}, bias=True, windows=_last_windows
    ),
    "mistral": Row(
        "MistralForCausalLM",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
        bias=False,
        windows=_same_windows,
    ),
    "smollm3": Row(
        "SmolLM3ForCausalLM",
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 4, "no_rope_layer_interval": 4},
        rests=True,
        theta=2e6,
    ),
    "olmo2": Row("Olmo2ForCausalLM", _OLMO, {"rms_norm_eps": 1e-5}),
    "olmo3": Row(
        "Olmo3ForCausalLM",
        _OLMO,
        {"rms_norm_eps": 1e-5, "sliding_window": 4096},
        windows=_listed_windows,
        window_rope=True,
        theta=5e5,
    ),
    "phi3": Row(
        "Phi3ForCausalLM",
        {"fused": ("qkv", "gate_up")},
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        bias=False,
        windows=_same_windows,
        share=1.0,
    ),
    "granite": Row("GraniteForCausalLM", scales=_SCALES),
    "glm": Row("GlmForCausalLM", _GLM, _GLM_DEFAULTS, out_bias=False, share=0.5),
    "glm4": Row(
        "Glm4ForCausalLM",
        {**_GLM, "norms": "both"},
        {**_GLM_DEFAULTS, "attention_bias": True},
        out_bias=False,
        share=0.5,
    ),
}
"""model_type -> its family."""
ARCHITECTURES = {row.architecture: kind for kind, row in ROWS.items()}
"""Classes of `transformers` -> model_type."""


def parse_config(config: Fields) -> Llama:
    """Parse a config.json, of either generation."""
    kind = common.family_of(config, ARCHITECTURES)
    if kind is None:
        raise common.unknown_family(config, ARCHITECTURES)
    row = ROWS[kind]
    config = config.with_defaults(row.defaults)
    _refuse_options(config, row)
    # Heads and rotation.
    head_dim = common.read_head_dim(config)
    if row.window_rope:
        rope, window_rope = parse_layer_ropes(config, head_dim, row.theta)
    else:
        rope, window_rope = parse_rope(config, head_dim, row.theta, share=row.share), None
    shape, windows = common.read_shape(config, rope), row.windows(config)
    bias = config.read_flag("attention_bias", False) if row.bias is None else row.bias
    model = partial(
        row.config,
        **shape,
        intermediate_size=config.read_int("intermediate_size"),
        num_layers=common.read_layer_count(config),
        num_kv_heads=common.read_kv_heads(config),
        head_dim=head_dim,
        rope=rope,
        tie_embeddings=config.read_flag("tie_word_embeddings", False),
        attention_bias=bias,
        **row.fields,
    )
    if row.config is Llama:
        return model(**(_parse_experts(config) if row.experts else {}))
    # A window of all layers, as long as the context, has no effect.
    if row.windows is _same_windows:
        windows = tuple(window for window in windows if window and window < shape["max_length"])
    return model(
        kind=kind,
        window_rope=window_rope,
        out_bias=bias and row.bias is None and row.out_bias,
        windows=windows if any(windows) else (),
        resting=_resting_layers(config, common.read_layer_count(config)) if row.rests else (),
        **{name: config.read_number(key, 1.0, above=0, most=MOST_NUMBER) for name, key in row.scales.items()},
    )


def _parse_experts(config: Fields) -> dict[str, Any]:
    """The experts, and the layers without them."""
    key = "num_experts" if config.has("num_experts") or not config.has("num_local_experts") else "num_local_experts"
    if config.read_int(key, least=0) == 0:
        return {}
    experts = common.parse_experts(config, config.read_int(key), normalize=False)
    return {"experts": experts, "dense_layers": common.parse_dense_layers(config)}


def _refuse_options(config: Fields, row: Row) -> None:
    wrong = config.unsupported({"mlp_bias": (False,), "hidden_act": ("silu",)})
    if row.bias is not None and config.read_flag("attention_bias", row.bias) != row.bias:
        wrong.append(config.describe("attention_bias"))
    if row.fields.get("fused") and config.section("quantization_config").keys():
        wrong.append("quantization_config")
    refuse(config.where, wrong)


def _resting_layers(config: Fields, count: int) -> tuple[int, ...]:
    """The layers without positions; without a list, every `no_rope_layer_interval`-th."""
    every = config.read_int("no_rope_layer_interval")
    listed = config.read_ints("no_rope_layers", None, most=1, count=count)
    if listed is not None and len(listed) != count:
        raise config.wrong("no_rope_layers", list(listed), f"must have {count} entries")
    rotated = listed or [(index + 1) % every for index in range(count)]
    return tuple(index for index, flag in enumerate(rotated) if not flag)


def describe(config: Llama) -> dict[str, Any]:
    """The config.json of a model, in the newer generation's format."""
    kind = "qwen3_moe" if config.experts else "qwen3" if config.qk_norm else "llama"
    kind = config.kind if isinstance(config, LlamaVariant) else kind
    row = ROWS[kind]
    raw = common.describe_shape(row.architecture, kind, config) | {
        **describe_fields(config, common.HEADS | common.TIED | common.BIASES),
        "rope_parameters": describe_rope(config.rope),
        "hidden_act": "silu",
        "pad_token_id": None,
        **describe_fields(config, {key: name for name, key in row.scales.items()}),
    }
    if not isinstance(config, LlamaVariant):
        return raw | (common.describe_experts(config.experts, config.dense_layers) if config.experts else {})
    # Windows and rotations of some layers.
    if row.share is not None:
        raw["rope_parameters"]["partial_rotary_factor"] = config.rope.share
    if row.windows is _same_windows:
        raw["sliding_window"] = config.windows[0] if config.windows else None
    elif row.windows is _listed_windows:
        raw |= common.describe_windows(config.windows or (None,) * config.num_layers)
    elif config.windows:
        raw |= common.describe_windows(config.windows) | {"use_sliding_window": any(config.windows)}
    if config.window_rope is not None:
        ropes = {common.FULL: config.rope, common.SLIDING: config.window_rope}
        raw["rope_parameters"] = {name: describe_rope(rope) for name, rope in ropes.items()}
    if row.rests:
        raw["no_rope_layers"] = [int(index not in config.resting) for index in range(config.num_layers)]
    if isinstance(config.rope.scaling, LongRope):
        raw["original_max_position_embeddings"] = config.rope.scaling.original_length
    return raw


def table(config: Llama, names: Set[str]) -> ModelParams:
    """The table of the weights, with the optional scales of keys and values."""
    weights = config.weights()
    layers = (
        dataclasses.replace(layer, kv_scales=KvScales(f"model.layers.{index}.self_attn."))
        for index, layer in enumerate(weights.layers)
    )
    return dataclasses.replace(weights, layers=tuple(layers))


_CLASSES: tuple[type[Llama], ...] = (Llama, LlamaVariant)
FAMILIES = tuple(
    Family(
        config,
        {row.architecture: kind for kind, row in ROWS.items() if row.config is config},
        parse_config,
        describe,
        table=table,
        open_tensors=scaled.open_tensors,
    )
    for config in _CLASSES
)
"""Llama and Qwen3, and the others."""
