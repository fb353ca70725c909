"""Every backend of products with packed 4-bit matrices against the widened matrix in float64."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import each_backend
from crosslower import cross_lower

from pallas_kernels.packed_matmul import OPERATION, pack, packed_matmul, triton, unpack

TOLERANCE = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 2e-2}
CASES = {
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


def inputs(rows, inner, columns, group, dtype="float32", zeros=False):
    """Arguments, and the values of the matrix minus their zero points."""
    rng = np.random.default_rng([rows, inner, columns])
    x = rng.normal(size=(rows, inner)).astype(jnp.dtype(dtype))
    values, shape = rng.integers(0, 16, (inner, columns)), (-(-inner // group), columns)
    scale = (rng.uniform(0.2, 1, shape) * inner**-0.5 / 4).astype(np.float32)
    zero = rng.integers(0, 17, shape).astype(np.int8) if zeros else None
    centered = values - (np.repeat(zero, group, axis=0)[:inner] if zeros else 8)
    wide = centered * np.repeat(scale.astype(np.float64), group, axis=0)[:inner]
    return (x, pack(values), scale, zero), wide


@pytest.mark.slow(
    unless=(
        "one_row_with_zeros",
        "one_row_and_a_short_section-triton",
        "a_short_section-xla",
        "groups_of_a_quarter_block-triton",
    )
)
@each_backend(OPERATION)
@pytest.mark.parametrize(("rows", "inner", "columns", "group", "options"), CASES.values(), ids=CASES)
def test_equals_the_product_with_the_widened_matrix(rows, inner, columns, group, options, backend):
    args, wide = inputs(rows, inner, columns, group, **options)
    run = partial(packed_matmul, group=group, backend=backend)
    out = jax.jit(run)(*args)
    assert (out.dtype, out.shape) == (args[0].dtype, (rows, columns))
    tolerance = TOLERANCE[out.dtype.name]
    expected = args[0].astype(np.float64) @ wide
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("rows", (1, 6))
def test_any_division_of_the_work_gives_the_same(rows):
    """Some programs have fewer of the 7 blocks than others, or none."""
    args, wide = inputs(rows, 896, 40, 128, zeros=True)
    expected = args[0].astype(np.float64) @ wide
    block_m = 1 if rows == 1 else 16
    for unroll, parts in ((1, 8), (2, 2), (4, 1)):
        config = triton.Config(block_m, 32, unroll, parts, num_warps=4, num_stages=2)
        out = jax.jit(partial(triton.packed_matmul, group=128, config=config, interpret=True))(*args)
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


def test_few_rows_are_spread_over_parts_and_many_are_not():
    one = triton.default_config(rows=1, inner=4096, columns=4096, dtype=jnp.bfloat16)
    few = triton.default_config(rows=6, inner=4096, columns=4096, dtype=jnp.bfloat16)
    many = triton.default_config(rows=512, inner=4096, columns=4096, dtype=jnp.bfloat16)
    assert one.block_m == 1 and one.parts > 4
    assert few.block_m == 16 and few.parts > 4
    assert many.block_m > 16 and many.parts == 1


@pytest.mark.slow(unless=("32-False-1", "128-True-6"))
@pytest.mark.parametrize("rows", (1, 6, 200))
@pytest.mark.parametrize(("group", "zeros"), [(128, True), (32, False), (1024, True)])
def test_lowers_for_a_gpu(rows, group, zeros):
    shape = -(-1024 // group), 640
    args = [
        jax.ShapeDtypeStruct(*each)
        for each in (((rows, 1024), "bfloat16"), ((128, 640), "int32"), (shape, "float32"), (shape, "int8"))
    ]
    args[3] = args[3] if zeros else None
    run = partial(triton.packed_matmul, group=group, interpret=False)
    assert "triton" in cross_lower(run, "cuda", *args)
    # Some columns of the last tile, and some blocks of the last iteration, are not there.
    config = dataclasses.replace(
        triton.default_config(rows=rows, inner=1024, columns=640, dtype="bfloat16"), block_n=256, unroll=3
    )
    assert "triton" in cross_lower(partial(run, config=config), "cuda", *args)


def test_arguments_that_do_not_fit_are_refused(without_jaxtyping):
    (x, words, scale, zero), _ = inputs(6, 256, 96, 32, zeros=True)
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
