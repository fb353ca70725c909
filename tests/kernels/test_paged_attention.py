"""Every backend of paged attention against one softmax a query, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Case, normal, page_table, pool, rng_of, tree_mask
from crosslower import PLATFORMS, cross_lower

from pallas_kernels.paged_attention import BACKENDS, paged_attention

AS_SHIPPED = True

# Values are of unit variance. In bfloat16 the weights of the softmax and the result are rounded to 8 bits.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
backends = pytest.mark.parametrize("backend", sorted(BACKENDS))
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def inputs(case: Case):
    """Arguments of `paged_attention`, in order, up to the mask."""
    rng = rng_of(case)
    rows = case.earlier + case.nodes
    q = normal(rng, (case.batch, case.nodes, case.heads, case.head_dim), case.dtype)
    k, v = (normal(rng, (case.batch, rows, case.kv_heads, case.head_dim), case.dtype) for _ in range(2))
    mask = tree_mask(rng, case) if case.tree else None
    if case.prefix is None:
        return q, k, v, None, None, None, mask
    table, total = page_table(rng, case)
    return q, k, v, pool(rng, case, table, total, case.prefix), table, np.array(case.prefix, np.int32), mask


def oracle(q, k, v, pool, table, prefix, mask, *, layer, scale):
    batch, nodes, heads, _ = q.shape
    rows, group = k.shape[1], heads // k.shape[2]
    out = np.zeros(q.shape, np.float64)
    for b, n, h in np.ndindex(batch, nodes, heads):
        seen = np.arange(rows) <= rows - nodes + n if mask is None else mask[b, n]
        keys, values = [k[b, seen, h // group]], [v[b, seen, h // group]]
        for t in range(0 if prefix is None else prefix[b]):
            page, row = table[b, t // pool.shape[3]], t % pool.shape[3]
            keys.append(pool[layer, 0, page, row, h // group][None])
            values.append(pool[layer, 1, page, row, h // group][None])
        scores = np.concatenate(keys).astype(np.float64) @ q[b, n, h].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        out[b, n, h] = weights / weights.sum() @ np.concatenate(values).astype(np.float64)
    return out


def attend(*args, layer=0, scale=1.0, backend=None):
    """The operation, jitted: a backend is only ever run inside a program."""
    return jax.jit(partial(paged_attention, layer=layer, scale=scale, backend=backend))(*args)


@backends
@cases
def test_equals_a_softmax_in_float64(case, backend):
    """Pages that are free and rows beyond the prefix are NaN: one that is read shows."""
    args, layer, scale = inputs(case), case.layers - 1, 0.3
    out = attend(*args, layer=layer, scale=scale, backend=backend)
    assert out.dtype == jnp.dtype(case.dtype)
    assert out.shape == args[0].shape
    tolerance = TOLERANCE[case.dtype]
    expected = oracle(*args, layer=layer, scale=scale)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance)


@backends
def test_one_mask_serves_the_whole_batch(backend):
    case = Case("broadcast", tree=True)
    *args, mask = inputs(case)
    each = attend(*args, np.repeat(mask[:1], case.batch, axis=0), backend=backend)
    np.testing.assert_array_equal(attend(*args, mask[:1], backend=backend), each)


@backends
def test_without_a_prefix_the_pool_is_not_read(backend):
    case = Case("pool_of_nan", prefix=(0, 0, 0))
    q, k, v, pool, table, _, _ = inputs(case)
    without = attend(q, k, v, None, None, None, backend=backend)
    np.testing.assert_array_equal(attend(q, k, v, pool, table, None, backend=backend), without)


@backends
def test_large_scores_do_not_overflow(backend):
    case = Case("large")
    q, k, v, pool, table, prefix, mask = inputs(case)
    args = (q * 1e4, k, v, pool, table, prefix, mask)
    out = attend(*args, backend=backend)
    np.testing.assert_allclose(out, oracle(*args, layer=0, scale=1.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", ("bfloat16_chain", "bfloat16_tree", "no_prefix_tree", "earlier_rows_chain"))
def test_lowers_for(name, platform):
    case = next(case for case in CASES if case.name == name)
    assert cross_lower(partial(paged_attention, layer=0, scale=1.0), platform, *inputs(case))


def test_an_unknown_backend_is_an_error():
    with pytest.raises(ValueError, match=r"backend='cray': paged_attention has \[.*'xla'"):
        attend(*inputs(CASES[0]), backend="cray")


def test_query_heads_that_are_no_multiple_are_an_error():
    q, *rest = inputs(Case("three_on_two", heads=3))
    with pytest.raises(ValueError, match="3 heads: not a multiple of the 2 key heads"):
        attend(q, *rest)


@pytest.mark.parametrize("missing", ("pool", "page_table"))
def test_a_prefix_without_pages_is_an_error(missing):
    q, k, v, pool, table, prefix, mask = inputs(CASES[0])
    pool, table = (None, table) if missing == "pool" else (pool, None)
    with pytest.raises(ValueError, match="pool and page_table are needed"):
        attend(q, k, v, pool, table, prefix, mask)
