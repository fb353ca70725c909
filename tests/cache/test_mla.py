"""Caches of latent rows, alone and with indexers: both forms of attention agree, and trees commit like chains."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import DsaCache, MlaCache, dsa
from jspec.cache.dsa import IndexQuery
from jspec.cache.mla import UpProjections
from pallas_kernels import platform

HEADS, KEY, ROPE, LATENT, VALUE, INDEX, INDEX_HEADS = 3, 6, 4, 10, 8, 12, 5
WIDTH, SCALE = LATENT + ROPE, 0.3
LENGTHS = np.array([7, 0, 12], np.int32)
TOTAL, TOP_K = 16, 6
PARENTS = np.array([0, 0, 0, 1])
"""Two children of the root, and a child of the first one."""
PATH = np.array([0, 1, 3], np.int32)
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


UP = UpProjections(normal(HEADS, KEY, LATENT), normal(HEADS, LATENT, VALUE))
Q, ROWS = normal(3, TOTAL, HEADS, KEY + ROPE), normal(3, TOTAL, WIDTH)
KEYS, ASKED = normal(3, TOTAL, INDEX), IndexQuery(normal(3, TOTAL, INDEX_HEADS, INDEX), normal(3, TOTAL, INDEX_HEADS))


def empty(kind, page_size):
    shape = {"layers": 2, "width": WIDTH, "dtype": jnp.float32}
    if kind == "mla":
        return MlaCache.empty(3, TOTAL + 3, page_size, **shape)
    return DsaCache.empty(3, TOTAL + 3, page_size, **shape, index_width=INDEX, top_k=TOP_K)


def rows_of(kind, rows, keys):
    """The rows of two layers; the second layer's are scaled."""
    rows, keys = jnp.asarray(rows), jnp.asarray(keys)
    return tuple((rows * s,) if kind == "mla" else (rows * s, keys * s) for s in (1, 2))


@partial(jax.jit, static_argnames="kind")
def attend(cache, kind, q, rows, keys, asked, start, mask):
    more = {} if kind == "mla" else {"keys": keys * 2, "query": asked}
    return cache.attend(1, q, rows * 2, UP, start, mask, SCALE, **more)


def part(x, first, count):
    """`count` tokens of each sequence, from first[b] on."""
    return jax.tree.map(lambda each: np.stack([row[at : at + count] for row, at in zip(each, first, strict=True)]), x)


def ancestors():
    mask = np.eye(4, dtype=bool)
    for node, parent in enumerate(PARENTS):
        mask[node] |= mask[parent]
    return mask[None]


@pytest.fixture(params=("mla", "dsa"))
def kind(request):
    return request.param


@pytest.fixture
def whole(kind):
    """The result of attention over all tokens at once, with the keys and values of each head."""
    return np.asarray(attend(empty(kind, 4), kind, Q, ROWS, KEYS, ASKED, None, None))


def committed(kind, page_size):
    """A cache with the first tokens of each sequence, and NaN everywhere else."""
    cache = empty(kind, page_size)
    first = jnp.zeros(3, jnp.int32)
    filled = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x, cache)
    return filled.commit(rows_of(kind, ROWS[:, :12], KEYS[:, :12]), first, None, jnp.asarray(LENGTHS))


@pytest.mark.slow(unless=("mla-1", "dsa-16"))
@pytest.mark.parametrize("page_size", (1, 16))
def test_a_chain_after_a_prefix_equals_all_at_once(kind, whole, page_size):
    given = part((Q, ROWS, KEYS, ASKED), LENGTHS, 4)
    out = attend(committed(kind, page_size), kind, *given, jnp.asarray(LENGTHS), None)
    np.testing.assert_allclose(out, part(whole, LENGTHS, 4), atol=1e-5)


@pytest.mark.slow(unless="mla-3")
@pytest.mark.parametrize("page_size", (3,))
def test_a_path_of_a_tree_is_read_and_committed_like_a_chain(kind, whole, page_size):
    """Nodes 0, 1 and 3 are the next tokens; node 2 is a sibling whose key changes the selection of an indexer."""
    start, nodes = jnp.asarray(LENGTHS), np.array([0, 1, 3, 2])
    q, rows, keys, asked = jax.tree.map(lambda x: x[:, nodes], part((Q, ROWS, KEYS, ASKED), LENGTHS, 4))
    keys[:, 2] *= 100
    cache = committed(kind, page_size)
    out = attend(cache, kind, q, rows, keys, asked, start, jnp.asarray(ancestors()))
    np.testing.assert_allclose(out[:, PATH], part(whole, LENGTHS, 3), atol=1e-5)
    path = jnp.broadcast_to(jnp.asarray(PATH), (3, 3))
    cache = cache.commit(rows_of(kind, rows, keys), start, path, jnp.full(3, 3, jnp.int32))
    following = part((Q, ROWS, KEYS, ASKED), LENGTHS + 3, 1)
    out = attend(cache, kind, *following, start + 3, None)
    np.testing.assert_allclose(out, part(whole, LENGTHS + 3, 1), atol=1e-5)


def test_rows_that_the_platform_pads_give_the_same_result(kind, whole, monkeypatch):
    """A row of 14 features has 16 elements in the pool, and an indexer's key of 12 has 16."""
    monkeypatch.setattr(platform, "row_width", lambda width: 16)
    cache = committed(kind, 16)
    pools = (cache.pool,) if kind == "mla" else (cache.latent.pool, cache.index.pool)
    assert {pool.shape[-1] for pool in pools} == {16}
    given = part((Q, ROWS, KEYS, ASKED), LENGTHS, 4)
    out = attend(cache, kind, *given, jnp.asarray(LENGTHS), None)
    np.testing.assert_allclose(out, part(whole, LENGTHS, 4), atol=1e-5)


def test_an_indexer_selects(whole, kind):
    """Most tokens see more tokens than the indexer selects; otherwise the tests above would not cover it."""
    if kind == "dsa":
        cache = MlaCache.empty(3, TOTAL, 4, layers=2, width=WIDTH, dtype=jnp.float32)
        dense = np.asarray(attend(cache, "mla", Q, ROWS, KEYS, ASKED, None, None))
        np.testing.assert_allclose(whole[:, :TOP_K], dense[:, :TOP_K], atol=1e-5)
        assert np.abs(whole[:, TOP_K:] - dense[:, TOP_K:]).max((2, 3)).min() > 1e-3


def test_heads_of_an_indexer_one_at_a_time_give_the_same_scores(monkeypatch):
    query, keys = part((ASKED, KEYS), LENGTHS, 3)
    together = dsa._scores(query, keys)
    monkeypatch.setattr(dsa, "MAX_MATERIALIZED_SCORES", 1)
    np.testing.assert_allclose(dsa._scores(query, keys), together, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("change", "message"), (({"page_size": 0}, "page_size=0"), ({"top_k": 0}, "top_k=0")))
def test_sizes_below_1_are_an_error(change, message):
    shape = {"page_size": 4, "layers": 1, "width": 8, "index_width": 4, "top_k": 2, "dtype": jnp.float32, **change}
    with pytest.raises(ValueError, match=message):
        DsaCache.empty(1, 8, **shape)
