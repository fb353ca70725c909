"""Checkpoint directories of block drafts (DFlash, DSpark): reading and writing them.

The tensors have the same names in all layouts (jspec/checkpoints/block_config.py). An unused tensor is an
error: without it, the draft would silently propose other tokens than in training.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jspec.checkpoints import block_config, torch_file, vocabulary
from jspec.checkpoints.draft import DraftKind
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.source import Source
from jspec.checkpoints.tensors import FLOATS, Tensors, is_finite
from jspec.core.struct import WHOLE
from jspec.models import weights
from jspec.models.block_head import BlockHead, BlockParams

_MASK_FILE = "mask_embedding.pt"
"""File of some of z-lab's drafts: the embedding of the mask token."""
_UNREAD = {"verifier_norm.weight", "verifier_lm_head.weight"}
"""Tensors for training alone."""


def read_params(source: Source, config: BlockHead, tensors: Tensors) -> BlockParams:
    """Read the weights of a draft. Its embedding and LM head are the target's unless it has its own."""
    # Rows for the target's tokens.
    table, fields = config.weights(), block_config.read_fields(source.config)
    tokens = vocabulary.read_vocabulary(tensors, fields, config.vocab_size, config.draft_vocab_size)
    table = dataclasses.replace(table, embed=tokens.embedding(table.embed), lm_head=tokens.head(table.lm_head))
    if (markov := table.markov) is not None:
        markov = dataclasses.replace(markov, previous=tokens.embedding(markov.previous), out=tokens.head(markov.out))
    # All weights.
    params = dataclasses.replace(
        weights.read(dataclasses.replace(table, markov=markov), tensors),
        mask_embed=_read_mask(config, source, tensors, tokens.stored),
        ids=tokens.ids,
    )
    tensors.refuse_unread("block draft", _UNREAD.__contains__)
    return params


def _read_mask(config: BlockHead, source: Source, tensors: Tensors, rows: int) -> Float[Array, " E"] | None:
    """Read the embedding of the mask token in a file of its own: a tensor, or a dictionary with one tensor.

    rows: of the draft's embedding, which may have the token beyond those of the target's.
    """
    path = source.directory / _MASK_FILE
    if not path.exists():
        if config.mask_token < config.vocab_size:
            return None
        return tensors.put(WHOLE, [tensors.read("embed_tokens.weight", rows, config.hidden_size)[config.mask_token]])
    saved = torch_file.read(path)
    # A dictionary may state the token.
    if isinstance(saved, dict):
        stated = saved.get("mask_token_id", config.mask_token)
        if stated != config.mask_token:
            raise CheckpointError(f"{path}: mask_token_id={stated}, but config.json has {config.mask_token}")
        arrays = [value for value in saved.values() if isinstance(value, np.ndarray)]
        saved = arrays[0] if len(arrays) == 1 else None
    # A finite vector of the draft's width.
    width = config.hidden_size
    if not isinstance(saved, np.ndarray) or saved.shape not in ((width,), (1, width)) or saved.dtype not in FLOATS:
        raise CheckpointError(f"{path}: must hold one tensor of {width} values")
    # Check and place the vector.
    vector = np.array(saved).reshape(width)
    if not is_finite(vector):
        raise CheckpointError(f"{path}: has values that are NaN or infinite; all must be finite")
    return tensors.put(WHOLE, [vector.astype(tensors.dtype)])


def named_tensors(layout: str, config: BlockHead, params: BlockParams) -> Iterator[tuple[str, Any]]:
    """All weights under their names, which are the same in all layouts; no layout has the mask token's embedding."""
    yield from weights.write(config.weights(), dataclasses.replace(params, mask_embed=None, ids=None))
    yield from vocabulary.name_ids(params.ids, config.vocab_size)


KIND = DraftKind(
    BlockHead,
    block_config.LAYOUTS,
    block_config.matches,
    block_config.parse_config,
    read_params,
    block_config.describe,
    named_tensors,
)
