"""Strict numerics for every test: no implicit promotion of dtypes or ranks; warnings are errors (pyproject.toml).

The shapes in the annotations of the modules that only take arrays are checked at run time, too.
"""

import ctypes
import gc
import os
import pathlib

import jax
import jaxtyping
import pytest

# On a GPU the processes of a run share its memory, and none times products to choose the fastest, which takes longer
# than the tests. What a user set stands.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}".rstrip()
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Not modules that define pytrees: JAX rebuilds those with leaves that are no arrays.
ARRAYS_ONLY = [
    "jspec.core.tree",
    "jspec.core.grow",
    "jspec.core.propose",
    "jspec.core.accept",
    "jspec.cache.pages",
    "jspec.models.layers",
    "jspec.drafters.ngram",
]
jaxtyping.install_import_hook([*ARRAYS_ONLY, "pallas_kernels"], "beartype.beartype")

SLOW = "JSPEC_SLOW"
"""Set in the environment, it runs the long notebooks, and the tests that repeat what others show at one more point."""


def pytest_collection_modifyitems(items):
    """Skips the slow tests where they were not asked for."""
    if not os.environ.get(SLOW):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(
                    pytest.mark.skip(reason=f"one more point of a large matrix, or a long notebook: needs {SLOW}=1")
                )


EXTRAS = {
    "torch": "parity",
    "transformers": "parity",
    "ipykernel": "notebooks",
    "matplotlib": "notebooks",
    "nbclient": "notebooks",
}


def forget_programs():
    """Drops compiled programs and gives their memory back, which the C library keeps until it is asked for it."""
    jax.clear_caches()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def take_older_generator(patch):
    """Patches JAX 0.10 to take the older of its two generators of code for CPUs; later releases have one only.

    It needs a third of the other's time to compile, and makes a loop of each scatter.
    """
    if jax.__version_info__ >= (0, 11) or jax.default_backend() != "cpu":
        return
    from jax._src import compiler

    options_of = compiler.get_compile_options

    def options(*given, **named):
        made = options_of(*given, **named)
        chosen = [("xla_cpu_use_fusion_emitters", False), ("xla_cpu_parallel_codegen_split_count", 1)]
        made.env_option_overrides = [*made.env_option_overrides, *chosen]
        return made

    patch.setattr(compiler, "get_compile_options", options)


@pytest.fixture(scope="module", autouse=True)
def programs(request):
    """Compiles as for a user where a module says AS_SHIPPED; elsewhere in less time, a quarter of it with JAX 0.10.

    A module that reads the text of programs says TEXT_AS_SHIPPED: of XLA's passes over it none is left out there.
    """
    as_shipped, text = (getattr(request.module, name, False) for name in ("AS_SHIPPED", "TEXT_AS_SHIPPED"))
    jax.config.update("jax_disable_most_optimizations", not as_shipped)
    with pytest.MonkeyPatch.context() as patch:
        if not (as_shipped or text):
            take_older_generator(patch)
        yield
        forget_programs()
    jax.config.update("jax_disable_most_optimizations", False)


MAPS = pathlib.Path("/proc/self/maps")
MOST_MAPS = 30_000
"""Each compiled program keeps memory mapped; Linux allows a process 65,530 maps and a compiler out of them crashes."""


@pytest.fixture(autouse=True)
def room_for_programs():
    """Forgets compiled programs between two tests where they have taken half of the maps a process may have."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        forget_programs()


@pytest.fixture
def needs():
    """A function that skips a test whose optional package is not installed, and names the extra that brings it."""

    def check(package: str):
        return pytest.importorskip(package, reason=f'needs {package}: pip install -e ".[{EXTRAS[package]}]"')

    return check
