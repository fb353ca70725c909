"""Every backend of a layer's heads against the equations in float64, and the gradients of all backends."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import each_backend, requires
from crosslower import cross_lower

from pallas_kernels import platform
from pallas_kernels.split_heads import OPERATION, split_heads

backends = each_backend(OPERATION)
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one call."""

    name: str
    batch: int = 2
    nodes: int = 3
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    norms: bool = False
    dtype: str = "float32"
    shared: bool = False
    """All sequences have the same positions."""


CASES = [
    Case("few heads"),
    Case("one of each kind", batch=1, nodes=1, heads=1, kv_heads=1),
    Case("heads that do not fill a block", heads=14, kv_heads=2, dim=64),
    Case("as Llama 3.1 8B, bfloat16", batch=1, nodes=5, heads=32, kv_heads=8, dim=128, dtype="bfloat16"),
    Case("as Qwen3 8B, bfloat16", batch=1, nodes=5, heads=32, kv_heads=8, dim=128, norms=True, dtype="bfloat16"),
    Case("norms", heads=6, norms=True),
    Case("40 pairs", dim=80, norms=True),
    Case("pairs of 4", dim=8),
    Case("heads of 256", dim=256, nodes=2, norms=True),
    Case("one position for all", shared=True, norms=True),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def inputs(case: Case):
    rng = np.random.default_rng(len(case.name))
    dtype = jnp.dtype(case.dtype)
    total = case.heads + 2 * case.kv_heads
    qkv = rng.normal(size=(case.batch, case.nodes, total, case.dim)).astype(dtype)
    angle = rng.uniform(0, 9, (1 if case.shared else case.batch, case.nodes, case.dim // 2))
    norms = [rng.uniform(0.5, 2, case.dim).astype(dtype) if case.norms else None for _ in range(2)]
    return qkv, np.cos(angle).astype(dtype), np.sin(angle).astype(dtype), *norms


def oracle(case: Case, qkv, cos, sin, q_norm, k_norm):
    qkv, cos, sin = (x.astype(np.float64) for x in (qkv, cos, sin))
    q, k, v = np.split(qkv, [case.heads, case.heads + case.kv_heads], axis=2)
    turned = []
    for x, norm in ((q, q_norm), (k, k_norm)):
        if norm is not None:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * norm.astype(np.float64)
        pairs = x[..., : case.dim // 2] + 1j * x[..., case.dim // 2 :]
        pairs = pairs * (cos + 1j * sin)[:, :, None]
        turned.append(np.concatenate([pairs.real, pairs.imag], axis=-1))
    return *turned, v


@cache
def program(kv_heads, backend):
    return jax.jit(partial(split_heads, kv_heads=kv_heads, eps=EPS, backend=backend))


@pytest.mark.slow(unless=("one of each kind", "as Qwen3 8B, bfloat16-triton"))
@backends
@cases
def test_equals_the_equations(case, backend):
    arrays = inputs(case)
    got = program(case.kv_heads, backend)(*arrays)
    # A few roundings of values up to about 8.
    tolerance = {"float32": 2e-6, "bfloat16": 6e-2}[case.dtype]
    for name, mine, true in zip("qkv", got, oracle(case, *arrays), strict=True):
        assert mine.shape == true.shape and mine.dtype == case.dtype, name
        np.testing.assert_allclose(np.asarray(mine, np.float64), true, rtol=tolerance, atol=tolerance, err_msg=name)
    np.testing.assert_array_equal(got[2], arrays[0][:, :, case.heads + case.kv_heads :])


@pytest.mark.slow(unless="False")
@requires("triton")
@pytest.mark.parametrize("norms", (False, True))
def test_gradients_equal_those_of_the_reference(norms):
    case = Case("gradients", norms=norms)
    arrays = inputs(case)

    def loss(backend, *arrays):
        parts = split_heads(*arrays, kv_heads=case.kv_heads, eps=EPS, backend=backend)
        return sum(jnp.sum(jnp.sin(x * (i + 1))) for i, x in enumerate(parts))

    which = (1, 4, 5) if norms else (1,)
    got, true = (jax.jit(jax.grad(partial(loss), which), static_argnums=0)(name, *arrays) for name in ("triton", "xla"))
    for mine, theirs in zip(got, true, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow(unless=("one of each kind", "as Llama 3.1 8B", "norms"))
@cases
def test_lowers_for_cuda(case, monkeypatch):
    monkeypatch.setattr(platform, "interpret", lambda: False)
    arrays = inputs(case)
    run = partial(split_heads, kv_heads=case.kv_heads, eps=EPS, backend="triton")
    assert "split_heads" in cross_lower(run, "cuda", *arrays)


def test_arguments_that_do_not_fit_are_errors():
    qkv, cos, sin, norm = (jnp.asarray(x) for x in (*inputs(CASES[0])[:3], np.ones(16, np.float32)))
    with pytest.raises(ValueError, match=r"kv_heads=4: must be below 4, as qkv \(2, 3, 8, 16\) has 8 heads"):
        split_heads(qkv, cos, sin, kv_heads=4, eps=EPS)
    with pytest.raises(ValueError, match=r"cos \(2, 3, 4\).*must have 8 pairs"):
        split_heads(qkv, cos[..., :4], sin[..., :4], kv_heads=2, eps=EPS)
    with pytest.raises(ValueError, match="must both be given, or neither"):
        split_heads(qkv, cos, sin, norm, kv_heads=2, eps=EPS)
    with pytest.raises(ValueError, match="split_heads: backend='cuda': must be one of"):
        split_heads(qkv, cos, sin, kv_heads=2, eps=EPS, backend="cuda")
