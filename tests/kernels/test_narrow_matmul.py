"""Every backend of products with scaled 8-bit and packed 4-bit matrices against the widened matrix in float64."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import params
from crosslower import cross_lower

from pallas_kernels.packed_matmul import pack, packed_matmul, unpack
from pallas_kernels.packed_matmul import triton as packed
from pallas_kernels.scaled_matmul import OPERATION, scaled_matmul
from pallas_kernels.scaled_matmul import triton as scaled

SCALED = {
    "one_row": (1, 64, 40, 32, {}),
    "one_row_of_whole_columns": (1, 200, 130, 200, {}),
    "one_row_in_parts": (1, 512, 40, 48, {"dtype": "bfloat16", "narrow": "int8"}),
    "whole_columns": (6, 200, 40, 200, {}),
    "many_groups": (6, 256, 96, 32, {}),
    "the_last_group_is_short": (5, 200, 33, 128, {}),
    "one_short_group": (3, 40, 19, 128, {}),
    "many_rows": (70, 128, 48, 64, {}),
    "odd_groups": (4, 144, 24, 48, {}),
    "int8": (6, 256, 40, 128, {"narrow": "int8"}),
    "half_precision_in_parts": (6, 2048, 40, 128, {"dtype": "bfloat16"}),
}
PACKED = {
    "one_row": (1, 512, 40, 128, {}),
    "one_row_with_zeros": (1, 512, 40, 128, {"zeros": True, "dtype": "bfloat16"}),
    "one_row_of_whole_columns": (1, 384, 130, 384, {}),
    "one_row_and_groups_of_an_eighth_block": (1, 256, 40, 16, {"zeros": True}),
    "one_row_and_groups_of_two_blocks": (1, 512, 128, 256, {}),
    "one_row_and_a_short_group": (1, 384, 40, 256, {"zeros": True}),
    "whole_columns": (6, 384, 40, 384, {}),
    "zeros": (6, 256, 130, 128, {"zeros": True}),
    "zeros_in_half_precision": (6, 1024, 40, 128, {"zeros": True, "dtype": "bfloat16"}),
    "float16": (6, 1024, 128, 128, {"zeros": True, "dtype": "float16"}),
    "groups_of_a_quarter_block": (3, 256, 40, 32, {"zeros": True}),
    "rows_that_fill_no_block": (5, 200, 33, 200, {}),
    "one_row_and_a_short_section": (1, 296, 40, 32, {"zeros": True}),
    "a_short_section": (3, 168, 40, 64, {"zeros": True}),
    "many_rows": (70, 256, 48, 64, {}),
}
TOLERANCE = {
    scaled_matmul: {"float32": 1e-5, "bfloat16": 2e-2},
    packed_matmul: {"float32": 2e-5, "float16": 5e-3, "bfloat16": 2e-2},
}


def scaled_inputs(rows, inner, columns, group, dtype="float32", narrow="float8_e4m3fn"):
    """Arguments, and the widened matrix."""
    rng = np.random.default_rng([rows, inner, columns])
    x = rng.normal(size=(rows, inner)).astype(jnp.dtype(dtype))
    weight = (40 * rng.normal(size=(inner, columns))).astype(jnp.dtype(narrow))
    scale = (rng.uniform(0.2, 1, (-(-inner // group), columns)) * inner**-0.5 / 40).astype(np.float32)
    wide = weight.astype(np.float64) * np.repeat(scale.astype(np.float64), group, axis=0)[:inner]
    return (x, weight, scale), wide


def packed_inputs(rows, inner, columns, group, dtype="float32", zeros=False):
    """Arguments, and the widened matrix."""
    rng = np.random.default_rng([rows, inner, columns])
    x = rng.normal(size=(rows, inner)).astype(jnp.dtype(dtype))
    values, shape = rng.integers(0, 16, (inner, columns)), (-(-inner // group), columns)
    scale = (rng.uniform(0.2, 1, shape) * inner**-0.5 / 4).astype(np.float32)
    zero = rng.integers(0, 17, shape).astype(np.int8) if zeros else None
    centered = values - (np.repeat(zero, group, axis=0)[:inner] if zeros else 8)
    wide = centered * np.repeat(scale.astype(np.float64), group, axis=0)[:inner]
    return (x, pack(values), scale, zero), wide


CASES = {f"scaled-{name}": (scaled_matmul, scaled_inputs, case) for name, case in SCALED.items()}
CASES |= {f"packed-{name}": (packed_matmul, packed_inputs, case) for name, case in PACKED.items()}


@pytest.mark.slow(
    unless=(
        *(f"scaled-{name}" for name in ("one_row_of_whole_columns", "one_row_in_parts", "many_groups")),
        *("scaled-the_last_group_is_short", "scaled-half_precision_in_parts", "packed-one_row_with_zeros"),
        *("packed-one_row_and_a_short_section-triton", "packed-a_short_section-xla"),
        "packed-groups_of_a_quarter_block-triton",
    )
)
@pytest.mark.parametrize("backend", params("triton", "xla"))
@pytest.mark.parametrize("name", CASES)
def test_equals_the_product_with_the_widened_matrix(name, backend):
    function, make, (rows, inner, columns, group, options) = CASES[name]
    args, wide = make(rows, inner, columns, group, **options)
    out = jax.jit(partial(function, group=group, backend=backend))(*args)
    assert (out.dtype, out.shape) == (args[0].dtype, (rows, columns))
    tolerance = TOLERANCE[function][out.dtype.name]
    expected = args[0].astype(np.float64) @ wide
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance)


def test_one_scale_per_column_and_several_rows_run_on_xla(monkeypatch, without_jaxtyping):
    monkeypatch.setattr(type(OPERATION), "run", lambda self, backend, *args, **options: backend)
    (x, weight, scale), _ = scaled_inputs(6, 200, 40, 200)
    assert scaled_matmul(x, weight, scale, group=200) == "xla"
    assert scaled_matmul(x[:1], weight, scale, group=200) is None
    assert scaled_matmul(x, weight, np.ones((2, 40), np.float32), group=128) is None


@pytest.mark.slow
@pytest.mark.parametrize("rows", (1, 6))
def test_any_division_of_the_work_gives_the_same(rows):
    """Some programs have fewer of the 7 blocks than others, or none."""
    args, wide = packed_inputs(rows, 896, 40, 128, zeros=True)
    expected = args[0].astype(np.float64) @ wide
    block_m = 1 if rows == 1 else 16
    for unroll, parts in ((1, 8), (2, 2), (4, 1)):
        config = packed.Config(block_m, 32, unroll, parts, num_warps=4, num_stages=2)
        out = jax.jit(partial(packed.packed_matmul, group=128, config=config, interpret=True))(*args)
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5, err_msg=str(config))


def test_words_hold_the_values():
    """Against their definition: value i of word r of a block is that of row 16 * i + r of the block."""
    values = np.random.default_rng(0).integers(0, 16, (300, 5))
    words = np.asarray(jax.jit(pack)(values))
    assert words.dtype == np.int32 and words.shape == (48, 5)
    np.testing.assert_array_equal(words, pack(values))
    for row in range(384):
        block, place, word = row // 128, row % 128 // 16, row % 16
        found = (words[16 * block + word] >> (4 * place)) & 15
        np.testing.assert_array_equal(found, values[row] if row < 300 else 0)
    np.testing.assert_array_equal(jax.jit(unpack, static_argnums=1)(words, 300), values)


@pytest.mark.parametrize("kernel", (scaled, packed), ids=("scaled", "packed"))
def test_few_rows_are_spread_over_parts_and_many_are_not(kernel):
    shapes = {"inner": 4096, "columns": 4096, "dtype": jnp.bfloat16}

    def config(rows, group):
        return kernel.default_config(rows=rows, **shapes, **({"group": group} if kernel is scaled else {}))

    one, few, many = config(1, 4096), config(6, 128), config(512, 128)
    assert one.block_m == 1 and one.parts > 4 and few.block_m == 16 and many.block_m > 16 and many.parts == 1
    if kernel is packed:
        assert few.parts > 4
    else:
        assert one.parts == 32 and few.parts > 1 and many.block_m == 128 and config(6, 96).block_k == 32


@pytest.mark.parametrize("rows", (1, 6, 200))
@pytest.mark.parametrize("narrow", ("float8_e4m3fn", "int8"))
def test_scaled_matrices_lower_for_a_gpu(rows, narrow):
    args = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((rows, 1000), "bfloat16"), ((1000, 640), narrow), ((8, 640), "float32"))
    ]
    assert "triton" in cross_lower(partial(scaled.scaled_matmul, group=128, interpret=False), "cuda", *args)
    args[2] = jax.ShapeDtypeStruct((1, 640), "float32")
    assert "triton" in cross_lower(partial(scaled.scaled_matmul, group=1000, interpret=False), "cuda", *args)


@pytest.mark.slow(unless=("32-False-1", "128-True-6"))
@pytest.mark.parametrize("rows", (1, 6, 200))
@pytest.mark.parametrize(("group", "zeros"), [(128, True), (32, False), (1024, True)])
def test_packed_matrices_lower_for_a_gpu(rows, group, zeros):
    shape = -(-1024 // group), 640
    args = [
        jax.ShapeDtypeStruct(*each)
        for each in (((rows, 1024), "bfloat16"), ((128, 640), "int32"), (shape, "float32"), (shape, "int8"))
    ]
    args[3] = args[3] if zeros else None
    run = partial(packed.packed_matmul, group=group, interpret=False)
    assert "triton" in cross_lower(run, "cuda", *args)
    # Some columns of the last tile, and some blocks of the last iteration, are not there.
    config = dataclasses.replace(
        packed.default_config(rows=rows, inner=1024, columns=640, dtype="bfloat16"), block_n=256, unroll=3
    )
    assert "triton" in cross_lower(partial(run, config=config), "cuda", *args)


def test_arguments_that_do_not_fit_are_refused(without_jaxtyping):
    (x, weight, scale), _ = scaled_inputs(6, 256, 96, 32)
    with pytest.raises(ValueError, match=r"scale \(8, 96\), weight \(256, 96\), group=64: must be \[G, N\]"):
        scaled_matmul(x, weight, scale, group=64)
    with pytest.raises(ValueError, match=r"weight float32\[256, 96\]: must be \[T, K\] and \[K, N\] of 8 bits"):
        scaled_matmul(x, weight.astype(np.float32), scale, group=32)
    with pytest.raises(ValueError, match=r"backend='triton' cannot run: group=8: must be a multiple of 16"):
        scaled_matmul(x, weight, np.ones((32, 96), np.float32), group=8, backend="triton")
    (x, words, scale, zero), _ = packed_inputs(6, 256, 96, 32, zeros=True)
    with pytest.raises(ValueError, match=r"words int32\[16, 96\]: must be \[T, K\] and int32 \[W, N\], with W = 32"):
        packed_matmul(x, words[:16], scale, zero, group=32)
    with pytest.raises(ValueError, match=r"words float32\[32, 96\]: must be"):
        packed_matmul(x, words.astype(np.float32), scale, zero, group=32)
    for group in (24, 0):
        with pytest.raises(ValueError, match=rf"group={group}: must be a multiple of 16, or at least 256"):
            packed_matmul(x, words, scale, zero, group=group)
    with pytest.raises(
        ValueError, match=r"scale \(8, 96\), zero None, words \(32, 96\), group=64: .* must be \(4, 96\)"
    ):
        packed_matmul(x, words, scale, group=64)
    with pytest.raises(
        ValueError, match=r"zero \(4, 96\), words \(32, 96\), group=32: scale and zero must be \(8, 96\)"
    ):
        packed_matmul(x, words, scale, zero[:4], group=32)
    with pytest.raises(ValueError, match=r"backend='triton' cannot run: group=48: must divide 128, or be a multiple"):
        packed_matmul(x, words, np.ones((6, 96), np.float32), group=48, backend="triton")
