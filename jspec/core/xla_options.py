"""XLA compiler options for the program that contains the decode loop.

**One CUDA graph.** By default XLA captures the kernels of a round in CUDA graphs, and after every round the host waits
for the device to read one byte: whether there is another round. With WHILE among the captured commands, condition and
rounds become one graph with a loop node, and the host waits once. The loop is the only command in its program, so the
minimum length of a captured sequence must be 1 as well: with XLA's default of 5, WHILE captures nothing.

**Independent kernels.** By default the commands of a graph wait for each other in the order of XLA's schedule. With
CONCURRENT they wait only for those whose buffers they use, so small kernels, such as those of a commit, run side by
side; a round of an adaptive drafter gains most. XLA then reuses less memory: temporary values take 1.5 to 2
times as much, which is little beside weights and caches (docs/decisions.md). With several devices the order stays,
because NCCL needs the same order of sums on all of them.

**Sums over devices.** NCCL's kernels are captured, too, with COLLECTIVES. Since JAX 0.11 XLA replaces some of them by
kernels of its own, not capturable, so these are turned off. NCCL reads two variables before its first call; both must
be 0. Otherwise, NCCL_GRAPH_MIXING_SUPPORT adds waits for events to a graph, forbidden in a loop node, and
NCCL_RUNTIME_CONNECT connects devices at the first sum, and fails during a capture (NCCL issues 1471 and 1513).

**Matrix products of many tokens.** XLA times candidates for each matrix product with its operands in the GPU's cache,
where the weights are not when a round reads them, so it prefers its own Triton kernels too often. They are the fastest
for a few tokens; for more, cuBLAS is (docs/decisions.md). Products with 8-bit weights are left to XLA for any number of
tokens: its kernels widen the weights inside the product, while for cuBLAS they are written to memory in full first.
"""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, Self, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from jspec.core.checks import check_flag, check_int, check_text
from pallas_kernels import platform

TRITON_GEMM_MAX_TOKENS = 32
"""Most tokens of a round, all sequences together, for which XLA's own matrix products are faster."""
_CAPTURE = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": "1",
}
_CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
_PRODUCTS = {"xla_gpu_enable_triton_gemm": False}
CAPTURED_IF_ZERO = "NCCL_GRAPH_MIXING_SUPPORT", "NCCL_RUNTIME_CONNECT"
"""Variables of NCCL, read before its first call. Sums over devices are captured only if both are 0."""
_OWN_COLLECTIVES = "xla_gpu_experimental_use_collective_kernels"
"""XLA's own kernels for sums over devices; since JAX 0.11."""


def prepare_collectives() -> None:
    """Lets NCCL's kernels be part of the loop's graph, unless the environment decides otherwise."""
    for name in CAPTURED_IF_ZERO:
        os.environ.setdefault(name, "0")


def loop_options(*, many: bool = False, devices: int = 1, flags: str | None = None) -> dict[str, str | bool]:
    """Options for `jax.jit(..., compiler_options=...)` of a program with the loop; they only affect GPUs.

    many: each round verifies more than `TRITON_GEMM_MAX_TOKENS` tokens.
    devices: over which the model is split. With several the loop is one graph only if the variables of
      `CAPTURED_IF_ZERO` are 0, as `jspec.load` sets them.
    flags: XLA_FLAGS; None: those of this process. They take precedence, by groups of options.

    Raises:
      TypeError: `many` is not a bool, `devices` not an int, or `flags` not a str.
      ValueError: `devices` is less than 1.
    """
    many, devices = check_flag("many", many), check_int("devices", devices, least=1)
    flags = os.environ.get("XLA_FLAGS", "") if flags is None else check_text("flags", flags)
    capture: dict[str, str | bool] = dict(_CAPTURE)
    if devices > 1 and all(os.environ.get(name) == "0" for name in CAPTURED_IF_ZERO):
        capture["xla_gpu_enable_command_buffer"] = f"{_CAPTURE['xla_gpu_enable_command_buffer']},COLLECTIVES"
        if jax.__version_info__ >= (0, 11):
            capture[_OWN_COLLECTIVES] = ""
    groups = capture, _CONCURRENT if devices == 1 else {}, _PRODUCTS if many else {}
    return {
        name: value for group in groups if not any(option in flags for option in group) for name, value in group.items()
    }


def prefers_cublas(params: PyTree, tokens: int) -> bool:
    """Whether rounds of this many tokens, all sequences together, need `loop_options(many=True)`.

    params: the weights, or their shapes.
    """
    if platform.platform() != "gpu" or tokens <= TRITON_GEMM_MAX_TOKENS:
        return False
    return not any(leaf.dtype.itemsize == 1 and leaf.dtype != np.bool_ for leaf in jax.tree.leaves(params))


_MAKING = threading.Lock()
"""Held while a variant or a jitted function is made."""
P = ParamSpec("P")
R = TypeVar("R")


class LoopProgram(Generic[P, R]):
    """`jax.jit` of a function with the loop, with `loop_options`.

    It is jitted at its first use, because the options depend on the environment; no import may read it. The program
    itself has the options for few tokens on one device; `variant` has the others.
    """

    def __init__(self, function: Callable[P, R], *, static_argnames: Sequence[str], donate_argnames: Sequence[str]):
        functools.update_wrapper(self, function)
        self._function, self._static, self._donated = function, tuple(static_argnames), tuple(donate_argnames)
        self._many, self._devices = False, 1
        self._jitted: Any = None
        self._variants: dict[tuple[bool, bool], Self] = {(False, False): self}

    def variant(self, *, many: bool = False, devices: int = 1) -> Self:
        """The same function, jitted with other options.

        many: for rounds of many tokens (`prefers_cublas`).
        devices: of the split model; all above one have the same options.
        """
        key = many, devices > 1
        with _MAKING:
            if key not in self._variants:
                program = type(self)(self._function, static_argnames=self._static, donate_argnames=self._donated)
                program._many, program._devices, program._variants = many, devices, self._variants
                self._variants[key] = program
            return self._variants[key]

    @property
    def jitted(self) -> Any:
        """The jitted function; the same one in all threads, as each would compile for itself."""
        with _MAKING:
            if self._jitted is None:
                self._jitted = jax.jit(
                    self._function,
                    static_argnames=self._static,
                    donate_argnames=self._donated,
                    compiler_options=loop_options(many=self._many, devices=self._devices),
                )
            return self._jitted

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the jitted function."""
        return self.jitted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The jitted function's, such as `lower`."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.jitted, name)
