"""Every backend of products with scaled 8-bit matrices against the widened matrix in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import each_backend
from crosslower import cross_lower

from pallas_kernels.scaled_matmul import OPERATION, scaled_matmul, triton

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
CASES = {
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


def inputs(rows, inner, columns, group, dtype="float32", narrow="float8_e4m3fn"):
    rng = np.random.default_rng([rows, inner, columns])
    x = rng.normal(size=(rows, inner)).astype(jnp.dtype(dtype))
    weight = (40 * rng.normal(size=(inner, columns))).astype(jnp.dtype(narrow))
    scale = rng.uniform(0.2, 1, (-(-inner // group), columns)) * inner**-0.5 / 40
    return x, weight, scale.astype(np.float32)


def oracle(x, weight, scale, group):
    wide = weight.astype(np.float64) * np.repeat(scale.astype(np.float64), group, axis=0)[: len(weight)]
    return x.astype(np.float64) @ wide


@pytest.mark.slow(
    unless=(
        "one_row_of_whole_columns",
        "one_row_in_parts",
        "many_groups",
        "the_last_group_is_short",
        "half_precision_in_parts",
    )
)
@each_backend(OPERATION)
@pytest.mark.parametrize(("rows", "inner", "columns", "group", "options"), CASES.values(), ids=CASES)
def test_equals_the_product_with_the_widened_matrix(rows, inner, columns, group, options, backend):
    x, weight, scale = inputs(rows, inner, columns, group, **options)
    out = jax.jit(partial(scaled_matmul, group=group, backend=backend))(x, weight, scale)
    assert (out.dtype, out.shape) == (x.dtype, (rows, columns))
    tolerance = TOLERANCE[x.dtype.name]
    np.testing.assert_allclose(
        np.asarray(out, np.float64), oracle(x, weight, scale, group), rtol=tolerance, atol=tolerance
    )


def test_one_scale_per_column_and_several_rows_run_on_xla(monkeypatch, without_jaxtyping):
    monkeypatch.setattr(type(OPERATION), "run", lambda self, backend, *args, **options: backend)
    x, weight, scale = inputs(6, 200, 40, 200)
    assert scaled_matmul(x, weight, scale, group=200) == "xla"
    assert scaled_matmul(x[:1], weight, scale, group=200) is None
    assert scaled_matmul(x, weight, np.ones((2, 40), np.float32), group=128) is None


def test_few_rows_are_spread_over_parts_and_many_are_not():
    one = triton.default_config(rows=1, inner=4096, columns=4096, group=4096, dtype=jnp.bfloat16)
    assert one.block_m == 1 and one.parts == 32
    few = triton.default_config(rows=6, inner=4096, columns=4096, group=128, dtype=jnp.bfloat16)
    many = triton.default_config(rows=512, inner=4096, columns=4096, group=128, dtype=jnp.bfloat16)
    assert few.parts > 1 and few.block_m == 16 and many.parts == 1 and many.block_m == 128
    assert triton.default_config(rows=6, inner=4096, columns=4096, group=96, dtype=jnp.bfloat16).block_k == 32


@pytest.mark.parametrize("rows", (1, 6, 200))
@pytest.mark.parametrize("narrow", ("float8_e4m3fn", "int8"))
def test_lowers_for_a_gpu(rows, narrow):
    args = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((rows, 1000), "bfloat16"), ((1000, 640), narrow), ((8, 640), "float32"))
    ]
    assert "triton" in cross_lower(partial(triton.scaled_matmul, group=128, interpret=False), "cuda", *args)
    args[2] = jax.ShapeDtypeStruct((1, 640), "float32")
    assert "triton" in cross_lower(partial(triton.scaled_matmul, group=1000, interpret=False), "cuda", *args)


def test_arguments_that_do_not_fit_are_refused(without_jaxtyping):
    x, weight, scale = inputs(6, 256, 96, 32)
    with pytest.raises(ValueError, match=r"scale \(8, 96\), weight \(256, 96\), group=64: must be \[G, N\]"):
        scaled_matmul(x, weight, scale, group=64)
    with pytest.raises(ValueError, match=r"weight float32\[256, 96\]: must be \[T, K\] and \[K, N\] of 8 bits"):
        scaled_matmul(x, weight.astype(np.float32), scale, group=32)
    with pytest.raises(ValueError, match=r"backend='triton' cannot run: group=8: must be a multiple of 16"):
        scaled_matmul(x, weight, np.ones((32, 96), np.float32), group=8, backend="triton")
