"""The simulated acceptance of `benchmarks/budgets.py`."""

import budgets
import jax
import jax.numpy as jnp
import pytest

from jspec.core import tree


@pytest.mark.parametrize(("token", "accepted"), [(0, False), (1, True)])
def test_drafts_that_did_not_grow_are_not_accepted(token, accepted):
    """Their token is 0; that of a first choice is 1."""
    chain = tree.chain(jnp.full((4, 6), token, jnp.int32))
    position = jnp.arange(4, dtype=jnp.int32)
    with jax.numpy_rank_promotion("allow"):  # as in the benchmark
        decision = budgets.RankRule(8)(budgets.keys("high", 4), chain, jnp.zeros((4, 6, 32)), position)
    assert bool((decision.length > 1).any()) == accepted
