"""Every backend of top-k against `lax.top_k` and a sum in float64."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import each_backend, requires
from crosslower import cross_lower
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jax import lax

from jspec.core import grow
from pallas_kernels import platform
from pallas_kernels.topk import OPERATION, mosaic_tpu, topk, triton

backends = each_backend(OPERATION)


@cache
def program(k, backend, config=None):
    if config is None:
        return jax.jit(partial(topk, k=k, backend=backend))
    return jax.jit(partial(OPERATION.module(backend).topk, k=k, config=config))


def check(logits, k, run):
    """Values and indices are those of `lax.top_k` on a CPU after NaN becomes -inf, and -0 becomes 0."""
    values, indices, total = run(logits)
    x = np.asarray(logits, np.float32)
    x = np.where(np.isnan(x), np.float32(-np.inf), x) + np.float32(0)
    with jax.default_device(jax.devices("cpu")[0]):
        expected, places = lax.top_k(x, k)
    assert (values.dtype, indices.dtype, total.dtype) == (jnp.float32, jnp.int32, jnp.float32)
    assert (values.shape, indices.shape, total.shape) == ((*x.shape[:-1], k), (*x.shape[:-1], k), x.shape[:-1])
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(indices, places)
    peak = np.where(np.isfinite(x.max(-1)), x.max(-1), 0).astype(np.float64)
    with np.errstate(divide="ignore", over="ignore"):
        summed = np.log(np.exp(x - peak[..., None]).sum(-1)) + peak
    np.testing.assert_allclose(total, summed, rtol=1e-6, atol=1e-6)


def normal(shape, scale=4.0):
    return (np.random.default_rng(shape).normal(size=shape) * scale).astype(np.float32)


@pytest.mark.slow(unless=("(2, 5, 37)-8", "(2500,)-16", "(3, 1024)-2-xla", "(4, 16)-16-xla"))
@backends
@pytest.mark.parametrize("k", (1, 2, 8, 16))
@pytest.mark.parametrize("shape", ((2500,), (3, 1024), (2, 5, 37), (4, 16)), ids=str)
def test_finds_what_a_sort_finds(shape, k, backend):
    check(normal(shape), k, program(k, backend))


@pytest.mark.slow(unless=("33-xla", "64-triton", "64-mosaic_tpu"))
@backends
@pytest.mark.parametrize("k", (33, 64))
def test_finds_as_many_as_the_widest_tree_has_children(k, backend):
    assert triton.MAX_K >= grow.MAX_WIDTH
    check(normal((2, 2500)), k, program(k, backend))


def row(kind):
    """2500 logits: three tiles, the last one not full."""
    x = normal((2500,))
    if kind == "ties":
        return np.round(x)
    if kind == "all equal":
        return np.full_like(x, -3.5)
    if kind == "zeros of both signs":
        return np.where(np.arange(2500) % 3 == 1, np.float32(-0.0), np.minimum(np.round(x), 0))
    if kind == "not a number":
        return np.full_like(x, np.nan)
    if kind == "nothing possible":
        return np.full_like(x, -np.inf)
    if kind == "fewer possible than k":
        return np.where(np.isin(np.arange(2500), (7, 1500, 2499)), x, np.float32(-np.inf))
    if kind == "possible in one tile only":
        return np.where(np.arange(2500) >= 2048, x - 1e4, np.float32(-np.inf)).astype(np.float32)
    if kind == "infinite":
        return np.where(np.arange(2500) % 700 == 5, np.float32(np.inf), x)
    if kind == "some not a number":
        return np.where(x > 2, np.float32(np.nan), x)
    return {"huge": x * 1e37, "large": x + 5000, "small": x - 5000, "tiny": x * 1e-42}[kind].astype(np.float32)


KINDS = (
    *("ties", "all equal", "zeros of both signs", "not a number", "nothing possible", "fewer possible than k"),
    *("possible in one tile only", "infinite", "some not a number", "huge", "large", "small", "tiny"),
)


@backends
@pytest.mark.parametrize("kind", KINDS)
def test_a_strange_row_changes_no_other_row(kind, backend):
    """A strange row does not change an ordinary one beside it."""
    check(np.stack([row(kind), normal((2500,))]), 8, program(8, backend))


@pytest.mark.slow(unless="bfloat16")
@backends
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_narrow_logits_are_converted_to_float32(dtype, backend):
    check(normal((3, 2500)).astype(jnp.dtype(dtype)), 8, program(8, backend))


SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-45])
FLOATS = st.one_of(SPECIAL, st.floats(width=32))


@pytest.mark.slow
@backends
@settings(max_examples=150, deadline=None, derandomize=True)
@given(logits=arrays.arrays(np.float32, (2, 40), elements=FLOATS, fill=SPECIAL))
def test_any_logits_are_ranked_as_by_a_sort(backend, logits):
    """The kernels use several tiles."""
    tiny = {"triton": triton.Config(16, 1, 1), "mosaic_tpu": mosaic_tpu.Config(16)}
    check(logits, 6, program(6, backend, tiny.get(backend)))


@requires("triton")
@pytest.mark.parametrize("tile", (16, 256, 4096))
def test_the_result_does_not_depend_on_the_tiles(tile):
    logits = np.round(normal((2, 2500)))
    check(logits, 16, program(16, "triton", triton.Config(tile, num_warps=2, merge_warps=1)))


@requires("mosaic_tpu")
@pytest.mark.parametrize("tile", (128, 1024))
def test_the_result_does_not_depend_on_the_steps(tile):
    """12 rows are more than one program has; with ties, the lower index is first."""
    logits = np.round(normal((12, 2500)))
    check(logits, 16, program(16, "mosaic_tpu", mosaic_tpu.Config(tile)))


@pytest.mark.slow(unless=("8-bfloat16-(32, 128256)", "16-float32-(2, 3, 17)"))
@pytest.mark.parametrize("shape", ((1, 32000), (256, 32000), (32, 128256), (2, 3, 17)), ids=str)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("k", (1, 8, 16))
def test_lowers_for_a_gpu(k, dtype, shape, monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    text = cross_lower(partial(topk, k=k), "cuda", jax.ShapeDtypeStruct(shape, dtype))
    assert text.count("__gpu$xla.gpu.triton") == (2 if shape[-1] > 1024 else 1)
    assert "sort" not in text and "top_k" not in text.lower()


@pytest.mark.slow(unless=("8-bfloat16-(32, 128256)", "16-float32-(2, 3, 17)"))
@pytest.mark.parametrize("shape", ((1, 32000), (32, 128256), (2, 3, 17)), ids=str)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("k", (8, 16))
def test_lowers_for_a_tpu(k, dtype, shape, monkeypatch):
    """As one kernel, without a sort."""
    monkeypatch.setattr(platform, "platform", lambda: "tpu")
    text = cross_lower(partial(topk, k=k), "tpu", jax.ShapeDtypeStruct(shape, dtype))
    assert text.count("tpu_custom_call") == 1
    assert "sort" not in text and "top_k" not in text.lower()


@pytest.mark.parametrize("platform_name", ("cuda", "tpu"))
def test_the_reference_lowers_for(platform_name):
    assert cross_lower(partial(topk, k=8, backend="xla"), platform_name, jax.ShapeDtypeStruct((2, 17), "float32"))


@pytest.mark.parametrize(("rows", "vocabulary"), ((1, 17), (1, 32000), (8, 32000), (1, 128256), (256, 128256)))
def test_tiles_fill_the_chip_and_can_be_merged(rows, vocabulary):
    for k in (1, triton.MAX_K):
        config = triton.default_config(rows=rows, vocabulary=vocabulary, k=k)
        assert config.tile in (1024, 2048, 4096)
        assert -(-vocabulary // config.tile) * k <= triton.MAX_MERGED
    config = triton.default_config(rows=rows, vocabulary=vocabulary, k=8)
    tiles = -(-vocabulary // config.tile)
    assert config.tile == 1024 or rows * tiles >= platform.processors()


@pytest.mark.parametrize(
    ("where", "k", "kernel"),
    (("gpu", 64, True), ("gpu", 65, False), ("tpu", 128, True), ("tpu", 129, False), ("cpu", 8, False)),
)
def test_the_backend_of_a_platform(where, k, kernel, monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: where)
    assert ("pallas_call" in str(jax.make_jaxpr(partial(topk, k=k))(jnp.zeros(160)))) == kernel


def test_a_backend_that_cannot_run_is_an_error():
    with pytest.raises(ValueError, match="backend='triton' cannot run: k=65: must be at most 64"):
        topk(jnp.zeros(80), 65, backend="triton")


@pytest.mark.parametrize("k", (0, -1, 5))
def test_k_out_of_range_is_an_error(k):
    with pytest.raises(ValueError, match=f"k={k}: must be between 1 and 4"):
        topk(jnp.zeros(4), k)
