"""A matrix with low-rank changes, of which each sequence has one or none."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models import layers
from jspec.models.adapted import Adapted
from jspec.models.ops import ExactOps
from pallas_kernels import platform

IN, OUT, RANK, CHANGES = 12, 10, 3, 2


@pytest.mark.parametrize("here", ("cpu", "gpu"))
def test_each_sequence_has_its_own_change(here, monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: here)
    random, index = np.random.default_rng(0), [1, -1, 0, 1]
    shapes = (len(index), 5, IN), (IN, OUT), (IN, CHANGES * RANK), (CHANGES * RANK, OUT)
    x, weight, down, up = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    matrix = Adapted(jnp.asarray(weight), jnp.asarray(down), jnp.asarray(up), CHANGES)
    np.testing.assert_allclose(layers.linear(jnp.asarray(x), matrix), x @ weight, rtol=1e-5, atol=1e-5)
    matrix = Adapted(matrix.weight, matrix.down, matrix.up, CHANGES, jnp.array(index, jnp.int32))
    out = layers.linear(jnp.asarray(x), matrix)
    for row, number in enumerate(index):
        columns = slice(number * RANK, (number + 1) * RANK) if number >= 0 else slice(0)
        expected = x[row] @ (weight + down[:, columns] @ up[columns])
        np.testing.assert_allclose(out[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ("linear", "mlp"))
def test_exact_products_have_the_same_bits_for_any_rows(part):
    """Each token alone, in a batch and in a longer round."""
    random, ops = np.random.default_rng(1), ExactOps()

    def matrix(inner, columns):
        shapes = (inner, columns), (inner, CHANGES * 24), (CHANGES * 24, columns)
        weight, down, up = (jnp.asarray(random.normal(size=shape).astype(np.float32)) for shape in shapes)
        return lambda index: Adapted(weight, down, up, CHANGES, jnp.array(index, jnp.int32))

    first, second = matrix(384, 256), matrix(128, 96)
    x, index = jnp.asarray(random.normal(size=(7, 5, 384)).astype(np.float32)), [1, -1, 0, 1, 0, 0, -1]

    def run(x, index):
        out = ops.linear(x, first(index)) if part == "linear" else ops.mlp(x, first(index), second(index))
        return np.asarray(ops.whole(out, x))

    together = run(x, index)
    for row, number in enumerate(index):
        np.testing.assert_array_equal(run(x[row : row + 1], [number])[0], together[row])
        np.testing.assert_array_equal(run(x[row : row + 1, 2:3], [number])[0, 0], together[row, 2])
