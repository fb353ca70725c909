"""The cache of recurrent layers: committing a path equals reading its tokens alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import HybridCache, LayerKeys, MhaCache, RecurrentCache, RecurrentLayer
from jspec.core import tree
from jspec.core.types import DraftTree

KIND = RecurrentLayer(key_heads=2, value_heads=4, key_dim=8, value_dim=6)
B, NODES, BEFORE = 3, 14, 5
CLOSE = dict(rtol=0, atol=1e-5)
NAN = np.float32(np.nan)
conv = np.random.default_rng(9).normal(size=(4, KIND.channels)).astype(np.float32)


@jax.jit
def attend(cache, given, start, mask=None, earlier=None):
    """Output and rows of the one layer."""
    return cache.attend(0, given[0], jnp.asarray(conv), given[1], given[2], start, mask, earlier)


@jax.jit
def commit(cache, rows, start, path, length):
    return cache.commit((rows,), start, path, length)


def tokens(rng, count):
    """Inputs of the convolution, decays and rates."""
    inputs = rng.normal(size=(B, count, KIND.channels))
    g, beta = -np.exp(rng.normal(size=(B, count, 4))), rng.uniform(size=(B, count, 4))
    return [x.astype(np.float32) for x in (inputs, g, beta)]


def of(given, index):
    """The tokens at `index` [B, A]."""
    return [np.take_along_axis(x, np.asarray(index)[..., None], axis=1) for x in given]


@pytest.fixture(scope="module")
def before():
    """A cache with `BEFORE` committed tokens, and one more sequence with none and NaN in their place."""
    cache = KIND.empty(B, 64, 16, layers=1, dtype=jnp.float32)
    start = np.array([BEFORE, BEFORE - 2, 0], np.int32)
    given = tokens(np.random.default_rng(0), BEFORE)
    cache = commit(cache, attend(cache, given, None)[1], np.zeros(B, np.int32), None, start)
    states, windows = np.array(cache.layer_states[0]), np.array(cache.windows)
    states[2] = windows[:, 2] = np.nan
    return RecurrentCache((states,), windows), start


def plainly(cache, given, start, count):
    """Token by token: the output of each, and the cache after each."""
    outs, caches = [], [cache]
    for i in range(count):
        out, rows = attend(cache, of(given, np.full((B, 1), i)), start + i)
        cache = commit(cache, rows, start + i, None, np.ones(B, np.int32))
        outs.append(out)
        caches.append(cache)
    return np.concatenate(outs, axis=1), jax.device_get(caches)


def assert_remembers(got, wanted, sequence):
    """Two caches agree on a sequence."""
    got = jax.device_get(got)
    np.testing.assert_allclose(got.layer_states[0][sequence], wanted.layer_states[0][sequence], **CLOSE)
    np.testing.assert_allclose(got.windows[0, sequence], wanted.windows[0, sequence], **CLOSE)


def random_path(rng, parents, mask):
    """A path to a node, with its end repeated, and its length."""
    end = rng.integers(len(parents[0]) // 2, len(parents[0]), B)
    paths = [np.nonzero(row[n])[0] for row, n in zip(mask, end, strict=True)]
    most = max(map(len, paths))
    padded = [np.pad(path, (0, most - len(path)), mode="edge") for path in paths]
    return np.stack(padded).astype(np.int32), np.array([len(path) for path in paths])


def test_committing_a_path_of_a_tree_equals_reading_its_tokens_alone(before):
    cache, start = before
    rng = np.random.default_rng(1)
    parents = jnp.asarray(
        [[0, *[rng.integers(max(0, n - 4), n) for n in range(1, NODES)]] for _ in range(B)], jnp.int32
    )
    given = tokens(rng, NODES)
    mask = tree.ancestor_mask(DraftTree(jnp.zeros((B, NODES), jnp.int32), parents))
    out, rows = attend(cache, given, start, mask)
    assert np.isfinite(out).all(), "unused NaN values were read"
    path, length = random_path(rng, np.array(parents), np.array(mask))
    wanted, after = plainly(cache, of(given, path), start, path.shape[1])
    # Nodes off the path are NaN and leave no trace.
    on_path = np.zeros((B, NODES), bool)
    np.put_along_axis(on_path, np.array(path), True, axis=1)
    broken = jax.tree.map(lambda x: np.where(on_path.reshape(B, NODES, *[1] * (x.ndim - 2)), x, NAN), rows)
    got = commit(cache, broken, start, path, jnp.asarray(length))
    for b, count in enumerate(length):
        np.testing.assert_allclose(out[b, path[b, :count]], wanted[b, :count], **CLOSE)
        assert_remembers(got, after[count], b)


@pytest.mark.parametrize("count", [3, 70])
def test_committing_a_chain_equals_reading_its_tokens_alone(before, count):
    """Each sequence commits a different number of tokens; long chains are read in blocks."""
    cache, start = before
    given = tokens(np.random.default_rng(2), count)
    out, rows = attend(cache, given, start)
    assert np.isfinite(out).all(), "unused NaN values were read"
    wanted, after = plainly(cache, given, start, count)
    np.testing.assert_allclose(out, wanted, **CLOSE)
    length = np.array([count, 1, count - 1])
    beyond = np.arange(count)[None] >= length[:, None]
    broken = jax.tree.map(lambda x: np.where(beyond.reshape(B, count, *[1] * (x.ndim - 2)), NAN, x), rows)
    got = commit(cache, broken, start, None, jnp.asarray(length))
    for b, size in enumerate(length):
        assert_remembers(got, after[size], b)


def test_finished_sequences_stay_bitwise_unchanged(before):
    cache, start = before
    given = tokens(np.random.default_rng(3), 4)
    rows = jax.tree.map(lambda x: np.full_like(x, np.nan), attend(cache, given, start)[1])
    for path in (None, np.zeros((B, 3), np.int32)):
        after = commit(cache, rows, start, path, np.zeros(B, np.int32))
        jax.tree.map(np.testing.assert_array_equal, after, cache)


def test_later_forwards_of_a_round_see_the_rows_of_earlier_ones(before):
    cache, start = before
    rng = np.random.default_rng(4)
    parents = jnp.asarray([[0, 0, 1, 1, 2, 3, 3]] * B, jnp.int32)
    given = tokens(rng, 7)
    mask = tree.ancestor_mask(DraftTree(jnp.zeros((B, 7), jnp.int32), parents))
    out, rows = attend(cache, given, start, mask)
    found, earlier = [], None
    for first, last in ((0, 1), (1, 2), (2, 4), (4, 7)):
        here = of(given, np.tile(np.arange(first, last), (B, 1)))
        own, earlier = attend(cache, here, start, mask[:, first:last, :last], earlier)
        found.append(own)
    np.testing.assert_allclose(np.concatenate(found, axis=1), out, **CLOSE)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), earlier, rows)


def test_a_hybrid_cache_has_groups_of_any_kind():
    keys = LayerKeys(2, 8)
    cache = HybridCache.empty(B, 32, 4, layers=(KIND, keys, KIND, 1), dtype=jnp.bfloat16)
    recurrent, paged = cache.groups
    assert isinstance(recurrent, RecurrentCache) and type(paged) is MhaCache
    assert cache.places == ((0, 0), (1, 0), (0, 1), (1, 0))
    assert [x.shape for x in recurrent.layer_states] == [(B, 4, 8, 6)] * 2
    assert recurrent.windows.shape == (2, B, 3, KIND.channels) and recurrent.windows.dtype == jnp.bfloat16
    longer = HybridCache.empty(B, 64, 4, layers=(KIND,), dtype=jnp.bfloat16)
    assert jax.tree.map(jnp.shape, longer.groups[0].layer_states[:1]) == ((B, 4, 8, 6),)


def test_invalid_specs_are_refused():
    with pytest.raises(ValueError, match="value_heads=3 is not a multiple of key_heads=2"):
        RecurrentLayer(2, 3, 8, 8)
    with pytest.raises(ValueError, match="kernel=1: must be at least 2"):
        RecurrentLayer(2, 2, 8, 8, kernel=1)
