"""The loop as one CUDA graph: its compiler options, and on a GPU the dump that shows it."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from jspec.core import xla_options
from jspec.core.xla_options import LoopProgram, loop_options, prefers_cublas

PROGRAM = """
import jspec
model = jspec.load("bundled:python-small", dtype="bfloat16", tensor=DEVICES)
for drafter in (None, jspec.Ngram(depth=4), jspec.Eagle(depth=5), jspec.Eagle(depth=5, width=8, num_nodes=32)):
    first, second = (jspec.generate(model, "def f(x):", drafter=drafter, max_new_tokens=48) for _ in range(2))
    assert first.tokens == second.tokens, drafter
"""


def test_flags_of_the_user_take_precedence():
    few, many = loop_options(flags=""), loop_options(many=True, flags="")
    products, order = {"xla_gpu_enable_triton_gemm": False}, {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    assert "WHILE" in few["xla_gpu_enable_command_buffer"] and many == few | products
    assert loop_options(many=True, flags="--xla_dump_to=somewhere") == many
    assert loop_options(many=True, flags="--xla_gpu_enable_command_buffer=") == products | order
    assert loop_options(flags="--xla_cpu_x=1 --xla_gpu_graph_min_graph_size=5") == order
    assert loop_options(flags="--xla_gpu_command_buffer_scheduling_mode=LHS") == {
        name: value for name, value in few.items() if name not in order
    }
    assert loop_options(many=True, flags="--xla_gpu_enable_triton_gemm=true") == few


@pytest.mark.parametrize("backend", ("gpu", "cpu"))
def test_cublas_multiplies_many_tokens_but_no_weights_of_8_bits(backend, monkeypatch):
    """XLA would write the widened weights to memory for it."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    wide = {"w": jnp.zeros((2, 2), jnp.bfloat16), "ids": jnp.zeros(2, jnp.int32), "seen": jnp.zeros(2, bool)}
    assert [prefers_cublas(wide, tokens) for tokens in (32, 33)] == [False, backend == "gpu"]
    for narrow in (jnp.float8_e4m3fn, jnp.int8):
        assert not prefers_cublas(wide | {"narrow": jnp.zeros((2, 2), narrow)}, 33)


@pytest.mark.parametrize("values", (("0", "0"), ("1", "0"), ("0", "1"), (None, "0"), ("0", None)))
def test_sums_over_devices_are_captured_if_nccl_allows_it(monkeypatch, values):
    for name, value in zip(xla_options.CAPTURED_IF_ZERO, values, strict=True):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    allowed = values == ("0", "0")
    alone, several = loop_options(flags=""), loop_options(flags="", devices=2)
    # NCCL needs the same order of sums on all devices.
    assert alone.pop("xla_gpu_command_buffer_scheduling_mode") == "CONCURRENT"
    captured = several["xla_gpu_enable_command_buffer"].split(",")
    assert ("COLLECTIVES" in captured) == allowed and "WHILE" in captured
    assert allowed or several == alone
    own = "xla_gpu_experimental_use_collective_kernels"
    assert (several.get(own) == "") == (allowed and jax.__version_info__ >= (0, 11))


@pytest.mark.parametrize("name", xla_options.CAPTURED_IF_ZERO)
def test_the_environment_decides_whether_nccl_may_be_captured(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    xla_options.prepare_collectives()
    assert os.environ[name] == "0"
    os.environ[name] = "1"
    xla_options.prepare_collectives()
    assert os.environ[name] == "1"


@pytest.mark.parametrize("devices", (1, 4))
@pytest.mark.parametrize("many", (False, True))
def test_the_options_are_known_to_the_compiler_and_change_nothing_elsewhere(many, devices, monkeypatch):
    for name in xla_options.CAPTURED_IF_ZERO:
        monkeypatch.setenv(name, "0")
    options = loop_options(many=many, devices=devices, flags="")
    loop = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 9, lambda x: x + 2, x), compiler_options=options)
    assert loop(jnp.int32(0)) == 10


def test_the_options_are_read_at_the_first_use(monkeypatch):
    read = []
    monkeypatch.setattr(xla_options, "loop_options", lambda *, many, devices: read.append((many, devices)) or {})
    program = LoopProgram(lambda x, *, by: x + by, static_argnames=("by",), donate_argnames=())
    program = program.variant(many=True)
    assert read == [] and program is program.variant(many=True) is program.variant().variant(many=True)
    assert program(jnp.int32(1), by=2) == 3 and program(jnp.int32(2), by=2) == 4
    assert "add" in program.lower(jnp.int32(1), by=2).as_text()
    assert read == [(True, 1)] and program._cache_size() == 1


def test_threads_share_a_jitted_function(monkeypatch):
    """Otherwise each of them would compile its programs again."""
    functions, barrier = [], threading.Barrier(4)

    def jit(function, **options):
        time.sleep(0.05)
        functions.append(object())
        return functions[-1]

    monkeypatch.setattr(xla_options.jax, "jit", jit)
    program = LoopProgram(lambda x: x, static_argnames=(), donate_argnames=())

    def jitted(_):
        barrier.wait()
        return program.variant(many=True).jitted

    with ThreadPoolExecutor(4) as pool:
        assert {*pool.map(jitted, range(4))} == {*functions} and len(functions) == 1


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU as JAX's default backend")
@pytest.mark.parametrize("devices", (1, 2, 4))
def test_the_loop_is_one_command_buffer_and_runs_again(tmp_path, devices):
    """Each program of `decode` consists of one command buffer that contains the loop, sums over devices included."""
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={tmp_path} --xla_dump_hlo_pass_re=.*thunk.*"
    # A program that comes from the compilation cache is not dumped.
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    program = PROGRAM.replace("DEVICES", str(devices))
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    dumps = sorted(tmp_path.glob("*jit_decode*.thunk_sequence_after_thunk_passes.txt"))
    assert len(dumps) >= 4
    for dump in dumps:
        outer = [line for line in dump.read_text().splitlines() if line[:3].isdigit()]
        assert len(outer) == 1 and "kCommandBuffer" in outer[0], f"{dump.name}: {outer}"
        assert "kWhile" in dump.read_text(), dump.name
