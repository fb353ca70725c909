"""Drafts of `toy` with masks or candidates, which are often right: their LM heads are fitted to the texts of plain
decoding.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import toy

from jspec.core import tree
from jspec.core.types import Params
from jspec.drafters import Eagle, Standalone, hot_tokens
from jspec.models import EagleHead, Llama

DEPTH = 4
"""Generations that are fitted."""


@functools.cache
def params(config: EagleHead | Llama) -> Params:
    """The target's weights and those of a draft, `toy.MASKED_HEAD` or `toy.MASKED`."""
    target, texts, head = toy.params().target, toy.plain_tokens(), isinstance(config, EagleHead)
    common = np.argsort(-np.bincount(texts.ravel(), minlength=61), kind="stable")
    ids = np.sort(common[: config.draft_vocab_size]).astype(np.int32) if head else np.arange(61, dtype=np.int32)
    random: Any = toy.random_leaves(config.param_shapes(np.float32), 3, ids)
    both = Params(target, random)
    # The draft's outputs after each beginning of each text, and the target's logits at these positions.
    lengths = np.arange(1, toy.CAPACITY - DEPTH)
    beginnings, count = np.repeat(texts, len(lengths), axis=0), np.tile(lengths, len(texts))
    drafter = (Eagle if head else Standalone)(depth=DEPTH).bind(toy.TARGET, config)
    limit = np.full(len(count), toy.CAPACITY)
    s = toy.start(drafter, both, ids=beginnings[:, : lengths.max()], length=count, limit=limit)
    outputs = np.array(s.draft.feature if head else s.draft.outputs).reshape(-1, config.hidden_size)
    cache = toy.TARGET.init_cache(target, len(texts), 4, 4)
    logits = np.array(jax.jit(toy.TARGET.forward)(target, tree.chain(jax.device_put(texts)), cache, None).logits)
    aims = np.repeat(logits, len(lengths), axis=0)[np.arange(len(count))[:, None], count[:, None] + np.arange(DEPTH)]
    aims = aims[:, :, ids].reshape(-1, len(ids))
    fitted = np.linalg.solve(outputs.T @ outputs + 0.1 * np.eye(config.hidden_size), outputs.T @ aims)
    return Params(target, dataclasses.replace(random, lm_head=jax.device_put(fitted.astype(np.float32))))


@functools.cache
def head_params(config: EagleHead) -> Params:
    """The target's weights and those of an EAGLE head of `toy` without masks; of a head with candidates, factors."""
    if not config.rank:
        return toy.head_params(config)
    whole = dataclasses.replace(config, rank=0, num_candidates=0)
    return hot_tokens.with_candidates(toy.head_params(whole), toy.TARGET, whole, config.rank, config.num_candidates)[1]
