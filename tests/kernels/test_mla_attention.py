"""Backends of latent attention against one softmax per query, in float64.

The kernel for Hopper GPUs takes other shapes and types: test_mla_attention_on_hopper.py.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import FAST_COMPILE, interpreted, params, requires
from cases import CASES, SHARED_MEMORY, SPLIT, Case, assert_close, rng_of
from cases import latent_inputs as inputs
from crosslower import cross_lower

from pallas_kernels import platform
from pallas_kernels.mla_attention import OPERATION, mla_attention, mosaic_tpu, triton

ANY_SHAPE = sorted(set(OPERATION.backends) - {"mosaic_gpu"})
backends = pytest.mark.parametrize("backend", params(*ANY_SHAPE))
kernels = requires("triton")


def some_of(case: Case, share: float = 0.4):
    """A mask of the prefix under which some nodes see no committed position."""
    return rng_of(case).random((case.batch, case.nodes, case.capacity)) < share


def oracle(q_latent, q_rope, rows, pool, table, prefix, mask, *, layer=0, scale=1.0, prefix_mask=None):
    batch, nodes, heads, latent = q_latent.shape
    count = rows.shape[1]
    out = np.zeros(q_latent.shape, np.float64)
    for b, n in np.ndindex(batch, nodes):
        seen = np.arange(count) <= count - nodes + n if mask is None else mask[b, n]
        keys = [rows[b, seen]]
        for t in range(0 if prefix is None else prefix[b]):
            if prefix_mask is None or prefix_mask[b, n, t]:
                keys.append(pool[layer, 0, table[b, t // pool.shape[3]], t % pool.shape[3]][None])
        keys = np.concatenate([part.astype(np.float64) for part in keys])
        q = np.concatenate([q_latent[b, n], q_rope[b, n]], axis=-1).astype(np.float64)
        scores = q @ keys.T * scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[b, n] = weights / weights.sum(-1, keepdims=True) @ keys[:, :latent]
    return out


def attend(*args, layer=0, scale=1.0, prefix_mask=None, backend=None, config=None):
    """The operation, jitted: backends always run inside a program."""
    kernel = mosaic_tpu if isinstance(config, mosaic_tpu.Config) else triton
    run = partial(kernel.mla_attention, config=config) if config else partial(mla_attention, backend=backend)
    jitted = jax.jit(
        lambda prefix_mask, *args: run(*args, prefix_mask=prefix_mask, layer=layer, scale=scale),
        compiler_options=FAST_COMPILE if config or interpreted(backend) else None,
    )
    return jitted(prefix_mask, *args)


MLA_CASES = (
    *CASES,
    Case("latent_20", heads=4, head_dim=20, nodes=5, tree=True),
    Case("sixteen_heads", heads=16, nodes=6, head_dim=32, page_size=16, prefix=(48, 5)),
    Case("chunk_after_a_prefix", nodes=40, heads=4, page_size=16, pages=4, prefix=(64, 3)),
)
POINTS = [
    pytest.param(case, *backend.values, marks=backend.marks, id=f"{case.name}-{backend.values[0]}")
    for case in MLA_CASES
    for backend in params(*ANY_SHAPE)
]


@pytest.mark.slow(
    unless=(
        "page_of_3",
        "earlier_rows_tree-xla",
        "no_prefix_chain-triton",
        "bfloat16_tree-mosaic_tpu",
        "latent_20-triton",
        "narrow_pool_chain-xla",
    )
)
@pytest.mark.parametrize(("case", "backend"), POINTS)
def test_equals_a_softmax_in_float64(case, backend):
    """Free pages and rows after the prefix are NaN: reading one shows in the result."""
    args = inputs(case)
    options = {"layer": case.layers - 1, "scale": 0.3}
    out = attend(*args, **options, backend=backend)
    assert out.dtype == jnp.dtype(case.dtype)
    assert out.shape == args[0].shape
    assert_close(out, oracle(*args, **options), case.dtype)


@pytest.mark.slow(unless="tree")
@backends
@pytest.mark.parametrize("tree", (False, True), ids=("chain", "tree"))
def test_a_mask_of_the_prefix(backend, tree):
    case = Case("masked", nodes=5, heads=3, tree=tree, page_size=3, pages=8, prefix=(24, 20, 0))
    args, seen = inputs(case), some_of(case)
    assert_close(attend(*args, prefix_mask=seen, backend=backend), oracle(*args, prefix_mask=seen))


@pytest.mark.slow(unless="xla")
@backends
def test_one_mask_for_the_whole_batch(backend):
    case = Case("broadcast", tree=True)
    *args, mask = inputs(case)
    each = attend(*args, np.repeat(mask[:1], case.batch, axis=0), backend=backend)
    np.testing.assert_array_equal(attend(*args, mask[:1], backend=backend), each)


@backends
def test_large_scores_do_not_overflow(backend):
    case = Case("large")
    q_latent, q_rope, *rest = inputs(case)
    args = (q_latent * 1e4, q_rope * 1e4, *rest)
    np.testing.assert_allclose(attend(*args, backend=backend), oracle(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.slow(unless="3-True-splits_of_small_pages")
@kernels
@pytest.mark.parametrize(
    ("splits", "masked", "case"),
    (
        (8, False, SPLIT),
        (3, True, dataclasses.replace(SPLIT, name="splits_of_small_pages", page_size=3, pages=32)),
        (3, False, dataclasses.replace(SPLIT, name="splits_of_many_rows", nodes=20, prefix=(50,), tree=False)),
    ),
    ids=lambda x: getattr(x, "name", x),
)
def test_splits_of_the_prefix_are_merged(case, splits, masked):
    """Including more splits than blocks of keys, and several tiles of rows."""
    seen = some_of(case) if masked else None
    config = triton.Config(block_m=16, block_k=16, splits=splits, num_warps=4, num_stages=2)
    args = inputs(case)
    assert_close(attend(*args, prefix_mask=seen, config=config), oracle(*args, prefix_mask=seen))


@pytest.mark.slow
@kernels
def test_latent_rows_are_multiplied_part_by_part(monkeypatch):
    """Parts of 16 columns, and a last one of 8."""
    monkeypatch.setattr(triton, "CHAIN_COLUMNS", 16)
    case = dataclasses.replace(SPLIT, name="parts", head_dim=40)
    for splits in (1, 3):
        config = triton.Config(block_m=16, block_k=16, splits=splits, num_warps=4, num_stages=2)
        args = inputs(case)
        assert_close(attend(*args, config=config), oracle(*args))


@pytest.mark.slow(unless="True-steps_masked")
@requires("mosaic_tpu")
@pytest.mark.parametrize(
    ("masked", "case"),
    (
        (True, dataclasses.replace(SPLIT, name="steps_masked", nodes=20)),
        (False, dataclasses.replace(SPLIT, name="steps_chain", nodes=40, tree=False)),
        (False, dataclasses.replace(SPLIT, name="steps_no_prefix", prefix=None, tree=False, nodes=20)),
    ),
    ids=lambda x: getattr(x, "name", x),
)
def test_steps_and_tiles_of_the_tpu_kernel(case, masked):
    seen = some_of(case) if masked else None
    config = mosaic_tpu.Config(block_m=16, step_pages=2, step_rows=16)
    args = inputs(case)
    assert_close(attend(*args, prefix_mask=seen, config=config), oracle(*args, prefix_mask=seen))


DEEPSEEK = {"head_dim": 512, "dtype": "bfloat16", "page_size": 64, "pages": 128, "layers": 27}
REAL = (
    Case("decode", **DEEPSEEK, heads=16, prefix=(0,), nodes=1),
    Case("verify_chain", **DEEPSEEK, heads=128, prefix=(0,), nodes=6),
    Case("verify_tree", **DEEPSEEK, heads=16, prefix=(0,) * 8, nodes=32, tree=True),
    Case("pages_of_1", **{**DEEPSEEK, "page_size": 1}, heads=16, prefix=(0,), nodes=6),
    Case("chunk_of_512", **DEEPSEEK, heads=16, prefix=(0,), nodes=512),
    Case("draft_step", **DEEPSEEK, heads=16, prefix=(0,), nodes=1, earlier=7, tree=True),
    Case("narrow_pool", **DEEPSEEK, heads=16, prefix=(0,) * 8, nodes=6, stored="float8_e4m3fn"),
    Case("no_prefix", **DEEPSEEK, heads=16, prefix=None, nodes=6),
    Case("float32", **{**DEEPSEEK, "dtype": "float32"}, heads=16, prefix=(0,), nodes=6, tree=True),
)


def shapes(case: Case, rope: int = 64):
    """The shapes of `inputs`."""
    new = jax.ShapeDtypeStruct
    rows, width = case.earlier + case.nodes, case.head_dim + rope
    queries = [new((case.batch, case.nodes, case.heads, size), case.dtype) for size in (case.head_dim, rope)]
    own = new((case.batch, rows, width), case.dtype)
    mask = new((case.batch, case.nodes, rows), "bool") if case.tree else None
    if case.prefix is None:
        return *queries, own, None, None, None, mask
    pool = new((case.layers, 1, case.batch * case.pages, case.page_size, width), case.pool_dtype)
    return *queries, own, pool, new((case.batch, case.pages), "int32"), new((case.batch,), "int32"), mask


@pytest.mark.slow(unless=("cuda-verify_tree", "tpu-verify_tree"))
@pytest.mark.parametrize("masked", (False, True), ids=("", "masked"))
@pytest.mark.parametrize("case", REAL, ids=lambda case: case.name)
@pytest.mark.parametrize("platform", ("cuda", "tpu"))
def test_lowers_for(platform, case, masked):
    masked = masked and case.prefix is not None
    seen = jax.ShapeDtypeStruct((case.batch, case.nodes, case.capacity), "bool") if masked else None
    kernel, call = {"cuda": (triton, "gpu.triton"), "tpu": (mosaic_tpu, "tpu_custom_call")}[platform]

    def run(prefix_mask, *args):
        return kernel.mla_attention(*args, prefix_mask=prefix_mask, layer=0, scale=0.1, interpret=False)

    assert call in cross_lower(run, platform, seen, *shapes(case))


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_blocks_fit_a_gpu(dtype):
    for batch, rows, keys in np.ndindex(3, 5, 3):
        config = triton.default_config(
            batch=8**batch, rows=(16, 96, 128, 768, 8192)[rows], keys=(12, 1024, 32768)[keys], latent=512, dtype=dtype
        )
        for size in (config.block_m, config.block_k):
            assert size >= 16
            assert size & (size - 1) == 0
        row_bytes = 576 * jnp.dtype(dtype).itemsize
        assert (config.block_m + config.num_stages * config.block_k) * row_bytes <= SHARED_MEMORY
        # The sum of a tile, in float32, is held in the registers of its threads.
        assert config.block_m * 512 <= 128 * 32 * config.num_warps


def test_splits_of_long_prefixes_alone_fill_the_gpu():
    shape = {"rows": 16, "latent": 512, "dtype": "bfloat16"}
    assert triton.default_config(batch=8, keys=8192, **shape).splits * 8 >= 0.9 * platform.processors()
    assert triton.default_config(batch=1, keys=16, **shape).splits == 1
    assert triton.default_config(batch=256, keys=8192, **shape).splits == 1


@pytest.mark.parametrize(("here", "call"), (("gpu", "gpu.triton"), ("tpu", "tpu_custom_call"), ("cpu", None)))
def test_the_best_backend_of_a_platform(here, call, monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: here)
    text = cross_lower(partial(mla_attention, layer=0, scale=1.0), {"gpu": "cuda"}.get(here, "tpu"), *shapes(REAL[0]))
    assert call in text if call else "custom_call" not in text


@pytest.mark.parametrize(
    ("here", "backend", "change", "reason"),
    (
        ("gpu", "triton", {"dtype": "float8_e4m3fn"}, "q_latent is float8_e4m3fn: must be one of bfloat16, float16"),
        ("tpu", "mosaic_tpu", {"dtype": "float16"}, "q_latent is float16: must be one of bfloat16, float32"),
        ("tpu", "mosaic_tpu", {"stored": "float8_e4m3fn"}, "pool is float8_e4m3fn: must be one of bfloat16, float32"),
        ("tpu", "mosaic_tpu", {"page_size": 12}, "pool has pages of 12 rows: must be a multiple of 8"),
    ),
)
def test_unsupported_arguments(here, backend, change, reason, monkeypatch):
    """An error if the kernel is named; otherwise XLA runs them."""
    monkeypatch.setattr(platform, "platform", lambda: here)
    args = shapes(Case("refused", **change))
    with pytest.raises(ValueError, match=f"cannot run: {reason}"):
        jax.eval_shape(partial(mla_attention, layer=0, scale=1.0, backend=backend), *args)
    assert jax.eval_shape(partial(mla_attention, layer=0, scale=1.0), *args).shape == args[0].shape


WRONG = {
    "heads": ({"q_rope": lambda q: q[:, :, :1]}, r"q_latent \(.*\) and q_rope \(.*\) must agree in batch"),
    "batch": ({"rows": lambda rows: rows[:1]}, r"rows \(1, .*\): must have the batch of 3"),
    "width": ({"rows": lambda rows: rows[..., 1:]}, "must have .* the 24 elements"),
    "dtype": (
        {"rows": lambda rows: rows.astype(jnp.bfloat16)},
        "must have the same dtype, not float32, float32 and bfloat16",
    ),
    "rows": ({"rows": lambda rows: rows[:, 1:]}, "must have at least one for each of the 4 nodes"),
    "mask": ({"mask": lambda mask: mask[:2]}, r"mask \(2, 4, 4\): must be \(3, 4, 4\)"),
    "pool": ({"pool": lambda pool: pool[..., :8]}, r"pool \(.*\): must be .*'page', 24\) for rows"),
    "no_pool": ({"pool": lambda _: None}, "prefix_length requires pool and page_table"),
    "page_table": ({"table": lambda table: table[:2]}, r"page_table \(2, 3\) and prefix_length \(3,\)"),
    "layer": ({"layer": lambda _: 2}, "layer=2: must be between 0 and 1, the layers of the pool"),
    "prefix_mask": ({"prefix_mask": lambda _: np.ones((3, 4, 5), bool)}, r"prefix_mask \(3, 4, 5\): .* \(3, 4, 12\)"),
    "no_prefix": (
        {"prefix": lambda _: None, "prefix_mask": lambda _: np.ones((3, 4, 12), bool)},
        "prefix_mask requires prefix_length",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_arguments_that_do_not_fit_are_an_error(change, message, without_jaxtyping):
    names = ("q_latent", "q_rope", "rows", "pool", "table", "prefix", "mask")
    args = dict(zip(names, inputs(Case("wrong", tree=True)), strict=True))
    options = {"layer": 0, "prefix_mask": None}
    args |= {name: new(args[name]) for name, new in change.items() if name in args}
    options |= {name: new(None) for name, new in change.items() if name in options}
    with pytest.raises(ValueError, match=message):
        attend(*args.values(), **options)
