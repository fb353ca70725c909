"""The paged cache against dense attention over the same tokens in one array."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jspec.cache import MhaCache
from jspec.core import tree
from jspec.core.commit import commit_rows
from pallas_kernels import platform

LAYERS, KV_HEADS, HEADS, DIM, BATCH, CAPACITY, NODES = 2, 2, 4, 16, 3, 21, 5
SCALE = 0.25


@partial(jax.jit, static_argnames="layer")
def attend(cache, layer, q, k, v, start, mask):
    return cache.attend(layer, q, k, v, start, mask, SCALE)


commit = jax.jit(MhaCache.commit)


def empty(page_size, rng, *, scrambled):
    """An empty cache; scrambled: with spare pages, pages in random order, and NaN in all of them."""
    cache = MhaCache.empty(
        BATCH, CAPACITY, page_size, layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, dtype=jnp.float32
    )
    if not scrambled:
        return cache
    pages = cache.page_table.size + 3
    table = rng.permutation(pages)[: cache.page_table.size].reshape(cache.page_table.shape)
    pool = jnp.full((LAYERS, 2, pages, *cache.pool.shape[3:]), jnp.nan)
    return dataclasses.replace(cache, pool=pool, page_table=jnp.asarray(table, jnp.int32))


def dense(q, keys, values):
    """Attention of one query over all keys, in float64; heads share keys in groups."""
    out = np.zeros(q.shape)
    for h in range(HEADS):
        key, value = keys[:, h // 2].astype(np.float64), values[:, h // 2].astype(np.float64)
        weights = np.exp(key @ q[h] * SCALE)
        out[h] = weights / weights.sum() @ value
    return out


@pytest.mark.slow(unless=("1-True-16", "3-False-16", "5-True-24"))
@pytest.mark.parametrize(
    ("page_size", "scrambled", "width"),
    [(1, True, DIM), (2, True, DIM), (3, False, DIM), (3, True, DIM), (5, True, 24), (8, True, DIM), (16, True, DIM)],
)
def test_rounds_of_commits_equal_dense_attention_over_the_committed_tokens(page_size, scrambled, width, monkeypatch):
    """width: elements of a head in the pool, of which some platforms want more."""
    monkeypatch.setattr(platform, "row_width", lambda _: width)
    rng = np.random.default_rng(page_size)
    cache = empty(page_size, rng, scrambled=scrambled)
    assert cache.pool.shape[-1] == width
    committed = {at: np.zeros((0, 2, KV_HEADS, DIM), np.float32) for at in np.ndindex(LAYERS, BATCH)}
    start = np.zeros(BATCH, np.int32)
    for _ in range(5):
        q = rng.normal(size=(BATCH, NODES, HEADS, DIM)).astype(np.float32)
        rows = rng.normal(size=(LAYERS, 2, BATCH, NODES, KV_HEADS, DIM)).astype(np.float32)
        # Node n sees a random subset of the nodes before it, which is more general than a tree.
        mask = np.tril(rng.random((BATCH, NODES, NODES)) < 0.5) | np.eye(NODES, dtype=bool)
        for layer in range(LAYERS):
            out = np.asarray(attend(cache, layer, q, *rows[layer], start, mask))
            for b, n in np.ndindex(BATCH, NODES):
                seen = np.concatenate([committed[layer, b], rows[layer, :, b].swapaxes(0, 1)[mask[b, n]]])
                keys, values = seen.swapaxes(0, 1)
                np.testing.assert_allclose(out[b, n], dense(q[b, n], keys, values), rtol=1e-5, atol=1e-5)
        path = np.sort(rng.integers(0, NODES, (BATCH, NODES - 1)), axis=1).astype(np.int32)
        length = np.minimum(rng.integers(0, NODES, BATCH), CAPACITY - start).astype(np.int32)
        cache = commit(cache, tuple((k, v) for k, v in rows), start, path, length)
        for layer, b in committed:
            taken = rows[layer, :, b].swapaxes(0, 1)[path[b, : length[b]]]
            committed[layer, b] = np.concatenate([committed[layer, b], taken])
        start = start + length
    assert start.max() > min(page_size, 8), "too little was committed to cross a page"


def test_a_commit_does_not_change_the_old_cache():
    rng = np.random.default_rng(0)
    cache = empty(4, rng, scrambled=True)
    before = np.array(cache.pool)
    rows = tuple((jnp.ones((BATCH, NODES, KV_HEADS, DIM)),) * 2 for _ in range(LAYERS))
    after = commit(cache, rows, jnp.zeros(BATCH, jnp.int32), None, jnp.full(BATCH, 2, jnp.int32))
    np.testing.assert_array_equal(cache.pool, before)
    assert np.isnan(before).all() and not np.isnan(after.pool).all()


@pytest.mark.parametrize("value", (0.0, -1.0, np.inf, np.nan))
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.int32))
def test_commit_rows_commits_after_any_output_of_the_forward(value, dtype):
    if dtype == jnp.int32 and not np.isfinite(value):
        return
    cache = empty(4, np.random.default_rng(0), scrambled=True)
    rows = tuple((jnp.ones((BATCH, NODES, KV_HEADS, DIM)),) * 2 for _ in range(LAYERS))
    given = cache, rows, jnp.zeros(BATCH, jnp.int32), None, jnp.arange(BATCH, dtype=jnp.int32)
    out = jnp.full((BATCH, NODES, 7), value, dtype)
    toy.assert_same(jax.jit(commit_rows)(*given, after=out), commit(*given))


def test_a_forward_does_not_change_the_cache():
    config, params = toy.TARGET, toy.random_params(toy.TARGET)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (2, 6)), jnp.int32)
    start = jnp.array([6, 3], jnp.int32)
    cache = config.init_cache(params, 2, 12, 4)
    forward = jax.jit(config.forward)
    cache = commit(cache, forward(params, tree.chain(ids), cache, None).rows, jnp.zeros(2, jnp.int32), None, start)
    before = np.array(cache.pool)
    first = forward(params, tree.chain(ids[:, :3]), cache, start)
    np.testing.assert_array_equal(cache.pool, before)
    again = forward(params, tree.chain(ids[:, :3]), cache, start)
    np.testing.assert_array_equal(first.logits, again.logits)


@pytest.mark.parametrize(("rows", "page_size", "pages"), ((1, 1, 1), (7, 3, 3), (8, 4, 2), (9, 4, 3), (0, 4, 0)))
def test_capacity_is_rounded_up_to_whole_pages(rows, page_size, pages):
    cache = MhaCache.empty(2, rows, page_size, layers=1, kv_heads=1, head_dim=4, dtype=jnp.float32)
    assert cache.page_table.shape == (2, pages)
    assert cache.pool.shape == (1, 2, 2 * pages, page_size, 1, 4)
    assert sorted(np.ravel(cache.page_table)) == list(range(2 * pages)), "two sequences share a page"


@pytest.mark.parametrize("page_size", (0, -1))
def test_a_page_of_no_rows_is_an_error(page_size):
    with pytest.raises(ValueError, match=f"page_size={page_size}: must be at least 1"):
        MhaCache.empty(1, 8, page_size, layers=1, kv_heads=1, head_dim=4, dtype=jnp.float32)
