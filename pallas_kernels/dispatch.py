"""Chooses the backend of an operation by one table of preferences."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import platform

BACKENDS = {"gpu": ("mosaic_gpu", "triton"), "tpu": ("mosaic_tpu",)}
"""The kernel backends of each platform, best first. Programs of a platform without one run on XLA."""
LEAST_CAPABILITY = 8.0
"""The oldest NVIDIA GPUs with kernels. XLA compiles no Triton kernel for others, such as a T4."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation and its backends.

    A kernel backend is a module of the operation's package, named like the backend, with

    - the operation itself, with `config=` (None: `default_config`) and `interpret=` (None: `platform.interpret()`);
    - `supported(...)` of the operation's arguments and `interpret=`, unless it can run all: None, or why not;
    - `TUNING`, only if it has tiles for some devices: a table as of `platform.for_device_kind`;
    - `worthwhile`, only if a later backend is faster for some arguments: whether to run on these;
    - `Config`, a frozen dataclass of tile sizes, warps and the like, and `default_config`, its value for given shapes.

    Attributes:
      name: of the function, the same in every module.
      package: full name of the operation's package.
      xla: the operation in plain JAX, for every platform.
      kernels: names of its kernel backends.
      indices: options, integers for the caller and arrays for a backend.
      smooth: the operation in plain JAX for gradients of kernels, if those of `xla` take more memory. None: `xla`.
    """

    name: str
    package: str
    xla: Callable[..., Any]
    kernels: tuple[str, ...]
    indices: tuple[str, ...] = ()
    smooth: Callable[..., Any] | None = None

    @property
    def backends(self) -> tuple[str, ...]:
        """The valid names of `backend=`."""
        return (*self.kernels, "xla")

    def module(self, kernel: str) -> ModuleType:
        """The module of a kernel backend.

        Raises:
          ImportError: the installed JAX lacks the backend.
        """
        return importlib.import_module(f"{self.package}.{kernel}")

    def run(self, backend: str | None, *args: object, **options: object) -> Any:
        """Run the operation.

        Args:
          backend: one of `backends`, to run or raise; on a CPU, kernels run in Pallas' interpreter. None: the
            first kernel backend of this platform that is available, supports the arguments and is worthwhile for them,
            otherwise XLA.

        Raises:
          ValueError: `backend` is unknown, belongs to another platform, is not available, or does not support the
            arguments.
        """
        function = self._choose(backend, args, options)
        # Arrays and indices are traced; all other arguments are static.
        traced = {name: jnp.asarray(options[name], jnp.int32) for name in self.indices if name in options}
        traced |= {
            name: value for name, value in options.items() if isinstance(value, jax.Array) or getattr(value, "ndim", 0)
        }
        static = tuple((name, value) for name, value in options.items() if name not in traced)
        positions = tuple(i for i, arg in enumerate(args) if isinstance(arg, int | jnp.integer))
        here = platform.platform(), platform.interpret(), platform.device()
        smooth = None if function is self.xla else self.smooth or self.xla
        return _traced_once(function, smooth, static, positions, here)(*args, **traced)

    def tuned(self) -> bool:
        """Whether a kernel of this platform is available, with tiles for the default device itself."""
        kernels = [kernel for kernel in BACKENDS.get(platform.platform(), ()) if kernel in self.kernels]
        usable = [self.module(kernel) for kernel in kernels if unavailable(self, kernel) is None]
        return any(platform.has_device_kind(getattr(module, "TUNING", {})) for module in usable)

    def _choose(self, backend: str | None, args: tuple, options: dict[str, object]) -> Callable[..., Any]:
        here = platform.platform()
        # The best supported backend.
        if backend is None:
            for kernel in BACKENDS.get(here, ()):
                if kernel in self.kernels and self._refusal(kernel, args, options) is None:
                    module = self.module(kernel)
                    if getattr(module, "worthwhile", lambda *_, **__: True)(*args, **options):
                        return getattr(module, self.name)
            return self.xla
        # A requested backend runs or raises.
        if backend not in self.backends:
            raise ValueError(f"{self.name}: backend={backend!r}: must be one of {', '.join(sorted(self.backends))}")
        if backend == "xla":
            return self.xla
        required = next(name for name, kernels in BACKENDS.items() if backend in kernels)
        if here not in (required, "cpu"):
            raise ValueError(f"{self.name}: backend={backend!r} requires a {required}, but this program targets {here}")
        reason = self._refusal(backend, args, options)
        if reason is not None:
            raise ValueError(f"{self.name}: backend={backend!r} cannot run: {reason}")
        return getattr(self.module(backend), self.name)

    def _refusal(self, kernel: str, args: tuple, options: dict[str, object]) -> str | None:
        """Why a kernel backend cannot run these arguments; None if it can."""
        return unavailable(self, kernel) or self.supported(kernel)(*args, **options)

    def supported(self, kernel: str) -> Callable[..., str | None]:
        """Why a kernel backend cannot run some arguments, as a function of them; it returns None if it can."""
        return getattr(self.module(kernel), "supported", lambda *_, **__: None)


@functools.cache
def _traced_once(
    function: Callable[..., Any],
    smooth: Callable[..., Any] | None,
    options: tuple[tuple[str, object], ...],
    static: tuple[int, ...],
    here: object,
) -> Any:
    """Wrap an operation in `jax.jit`: one trace for all calls with equal shapes and static arguments.

    A model calls the same operations in every layer, and tracing and lowering them takes most of the time before XLA
    compiles. XLA inlines the calls.

    smooth: the operation for gradients: in training, launches of kernels take no time. None: `function`.
    static: positions of arguments other than arrays.
    here: the platform and the device of a kernel's configuration.
    """

    def call(*args: Any, **arrays: Any) -> Any:
        def of_arrays(function: Callable[..., Any], traced: dict[int, Any], named: dict[str, Any]) -> Any:
            return function(*(traced.get(i, arg) for i, arg in enumerate(args)), **dict(options), **named)

        def residuals(*operands: Any) -> tuple[Any, Any]:
            return with_gradients(*operands), operands

        def backward(operands: Any, gradients: Any) -> Any:
            out, pull = jax.vjp(functools.partial(of_arrays, smooth or function), *operands)
            return pull(jax.tree.map(_of_whole, gradients, out))

        with_gradients = functools.partial(of_arrays, function)
        if smooth is not None:
            with_gradients = jax.custom_vjp(with_gradients)
            with_gradients.defvjp(residuals, backward)
        return with_gradients({i: arg for i, arg in enumerate(args) if i not in static}, arrays)

    call.__name__ = function.__name__
    return jax.jit(call, static_argnums=static)


def _of_whole(gradient: Any, out: Any) -> Any:
    """The gradient of a product that plain JAX does not divide into parts; readers add them, so all have the same."""
    return gradient[0].astype(out.dtype) if gradient.ndim > out.ndim else gradient


def unavailable(operation: Operation, kernel: str) -> str | None:
    """Why a kernel backend cannot be imported, or run on the default device; None if it can."""
    capability = platform.compute_capability() if platform.platform() == "gpu" else None
    if capability is not None and capability < LEAST_CAPABILITY:
        return f"not available for compute capability {capability}: must be at least {LEAST_CAPABILITY}"
    return _not_importable(operation, kernel)


@functools.cache
def _not_importable(operation: Operation, kernel: str) -> str | None:
    try:
        operation.module(kernel)
    except ImportError as error:
        # A failed import in our own code is a bug, and XLA must not hide it.
        if (error.name or "").partition(".")[0] not in ("jax", "jaxlib"):
            raise
        return f"not available in this version of JAX: {error}"
    return None
