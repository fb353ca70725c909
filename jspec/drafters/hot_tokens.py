"""Drafts whose LM heads cost less: they propose some tokens alone (FR-Spec, arXiv 2502.14856), or score candidates.

The columns of the LM head are copied, or those of the target's if the draft shares it, and the draft keeps the ids of
its tokens. Others have probability 0 in the draft, so the output is the same by any acceptance rule.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree

from jspec.core.checks import check_int
from jspec.core.grow import MAX_WIDTH
from jspec.core.types import Params
from jspec.models import MtpHeads
from jspec.models.block_head import BlockHead
from jspec.models.candidates import factorize
from jspec.models.decoder import Decoder, ModelParams
from jspec.models.eagle_head import EagleHead
from jspec.models.quantized import Quantized, widen
from jspec.models.sizes import lm_head

Ids = Int[np.ndarray, " n"]


def read_hot_tokens(tokens: str | Path | Sequence[int], size: int) -> Ids:
    """Ids of tokens in ascending order, as given or from a file with a JSON list.

    Raises:
      ValueError: not a list of distinct ids below `size`, or fewer than the children of a node of the widest tree.
    """
    label = f"hot_tokens={str(tokens)!r}" if isinstance(tokens, str | Path) else "hot_tokens"
    if isinstance(tokens, str | Path):
        try:
            tokens = json.loads(Path(tokens).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{label}: must be a file with a JSON list of token ids: {error}") from None
    if not isinstance(tokens, Sequence) or not all(type(token) is int for token in tokens):
        raise ValueError(f"{label}: must be a list of token ids")
    ids = np.unique(np.array(tokens, np.int64))
    if len(ids) < len(tokens) or (len(ids) and not 0 <= ids[0] <= ids[-1] < size):
        raise ValueError(f"{label}: must be distinct ids from 0 to {size - 1}")
    _check_count(ids, label)
    return ids


def _check_count(ids: Ids, label: str) -> None:
    if len(ids) < MAX_WIDTH:
        raise ValueError(f"{label}: {len(ids)} of the draft's tokens; must be at least {MAX_WIDTH}")


def trim(params: Params, target: Any, draft: Any, ids: Ids) -> tuple[Any, Params]:
    """The configuration and weights of a draft, and the target's weights, to propose these tokens alone.

    Raises:
      ValueError: the draft is of another kind, or proposes fewer than `MAX_WIDTH` of the tokens.
    """
    weights = params.draft
    # An MTP head has the target's vocabulary.
    if isinstance(draft, MtpHeads):
        heads = tuple(dataclasses.replace(head, **_columns(head, params, target, ids)) for head in weights)
        return draft, Params(params.target, heads)
    # A language model has its own LM head, and maybe fewer rows of padding than the target.
    if isinstance(draft, Decoder) and isinstance(weights, ModelParams):
        ids = ids[ids < draft.vocab_size]
        _check_count(ids, "hot_tokens")
        values = {"lm_head": _take(lm_head(weights), weights.lm_head is None, ids), "ids": jnp.asarray(ids, jnp.int32)}
        return draft, Params(params.target, dataclasses.replace(weights, **values))
    if isinstance(draft, EagleHead | BlockHead):
        return _trim_features(params, target, draft, ids)
    raise ValueError(f"hot_tokens: a draft of type {type(draft).__name__} has another kind of LM head; must be None")


def _trim_features(
    params: Params, target: Any, draft: EagleHead | BlockHead, ids: Ids
) -> tuple[EagleHead | BlockHead, Params]:
    """A draft with hidden states as inputs, and maybe a vocabulary of its own."""
    weights: Any = params.draft
    if getattr(draft, "rank", 0):
        raise ValueError("hot_tokens: the LM head scores candidates alone; must be None")
    proposable = np.arange(draft.draft_vocab_size) if weights.ids is None else np.asarray(weights.ids)
    columns = np.flatnonzero(np.isin(proposable, ids))
    _check_count(columns, "hot_tokens")
    values = _columns(weights, params, target, columns) | {"ids": jnp.asarray(proposable[columns], jnp.int32)}
    changes: dict[str, Any] = {"draft_vocab_size": len(columns)}
    # A Markov head corrects the logits of the same tokens.
    if isinstance(draft, BlockHead):
        changes["own_head"] = True
        if weights.markov is not None:
            values["markov"] = dataclasses.replace(weights.markov, out=_take(weights.markov.out, False, columns))
    return dataclasses.replace(draft, **changes), Params(params.target, dataclasses.replace(weights, **values))


def with_candidates(params: Params, target: Any, draft: Any, rank: int, count: int) -> tuple[EagleHead, Params]:
    """The configuration and weights of an EAGLE head whose LM head scores `count` candidates of a product of `rank`.

    Raises:
      ValueError: the draft is of another kind, or an argument is out of bounds.
    """
    if not isinstance(draft, EagleHead) or draft.version == 1 or draft.at_once or draft.rank:
        raise ValueError(f"the draft is of type {type(draft).__name__}: must be an EAGLE-3 head that scores all tokens")
    check_int("rank", rank, least=1, most=draft.hidden_size)
    check_int("candidates", count, least=1, most=draft.draft_vocab_size)
    weights: Any = params.draft
    head = widen(_columns(weights, params, target, np.arange(draft.draft_vocab_size), "candidates")["lm_head"])
    weights = dataclasses.replace(weights, lm_head=None, candidates=factorize(head.astype(weights.norm.dtype), rank))
    return dataclasses.replace(draft, rank=rank, num_candidates=count), Params(params.target, weights)


def _columns(weights: Any, params: Params, target: Any, columns: Ids, option: str = "hot_tokens") -> dict[str, Any]:
    """The LM head with these columns, and their ids. option: for messages."""
    shared = weights.lm_head is None
    # The target's may be capped or scaled after the product.
    if shared and type(target).unembed is not Decoder.unembed:
        name = type(target).__name__
        raise ValueError(f"{option}: the draft shares the LM head of {name}, with changes of logits; must be None")
    head = lm_head(params.target) if shared else weights.lm_head
    transposed = shared and params.target.lm_head is None
    return {"lm_head": _take(head, transposed, columns), "ids": jnp.asarray(columns, jnp.int32)}


def _take(head: PyTree, transposed: bool, columns: Ids) -> PyTree:
    """Some columns of an LM head, or rows of an embedding in its place; also of a matrix in 8 bits."""
    if isinstance(head, Quantized) and head.filling is not None:
        raise ValueError("hot_tokens: the LM head has 4 bits; must be None")
    return jax.tree.map(lambda x: x[columns].T if transposed else x[..., columns], head)
