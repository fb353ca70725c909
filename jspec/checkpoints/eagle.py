"""Checkpoint directories of EAGLE heads: reading and writing them.

There are two layouts (jspec/checkpoints/eagle_config.py): "safeailab" has the first layer of an EAGLE-3 head under
`midlayer`, "speculators" under `layers.0`.

Optional weights are read if they exist. A tensor that is not used is an error: without it, the head would silently
draft other tokens than it was trained to.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jspec.checkpoints import atomic, eagle_config, speculators, torch_file
from jspec.checkpoints.fields import MOST_SIZE, Fields
from jspec.checkpoints.files import (
    MOST_JSON_BYTES,
    CheckpointError,
    on_device,
    parse_json,
    read_bytes,
    resolve_dtype,
    write_tensors,
)
from jspec.checkpoints.llama import name_layer, read_layer
from jspec.checkpoints.source import Source
from jspec.checkpoints.split import Place, placed, refuse_split, whole
from jspec.checkpoints.tensors import Tensors
from jspec.models.decoder import Decoder
from jspec.models.eagle_head import EagleHead, EagleParams
from jspec.models.llama import LayerParams, LlamaParams
from jspec.models.quantized import Quantized

_UNREAD = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
"""Tensors that are copies of the target's, or that only training uses."""


@dataclasses.dataclass(frozen=True)
class EagleCheckpoint:
    """A head: its configuration and weights."""

    config: EagleHead
    params: EagleParams


def matches(source: Source) -> bool:
    """Whether a checkpoint is an EAGLE head's, of any kind; `read` may still reject it.

    Raises:
      CheckpointError: a file is missing or damaged.
    """
    names = source.config.optional_texts("architectures") or ()
    if speculators.is_speculators(source.config) or any("eagle" in name.lower() for name in names):
        return True
    # The config.json of an EAGLE-1 head is that of an ordinary Llama.
    return "fc.weight" in source.files.names()


def load(directory: str | Path, *, target: Decoder, dtype: str | None = None) -> EagleCheckpoint:
    """Loads an EAGLE-1, EAGLE-2 or EAGLE-3 head of either layout onto the default device.

    As in SGLang, the target's embedding is used and not the copy that many heads contain, unless the head's width
    differs or config.json states that the head trained its own (`embed_requires_grad`).

    Args:
      directory: holds config.json and model.safetensors (or shards with an index), or pytorch_model.bin.
      target: the configuration of the model that the head drafts for.
      dtype: as in `language_model.load`; use the same for both.

    Raises:
      CheckpointError: a file is missing or damaged, an option is not supported, a tensor is missing, has an unexpected
        shape or is not used, or the head does not suit the target.
      ValueError: an unknown dtype.
    """
    return read(Source(directory), target, dtype)


def read(
    source: Source,
    target: Decoder,
    dtype: str | None,
    check: Callable[[PyTree], None] | None = None,
    place: Place = whole,
    weights: str | None = None,
) -> EagleCheckpoint:
    """`load` from an open directory. `check`, `place` and `weights`: as in `language_model.read`."""
    tensors = _HeadTensors(source.files, resolve_dtype(dtype))
    tensors.weights = weights
    config = eagle_config.parse_config(source.config, tensors.names(), target)
    config = placed(config, tensors, place)
    if check is not None:
        check(tensors.memory(config.param_shapes(tensors.dtype)))
    params = _read_params(config, source.config, tensors)
    tensors.check_all_read(config)
    return EagleCheckpoint(config, params)


class _HeadTensors(Tensors):
    """The tensors of a head, some of which are optional."""

    def optional(self, name: str, *shape: int) -> Array | None:
        """A tensor on the device; None if there is none."""
        return self.device(name, *shape) if name in self.names() else None

    def check_all_read(self, config: EagleHead) -> None:
        """Raises if there are tensors that have not been read but would change the forward."""
        copies = {"lm_head.weight"} if config.version == 1 else set()
        unread = {name for name in self.names() - self.asked - _UNREAD - copies if not name.endswith("inv_freq")}
        if unread:
            raise CheckpointError(
                f"{self.directory}: has unexpected tensors for an EAGLE-{config.version} head; it may be another kind "
                f"of head, or config.json is incomplete: {', '.join(sorted(unread))}"
            )


def _read_params(config: EagleHead, fields: Fields, tensors: _HeadTensors) -> EagleParams:
    names, width, eagle3 = tensors.names(), config.hidden_size, config.version == 3
    vocab, captured = config.draft_vocab_size, len(config.capture_layers) * config.target_hidden_size
    first = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
    qk_norm = fields.section("transformer_layer_config").optional_text("model_type") == "qwen3"
    layers = tuple(
        _read_head_layer(config, tensors, f"layers.{index}." if index else first, index, qk_norm)
        for index in range(config.num_layers)
    )
    own_embed = width != config.target_hidden_size or fields.read_flag("embed_requires_grad", False)
    own_head = "lm_head.weight" in names or vocab != config.vocab_size or width != config.target_hidden_size
    input_norm = _check_flags(fields, ("norm_before_fc",), "input_norm.weight", names)
    fc_norms = None
    if eagle3:
        legacy = ["aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"]
        chunks = legacy if legacy[0] in names else [f"fc_norm.{i}.weight" for i in range(len(config.capture_layers))]
        if _check_flags(fields, ("fc_norm", "use_aux_norm"), chunks[0], names):
            fc_norms = tuple(tensors.device(name, config.target_hidden_size) for name in chunks)
    return EagleParams(
        embed=tensors.device("embed_tokens.weight", config.vocab_size, width, field="embed") if own_embed else None,
        fc=tensors.fused([("fc.weight", width)], captured if eagle3 else 2 * width, "fc"),
        fc_bias=tensors.optional("fc.bias", width),
        fc_norms=fc_norms,
        input_norm=tensors.device("input_norm.weight", captured) if eagle3 and input_norm else None,
        hidden_norm=tensors.device(first + "hidden_norm.weight", width) if eagle3 else None,
        layers=layers,
        norm=tensors.device("norm.weight", width) if eagle3 else None,
        lm_head=tensors.fused([("lm_head.weight", vocab)], width, "lm_head") if eagle3 and own_head else None,
        ids=speculators.read_ids(tensors, vocab, config.vocab_size) if eagle3 else None,
    )


def _check_flags(fields: Fields, keys: tuple[str, ...], tensor: str, names: set[str]) -> bool:
    """Whether a tensor exists; raises if a flag in config.json contradicts that."""
    stated = {key: fields.read_flag(key) for key in keys if fields.has(key)}
    if stated and any(stated.values()) != (tensor in names):
        state = "present" if tensor in names else "missing"
        flags = ", ".join(f"{key}={value}" for key, value in stated.items())
        raise CheckpointError(f"{fields.where}: {flags}, but the tensor {tensor!r} is {state}")
    return tensor in names


def _read_head_layer(config: EagleHead, tensors: _HeadTensors, prefix: str, index: int, qk_norm: bool) -> LayerParams:
    """One decoder layer. qk_norm: whether norms of heads are required; otherwise they are optional."""
    names, width = tensors.names(), config.hidden_size
    own, other = prefix + "input_layernorm.weight", prefix + "hidden_norm.weight"
    norm = None
    if index == 0:
        norm = tensors.device(own, width) if config.version == 3 else None
    elif own in names and other in names:
        norm = tensors.device(own, width)
        if not jnp.array_equal(norm, tensors.device(other, width)):
            raise CheckpointError(
                f"{tensors.directory}: {own} and {other} differ; vLLM reads the first in later layers and SGLang the "
                "second: keep only the one that the head was trained with"
            )
    else:
        norm = tensors.device(other if other in names else own, width)
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
    stored = resolve_dtype(dtype)
    raw = eagle_config.describe(layout, config, params, dtype, verifier)
    named = _named_tensors(config, params, layout)
    tensors = {name: np.ascontiguousarray(np.asarray(tensor).astype(stored)) for name, tensor in named}
    tensors |= speculators.name_ids(params.ids, config.vocab_size)
    with atomic.staged(directory, key="config.json", replaced=atomic.WEIGHTS) as stage:
        (stage / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        write_tensors(tensors, stage / "model.safetensors")


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


def read_hot_tokens(path: str | Path) -> list[int]:
    """A list of token ids from a file: .json, or .pt as the authors of FR-Spec publish them (a list or a tensor).

    Raises:
      CheckpointError: the file is missing or does not hold a list of integers.
    """
    path = Path(path)
    if path.suffix == ".json":
        value = parse_json(read_bytes(path, MOST_JSON_BYTES), str(path))
    else:
        value = torch_file.read(path)
    if isinstance(value, np.ndarray):
        if value.size > MOST_SIZE:
            raise CheckpointError(f"{path}: has {value.size} entries: must have at most {MOST_SIZE}")
        value = value.tolist()
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise CheckpointError(f"{path}: must hold a list of token ids")
    return value


def with_hot_tokens(
    config: EagleHead, params: EagleParams, target_params: LlamaParams, ids: Sequence[int] | Int[np.ndarray, " Vd"]
) -> EagleCheckpoint:
    """The head with its vocabulary reduced to the tokens `ids`, for a cheaper LM head (FR-Spec, arXiv 2502.14856).

    Args:
      config, params: a head with the target's whole vocabulary, such as EAGLE-1 and EAGLE-2 heads.
      target_params: the target's weights, whose LM head such a head uses.
      ids: distinct token ids in any order.

    Raises:
      ValueError: the head's vocabulary is already reduced, or ids are invalid, repeated or not in the vocabulary.
    """
    if params.ids is not None:
        raise ValueError(f"the head's vocabulary is already reduced to {config.draft_vocab_size} tokens")
    given = np.asarray(ids)
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
        raise ValueError(f"ids has shape {given.shape} and dtype {given.dtype}: must be a non-empty list of token ids")
    chosen = np.unique(given)
    if chosen.size != given.size:
        raise ValueError(f"ids has {given.size} entries, of which only {chosen.size} differ: must be distinct")
    if chosen[0] < 0 or chosen[-1] >= config.vocab_size:
        raise ValueError(f"ids range from {chosen[0]} to {chosen[-1]}: must be between 0 and {config.vocab_size - 1}")
    head = _columns(params.lm_head, chosen) if params.lm_head is not None else _target_columns(target_params, chosen)
    head = head if isinstance(head, Quantized) else head.astype(params.fc.dtype)
    cut = dataclasses.replace(params, lm_head=head, ids=on_device(chosen.astype(np.int32)))
    return EagleCheckpoint(dataclasses.replace(config, draft_vocab_size=int(chosen.size)), cut)


def _target_columns(params: LlamaParams, ids: np.ndarray) -> Float[Array, "E Vd"]:
    return jnp.take(params.embed, ids, axis=0).T if params.lm_head is None else _columns(params.lm_head, ids)


def _columns(lm_head: Float[Array, "E V"], ids: np.ndarray) -> Float[Array, "E Vd"]:
    """Columns of an LM head; of a quantized one, with their scales."""
    return jax.tree.map(lambda part: jnp.take(part, ids, axis=-1), lm_head)
