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
import dataclasses
import functools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core.xla_options import loop_options
from pallas_kernels.packed_matmul import BLOCK, STRIDE, triton

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
    """A product, and the tile of the kernel. zeros: the matrix has zero points."""

    shape: str
    rows: int
    config: triton.Config
    zeros: bool = False

    @property
    def label(self) -> str:
        """The tile, and whether there are zero points."""
        return "x".join(map(str, dataclasses.astuple(self.config))) + " zeros" * self.zeros

    @property
    def bytes(self) -> float:
        """A matrix and its scales."""
        inner, columns = SHAPES[self.shape]
        return inner * columns * (0.5 + (4 + self.zeros) / GROUP)

    @property
    def count(self) -> int:
        """Matrices of a program."""
        return max(1, round(AT_LEAST / self.bytes))


def cases(names: list[str]) -> list[Case]:
    """What is timed, the most important first."""
    one = [(256, 1, 4), (128, 2, 8), (64, 2, 2), (128, 1, 4), (64, 2, 4), (256, 1, 8), (128, 2, 4)]
    few = [(128, 1, 4, 3), (128, 1, 4, 4), (64, 1, 4, 4), (64, 1, 2, 4)]
    made: list[Case] = []

    def put(name: str, rows: int, tile: tuple[int, ...], programs: int) -> None:
        inner, columns = SHAPES[name]
        block_n, unroll, warps, *stages = tile
        parts = 1
        while parts * 2 * -(-columns // block_n) <= programs and parts * 2 * unroll <= inner // BLOCK:
            parts *= 2
        block_m = 1 if rows == 1 else max(16, rows)
        made.append(Case(name, rows, triton.Config(block_m, block_n, unroll, parts, warps, *(stages or [1]))))

    for rows in ROWS:
        for name in names:
            inner, columns = SHAPES[name]
            config = triton.default_config(rows=rows, inner=inner, columns=columns, dtype=jnp.bfloat16)
            made += [Case(name, rows, config), Case(name, rows, config, zeros=True)]
    for programs in (1024, 512, 2048, 256):
        for rows in ROWS:
            for tile in one if rows == 1 else few:
                for name in names:
                    put(name, rows, tile, programs)
    return list(dict.fromkeys(made))


def structs(case: Case) -> tuple[Any, list[Any]]:
    """Shapes of x and of the matrices: words, scales and zero points."""
    inner, columns = SHAPES[case.shape]
    groups = inner // GROUP, columns
    matrix = (
        jax.ShapeDtypeStruct((inner // 8, columns), jnp.int32),
        jax.ShapeDtypeStruct(groups, jnp.float32),
        jax.ShapeDtypeStruct(groups, jnp.int8) if case.zeros else None,
    )
    return jax.ShapeDtypeStruct((case.rows, inner), jnp.bfloat16), [matrix] * case.count


def compiled(case: Case) -> Any:
    """The program of a case."""
    one = jax.jit(functools.partial(triton.packed_matmul, group=GROUP, config=case.config))

    def program(x: jax.Array, matrices: list[Any]) -> tuple[jax.Array, jax.Array]:
        def body(_: int, x: jax.Array) -> jax.Array:
            for matrix in matrices:
                out = lax.optimization_barrier(one(x, *matrix))
                x = x + out[:, :1] * 1e-6
            return x

        return one(x, *matrices[0]), lax.fori_loop(0, LOOPS, body, x)

    return jax.jit(program, compiler_options=loop_options()).lower(*structs(case)).compile


@functools.partial(jax.jit, static_argnames="struct")
def random(key: jax.Array, struct: Any) -> jax.Array:
    """Random words, scales, zero points or elements of x, by their type."""
    if struct.dtype == jnp.int32:
        return jax.random.bits(key, struct.shape, jnp.uint32).view(jnp.int32)
    if struct.dtype == jnp.int8:
        return jax.random.randint(key, struct.shape, 0, 17, jnp.int8)
    if struct.dtype == jnp.float32:
        return jax.random.uniform(key, struct.shape, jnp.float32, 0.5, 1.5) / 100
    return jax.random.normal(key, struct.shape, struct.dtype)


def data(case: Case) -> list[Any]:
    """The matrices of a program."""
    key = jax.random.key(7)
    return [
        tuple(
            None if part is None else random(jax.random.fold_in(key, 4 * i + place), part)
            for place, part in enumerate(matrix)
        )
        for i, matrix in enumerate(structs(case)[1])
    ]


def checked(x: np.ndarray) -> np.ndarray:
    """The columns whose values are compared."""
    return np.concatenate([x[:, :CHECKED], x[:, -CHECKED:]], axis=1)


def by_hand(x: jax.Array, words: jax.Array, scale: jax.Array, zero: jax.Array | None) -> np.ndarray:
    """Their values, on the host."""
    ends = checked(np.asarray(words)).reshape(-1, 1, STRIDE, 2 * CHECKED)
    values = (ends >> np.arange(0, 32, 4).reshape(-1, 1, 1)) & 15
    zeros = 8 if zero is None else np.repeat(checked(np.asarray(zero, np.int32)), GROUP, axis=0)
    wide = (values.reshape(8 * len(words), -1) - zeros) * np.repeat(checked(np.asarray(scale)), GROUP, axis=0)
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

    def named(case: Case) -> dict[str, Any]:
        return {"shape": case.shape, "rows": case.rows, "tile": case.label, "zeros": case.zeros}

    def left() -> float:
        return options.budget - (time.perf_counter() - began)

    def measure(case: Case, program: Any) -> None:
        kind = (case.shape, case.zeros)
        if kind not in arguments:
            arguments[kind] = data(case)
        x, matrices = random(jax.random.key(case.rows), structs(case)[0]), arguments[kind]
        out, _ = jax.block_until_ready(program(x, matrices))
        key = (*kind, case.rows)
        if key not in expected:
            expected[key] = by_hand(x, *matrices[0])
        error = float(np.abs(checked(np.asarray(out, np.float32)) - expected[key]).max() / np.abs(expected[key]).max())
        program(x, matrices)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready(program(x, matrices))
            times.append((time.perf_counter() - start) / LOOPS / case.count)
        us = 1e6 * statistics.median(times)
        speed = case.bytes / us / 1e3
        results.append(named(case) | {"us": us, "gb": speed, "error": error})

    def collect(block: bool) -> None:
        wait = concurrent.futures.wait(futures, 1 if block else 0, concurrent.futures.FIRST_COMPLETED)
        for future in wait.done:
            case = futures.pop(future)
            try:
                measure(case, future.result())
            except Exception as error:  # noqa: BLE001  # a tile that does not compile is a result
                results.append(named(case) | {"failed": str(error).splitlines()[0][:160]})

    for case in todo:
        if left() < 15:
            break
        futures[pool.submit(compiled(case))] = case
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
            for zeros in (False, True):
                some = [each for each in own if each["zeros"] == zeros][:4]
                if some:
                    line = "  ".join(f"{each['us']:.1f} ({each['gb']:.0f}) {each['tile']}" for each in some)
                    print(f"{name} {rows}: {line}")
    # Threads that still compile would keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
