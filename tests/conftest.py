"""Settings of all tests: the two tiers, the compilation cache, strict numerics and checked shapes.

Implicit promotion of dtypes or ranks is an error, and so are warnings (pyproject.toml). Shape annotations are checked
at run time in the modules that only take arrays.
"""

import ctypes
import gc
import os
import pathlib
import threading
import time

import optional
import pytest
import tiers

# Compiled programs are kept between runs, which halves the time of a run. Subprocesses inherit these settings.
CACHE = pathlib.Path(__file__).parents[1] / ".jax_cache"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Lines of Python are left out of lowered programs, as they take time to write.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# On a GPU the test processes share its memory, and autotuning would take longer than the tests. Flags that the user
# sets come last and win.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if "--xla_gpu_autotune_level" not in os.environ.get("XLA_FLAGS", ""):  # each process would have other flags otherwise
    os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}".rstrip()

import jax  # noqa: E402, after the environment that JAX reads when it is imported
import jaxtyping  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Modules that define pytrees are left out: JAX rebuilds those with leaves that are not arrays.
ARRAYS_ONLY = [
    "jspec.core.tree",
    "jspec.core.grow",
    "jspec.core.propose",
    "jspec.core.accept",
    "jspec.cache.pages",
    "jspec.models.layers",
]
jaxtyping.install_import_hook([*ARRAYS_ONLY, "pallas_kernels"], "beartype.beartype")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run both tiers: the slow tests as well")
    parser.addoption("--part", help="i/n: of the slow tests, only those of the i-th of n parts of their files")


def pytest_configure(config):
    """Selects the fast tier, unless --full or a marker expression such as `-m slow` selects others."""
    if not config.option.markexpr and not config.option.full:
        config.option.markexpr = "not slow"
    if not hasattr(config, "workerinput"):
        trim_compilation_cache()
        config.stash[UNSELECTED] = 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Takes the points that `slow(unless=...)` names out of the slow tier, and keeps the ids that name no point.

    That is only known where all points are collected; a GPU or a TPU has other points. So are the ids of all tests.

    Raises:
      pytest.UsageError: an id has an address, so that no two processes agree on it.
    """
    if addressed := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{addressed[0]}: an id must be the same in every process; give the point a name")
    unmatched = tiers.leave_fast(items)
    by_id = any("::" in argument for argument in config.args) or config.getoption("lf", False)
    whole = not by_id and jax.default_backend() == "cpu"
    config.stash[tiers.UNMATCHED] = unmatched if whole else set()
    config.stash[tiers.COLLECTED] = {item.nodeid for item in items} if whole else set()
    if config.option.part:
        items[:], others = tiers.split_slow(items, config.option.part)
        if others:
            config.hook.pytest_deselected(items=others)


def pytest_collection_finish():
    """Leaves modules and tests out of garbage collections, which are rarer: tracing makes many objects that stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


UNSELECTED = pytest.StashKey[int]()


def pytest_deselected(items):
    """Counts what is not selected; every worker process of pytest-xdist collects all tests and counts the same."""
    config = items[0].config
    if hasattr(config, "workerinput"):
        config.workeroutput["unselected"] = config.workeroutput.get("unselected", 0) + len(items)
    else:
        config.stash[UNSELECTED] += len(items)


class Workers:
    """The hook of pytest-xdist that brings the count of a worker; without that plugin the hook is unknown."""

    def pytest_testnodedown(self, node):
        node.config.stash[UNSELECTED] = getattr(node, "workeroutput", {}).get("unselected", 0)


def pytest_plugin_registered(plugin_name, manager):
    if plugin_name == "dsession":
        manager.register(Workers())


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[UNSELECTED]:
        terminalreporter.write_line(f"{config.stash[UNSELECTED]} tests not selected (-m {config.option.markexpr!r})")


CACHE_BYTES = 2**30
"""The compilation cache is trimmed to this size when a run starts."""


def trim_compilation_cache():
    """Deletes the oldest programs of our own cache directory beyond `CACHE_BYTES`; another directory is left alone."""
    newest_first = sorted(CACHE.glob("*-cache"), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for path in newest_first:
        total += path.stat().st_size
        if total > CACHE_BYTES:
            path.unlink(missing_ok=True)


LOWERING, _make_context = threading.local(), mlir.make_ir_context


def context_of_thread():
    """The one MLIR context of a thread: building another for every program takes time."""
    if not hasattr(LOWERING, "context"):
        LOWERING.context = _make_context()
    return LOWERING.context


mlir.make_ir_context = context_of_thread


def forget_programs():
    """Drops compiled programs and returns their memory, which the C library would keep otherwise."""
    jax.clear_caches()
    vars(LOWERING).clear()
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


LAST = pytest.StashKey[tuple[bool, bool]]()
"""How the last module of this process compiled."""


@pytest.fixture(scope="module", autouse=True)
def programs(request):
    """Compiles as for a user in modules that set AS_SHIPPED; elsewhere in less time, a quarter of it with JAX 0.10.

    A module that reads the text of programs sets TEXT_AS_SHIPPED: all of XLA's passes over it run there. Modules that
    compile alike share what is traced, unless one of them patches what is traced.
    """
    as_shipped, text = (getattr(request.module, name, False) for name in ("AS_SHIPPED", "TEXT_AS_SHIPPED"))
    stash = request.config.stash
    if stash.get(LAST, (as_shipped, text)) != (as_shipped, text):
        forget_programs()
    stash[LAST] = as_shipped, text
    jax.config.update("jax_disable_most_optimizations", not as_shipped)
    with pytest.MonkeyPatch.context() as patch:
        if not (as_shipped or text):
            take_older_generator(patch)
        PATCHED.clear()
        yield
    if as_shipped or text or not all(name.startswith(HOST) for name in PATCHED):
        forget_programs()
    jax.config.update("jax_disable_most_optimizations", False)


HOST = ("jspec.bench", "jspec.cli", "jspec.loading", "jspec.serve", "jspec.text", "os", "sys", "tools.")
"""Beginnings of the names of modules of which nothing is traced."""
PATCHED = set()
"""Modules that tests of this module have patched: a program may be traced then that is another one elsewhere."""


def note_patches(method):
    """Makes a method of MonkeyPatch note in `PATCHED` whose attributes or items it changes."""
    change = getattr(pytest.MonkeyPatch, method)

    def noted(self, target, *rest, **options):
        owner = target if isinstance(target, str) else getattr(target, "__module__", getattr(target, "__name__", ""))
        PATCHED.add(str(owner))
        change(self, target, *rest, **options)

    setattr(pytest.MonkeyPatch, method, noted)


for _method in ("setattr", "delattr", "setitem", "delitem"):
    note_patches(_method)


MAPS = pathlib.Path("/proc/self/maps")
MOST_MAPS = 20_000
"""Each compiled program keeps memory mapped; Linux allows a process 65,530 maps and a compiler out of them crashes. One
test may take 20,000."""
STATM = pathlib.Path("/proc/self/statm")
MOST_BYTES = 3 * 2**30
"""Memory of a process in which programs are kept: two of them fit into 8 GB."""


SECONDS = 2.0
"""Time between two looks at the maps, whose listing takes milliseconds: a test that compiles much takes longer."""
LOOKED = [time.monotonic()]


@pytest.fixture(autouse=True)
def room_for_programs():
    """Forgets compiled programs between two tests where they have taken many of the maps a process may have."""
    yield
    if time.monotonic() > LOOKED[0] + SECONDS and MAPS.exists():
        LOOKED[0] = time.monotonic()
        resident = int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if resident > MOST_BYTES or MAPS.read_bytes().count(b"\n") > MOST_MAPS:
            forget_programs()


@pytest.fixture
def without_jaxtyping():
    """Turns off the checks of shapes and types that only tests have, so that those of the package run."""
    jaxtyping.config.update("jaxtyping_disable", True)
    PATCHED.add("jaxtyping")
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def needs():
    """A function that skips a test whose optional package is not installed, and names the extra that brings it."""
    return optional.needed
