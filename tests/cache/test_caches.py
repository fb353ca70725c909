"""Every kind of cache with chains and trees, at any page size, with NaN in everything that must not be read.

Add a new kind of cache to `KINDS`.
"""

import dataclasses
import functools
import itertools
from typing import Any

import deepseek
import families
import gemma
import jax
import jax.numpy as jnp
import numpy as np
import oss
import pytest
import qwen
import toy
from planted import RandomTree

from jspec.analysis import poison
from jspec.core import accept, stopping, tree
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.core.prefill import jitted_prefill
from jspec.core.types import Params, Prompts
from jspec.drafters import Ngram, Standalone
from jspec.models.decoder import Decoder

KINDS = {
    "mha": (toy.TARGET, functools.cache(lambda seed: toy.random_params(toy.TARGET, seed))),
    "sliding": (gemma.KINDS["shared"], lambda seed: gemma.params("shared", seed)),
    "mla": (deepseek.KINDS["mla"], lambda seed: deepseek.params("mla", seed)),
    "dsa": (deepseek.KINDS["dsa"], lambda seed: deepseek.params("dsa", seed)),
    "recurrent": (qwen.KINDS["dense"], lambda seed: qwen.params("dense", seed)),
    "sinks": (oss.KINDS["sinks"], lambda seed: oss.params("sinks", seed)),
    **{kind: (target, functools.partial(families.params, kind)) for kind, target in families.KINDS.items()},
}
"""A target, and a function from a seed to weights. All but the first and the third have two kinds of layers."""
NARROW = {f"{kind} fp8": (target.with_kv("fp8"), weights) for kind, (target, weights) in KINDS.items()}
"""The same targets with keys and values of 8 bits."""
TARGETS = KINDS | NARROW
DRAFTERS = {
    "ngram": Ngram(n=2, depth=4),
    "random_tree": RandomTree(depth=3),
    "chain": Standalone(depth=3),
    "tree": Standalone(depth=3, width=2, num_nodes=9),
}
PAGE_SIZES = (1, 4, 16)
CHUNKS = (None, 5, 2)
ALWAYS = [
    ("mha", "chain", 16, None),
    ("sliding", "tree", 4, None),
    ("mla", "random_tree", 1, None),
    ("dsa", "tree", 4, None),
    ("recurrent", "tree", 16, 5),
    ("mha fp8", "tree", 4, 5),
    ("mla fp8", "chain", 16, None),
]
"""Kind, drafter, page size and columns of a chunk."""
SLOW_POINTS = [
    (kind, drafter, PAGE_SIZES[(i + j) % 3], CHUNKS[(i + 2 * j) % 3])
    for i, kind in enumerate(KINDS)
    for j, drafter in enumerate(DRAFTERS)
    if (i + j) % 2
] + [
    ("sliding fp8", "chain", 1, 2),
    ("dsa fp8", "random_tree", 4, None),
    ("recurrent fp8", "tree", 4, 2),
    ("sinks fp8", "tree", 16, None),
]
"""Half of the pairs of a wide kind and a drafter, and each narrow kind."""
CAPACITY = 40
NEW = np.array([24, 9, 24])
"""New tokens of each sequence: the second one ends long before the others."""


def matrix():
    yield from itertools.starmap(pytest.param, ALWAYS)
    yield from (pytest.param(*point, marks=pytest.mark.slow) for point in SLOW_POINTS if point not in ALWAYS)


@functools.cache
def plain_tokens(kind: str) -> np.ndarray:
    """The token buffer of plain decoding, from forwards over whole texts, which read no cache."""
    target, weights = TARGETS[kind]
    cache = target.init_cache(weights(0), 3, 1, 1)
    forward = jax.jit(lambda p, t: jnp.argmax(target.forward(p, tree.chain(t), cache, None).logits, axis=-1))
    tokens, row = np.zeros((3, CAPACITY), np.int32), np.arange(3)
    tokens[:, : toy.IDS.shape[1]] = toy.IDS
    for column in range(toy.LENGTHS.min(), CAPACITY):
        chosen = np.array(forward(weights(0), tokens))[:, column - 1]
        tokens[:, column] = np.where(column < toy.LENGTHS, tokens[row, column], chosen)
    return tokens


def weights_of(kind: str, drafter: Any) -> Params:
    """The target's weights, and as draft the tokens to plant, or the target's weights slightly perturbed."""
    _, weights = TARGETS[kind]
    if isinstance(drafter, RandomTree):
        return Params(weights(0), jnp.asarray(plain_tokens(kind)))
    off = jax.tree.map(lambda a, b: jnp.asarray(0.95 * np.array(a) + 0.05 * np.array(b)), weights(0), weights(1))
    return Params(weights(0), off)


def spoiled(s, spare: int = 0):
    """The state with NaN in all unused parts of both caches; finished sequences use nothing."""
    cache = poison.spoil(s.cache, np.where(s.done, 0, s.length - 1), spare=spare)
    if not hasattr(s.draft, "cache"):
        return dataclasses.replace(s, cache=cache)
    draft = poison.spoil(s.draft.cache, np.where(s.done, 0, s.draft.length), spare=spare)
    return dataclasses.replace(s, cache=cache, draft=dataclasses.replace(s.draft, cache=draft))


@pytest.mark.slow(unless="mla-random_tree")
@pytest.mark.parametrize(("kind", "drafter", "page_size", "chunk"), list(matrix()))
def test_output_equals_plain_decoding(kind, drafter, page_size, chunk, monkeypatch):
    """Both caches are NaN before the first token, and their unused parts are NaN between rounds."""
    wanted, target = plain_tokens(kind), TARGETS[kind][0]
    empty = Decoder.init_cache
    monkeypatch.setattr(Decoder, "init_cache", lambda *given: poison.fill(empty(*given)))
    bound, weights = DRAFTERS[drafter].bind(target, target), weights_of(kind, DRAFTERS[drafter])
    length = jnp.asarray(toy.LENGTHS)
    keys = jax.vmap(jax.random.key)(np.arange(3, dtype=np.uint32))
    prompts = Prompts(jnp.asarray(toy.IDS), length, length + NEW, keys, stopping.init(None, 3))
    method = Method(target, bound, accept.greedy)
    shape = dict(capacity=CAPACITY, page_size=page_size, chunk=chunk)
    s = spoiled(jitted_prefill(weights, prompts, method=method, **shape), spare=5)
    while not s.done.all():
        s = spoiled(decode(weights, s, s.round_index + 1, method=method))
    assert toy.generated(s) == [list(row[:n]) for row, n in zip(wanted, toy.LENGTHS + NEW, strict=True)]
    assert drafter == "ngram" or np.array(s.stats.accept_counts)[:, 1:].any(), "nothing was ever accepted"
