"""Every backend of KV compaction against a loop over rows, bit for bit."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import each_backend, requires
from cases import CASES, Case
from cases import compaction_inputs as inputs
from crosslower import cross_lower

from pallas_kernels import platform
from pallas_kernels.kv_compact import OPERATION, kv_compact, mosaic_tpu, triton

backends = each_backend(OPERATION)
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


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


def pairs(rows):
    return tuple(tuple(parts) for parts in rows)


@cache
def program(backend, **options):
    return jax.jit(partial(kv_compact, backend=backend), **options)


def compact(backend, pool, rows, *rest):
    return np.asarray(program(backend)(pool, pairs(rows), *rest))


@pytest.mark.slow(
    unless=(
        "nodes_17_tree",
        "earlier_rows_tree",
        "no_prefix_tree",
        "page_of_3-xla",
        "one_node-xla",
        "bfloat16_chain",
        "bfloat16_tree-xla",
    )
)
@backends
@cases
def test_equals_a_loop_over_rows(case, backend):
    """The rest of the pool keeps its bits: pages of other sequences, free pages, and rows beside the new ones."""
    args = inputs(case, with_path=case.tree)
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
@pytest.mark.parametrize("start", (7, 11, 12, 100))
def test_rows_beyond_the_last_page_are_dropped(start, backend):
    """12 rows fit. The others are written nowhere, neither to the last page nor to pages of another sequence."""
    pool, rows, table, _, path, length = inputs(Case("beyond", nodes=6), with_path=True, lengths=(5, 5, 5))
    args = (pool, rows, table, np.array([start, 0, start], np.int32), path, length)
    np.testing.assert_array_equal(compact(backend, *args), oracle(*args))


@backends
def test_rejected_rows_do_not_matter(backend):
    pool, rows, table, start, _, _ = inputs(Case("rejected", prefix=(2, 5)), with_path=False)
    length, poisoned = np.array([1, 3], np.int32), rows.copy()
    for b, taken in enumerate(length):
        poisoned[:, :, b, taken:] = np.nan
    out = compact(backend, pool, poisoned, table, start, None, length)
    np.testing.assert_array_equal(out, oracle(pool, rows, table, start, None, length))


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float8_e4m3fn))
@backends
def test_rows_take_the_precision_of_the_pool(backend, dtype):
    pool, *rest = inputs(Case("narrow"), with_path=True)
    pool = pool.astype(dtype)
    out = compact(backend, pool, *rest)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, oracle(pool, *rest))


@backends
@pytest.mark.parametrize("with_path", (False, True), ids=("chain", "path"))
def test_a_donated_pool_is_updated_in_place(with_path, backend):
    args = inputs(Case("donated"), with_path=with_path)
    pool = jnp.array(args[0])
    address = pool.unsafe_buffer_pointer()
    out = program(backend, donate_argnums=0)(pool, pairs(args[1]), *args[2:])
    assert pool.is_deleted()
    assert out.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(out, oracle(*args))


@pytest.mark.slow(unless=("3-1", "2-4"))
@pytest.mark.parametrize("parts", (1, 4, 8))
@pytest.mark.parametrize("kv_heads", (2, 3))
@requires("triton")
def test_the_result_does_not_depend_on_the_tuning(kv_heads, parts, monkeypatch):
    """Three layers have six parts, which is a multiple of neither 4 nor 8; three heads of 16 have 48 elements."""
    monkeypatch.setattr(triton, "default_config", lambda **_: triton.Config(parts, num_warps=2))
    args = inputs(Case("tuning", layers=3, heads=kv_heads, kv_heads=kv_heads, tree=True), with_path=True)
    pool, rows, *rest = args
    out = jax.jit(partial(kv_compact, backend="triton"))(pool, pairs(rows), *rest)
    np.testing.assert_array_equal(out, oracle(*args))


@requires("mosaic_tpu")
@pytest.mark.parametrize("in_flight", (1, 3))
def test_the_result_does_not_depend_on_copies_in_flight(in_flight, monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "default_config", lambda: mosaic_tpu.Config(in_flight))
    pool, rows, *rest = args = inputs(Case("copies", nodes=6, prefix=(2, 5, 8)), with_path=True)
    out = jax.jit(partial(kv_compact, backend="mosaic_tpu"))(pool, pairs(rows), *rest)
    np.testing.assert_array_equal(out, oracle(*args))


LOWERING = {"gpu": "cuda", "tpu": "tpu"}
KERNEL = {"triton": "__gpu$xla.gpu.triton", "mosaic_tpu": "tpu_custom_call"}
LLAMA_8B = Case("llama_8b", layers=32, kv_heads=8, head_dim=128, page_size=16, nodes=32, dtype="bfloat16")
LOWERED = (
    LLAMA_8B,
    dataclasses.replace(LLAMA_8B, name="llama_8b_pages_of_64", page_size=64, prefix=(64,)),
    Case("small"),
    Case("odd", kv_heads=3, head_dim=24, layers=3, page_size=3, nodes=7),
)


def test_a_pool_of_8_bits_is_written_by_a_kernel_on_a_gpu_and_by_xla_on_a_tpu(monkeypatch):
    new = jax.ShapeDtypeStruct
    row, count, table = new((2, 6, 8, 128), "bfloat16"), new((2,), "int32"), new((2, 4), "int32")
    args = new((4, 2, 8, 16, 8, 128), "float8_e4m3fn"), ((row, row),) * 4, table, count, None, count
    for where, call in (("gpu", KERNEL["triton"]), ("tpu", None)):
        monkeypatch.setattr(platform, "platform", lambda where=where: where)
        text = cross_lower(kv_compact, LOWERING[where], *args)
        assert call in text if call else "custom_call" not in text
    with pytest.raises(ValueError, match="pool is float8_e4m3fn: must have elements of 16 or 32 bits"):
        jax.eval_shape(partial(kv_compact, backend="mosaic_tpu"), *args)


@pytest.mark.parametrize(("where", "backend"), [("gpu", "triton"), ("tpu", "mosaic_tpu")])
@pytest.mark.parametrize("with_path", (False, True), ids=("chain", "path"))
@pytest.mark.parametrize("case", LOWERED, ids=lambda case: case.name)
def test_lowers_for(case, with_path, where, backend, monkeypatch):
    """The program has one kernel, for the platform's own compiler, and its result is the pool."""
    monkeypatch.setattr(platform, "platform", lambda: where)
    head = case.kv_heads, case.head_dim
    row = jax.ShapeDtypeStruct((case.batch, case.nodes, *head), case.dtype)
    pool = jax.ShapeDtypeStruct((case.layers, 2, 512, case.page_size, *head), case.dtype)
    table, start = (jax.ShapeDtypeStruct((case.batch, *shape), "int32") for shape in ((32,), ()))
    path = jax.ShapeDtypeStruct((case.batch, 6), "int32") if with_path else None
    text = cross_lower(kv_compact, LOWERING[where], pool, ((row, row),) * case.layers, table, start, path, start)
    (call,) = [line for line in text.splitlines() if KERNEL[backend] in line]
    assert "output_operand_alias" in call
    # On a GPU the kernel reads each layer's rows where they are.
    assert (where == "gpu") == ("concatenate" not in text)


@backends
@pytest.mark.parametrize("with_path", (False, True), ids=("chain", "path"))
def test_a_pool_of_one_part_without_heads(with_path, backend):
    """The pool of latent attention."""
    pool, rows, *rest = inputs(Case("latent", heads=1, kv_heads=1, head_dim=24), with_path=with_path)
    pool, rows = pool[:, :1, :, :, 0], rows[:, :1, :, :, 0]
    out = np.asarray(program(backend)(pool, pairs(rows), *rest))
    np.testing.assert_array_equal(out, oracle(pool, rows, *rest))


@pytest.mark.slow(unless=("13-all_layers", "0-a_layer"))
@requires("mosaic_tpu")
@pytest.mark.parametrize("tile_bytes", (1, 2**22), ids=("a_layer", "all_layers"))
@pytest.mark.parametrize("start", (0, 7, 8, 13))
def test_rows_without_heads_are_written_in_tiles(start, tile_bytes, monkeypatch):
    """Tiles of 8 rows, of which the first and the last one keep the rows beside the new ones."""
    monkeypatch.setattr(mosaic_tpu, "TILE_BYTES", tile_bytes)
    case = Case("tiles", nodes=12, page_size=16, prefix=(start, 30), layers=3)
    pool, rows, *rest = inputs(case, with_path=False, lengths=(12, 5))
    pool, rows = pool[:, :1, :, :, 0], rows[:, :1, :, :, 0]
    out = jax.jit(partial(kv_compact, backend="mosaic_tpu"))(pool, pairs(rows), *rest)
    np.testing.assert_array_equal(out, oracle(pool, rows, *rest))


def test_pages_that_are_no_whole_tiles_run_on_xla(monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: "tpu")
    new = jax.ShapeDtypeStruct
    row, count = new((2, 6, 640), "bfloat16"), new((2,), "int32")
    args = new((3, 1, 8, 12, 640), "bfloat16"), ((row,),) * 3, new((2, 4), "int32"), count, None, count
    with pytest.raises(ValueError, match="pool has pages of 12 rows: must be a multiple of 8 for rows without heads"):
        jax.eval_shape(partial(kv_compact, backend="mosaic_tpu"), *args)
    assert jax.eval_shape(kv_compact, *args).shape == args[0].shape


@backends
@pytest.mark.parametrize("empty", ("layers", "pages"))
def test_a_pool_without_layers_or_pages_stays_as_it_is(empty, backend):
    pool, rows, table, *rest = inputs(CASES[0], with_path=False)
    if empty == "layers":
        pool, rows = pool[:0], rows[:0]
    else:
        pool, table = pool[:, :, :0], table[:, :0]
    assert compact(backend, pool, rows, table, *rest).shape == pool.shape


@pytest.mark.parametrize("axis", (0, 1, 4, 5), ids=("layers", "parts", "heads", "head_dim"))
def test_rows_of_another_model_are_an_error(axis, without_jaxtyping):
    pool, rows, *rest = inputs(CASES[0], with_path=False)
    with pytest.raises(ValueError, match="must have the layers, parts, heads and dimensions of pool"):
        compact("xla", pool, np.concatenate([rows, rows], axis=axis), *rest)
