"""Every kind of cache with chains and trees, at any page size, with NaN in everything that must not be read.

Add a new kind of cache to `KINDS`.
"""

import functools
import itertools
from typing import Any

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from planted import RandomTree

import jspec
from jspec.analysis import poison, verify_checks
from jspec.analysis.verify_subject import Subject
from jspec.core import tree
from jspec.core.types import Params
from jspec.drafters import Ngram, Standalone
from jspec.models.decoder import Decoder

NAMES = "llama", "gemma4 shared", "deepseek mla", "deepseek dsa", "qwen3_next dense", "gpt_oss sinks"
KINDS = {name: families.MODELS[name] for name in (*NAMES, *families.KINDS)}
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
    ("llama", "chain", 16, None),
    ("gemma4 shared", "tree", 4, None),
    ("deepseek mla", "random_tree", 1, None),
    ("deepseek dsa", "tree", 4, None),
    ("qwen3_next dense", "tree", 16, 5),
    ("llama fp8", "tree", 4, 5),
    ("deepseek mla fp8", "chain", 16, None),
]
"""Kind, drafter, page size and columns of a chunk."""
SLOW_POINTS = [
    (kind, drafter, PAGE_SIZES[(i + j) % 3], CHUNKS[(i + 2 * j) % 3])
    for i, kind in enumerate(KINDS)
    for j, drafter in enumerate(DRAFTERS)
    if (i + j) % 2
] + [
    ("gemma4 shared fp8", "chain", 1, 2),
    ("deepseek dsa fp8", "random_tree", 4, None),
    ("qwen3_next dense fp8", "tree", 4, 2),
    ("gpt_oss sinks fp8", "tree", 16, None),
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


@pytest.mark.slow(unless="deepseek mla-random_tree")
@pytest.mark.parametrize(("kind", "drafter", "page_size", "chunk"), list(matrix()))
def test_output_equals_plain_decoding(kind, drafter, page_size, chunk, monkeypatch):
    """Both caches are NaN before the first token, and their unused parts are NaN between rounds."""
    wanted, target = plain_tokens(kind), TARGETS[kind][0]
    empty = Decoder.init_cache
    monkeypatch.setattr(Decoder, "init_cache", lambda *given: poison.fill(empty(*given)))
    params, draft = weights_of(kind, DRAFTERS[drafter]), target if drafter in ("chain", "tree") else None
    model = jspec.Model(kind, target, params, None, (), draft)
    subject = Subject(model, DRAFTERS[drafter], toy.PROMPTS, None, max(NEW), 0)
    out = verify_checks.poisoned(subject, chunk=chunk, spare=5, page_size=page_size, max_new_tokens=NEW.tolist())
    ends = zip(wanted, toy.LENGTHS, NEW, strict=True)
    assert out.tokens == [row[length : length + new].tolist() for row, length, new in ends]
    assert drafter == "ngram" or out.stats.accept_counts[:, 1:].any(), "nothing was ever accepted"
