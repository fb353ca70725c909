"""The product that kernels for Hopper GPUs share: every division gives the same bits."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import HERE, requires
from crosslower import cross_lower

from jspec.models import layers
from pallas_kernels import _mosaic_product, platform
from pallas_kernels.exact_matmul import exact_matmul, mosaic_gpu, triton
from pallas_kernels.gated_matmul import mosaic_gpu as gated_matmul
from pallas_kernels.parts import add_parts

CONFIG = _mosaic_product.Config(warpgroups=1, blocks=1, columns=64, sharing=1, block_k=64, stages=2)
CONFIGS = {
    "warpgroups": {"warpgroups": 2},
    "blocks": {"blocks": 2, "columns": 128},
    "shared rows": {"sharing": 2},
    "shared and wide": {"sharing": 2, "columns": 128, "stages": 3},
    "parts in registers": {"spread": False},
    "parts in shared memory": {"spread": False, "columns": 128, "warpgroups": 2},
    "parts of shared rows": {"spread": False, "sharing": 2, "stages": 3},
}


@requires("mosaic_gpu")
@pytest.mark.parametrize("form", ["plain", "transposed", "gated", "parts"])
def test_the_result_does_not_depend_on_the_division(form, monkeypatch):
    """Few programs, each of which has several tiles; the last tile of rows is not full.

    Sums of whole numbers are exact in any order, such as that of the interpreter's products.
    """
    monkeypatch.setattr(platform, "processors", lambda: 4)
    monkeypatch.setattr(_mosaic_product, "GROUP", 2)
    rng = np.random.default_rng(0)
    x, weight = (np.round(2 * rng.normal(size=shape)).astype(jnp.bfloat16) for shape in ((150, 320), (320, 512)))
    options = {"activation": jax.nn.silu} if form == "gated" else {"transposed": form == "transposed"}
    options |= {"parts": 3 if form == "parts" else 1}
    stored = weight.T.copy() if form == "transposed" else weight
    interpret = platform.platform() == "cpu"

    def run(config):
        arrays = jnp.asarray(x), jnp.asarray(stored)
        return _mosaic_product.product(*arrays, **options, config=config, interpret=interpret, name="product")

    first = run(CONFIG)
    wide = x.astype(np.float64) @ weight.astype(np.float64)
    if form == "gated":
        wide = np.asarray(jax.nn.silu(wide[:, :256])) * wide[:, 256:]
    if form == "parts":
        # Two blocks of 64 in each part but the last.
        blocks = [slice(0, 128), slice(128, 256), slice(256, 320)]
        parts = [x[:, part].astype(np.float64) @ weight[part].astype(np.float64) for part in blocks]
        np.testing.assert_allclose(first, np.stack(parts), rtol=0, atol=1e-4)
        first = add_parts(first, x.dtype)
    np.testing.assert_allclose(np.asarray(first).astype(np.float64), wide, rtol=1e-2, atol=1e-2)
    for name, change in CONFIGS.items():
        result = run(dataclasses.replace(CONFIG, **change))
        assert result.ndim == (3 if form == "parts" and change.get("spread", True) else 2), name
        result = add_parts(result, x.dtype) if result.ndim == 3 else result
        np.testing.assert_array_equal(np.asarray(result).view(np.uint16), np.asarray(first).view(np.uint16), name)


def choice(inner, columns, halves=1):
    """The exact product's configuration by rows."""
    parts = 1 if halves == 2 else mosaic_gpu.parts_of(inner, columns, jnp.bfloat16)
    sizes = {"inner": inner, "columns": columns, "parts": parts, "gated": halves == 2}
    return lambda rows: mosaic_gpu.default_config(rows=rows, **sizes), columns, halves


CHOICES = {
    "exact": choice(4096, 4096),
    "exact and deep": choice(14336, 4096),
    "exact and wide": choice(4096, 128256),
    "exact and narrow": choice(4096, 64),
    "exact and gated": choice(4096, 14336, halves=2),
    "gated": (lambda rows: gated_matmul.default_config(tokens=rows, width=14336), 14336, 2),
    "gated and narrow": (lambda rows: gated_matmul.default_config(tokens=rows, width=64), 64, 2),
}


@pytest.mark.parametrize(("choose", "columns", "halves"), CHOICES.values(), ids=CHOICES)
def test_rings_and_registers_fit_a_gpu(choose, columns, halves):
    for rows in (*range(1, 513), 768, 1024, 4096, 16384):
        config = choose(rows=rows)
        ring = config.stages * config.block_k * (config.rows + halves * config.columns)
        used = 2 * ring + 128 * config.rows + config.totals_bytes
        assert used <= _mosaic_product.SHARED_BYTES and config.stages >= 2
        load, multiply = _mosaic_product.REGISTERS[config.warpgroups]
        # The sums are in registers, and leave some for addresses; without `totals_bytes`, those of parts are, too.
        together = 1 if config.spread or config.totals_bytes else 2
        assert together * halves * config.blocks * config.columns // 2 <= multiply - 32
        assert load + config.warpgroups * multiply <= 512 and load % 8 == multiply % 8 == 0
        assert -(-columns // config.columns) % config.sharing == 0


def test_parts_are_added_by_the_kernel_where_their_sums_would_take_longer(monkeypatch):
    """Products of 512 rows: parts of their own would write and read 33 MB."""
    monkeypatch.setattr(platform, "processors", lambda: 132)
    spread = {rows: choice(14336, 4096)[0](rows=rows).spread for rows in (65, 192, 512, 4096)}
    assert spread == {65: True, 192: True, 512: False, 4096: False}


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ((0, 64, 64), {}, "must not be empty"),
        ((100, 96, 64), {}, "must have rows in multiples of 64 and columns in multiples of 64"),
        ((100, 64, 64), {"activation": jax.nn.silu}, "columns in multiples of 128"),
        ((100, 4096, 4096), {"activation": jax.nn.silu}, "a contraction of one part with an activation, not 4"),
    ],
)
def test_what_the_kernel_refuses(shape, options, reason):
    rows, inner, columns = shape
    x, weight = jnp.zeros((rows, inner), jnp.bfloat16), jnp.zeros((inner, columns), jnp.bfloat16)
    assert reason in mosaic_gpu.supported(x, weight, **options, interpret=False)


@pytest.mark.parametrize("rows", (65, 150, 192, 256, 384, 512, 4096))
@pytest.mark.parametrize("inner, columns, gated", [(4096, 6144, False), (14336, 4096, False), (4096, 28672, True)])
def test_lowers_for_a_gpu_where_it_is_worthwhile(inner, columns, gated, rows):
    x, weight = jax.ShapeDtypeStruct((rows, inner), jnp.bfloat16), jax.ShapeDtypeStruct((inner, columns), jnp.bfloat16)
    options = {"activation": jax.nn.silu} if gated else {}

    def run(x, weight):
        assert mosaic_gpu.supported(x, weight, **options, interpret=False) is None
        assert mosaic_gpu.worthwhile(x, weight, **options)
        return mosaic_gpu.exact_matmul(x, weight, **options, interpret=False)

    assert "mosaic_gpu" in cross_lower(run, "cuda", x, weight)


def test_the_contraction_is_divided_as_in_the_other_kernel():
    for inner, columns in ((4096, 6144), (14336, 4096), (4096, 28672), (576, 1536)):
        parts = mosaic_gpu.parts_of(inner, columns, jnp.bfloat16)
        for rows in (1, 64, 65, 192, 256, 257, 2048):
            config = triton.default_config(rows=rows, inner=inner, columns=columns, dtype=jnp.bfloat16)
            assert config.parts == parts and (parts == 1 or config.block_k == CONFIG.block_k)


def test_narrow_matrices_keep_a_gpu_busy(monkeypatch):
    """Few rows and columns are divided into narrower tiles, and the contraction as for many rows."""
    monkeypatch.setattr(triton.platform, "for_device_kind", lambda table: table["NVIDIA H100"])
    for inner, columns, gated in ((576, 960, 0), (576, 3072, 1), (1536, 576, 0), (1600, 576, 0), (3072, 1024, 0)):
        make = partial(triton.default_config, inner=inner, columns=columns, dtype="bfloat16", gated=bool(gated))
        few, many = make(rows=8), make(rows=300)
        programs = few.parts * math.ceil(columns / few.block_n)
        assert programs >= 96 or few.block_n == 16 << gated, (inner, columns)
        lengths = {math.ceil(math.ceil(inner / c.block_k) / c.parts) * c.block_k for c in (few, many)}
        assert few.parts == many.parts and (few.parts == 1 or len(lengths) == 1), (inner, columns)
        for rows in (17, 64, 100, 256):
            more = make(rows=rows)
            programs = math.ceil(rows / 64) * more.parts * math.ceil(columns / more.block_n)
            assert programs > 66 or more.block_n == 16 << gated, (inner, columns, rows)
            assert programs <= 132 or more.block_n == 128, (inner, columns, rows)
            assert (more.parts, more.block_k) == (many.parts, many.block_k), (inner, columns, rows)
    for rows in (8, 64):
        wide = triton.default_config(rows=rows, inner=4096, columns=6144, dtype="bfloat16")
        assert wide.block_n == 128 and wide.parts == 4


@pytest.mark.parametrize(
    ("inner", "columns", "gated", "rows"),
    [(576, 960, False, {128, 512}), (576, 3072, True, {128}), (2048, 1024, False, {128}), (4096, 4096, False, set())],
)
def test_small_products_of_many_rows_have_narrow_tiles_of_the_other_kernel(inner, columns, gated, rows, monkeypatch):
    """Its tiles of 64 rows and 128 columns would leave more than half of the multiprocessors idle."""
    monkeypatch.setattr(platform, "for_device_kind", lambda table: table.get("NVIDIA H100", table))
    options = {"activation": jax.nn.silu} if gated else {}
    weight = jnp.zeros((inner, columns), jnp.bfloat16)
    xs = {count: jnp.zeros((count, inner), jnp.bfloat16) for count in (128, 512, 2048)}
    assert {count for count, x in xs.items() if not mosaic_gpu.worthwhile(x, weight, **options)} == rows


@pytest.mark.skipif(HERE != "gpu", reason="needs a GPU: the shapes of real models")
@pytest.mark.parametrize(
    "inner, columns, options",
    [
        (4096, 6144, {}),
        (4096, 28672, {"activation": jax.nn.silu}),
        (4096, 28672, {"activation": layers.gelu}),
        (14336, 4096, {}),
        (4096, 128256, {}),
        (4096, 128256, {"transposed": True}),
        (576, 960, {}),
        (576, 3072, {"activation": jax.nn.silu}),
        (1536, 576, {}),
        (1024, 6144, {"activation": jax.nn.silu}),
        (2048, 1024, {}),
    ],
    ids=["qkv", "silu", "gelu", "down", "head", "embedding", "small qkv", "small silu", "small down", "silu 6", "o"],
)
def test_products_of_real_models(inner, columns, options):
    """Few and many rows, which different kernels and tiles multiply."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (2050, inner), jnp.bfloat16)
    shape = (columns, inner) if "transposed" in options else (inner, columns)
    weight = jax.random.normal(keys[1], shape, jnp.bfloat16) / 64
    run = jax.jit(partial(exact_matmul, **options))
    whole = np.asarray(run(x, weight))
    for first, count in (
        (0, 1),
        (383, 1),
        (5, 2),
        (100, 6),
        (64, 17),
        (1, 32),
        (300, 64),
        (10, 65),
        (0, 192),
        (7, 256),
        (3, 300),
        (0, 512),
    ):
        part = np.asarray(run(x[first : first + count], weight))
        same = part.view(np.uint16) == whole[first : first + count].view(np.uint16)
        assert same.all(), (first, count)
