"""Every operation fulfills the contract of `dispatch.Operation`: its modules, backends and errors."""

import dataclasses
import importlib
import inspect
import pathlib
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import REQUIRES, lacks_interpreter, requires

import pallas_kernels
from pallas_kernels import dispatch, platform
from pallas_kernels.dispatch import BACKENDS, Operation

FOLDER = pathlib.Path(pallas_kernels.__path__[0])
PACKAGES = sorted(path.parent.name for path in FOLDER.glob("*/api.py"))
OPERATIONS = {name: importlib.import_module(f"pallas_kernels.{name}").OPERATION for name in PACKAGES}
DEVICE_KINDS = {"gpu": "NVIDIA H100", "tpu": "TPU v5 lite"}
"""Platform -> the first device kind, which is the default, of its kernels' `TUNING` tables, if they begin with one."""

operations = pytest.mark.parametrize("package", PACKAGES)
kernels = pytest.mark.parametrize(
    ("package", "kernel"), [(package, kernel) for package in PACKAGES for kernel in OPERATIONS[package].kernels]
)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def paged(*row, page_size=4):
    """A pool of 2 layers and 4 pages, the page table of 2 sequences, and their lengths."""
    return normal(2, *row[:1], 4, page_size, *row[1:]), jnp.array([[3, 0], [1, 2]]), jnp.array([5, 0])


def example(package):
    """Positional arguments and options of a call of an operation."""
    match package:
        case "paged_attention" | "exact_attention":
            own = normal(2, 3, 1, 64)
            return (normal(2, 3, 2, 64), own, own, *paged(2, 1, 64), None), {"layer": 1, "scale": 0.1}
        case "mla_attention":
            pool, table, length = paged(1, 192, page_size=8)
            arrays = normal(2, 3, 2, 128), normal(2, 3, 2, 64), normal(2, 3, 192), pool
            narrow = (array.astype(jnp.bfloat16) for array in arrays)
            # So large that each node takes one row as it is, however weights are rounded.
            return (*narrow, table, length, None), {"layer": 1, "scale": 1e3}
        case "kv_compact":
            pool, table, start = paged(2, 1, 16)
            row = normal(2, 3, 1, 16)
            return (pool, ((row, row), (row, row)), table, start, jnp.array([[0, 2], [0, 1]]), jnp.array([2, 1])), {}
        case "delta_rule":
            q, k = normal(1, 4, 1, 8) / 3, jnp.flip(normal(1, 4, 1, 8)) / 3
            g, mask = -jnp.abs(normal(1, 4, 2)), jnp.array([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]])
            return (normal(1, 2, 8, 5), q, k, normal(1, 4, 2, 5), g, normal(1, 4, 2), mask == 1), {}
        case "topk":
            return (normal(2, 1500), 3), {}
        case "grouped_matmul":
            return (normal(6, 16), normal(3, 16, 8), jnp.array([2, 0, 4])), {}
        case "group_rows":
            return (jnp.array([[1, 0], [2, 1], [0, 2]]), 3, 1), {}
        case "split_heads":
            norms, options = (normal(8), 1 + normal(8)), {"kv_heads": 1, "eps": 1e-5}
            return (normal(1, 2, 4, 8), normal(1, 2, 4), normal(1, 2, 4), *norms), options
        case "exact_matmul":
            # Sums and products of whole numbers are exact, however they are rounded.
            return tuple(jnp.round(array).astype(jnp.float16) for array in (normal(6, 1088), normal(1088, 64))), {}
        case "gated_matmul":
            x, weight = (jnp.round(array).astype(jnp.float16) for array in (normal(6, 128), normal(128, 512)))
            return (x, weight), {"activation": jnp.abs}
        case "scaled_matmul":
            return (normal(6, 64), normal(64, 8).astype(jnp.int8), normal(4, 8)), {"group": 16}
        case "packed_matmul":
            words = (1e9 * normal(64, 8)).astype(jnp.int32)
            return (normal(6, 512), words, normal(4, 8) / 64), {"group": 128}
        case "residual_norm":
            norms, options = (normal(8), 1 + normal(8)), {"eps": 1e-5, "wide": True}
            return (normal(1, 2, 8), normal(1, 2, 8), norms, normal(1)[0]), options
    raise NotImplementedError(package)


def api(package):
    return getattr(importlib.import_module(f"pallas_kernels.{package}.api"), OPERATIONS[package].name)


def call(package, backend):
    """A function that runs the operation on the arrays of its example, and those arrays; integers are static."""
    args, options = example(package)
    arrays = [None if isinstance(arg, int) else arg for arg in args]

    def run(arrays):
        given = [arg if isinstance(arg, int) else array for arg, array in zip(args, arrays, strict=True)]
        return api(package)(*given, **options, backend=backend)

    return run, arrays


def captured_arguments(package, monkeypatch, mask=None):
    """The arguments and options that the API passes to a backend. mask: the last argument, in place of None."""
    seen, run = [], Operation.run

    def capture(self, backend, *args, **options):
        seen.append((args, options))
        return run(self, "xla", *args, **options)

    args, options = example(package)
    if mask is not None:
        assert args[-1] is None
        args = *args[:-1], mask
    with monkeypatch.context() as patch:
        patch.setattr(Operation, "run", capture)
        api(package)(*args, **options)
    return seen[0]


@operations
def test_an_operation_has_its_modules(package):
    operation = OPERATIONS[package]
    files = {path.stem for path in (FOLDER / package).glob("*.py")}
    assert {"api", "reference"} <= files
    assert files & {kernel for kernels in BACKENDS.values() for kernel in kernels} == set(operation.kernels)
    assert operation.package == f"pallas_kernels.{package}"
    assert callable(getattr(importlib.import_module(f"{operation.package}.reference"), operation.name))
    assert operation.xla.__module__ == f"{operation.package}.{'xla' if 'xla' in files else 'reference'}"
    backend = inspect.signature(api(package)).parameters["backend"]
    assert (backend.kind, backend.default) == (backend.KEYWORD_ONLY, None)


@kernels
def test_a_kernel_module_has_the_interface(package, kernel):
    operation = OPERATIONS[package]
    module = operation.module(kernel)
    assert dataclasses.is_dataclass(module.Config) and module.Config.__dataclass_params__.frozen
    shapes = inspect.signature(module.default_config).parameters.values()
    assert all(shape.kind == shape.KEYWORD_ONLY for shape in shapes)
    assert next(iter(module.TUNING)) in ("any other", DEVICE_KINDS[REQUIRES[kernel]])
    run = inspect.signature(getattr(module, operation.name)).parameters
    for name in ("config", "interpret"):
        assert (run[name].kind, run[name].default) == (inspect.Parameter.KEYWORD_ONLY, None)
    assert [name for name in run if name not in ("config", "interpret")] == list(
        inspect.signature(operation.xla).parameters
    )


@pytest.mark.slow(unless=("kv_compact-mosaic_tpu", "topk-triton"))
@kernels
def test_supported_takes_the_arguments_of_the_operation(package, kernel, monkeypatch):
    args, options = captured_arguments(package, monkeypatch)
    supported = OPERATIONS[package].supported(kernel)
    for interpret in (False,) if lacks_interpreter(kernel) else (None, True, False):
        assert supported(*args, **options, interpret=interpret) is None


@pytest.mark.slow(unless="group_rows")
@operations
def test_every_backend_equals_the_reference(package, monkeypatch):
    operation = OPERATIONS[package]
    args, options = captured_arguments(package, monkeypatch)
    reference = getattr(importlib.import_module(f"{operation.package}.reference"), operation.name)
    expected = jax.tree.leaves(reference(*args, **options))
    for backend in operation.backends:
        if not requires(backend).args[0]:
            run, arrays = call(package, backend)
            found = jax.tree.leaves(jax.jit(run)(arrays))
            for ours, theirs in zip(found, expected, strict=True):
                ours, theirs = (np.asarray(array, np.float64) for array in (ours, theirs))
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=backend)


@pytest.mark.slow(unless=("residual_norm", "split_heads"))
@operations
def test_every_backend_has_the_gradients_of_plain_jax(package):
    operation = OPERATIONS[package]

    def gradients(backend):
        run, arrays = call(package, backend)

        def loss(arrays):
            out = [x for x in jax.tree.leaves(run(arrays)) if jnp.issubdtype(x.dtype, jnp.floating)]
            return sum((jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in out), jnp.zeros(()))

        gradients = jax.grad(jax.jit(loss), allow_int=True)(arrays)
        return [x for x in jax.tree.leaves(gradients) if x.dtype != jax.dtypes.float0]

    for backend in operation.kernels:
        if not requires(backend).args[0]:
            for ours, theirs in zip(*map(gradients, (backend, "xla")), strict=True):
                np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (ours, theirs)), rtol=1e-4, atol=1e-5)


@operations
def test_the_first_kernel_of_a_platform_runs(package, monkeypatch):
    operation = OPERATIONS[package]
    for kernel in operation.kernels:
        if hasattr(operation.module(kernel), "worthwhile"):
            monkeypatch.setattr(operation.module(kernel), "worthwhile", lambda *args, **options: True)
    for name, preferred in {**BACKENDS, "cpu": ()}.items():
        monkeypatch.setattr(platform, "platform", lambda name=name: name)
        run, arrays = call(package, None)
        jaxpr = str(jax.make_jaxpr(run)(arrays))
        assert ("interpret=False" in jaxpr) == any(kernel in operation.kernels for kernel in preferred)


@kernels
def test_a_kernel_of_another_platform_is_an_error(package, kernel, monkeypatch):
    operation = OPERATIONS[package]
    for here in {"gpu", "tpu"} - {REQUIRES[kernel]}:
        monkeypatch.setattr(platform, "platform", lambda here=here: here)
        run, arrays = call(package, kernel)
        message = f"{operation.name}: backend='{kernel}' requires a {REQUIRES[kernel]}, but this program targets {here}"
        with pytest.raises(ValueError, match=message):
            jax.make_jaxpr(run)(arrays)


@operations
def test_an_unknown_backend_is_an_error(package):
    run, arrays = call(package, "cray")
    names = ", ".join(sorted(OPERATIONS[package].backends))
    with pytest.raises(ValueError, match=f"{OPERATIONS[package].name}: backend='cray': must be one of {names}"):
        jax.make_jaxpr(run)(arrays)


@pytest.mark.slow(unless=("kv_compact-mosaic_tpu", "topk-triton"))
@kernels
def test_config_and_interpret_reach_the_kernel(package, kernel, monkeypatch):
    """`default_config` is called only if no configuration is given; its fields and `interpret` reach the kernel."""
    operation = OPERATIONS[package]
    args, options = captured_arguments(package, monkeypatch)
    module, chosen = operation.module(kernel), []
    default = module.default_config
    monkeypatch.setattr(module, "default_config", lambda **shapes: chosen.append(default(**shapes)) or chosen[-1])

    def jaxpr(args=args, **given):
        arrays = [None if isinstance(arg, int) else arg for arg in args]

        def run(arrays):
            static = [arg if isinstance(arg, int) else array for arg, array in zip(args, arrays, strict=True)]
            return getattr(module, operation.name)(*static, **options, **given)

        return str(jax.make_jaxpr(run)(arrays))

    # A tree has tiles of its own.
    trees = ()
    if package == "exact_attention":
        trees = (captured_arguments(package, monkeypatch, mask=jnp.ones((2, 3, 3), bool))[0],)

    monkeypatch.setattr(platform, "platform", lambda: "cpu")
    if not lacks_interpreter(kernel):
        interpreted = jaxpr()
        assert isinstance(chosen[0], module.Config)
        del chosen[:]
        assert "interpret=" in interpreted and "interpret=False" not in interpreted
    compiled = jaxpr(interpret=False)
    assert compiled.count("interpret=") == compiled.count("interpret=False") > 0
    config = chosen.pop()
    assert jaxpr(config=config, interpret=False) == compiled
    assert not chosen
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        # Small arrays limit what a larger value changes, and 1 may be the smallest.
        values = {not value} if isinstance(value, bool) else {1, 2, value * 2} - {value}
        others = [dataclasses.replace(config, **{field.name: other}) for other in values]
        assert any(
            jaxpr(given, config=other, interpret=False) != jaxpr(given, config=config, interpret=False)
            for given in (args, *trees)
            for other in others
        ), field.name


# Dispatch itself, with an operation whose modules are fake


@pytest.fixture
def fake(monkeypatch):
    """An operation whose kernels return their names as a key, and the set of (kernel, argument) that is refused."""
    refused = set()
    for kernel in ("mosaic_gpu", "triton", "mosaic_tpu"):
        module = types.ModuleType(f"fake.{kernel}")
        module.op = lambda x, kernel=kernel: {kernel: x}
        module.supported = lambda x, kernel=kernel: "x is refused" if (kernel, x) in refused else None
        monkeypatch.setitem(sys.modules, f"fake.{kernel}", module)
    return Operation("op", "fake", lambda x: {"xla": x}, ("triton", "mosaic_gpu", "mosaic_tpu")), refused


def chosen(operation, backend, x):
    """The kernel that has run."""
    return next(iter(operation.run(backend, x)))


def test_the_first_kernel_that_supports_the_arguments_is_chosen(fake, monkeypatch):
    operation, refused = fake
    for here, expected in (("cpu", "xla"), ("gpu", "mosaic_gpu"), ("tpu", "mosaic_tpu"), ("other", "xla")):
        monkeypatch.setattr(platform, "platform", lambda here=here: here)
        assert chosen(operation, None, 1) == expected
        assert chosen(operation, "xla", 1) == "xla"
    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    refused.add(("mosaic_gpu", 1))
    assert (chosen(operation, None, 1), chosen(operation, None, 2)) == ("triton", "mosaic_gpu")
    assert chosen(operation, "triton", 2) == "triton"
    with pytest.raises(ValueError, match="op: backend='mosaic_gpu' cannot run: x is refused"):
        operation.run("mosaic_gpu", 1)
    refused.add(("triton", 1))
    assert chosen(operation, None, 1) == "xla"


def test_a_kernel_that_is_not_worthwhile_runs_only_if_it_is_named(fake, monkeypatch):
    operation, _ = fake
    sys.modules["fake.mosaic_gpu"].worthwhile = lambda x: x > 1
    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    assert (chosen(operation, None, 1), chosen(operation, None, 2)) == ("triton", "mosaic_gpu")
    assert chosen(operation, "mosaic_gpu", 1) == "mosaic_gpu"


def test_a_cpu_runs_the_kernels_of_all_platforms(fake, monkeypatch):
    operation, _ = fake
    monkeypatch.setattr(platform, "platform", lambda: "cpu")
    assert [chosen(operation, backend, 1) for backend in operation.backends] == list(operation.backends)


def unimportable(monkeypatch, name):
    real = importlib.import_module

    def fail(module):
        if module == "fake.mosaic_gpu":
            raise ImportError(f"No module named '{name}'", name=name)
        return real(module)

    monkeypatch.setattr(dispatch.importlib, "import_module", fail)
    monkeypatch.setattr(platform, "platform", lambda: "gpu")


def test_a_kernel_that_jax_cannot_import_is_skipped(fake, monkeypatch):
    operation, _ = fake
    unimportable(monkeypatch, "jax.experimental.pallas.mosaic_gpu")
    assert chosen(operation, None, 1) == "triton"
    with pytest.raises(
        ValueError, match="backend='mosaic_gpu' cannot run: not available in this version of JAX: No mo"
    ):
        operation.run("mosaic_gpu", 1)


@pytest.mark.parametrize("backend", ("triton", "xla"))
def test_a_backend_is_traced_once_for_all_calls_that_differ_in_their_arrays(backend, fake, monkeypatch):
    traced, device = [], "one"

    def op(x, count, weight=None, *, layer, scale):
        traced.append((count, type(layer).__name__, scale))
        return x * layer * scale + count + (0 if weight is None else weight)

    sys.modules["fake.triton"].op = op
    sys.modules["fake.triton"].supported = lambda *args, layer, **options: None if layer < 7 else "too deep"
    monkeypatch.setattr(platform, "device", lambda: device)
    operation, x = dataclasses.replace(fake[0], indices=("layer",), xla=lambda *a, **k: op(*a, **k)), jnp.arange(3)

    def run(*args, **options):
        return operation.run(backend, *args, **options).tolist()

    assert run(x, 1, layer=2, scale=3) == [1, 7, 13]
    assert run(x + 1, 1, layer=3, scale=3) == [10, 19, 28]
    assert len(traced) == 1 and traced[0][0] == 1 and traced[0][2] == 3 and "Tracer" in traced[0][1]
    # Whatever a kernel is built from makes another one.
    assert run(x, 2, layer=2, scale=3) == [2, 8, 14]
    assert run(x, 2, layer=2, scale=1) == [2, 4, 6]
    assert run(x, 2, x, layer=2, scale=1) == [2, 5, 8]
    assert run(x, 2, weight=x, layer=2, scale=1) == [2, 5, 8]
    # Arrays and numbers of NumPy are what those of JAX and of Python are.
    assert run(np.asarray(x), np.int32(2), weight=np.asarray(x), layer=np.int64(2), scale=np.int32(1)) == [2, 5, 8]
    assert run(x[:2], 2, layer=2, scale=1) == [2, 4]
    device = "two"
    assert run(x[:2], 2, layer=3, scale=1) == [2, 5]
    assert len(traced) == 8, traced
    with pytest.raises(ValueError, match="too deep"):
        operation.run("triton", x, 1, layer=7, scale=3)


def test_a_failing_import_of_our_own_is_not_hidden(fake, monkeypatch):
    operation, _ = fake
    unimportable(monkeypatch, "pallas_kernels.typo")
    with pytest.raises(ImportError, match="pallas_kernels.typo"):
        operation.run(None, 1)


def test_the_deprecation_of_triton_is_shown_once(monkeypatch):
    from pallas_kernels import _triton
    from pallas_kernels.topk import triton

    def lower(**given):
        return jax.make_jaxpr(lambda x: triton.topk(x, 2, **given))(jnp.zeros((2, 40)))

    _triton.warn_of_removal.cache_clear()
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        lower(interpret=True)
        assert not shown
        lower(interpret=False)
        lower(interpret=False)
    assert [(each.category, str(each.message)[:42]) for each in shown] == [
        (FutureWarning, "The Pallas Triton backend is deprecated in")
    ]
    _triton.warn_of_removal.cache_clear()


WITHOUT_TRITON = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None
import types
import jax
import numpy as np
import jspec
from pallas_kernels import dispatch
import test_contract

# Dispatch chooses as on a GPU; the programs run on the default device.
dispatch.platform = types.SimpleNamespace(**{**vars(dispatch.platform), "platform": lambda: "gpu"})
for package, operation in test_contract.OPERATIONS.items():
    run, arrays = test_contract.call(package, None)
    assert "pallas_call" not in str(jax.make_jaxpr(run)(arrays)), package
    jax.block_until_ready(jax.jit(run)(arrays))
    if "triton" not in operation.kernels:
        continue
    try:
        jax.make_jaxpr(test_contract.call(package, "triton")[0])(arrays)
    except ValueError as error:
        assert "backend='triton' cannot run: not available in this version of JAX" in str(error), error
    else:
        raise AssertionError(package)
model = jspec.load("bundled:python-tiny")
generation = jspec.generate(model, "def add(a, b):", drafter="ngram", max_new_tokens=8)
triton = ("jax.experimental.pallas.triton", "pallas_kernels._triton")
print(len(generation.tokens), [name for name in sys.modules if name.startswith(triton)])
"""


@pytest.mark.slow
def test_everything_runs_without_triton():
    """All operations and a whole generation run if `jax.experimental.pallas.triton` cannot be imported."""
    here = pathlib.Path(__file__).parent
    path = [str(FOLDER.parent), str(here), str(here.parent / "helpers")]
    setup = f"import sys; sys.path[:0] = {path}\n"
    done = subprocess.run([sys.executable, "-c", setup + WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[-2] == "8 ['jax.experimental.pallas.triton']"
