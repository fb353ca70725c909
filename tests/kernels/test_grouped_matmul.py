"""Every backend of grouped matrix products against a loop over rows in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import each_backend, requires
from crosslower import cross_lower

from pallas_kernels import platform
from pallas_kernels.grouped_matmul import OPERATION, grouped_matmul, triton
from pallas_kernels.packed_matmul import E2M1, INTEGERS, pack

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
backends = each_backend(OPERATION)


def inputs(sizes, inner=48, columns=40, dtype="float32"):
    """Arguments of `grouped_matmul`; the matrices of empty groups are NaN."""
    rng = np.random.default_rng([*sizes, inner, columns])
    x = rng.normal(size=(sum(sizes), inner)).astype(jnp.dtype(dtype))
    weight = (rng.normal(size=(len(sizes), inner, columns)) * inner**-0.5).astype(jnp.dtype(dtype))
    weight[np.array(sizes) == 0] = np.nan
    return x, weight, np.array(sizes, np.int32)


def oracle(x, weight, sizes):
    group = np.repeat(np.arange(len(sizes)), sizes)
    wide = weight.astype(np.float64)
    return np.stack([row.astype(np.float64) @ wide[number] for row, number in zip(x, group, strict=True)])


def gated(expected, activation):
    """The first half of the columns gates the second."""
    if activation is None:
        return expected
    gate, other = np.split(expected, 2, axis=1)
    return np.asarray(activation(jnp.asarray(gate, jnp.float32)), np.float64) * other


def assert_close(out, expected, dtype="float32"):
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


CASES = {
    "one_row": ((0, 0, 1, 0), {}),
    "one_each": ((1,) * 7, {}),
    "first_and_last": ((3, 0, 0, 0, 2), {}),
    "full_blocks": ((16, 32, 0, 16), {}),
    "many_blocks": ((0, 50, 1, 33), {}),
    "one_group": ((21,), {}),
    "odd_sizes": ((2, 0, 5), {"inner": 37, "columns": 19}),
    "bfloat16": ((4, 0, 18, 1), {"dtype": "bfloat16", "inner": 256, "columns": 96}),
}


@pytest.mark.slow(unless=("one_each", "many_blocks", "odd_sizes", "bfloat16"))
@backends
@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=CASES)
def test_equals_a_loop_over_rows(sizes, options, backend):
    """Matrices of empty groups do not affect the result; XLA may multiply them by zero, so it gets no NaN."""
    x, weight, counts = inputs(sizes, **options)
    given = np.where(np.isnan(weight), 0, weight).astype(weight.dtype) if backend == "xla" else weight
    out = jax.jit(partial(grouped_matmul, backend=backend))(x, given, counts)
    assert (out.dtype, out.shape) == (x.dtype, (sum(sizes), weight.shape[2]))
    assert_close(out, oracle(x, weight, counts), options.get("dtype", "float32"))


@pytest.mark.slow(unless=("float32-silu", "bfloat16--triton"))
@backends
@pytest.mark.parametrize(
    "activation", (None, jax.nn.silu, partial(jax.nn.gelu, approximate=True)), ids=("", "silu", "gelu")
)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_are_chosen_and_gated(dtype, activation, backend):
    """Rows are chosen by index, and groups may share them; the first half of the columns gates the second."""
    sizes = (2, 0, 17, 5)
    x, weight, counts = inputs(sizes, columns=72, dtype=dtype)
    given = np.where(np.isnan(weight), 0, weight).astype(weight.dtype) if backend == "xla" else weight
    rows = np.random.default_rng(1).integers(0, 9, sum(sizes), dtype=np.int32)
    # The last two rows are not chosen, so they must not be read.
    few = np.concatenate([x[:9], np.full_like(x[:2], np.nan)])
    out = jax.jit(partial(grouped_matmul, activation=activation, backend=backend))(few, given, counts, rows=rows)
    expected = gated(oracle(few[rows], weight, counts), activation)
    assert (out.dtype, out.shape) == (x.dtype, expected.shape)
    assert_close(out, expected, dtype)


@pytest.mark.slow(unless=("blocks0-", "blocks2-silu"))
@requires("triton")
@pytest.mark.parametrize("activation", (None, jax.nn.silu), ids=("", "silu"))
@pytest.mark.parametrize("blocks", ((16, 32, 16), (32, 64, 64), (128, 32, 32)))
def test_the_result_does_not_depend_on_the_tuning(blocks, activation):
    args = inputs((0, 50, 1, 33, 128))
    config = triton.Config(*blocks, num_warps=4, num_stages=2)
    out = jax.jit(partial(triton.grouped_matmul, activation=activation, config=config))(*args)
    expected = jax.jit(partial(grouped_matmul, activation=activation, backend="xla"))(*map(np.nan_to_num, args))
    assert_close(out, np.asarray(expected, np.float64))


REAL = {
    "v2_lite_one_token": (6, 64, 2048, 2816, "bfloat16"),
    "v2_lite_verify": (288, 64, 1408, 2048, "bfloat16"),
    "v3_prefill": (4096, 256, 7168, 4096, "bfloat16"),
    "float32": (12, 8, 2048, 2816, "float32"),
}


@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
def test_lowers_for_a_gpu(shape):
    rows, groups, inner, columns, dtype = shape
    new = jax.ShapeDtypeStruct
    args = new((rows, inner), dtype), new((groups, inner, columns), dtype), new((groups,), "int32")
    assert "gpu.triton" in cross_lower(partial(triton.grouped_matmul, interpret=False), "cuda", *args)
    gated = partial(triton.grouped_matmul, activation=jax.nn.silu, interpret=False)
    chosen = new((2 * rows,), "int32")
    assert "gpu.triton" in cross_lower(lambda *args: gated(*args[:3], rows=args[3]), "cuda", *args, chosen)


def test_blocks_fit_a_gpu():
    for dtype in ("bfloat16", "float32"):
        for rows in (1, 6, 288, 4096, 100_000):
            config = triton.default_config(rows=rows, groups=64, dtype=dtype)
            elements = (config.block_m + config.block_n) * config.block_k * config.num_stages
            assert elements * jnp.dtype(dtype).itemsize <= 227 * 1024


@pytest.mark.parametrize(("here", "call"), (("gpu", "gpu.triton"), ("tpu", None), ("cpu", None)))
def test_the_best_backend_of_a_platform(here, call, monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: here)
    new = jax.ShapeDtypeStruct
    args = new((6, 32), "bfloat16"), new((4, 32, 64), "bfloat16"), new((4,), "int32")
    text = cross_lower(grouped_matmul, {"gpu": "cuda"}.get(here, "tpu"), *args)
    assert (call in text) if call else ("gpu.triton" not in text)


def test_unsupported_arguments(monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    new = jax.ShapeDtypeStruct
    args = new((6, 32), "float8_e4m3fn"), new((4, 32, 64), "float8_e4m3fn"), new((4,), "int32")
    with pytest.raises(ValueError, match="cannot run: x is float8_e4m3fn: must be one of bfloat16"):
        jax.eval_shape(partial(grouped_matmul, backend="triton"), *args)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (lambda x, weight, sizes: (x[:, 1:], weight, sizes), r"must be \[T, K\], \[X, K, N\] and \[X\]"),
        (lambda x, weight, sizes: (x, weight, sizes[1:]), r"sizes \(1,\): must be"),
        (
            lambda x, weight, sizes: (x.astype(jnp.bfloat16), weight, sizes),
            "must have the same dtype, not bfloat16 and float32",
        ),
        (
            lambda x, weight, sizes: (x, weight[..., 1:], sizes),
            "must have an even number of columns with an activation",
        ),
    ),
    ids=("inner", "sizes", "dtype", "halves"),
)
def test_arguments_that_do_not_fit_are_an_error(change, message, without_jaxtyping):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(*map(jnp.asarray, change(*inputs((1, 2)))), activation=jax.nn.silu)


@pytest.mark.slow(unless=("columns-float8_e4m3fn-gated", "groups-int8-plain", "groups-float8_e4m3fn-gated-triton"))
@backends
@pytest.mark.parametrize("activation", (None, jax.nn.silu), ids=("plain", "gated"))
@pytest.mark.parametrize("narrow", ("float8_e4m3fn", "int8"))
@pytest.mark.parametrize("group", (None, 16), ids=("columns", "groups"))
def test_8_bit_matrices_are_widened_and_scaled(group, narrow, activation, backend):
    sizes = (2, 0, 17, 5)
    x, wide, counts = inputs(sizes, inner=37, columns=38)
    weight = np.where(np.isnan(wide), 0, 40 * wide).astype(jnp.dtype(narrow))
    scale = np.random.default_rng(2).uniform(0.01, 0.1, (4, 3 if group else 1, 38)).astype(np.float32)
    run = jax.jit(partial(grouped_matmul, group=group, activation=activation, backend=backend))
    out = run(x, weight, counts, scale=scale)
    expected = oracle(x, weight.astype(np.float64) * np.repeat(scale, group or 37, axis=1)[:, :37], counts)
    assert_close(out, gated(expected, activation))


@pytest.mark.parametrize("group", (None, 128))
@pytest.mark.parametrize("narrow", ("float8_e4m3fn", "int8"))
def test_8_bit_matrices_lower_for_a_gpu(narrow, group):
    scale = ((8, 2 if group else 1, 512), "float32")
    shapes = [((6, 256), "bfloat16"), ((8, 256, 512), narrow), ((8,), "int32"), scale]
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    kernel = partial(triton.grouped_matmul, activation=jax.nn.silu, interpret=False)
    assert "triton" in cross_lower(lambda *a: kernel(*a[:3], scale=a[3], group=group), "cuda", *args)


def test_scales_that_do_not_fit_are_refused(without_jaxtyping):
    x, weight, counts = inputs((2, 3))
    narrow, scale = weight.astype(np.int8), np.ones((2, 1, 40), np.float32)
    with pytest.raises(
        ValueError, match=r"scale \(2, 1, 39\) of a weight int8\[2, 48, 40\], group=None: must be \[2, 1, 40\]"
    ):
        grouped_matmul(x, narrow, counts, scale=scale[..., 1:])
    with pytest.raises(ValueError, match=r"scale \(2, 1, 40\) of a weight float32.*, of 8-bit weights"):
        grouped_matmul(x, weight, counts, scale=scale)
    with pytest.raises(ValueError, match="exact=True: requires a weight of 16 or 32 bits"):
        grouped_matmul(x, narrow, counts, scale=scale, exact=True)


E2M1_VALUES = [sign * each for sign in (1, -1) for each in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
PACKED = {
    "zeros": (INTEGERS, 32, "bfloat16", jax.nn.silu),
    "columns": (INTEGERS, None, "float32", None),
    "blocks": (INTEGERS, 128, "float32", None),
    "e2m1": (E2M1, 32, "float32", jax.nn.silu),
    "e2m1_in_half_precision": (E2M1, 32, "bfloat16", None),
}


def packed_inputs(codes, group, dtype, sizes=(2, 0, 17, 5), inner=200, columns=38):
    """Arguments with matrices in words, options, and the widened matrices in float64."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(sum(sizes), inner)).astype(jnp.dtype(dtype))
    values = rng.integers(0, 16, (len(sizes), inner, columns)).astype(np.int8)
    shape = (len(sizes), -(-inner // (group or inner)), columns)
    if codes == E2M1:
        scale, zero = rng.integers(120, 125, shape).astype(np.uint8), None
        factors, wide = np.exp2(scale - 127.0), np.array(E2M1_VALUES)[values]
    else:
        factors = scale = rng.uniform(0.005, 0.02, shape).astype(np.float32)
        zero = rng.integers(0, 17, shape).astype(np.int8) if group == 32 else None
        wide = values - (8 if zero is None else np.repeat(zero, group, axis=1)[:, :inner])
    options = {"scale": scale, "zero": zero, "group": group, "codes": codes}
    return (
        (x, pack(values), np.array(sizes, np.int32)),
        options,
        wide * np.repeat(factors, group or inner, 1)[:, :inner],
    )


@pytest.mark.slow(unless=("zeros-xla", "e2m1-triton"))
@backends
@pytest.mark.parametrize(("codes", "group", "dtype", "activation"), PACKED.values(), ids=PACKED)
def test_packed_matrices_are_taken_apart_and_scaled(codes, group, dtype, activation, backend):
    args, options, wide = packed_inputs(codes, group, dtype)
    static = {name: options.pop(name) for name in ("group", "codes")}
    out = jax.jit(partial(grouped_matmul, **static, activation=activation, backend=backend))(*args, **options)
    expected = gated(oracle(args[0], wide, args[2]), activation)
    assert (out.dtype, out.shape) == (args[0].dtype, expected.shape)
    assert_close(out, expected, dtype)


@pytest.mark.parametrize("rows", (8, 4096))
@pytest.mark.parametrize("codes", (INTEGERS, E2M1))
def test_packed_matrices_lower_for_a_gpu(codes, rows):
    """At the shapes of gpt-oss, in which a column ends within a block."""
    scale, zero = ((32, 90, 5760), "uint8"), ((32, 90, 5760), "int8")
    shapes = [((rows, 2880), "bfloat16"), ((32, 368, 5760), "int32"), ((32,), "int32"), scale, zero]
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    if codes == INTEGERS:
        args[3] = jax.ShapeDtypeStruct(scale[0], "float32")
    kernel = partial(triton.grouped_matmul, activation=jax.nn.silu, group=32, codes=codes, interpret=False)

    def run(x, words, sizes, scale, zero):
        return kernel(x, words, sizes, scale=scale, zero=zero if codes == INTEGERS else None)

    assert "gpu.triton" in cross_lower(run, "cuda", *args)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"codes": "e2m1"}, r"codes='e2m1' of a weight int32\[4, 32, 38\]: must be one of int4, float4_e2m1fn"),
        ({"weight": np.int8}, r"codes='int4' of a weight int8.*of words in int32"),
        ({"weight": slice(16)}, r"must be \[T, K\], \[X, 32, N\] and \[X\]"),
        ({"group": 24}, "group=24: must be a multiple of 16, or at least 200"),
        ({"scale": None}, r"scale None, group=32: must be float32 or uint8\[4, 7, 38\]"),
        ({"zero": np.int32}, r"zero int32\[4, 7, 38\], codes='int4': must be int8"),
        ({"codes": E2M1}, "must be int8.*with codes='int4'"),
        ({"codes": None, "weight": slice(0, 200)}, "must be"),
        ({"group": 48, "backend": "triton"}, "group=48: must divide 128, or be a multiple of it"),
    ),
    ids=str,
)
def test_packed_matrices_that_do_not_fit_are_an_error(change, message, without_jaxtyping):
    (x, words, sizes), options, _ = packed_inputs(INTEGERS, 32, "float32")
    for name, value in change.items():
        if name == "weight":
            words = words[:, value] if isinstance(value, slice) else words.astype(value)
        elif name == "zero":
            options["zero"] = options["zero"].astype(value)
        else:
            options[name] = value
    if change.get("group") == 48:
        options |= {name: options[name][:, :5] for name in ("scale", "zero")}
    with pytest.raises(ValueError, match=message):
        grouped_matmul(x, words, sizes, **options)
