"""Block drafts that are often right: the LM head of a random one is fitted to the target's logits on some texts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import tree
from jspec.core.types import Params
from jspec.models import BlockHead, Llama


def common_ids(config: BlockHead, tokens: np.ndarray) -> np.ndarray:
    """The ids of the draft's vocabulary: the most common tokens of the texts."""
    common = np.argsort(-np.bincount(tokens.ravel(), minlength=config.vocab_size), kind="stable")
    return np.sort(common[: config.draft_vocab_size]).astype(np.int32)


def fit(target: Llama, config: BlockHead, both: Params, tokens: np.ndarray) -> Params:
    """The weights with a fitted LM head, a quiet Markov head, and a selector that is heard."""
    rows, length = tokens.shape
    anchors = np.tile(np.arange(length - config.depth, dtype=np.int32), rows)

    @jax.jit
    def read(both, tokens, anchors):
        cache = target.init_cache(both.target, rows, 4, 4)
        layers = config.capture_layers
        out = target.forward(both.target, tree.chain(tokens), cache, None, capture_layers=layers)
        text = jnp.repeat(jnp.arange(rows), len(anchors) // rows)
        positions = jnp.arange(length, dtype=jnp.int32)[None]
        _, context = config.read(both.draft, out.hidden[text], positions)
        cache = config.init_cache(both.draft, len(anchors), length, 4).commit(
            context, jnp.zeros_like(anchors), None, anchors
        )
        root = jnp.take_along_axis(tokens[text], anchors[:, None], axis=1)
        masks = jnp.full((len(anchors), config.block_size - 1), config.mask_token)
        block = anchors[:, None] + jnp.arange(config.block_size)[None]
        outputs = config.apply(both, target, jnp.concatenate([root, masks], axis=1), block, cache, anchors)
        right = jnp.take_along_axis(out.logits[text], block[:, : config.depth, None], axis=1)
        return outputs[:, -config.depth :], right

    ids = common_ids(config, tokens)
    feature, right = jax.device_get(read(both, tokens, anchors))
    feature, right = feature.reshape(-1, config.hidden_size), right[:, :, ids].reshape(-1, len(ids))
    fitted = np.linalg.solve(feature.T @ feature + 0.1 * np.eye(config.hidden_size), feature.T @ right)
    draft = dataclasses.replace(both.draft, lm_head=jax.device_put(fitted.astype(np.float32)))
    if draft.markov is not None:
        draft = dataclasses.replace(draft, markov=_scaled(draft.markov, out=0.3))
    if draft.selector is not None:
        draft = dataclasses.replace(draft, selector=_scaled(draft.selector, previous=5, candidate=5))
    return Params(both.target, draft)


def _scaled(params, **factors):
    return dataclasses.replace(params, **{name: getattr(params, name) * np.float32(x) for name, x in factors.items()})
