"""Every backend of attention over pages, of heads and of latent rows, against one softmax per query, in float64.

The kernel of latent attention for Hopper GPUs takes other shapes and types: test_mla_attention_on_hopper.py.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import FAST_COMPILE, HERE, interpreted, params, requires
from cases import ATTENTION_CASES, CASES, SHARED_MEMORY, SINK_CASES, SPLIT, Case, assert_close
from crosslower import cross_lower

from pallas_kernels import mla_attention, paged_attention, platform
from pallas_kernels.mla_attention import mosaic_tpu as latent_tpu
from pallas_kernels.mla_attention import triton as latent_triton
from pallas_kernels.paged_attention import mosaic_tpu, triton

MLA_CASES = (
    *CASES,
    Case("latent_20", heads=4, head_dim=20, nodes=5, tree=True),
    Case("sixteen_heads", heads=16, nodes=6, head_dim=32, page_size=16, prefix=(48, 5)),
    Case("chunk_after_a_prefix", nodes=40, heads=4, page_size=16, pages=4, prefix=(64, 3)),
    Case("masked_chain", nodes=5, heads=3, page_size=3, pages=8, prefix=(24, 20, 0), selected=True),
    Case("masked_tree", nodes=5, heads=3, page_size=3, pages=8, prefix=(24, 20, 0), selected=True, tree=True),
)
LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "page_size": 16, "pages": 512, "layers": 32}
REAL_HEADS = (
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
DEEPSEEK = {"head_dim": 512, "dtype": "bfloat16", "page_size": 64, "pages": 128, "layers": 27}
REAL_LATENTS = (
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


@dataclasses.dataclass(frozen=True)
class Kind:
    """An operation, its kernels, and what it is called with."""

    name: str
    run: Callable
    triton: Any
    mosaic_tpu: Any
    backends: list[str]
    cases: tuple[Case, ...]
    real: tuple[Case, ...]
    """Shapes of large models."""
    inputs: Callable
    options: Callable
    by_hand: Callable
    shapes: Callable

    def attend(self, args, backend=None, config=None, **options):
        """The operation, jitted: backends always run inside a program. config: of one of the two kernels."""
        arrays = {name: value for name, value in options.items() if isinstance(value, np.ndarray)}
        static = {"layer": 0, "scale": 1.0} | {name: value for name, value in options.items() if name not in arrays}
        run = partial(self.run, backend=backend)
        if config is not None:
            module = self.triton if isinstance(config, self.triton.Config) else self.mosaic_tpu
            run = partial(getattr(module, self.name), config=config)
        fast = HERE == "cpu" if config is not None else interpreted(backend)
        jitted = jax.jit(
            lambda arrays, *args: run(*args, **static, **arrays), compiler_options=FAST_COMPILE if fast else None
        )
        return jitted(arrays, *args)

    def check(self, case, **options):
        """Free pages, and rows after the prefix or before all windows, are NaN: reading one shows in the result."""
        args, given = self.inputs(case), self.options(case)
        out = self.attend(args, **given, **options)
        assert out.dtype == jnp.dtype(case.dtype)
        assert out.shape == args[0].shape
        assert_close(out, self.by_hand(*args, **given), case.dtype)


HEADS = Kind(
    *("paged_attention", paged_attention.paged_attention, triton, mosaic_tpu),
    sorted(paged_attention.OPERATION.backends),
    (*ATTENTION_CASES, *SINK_CASES),
    REAL_HEADS,
    *(cases.attention_inputs, cases.attention_options, cases.attention_by_hand, cases.attention_shapes),
)
LATENTS = Kind(
    *("mla_attention", mla_attention.mla_attention, latent_triton, latent_tpu),
    sorted(set(mla_attention.OPERATION.backends) - {"mosaic_gpu"}),
    MLA_CASES,
    (*REAL_LATENTS, *(dataclasses.replace(case, selected=True) for case in REAL_LATENTS if case.prefix is not None)),
    *(cases.latent_inputs, cases.latent_options, cases.latent_by_hand, cases.latent_shapes),
)
KINDS = {"heads": HEADS, "latents": LATENTS}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
backends = pytest.mark.parametrize(
    ("kind", "backend"),
    [
        pytest.param(kind, *backend.values, marks=backend.marks, id=f"{name}-{backend.values[0]}")
        for name, kind in KINDS.items()
        for backend in params(*kind.backends)
    ],
)
POINTS = [
    pytest.param(kind, case, *backend.values, marks=backend.marks, id=f"{name}-{case.name}-{backend.values[0]}")
    for name, kind in KINDS.items()
    for case in kind.cases
    for backend in params(*kind.backends)
]


@pytest.mark.slow(
    unless=(
        *("page_of_3", "heads-bfloat16_earlier_rows-xla", "heads-sinks_chain-xla", "heads-first_chain-xla"),
        *("heads-first_tree-triton", "heads-bfloat16_windows_soft_cap-mosaic_tpu", "heads-narrow_pool_chain-triton"),
        *("latents-earlier_rows_tree-xla", "latents-no_prefix_chain-triton", "latents-bfloat16_tree-mosaic_tpu"),
        *("latents-latent_20-triton", "latents-narrow_pool_chain-xla", "latents-masked_tree"),
    )
)
@pytest.mark.parametrize(("kind", "case", "backend"), POINTS)
def test_equals_a_softmax_in_float64(kind, case, backend):
    kind.check(case, backend=backend)


@pytest.mark.slow(unless="xla")
@backends
def test_one_mask_for_the_whole_batch(kind, backend):
    case = Case("broadcast", tree=True)
    *args, mask = kind.inputs(case)
    each = kind.attend((*args, np.repeat(mask[:1], case.batch, axis=0)), backend)
    np.testing.assert_array_equal(kind.attend((*args, mask[:1]), backend), each)


@pytest.mark.parametrize("backend", params(*HEADS.backends))
def test_without_a_prefix_the_pool_is_not_read(backend):
    q, k, v, pool, table, _, _ = HEADS.inputs(Case("pool_of_nan", prefix=(0, 0, 0)))
    without = HEADS.attend((q, k, v, None, None, None, None), backend)
    np.testing.assert_array_equal(HEADS.attend((q, k, v, pool, table, None, None), backend), without)


@pytest.mark.slow(unless=("xla", "latents"))
@backends
def test_large_scores_do_not_overflow(kind, backend):
    queries = 1 if kind is HEADS else 2
    args = [x * 1e4 if place < queries else x for place, x in enumerate(kind.inputs(Case("large")))]
    np.testing.assert_allclose(kind.attend(args, backend), kind.by_hand(*args), rtol=1e-4, atol=1e-4)


def split(name, **changes):
    return dataclasses.replace(SPLIT, name=name, **changes)


@pytest.mark.slow(unless=("heads-2-splits_of_small_pages", "latents-3-splits_of_small_pages"))
@requires("triton")
@pytest.mark.parametrize(
    ("kind", "splits", "case"),
    (
        (HEADS, 2, SPLIT),
        (HEADS, 8, SPLIT),
        (HEADS, 2, split("splits_of_small_pages", page_size=3, pages=32)),
        (HEADS, 3, split("splits_of_windows", windows=True, tree=False)),
        (HEADS, 3, split("splits_of_first", windows=True, keep_first=18, tree=False)),
        (HEADS, 9, split("splits_of_few_blocks", windows=True, keep_first=1, nodes=1)),
        (HEADS, 3, split("splits_of_many_rows", nodes=20, prefix=(50,), tree=False, kv_heads=1)),
        (HEADS, 2, split("splits_sinks", kv_heads=1, sinks=True)),
        (LATENTS, 8, SPLIT),
        (LATENTS, 3, split("splits_of_small_pages", page_size=3, pages=32, selected=True)),
        (LATENTS, 3, split("splits_of_many_rows", nodes=20, prefix=(50,), tree=False)),
    ),
    ids=lambda x: ("heads" if x is HEADS else "latents") if isinstance(x, Kind) else getattr(x, "name", x),
)
def test_splits_of_the_prefix_are_merged(kind, splits, case):
    """Including more splits than blocks of keys, and several tiles of rows."""
    kind.check(case, config=kind.triton.Config(block_m=16, block_k=16, splits=splits, num_warps=4, num_stages=2))


@pytest.mark.slow
@requires("triton")
@pytest.mark.parametrize("splits", (1, 3))
def test_latent_rows_are_multiplied_part_by_part(splits, monkeypatch):
    """Parts of 16 columns, and a last one of 8."""
    monkeypatch.setattr(latent_triton, "CHAIN_COLUMNS", 16)
    config = latent_triton.Config(block_m=16, block_k=16, splits=splits, num_warps=4, num_stages=2)
    LATENTS.check(split("parts", head_dim=40), config=config)


@pytest.mark.slow(unless=("heads-2-steps_windows", "latents-2-steps_masked"))
@requires("mosaic_tpu")
@pytest.mark.parametrize(
    ("kind", "step_pages", "case"),
    (
        (HEADS, 1, split("steps_tree", nodes=20)),
        (HEADS, 2, split("steps_windows", windows=True, tree=False, nodes=20)),
        (HEADS, 1, split("steps_first", windows=True, keep_first=18, nodes=20)),
        (HEADS, 2, split("steps_first_of_2_pages", windows=True, keep_first=1, tree=False)),
        (HEADS, 1, split("steps_no_prefix", prefix=None, tree=False, nodes=40)),
        (HEADS, 2, split("steps_sinks", kv_heads=1, sinks=True, nodes=20)),
        (LATENTS, 2, split("steps_masked", nodes=20, selected=True)),
        (LATENTS, 2, split("steps_chain", nodes=40, tree=False)),
        (LATENTS, 2, split("steps_no_prefix", prefix=None, tree=False, nodes=20)),
    ),
    ids=lambda x: ("heads" if x is HEADS else "latents") if isinstance(x, Kind) else getattr(x, "name", x),
)
def test_steps_and_tiles_of_the_tpu_kernel(kind, step_pages, case):
    kind.check(case, config=kind.mosaic_tpu.Config(block_m=16, step_pages=step_pages, step_rows=16))


# Compilation for other platforms, and what is chosen


@pytest.mark.slow(unless=("heads-decode-cuda", "verify_tree-tpu", "heads-first_tree-cuda", "latents-verify_tree-cuda"))
@pytest.mark.parametrize("platform", ("cuda", "tpu"))
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, id=f"{name}-{case.name}{'-masked' * case.selected}")
        for name, kind in KINDS.items()
        for case in kind.real
    ],
)
def test_lowers_for(kind, case, platform):
    kernel, call = {"cuda": (kind.triton, "gpu.triton"), "tpu": (kind.mosaic_tpu, "tpu_custom_call")}[platform]
    given = kind.options(dataclasses.replace(case, selected=False))
    arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
    if case.selected:
        arrays = {"prefix_mask": jax.ShapeDtypeStruct((case.batch, case.nodes, case.capacity), "bool")}
    static = {name: x for name, x in given.items() if name not in arrays}

    def run(arrays, *args):
        return getattr(kernel, kind.name)(*args, **arrays, **static, interpret=False)

    assert call in cross_lower(run, platform, arrays, *kind.shapes(case))


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("head_dim", (16, 64, 128, 256))
def test_blocks_of_heads_fit_a_gpu(head_dim, dtype):
    for batch, rows, keys in np.ndindex(3, 4, 3):
        shape = dict(batch=8**batch, rows=(1, 24, 256, 8192)[rows], keys=(12, 1024, 32768)[keys])
        config = triton.default_config(**shape, kv_heads=8, page_size=16, head_dim=head_dim, dtype=dtype)
        check_blocks(config, head_dim * jnp.dtype(dtype).itemsize, keys_and_values=2)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_blocks_of_latents_fit_a_gpu(dtype):
    for batch, rows, keys in np.ndindex(3, 5, 3):
        shape = dict(batch=8**batch, rows=(16, 96, 128, 768, 8192)[rows], keys=(12, 1024, 32768)[keys])
        config = latent_triton.default_config(**shape, latent=512, dtype=dtype)
        check_blocks(config, 576 * jnp.dtype(dtype).itemsize, keys_and_values=1)
        # The sum of a tile, in float32, is held in the registers of its threads.
        assert config.block_m * 512 <= 128 * 32 * config.num_warps


def check_blocks(config, row_bytes, keys_and_values):
    for size in (config.block_m, config.block_k):
        assert size >= 16
        assert size & (size - 1) == 0
    assert (config.block_m + keys_and_values * config.num_stages * config.block_k) * row_bytes <= SHARED_MEMORY


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
    shape = {"rows": 16, "latent": 512, "dtype": "bfloat16"}
    assert latent_triton.default_config(batch=8, keys=8192, **shape).splits * 8 >= 0.9 * platform.processors()
    assert latent_triton.default_config(batch=1, keys=16, **shape).splits == 1
    assert latent_triton.default_config(batch=256, keys=8192, **shape).splits == 1


@pytest.mark.parametrize(("here", "call"), (("gpu", "gpu.triton"), ("tpu", "tpu_custom_call"), ("cpu", None)))
@kinds
def test_the_best_backend_of_a_platform(kind, here, call, monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: here)
    run = partial(kind.run, layer=0, scale=1.0)
    text = cross_lower(run, {"gpu": "cuda"}.get(here, "tpu"), *kind.shapes(kind.real[0]))
    assert call in text if call else "custom_call" not in text


F8 = "float8_e4m3fn"


@pytest.mark.parametrize(
    ("kind", "here", "backend", "change", "reason"),
    (
        (HEADS, "gpu", "triton", {"dtype": F8}, f"q is {F8}: must be one of bfloat16, float16, float32"),
        (HEADS, "tpu", "mosaic_tpu", {"dtype": "float16"}, "q is float16: must be one of bfloat16, float32"),
        (HEADS, "tpu", "mosaic_tpu", {"head_dim": 32}, "q has head_dim 32: must be at least 64"),
        (HEADS, "tpu", "mosaic_tpu", {"head_dim": 64, "stored": F8}, f"pool is {F8}: must be one of"),
        (LATENTS, "gpu", "triton", {"dtype": F8}, f"q_latent is {F8}: must be one of bfloat16, float16"),
        (LATENTS, "tpu", "mosaic_tpu", {"dtype": "float16"}, "q_latent is float16: must be one of bfloat16, float32"),
        (LATENTS, "tpu", "mosaic_tpu", {"stored": F8}, f"pool is {F8}: must be one of bfloat16, float32"),
        (LATENTS, "tpu", "mosaic_tpu", {"page_size": 12}, "pool has pages of 12 rows: must be a multiple of 8"),
    ),
)
def test_unsupported_arguments(kind, here, backend, change, reason, monkeypatch):
    """An error if the kernel is named; otherwise XLA runs them."""
    monkeypatch.setattr(platform, "platform", lambda: here)
    args = kind.shapes(Case("refused", **change))
    with pytest.raises(ValueError, match=f"{kind.name}: backend='{backend}' cannot run: {reason}"):
        jax.eval_shape(partial(kind.run, layer=0, scale=1.0, backend=backend), *args)
    assert jax.eval_shape(partial(kind.run, layer=0, scale=1.0), *args).shape == args[0].shape


def test_query_heads_that_are_not_a_multiple_are_an_error():
    with pytest.raises(ValueError, match="3 heads, which is not a multiple of the 2 key heads"):
        HEADS.attend(HEADS.inputs(Case("three_on_two", heads=3)))


@pytest.mark.parametrize("missing", ("pool", "page_table"))
def test_a_prefix_without_pages_is_an_error(missing):
    q, k, v, pool, table, prefix, mask = HEADS.inputs(CASES[0])
    pool, table = (None, table) if missing == "pool" else (pool, None)
    with pytest.raises(ValueError, match="prefix_length requires pool and page_table"):
        HEADS.attend((q, k, v, pool, table, prefix, mask))


def half(x):
    return x.astype(jnp.bfloat16)


WRONG = {
    "heads-values": ({"v": lambda v: v[:, :1]}, r"k_rows \(.*\) and v_rows \(.*\) must have the same shape"),
    "heads-batch": ({"k": lambda k: k[:1], "v": lambda v: v[:1]}, r"k_rows \(1, .*\): must have the batch of 3"),
    "heads-dtype": ({"q": half}, "must have the same dtype, not bfloat16, float32 and float32"),
    "heads-rows": (
        {"k": lambda k: k[:, 1:], "v": lambda v: v[:, 1:]},
        "k_rows has 3 rows: must have at least one for each of the 4 nodes",
    ),
    "heads-mask": ({"mask": lambda mask: mask[:2]}, r"mask \(2, 4, 4\): must be \(3, 4, 4\)"),
    "heads-pool": ({"pool": lambda pool: pool[..., :8]}, r"pool \(.*\): must be .*'page', 2, 16\) for k_rows"),
    "heads-page_table": ({"table": lambda table: table[:2]}, r"page_table \(2, 3\) and prefix_length \(3,\)"),
    "heads-layer": ({"layer": lambda _: 2}, "layer=2: must be between 0 and 1, the layers of the pool"),
    "heads-soft_cap": ({"soft_cap": lambda _: 0.0}, "soft_cap=0.0: must be above 0"),
    "heads-sinks": ({"sinks": lambda _: np.zeros(3, np.float32)}, r"sinks \(3,\): must be \(2,\), one for each head"),
    "heads-windows": (
        {"prefix_start": lambda _: np.zeros((3, 1), np.int32)},
        r"prefix_start \(3, 1\): must be \(3, 4\)",
    ),
    "heads-first": ({"keep_first": lambda _: 2}, "keep_first=2: must be at least 0, and 0 without prefix_start"),
    "heads-negative_first": ({"keep_first": lambda _: -1}, "keep_first=-1: must be at least 0"),
    "heads-no_prefix": (
        {"prefix": lambda _: None, "prefix_start": lambda _: np.zeros((3, 4), np.int32)},
        "prefix_start requires prefix_length",
    ),
    "latents-heads": ({"q_rope": lambda q: q[:, :, :1]}, r"q_latent \(.*\) and q_rope \(.*\) must agree in batch"),
    "latents-batch": ({"rows": lambda rows: rows[:1]}, r"rows \(1, .*\): must have the batch of 3"),
    "latents-width": ({"rows": lambda rows: rows[..., 1:]}, "must have .* the 24 elements"),
    "latents-dtype": ({"rows": half}, "must have the same dtype, not float32, float32 and bfloat16"),
    "latents-rows": ({"rows": lambda rows: rows[:, 1:]}, "must have at least one for each of the 4 nodes"),
    "latents-mask": ({"mask": lambda mask: mask[:2]}, r"mask \(2, 4, 4\): must be \(3, 4, 4\)"),
    "latents-pool": ({"pool": lambda pool: pool[..., :8]}, r"pool \(.*\): must be .*'page', 24\) for rows"),
    "latents-no_pool": ({"pool": lambda _: None}, "prefix_length requires pool and page_table"),
    "latents-page_table": ({"table": lambda table: table[:2]}, r"page_table \(2, 3\) and prefix_length \(3,\)"),
    "latents-layer": ({"layer": lambda _: 2}, "layer=2: must be between 0 and 1, the layers of the pool"),
    "latents-prefix_mask": (
        {"prefix_mask": lambda _: np.ones((3, 4, 5), bool)},
        r"prefix_mask \(3, 4, 5\): .* \(3, 4, 12\)",
    ),
    "latents-no_prefix": (
        {"prefix": lambda _: None, "prefix_mask": lambda _: np.ones((3, 4, 12), bool)},
        "prefix_mask requires prefix_length",
    ),
}
NAMES = {"heads": ("q", "k", "v"), "latents": ("q_latent", "q_rope", "rows")}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_fit_are_an_error(name, without_jaxtyping):
    (change, message), kind = WRONG[name], name.partition("-")[0]
    case = Case("wrong", tree=True)
    names = (*NAMES[kind], "pool", "table", "prefix", "mask")
    args = dict(zip(names, KINDS[kind].inputs(case), strict=True))
    options = KINDS[kind].options(case)
    args |= {name: new(args[name]) for name, new in change.items() if name in args}
    options |= {name: new(None) for name, new in change.items() if name in options}
    with pytest.raises(ValueError, match=message):
        KINDS[kind].attend(args.values(), **options)
