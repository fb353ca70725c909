"""What XLA's compiler for GPUs makes of loops of every family: nothing here runs on a GPU.

The tests need JAX's CUDA plugin (the extra `cuda`), and no GPU.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
import small_loops
from gpu_compiler import devices, needs_plugin
from jax.sharding import SingleDeviceSharding

from jspec.core import xla_options
from jspec.models import layers
from jspec.models.adapted import Adapted
from pallas_kernels import dispatch, gated_matmul, mla_attention

pytestmark = [pytest.mark.slow, needs_plugin]
KERNEL = "__gpu$xla.gpu.triton"
NAMES = (
    "llama-eagle-chain",
    "llama-adaptive-chain",
    "llama-pruned-tree",
    "llama-suffix-tree",
    "llama-8-heads-eagle-chain-over-4",
    "qwen3-experts-eagle-tree",
    "gpt-oss-suffix-chain",
    "gemma4-frozen-kv-mtp-chain",
    "deepseek-mtp-chain",
    "deepseek-dsa-mtp-chain",
    "qwen3-next-mtp-chain",
)
"""One of each family, on one GPU and over four."""
KNOWN = {"deepseek-dsa-mtp-chain": {"no copy of a pool": "temporary memory"}}
"""What does not hold: the indexer's keys of a layer are gathered."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """NCCL's variables, as `jspec.load` sets them, and no program of another test, traced for other kernels."""
    for name in xla_options.CAPTURED_IF_ZERO:
        monkeypatch.setenv(name, "0")
    yield
    jax.clear_caches()


def compiled(name):
    """The checks that do not hold of a loop, and its text."""
    outcome = small_loops.compile_on(small_loops.case_of(name), devices())
    assert outcome.programs is not None and outcome.programs.launches, outcome.problems
    return outcome.problems, outcome.programs.decode.as_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_compiles_and_keeps_its_promises(name):
    """One CUDA graph, in place, donated, without sorts or transfers, in the expected memory, and with our kernels."""
    problems, text = compiled(name)
    known = KNOWN.get(name, {})
    assert KERNEL in text and problems.keys() == known.keys(), problems
    assert all(message in problems[check] for check, message in known.items())


@pytest.mark.parametrize("name", ("llama-eagle-chain", "llama-8-heads-eagle-chain-over-4", "gemma4-suffix-chain"))
def test_a_loop_compiles_with_the_kernel_of_many_tokens(name, monkeypatch):
    """The first half of a gated MLP is a Mosaic GPU kernel, on one GPU and over four, as in large models."""
    kernel = gated_matmul.OPERATION.module("mosaic_gpu")
    monkeypatch.setattr(kernel, "worthwhile", lambda x, weight, **options: x.shape[0] > 1)
    problems, text = compiled(name)
    assert problems == {} and "mosaic_gpu" in text, problems


@pytest.mark.parametrize("name", ("deepseek-suffix-tree", "deepseek-mtp-chain"))
def test_a_loop_compiles_with_the_kernel_of_many_query_rows(name, monkeypatch):
    """Latent attention is a Mosaic GPU kernel, as in models with as many heads as DeepSeek's."""
    kernel = mla_attention.OPERATION.module("mosaic_gpu")
    monkeypatch.setattr(kernel, "worthwhile", lambda q_latent, *args, **options: q_latent.shape[1] > 1)
    problems, text = compiled(name)
    assert problems == {} and "mosaic_gpu" in text, problems


@pytest.mark.parametrize("name", ("llama-eagle-tree", "deepseek-mtp-chain", "qwen3-next-mtp-chain"))
def test_a_loop_compiles_without_triton(name, monkeypatch):
    """As with a version of JAX that no longer has Pallas' Triton backend: XLA computes everything.

    It sorts to find the largest logits, and gathers the pages of each layer.
    """
    real = dispatch.unavailable
    monkeypatch.setattr(
        dispatch, "unavailable", lambda operation, kernel: "removed" if kernel == "triton" else real(operation, kernel)
    )
    problems, text = compiled(name)
    assert KERNEL not in text and problems.keys() == {"no sort", "no copy of a pool"}, problems
    assert "temporary memory" in problems["no copy of a pool"]


@pytest.mark.parametrize("many", (False, True))
def test_changes_of_a_matrix_do_not_copy_it(many):
    """XLA would join its product with that of the changes, for which cuBLAS needs a copy of both matrices."""
    place = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(devices()[0]))
    weight, down, up = (place(shape, jnp.bfloat16) for shape in ((1024, 1536), (1024, 128), (128, 1536)))
    matrix = Adapted(weight, down, up, 8, place((32,), jnp.int32))
    with jax.default_device(devices()[0]):
        program = jax.jit(layers.linear, compiler_options=xla_options.loop_options(many=many))
        text = program.lower(place((32, 6, 1024), jnp.bfloat16), matrix).compile().as_text()
    assert ("cublas" in text) == many and "1024,1664" not in text
