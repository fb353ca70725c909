"""Ahead-of-time compilation for TPUs, without hardware: memory, work and time of programs, by the compiler's estimate.

Everything is made from shapes, so neither the weights nor a TPU are needed.
"""

import dataclasses
import math
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
import tpu
from jax.stages import Compiled

from jspec.bench import launches
from jspec.bench.measure import (
    BenchSetup,
    CaseResult,
    Progress,
    case_bytes,
    lower_prefill,
    lower_rounds,
    method_of,
    new_case,
    prompts_of,
)
from jspec.core.types import Drafter
from jspec.models.sizes import tree_bytes

_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a program. arguments: weights and state, as arrays of the device. temporary: in addition."""

    arguments: int
    temporary: int


@dataclasses.dataclass
class CompiledCase:
    """What the compiler knows of a mode, a batch and a context. The fields after `case` are empty if it refuses.

    case: its shapes, `floor_bytes`, and why it was not compiled, if it was not.
    memory: of each program, prefill and decode.
    arguments: bytes of weights and state by our own arithmetic, to compare with the memory of decode.
    cycles: the compiler's estimate for a round, without kernels.
    modeled: seconds of a round in the compiler's cost model, without kernels: for each operation, the larger of the
      times for its bytes, from whichever memory, and for its arithmetic.
    accessed, operations: bytes and floating-point operations of a call of decode with one round, as the compiler counts
      them, those between its memories included.
    kernels: calls of Pallas kernels in a round.
    kernel_bytes: of keys and values read by a round.
    """

    case: CaseResult
    memory: dict[str, Memory] = dataclasses.field(default_factory=dict)
    arguments: int = 0
    cycles: int = 0
    modeled: float = 0.0
    accessed: float = 0.0
    operations: float = 0.0
    kernels: int = 0
    kernel_bytes: int = 0

    def roofline(self, chip: tpu.Chip) -> float:
        """Seconds of the chip's memory for the bytes read by a round."""
        return self.case.floor_bytes / chip.gb_per_second / 1e9

    def estimate(self, chip: tpu.Chip) -> float:
        """Seconds of a round: the compiler's cycles, and for kernels, which it does not estimate, those of the roofline
        for the keys and values."""
        return self.cycles / chip.hertz + (self.kernel_bytes / chip.gb_per_second / 1e9 if self.kernels else 0.0)


@dataclasses.dataclass(frozen=True)
class Programs:
    """The two programs of a case, with the seconds from tracing to the executable, and the shapes of their state.

    prefill: None if only the loop was compiled.
    launches: what the host starts to run the loop, as XLA writes it; "" for a TPU.
    """

    prefill: Compiled | None
    decode: Compiled
    seconds: Mapping[str, float]
    state: Any
    launches: str = ""


def compile_case(
    setup: BenchSetup, mode: str, drafter: Drafter, batch: int, context: int, device: Any, report: Progress
) -> CompiledCase:
    """Compiles a case; if the compiler refuses, `problem` of its case has the first line of the reason.

    setup: its weights may be shapes. drafter: bound to the target and the draft. device: as `tpu.device` returns it.
    """
    out = CompiledCase(new_case(setup, mode, drafter, batch, context))
    if out.case.problem:
        return out
    try:
        programs = compile_programs(setup, out.case, drafter, device, report)
    except jax.errors.JaxRuntimeError as error:
        out.case.problem = f"does not compile: {str(error).splitlines()[0]}"
        return out
    text, costs = programs.decode.as_text() or "", _costs(programs.decode)
    out.case.compile_seconds, out.case.state_bytes = dict(programs.seconds), tree_bytes(programs.state)
    out.memory = {name: memory_of(getattr(programs, name)) for name in programs.seconds}
    out.arguments = tree_bytes(setup.params) + out.case.state_bytes
    out.cycles, out.kernels = round_cycles(text), "\n".join(loop_lines(text)).count('"tpu_custom_call"')
    # Each operation unknown to the model counts as -1 s.
    modeled = costs.get("optimal_seconds", 0.0)
    out.modeled = modeled - math.floor(modeled)
    out.accessed, out.operations = costs.get("bytes accessed", 0.0), costs.get("flops", 0.0)
    out.kernel_bytes = out.case.floor_bytes - case_bytes(setup, drafter, batch, 0)
    return out


def compile_programs(
    setup: BenchSetup,
    case: CaseResult,
    drafter: Drafter,
    device: Any,
    report: Progress = str,
    *,
    only_loop: bool = False,
) -> Programs:
    """Compiles prefill and the loop of a case for a device without hardware, or for those of `setup.placement`.

    device: one of them. only_loop: prefill is traced, for the shapes of the state, and not compiled.

    Raises:
      jax.errors.JaxRuntimeError: the compiler refuses, for example because the memory is too small.
    """
    where = setup.placement or device
    setup = dataclasses.replace(setup, params=tpu.on(where, setup.params))
    method = method_of(setup, drafter)
    prefill: Compiled | None = None
    seconds: dict[str, float] = {}

    with jax.default_device(device):
        prompt = tpu.on(where, jax.eval_shape(lambda: prompts_of(setup, case)))
        if not only_loop:
            report("compiling prefill")
        began = time.perf_counter()
        lowered = lower_prefill(setup, case, method, prompt)
        state = tpu.on(where, lowered.out_info)
        if not only_loop:
            prefill, seconds["prefill"] = lowered.compile(), time.perf_counter() - began
        report("compiling decode")
        began = time.perf_counter()
        kind = "tpu" if device.platform == "tpu" else "gpu"
        decode, starts = launches.compiled(lower_rounds(setup, method, state), kind)
        seconds["decode"] = time.perf_counter() - began
    return Programs(prefill, decode, seconds, state, starts)


def memory_of(program: Compiled) -> Memory:
    """The bytes of a program."""
    analysis = program.memory_analysis()
    sizes = (getattr(analysis, f"{name}_size_in_bytes", 0) for name in ("argument", "temp"))
    return Memory(*sizes)


def _costs(program: Compiled) -> Mapping[str, float]:
    """The compiler's analysis of a program; some versions of JAX return it in a list."""
    costs: Any = program.cost_analysis() or {}
    return costs[0] if isinstance(costs, list) else costs


def round_cycles(text: str) -> int:
    """The sum of the compiler's estimates for the operations of a round, run one after the other.

    text: of a compiled program. Copies beside other operations, and kernels, have no estimate.
    """
    return sum(int(cycles) for line in loop_lines(text) for cycles in _CYCLES.findall(line))


def loop_lines(text: str) -> list[str]:
    """The operations of the loop of a program, those of the loops, conditions and fusions inside of it included."""
    parts: dict[str, list[str]] = {}
    entry, name = "", None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            name = header[2]
            parts[name] = []
            entry = name if header[1] else entry
        elif name:
            parts[name].append(line)
    queue = re.findall(r" while\(.*body=%?([\w.-]+)", "\n".join(parts.get(entry, [])))
    reached = dict.fromkeys(queue)
    while queue:
        for line in parts[queue.pop()]:
            new = [word for word in re.findall(r"[\w.-]+", line) if word in parts and word not in reached]
            reached |= dict.fromkeys(new)
            queue += new
    return [line for part in reached for line in parts[part]]
