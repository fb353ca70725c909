"""What drafters with a model propose, from dense forwards over a whole text, one path at a time."""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import block_oracle
import eagle_oracle
import jax
import masked
import numpy as np
import toy
import window_oracle
from planted import best_first_by_hand
from safetensors.numpy import load_file

from jspec.checkpoints import drafts
from jspec.core import tree
from jspec.core.types import Params
from jspec.drafters import Block, Eagle, Standalone
from jspec.models import BlockHead, Draft, EagleHead

HEAD = dataclasses.replace(toy.HEAD, num_layers=2)
"""Rows of its second layer depend on what its first layer sees."""
LONG = dataclasses.replace(toy.BLOCK, block_size=7, windows=(None, 9), markov="gated")
"""Proposes up to 7 tokens."""


@functools.cache
def head_params() -> Params:
    """The head of `toy` with a second layer that changes little."""
    both = toy.head_params()
    (first,) = both.draft.layers
    small = jax.tree.map(lambda x: np.float32(0.2) * np.array(x)[::-1].copy(), first)
    rows = np.random.default_rng(2).normal(size=(HEAD.hidden_size, first.qkv.shape[1])) * HEAD.hidden_size**-0.5
    norms = {name: np.ones(HEAD.hidden_size, np.float32) for name in ("attention_norm", "mlp_norm")}
    second = dataclasses.replace(small, qkv=rows.astype(np.float32), **norms)
    return Params(both.target, dataclasses.replace(both.draft, layers=jax.device_put((first, second))))


@functools.cache
def draft_params() -> Params:
    """As a draft, the target's weights slightly perturbed, with all of their layers."""
    exact = toy.params().target
    return Params(exact, toy.near(exact, toy.random_params(toy.TARGET, seed=1)))


@functools.cache
def captured(tokens: tuple[int, ...]) -> np.ndarray:
    """The target's hidden states at each position of a text."""
    weights = toy.params().target
    row = np.array([[*tokens, *[0] * (toy.CAPACITY + 8 - len(tokens))]], np.int32)
    cache = toy.TARGET.init_cache(weights, 1, 4, 4)
    return np.array(_forward()(weights, tree.chain(jax.device_put(row)), cache, None).hidden)[0, : len(tokens)]


@functools.cache
def _forward():
    return jax.jit(functools.partial(toy.TARGET.forward, capture_layers=toy.HEAD.capture_layers))


def over_vocabulary(logits: np.ndarray, ids: Any) -> np.ndarray:
    """Log-probabilities over the target's vocabulary, in the precision in which trees are ranked."""
    logp = np.full(toy.TARGET.vocab_size, -np.inf)
    logp[np.array(ids)] = logits - np.logaddexp.reduce(logits)
    return logp.astype(np.float32)


# Path of drafts -> log-probabilities after it, by a forward over the whole text


def standalone_by_hand(drafter: Standalone, tokens: list[int]) -> Callable[[tuple[int, ...]], np.ndarray]:
    own = draft_params().draft

    @functools.cache
    def dist(path):
        text = [*tokens, *path]
        seen = window_oracle.band(len(text), drafter.window, drafter.keep_first)
        logits = window_oracle.language_model(toy.TARGET, own, text, seen)[-1]
        return over_vocabulary(logits, np.arange(len(logits)))

    return dist


def eagle_by_hand(drafter: Eagle, tokens: list[int]) -> Callable[[tuple[int, ...]], np.ndarray]:
    both, config = head_params(), HEAD
    own, embed = both.draft, np.array(both.target.embed, np.float64)
    known = captured(tuple(tokens))[:-1] @ np.array(own.fc, np.float64)

    @functools.cache
    def run(path):
        """Logits and features of all pairs: the last ones have features of the forwards before them."""
        feature = known if not path else np.concatenate([known, run(path[:-1])[1][-len(path) :]])
        text = [*tokens[1:], *path]
        seen = window_oracle.band(len(text), drafter.window, drafter.keep_first)
        logits, after = window_oracle.eagle(config, own, embed[text], feature, seen)
        return logits, after[len(known) - 1 :]

    return lambda path: over_vocabulary(run(path)[0][-1], own.ids)


def stored_eagle_by_hand(drafter: Eagle, tokens: list[int]) -> Callable[[tuple[int, ...]], np.ndarray]:
    raw, tensors = stored_head(drafter.model)
    embed, known = np.array(toy.params().target.embed), eagle_oracle.fuse(raw, tensors, captured(tuple(tokens))[:-1])

    @functools.cache
    def run(path):
        """As in `eagle_by_hand`."""
        feature = known if not path else np.concatenate([known, run(path[:-1])[1][-len(path) :]])
        logits, after = eagle_oracle.forward(raw, tensors, embed, embed, np.array([*tokens[1:], *path]), feature)
        return logits, after[len(known) - 1 :]

    return lambda path: over_vocabulary(run(path)[0][-1], masked.head_params(drafter.model).draft.ids)


@functools.cache
def stored_head(config: EagleHead) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json and tensors of a head of `toy`."""
    return written(config, masked.head_params(config).draft, "safeailab")


def masked_standalone_by_hand(drafter: Standalone, tokens: list[int]) -> Callable[[tuple[int, ...]], np.ndarray]:
    """One forward over the text and the masks after it."""
    text = [*tokens, *[toy.MASKED.mask_token] * (drafter.depth - 1)]
    seen = window_oracle.band(len(text), drafter.window, drafter.keep_first)
    logits = window_oracle.language_model(toy.MASKED, masked.params(toy.MASKED).draft, text, seen)[len(tokens) - 1 :]
    return lambda path: over_vocabulary(logits[len(path)], np.arange(logits.shape[1]))


def masked_eagle_by_hand(drafter: Eagle, tokens: list[int]) -> Callable[[tuple[int, ...]], np.ndarray]:
    """One forward over the pairs of the text and the masks after them."""
    weights, masks = masked.params(toy.MASKED_HEAD).draft, drafter.depth - 1
    captures = np.concatenate([captured(tuple(tokens))[:-1], np.tile(np.array(weights.mask_hidden), (masks, 1))])
    text = [*tokens[1:], *[toy.MASKED_HEAD.mask_token] * masks]
    seen = window_oracle.band(len(text), drafter.window, drafter.keep_first)
    feature, embedded = captures @ np.array(weights.fc, np.float64), np.array(weights.embed)[text]
    logits = window_oracle.eagle(toy.MASKED_HEAD, weights, embedded, feature, seen)[0][len(tokens) - 2 :]
    return lambda path: over_vocabulary(logits[len(path)], weights.ids)


@functools.cache
def stored(config: BlockHead) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json and tensors of a block draft's weights."""
    return written(config, block_params(config).draft, "speculators")


def written(config: Draft, params: Any, layout: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json and tensors of a draft."""
    with tempfile.TemporaryDirectory() as directory:
        drafts.save(Path(directory), config, params, layout=layout, dtype="float32")
        raw = json.loads((Path(directory) / "config.json").read_text())
        return raw, load_file(Path(directory) / "model.safetensors")


@functools.cache
def block_params(config: BlockHead) -> Params:
    """As of `toy`; those of `LONG` are random."""
    if config is not LONG:
        return toy.block_params(config)
    return Params(toy.params().target, toy.random_block(LONG, np.arange(5, 53, dtype=np.int32)))


def block_by_hand(drafter: Block, tokens: list[int]) -> Callable[[tuple[int, ...]], np.ndarray]:
    raw, tensors = stored(drafter.model)
    ids, embed = block_params(drafter.model).draft.ids, np.array(toy.params().target.embed)
    window = drafter.window, drafter.keep_first
    out, logits = block_oracle.block(raw, tensors, embed, embed, captured(tuple(tokens))[:-1], tokens[-1], *window)

    @functools.cache
    def dist(path):
        return over_vocabulary(block_oracle.correct(raw, tensors, out, logits, [tokens[-1], *path]), ids)

    return dist


DRAFTS = {
    "eagle": (Eagle, HEAD, head_params, eagle_by_hand),
    "standalone": (Standalone, toy.TARGET, draft_params, standalone_by_hand),
    "block": (Block, toy.BLOCK, functools.partial(block_params, toy.BLOCK), block_by_hand),
    **{
        name: (Eagle, config, functools.partial(masked.head_params, config), stored_eagle_by_hand)
        for name, config in (("eagle_latents", toy.LATENT_HEAD), ("eagle_candidates", toy.CANDIDATES_HEAD))
    },
    "eagle_masks": (Eagle, toy.MASKED_HEAD, functools.partial(masked.params, toy.MASKED_HEAD), masked_eagle_by_hand),
    "standalone_masks": (
        Standalone,
        toy.MASKED,
        functools.partial(masked.params, toy.MASKED),
        masked_standalone_by_hand,
    ),
    "long": (Block, LONG, functools.partial(block_params, LONG), block_by_hand),
    "dflash2": (Block, toy.DFLASH2, functools.partial(block_params, toy.DFLASH2), block_by_hand),
    "fill_in": (Block, toy.FILL_IN, functools.partial(block_params, toy.FILL_IN), block_by_hand),
}
"""Drafter, its model, the weights, and what it proposes. The models but the last have two layers."""


def check_tree(drafter: Any, by_hand: Any, draft_tree: Any, b: int, tokens: list[int]) -> None:
    """The tree of sequence `b`, whose tokens are these, has the best paths first, each after its own beginning."""
    nodes = drafter.num_nodes or drafter.depth + 1
    expected, parents = best_first_by_hand(by_hand(drafter, tokens), tokens[-1], drafter.depth, drafter.width, nodes)
    assert list(map(int, draft_tree.tokens[b])) == expected
    assert draft_tree.parents is None or list(map(int, draft_tree.parents[b])) == parents
