"""The largest scores of each row, against a stable sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache.dsa import largest

SHAPE = (2, 3, 45)


def oracle(scores, visible, k):
    chosen = np.zeros(scores.shape, bool)
    for b, n in np.ndindex(scores.shape[:2]):
        seen = [i for i in range(scores.shape[2]) if visible[b, n, i]]
        chosen[b, n, sorted(seen, key=lambda i: -scores[b, n, i])[:k]] = True
    return chosen


def scores_of(kind):
    rng = np.random.default_rng(3)
    x = rng.normal(size=SHAPE).astype(np.float32)
    return {
        "spread": x,
        "ties": np.round(x),
        "zeros": np.where(x > 0.5, x, np.where(x > 0, 0.0, -0.0)).astype(np.float32),
        "equal": np.zeros(SHAPE, np.float32),
        "extreme": np.where(x > 1, np.inf, np.where(x < -0.3, -np.inf, x * 1e30)).astype(np.float32),
    }[kind]


select = jax.jit(largest, static_argnames="k")


@pytest.mark.parametrize("kind", ("spread", "ties", "zeros", "equal", "extreme"))
def test_equals_a_stable_sort(kind):
    scores = scores_of(kind)
    seen = np.random.default_rng(0).random(SHAPE) < np.array([0.1, 0.6, 1.0])[None, :, None]
    # Invisible scores may be anything.
    given = np.where(seen, scores, np.nan).astype(np.float32)
    for k in (1, 16, 44, 45):
        np.testing.assert_array_equal(select(given, seen, k=k), oracle(scores, seen, k))


def test_one_mask_applies_to_all_rows():
    scores, seen = scores_of("ties"), np.arange(SHAPE[2])[None, None] < 30
    everywhere = np.broadcast_to(seen, SHAPE)
    np.testing.assert_array_equal(select(scores, seen, k=9), select(scores, everywhere, k=9))


def test_there_is_no_sort_and_no_loop():
    text = jax.jit(lambda x, seen: largest(x, seen, 16)).lower(jnp.zeros(SHAPE), jnp.ones(SHAPE, bool)).as_text()
    assert "sort" not in text
    assert "while" not in text
