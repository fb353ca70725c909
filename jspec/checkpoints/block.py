"""Checkpoint directories of block drafts (DFlash, DSpark): reading and writing them.

The tensors have the same names in all layouts (jspec/checkpoints/block_config.py). A tensor that is not used is an
error: without it, the draft would silently propose other tokens than it was trained to.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jspec.checkpoints import block_config, speculators, torch_file
from jspec.checkpoints.draft import feature_draft, write
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.llama import name_layer, read_layer
from jspec.checkpoints.source import Source
from jspec.checkpoints.split import refuse_split
from jspec.checkpoints.tensors import FLOATS, Tensors, is_finite, named_leaf
from jspec.core.struct import WHOLE
from jspec.models.block_head import BlockHead, BlockParams, MarkovParams
from jspec.models.decoder import Decoder
from jspec.models.llama import LayerParams

_MASK_FILE = "mask_embedding.pt"
"""File of some of z-lab's drafts: the embedding of the mask token."""
_MIX = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}
"""Kind of Markov head -> the tensors of `MarkovParams.mix`."""
_UNREAD = {"verifier_norm.weight", "verifier_lm_head.weight"}
"""Tensors that only training uses."""


def matches(source: Source) -> bool:
    """Whether a checkpoint is a block draft's, of any kind; `plan` may still reject it."""
    return block_config.matches(source.config)


def parse_config(source: Source, target: Decoder) -> BlockHead:
    """The draft that a checkpoint describes, as `block_config.parse_config`."""
    return block_config.parse_config(source.config, source.files.names(), target)


def read_params(source: Source, config: BlockHead, tensors: Tensors) -> BlockParams:
    """The weights of a draft; those that it has not are the target's.

    Raises:
      CheckpointError: a tensor is missing, has an unexpected shape, or is not used.
    """
    width, vocab, reduced = config.hidden_size, config.vocab_size, config.draft_vocab_size
    captured = len(config.capture_layers) * config.target_hidden_size
    confided = width + (config.markov_rank if config.confidence == "markov" else 0)
    params = BlockParams(
        embed=tensors.device("embed_tokens.weight", vocab, width, options=named_leaf("embed"))
        if config.own_embed
        else None,
        mask_embed=_read_mask(config, source, tensors),
        fc=tensors.fused([("fc.weight", width)], captured, named_leaf("fc")),
        hidden_norm=tensors.device("hidden_norm.weight", width),
        layers=tuple(_read_layer(config, tensors, f"layers.{index}.") for index in range(config.num_layers)),
        norm=tensors.device("norm.weight", width),
        lm_head=tensors.fused([("lm_head.weight", reduced)], width, named_leaf("lm_head")) if config.own_head else None,
        ids=speculators.read_ids(tensors, reduced, vocab),
        markov=_read_markov(config, tensors),
        confidence=tensors.fused([("confidence_head.proj.weight", 1)], confided) if config.confidence else None,
        confidence_bias=tensors.device("confidence_head.proj.bias", 1) if config.confidence else None,
    )
    tensors.refuse_unread("block draft", _UNREAD.__contains__)
    return params


def _read_layer(config: BlockHead, tensors: Tensors, prefix: str) -> LayerParams:
    norm, bias = tensors.device(prefix + "input_layernorm.weight", config.hidden_size), config.attention_bias
    options = {"input_width": config.hidden_size, "qkv_bias": bias, "o_bias": bias, "qk_norm": True}
    return read_layer(config, tensors, prefix, norm, **options)


def _read_markov(config: BlockHead, tensors: Tensors) -> MarkovParams | None:
    if config.markov is None:
        return None
    mix, bias, shape = None, None, config.mix_shape()
    if shape is not None:
        name = _MIX[config.markov]
        mix, bias = tensors.fused([(f"{name}.weight", shape[1])], shape[0]), tensors.device(f"{name}.bias", shape[1])
    return MarkovParams(
        previous=tensors.device("markov_head.markov_w1.weight", config.vocab_size, config.markov_rank),
        out=tensors.fused(
            [("markov_head.markov_w2.weight", config.draft_vocab_size)], config.markov_rank, named_leaf("out")
        ),
        mix=mix,
        mix_bias=bias,
    )


def _read_mask(config: BlockHead, source: Source, tensors: Tensors) -> Float[Array, " E"] | None:
    """The embedding of the mask token in a file of its own: a tensor, or a dictionary with one tensor."""
    path = source.directory / _MASK_FILE
    if not path.exists():
        return None
    saved = torch_file.read(path)
    if isinstance(saved, dict):
        stated = saved.get("mask_token_id", config.mask_token)
        if stated != config.mask_token:
            raise CheckpointError(f"{path}: mask_token_id={stated}, but config.json has {config.mask_token}")
        found = [value for value in saved.values() if isinstance(value, np.ndarray)]
        saved = found[0] if len(found) == 1 else None
    width = config.hidden_size
    if not isinstance(saved, np.ndarray) or saved.shape not in ((width,), (1, width)) or saved.dtype not in FLOATS:
        raise CheckpointError(f"{path}: must hold one tensor of {width} values")
    vector = np.array(saved).reshape(width)
    if not is_finite(vector):
        raise CheckpointError(f"{path}: has values that are NaN or infinite; all must be finite")
    return tensors.put(WHOLE, [vector.astype(tensors.dtype)])


def save(
    directory: str | Path,
    config: BlockHead,
    params: BlockParams,
    *,
    layout: str,
    dtype: str = "bfloat16",
    verifier: str | None = None,
) -> None:
    """Writes config.json and model.safetensors to a directory, which is created if needed.

    Args:
      layout: "deepspec", which SGLang and vLLM read, or "speculators", for vLLM. An embedding or LM head that the draft
        shares with its target is not written; engines then use the target's.
      dtype: precision of the stored weights.
      verifier: the target's directory or hub id, which "speculators" records for vLLM.

    Raises:
      ValueError: an unknown layout or dtype, a draft that the layout cannot represent, or one that is split.
    """
    refuse_split(config)
    raw = block_config.describe(layout, config, params, dtype, verifier)
    ids = speculators.name_ids(params.ids, config.vocab_size)
    write(directory, raw, chain(_named_tensors(config, params), ids.items()), dtype)


def _named_tensors(config: BlockHead, params: BlockParams) -> Iterator[tuple[str, Any]]:
    """All weights except the vocabulary, under their names, [out, in]."""
    for index, layer in enumerate(params.layers):
        yield from name_layer(config, layer, f"layers.{index}.")
        yield f"layers.{index}.input_layernorm.weight", layer.attention_norm
    yield "fc.weight", np.asarray(params.fc).T
    yield "hidden_norm.weight", params.hidden_norm
    yield "norm.weight", params.norm
    if params.embed is not None:
        yield "embed_tokens.weight", params.embed
    if params.lm_head is not None:
        yield "lm_head.weight", np.asarray(params.lm_head).T
    if params.markov is not None:
        yield "markov_head.markov_w1.weight", params.markov.previous
        yield "markov_head.markov_w2.weight", np.asarray(params.markov.out).T
        if config.markov in _MIX:
            yield f"{_MIX[config.markov]}.weight", np.asarray(params.markov.mix).T
            yield f"{_MIX[config.markov]}.bias", params.markov.mix_bias
    if params.confidence is not None:
        yield "confidence_head.proj.weight", np.asarray(params.confidence).T
        yield "confidence_head.proj.bias", params.confidence_bias


KIND = feature_draft(matches, parse_config, read_params)
