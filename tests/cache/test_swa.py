"""Windows, of a ring and of a draft, against dense attention over the end of each path; everything outside is NaN."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import MhaCache, SlidingCache, base
from jspec.cache.window import Window, window_mask, within
from jspec.core import tree
from jspec.core.pieces import Pieces
from jspec.core.types import DraftTree
from pallas_kernels import platform

LAYERS, KV_HEADS, HEADS, DIM, BATCH, CAPACITY = 2, 1, 2, 16, 3, 100
SHAPE = dict(layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, dtype=jnp.float32)


@partial(jax.jit, static_argnames=("layer", "window"))
def attend(cache, layer, q, k, v, start, mask, positions, window=None):
    seen = cache if window is None else within(cache, window.length, window.keep_first)
    return seen.attend(layer, q, k, v, start, mask, 0.25, positions)


commit = jax.jit(lambda cache, *given: cache.commit(*given))


@jax.jit
def depths_and_mask(tokens, parents):
    draft = DraftTree(tokens, parents)
    return tree.depths(draft), tree.ancestor_mask(draft)


def empty(window, page_size, rng, kind=SlidingCache):
    """An empty cache in a pool with spare pages, with its pages in random order."""
    own = {"window": window} if kind is SlidingCache else {}
    cache = jax.jit(partial(kind.empty, BATCH, CAPACITY, page_size, **SHAPE, **own))()
    pages = cache.pool.shape[2] + 3
    moved = rng.permutation(pages)[: cache.pool.shape[2]].astype(np.int32)
    pool = np.full((LAYERS, 2, pages, *cache.pool.shape[3:]), np.float32(np.nan))
    return dataclasses.replace(cache, pool=pool, page_table=moved[np.array(cache.page_table)])


def forget(cache, length, window=None):
    """The cache with NaN in every row outside the last window.

    window: of a draft, whose queries are all after the committed rows.
    """
    last, first = (cache.window, 0) if window is None else (window.length - 1, window.keep_first)
    pool, table = np.array(cache.pool), np.array(cache.page_table)
    kept, page_size = np.full_like(pool, np.nan), pool.shape[3]
    for b, end in enumerate(length):
        for t in range(end):
            if first <= t < end - last:
                continue
            at = table[b, t // page_size], t % page_size
            kept[:, :, *at] = pool[:, :, *at]
    return dataclasses.replace(cache, pool=jnp.asarray(kept))


def random_round(rng, nodes, chain):
    """Queries, rows, the parents of a tree (None: a chain), and a path from the root of each sequence."""
    q = rng.normal(size=(BATCH, nodes, HEADS, DIM)).astype(np.float32)
    rows = rng.normal(size=(LAYERS, 2, BATCH, nodes, KV_HEADS, DIM)).astype(np.float32)
    if chain:
        return q, rows, None, [list(range(n + 1)) for n in rng.integers(0, nodes, BATCH)]
    parents = np.array([[0] + [rng.integers(max(0, n - 4), n) for n in range(1, nodes)] for _ in range(BATCH)])
    return q, rows, parents.astype(np.int32), [line(row, rng.integers(0, nodes)) for row in parents]


def line(parents, node):
    """A node's ancestors, root first, and itself."""
    return [node] if node == 0 else [*line(parents, parents[node]), node]


def dense(q, pairs):
    """Attention of one query over a list of keys and values, in float64."""
    keys, values = np.array(pairs, np.float64).swapaxes(0, 1)
    weights = np.exp(0.25 * keys[:, 0] @ q.T)
    return (weights / weights.sum(0)).T @ values[:, 0]


@pytest.mark.slow(unless="8-1")
@pytest.mark.parametrize(
    ("window", "page_size"),
    [
        (8, 1),
        (7, 5),
        (1, 4),
        (20, 16),
        *(pytest.param(*at, marks=pytest.mark.slow) for at in ((8, 3), (8, 4), (8, 16), (1, 1), (64, 16), (100, 16))),
    ],
)
def test_rounds_equal_dense_attention_over_each_nodes_window(window, page_size, monkeypatch):
    """Chains and trees, shorter and longer than window and ring, in rounds that wrap around the ring several times.

    With one window, a head has more elements in the pool, as some platforms want it.
    """
    compare(SlidingCache, window, 0, page_size, monkeypatch, width=24 if window == 7 else DIM)


@pytest.mark.slow(unless="8-3-4")
@pytest.mark.parametrize(
    ("window", "keep_first", "page_size"),
    ((8, 3, 4), (8, 0, 1), (1, 1, 3), (7, 7, 16), (20, 9, 4), (100, 5, 16), (30, 30, 1), (26, 2, 5)),
)
def test_a_drafts_window_equals_dense_attention_over_it_and_the_first_rows(window, keep_first, page_size, monkeypatch):
    """Without the positions of the nodes, which follow from the rows that they see."""
    compare(MhaCache, window, keep_first, page_size, monkeypatch, width=24 if window == 7 else DIM)


def compare(kind, window, keep_first, page_size, monkeypatch, width):
    """width: elements of a head in the pool."""
    draft = None if kind is SlidingCache else Window(window, keep_first)
    monkeypatch.setattr(platform, "row_width", lambda _: width)
    rng = np.random.default_rng(window + page_size)
    cache = empty(window, page_size, rng, kind)
    assert cache.pool.shape[-1] == width
    committed = {at: [] for at in np.ndindex(LAYERS, BATCH)}
    length = np.zeros(BATCH, np.int32)
    # The first positions of a draft's window are at first among the rows of the round, of a tree and of a chain.
    first = ((12, False),) if keep_first else ()
    for count, chain in (*first, (25, True), (1, True), (12, False), (5, True), (12, False), (25, True)):
        q, rows, parents, paths = random_round(rng, count, chain)
        paths = [path if b else [] for b, path in enumerate(paths)] if count == 5 else paths
        depths, mask = depths_and_mask(np.zeros((BATCH, count), np.int32), None if chain else parents)
        positions = length[:, None] + np.asarray(depths)
        for layer in range(LAYERS):
            given = (positions, None) if draft is None else (None, draft)
            out = np.asarray(attend(cache, layer, q, *rows[layer], length, mask, *given))
            for b, n in np.ndindex(BATCH, count):
                own = range(n + 1) if parents is None else line(parents[b], n)
                path = [*committed[layer, b], *(rows[layer, :, b, m] for m in own)]
                seen = path[:keep_first] + path[max(keep_first, len(path) - window) :]
                np.testing.assert_allclose(out[b, n], dense(q[b, n], seen), rtol=1e-5, atol=1e-5)
        taken = np.array([len(path) for path in paths], np.int32)
        padded = None if chain else np.array([path + [0] * (count - len(path)) for path in paths], np.int32)
        cache = commit(cache, tuple(map(tuple, rows)), length, padded, taken)
        for layer, b in committed:
            committed[layer, b] += [rows[layer, :, b, m] for m in paths[b]]
        length = length + taken
        cache = forget(cache, length, draft)
    assert length.max() > 3 * min(window, 8) and length.min() < length.max()


@pytest.mark.parametrize("page_size", (1, 4))
def test_a_query_at_the_last_committed_position_finds_its_whole_window(page_size):
    """Drafters that only read do this, so the ring has one more row than a round needs."""
    rng, window = np.random.default_rng(0), 8
    cache = empty(window, page_size, rng)
    _, rows, _, _ = random_round(rng, 25, True)
    length = np.array([25, 9, 3], np.int32)
    cache = forget(commit(cache, tuple((k, v) for k, v in rows), np.zeros(BATCH, np.int32), None, length), length)
    q = rng.normal(size=(BATCH, 1, HEADS, DIM)).astype(np.float32)
    blank = np.zeros((BATCH, 1, KV_HEADS, DIM), np.float32)
    out = attend(cache, 1, q, blank, blank, length, np.zeros((1, 1, 1), bool), length[:, None] - 1)
    for b, end in enumerate(length):
        seen = [rows[1, :, b, t] for t in range(max(0, end - window), end)]
        np.testing.assert_allclose(out[b, 0], dense(q[b, 0], seen), rtol=1e-5, atol=1e-5)


def test_a_finished_sequence_keeps_its_pages():
    rng = np.random.default_rng(0)
    cache = empty(8, 4, rng)
    _, rows, _, _ = random_round(rng, 25, True)
    after = commit(
        cache, tuple((k, v) for k, v in rows), np.full(BATCH, 30, np.int32), None, np.array([25, 0, 25], np.int32)
    )
    assert np.isnan(after.pool[:, :, cache.page_table[1]]).all()
    assert not np.isnan(after.pool[:, :, cache.page_table[0]]).any()


@pytest.mark.parametrize("chain", [True, False])
def test_no_slot_is_written_twice_in_a_commit(monkeypatch, chain):
    """Backends differ in which of two rows a scatter keeps."""
    written = []
    monkeypatch.setattr(base, "kv_compact", lambda pool, rows, table, *which: written.append(which) or pool)
    rng = np.random.default_rng(0)
    _, rows, _, _ = random_round(rng, 25, True)
    path = None if chain else np.arange(25, dtype=np.int32)[None].repeat(BATCH, 0)
    length = np.array([25, 0, 5], np.int32)
    cache = empty(8, 3, rng)
    cache.commit(tuple((k, v) for k, v in rows), np.full(BATCH, 40, np.int32), path, length)
    ((start, path, count),) = written
    assert (start.tolist(), count.tolist()) == ([56, 40, 40], [9, 0, 5])
    assert path.tolist()[0] == list(range(16, 25)) and path.tolist()[2][:5] == list(range(5))


def test_pieces_of_a_prompt_write_no_slot_twice(monkeypatch):
    written = []
    monkeypatch.setattr(base, "kv_compact", lambda pool, rows, table, *which: written.append(which) or pool)
    rng = np.random.default_rng(0)
    cache = empty(8, 3, rng)
    view = cache.take(jnp.array([0, 0, 0, 1]))
    rows = jnp.zeros((LAYERS, 2, 4, 5, KV_HEADS, DIM))
    pieces = Pieces(jnp.array([0, 0, 0, 3]), jnp.array([False, False, True, True]))
    start, length = jnp.array([40, 45, 50, 0]), jnp.array([5, 5, 3, 5])
    view.commit(tuple((k, v) for k, v in rows), start, None, length, pieces)
    ((start, path, count),) = written
    # A ring of 9 rows: the last ones of 13, and all of 5.
    assert (start.tolist(), count.tolist()) == ([44, 45, 50, 0], [1, 5, 3, 5])
    assert path[:, 0].tolist() == [4, 0, 0, 0] and path[1].tolist() == list(range(5))


def test_the_pool_has_the_size_of_the_window_at_any_context_length():
    made = jax.eval_shape(lambda: SlidingCache.empty(2, 32768, 16, **SHAPE, window=1000))
    assert made.pool.shape == (LAYERS, 2, 2 * 63, 16, KV_HEADS, DIM)
    assert made.page_table.shape == (2, 2048)
    short = jax.eval_shape(lambda: SlidingCache.empty(2, 40, 16, **SHAPE, window=1000))
    assert short.pool.shape[2] == 2 * 3, "a context shorter than the window needs only its own pages"


def test_no_two_sequences_share_a_page():
    table = np.array(SlidingCache.empty(3, 50, 4, **SHAPE, window=6).page_table)
    assert [sorted(set(row)) for row in table] == [[0, 1], [2, 3], [4, 5]]
    assert table[0].tolist() == [0, 1] * 6 + [0]


@pytest.mark.parametrize("chain", [True, False])
def test_rounds_within_the_window_keep_their_mask(chain):
    mask = None if chain else jnp.ones((1, 8, 8), bool)
    assert window_mask(mask, 8, 8, Window(8), None) is mask


def test_an_empty_window_is_an_error():
    with pytest.raises(ValueError, match="window=0: must be at least 1"):
        SlidingCache.empty(1, 8, 4, **SHAPE, window=0)


@pytest.mark.parametrize("length", (3, 8, 20))
def test_a_layer_with_a_window_of_its_own_sees_the_shorter_one_and_no_first_rows(length):
    rng = np.random.default_rng(0)
    cache, shorter = empty(8, 4, rng), empty(min(length, 8), 4, rng)
    q, rows, _, _ = random_round(rng, 25, True)
    start, count = np.zeros(BATCH, np.int32), np.array([25, 9, 3], np.int32)
    cache, shorter = (commit(each, tuple(map(tuple, rows)), start, None, count) for each in (cache, shorter))
    given = 1, q[:, :2], *rows[0, :, :, :2], count, None, None
    np.testing.assert_array_equal(attend(cache, *given, Window(length, 2)), attend(shorter, *given))


def test_a_window_of_exact_attention_is_an_error():
    cache = MhaCache.empty(1, 8, 4, **SHAPE)
    q, k = jnp.zeros((1, 1, HEADS, DIM)), jnp.zeros((1, 1, KV_HEADS, DIM))
    with pytest.raises(ValueError, match="exact=True: exact attention has no windows of drafts yet"):
        within(cache, 4).attend(0, q, k, k, jnp.zeros(1, jnp.int32), None, 1.0, exact=True)
