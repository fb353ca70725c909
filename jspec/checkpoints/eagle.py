"""Checkpoint directories of EAGLE heads: reading and writing them.

There are two layouts (jspec/checkpoints/eagle_config.py): "safeailab" has the first layer of an EAGLE-3 head under
`midlayer`, "speculators" under `layers.0`.

Optional weights are read if they exist. A tensor that is not used is an error: without it, the head would silently
draft other tokens than it was trained to.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jspec.checkpoints import eagle_config, speculators
from jspec.checkpoints.draft import DraftKind, Stored, matrix, name_table, read_table
from jspec.checkpoints.draft_config import find_architectures
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.llama import name_layer, read_layer
from jspec.checkpoints.source import Source
from jspec.checkpoints.tensors import Tensors
from jspec.models.eagle_head import EagleHead, EagleParams
from jspec.models.llama import LayerParams
from jspec.models.sizes import shape_of

_TENSORS = {
    "embed": Stored("embed_tokens.weight"),
    "fc": matrix("fc.weight"),
    "fc_bias": Stored("fc.bias"),
    "input_norm": Stored("input_norm.weight"),
    "norm": Stored("norm.weight"),
    "lm_head": matrix("lm_head.weight"),
}
"""Field of `EagleParams` -> its tensor."""
_FC_NORMS = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")
"""Older names of the norms for each captured layer."""
_UNREAD = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
"""Tensors that are copies of the target's, or that only training uses."""


def matches(source: Source) -> bool:
    """Whether a checkpoint is that of an EAGLE head, of any version."""
    if speculators.is_speculators(source.config) or find_architectures(source.config, ["eagle"]):
        return True
    # The config.json of an EAGLE-1 head is that of an ordinary Llama.
    return "fc.weight" in source.files.names()


def read_params(source: Source, config: EagleHead, tensors: Tensors) -> EagleParams:
    """Read the weights of a head.

    As in SGLang, the target's embedding is used and not the copy that many heads contain, unless the head's width
    differs or config.json states that the head trained its own (`embed_requires_grad`).
    """
    eagle3, fields, names = config.version == 3, source.config, tensors.names()
    first = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
    shapes = _find_optional(config, fields, names, config.param_shapes(tensors.dtype))
    params = EagleParams(
        layers=_read_layers(config, fields, tensors, first),
        hidden_norm=tensors.device(first + "hidden_norm.weight", config.hidden_size) if eagle3 else None,
        **read_table(_TENSORS, shapes, tensors),
        fc_norms=_read_fc_norms(config, fields, tensors) if eagle3 else None,
        ids=speculators.read_ids(tensors, config.draft_vocab_size, config.vocab_size) if eagle3 else None,
    )
    unread = _UNREAD if eagle3 else _UNREAD | {"lm_head.weight"}
    owner = f"EAGLE-{config.version} head, if it is one and its config.json is complete,"
    tensors.refuse_unread(owner, lambda name: name in unread or name.endswith("inv_freq"))
    return params


def _find_optional(config: EagleHead, fields: Fields, names: set[str], shapes: EagleParams) -> EagleParams:
    """The shapes of a head with those of the optional weights that it has, and without an LM head that it shares."""
    shape, width, outer = shape_of(shapes.fc.dtype), config.hidden_size, config.target_hidden_size
    own_head = "lm_head.weight" in names or config.draft_vocab_size != config.vocab_size or width != outer
    input_norm = _check_flags(fields, ("norm_before_fc",), "input_norm.weight", names) and config.version == 3
    return dataclasses.replace(
        shapes,
        embed=shape((config.vocab_size, width)) if fields.read_flag("embed_requires_grad", False) else shapes.embed,
        fc_bias=shape((width,)) if "fc.bias" in names else None,
        input_norm=shape((len(config.capture_layers) * outer,)) if input_norm else None,
        lm_head=shapes.lm_head if own_head else None,
    )


def _read_fc_norms(config: EagleHead, fields: Fields, tensors: Tensors) -> tuple[Array, ...] | None:
    """A norm for each captured layer, under either of two names; None if there are none."""
    numbered = [f"fc_norm.{index}.weight" for index in range(len(config.capture_layers))]
    names = _FC_NORMS if _FC_NORMS[0] in tensors.names() else numbered
    if not _check_flags(fields, ("fc_norm", "use_aux_norm"), names[0], tensors.names()):
        return None
    return tuple(tensors.device(name, config.target_hidden_size) for name in names)


def _check_flags(fields: Fields, keys: tuple[str, ...], tensor: str, names: set[str]) -> bool:
    """Whether a tensor exists; raises if a flag in config.json contradicts that."""
    stated = {key: fields.read_flag(key) for key in keys if fields.has(key)}
    if stated and any(stated.values()) != (tensor in names):
        state = "present" if tensor in names else "missing"
        flags = ", ".join(f"{key}={value}" for key, value in stated.items())
        raise CheckpointError(f"{fields.where}: {flags}, but the tensor {tensor!r} is {state}")
    return tensor in names


def _read_layers(config: EagleHead, fields: Fields, tensors: Tensors, first: str) -> tuple[LayerParams, ...]:
    """The decoder layers. first: with what the names of the first one begin."""
    qk_norm = fields.section("transformer_layer_config").optional_text("model_type") == "qwen3"
    prefixes = [first, *(f"layers.{index}." for index in range(1, config.num_layers))]
    return tuple(_read_layer(config, tensors, prefix, index, qk_norm) for index, prefix in enumerate(prefixes))


def _read_layer(config: EagleHead, tensors: Tensors, prefix: str, index: int, qk_norm: bool) -> LayerParams:
    """One decoder layer. qk_norm: whether norms of heads are required; otherwise they are optional."""
    names, width = tensors.names(), config.hidden_size
    input_norm, hidden_norm = prefix + "input_layernorm.weight", prefix + "hidden_norm.weight"
    norm = None
    if index == 0:
        norm = tensors.device(input_norm, width) if config.version == 3 else None
    elif input_norm in names and hidden_norm in names:
        norm = tensors.device(input_norm, width)
        if not jnp.array_equal(norm, tensors.device(hidden_norm, width)):
            raise CheckpointError(
                f"{tensors.directory}: {input_norm} and {hidden_norm} differ; vLLM reads the first in later layers and "
                "SGLang the second: keep only the one that the head was trained with"
            )
    else:
        norm = tensors.device(hidden_norm if hidden_norm in names else input_norm, width)
    return read_layer(
        config,
        tensors,
        prefix,
        norm,
        input_width=2 * width if config.version == 3 and index == 0 else width,
        qkv_bias=prefix + "self_attn.q_proj.bias" in names,
        o_bias=prefix + "self_attn.o_proj.bias" in names,
        qk_norm=qk_norm or prefix + "self_attn.q_norm.weight" in names,
    )


def named_tensors(layout: str, config: EagleHead, params: EagleParams) -> Iterator[tuple[str, Any]]:
    """All weights under their names in a layout."""
    midlayer = config.version == 3 and layout == "safeailab"
    first = "midlayer." if midlayer else "layers.0."
    for index, layer in enumerate(params.layers):
        prefix = f"layers.{index}." if index else first
        yield from name_layer(config, layer, prefix)
        if layer.attention_norm is not None:
            yield prefix + "input_layernorm.weight", layer.attention_norm
            if midlayer and index:
                # SGLang reads this one, as it has one class for all layers.
                yield prefix + "hidden_norm.weight", layer.attention_norm
    for index, norm in enumerate(params.fc_norms or ()):
        yield f"fc_norm.{index}.weight", norm
    if params.hidden_norm is not None:
        yield first + "hidden_norm.weight", params.hidden_norm
    yield from name_table(_TENSORS, params)
    yield from speculators.name_ids(params.ids, config.vocab_size)


KIND = DraftKind(
    EagleHead,
    eagle_config.LAYOUTS,
    matches,
    eagle_config.parse_config,
    read_params,
    eagle_config.describe,
    named_tensors,
)
