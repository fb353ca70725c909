"""Every backend of KV compaction against a loop over rows, bit for bit."""

from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from cases import CASES, Case, normal, page_table, rng_of
from crosslower import PLATFORMS, cross_lower

from pallas_kernels.kv_compact import BACKENDS, kv_compact

AS_SHIPPED = True

backends = pytest.mark.parametrize("backend", sorted(BACKENDS))
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture
def without_jaxtyping():
    """As for a user: the shapes in annotations are checked in tests only (conftest.py)."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def inputs(case: Case, *, with_path: bool, lengths=None):
    """Arguments of `kv_compact`, in order. Rows start behind the case's prefix, and some do not fit."""
    rng = rng_of(case)
    table, total = page_table(rng, case)
    shape = (case.layers, 2, total, case.page_size, case.kv_heads, case.head_dim)
    rows = normal(rng, (case.layers, 2, case.batch, case.nodes, case.kv_heads, case.head_dim), case.dtype)
    accepted = max(case.nodes - 1, 1) if with_path else case.nodes
    path = np.sort(rng.integers(0, case.nodes, (case.batch, accepted)), axis=1).astype(np.int32) if with_path else None
    if lengths is None:
        # The first sequence accepts all and the last nothing; those between, any number.
        lengths = rng.integers(0, accepted + 1, case.batch)
        lengths[-1], lengths[0] = 0, accepted
    start = np.array(case.prefix or (0,) * case.batch, np.int32)
    return normal(rng, shape, case.dtype), rows, table, start, path, np.array(lengths, np.int32)


def oracle(pool, rows, table, start, path, length):
    pool = pool.copy()
    page_size, capacity = pool.shape[3], table.shape[1] * pool.shape[3]
    for b in range(len(start)):
        for i in range(length[b]):
            position, node = start[b] + i, i if path is None else path[b, i]
            if position < capacity:
                page = table[b, position // page_size]
                pool[:, :, page, position % page_size] = rows[:, :, b, node].astype(pool.dtype)
    return pool


def compact(backend, *args):
    return np.asarray(jax.jit(partial(kv_compact, backend=backend))(*args))


@backends
@pytest.mark.parametrize("with_path", (False, True), ids=("chain", "path"))
@cases
def test_equals_a_loop_over_rows(case, with_path, backend):
    """All else in the pool keeps its bits: other sequences' pages, free pages, and what lies beside the new rows."""
    args = inputs(case, with_path=with_path)
    np.testing.assert_array_equal(compact(backend, *args), oracle(*args))


@backends
def test_the_identity_path_is_a_chain(backend):
    pool, rows, table, start, _, length = inputs(Case("identity", nodes=5), with_path=False)
    path = np.broadcast_to(np.arange(5, dtype=np.int32), (len(start), 5))
    np.testing.assert_array_equal(
        compact(backend, pool, rows, table, start, path, length),
        compact(backend, pool, rows, table, start, None, length),
    )


@backends
@pytest.mark.parametrize("with_path", (False, True), ids=("chain", "path"))
def test_length_0_writes_nothing(with_path, backend):
    args = inputs(Case("nothing"), with_path=with_path, lengths=(0, 0, 0))
    np.testing.assert_array_equal(compact(backend, *args), args[0])


@backends
@pytest.mark.parametrize("start", (7, 11, 12, 13, 100))
def test_rows_beyond_the_last_page_are_dropped(start, backend):
    """12 rows fit. What does not is written nowhere, in particular not on the last page nor in another sequence's."""
    pool, rows, table, _, path, length = inputs(Case("beyond", nodes=6), with_path=True, lengths=(5, 5, 5))
    args = (pool, rows, table, np.array([start, 0, start], np.int32), path, length)
    np.testing.assert_array_equal(compact(backend, *args), oracle(*args))


@backends
def test_rows_that_are_not_taken_do_not_matter(backend):
    pool, rows, table, start, _, _ = inputs(Case("rejected", prefix=(2, 5)), with_path=False)
    length, poisoned = np.array([1, 3], np.int32), rows.copy()
    for b, taken in enumerate(length):
        poisoned[:, :, b, taken:] = np.nan
    out = compact(backend, pool, poisoned, table, start, None, length)
    np.testing.assert_array_equal(out, oracle(pool, rows, table, start, None, length))


@backends
def test_rows_take_the_precision_of_the_pool(backend):
    pool, *rest = inputs(Case("narrow"), with_path=True)
    pool = pool.astype(jnp.bfloat16)
    out = compact(backend, pool, *rest)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, oracle(pool, *rest))


@backends
@pytest.mark.parametrize("with_path", (False, True), ids=("chain", "path"))
def test_a_donated_pool_is_updated_in_place(with_path, backend):
    args = inputs(Case("donated"), with_path=with_path)
    pool = jnp.array(args[0])
    address = pool.unsafe_buffer_pointer()
    out = jax.jit(partial(kv_compact, backend=backend), donate_argnums=0)(pool, *args[1:])
    assert pool.is_deleted()
    assert out.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(out, oracle(*args))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("with_path", (False, True), ids=("chain", "path"))
def test_lowers_for(with_path, platform):
    case = next(case for case in CASES if case.name == "bfloat16_tree")
    assert cross_lower(kv_compact, platform, *inputs(case, with_path=with_path))


def test_an_unknown_backend_is_an_error():
    with pytest.raises(ValueError, match=r"backend='cray': kv_compact has \[.*'xla'"):
        compact("cray", *inputs(CASES[0], with_path=True))


@pytest.mark.parametrize("axis", (0, 4, 5), ids=("layers", "heads", "head_dim"))
def test_rows_of_another_model_are_an_error(axis, without_jaxtyping):
    pool, rows, *rest = inputs(CASES[0], with_path=False)
    with pytest.raises(ValueError, match="do not fit"):
        compact("xla", pool, np.concatenate([rows, rows], axis=axis), *rest)
