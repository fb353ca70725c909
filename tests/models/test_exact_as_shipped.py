"""An exact forward as it is compiled for a user, with all of XLA's optimizations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import tree
from jspec.models import Gemma4
from jspec.models.gemma4 import Attention
from jspec.models.rope import ProportionalRope, Rope

AS_SHIPPED = True
SLIDING = Attention(kv_heads=1, head_dim=24, window=9, rope=Rope())
FULL = Attention(kv_heads=3, head_dim=40, window=None, rope=Rope(1e6, ProportionalRope(0.25)))
TARGET = Gemma4(101, 72, 52, 3, attention=(SLIDING, FULL, FULL), max_length=64, shared_layers=1, per_layer_size=12)
"""With sizes that no vector of a CPU divides."""


@pytest.mark.slow
def test_a_token_alone_has_the_bits_of_a_token_among_others():
    """XLA takes loops of one turn apart, see `pallas_kernels.each`."""
    target, rng = TARGET.exactly(), np.random.default_rng(5)
    shapes = target.param_shapes(jnp.float32)
    scale = jax.tree.map(lambda x: x.shape[0] ** -0.5 if x.ndim > 1 else 1.0, shapes)
    params = jax.tree.map(lambda x, s: jnp.asarray(rng.normal(size=x.shape) * s, x.dtype), shapes, scale)
    tokens, layers = rng.integers(0, target.vocab_size, 16).astype(np.int32), tuple(range(target.num_layers + 1))

    @jax.jit
    def read(params, cache, ids, start):
        out = target.forward(params, tree.chain(ids), cache, start, capture_layers=layers)
        count = jnp.full(1, ids.shape[1], jnp.int32)
        return out.hidden, out.logits, cache.commit(out.rows, start, None, count)

    def bits(chunk):
        cache, hidden, logits = target.init_cache(params, 1, 32, 4), [], []
        for begin in range(0, len(tokens), chunk):
            ids = jnp.asarray(tokens[None, begin : begin + chunk])
            some, other, cache = read(params, cache, ids, jnp.full(1, begin, jnp.int32))
            hidden.append(some)
            logits.append(other)
        return [np.asarray(jnp.concatenate(part, axis=1)).view(np.uint32) for part in (hidden, logits)]

    for alone, among in zip(bits(1), bits(16), strict=True):
        np.testing.assert_array_equal(alone, among)
