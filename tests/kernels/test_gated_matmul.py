"""Every backend of the first half of a gated MLP against the equations in float64, and which of them runs."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import each_backend, requires, target_other_gpu
from crosslower import cross_lower

from pallas_kernels import platform
from pallas_kernels.gated_matmul import OPERATION, gated_matmul, mosaic_gpu

backends = each_backend(OPERATION)
GELU = partial(jax.nn.gelu, approximate=True)
CONFIG = mosaic_gpu.Config(warpgroups=2, blocks=1, columns=128, sharing=1, block_k=64, stages=3)


def inputs(tokens, inner, width, dtype="bfloat16"):
    rng = np.random.default_rng([tokens, inner, width])
    x, weight = rng.normal(size=(tokens, inner)), rng.normal(size=(inner, 2 * width)) * inner**-0.5
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


def expected(x, weight, activation):
    gate, other = np.split(np.asarray(x, np.float64) @ np.asarray(weight, np.float64), 2, axis=1)
    return np.asarray(activation(jnp.asarray(gate, jnp.float32)), np.float64) * other


def assert_close(found, x, weight, activation):
    assert (found.dtype, found.shape) == (x.dtype, (len(x), weight.shape[1] // 2))
    np.testing.assert_allclose(np.asarray(found, np.float64), expected(x, weight, activation), rtol=2e-2, atol=2e-2)


SHAPES = {
    "one tile": (64, 64, 128),
    "a row": (1, 128, 64),
    "8 rows": (8, 64, 256),
    "rows that fill no tile": (70, 128, 192),
    "three warpgroups": (150, 128, 128),
    "two blocks of rows": (200, 192, 64),
    "two tiles of rows": (264, 64, 192),
    "columns that fill no tile": (16, 64, 320),
    "more steps than stages": (24, 768, 64),
}


@pytest.mark.slow(unless=("three warpgroups", "columns that fill no tile", "more steps than stages"))
@backends
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_equations(shape, backend):
    x, weight = inputs(*shape)
    run = jax.jit(partial(gated_matmul, activation=jax.nn.silu, backend=backend))
    assert_close(run(x, weight), x, weight, jax.nn.silu)


@backends
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_other_activations_and_types(dtype, backend):
    x, weight = inputs(40, 128, 128, dtype)
    assert_close(gated_matmul(x, weight, activation=GELU, backend=backend), x, weight, GELU)


@backends
def test_a_batch_of_rows(backend):
    x, weight = inputs(24, 64, 128)
    run = partial(gated_matmul, weight=weight, activation=jax.nn.silu, backend=backend)
    np.testing.assert_array_equal(run(x.reshape(4, 6, -1)), run(x).reshape(4, 6, -1))


@requires("mosaic_gpu")
@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(CONFIG, **change)
        for change in (
            {"warpgroups": 1},
            {"warpgroups": 3},
            {"blocks": 2, "columns": 64},
            {"block_k": 128, "stages": 2},
            {"stages": 2},
        )
    ],
    ids=str,
)
def test_the_result_does_not_depend_on_the_tuning(config, monkeypatch):
    """Few programs, each of which has several tiles."""
    monkeypatch.setattr(platform, "processors", lambda: 2)
    x, weight = inputs(200, 256, 320)
    assert_close(mosaic_gpu.gated_matmul(x, weight, activation=jax.nn.silu, config=config), x, weight, jax.nn.silu)


@pytest.mark.slow(unless="xla")
@backends
def test_gradients_are_those_of_plain_products(backend):
    x, weight = inputs(20, 64, 64, "float16")

    def loss(run, x, weight):
        return jnp.sum(run(x, weight).astype(jnp.float32) ** 2)

    def plain(x, weight):
        gate, other = jnp.split(jnp.dot(x, weight, preferred_element_type=jnp.float32), 2, axis=1)
        return jax.nn.silu(gate) * other

    run = partial(gated_matmul, activation=jax.nn.silu, backend=backend)
    for ours, theirs in zip(
        jax.grad(partial(loss, run), argnums=(0, 1))(x, weight),
        jax.grad(partial(loss, plain), argnums=(0, 1))(x, weight),
        strict=True,
    ):
        np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=5e-2, atol=5e-2)


REAL = {"llama 8b": (192, 4096, 14336), "qwen3 32b": (96, 5120, 25600), "odd rows": (150, 2560, 10240)}


@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
def test_lowers_for_a_gpu(shape):
    tokens, inner, width = shape
    args = jax.ShapeDtypeStruct((tokens, inner), jnp.bfloat16), jax.ShapeDtypeStruct((inner, 2 * width), jnp.bfloat16)
    run = partial(mosaic_gpu.gated_matmul, activation=jax.nn.silu, interpret=False)
    assert "mosaic_gpu" in cross_lower(run, "cuda", *args)


def chooses_the_kernel(tokens, inner, width, dtype="bfloat16"):
    new = jax.ShapeDtypeStruct
    args = new((tokens, inner), dtype), new((inner, 2 * width), dtype)
    jaxpr = str(jax.make_jaxpr(partial(gated_matmul, activation=jax.nn.silu))(*args))
    return "gated_matmul" in jaxpr and "dot_general" not in jaxpr


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [
        ((192, 4096, 14336), True),
        ((256, 4096, 14336), True),
        ((384, 4096, 14336), True),
        # A step reads the weight, and nothing else takes time.
        ((32, 4096, 14336), False),
        # Three quarters of the rows of two tiles.
        ((300, 4096, 14336), False),
        # 56 tiles for 132 multiprocessors; the weight of one of two devices.
        ((192, 4096, 7168), False),
        ((4096, 4096, 14336), False),
        ((192, 4096, 14336, "float32"), False),
        ((192, 4100, 14336), False),
        ((192, 4096, 14300), False),
    ],
    ids=str,
)
def test_the_kernel_runs_where_it_is_worthwhile(shape, kernel, monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    assert chooses_the_kernel(*shape) == kernel
    monkeypatch.setattr(platform, "platform", lambda: "tpu")
    assert not chooses_the_kernel(*shape)


def test_the_kernel_is_for_hopper(monkeypatch):
    target_other_gpu(monkeypatch)
    assert not chooses_the_kernel(192, 4096, 14336)
    x, weight = inputs(64, 64, 64)
    run = partial(gated_matmul, x, weight, backend="mosaic_gpu")
    with pytest.raises(ValueError, match="cannot run: compute capability 10.0: must be 9.x"):
        run(activation=jax.nn.silu)
    with pytest.raises(ValueError, match="activation is .*: must not have a derivative rule of its own"):
        run(activation=jax.nn.relu)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        ((8, 64), (32, 128), r"x \(8, 64\) and weight \(32, 128\): must be \[..., K\] and \[K, N\]"),
        ((8, 64), (2, 64, 128), r"must be \[..., K\] and \[K, N\]"),
        ((8, 64), (64, 127), r"weight \(64, 127\): must be \[K, N\] with an even N"),
    ],
)
def test_arguments_that_do_not_fit_are_an_error(x, weight, message, without_jaxtyping):
    with pytest.raises(ValueError, match=message):
        gated_matmul(jnp.zeros(x), jnp.zeros(weight), activation=jax.nn.silu)


@pytest.mark.parametrize("change", ({"block_k": 128}, {"columns": 128}), ids=str)
def test_a_configuration_that_does_not_suit_the_matrix_is_an_error(change):
    x, weight = inputs(8, 192, 64)
    config = dataclasses.replace(CONFIG, **{"columns": 64} | change)
    with pytest.raises(ValueError, match="block_k must divide 192, and columns be at most 64"):
        mosaic_gpu.gated_matmul(x, weight, activation=jax.nn.silu, config=config)


def test_types_that_do_not_fit_are_an_error():
    with pytest.raises(ValueError, match="x and weight must have the same dtype, not float32 and float16"):
        gated_matmul(jnp.zeros((8, 64)), jnp.zeros((64, 128), jnp.float16), activation=jax.nn.silu)
    x, weight = inputs(8, 64, 64, "float32")
    with pytest.raises(ValueError, match="cannot run: x is float32: must be one of bfloat16, float16"):
        gated_matmul(x, weight, activation=jax.nn.silu, backend="mosaic_gpu")
