"""Gradients of exact operations, whose kernels may leave a result in parts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import parts
from pallas_kernels.exact_attention import exact_attention
from pallas_kernels.exact_matmul import exact_matmul


@pytest.mark.parametrize("rows", (8, 300))
def test_parts_of_a_product_have_the_gradients_of_the_product(rows):
    """Few rows are divided into parts."""
    draw = np.random.default_rng(0)
    x, weight = (jnp.asarray(draw.normal(size=size), jnp.float32) for size in ((rows, 2048), (2048, 64)))

    def loss(backend, x, weight):
        out = exact_matmul(x / 45, weight, parts=True, backend=backend)
        return jnp.sin(parts.whole(out, 2, x.dtype)).sum()

    assert exact_matmul(x, weight, parts=True, backend="triton").ndim == (3 if rows == 8 else 2)
    kernel, plain = (jax.grad(partial(loss, backend), (0, 1))(x, weight) for backend in ("triton", "xla"))
    for ours, theirs in zip(kernel, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_gradients_take_the_memory_of_rounded_operations():
    """Those of the loops over blocks that define the bits would keep each block's scores."""

    def loss(q, k, v, weight):
        out = exact_attention(q, k, v, None, None, None, None, layer=0, scale=0.1, backend="triton")
        return exact_matmul(out.reshape(64, -1), weight, backend="triton").sum()

    arrays = (jnp.ones((1, 64, 2, 16)), *[jnp.ones((1, 64, 1, 16))] * 2, jnp.ones((32, 8)))
    _, pull = jax.vjp(loss, *arrays)
    text = str(jax.make_jaxpr(pull)(1.0))
    assert "dot_general" in text and "while" not in text and "scan" not in text
