"""Checkpoint directories of EAGLE heads: reading and writing them.

There are two layouts (jspec/checkpoints/eagle_config.py): "safeailab" has the first layer of an EAGLE-3 head under
`midlayer`, "speculators" under `layers.0`.

Optional weights are read if they exist. An unused tensor is an error: without it, the head would silently draft other
tokens than in training.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jspec.checkpoints import eagle_config, speculators, vocabulary
from jspec.checkpoints.draft import DraftKind
from jspec.checkpoints.draft_config import find_architectures
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.source import Source
from jspec.checkpoints.tensors import Tensors
from jspec.models import weights
from jspec.models.eagle_head import EagleHead, EagleParams

_FC_NORMS = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")
"""Older names of the norms for each captured layer."""
_UNREAD = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
"""Copies of the target's tensors, and those for training alone."""


def matches(source: Source) -> bool:
    """Whether a checkpoint holds an EAGLE head, of any version."""
    if speculators.is_speculators(source.config) or find_architectures(source.config, ["eagle"]):
        return True
    # The config.json of an EAGLE-1 head is an ordinary Llama's.
    return "fc.weight" in source.files.names()


def read_params(source: Source, config: EagleHead, tensors: Tensors) -> EagleParams:
    """Read the weights of a head.

    As in SGLang, the target's embedding is used and not the copy that many heads contain, unless the head's width
    differs or config.json states training of its own (`embed_requires_grad`).
    """
    # Which tensors the head has, from its options and its names.
    eagle3, fields, names = config.version == 3, eagle_config.read_fields(source.config), tensors.names()
    other_width = config.hidden_size != config.target_hidden_size
    _check_flag(fields, "norm_before_fc", "input_norm.weight", names)
    table = config.weights(
        names,
        embed=other_width or fields.read_flag("embed_requires_grad", False),
        lm_head="lm_head.weight" in names or config.draft_vocab_size != config.vocab_size or other_width,
        fc=_has_fc(config, fields, tensors),
        fc_norms=_find_fc_norms(config, fields, names) if eagle3 else (),
        qk_norm=source.config.section("transformer_layer_config").optional_text("model_type") == "qwen3",
    )
    _check_biases(source.config, fields, names)
    # Read them, with rows for the target's tokens.
    size, ids = config.vocab_size, None
    if eagle3:
        tokens = vocabulary.read_vocabulary(tensors, fields, size, config.draft_vocab_size)
        embed, lm_head = tokens.embedding(table.embed), tokens.head(table.lm_head)
        table, ids = dataclasses.replace(table, embed=embed, lm_head=lm_head), tokens.ids
    params = dataclasses.replace(weights.read(table, tensors), ids=ids)
    _check_norms(config, tensors)
    # Tensors of no use are known by name; refuse all others.
    unread = _UNREAD if eagle3 else _UNREAD | {"lm_head.weight"}
    owner = f"EAGLE-{config.version} head, if it is one and its config.json is complete,"
    tensors.refuse_unread(owner, lambda name: name in unread or name.endswith("inv_freq"))
    return params


def _check_biases(config: Fields, fields: Fields, names: set[str]) -> None:
    """Raises CheckpointError if biases of config.json are missing, whose writer would have stored them.

    SafeAILab's and SpecForge's heads ignore `attention_bias`, a copy of the target's key.
    """
    honored = "attention_bias" if speculators.is_speculators(config) else "qkv_bias"
    keys = (honored,) if eagle_config.is_eagle3(config, fields, names) else (honored, "bias")
    for key, tensor in (("bias", "fc.bias"), ("qkv_bias", "q_proj.bias"), ("attention_bias", "q_proj.bias")):
        if fields.read_flag(key, False) and key in keys and not any(name.endswith(tensor) for name in names):
            raise CheckpointError(f"{fields.where}: {fields.describe(key)}, but there are no tensors {tensor!r}")


def _has_fc(config: EagleHead, fields: Fields, tensors: Tensors) -> bool:
    """Whether the feature is a projection of captured states; the target's last hidden state can be one itself.

    Raises:
      CheckpointError: such a head has a projection of more states.
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
    """The norms of captured layers, under either of two names; none if there are none."""
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
    """Raises CheckpointError if a layer after the first one has two names for its norm, and they differ."""
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
    """All weights under their names in a layout."""
    midlayer = config.version == 3 and layout == "safeailab"
    first = "midlayer." if midlayer else "layers.0."
    # The optional tensors of this head.
    optional = {"fc.bias": params.fc_bias, "input_norm.weight": params.input_norm, first: first}
    for index, layer in enumerate(params.layers):
        prefix = f"layers.{index}." if index else first
        optional |= {
            prefix + "self_attn.q_norm.weight": layer.q_norm,
            prefix + "self_attn.q_proj.bias": layer.qkv_bias,
            prefix + "self_attn.o_proj.bias": layer.o_bias,
        }
        if midlayer and index:
            # SGLang reads this one, as it has one class for all layers.
            yield prefix + "hidden_norm.weight", layer.attention_norm
    # The table with these tensors, then the ids.
    table = config.weights(
        {name for name, weight in optional.items() if weight is not None},
        embed=params.embed is not None,
        lm_head=params.lm_head is not None,
        fc=params.fc is not None,
        fc_norms=[f"fc_norm.{index}.weight" for index in range(len(params.fc_norms or ()))],
    )
    yield from weights.write(table, dataclasses.replace(params, ids=None))
    yield from vocabulary.name_ids(params.ids, config.vocab_size)


KIND = DraftKind(
    EagleHead,
    eagle_config.LAYOUTS,
    matches,
    eagle_config.parse_config,
    read_params,
    eagle_config.describe,
    named_tensors,
)
