"""Checkpoint directories of EAGLE heads: reading and writing them.

There are two layouts (jspec/checkpoints/eagle_config.py): "safeailab" has the first layer of an EAGLE-3 head under
`midlayer`, "speculators" under `layers.0`.

Optional weights are read if they exist. A tensor that is not used is an error: without it, the head would silently
draft other tokens than it was trained to.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jspec.checkpoints import eagle_config, speculators
from jspec.checkpoints.draft import feature_draft, write
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.llama import name_layer, read_layer
from jspec.checkpoints.source import Source
from jspec.checkpoints.split import refuse_split
from jspec.checkpoints.tensors import Tensors, named_leaf
from jspec.models.decoder import Decoder
from jspec.models.eagle_head import EagleHead, EagleParams
from jspec.models.llama import LayerParams

_UNREAD = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
"""Tensors that are copies of the target's, or that only training uses."""


def matches(source: Source) -> bool:
    """Whether a checkpoint is an EAGLE head's, of any kind; `plan` may still reject it.

    Raises:
      CheckpointError: a file is missing or damaged.
    """
    names = source.config.optional_texts("architectures") or ()
    if speculators.is_speculators(source.config) or any("eagle" in name.lower() for name in names):
        return True
    # The config.json of an EAGLE-1 head is that of an ordinary Llama.
    return "fc.weight" in source.files.names()


def parse_config(source: Source, target: Decoder) -> EagleHead:
    """The head that a checkpoint describes, as `eagle_config.parse_config`."""
    return eagle_config.parse_config(source.config, source.files.names(), target)


def read_params(source: Source, config: EagleHead, tensors: Tensors) -> EagleParams:
    """The weights of a head.

    As in SGLang, the target's embedding is used and not the copy that many heads contain, unless the head's width
    differs or config.json states that the head trained its own (`embed_requires_grad`).

    Raises:
      CheckpointError: a tensor is missing, has an unexpected shape, contradicts a flag in config.json, or is not used.
    """
    fields, names, width, eagle3 = source.config, tensors.names(), config.hidden_size, config.version == 3
    vocab, captured = config.draft_vocab_size, len(config.capture_layers) * config.target_hidden_size
    # Optional weights exist if their tensors do.
    other_width = width != config.target_hidden_size
    own_embed = other_width or fields.read_flag("embed_requires_grad", False)
    own_head = "lm_head.weight" in names or vocab != config.vocab_size or other_width
    input_norm = _check_flags(fields, ("norm_before_fc",), "input_norm.weight", names)
    first = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
    layers = _read_layers(config, fields, tensors, first)
    params = EagleParams(
        embed=tensors.device("embed_tokens.weight", config.vocab_size, width, options=named_leaf("embed"))
        if own_embed
        else None,
        fc=tensors.fused([("fc.weight", width)], captured if eagle3 else 2 * width, named_leaf("fc")),
        fc_bias=tensors.device("fc.bias", width) if "fc.bias" in names else None,
        fc_norms=_read_fc_norms(config, fields, tensors) if eagle3 else None,
        input_norm=tensors.device("input_norm.weight", captured) if eagle3 and input_norm else None,
        hidden_norm=tensors.device(first + "hidden_norm.weight", width) if eagle3 else None,
        layers=layers,
        norm=tensors.device("norm.weight", width) if eagle3 else None,
        lm_head=tensors.fused([("lm_head.weight", vocab)], width, named_leaf("lm_head"))
        if eagle3 and own_head
        else None,
        ids=speculators.read_ids(tensors, vocab, config.vocab_size) if eagle3 else None,
    )
    unread = _UNREAD if eagle3 else _UNREAD | {"lm_head.weight"}
    owner = f"EAGLE-{config.version} head, if it is one and its config.json is complete,"
    tensors.refuse_unread(owner, lambda name: name in unread or name.endswith("inv_freq"))
    return params


def _read_fc_norms(config: EagleHead, fields: Fields, tensors: Tensors) -> tuple[Array, ...] | None:
    """A norm for each captured layer, under either of two names; None if there are none."""
    legacy = ["aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"]
    numbered = [f"fc_norm.{index}.weight" for index in range(len(config.capture_layers))]
    names = legacy if legacy[0] in tensors.names() else numbered
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


def save(
    directory: str | Path,
    config: EagleHead,
    params: EagleParams,
    *,
    layout: str,
    dtype: str = "bfloat16",
    verifier: str | None = None,
) -> None:
    """Writes config.json and model.safetensors to a directory, which is created if needed.

    SGLang reads "safeailab", vLLM both. SGLang ignores `norm_before_residual`, `input_norm`, norms of heads and biases
    of the attention, and drafts less well with a head that has them.

    Args:
      layout: "safeailab", or for EAGLE-3 heads "speculators".
      dtype: precision of the stored weights.
      verifier: the target's directory or hub id, which "speculators" records for vLLM.

    Raises:
      ValueError: an unknown layout or dtype, a head that the layout cannot represent, or one that is split.
    """
    refuse_split(config)
    raw = eagle_config.describe(layout, config, params, dtype, verifier)
    ids = speculators.name_ids(params.ids, config.vocab_size)
    write(directory, raw, chain(_named_tensors(config, params, layout), ids.items()), dtype)


def _named_tensors(config: EagleHead, params: EagleParams, layout: str) -> Iterator[tuple[str, Any]]:
    """All weights except the vocabulary, under their names in a layout, [out, in]."""
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
    yield "fc.weight", np.asarray(params.fc).T
    optional = {
        "embed_tokens.weight": params.embed,
        "fc.bias": params.fc_bias,
        "input_norm.weight": params.input_norm,
        first + "hidden_norm.weight": params.hidden_norm,
        "norm.weight": params.norm,
        "lm_head.weight": None if params.lm_head is None else np.asarray(params.lm_head).T,
    }
    yield from ((name, tensor) for name, tensor in optional.items() if tensor is not None)


KIND = feature_draft(matches, parse_config, read_params)
