"""Every backend of the residual stream's sum and norm against the equations in float64, and their gradients."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import each_backend
from crosslower import cross_lower

from pallas_kernels import platform
from pallas_kernels.residual_norm import OPERATION, residual_norm, triton

backends = each_backend(OPERATION)
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one call."""

    name: str
    batch: int = 2
    nodes: int = 3
    width: int = 16
    following: bool = True
    factor: bool = True
    dtype: str = "float32"


CASES = [
    Case("a few elements"),
    Case("one token", batch=1, nodes=1),
    Case("a width that is not a power of two", width=40),
    Case("no following norm", following=False),
    Case("no factor", factor=False, width=56),
    Case("as Gemma 4 31B, bfloat16", batch=1, nodes=6, width=5376, dtype="bfloat16"),
    Case("as the assistant of E4B, bfloat16", batch=1, nodes=1, width=256, dtype="bfloat16"),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def inputs(case: Case):
    rng = np.random.default_rng(len(case.name))
    dtype = jnp.dtype(case.dtype)
    x, branch = (rng.normal(size=(case.batch, case.nodes, case.width)).astype(dtype) for _ in range(2))
    norms = [rng.uniform(0.5, 2, case.width).astype(dtype) for _ in range(2)]
    factor = np.asarray(rng.uniform(0.5, 2), dtype) if case.factor else None
    return x, 3 * branch, (norms[0], norms[1] if case.following else None), factor


def oracle(x, branch, norms, factor):
    weight, following = norms

    def norm(values, weights):
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + EPS) * weights.astype(np.float64)

    stream = x.astype(np.float64) + norm(branch.astype(np.float64), weight)
    stream = stream if factor is None else stream * float(factor)
    return [stream] if following is None else [stream, norm(stream, following)]


@cache
def program(backend):
    return jax.jit(partial(residual_norm, eps=EPS, wide=True, backend=backend))


@cases
@backends
def test_equals_the_equations(case, backend):
    arguments = inputs(case)
    got = [each for each in program(backend)(*arguments) if each is not None]
    limit = {"float32": 1e-5, "bfloat16": 4e-2}[case.dtype]
    for ours, exact in zip(got, oracle(*arguments), strict=True):
        assert ours.dtype == case.dtype
        np.testing.assert_allclose(np.array(ours, np.float64), exact, rtol=limit, atol=limit)


@cases
def test_the_kernel_rounds_where_the_reference_does(case):
    arguments = inputs(case)
    for ours, theirs in zip(program("triton")(*arguments), program("xla")(*arguments), strict=True):
        if ours is not None:
            step = {"float32": 1e-5, "bfloat16": 2**-7}[case.dtype]
            np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), rtol=step, atol=step)


def test_gradients_equal_those_of_the_reference():
    case = CASES[0]
    arguments = jax.tree.map(jnp.asarray, inputs(case))

    def loss(backend, arguments):
        stream, normed = residual_norm(*arguments, eps=EPS, wide=True, backend=backend)
        return (jnp.sin(stream) + jnp.cos(normed)).sum()

    ours, theirs = (jax.jit(jax.grad(partial(loss, backend)))(arguments) for backend in ("triton", "xla"))
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", (CASES[2], CASES[3], CASES[5]), ids=lambda case: case.name)
def test_lowers_for_cuda(case, monkeypatch):
    monkeypatch.setattr(platform, "interpret", lambda: False)
    arrays = jax.tree.map(jnp.asarray, inputs(case))
    lowered = cross_lower(lambda *arrays: residual_norm(*arrays, eps=EPS, wide=True, backend="triton"), "cuda", *arrays)
    assert "gpu.triton" in lowered


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_without_a_norm_of_the_branch_lower_for_cuda(dtype):
    x = jnp.zeros((3, 4096), dtype)
    divided, weight = jnp.zeros((2, 3, 4096), jnp.float32), x[0]
    for branch, norm, wide in ((x, weight, False), (divided, weight, False), (x, weight, True), (None, None, True)):
        run = partial(triton.residual_norm, factor=None, eps=EPS, wide=wide, interpret=False)
        assert "residual_norm" in cross_lower(run, "cuda", x, branch, (None, norm))


def test_arguments_that_do_not_fit_are_errors():
    x, branch, norms, factor = jax.tree.map(jnp.asarray, inputs(CASES[0]))
    with pytest.raises(ValueError, match=r"branch is bfloat16\[2, 3, 16\]: must be float32\[2, 3, 16\], as x is$"):
        residual_norm(x, branch.astype(jnp.bfloat16), norms, eps=EPS)
    with pytest.raises(ValueError, match="backend='mosaic_tpu'"):
        residual_norm(x, branch, norms, factor, eps=EPS, backend="mosaic_tpu")
