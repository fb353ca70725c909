"""The cache of several kinds of layers: which pool each layer reads and writes, and how much memory it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import HybridCache, LayerKeys, MhaCache, SlidingCache

SLIDING, FULL = LayerKeys(kv_heads=2, head_dim=8, window=4), LayerKeys(kv_heads=1, head_dim=16)
LAYERS = (SLIDING, FULL, SLIDING, FULL, 2, 3, 2)


def rows_of(layers, count, batch=2):
    """Rows in which all features of row t of a layer are 100 * layer + t."""
    rows = []
    for index, layer in enumerate(layers):
        if isinstance(layer, int):
            rows.append(None)
            continue
        value = 100.0 * index + jnp.arange(count, dtype=jnp.float32)[None, :, None, None]
        rows.append((jnp.broadcast_to(value, (batch, count, layer.kv_heads, layer.head_dim)),) * 2)
    return tuple(rows)


def test_layers_with_equal_specs_share_a_pool_and_sharing_layers_have_none():
    cache = HybridCache.empty(2, 32, 4, layers=LAYERS, dtype=jnp.float32)
    sliding, full = cache.groups
    assert isinstance(sliding, SlidingCache) and type(full) is MhaCache
    assert sliding.pool.shape == (2, 2, 2, 4, 2, 8) and full.pool.shape == (2, 2, 16, 4, 1, 16)
    assert cache.places == ((0, 0), (1, 0), (0, 1), (1, 1), (0, 1), (1, 1), (0, 1))


@pytest.mark.parametrize("layers", [LAYERS, (FULL, FULL), (SLIDING, SLIDING, 0)], ids=["both", "full", "sliding"])
def test_each_layer_reads_what_its_source_has_committed(layers):
    cache = HybridCache.empty(2, 32, 4, layers=layers, dtype=jnp.float32)
    start, length = jnp.zeros(2, jnp.int32), jnp.array([7, 3], jnp.int32)
    cache = jax.jit(HybridCache.commit)(cache, rows_of(layers, 9), start, None, length)
    for index, layer in enumerate(layers):
        source = index if isinstance(layer, LayerKeys) else layer
        kind = layers[source]
        q = jnp.zeros((2, 1, 2, kind.head_dim))
        blank = jnp.zeros((2, 1, kind.kv_heads, kind.head_dim))
        # With equal scores the result is the mean of the visible rows; none of the round's own rows is visible.
        none = jnp.zeros((1, 1, 1), bool)
        out = cache.attend(index, q, blank, blank, length, none, 1.0, length[:, None] - 1)
        for b, end in enumerate((7, 3)):
            seen = np.arange(0 if kind.window is None else max(0, end - kind.window), end)
            np.testing.assert_allclose(out[b], 100 * source + seen.mean(), rtol=1e-6)


def test_sharing_with_a_layer_without_keys_is_an_error():
    for layers in ((SLIDING, 0, 1), (0,), (1, SLIDING)):
        with pytest.raises(ValueError, match="which has none before it"):
            HybridCache.empty(1, 8, 4, layers=layers, dtype=jnp.float32)
