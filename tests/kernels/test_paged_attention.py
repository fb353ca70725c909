"""Every backend of paged attention against one softmax per query, in float64."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import FAST_COMPILE, HERE, each_backend, interpreted, params
from cases import ATTENTION_CASES, CASES, SHARED_MEMORY, SINK_CASES, SPLIT, Case, assert_close
from cases import attention_inputs as inputs
from cases import attention_sinks as sinks_of
from cases import attention_starts as starts
from crosslower import cross_lower

from pallas_kernels import platform
from pallas_kernels.paged_attention import OPERATION, mosaic_tpu, paged_attention, triton

backends = each_backend(OPERATION)


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def oracle(
    q,
    k,
    v,
    pool,
    table,
    prefix,
    mask,
    *,
    layer=0,
    scale=1.0,
    soft_cap=None,
    prefix_start=None,
    keep_first=0,
    sinks=None,
):
    batch, nodes, heads, _ = q.shape
    rows, group = k.shape[1], heads // k.shape[2]
    out = np.zeros(q.shape, np.float64)
    for b, n, h in np.ndindex(batch, nodes, heads):
        seen = np.arange(rows) <= rows - nodes + n if mask is None else mask[b, n]
        keys, values = [k[b, seen, h // group]], [v[b, seen, h // group]]
        for t in range(0 if prefix is None else prefix[b]):
            if prefix_start is not None and keep_first <= t < prefix_start[b, n]:
                continue
            page, row = table[b, t // pool.shape[3]], t % pool.shape[3]
            keys.append(pool[layer, 0, page, row, h // group][None])
            values.append(pool[layer, 1, page, row, h // group][None])
        keys, values = ([part.astype(np.float64) for part in parts] for parts in (keys, values))
        scores = np.concatenate(keys) @ q[b, n, h].astype(np.float64) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        if sinks is not None:
            scores, values = np.append(scores, sinks[h]), [*values, np.zeros_like(values[0][:1])]
        weights = np.exp(scores - scores.max())
        out[b, n, h] = weights / weights.sum() @ np.concatenate(values)
    return out


def attend(*args, layer=0, scale=1.0, prefix_start=None, sinks=None, **options):
    """The operation, jitted: backends always run inside a program."""
    backend = options.setdefault("backend", None)
    options |= {"layer": layer, "scale": scale}
    run = jax.jit(
        lambda prefix_start, sinks, *args: paged_attention(*args, prefix_start=prefix_start, sinks=sinks, **options),
        compiler_options=FAST_COMPILE if interpreted(backend) else None,
    )
    return run(prefix_start, sinks, *args)


def attend_with(kernel, config, *args, interpret=None, **options):
    """A kernel with a configuration that it would not choose itself."""
    run = partial(kernel.paged_attention, config=config, interpret=interpret, layer=0, scale=1.0)
    prefix_start, sinks = options.pop("prefix_start", None), options.pop("sinks", None)
    jitted = jax.jit(
        lambda start, sinks, *args: run(*args, prefix_start=start, sinks=sinks, **options),
        compiler_options=FAST_COMPILE if HERE == "cpu" else None,
    )
    return jitted(prefix_start, sinks, *args)


POINTS = [
    pytest.param(case, *backend.values, marks=backend.marks, id=f"{case.name}-{backend.values[0]}")
    for case in (*ATTENTION_CASES, *SINK_CASES)
    for backend in params(*sorted(OPERATION.backends))
]


@pytest.mark.slow(
    unless=(
        "page_of_3",
        "bfloat16_earlier_rows-xla",
        "sinks_chain-xla",
        "first_chain-xla",
        "first_tree-triton",
        "bfloat16_windows_soft_cap-mosaic_tpu",
        "narrow_pool_chain-triton",
    )
)
@pytest.mark.parametrize(("case", "backend"), POINTS)
def test_equals_a_softmax_in_float64(case, backend):
    """Free pages, and rows after the prefix or before all windows, are NaN: reading one shows in the result."""
    args = inputs(case)
    options = {"layer": case.layers - 1, "scale": 0.3, "soft_cap": case.soft_cap, "prefix_start": starts(case)}
    options |= {"sinks": sinks_of(case), "keep_first": case.keep_first}
    out = attend(*args, **options, backend=backend)
    assert out.dtype == jnp.dtype(case.dtype)
    assert out.shape == args[0].shape
    assert_close(out, oracle(*args, **options), case.dtype)


@pytest.mark.slow(unless="xla")
@backends
def test_one_mask_for_the_whole_batch(backend):
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


@pytest.mark.slow(unless="xla")
@backends
def test_large_scores_do_not_overflow(backend):
    case = Case("large")
    q, k, v, pool, table, prefix, mask = inputs(case)
    args = (q * 1e4, k, v, pool, table, prefix, mask)
    out = attend(*args, backend=backend)
    np.testing.assert_allclose(out, oracle(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.slow(unless="2-splits_of_small_pages")
@pytest.mark.parametrize("kernel", params("triton"))
@pytest.mark.parametrize(
    ("splits", "case"),
    (
        (2, SPLIT),
        (8, SPLIT),
        (2, dataclasses.replace(SPLIT, name="splits_of_small_pages", page_size=3, pages=32)),
        (3, dataclasses.replace(SPLIT, name="splits_of_windows", windows=True, tree=False)),
        (3, dataclasses.replace(SPLIT, name="splits_of_first", windows=True, keep_first=18, tree=False)),
        (9, dataclasses.replace(SPLIT, name="splits_of_few_blocks", windows=True, keep_first=1, nodes=1)),
        (3, dataclasses.replace(SPLIT, name="splits_of_many_rows", nodes=20, prefix=(50,), tree=False, kv_heads=1)),
        (2, dataclasses.replace(SPLIT, name="splits_sinks", kv_heads=1, sinks=True)),
    ),
    ids=lambda x: getattr(x, "name", x),
)
def test_splits_of_the_prefix_are_merged(case, splits, kernel):
    """Including more splits than blocks of keys, and several tiles of rows."""
    args, config = inputs(case), triton.Config(block_m=16, block_k=16, splits=splits, num_warps=4, num_stages=2)
    options = {"prefix_start": starts(case), "sinks": sinks_of(case), "keep_first": case.keep_first}
    assert_close(attend_with(triton, config, *args, **options), oracle(*args, **options))


@pytest.mark.slow(unless="2-steps_windows")
@pytest.mark.parametrize("kernel", params("mosaic_tpu"))
@pytest.mark.parametrize(
    ("step_pages", "case"),
    (
        (1, dataclasses.replace(SPLIT, name="steps_tree", nodes=20)),
        (2, dataclasses.replace(SPLIT, name="steps_windows", windows=True, tree=False, nodes=20)),
        (1, dataclasses.replace(SPLIT, name="steps_first", windows=True, keep_first=18, nodes=20)),
        (2, dataclasses.replace(SPLIT, name="steps_first_of_2_pages", windows=True, keep_first=1, tree=False)),
        (1, dataclasses.replace(SPLIT, name="steps_no_prefix", prefix=None, tree=False, nodes=40)),
        (2, dataclasses.replace(SPLIT, name="steps_sinks", kv_heads=1, sinks=True, nodes=20)),
    ),
    ids=lambda x: getattr(x, "name", x),
)
def test_steps_and_tiles_of_the_tpu_kernel(case, step_pages, kernel):
    args, config = inputs(case), mosaic_tpu.Config(block_m=16, step_pages=step_pages, step_rows=16)
    options = {"prefix_start": starts(case), "sinks": sinks_of(case), "keep_first": case.keep_first}
    assert_close(attend_with(mosaic_tpu, config, *args, **options), oracle(*args, **options))


LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "page_size": 16, "pages": 512, "layers": 32}
REAL = (
    Case("decode", **LLAMA, prefix=(0,), nodes=1),
    Case("verify_chain", **LLAMA, prefix=(0,), nodes=6),
    Case("verify_tree", **LLAMA, prefix=(0,) * 8, nodes=32, tree=True),
    Case("pages_of_64", **{**LLAMA, "page_size": 64}, prefix=(0,), nodes=6, tree=True),
    Case("chunk_of_512", **{**LLAMA, "page_size": 64}, prefix=(0,), nodes=512),
    Case("chunk_of_2048", **LLAMA, prefix=(0,), nodes=2048),
    Case("first_chunk", **LLAMA, prefix=None, nodes=2048),
    Case("draft_step", **LLAMA, prefix=(0,), nodes=1, earlier=7, tree=True),
    Case("windows", **LLAMA, prefix=(0,), nodes=6, tree=True, windows=True, soft_cap=50.0),
    Case("first_tree", **LLAMA, prefix=(0,) * 8, nodes=8, earlier=24, tree=True, windows=True, keep_first=4),
    Case("head_dim_64", **{**LLAMA, "head_dim": 64}, prefix=(0,), nodes=6),
    Case("sinks", **{**LLAMA, "head_dim": 64, "heads": 64}, prefix=(0,), nodes=6, tree=True, windows=True, sinks=True),
    Case("head_dim_256", **{**LLAMA, "head_dim": 256}, prefix=(0,), nodes=6, tree=True, windows=True),
    Case("narrow_pool", **LLAMA, prefix=(0,) * 8, nodes=6, stored="float8_e4m3fn"),
    Case("float32", **{**LLAMA, "dtype": "float32"}, prefix=(0,), nodes=6, tree=True),
)


def shapes(case: Case):
    """The shapes of `inputs`."""
    new = jax.ShapeDtypeStruct
    rows = case.earlier + case.nodes
    q = new((case.batch, case.nodes, case.heads, case.head_dim), case.dtype)
    own = new((case.batch, rows, case.kv_heads, case.head_dim), case.dtype)
    mask = new((case.batch, case.nodes, rows), "bool") if case.tree else None
    if case.prefix is None:
        return q, own, own, None, None, None, mask
    total = case.batch * case.pages
    pool = new((case.layers, 2, total, case.page_size, case.kv_heads, case.head_dim), case.pool_dtype)
    return q, own, own, pool, new((case.batch, case.pages), "int32"), new((case.batch,), "int32"), mask


@pytest.mark.slow(unless=("decode-cuda", "verify_tree-tpu", "first_tree-cuda"))
@pytest.mark.parametrize("platform", ("cuda", "tpu"))
@named(REAL)
def test_lowers_for(case, platform):
    kernel, call = {"cuda": (triton, "gpu.triton"), "tpu": (mosaic_tpu, "tpu_custom_call")}[platform]
    windows = jax.ShapeDtypeStruct((case.batch, case.nodes), "int32") if case.windows else None
    options = {"layer": case.layers - 1, "scale": 0.1, "soft_cap": case.soft_cap, "interpret": False}
    options["keep_first"] = case.keep_first
    sinks = jax.ShapeDtypeStruct((case.heads,), case.dtype) if case.sinks else None

    def run(prefix_start, sinks, *args):
        return kernel.paged_attention(*args, prefix_start=prefix_start, sinks=sinks, **options)

    assert call in cross_lower(run, platform, windows, sinks, *shapes(case))


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("head_dim", (16, 64, 128, 256))
def test_blocks_fit_a_gpu(head_dim, dtype):
    for batch, rows, keys in np.ndindex(3, 4, 3):
        config = triton.default_config(
            batch=8**batch,
            kv_heads=8,
            rows=(1, 24, 256, 8192)[rows],
            keys=(12, 1024, 32768)[keys],
            page_size=16,
            head_dim=head_dim,
            dtype=dtype,
        )
        for size in (config.block_m, config.block_k):
            assert size >= 16
            assert size & (size - 1) == 0
        row_bytes = head_dim * jnp.dtype(dtype).itemsize
        assert (config.block_m + 2 * config.num_stages * config.block_k) * row_bytes <= SHARED_MEMORY


def test_low_tiles_of_short_heads_have_few_warps():
    """Several programs then share a multiprocessor."""

    def config(rows=24, head_dim=128, dtype="bfloat16", page_size=16):
        shape = {"batch": 32, "kv_heads": 8, "keys": 640, "page_size": page_size}
        return triton.default_config(rows=rows, head_dim=head_dim, dtype=dtype, **shape)

    low = config()
    assert (low.block_m, low.block_k, low.num_warps, low.num_stages) == (32, 32, 2, 3)
    assert dataclasses.replace(low, block_m=16) == config(rows=4) and config(head_dim=64) == low
    for other in (config(rows=128), config(head_dim=256), config(dtype="float32"), config(page_size=None)):
        assert other.num_warps > 2


def test_splits_of_long_prefixes_alone_fill_the_gpu():
    shape = {"kv_heads": 8, "page_size": 16, "head_dim": 128, "dtype": "bfloat16"}
    decode = triton.default_config(batch=1, rows=4, keys=8192, **shape)
    assert decode.splits * 8 >= platform.processors()
    assert triton.default_config(batch=1, rows=4, keys=16, **shape).splits == 1
    assert triton.default_config(batch=1, rows=8192, keys=32768, **shape).splits == 1
    assert triton.default_config(batch=64, rows=4, keys=8192, **shape).splits == 1


@pytest.mark.parametrize(("here", "call"), (("gpu", "gpu.triton"), ("tpu", "tpu_custom_call"), ("cpu", None)))
def test_the_best_backend_of_a_platform(here, call, monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: here)
    text = cross_lower(partial(paged_attention, layer=0, scale=1.0), {"gpu": "cuda"}.get(here, "tpu"), *shapes(REAL[0]))
    assert call in text if call else "custom_call" not in text


@pytest.mark.parametrize(
    ("here", "backend", "change", "reason"),
    (
        ("gpu", "triton", {"dtype": "float8_e4m3fn"}, "q is float8_e4m3fn: must be one of bfloat16, float16, float32"),
        ("tpu", "mosaic_tpu", {"dtype": "float16"}, "q is float16: must be one of bfloat16, float32"),
        ("tpu", "mosaic_tpu", {"head_dim": 32}, "q has head_dim 32: must be at least 64"),
        ("tpu", "mosaic_tpu", {"head_dim": 64, "stored": "float8_e4m3fn"}, "pool is float8_e4m3fn: must be one of"),
    ),
)
def test_unsupported_arguments(here, backend, change, reason, monkeypatch):
    """An error if the kernel is named; otherwise XLA runs them."""
    monkeypatch.setattr(platform, "platform", lambda: here)
    args = shapes(Case("refused", **change))
    with pytest.raises(ValueError, match=f"paged_attention: backend='{backend}' cannot run: {reason}"):
        jax.eval_shape(partial(paged_attention, layer=0, scale=1.0, backend=backend), *args)
    assert jax.eval_shape(partial(paged_attention, layer=0, scale=1.0), *args).shape == args[0].shape


def test_query_heads_that_are_not_a_multiple_are_an_error():
    q, *rest = inputs(Case("three_on_two", heads=3))
    with pytest.raises(ValueError, match="3 heads, which is not a multiple of the 2 key heads"):
        attend(q, *rest)


@pytest.mark.parametrize("missing", ("pool", "page_table"))
def test_a_prefix_without_pages_is_an_error(missing):
    q, k, v, pool, table, prefix, mask = inputs(CASES[0])
    pool, table = (None, table) if missing == "pool" else (pool, None)
    with pytest.raises(ValueError, match="prefix_length requires pool and page_table"):
        attend(q, k, v, pool, table, prefix, mask)


WRONG = {
    "values": ({"v": lambda v: v[:, :1]}, r"k_rows \(.*\) and v_rows \(.*\) must have the same shape"),
    "batch": ({"k": lambda k: k[:1], "v": lambda v: v[:1]}, r"k_rows \(1, .*\): must have the batch of 3"),
    "dtype": ({"q": lambda q: q.astype(jnp.bfloat16)}, "must have the same dtype, not bfloat16, float32 and float32"),
    "rows": (
        {"k": lambda k: k[:, 1:], "v": lambda v: v[:, 1:]},
        "k_rows has 3 rows: must have at least one for each of the 4 nodes",
    ),
    "mask": ({"mask": lambda mask: mask[:2]}, r"mask \(2, 4, 4\): must be \(3, 4, 4\)"),
    "pool": ({"pool": lambda pool: pool[..., :8]}, r"pool \(.*\): must be .*'page', 2, 16\) for k_rows"),
    "page_table": ({"table": lambda table: table[:2]}, r"page_table \(2, 3\) and prefix_length \(3,\)"),
    "layer": ({"layer": lambda _: 2}, "layer=2: must be between 0 and 1, the layers of the pool"),
    "soft_cap": ({"soft_cap": lambda _: 0.0}, "soft_cap=0.0: must be above 0"),
    "sinks": ({"sinks": lambda _: np.zeros(3, np.float32)}, r"sinks \(3,\): must be \(2,\), one for each head"),
    "windows": ({"prefix_start": lambda _: np.zeros((3, 1), np.int32)}, r"prefix_start \(3, 1\): must be \(3, 4\)"),
    "first": ({"keep_first": lambda _: 2}, "keep_first=2: must be at least 0, and 0 without prefix_start"),
    "negative_first": ({"keep_first": lambda _: -1}, "keep_first=-1: must be at least 0"),
    "no_prefix": (
        {"prefix": lambda _: None, "prefix_start": lambda _: np.zeros((3, 4), np.int32)},
        "prefix_start requires prefix_length",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_arguments_that_do_not_fit_are_an_error(change, message, without_jaxtyping):
    names = ("q", "k", "v", "pool", "table", "prefix", "mask")
    args = dict(zip(names, inputs(Case("wrong", tree=True)), strict=True))
    options = {"layer": 0, "soft_cap": None, "prefix_start": None, "sinks": None, "keep_first": 0}
    args |= {name: new(args[name]) for name, new in change.items() if name in args}
    options |= {name: new(None) for name, new in change.items() if name in options}
    with pytest.raises(ValueError, match=message):
        attend(*args.values(), **options)
