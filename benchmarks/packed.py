"""The time of products with packed 4-bit matrices, for tiles of the GPU kernel, at the shapes of Llama 3.1 8B.

    python benchmarks/packed.py --budget 95 --out FILE.json

Each program multiplies by several random matrices, together larger than the GPU's cache, in a loop that is one CUDA
graph, with one small kernel between two products. Programs are compiled in threads. What is not done when the budget is
spent is left out. The table shows the best tiles (the fields of `Config`, in order) of each shape and number of rows,
with GB/s of words and scales; `error` is the largest difference from the host's product, over the largest value.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as pltriton

from jspec.core.xla_options import loop_options
from pallas_kernels.packed_matmul import BLOCK, STRIDE, triton
from pallas_kernels.scaled_matmul import scaled_matmul

SHAPES = {
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "head": (4096, 128256),
}
ROWS = (1, 6, 32)
GROUP = 128
AT_LEAST = 120e6
"""Bytes of the matrices of a program; the cache of an H100 has 50 MB."""
LOOPS = 60
CHECKED = 128
"""Columns at either end whose values are compared."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A product, and how it runs: a tile of the packed kernel, None for fp8 of `scaled_matmul`."""

    shape: str
    rows: int
    config: triton.Config | None
    variant: str = ""

    @property
    def label(self) -> str:
        """The tile, and the variant of the kernel."""
        return "x".join(map(str, dataclasses.astuple(self.config) if self.config else ())) + self.variant

    @property
    def bytes(self) -> float:
        """A matrix and its scales."""
        inner, columns = SHAPES[self.shape]
        return inner * columns * (1 if self.config is None else 0.5 + 4 / GROUP)

    @property
    def count(self) -> int:
        """Matrices of a program."""
        return max(1, round(AT_LEAST / self.bytes))


def cases(names: list[str]) -> list[Case]:
    """What is timed, the most important first."""
    one = [(128, 2, 4), (128, 1, 4), (64, 2, 2), (64, 4, 2), (256, 1, 4), (128, 4, 4), (64, 2, 4), (128, 2, 8)]
    more = [(256, 2, 8), (128, 1, 2), (64, 1, 2), (32, 4, 2), (32, 2, 1), (256, 1, 8), (128, 2, 2), (512, 1, 8)]
    few = [(128, 1, 4, 4), (128, 1, 4, 3), (64, 1, 4, 4), (128, 1, 8, 4), (64, 1, 2, 4), (128, 2, 4, 3)]
    others = [(128, 1, 4, 2), (128, 1, 4, 6), (256, 1, 8, 3), (64, 2, 4, 3), (32, 1, 2, 4), (256, 1, 4, 3)]
    made: dict[int, list[Case]] = collections.defaultdict(list)

    def put(order: int, name: str, rows: int, tile: tuple[int, ...], programs: int, variant: str = "") -> None:
        inner, columns = SHAPES[name]
        block_n, unroll, warps, *stages = tile
        block_m = 1 if rows == 1 else max(16, rows)
        blocks = inner // BLOCK
        parts = 1
        while parts * 2 * -(-columns // block_n) <= programs and parts * 2 * unroll <= blocks:
            parts *= 2
        config = triton.Config(block_m, block_n, unroll, parts, warps, *(stages or [1]))
        case = Case(name, rows, config, variant)
        if all(case not in group for group in made.values()):
            made[order].append(case)

    for name in names:
        main = name in ("gate_up", "down")
        if main:
            made[0].append(Case(name, 1, None, "fp8"))
        for place, tile in enumerate(one[: 8 if main else 6]):
            put(place // 4, name, 1, tile, 1024)
            put(place // 4, name, 1, tile, 1024, " fma")
            put(2, name, 1, tile, 2048, " fma")
        for rows in ROWS[1:]:
            for place, tile in enumerate(few[: 6 if main else 4]):
                put(place // 3, name, rows, tile, 1024)
                put(1 + place // 3, name, rows, tile, 1024, " asm")
        if main:
            for tile in more:
                put(3, name, 1, tile, 1024, " fma")
            for tile in one[:4]:
                put(3, name, 1, tile, 512, " fma")
                put(3, name, 1, tile, 4096, " fma")
                put(3, name, 1, (*tile, 4), 1024, " fma")
            for rows in ROWS[1:]:
                for tile in others:
                    put(3, name, rows, tile, 1024)
                for tile in few[:3]:
                    put(4, name, rows, tile, 512)
                    put(4, name, rows, tile, 256, " asm")
    return [case for order in sorted(made) for case in made[order]]


def _asm_values(words: jax.Array, place: int, zero: object) -> Any:
    """The values at a place of two words at a time, in bfloat16, with a zero point of 8."""
    assert zero == 8
    half = "0x5410" if place < 4 else "0x7632"
    text = f"""
    {{
    .reg .b32 t, m, o, one, off;
    mov.b32 m, 0x000F000F; mov.b32 o, 0x43004300; mov.b32 one, 0x3F803F80; mov.b32 off, 0xC308C308;
    prmt.b32 t, $1, $2, {half};
    shr.u32 t, t, {4 * (place % 4)};
    lop3.b32 t, t, m, o, 0xEA;
    fma.rn.bf16x2 $0, t, one, off;
    }}
    """
    shape = jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)
    options = {"args": [words], "constraints": "=r,r,r", "pack": 2, "result_shape_dtypes": [shape]}
    return pltriton.elementwise_inline_asm(text, **options)[0]


def _asm_multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
    """One instruction, which XLA does not make of a product and a sum."""
    shape = jax.ShapeDtypeStruct(c.shape, c.dtype)
    args = [jnp.broadcast_to(each, c.shape) for each in (a, b, c)]
    options = {"args": args, "constraints": "=f,f,f,f", "pack": 1, "result_shape_dtypes": [shape]}
    return pltriton.elementwise_inline_asm("fma.rn.f32 $0, $1, $2, $3;", **options)[0]


VARIANTS = {
    "": {},
    "fp8": {},
    " asm": {"_values": _asm_values},
    " fma": {"_multiply_add": _asm_multiply_add},
}
"""What they replace in the kernel's module."""


def product(case: Case) -> Any:
    """The function of x, a matrix and its scales."""
    if case.config is None:
        return functools.partial(scaled_matmul, group=SHAPES[case.shape][0])
    run = functools.partial(triton.packed_matmul, group=GROUP, config=case.config)
    return lambda x, words, scale: run(x, words, scale, None)


def structs(case: Case) -> tuple[Any, list[Any]]:
    """Shapes of x and of the matrices with their scales."""
    inner, columns = SHAPES[case.shape]
    if case.config is None:
        one = ((inner, columns), jnp.float8_e4m3fn), ((1, columns), jnp.float32)
    else:
        one = ((inner // 8, columns), jnp.int32), ((inner // GROUP, columns), jnp.float32)
    matrix = tuple(jax.ShapeDtypeStruct(*each) for each in one)
    return jax.ShapeDtypeStruct((case.rows, inner), jnp.bfloat16), [matrix] * case.count


def compiled(case: Case) -> Any:
    """The program of a case."""
    multiply = product(case)
    one = jax.jit(multiply)

    def program(x: jax.Array, matrices: list[Any]) -> tuple[jax.Array, jax.Array]:
        def body(_: int, x: jax.Array) -> jax.Array:
            for words, scale in matrices:
                out = lax.optimization_barrier(one(x, words, scale))
                x = x + out[:, :1] * 1e-6
            return x

        return one(x, *matrices[0]), lax.fori_loop(0, LOOPS, body, x)

    with mock.patch.multiple(triton, **VARIANTS[case.variant]) if VARIANTS[case.variant] else contextlib.nullcontext():
        lowered = jax.jit(program, compiler_options=loop_options()).lower(*structs(case))
    return lowered.compile


@functools.partial(jax.jit, static_argnames=("struct", "narrow"))
def random(key: jax.Array, struct: Any, narrow: bool) -> jax.Array:
    """Random values, words, or scales."""
    if struct.dtype == jnp.int32:
        return jax.random.bits(key, struct.shape, jnp.uint32).view(jnp.int32)
    if narrow:
        return jax.random.normal(key, struct.shape, jnp.bfloat16).astype(struct.dtype)
    if struct.dtype == jnp.float32:
        return jax.random.uniform(key, struct.shape, jnp.float32, 0.5, 1.5) / 100
    return jax.random.normal(key, struct.shape, struct.dtype)


def data(case: Case) -> tuple[jax.Array, list[Any]]:
    """The arguments of a program."""
    x, matrices = structs(case)
    key = jax.random.key(7)
    made = []
    for i, matrix in enumerate(matrices):
        keys = jax.random.split(jax.random.fold_in(key, i))
        made.append(tuple(random(k, each, each.dtype.itemsize == 1) for k, each in zip(keys, matrix, strict=True)))
    return random(jax.random.fold_in(key, 1000 + case.rows), x, False), made


def checked(x: np.ndarray) -> np.ndarray:
    """The columns whose values are compared."""
    return np.concatenate([x[:, :CHECKED], x[:, -CHECKED:]], axis=1)


def by_hand(x: jax.Array, words: jax.Array, scale: jax.Array) -> np.ndarray:
    """Their values, on the host."""
    ends = checked(np.asarray(words)).reshape(-1, 1, STRIDE, 2 * CHECKED)
    values = (ends >> np.arange(0, 32, 4).reshape(-1, 1, 1)) & 15
    wide = (values.reshape(8 * len(words), -1) - 8) * np.repeat(checked(np.asarray(scale)), GROUP, axis=0)
    return np.asarray(x, np.float32) @ wide.astype(np.float32)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=95, help="seconds")
    parser.add_argument("--threads", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--out", type=Path, help="write all times to this file")
    options = parser.parse_args()
    began = time.perf_counter()
    todo = [case for case in cases(options.shapes) if case.rows in options.rows]
    pool = concurrent.futures.ThreadPoolExecutor(options.threads)
    futures: dict[concurrent.futures.Future, Case] = {}
    arguments: dict[tuple, Any] = {}
    expected: dict[tuple, Any] = {}
    results: list[dict[str, Any]] = []

    def left() -> float:
        return options.budget - (time.perf_counter() - began)

    def measure(case: Case, program: Any) -> None:
        kind = (case.shape, case.config is None)
        if kind not in arguments:
            arguments[kind] = data(dataclasses.replace(case, rows=1))[1]
        x, matrices = random(jax.random.key(case.rows), structs(case)[0], False), arguments[kind]
        out, _ = jax.block_until_ready(program(x, matrices))
        error = None
        if case.config is not None:
            key = (case.shape, case.rows)
            if key not in expected:
                expected[key] = by_hand(x, *matrices[0])
            got = checked(np.asarray(out, np.float32))
            error = float(np.abs(got - expected[key]).max() / np.abs(expected[key]).max())
        program(x, matrices)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready(program(x, matrices))
            times.append((time.perf_counter() - start) / LOOPS / case.count)
        us = 1e6 * statistics.median(times)
        results.append(
            {
                "shape": case.shape,
                "rows": case.rows,
                "tile": case.label,
                "variant": case.variant,
                "us": us,
                "gb": case.bytes / us / 1e3,
            }
            | {"error": error}
        )

    def collect(block: bool) -> None:
        wait = concurrent.futures.wait(futures, 1 if block else 0, concurrent.futures.FIRST_COMPLETED)
        for future in wait.done:
            case = futures.pop(future)
            try:
                measure(case, future.result())
            except Exception as error:  # noqa: BLE001  # a tile that does not compile is a result
                text = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                results.append(
                    {
                        "shape": case.shape,
                        "rows": case.rows,
                        "tile": case.label,
                        "variant": case.variant,
                        "failed": text,
                    }
                )

    for case in todo:
        if left() < 15:
            break
        try:
            futures[pool.submit(compiled(case))] = case
        except Exception as error:  # noqa: BLE001  # as above
            text = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            results.append(
                {"shape": case.shape, "rows": case.rows, "tile": case.label, "variant": case.variant, "failed": text}
            )
        if len(futures) >= 2 * options.threads:
            collect(False)
    while futures and left() > 6:
        collect(True)
    missing = len(todo) - len(results)
    for future in futures:
        future.cancel()
    if options.out:
        options.out.write_text(json.dumps(results, indent=0))
    failures = collections.Counter(each["failed"] for each in results if "failed" in each)
    for text, count in failures.most_common(6):
        print(f"failed {count} times: {text}")
        print("   ", *[each["tile"] for each in results if each.get("failed") == text][:8])
    worst = max((each["error"] for each in results if each.get("error") is not None), default=0)
    print(f"{len(results)} of {len(todo)} cases, {missing} left out, {time.perf_counter() - began:.0f} s")
    print(f"largest error {worst:.1e}; {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print("us (GB/s) tile: MxNxUNROLLxPARTSxWARPSxSTAGES; a time contains the small kernel between two products")
    for name in options.shapes:
        for rows in options.rows:
            own = [each for each in results if (each["shape"], each["rows"]) == (name, rows) and "us" in each]
            own.sort(key=lambda each: each["us"])
            for kind, most in (("", 4), (" asm", 3), (" fma", 4), ("fp8", 1)):
                some = [each for each in own if each["variant"] == kind]
                line = "  ".join(f"{each['us']:.1f} ({each['gb']:.0f}) {each['tile']}" for each in some[:most])
                if some:
                    print(f"{name} {rows}: {line}")
    # Threads that still compile would keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
