"""Transitions as the device stores them: a table of which most is forbidden gives what the dense one gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.automaton import Automaton, following, leads_on, sparse

VOCABULARY, MAPS = 40, 3


@pytest.mark.slow(unless=("31-0.9", "32-0.03", "33-0.2", "33-1.0", "70-0.03", "70-0.9"))
@pytest.mark.parametrize("share", (0.03, 0.2, 0.9, 1.0))
@pytest.mark.parametrize("classes", (1, 31, 32, 33, 70))
def test_a_sparse_table_is_the_dense_one(classes, share):
    """Also with room for more, as it has where sizes are rounded up."""
    rng = np.random.default_rng(classes)
    table = np.where(rng.random((23, classes)) < share, rng.integers(0, 23, (23, classes)), -1).astype(np.int16)
    maps = rng.integers(0, classes, (MAPS, VOCABULARY)).astype(np.int16)
    map_of_state = np.arange(23) % MAPS
    sequences, nodes = jnp.array([0, 22, 5, 11], jnp.int16), jnp.arange(23, dtype=jnp.int16)
    tokens = jnp.arange(VOCABULARY)
    of_all = jnp.broadcast_to(nodes[:, None], (23, VOCABULARY)), jnp.broadcast_to(tokens, (23, VOCABULARY))
    of_nodes = jnp.stack([sequences, sequences // 2], axis=1)
    for stored in (sparse(table), sparse(table).padded(30, 150, 23, 23 * 150)):
        for of_states, of_tokens in ((jnp.asarray(map_of_state), maps), (None, maps[0])):
            rest = jnp.asarray(of_tokens), sequences, of_states
            dense, found = (Automaton(jax.device_put(each), *rest) for each in (table, stored))
            after = following(found, *of_all)
            assert after.dtype == jnp.int16
            np.testing.assert_array_equal(after, following(dense, *of_all))
            of_every = np.array(leads_on(dense, of_nodes))
            np.testing.assert_array_equal(leads_on(found, of_nodes), of_every)
            expected = (table >= 0)[
                np.array(of_nodes)[:, :, None], sequence_maps(of_states, of_tokens, sequences)[:, None]
            ]
            np.testing.assert_array_equal(of_every, expected)
            # Some tokens only: of all nodes, or of each.
            few = rng.permutation(VOCABULARY)[:9].astype(np.int32)
            each = rng.integers(0, VOCABULARY, (*of_nodes.shape, 7)).astype(np.int32)
            for automaton in (dense, found):
                np.testing.assert_array_equal(leads_on(automaton, of_nodes, jnp.asarray(few)), of_every[:, :, few])
                own = leads_on(automaton, of_nodes, jnp.asarray(each))
                np.testing.assert_array_equal(own, np.take_along_axis(of_every, each, axis=2))


def sequence_maps(map_of_state, maps, sequences):
    """The class of each token in each sequence."""
    return np.stack([maps if map_of_state is None else maps[int(map_of_state[state])] for state in sequences])


def test_states_that_lead_on_for_the_same_classes_share_a_pattern():
    table = np.array([[-1, 2, 0], [1, -1, -1], [-1, 0, 1], [-1, -1, -1]], np.int16)
    small = sparse(table)
    assert small.leads[small.pattern].tolist() == [[6], [1], [6], [0]] and len(small.leads) == 3
    assert (small.first.tolist(), small.following.tolist()) == ([0, 2, 3, 5], [2, 0, 1, 0, 1])
    assert small.nbytes == 4 * 2 + 3 * 4 + 3 * 2 + 4 * 4 + 5 * 2
    large = small.padded(5, 65, 4, 7)
    assert (large.pattern.shape, large.leads.shape, large.before.shape) == ((5,), (4, 3), (4, 3))
    assert (large.first.shape, large.following.shape) == ((5,), (7,))
