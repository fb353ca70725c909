"""Sums of fixed-point digits: exact, and the same in every order and shape."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import logprobs, sums


def terms(seed, count):
    """Values from 0 to 1 of many magnitudes, both ends among them."""
    rng = np.random.default_rng(seed)
    made = np.exp(-rng.exponential(6.0, count)).astype(np.float32)
    made[:3] = 0.0, 1.0, np.float32(2.0**-39)
    return rng.permutation(made)


def truncated(value):
    """The value after 39 bits, as a fraction."""
    return Fraction(math.floor(Fraction(float(value)) * 2**39), 2**39)


@pytest.mark.parametrize("count", (5, 1000, 70_001))
def test_the_sum_is_that_of_the_terms(count):
    x = terms(count, count)
    chosen = np.random.default_rng(0).random(count) < 0.7
    exact = float(sum(map(truncated, x[chosen])))
    got = sums.FixedPoint.of(jnp.asarray(x)[None]).sum(jnp.asarray(chosen)[None])
    assert got.shape == (1, 1)
    assert float(got[0, 0]) == pytest.approx(exact, rel=3 * 2**-24)
    assert float(sums.FixedPoint.of(jnp.ones((1, count))).sum()[0, 0]) == count
    small = jnp.full((1, count), 1.5 * 2**-30)
    assert float(sums.FixedPoint.of(small).sum()[0, 0]) == np.float32(count * 1.5 * 2**-30)


def test_the_order_changes_no_bit():
    x = terms(1, 50_000)
    orders = np.stack([np.random.default_rng(seed).permutation(x) for seed in range(6)])
    floats = {np.add.reduce(order) for order in orders} | {
        float(jnp.cumsum(jnp.asarray(order))[-1]) for order in orders
    }
    assert len(floats) > 1, "the order matters to a float sum"
    assert len(np.unique(sums.FixedPoint.of(jnp.asarray(orders)).sum())) == 1


def test_log_probabilities_do_not_depend_on_the_batch():
    logits = 4 * jax.random.normal(jax.random.key(0), (6, 7, 5000))
    tokens = jax.random.randint(jax.random.key(1), (6, 7), 0, 5000)
    together = np.array(logprobs.of_tokens(logits, tokens))
    alone = [
        [logprobs.of_tokens(logits[b, m][None, None], tokens[b, m][None, None])[0, 0] for m in range(7)]
        for b in range(6)
    ]
    assert np.array_equal(together, np.array(alone))
    wanted = np.take_along_axis(np.array(jax.nn.log_softmax(logits)), np.array(tokens)[:, :, None], 2)[:, :, 0]
    np.testing.assert_allclose(together, wanted, rtol=1e-6, atol=1e-6)
    best = logprobs.most_probable(logits, 3)
    assert np.array_equal(best.logprobs[:, :, 0], logprobs.of_tokens(logits, best.ids[:, :, 0]))


def test_nan_and_infinite_logits_are_not_hidden():
    logits = jnp.array([[0.0, jnp.nan, 1.0], [-jnp.inf, 0.0, -jnp.inf], [-jnp.inf] * 3])
    got = np.array(sums.logsumexp(logits))[:, 0]
    assert np.isnan(got[0]) and got[1] == 0 and got[2] == -np.inf


def test_too_many_terms_are_refused():
    with pytest.raises(ValueError, match="at most 524,288 columns"):
        sums.FixedPoint.of(jnp.zeros((1, sums.MOST_TERMS + 1)))
