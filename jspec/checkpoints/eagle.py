"""Checkpoint directories of EAGLE heads: config.json and tensors, in two layouts.

"safeailab" is the layout of the EAGLE authors (github.com/SafeAILab/EAGLE), written by SpecForge and read by SGLang:
the config.json of a Llama with a few more keys; the first layer of an EAGLE-3 head is under `midlayer`. "speculators"
(github.com/vllm-project/speculators), read by vLLM, is for EAGLE-3 only: the configuration of the layer is under
`transformer_layer_config`, and the layer under `layers.0`. In both, a P-EAGLE head has the tensor `mask_hidden`. A head
with latent attention has the first layout, with DeepSeek's keys and tensors; that of an EAGLE-4 head is in `eagle4`.

Optional weights are read if they exist. An unused tensor is an error: the head would silently draft other tokens than
in training.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jspec.checkpoints import draft as common
from jspec.checkpoints import eagle4, speculators, vocabulary
from jspec.checkpoints.config import read_eps
from jspec.checkpoints.deepseek import describe_latent, parse_latent
from jspec.checkpoints.fields import Fields, refuse
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.source import Source
from jspec.checkpoints.speculators import is_speculators, read_layer_config
from jspec.checkpoints.spelling import Spellings
from jspec.checkpoints.tensors import Tensors
from jspec.models import weights
from jspec.models.decoder import Decoder
from jspec.models.eagle_head import EagleHead, EagleParams
from jspec.models.latent_head import LatentHead
from jspec.models.latent_weights import Latent
from jspec.models.rope import YarnRope
from jspec.models.stack import LayerParams

LAYOUTS = ("safeailab", "speculators")

SPELLINGS = Spellings(
    owner="an EAGLE head",
    sections=("eagle_config", "transformer_layer_config"),
    fields={
        "fc_norm": ("use_aux_norm",),
        **dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output", "embed_requires_grad"), ()),
        **dict.fromkeys(("use_aux_hidden_state", "num_aux_hidden_states", "truncated_vocab_size"), ()),
        **dict.fromkeys(("bias", "qkv_bias"), ()),
    },
    options={
        **dict.fromkeys(("is_causal", "causal", "causal_head", "next_layer_regular"), (True,)),
        **dict.fromkeys(("use_input_layernorm_in_first_layer", "use_last_layernorm"), (True,)),
        "block_size": (),
        "speculators_model_type": ("eagle3",),
        "use_mtp_layernorm": (False,),
        "eagle_decoder_type": ("llama",),
        "dspark_bonus_anchor": (False,),
        "input_embedding_scale": (1.0,),
        "parallel_draft_step": (1,),
        "logit_scale": (1.0,),
    },
)
_MASK_TOKEN = ("mask_token_id", "pard_token", "ptd_token_id")
_WITH_MASKS = dataclasses.replace(
    SPELLINGS,
    owner="a P-EAGLE head",
    fields={**SPELLINGS.fields, _MASK_TOKEN[0]: _MASK_TOKEN[1:]},
    options={**SPELLINGS.options, "parallel_drafting": (True,), "speculators_model_type": ("peagle",)},
)
"""The spellings of P-EAGLE heads."""
_LATENT_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim")
_LATENT_OPTIONS = {
    "eagle_decoder_type": ("llama", "kimik2"),
    "use_mla": (True,),
    "mla_use_nope": (False,),
    **dict.fromkeys(("rope_interleave", "rope_interleaved"), (True,)),
}
_EAGLE3_KEYS = (
    *("fc_norm", "norm_before_residual", "norm_before_fc", "norm_output", "num_aux_hidden_states"),
    *common.CAPTURED,
)
"""Keys of EAGLE-3 heads only."""
_FC_NORMS = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")
"""Older names of the norms of captured layers."""
_UNREAD = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
"""Tensors to ignore: copies of the target's, and some for training only."""


def read_fields(config: Fields, names: set[str]) -> Fields:
    """Read the fields of a head; in EAGLE-1 heads converted by vLLM, they are under `model`. names: of its tensors."""
    spellings = _WITH_MASKS if "mask_hidden" in names else SPELLINGS
    spellings = eagle4.extend(SPELLINGS) if eagle4.matches(config) else spellings
    # Latent attention has DeepSeek's keys in addition.
    if is_latent(names):
        spellings = dataclasses.replace(
            spellings,
            owner=f"{spellings.owner} with latent attention",
            fields={**spellings.fields, **dict.fromkeys(_LATENT_FIELDS, ())},
            options={**spellings.options, **_LATENT_OPTIONS},
        )
    if config.read_text("model_type", None) == "eagle" and config.has("model"):
        spellings = dataclasses.replace(spellings, sections=(*spellings.sections, "model"))
    return read_layer_config(config, spellings.read(config), ("llama", "qwen2", "qwen3"))


def parse_config(source: Source, target: Decoder) -> EagleHead:
    """Parse the config.json of a head of either layout."""
    # Refuse what needs another forward.
    config, names = source.config, source.files.names()
    common.check_class(config, is_latent(names))
    eagle3, masks = is_eagle3(config, names), "mask_hidden" in names
    peagle = [
        *common.find_architectures(config, ["peagle"]),
        *(config.describe(key) for key in _MASK_TOKEN if config.has(key)),
    ]
    if peagle and not masks:
        raise CheckpointError(f"{config.where}: {peagle[0]} is of P-EAGLE, but the tensor 'mask_hidden' is missing")
    if masks and not eagle3:
        refuse(config.where, ["the tensor 'mask_hidden' of P-EAGLE"], "an EAGLE-1 head")
    fields = read_fields(config, names)
    _check_options(config, fields, eagle3)
    fields = _with_depth(fields, names) if eagle3 else fields
    # The configuration.
    kind, latent = EagleHead, {}
    if is_latent(names):
        kind, latent = LatentHead, {"latent": _read_latent(fields, eagle3)}
        # Latent attention does not use head_dim, so its value does not matter.
        fields.read_int("head_dim", None)
        fields = fields.replaced(head_dim=latent["latent"].rope_dim)
    layers = common.read_layers(fields, target, eagle3 and "lm_head.weight" in names)
    windows = common.read_windows(fields)
    head = kind(
        **latent,
        **layers,
        version=3 if eagle3 else 1,
        capture_layers=_read_captured(fields, target) if eagle3 else (target.num_layers + 1,),
        windows=windows if any(windows) else (),
        norm_before_residual=fields.read_flag("norm_before_residual", False),
        norm_output=fields.read_flag("norm_output", False),
        # EAGLE-1 heads read embeddings without the target's factor; EAGLE-3 heads normalize them.
        embed_scale=None if eagle3 or target.embed_factor == 1.0 else 1.0,
        mask_token=common.read_mask_token(fields, target, _has_embed(fields, names)) if masks else None,
        **eagle4.read_options(config, fields, layers),
    )
    if isinstance(head, LatentHead):
        _check_latent(fields, head)
    # An EAGLE-1 head continues from the target's hidden state.
    if not eagle3 and head.hidden_size != target.hidden_size:
        raise fields.wrong("hidden_size", head.hidden_size, f"must be the target's, {target.hidden_size}")
    return head


def is_eagle3(config: Fields, names: set[str]) -> bool:
    """Whether this is an EAGLE-3 head, with a norm of the feature, rather than an EAGLE-1 or EAGLE-2 head."""
    named = common.find_architectures(config, ["eagle3", "eagle4"])
    stated = is_speculators(config) or config.has("eagle_config") or bool(named)
    return stated or bool({"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & names)


def is_latent(names: set[str]) -> bool:
    """Whether the layers have latent attention."""
    return any(part in name for part in (".kv_a_proj_with_mqa.", ".kv_b_proj.") for name in names)


def _read_latent(fields: Fields, eagle3: bool) -> Latent:
    """Read the sizes of latent attention. As in SGLang and vLLM, all its norms have one epsilon."""
    if not eagle3:
        refuse(fields.where, ["the tensor kv_b_proj of latent attention"], "an EAGLE-1 head")
    latent = dataclasses.replace(parse_latent(fields), eps=read_eps(fields))
    width = latent.nope_dim + latent.rope_dim
    if fields.read_int("qk_head_dim", width) != width:
        raise fields.wrong("qk_head_dim", fields.read_int("qk_head_dim"), f"must be {width}, rotated or not")
    return latent


def _check_latent(fields: Fields, head: LatentHead) -> None:
    """Raise CheckpointError if the layers need another attention than DeepSeek's."""
    if head.num_kv_heads != head.num_heads:
        problem = f"must be num_attention_heads={head.num_heads} with latent attention"
        raise fields.wrong("num_key_value_heads", head.num_kv_heads, problem)
    if any(head.windows):
        raise fields.wrong("sliding_window", next(filter(None, head.windows)), "latent attention has no windows")
    if fields.read_flag("is_neox_style", False):
        raise fields.wrong("is_neox_style", True, "must be false with latent attention")
    # vLLM treats any scaling as YaRN, and SGLang accepts no other.
    if not isinstance(head.rope.scaling, YarnRope | None):
        raise fields.wrong("rope_scaling", fields.value("rope_scaling"), "must be yarn or none with latent attention")


def _check_options(config: Fields, fields: Fields, eagle3: bool) -> None:
    """Raise CheckpointError if the configuration requires another forward than `EagleHead`'s."""
    if fields.read_flag("norm_before_fc", False) and fields.read_flag("fc_norm", False):
        refuse(config.where, ["norm_before_fc together with fc_norm"])
    if fields.read_int("truncated_vocab_size", size := fields.read_int("vocab_size")) != size:
        raise fields.wrong("truncated_vocab_size", fields.read_int("truncated_vocab_size"), f"must be {size}")
    if not eagle3:
        refuse(config.where, [fields.describe(key) for key in _EAGLE3_KEYS if fields.is_set(key)], "an EAGLE-1 head")
    if config.read_text("speculators_model_type", None) == "eagle3" and not config.has("norm_before_residual"):
        raise CheckpointError(
            f"{config.where}: the key 'norm_before_residual' is missing, and its default is false in speculators but "
            "true in vLLM: add the value that the head was trained with"
        )


def _with_depth(fields: Fields, names: set[str]) -> Fields:
    """Correct the depth of a head with one layer: in some files, num_hidden_layers is the target's."""
    layers = {name.split(".")[1] if name.startswith("layers.") else "0" for name in names if "mlp." in name}
    stated = fields.read_int("num_hidden_layers")
    if stated == 1 or layers != {"0"}:
        return fields
    problem = f"{fields.where}: {fields.name('num_hidden_layers')}={stated}, but there are the tensors of one layer"
    warnings.warn(f"{problem}: the head has one", stacklevel=2)
    return fields.replaced(num_hidden_layers=1)


def _read_captured(fields: Fields, target: Decoder) -> tuple[int, ...]:
    """Read the captured hidden states of an EAGLE-3 head, as in `Decoder.apply`."""
    count = target.num_layers
    if not fields.read_flag("use_aux_hidden_state", True):
        if any(fields.read_ints(key, None, least=-1) for key in common.CAPTURED):
            raise fields.wrong("use_aux_hidden_state", False, "must be true with ids of captured layers")
        return (count + 1,)
    # The default: an early, a middle and a late layer.
    captured = common.read_captured(fields, target, (1, count // 2 - 1, count - 4))
    # A stated count must agree.
    stated = fields.read_int("num_aux_hidden_states", len(captured))
    if stated != len(captured):
        raise fields.wrong(
            "num_aux_hidden_states", stated, f"the list of captured layers selects {len(captured)} layers"
        )
    return captured


def describe(layout: str, config: EagleHead, params: EagleParams, verifier: str | None) -> dict[str, Any]:
    """The config.json of a head in a layout. verifier: the name of the target."""
    _check_layout(layout, config, params)
    first, latent = params.layers[0], config.latent if isinstance(config, LatentHead) else None
    layers = common.describe_layers(
        config, "deepseek_v3" if latent else "llama", not latent and first.o_bias is not None
    )
    # Keys of EAGLE-3, at the top level in both layouts.
    eagle3: dict[str, Any] = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": params.input_norm is not None,
        "fc_norm": params.fc_norms is not None,
        "norm_output": config.norm_output,
        "embed_requires_grad": params.embed is not None and config.hidden_size == config.target_hidden_size,
    }
    if layout == "speculators":
        layers |= {} if first.q_norm is None else {"model_type": "qwen3"}
        name, kind, tokens = "Eagle3Speculator", "eagle3", 3
        if config.at_once:
            name, kind, tokens = "PEagleSpeculator", "peagle", 8
            eagle3["mask_token_id"] = config.mask_token
        raw = speculators.describe(config, name, kind, tokens, verifier, layers)
        return {**raw, **eagle3, "eagle_aux_hidden_state_layer_ids": list(config.capture_layers)}
    layers |= {"bias": params.fc_bias is not None}
    if latent:
        del layers["head_dim"]
    layers |= describe_latent(latent) if latent else {"qkv_bias": first.qkv_bias is not None}
    if config.version == 1:
        return {**layers, "architectures": ["LlamaForCausalLM"]}
    # Captured layers: vLLM reads them at the top level, as inputs of layers; SGLang in the section, as outputs.
    outputs = [layer - 1 for layer in config.capture_layers] if params.fc is not None else []
    section = {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": params.fc is not None}
    if config.rank:
        return eagle4.describe(config, layers, eagle3, section)
    inputs = {} if params.fc is None else {"eagle_aux_hidden_state_layer_ids": list(config.capture_layers)}
    return {
        **layers,
        **eagle3,
        **({"ptd_token_id": config.mask_token, "parallel_drafting": True} if config.at_once else {}),
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if latent else "LlamaForCausalLMEagle3"],
        "draft_vocab_size": None if params.lm_head is None else config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **inputs,
        "eagle_config": section,
    }


def _check_layout(layout: str, config: EagleHead, params: EagleParams) -> None:
    # EAGLE-1 has one layout and no reduced vocabulary.
    if config.version == 1 and layout != "safeailab":
        raise ValueError(f"layout={layout!r}: must be 'safeailab' for an EAGLE-1 head")
    if config.version == 1 and (params.ids is not None or params.lm_head is not None):
        raise ValueError(
            "an EAGLE-1 checkpoint cannot hold a reduced vocabulary: save the full head and the list of ids instead"
        )
    # Combinations without a key in the layout.
    if isinstance(config, LatentHead):
        if layout != "safeailab":
            raise ValueError(f"layout={layout!r}: must be 'safeailab' for a head with latent attention")
        if config.latent.eps != config.rms_norm_eps:
            raise ValueError(f"latent.eps={config.latent.eps}: must be rms_norm_eps={config.rms_norm_eps}")
    if config.rank:
        eagle4.check(layout, config, params)
    if params.mask_embed is not None:
        raise ValueError(f"layout={layout!r} cannot hold mask_embed")
    if params.input_norm is not None and params.fc_norms is not None:
        raise ValueError("a head must not have both input_norm and fc_norms")
    if layout == "speculators":
        if params.fc_bias is not None:
            raise ValueError("layout='speculators' cannot hold fc_bias: use 'safeailab'")
        if any((layer.qkv_bias is None) != (layer.o_bias is None) for layer in params.layers):
            raise ValueError("layout='speculators' requires biases for all of q, k, v and o, or none: use 'safeailab'")


def matches(source: Source) -> bool:
    """Whether a checkpoint holds an EAGLE head, of any version."""
    if is_speculators(source.config) or common.find_architectures(source.config, ["eagle"]):
        return True
    # The config.json of an EAGLE-1 head is an ordinary Llama's.
    return "fc.weight" in source.files.names()


def read_params(source: Source, config: EagleHead, tensors: Tensors) -> EagleParams:
    """Read the weights of a head.

    As in SGLang, the head uses the target's embedding instead of the copy in many checkpoints, unless its width differs
    or config.json states that the embedding was trained (`embed_requires_grad`).
    """
    # Which tensors the head has, from its options and its names.
    names = tensors.names()
    eagle3, fields = config.version == 3, read_fields(source.config, names)
    other_width = config.hidden_size != config.target_hidden_size
    _check_flag(fields, "norm_before_fc", "input_norm.weight", names)
    table = config.weights(
        names,
        factors=eagle4.has_factors(source.config, names),
        embed=other_width or _has_embed(fields, names),
        lm_head="lm_head.weight" in names or config.draft_vocab_size != config.vocab_size or other_width,
        fc=_has_fc(config, fields, tensors),
        fc_norms=_find_fc_norms(config, fields, names) if eagle3 else (),
        qk_norm=source.config.section("transformer_layer_config").read_text("model_type", None) == "qwen3",
    )
    _check_biases(source.config, fields, names)
    # Read them; embedding and LM head get rows for the target's tokens.
    size, ids, mask_embed = config.vocab_size, None, None
    if eagle3:
        tokens = vocabulary.read_vocabulary(tensors, fields, size, config.draft_vocab_size)
        embed, lm_head = tokens.embedding(table.embed), tokens.head(table.lm_head)
        parts = eagle4.reordered(table.candidates, tokens)
        hidden: Any = table.mask_hidden
        if config.mask_token is not None:
            mask_embed = tokens.mask_embedding(tensors, config.mask_token, config.hidden_size)
            # Some writers leave out axes of size 1.
            shape = (1,) * (len(tensors.files.shape("mask_hidden")) - 1) + hidden.shape
            hidden = dataclasses.replace(hidden, tensors={"mask_hidden": shape})
        table = dataclasses.replace(table, embed=embed, lm_head=lm_head, mask_hidden=hidden, candidates=parts)
        ids = tokens.ids
    params = dataclasses.replace(weights.read(table, tensors), ids=ids, mask_embed=mask_embed)
    _check_norms(config, tensors)
    # Ignore tensors known to have no effect, and refuse all others.
    unread = _UNREAD if eagle3 else _UNREAD | {"lm_head.weight"}
    owner = f"EAGLE-{config.version} head, if it is one and its config.json is complete,"
    tensors.refuse_unread(owner, lambda name: name in unread or name.endswith("inv_freq"))
    return params


def _has_embed(fields: Fields, names: set[str]) -> bool:
    """Whether a head has a trained embedding. By default only that of P-EAGLE, learned with the mask token's."""
    return fields.read_flag("embed_requires_grad", {"mask_hidden", "embed_tokens.weight"} <= names)


def _check_biases(config: Fields, fields: Fields, names: set[str]) -> None:
    """Raise CheckpointError if config.json asks for biases, in keys of its layout, and there are no tensors.

    Heads of SafeAILab and SpecForge ignore `attention_bias`: it is copied from the target's config.json.
    """
    attention = "attention_bias" if is_speculators(config) else "qkv_bias"
    keys = (attention,) if is_eagle3(config, names) else (attention, "bias")
    for key, tensor in (("bias", "fc.bias"), ("qkv_bias", "q_proj.bias"), ("attention_bias", "q_proj.bias")):
        if fields.read_flag(key, False) and key in keys and not any(name.endswith(tensor) for name in names):
            raise CheckpointError(f"{fields.where}: {fields.describe(key)}, but there are no tensors {tensor!r}")


def _has_fc(config: EagleHead, fields: Fields, tensors: Tensors) -> bool:
    """Whether a projection of captured states gives the feature; otherwise it is the target's last hidden state.

    Raises:
      CheckpointError: `fc.weight` reads several states, but config.json states that it captures only the last one.
    """
    if fields.read_flag("use_aux_hidden_state", True) or config.hidden_size != config.target_hidden_size:
        return True
    if "fc.weight" not in tensors.names():
        return False
    width, shape = config.target_hidden_size, tensors.files.shape("fc.weight")
    if shape != (config.hidden_size, width):
        problem = f"must be true, as fc.weight has shape {shape}, or fc.weight must read the target's width, {width}"
        raise fields.wrong("use_aux_hidden_state", False, problem)
    return True


def _find_fc_norms(config: EagleHead, fields: Fields, names: set[str]) -> Sequence[str]:
    """The names of the norms of captured layers, numbered or older ones; empty if there are none."""
    numbered = [f"fc_norm.{index}.weight" for index in range(len(config.capture_layers))]
    norms = _FC_NORMS if _FC_NORMS[0] in names else numbered
    return norms if _check_flag(fields, "fc_norm", norms[0], names) else ()


def _check_flag(fields: Fields, key: str, tensor: str, names: set[str]) -> bool:
    """Whether a tensor exists. Raises CheckpointError if a flag in config.json contradicts the answer."""
    if fields.read_flag(key, tensor in names) != (tensor in names):
        state = "present" if tensor in names else "missing"
        raise CheckpointError(f"{fields.where}: {fields.describe(key)}, but the tensor {tensor!r} is {state}")
    return tensor in names


def _check_norms(config: EagleHead, tensors: Tensors) -> None:
    """Raise CheckpointError if a layer after the first has its norm under two names with different values."""
    for index in range(1, config.num_layers):
        norms = [f"layers.{index}.{name}.weight" for name in ("input_layernorm", "hidden_norm")]
        if not set(norms) <= tensors.names():
            continue
        if not np.array_equal(*(tensors.read(name, config.hidden_size) for name in norms)):
            raise CheckpointError(
                f"{tensors.directory}: {norms[0]} and {norms[1]} differ; vLLM reads the first in later layers and "
                "SGLang the second: keep only the one that the head was trained with"
            )


def named_tensors(layout: str, config: EagleHead, params: EagleParams) -> Iterator[tuple[str, Any]]:
    """All weights by their names in a layout."""
    midlayer = config.version == 3 and layout == "safeailab" and not config.rank
    first = "midlayer." if midlayer else "layers.0."
    # The names of optional tensors, for the table.
    optional = {"fc.bias": params.fc_bias, "input_norm.weight": params.input_norm, first: first}
    for index, layer in enumerate(params.layers):
        prefix = f"layers.{index}." if index else first
        if isinstance(layer, LayerParams):
            optional |= {
                prefix + "self_attn.q_norm.weight": layer.q_norm,
                prefix + "self_attn.q_proj.bias": layer.qkv_bias,
                prefix + "self_attn.o_proj.bias": layer.o_bias,
            }
        if midlayer and index:
            # SGLang has one class for all layers, so it reads this name in each.
            yield prefix + "hidden_norm.weight", layer.attention_norm
    # Write by the table, then the ids of a reduced vocabulary.
    table = config.weights(
        {name for name, weight in optional.items() if weight is not None},
        embed=params.embed is not None,
        lm_head=params.lm_head is not None,
        fc=params.fc is not None,
        fc_norms=[f"fc_norm.{index}.weight" for index in range(len(params.fc_norms or ()))],
    )
    yield from weights.write(table, dataclasses.replace(params, ids=None, mask_embed=None))
    yield from vocabulary.name_ids(params.ids, config.vocab_size)


KIND = common.DraftKind(EagleHead, LAYOUTS, matches, parse_config, read_params, describe, named_tensors)
