"""The kernel of latent attention for Hopper GPUs, which takes other shapes and types than the other backends."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import requires, target_other_gpu
from cases import Case, assert_close, latent_by_hand, latent_inputs
from cases import latent_shapes as shapes
from crosslower import cross_lower

from pallas_kernels import platform
from pallas_kernels._mosaic_gpu import ROWS, SHARED_BYTES
from pallas_kernels.mla_attention import mla_attention, mosaic_gpu

ROPE = 64
LATENT = Case("latent", dtype="bfloat16", heads=4, head_dim=128, page_size=16, pages=20, layers=2)
kernel = requires("mosaic_gpu")


def case(name, **change):
    return dataclasses.replace(LATENT, name=name, **change)


def attend(args, splits=None, layer=1, scale=0.3):
    config = None if splits is None else mosaic_gpu.Config(splits)
    return jax.jit(partial(mosaic_gpu.mla_attention, layer=layer, scale=scale, config=config))(*args)


def check(args, splits=None):
    """Free pages and rows after the prefix are NaN: reading one shows in the result."""
    out, expected = attend(args, splits), latent_by_hand(*args, layer=1, scale=0.3)
    assert (out.dtype, out.shape) == (args[0].dtype, args[0].shape)
    assert_close(out, expected, "bfloat16")


CASES = [
    case("nothing_committed", prefix=(0, 0), nodes=5, tree=True),
    # 1, 2, 3 and 4 blocks with the round's own, so that pairs are full and half full.
    case("one_to_four_blocks", prefix=(0, 64, 65, 129, 192), nodes=3),
    case("ends_inside_a_block", prefix=(1, 63, 127), nodes=2, tree=True),
    case("pages_of_8", prefix=(75, 160), page_size=8, nodes=3),
    case("pages_of_32", prefix=(75, 320), page_size=32, pages=10, tree=True),
    case("pages_of_64", prefix=(75, 128), page_size=64, pages=2),
    case("pages_of_128", prefix=(75, 256), page_size=128, pages=2, tree=True),
    case("rows_that_fill_no_tile", prefix=(70,), heads=3, nodes=5, tree=True),
    case("several_tiles", prefix=(70, 5), heads=16, nodes=9, tree=True),
    case("rows_of_a_whole_block", prefix=(70,), heads=2, nodes=64, tree=True),
    case("earlier_rows_chain", prefix=(70, 3), nodes=3, earlier=7),
    case("earlier_rows_tree", prefix=(70, 3), nodes=3, earlier=40, tree=True),
    case("latent_of_deepseek", prefix=(100,), head_dim=512, heads=16, nodes=6),
    case("float16", prefix=(100, 0), dtype="float16", nodes=5, tree=True),
]


@pytest.mark.slow(unless=("one_to_four_blocks", "pages_of_128", "several_tiles", "latent_of_deepseek"))
@kernel
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_a_softmax_in_float64(case):
    check(latent_inputs(case, ROPE))


@pytest.mark.slow
@kernel
@pytest.mark.parametrize("splits", (1, 2, 3, 7))
def test_splits_of_the_prefix_are_merged(splits):
    """Including more splits than blocks, and splits with an odd number of them."""
    check(latent_inputs(case("splits", prefix=(300, 0, 130), nodes=3, tree=True), ROPE), splits)


@kernel
def test_one_mask_for_the_whole_batch():
    *args, mask = latent_inputs(case("broadcast", prefix=(9, 80), tree=True), ROPE)
    each = attend([*args, np.repeat(mask[:1], 2, axis=0)])
    np.testing.assert_array_equal(attend([*args, mask[:1]]), each)


@pytest.mark.slow
@kernel
@pytest.mark.parametrize("rising", (False, True))
def test_scores_of_any_size(rising):
    """Weights refer to the highest score of all blocks, wherever it is."""
    args = list(latent_inputs(case("large", prefix=(300,), nodes=3), ROPE))
    # Later positions have much larger, or much smaller scores.
    order = np.linspace(0, 40, 320, dtype=np.float32)
    scale = (order if rising else order[::-1])[:, None]
    pages = args[3][1, 0, args[4][0]].astype(np.float32)
    grown = np.where(np.isnan(pages), pages, np.abs(pages) * scale.reshape(20, 16, 1))
    args[3][1, 0, args[4][0]] = grown.astype(args[3].dtype)
    args[0], args[1] = np.abs(args[0]), np.abs(args[1])
    check(args, 2)


DEEPSEEK = case("deepseek", heads=16, head_dim=512, page_size=64, pages=128, layers=27, prefix=(0,) * 8, nodes=6)
"""DeepSeek V2-Lite."""


@pytest.mark.slow
@pytest.mark.parametrize("nodes", (6, 32))
@pytest.mark.parametrize("page_size", (16, 64))
def test_lowers_for_a_gpu(nodes, page_size):
    args = shapes(dataclasses.replace(DEEPSEEK, nodes=nodes, page_size=page_size, tree=nodes > 6))
    run = partial(mosaic_gpu.mla_attention, layer=3, scale=0.1, interpret=False)
    assert "mosaic_gpu" in cross_lower(run, "cuda", *args)


def test_queries_blocks_and_sums_fit_a_gpu():
    width = 512 + ROPE
    barriers = 1024
    assert 2 * (ROWS + mosaic_gpu.WARPGROUPS * ROWS) * width + 4 * 2 * ROWS + barriers <= SHARED_BYTES
    load, multiply = mosaic_gpu.REGISTERS
    # The sum of half of the columns, the scores, and weights in 16 bits.
    assert (512 // 2 * ROWS + ROWS * ROWS + ROWS * ROWS // 2) // 128 <= multiply - 32
    assert load + mosaic_gpu.WARPGROUPS * multiply <= 512 and load % 8 == multiply % 8 == 0


def test_splits_fill_the_gpu_and_have_work():
    config = mosaic_gpu.default_config
    for batch, rows in ((8, 96), (8, 512), (1, 96), (1, 512)):
        programs = batch * -(-rows // ROWS) * config(batch=batch, rows=rows, keys=8192).splits
        assert platform.processors() / 2 <= programs <= platform.processors()
    assert config(batch=1, rows=96, keys=512).splits == 4
    assert config(batch=1, rows=96, keys=12).splits == 1
    assert config(batch=256, rows=512, keys=8192).splits == 1


def chosen(case, **options):
    jaxpr = str(jax.make_jaxpr(partial(mla_attention, layer=0, scale=1.0, **options))(*shapes(case)))
    return "mosaic_gpu" if "WGMMA" in jaxpr else "triton" if "interpret=False" in jaxpr else "xla"


@pytest.mark.slow(unless="nodes")
@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({}, "mosaic_gpu"),
        ({"nodes": 32, "tree": True}, "mosaic_gpu"),
        # Most rows of a tile would be empty.
        ({"nodes": 1}, "triton"),
        ({"nodes": 3}, "triton"),
        ({"nodes": 4}, "mosaic_gpu"),
        ({"nodes": 128, "heads": 2}, "triton"),
        ({"prefix": None}, "triton"),
        ({"dtype": "float32"}, "triton"),
        ({"stored": "float8_e4m3fn"}, "triton"),
        ({"page_size": 1}, "triton"),
        ({"head_dim": 192}, "triton"),
        ({"head_dim": 640}, "triton"),
    ],
    ids=str,
)
def test_the_kernel_runs_where_it_is_worthwhile(change, kernel, monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    assert chosen(dataclasses.replace(DEEPSEEK, **change)) == kernel


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prefix": None}, "prefix_length is None: must be given"),
        ({"nodes": 65}, r"rows \(8, 65, 576\): must be at most 64 of a sequence"),
        ({"head_dim": 192}, r"latent rows of 192 \+ 64: must have 128, 256, 384 or 512 columns and 64 rotary ones"),
        ({"page_size": 48}, "pool has pages of 48 rows: must be 8, 16, 32 or a multiple of 64"),
        ({"page_size": 4}, "pool has pages of 4 rows"),
        ({"stored": "float16"}, "pool is float16: must be bfloat16, like q_latent"),
        ({"dtype": "float32"}, "q_latent is float32: must be one of bfloat16, float16"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_the_kernel_cannot_run_is_an_error(change, reason):
    args = shapes(dataclasses.replace(DEEPSEEK, **change))
    with pytest.raises(ValueError, match=f"backend='mosaic_gpu' cannot run: {reason}"):
        jax.eval_shape(partial(mla_attention, layer=0, scale=1.0, backend="mosaic_gpu"), *args)


def test_a_mask_of_the_prefix_is_an_error():
    seen = jnp.ones((8, 6, 128 * 64), bool)
    run = partial(mla_attention, layer=0, scale=1.0, backend="mosaic_gpu", prefix_mask=seen)
    with pytest.raises(ValueError, match="cannot run: prefix_mask is given: must be None"):
        jax.eval_shape(run, *shapes(DEEPSEEK))


def test_the_kernel_is_for_hopper(monkeypatch):
    target_other_gpu(monkeypatch)
    assert chosen(DEEPSEEK) == "triton"
    with pytest.raises(ValueError, match="cannot run: compute capability 10.0: must be 9.x"):
        chosen(DEEPSEEK, backend="mosaic_gpu")
