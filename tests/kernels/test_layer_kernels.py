"""Every backend of the sum and norm of the residual stream, and of a layer's heads, against the equations in float64.

test_contract.py compares the gradients of all backends.
"""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import params
from crosslower import cross_lower

from pallas_kernels import platform
from pallas_kernels.residual_norm import residual_norm, triton
from pallas_kernels.split_heads import split_heads


@dataclasses.dataclass(frozen=True)
class Sum:
    """Shapes of a call of `residual_norm`."""

    name: str
    batch: int = 2
    nodes: int = 3
    width: int = 16
    following: bool = True
    factor: bool = True
    dtype: str = "float32"

    function = staticmethod(residual_norm)
    options = {"eps": 1e-6, "wide": True}
    tolerance = {"float32": 1e-5, "bfloat16": 4e-2}

    def inputs(self):
        rng, dtype = np.random.default_rng(len(self.name)), jnp.dtype(self.dtype)
        x, branch = (rng.normal(size=(self.batch, self.nodes, self.width)).astype(dtype) for _ in range(2))
        norms = [rng.uniform(0.5, 2, self.width).astype(dtype) for _ in range(2)]
        factor = np.asarray(rng.uniform(0.5, 2), dtype) if self.factor else None
        return x, 3 * branch, (norms[0], norms[1] if self.following else None), factor

    def oracle(self, x, branch, norms, factor):
        stream = x.astype(np.float64) + norm(branch.astype(np.float64), norms[0], 1e-6)
        stream = stream if factor is None else stream * float(factor)
        return [stream] if norms[1] is None else [stream, norm(stream, norms[1], 1e-6)]


@dataclasses.dataclass(frozen=True)
class Heads:
    """Shapes of a call of `split_heads`."""

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

    function = staticmethod(split_heads)
    tolerance = {"float32": 2e-6, "bfloat16": 6e-2}
    """A few roundings of values up to about 8."""

    @property
    def options(self):
        return {"eps": 1e-5, "kv_heads": self.kv_heads}

    def inputs(self):
        rng, dtype = np.random.default_rng(len(self.name)), jnp.dtype(self.dtype)
        total = self.heads + 2 * self.kv_heads
        qkv = rng.normal(size=(self.batch, self.nodes, total, self.dim)).astype(dtype)
        angle = rng.uniform(0, 9, (1 if self.shared else self.batch, self.nodes, self.dim // 2))
        norms = [rng.uniform(0.5, 2, self.dim).astype(dtype) if self.norms else None for _ in range(2)]
        return qkv, np.cos(angle).astype(dtype), np.sin(angle).astype(dtype), *norms

    def oracle(self, qkv, cos, sin, *norms):
        qkv, cos, sin = (x.astype(np.float64) for x in (qkv, cos, sin))
        q, k, v = np.split(qkv, [self.heads, self.heads + self.kv_heads], axis=2)
        turned = []
        for x, weight in zip((q, k), norms, strict=True):
            x = x if weight is None else norm(x, weight, 1e-5)
            pairs = x[..., : self.dim // 2] + 1j * x[..., self.dim // 2 :]
            pairs = pairs * (cos + 1j * sin)[:, :, None]
            turned.append(np.concatenate([pairs.real, pairs.imag], axis=-1))
        return *turned, v


def norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


SUMS = [
    Sum("a few elements"),
    Sum("one token", batch=1, nodes=1),
    Sum("a width that is not a power of two", width=40),
    Sum("no following norm", following=False),
    Sum("no factor", factor=False, width=56),
    Sum("as Gemma 4 31B, bfloat16", batch=1, nodes=6, width=5376, dtype="bfloat16"),
    Sum("as the assistant of E4B, bfloat16", batch=1, nodes=1, width=256, dtype="bfloat16"),
]
HEADS = [
    Heads("few heads"),
    Heads("one of each kind", batch=1, nodes=1, heads=1, kv_heads=1),
    Heads("heads that do not fill a block", heads=14, kv_heads=2, dim=64),
    Heads("as Llama 3.1 8B, bfloat16", batch=1, nodes=5, heads=32, kv_heads=8, dim=128, dtype="bfloat16"),
    Heads("as Qwen3 8B, bfloat16", batch=1, nodes=5, heads=32, kv_heads=8, dim=128, norms=True, dtype="bfloat16"),
    Heads("norms", heads=6, norms=True),
    Heads("40 pairs", dim=80, norms=True),
    Heads("pairs of 4", dim=8),
    Heads("heads of 256", dim=256, nodes=2, norms=True),
    Heads("one position for all", shared=True, norms=True),
]
EPS = 1e-5
cases = pytest.mark.parametrize("case", (*SUMS, *HEADS), ids=lambda case: case.name)


@cache
def program(case, backend):
    return jax.jit(partial(case.function, **case.options, backend=backend))


@pytest.mark.slow(unless=(*(case.name for case in SUMS), "one of each kind", "as Qwen3 8B, bfloat16-triton"))
@pytest.mark.parametrize("backend", params("triton", "xla"))
@cases
def test_equals_the_equations(case, backend):
    arrays = case.inputs()
    found = [x for x in program(case, backend)(*arrays) if x is not None]
    limit = case.tolerance[case.dtype]
    for ours, exact in zip(found, case.oracle(*arrays), strict=True):
        assert ours.shape == exact.shape and ours.dtype == case.dtype
        np.testing.assert_allclose(np.asarray(ours, np.float64), exact, rtol=limit, atol=limit)
    if isinstance(case, Heads):
        np.testing.assert_array_equal(found[2], arrays[0][:, :, case.heads + case.kv_heads :], "values are unchanged")


@pytest.mark.parametrize("case", SUMS, ids=lambda case: case.name)
def test_the_kernel_rounds_where_the_reference_does(case):
    arrays = case.inputs()
    for ours, theirs in zip(program(case, "triton")(*arrays), program(case, "xla")(*arrays), strict=True):
        if ours is not None:
            step = {"float32": 1e-5, "bfloat16": 2**-7}[case.dtype]
            np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), rtol=step, atol=step)


@pytest.mark.slow(unless=(*(case.name for case in SUMS), "one of each kind", "as Llama 3.1 8B", "norms"))
@cases
def test_lowers_for_cuda(case, monkeypatch):
    monkeypatch.setattr(platform, "interpret", lambda: False)
    run = partial(case.function, **case.options, backend="triton")
    assert "gpu.triton" in cross_lower(run, "cuda", *jax.tree.map(jnp.asarray, case.inputs()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_without_a_norm_of_the_branch_lower_for_cuda(dtype):
    x = jnp.zeros((3, 4096), dtype)
    divided, weight = jnp.zeros((2, 3, 4096), jnp.float32), x[0]
    for branch, norm, wide in ((x, weight, False), (divided, weight, False), (x, weight, True), (None, None, True)):
        run = partial(triton.residual_norm, factor=None, eps=EPS, wide=wide, interpret=False)
        assert "residual_norm" in cross_lower(run, "cuda", x, branch, (None, norm))


def test_arguments_that_do_not_fit_are_errors():
    x, branch, norms, _ = jax.tree.map(jnp.asarray, SUMS[0].inputs())
    with pytest.raises(ValueError, match=r"branch is bfloat16\[2, 3, 16\]: must be float32\[2, 3, 16\], as x is$"):
        residual_norm(x, branch.astype(jnp.bfloat16), norms, eps=EPS)
    qkv, cos, sin, norm = (jnp.asarray(x) for x in (*HEADS[0].inputs()[:3], np.ones(16, np.float32)))
    with pytest.raises(ValueError, match=r"kv_heads=4: must be below 4, as qkv \(2, 3, 8, 16\) has 8 heads"):
        split_heads(qkv, cos, sin, kv_heads=4, eps=EPS)
    with pytest.raises(ValueError, match=r"cos \(2, 3, 4\).*must have 8 pairs"):
        split_heads(qkv, cos[..., :4], sin[..., :4], kv_heads=2, eps=EPS)
    with pytest.raises(ValueError, match="must both be given, or neither"):
        split_heads(qkv, cos, sin, norm, kv_heads=2, eps=EPS)
