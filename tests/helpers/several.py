"""Several processes of one machine that run programs together: with two CPU devices each, or with one GPU each."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import pytest

TESTS = Path(__file__).parents[1]
PROCESSES = 2
EACH = {"cpu": 2, "gpu": 1}
"""Devices of a process, by their kind."""
SECONDS = 240
"""The time after which processes that wait for each other count as stuck."""
MINUTE = 60
"""The time in which the others must end after one has died."""

Command = Callable[[str, int], Sequence[object]]
"""The arguments of Python of a process, from the address where all meet and its index."""


def have_gpus() -> bool:
    return jax.default_backend() == "gpu" and jax.device_count() >= PROCESSES


KINDS = [
    pytest.param("cpu", id="two CPU devices each"),
    pytest.param(
        "gpu", id="a GPU each", marks=pytest.mark.skipif(not have_gpus(), reason=f"needs {PROCESSES} GPUs in JAX")
    ),
]


def free_address() -> str:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return f"localhost:{found.getsockname()[1]}"


def start(command: Sequence[object], kind: str, index: int, log: Path, devices: int | None = None) -> subprocess.Popen:
    """Process INDEX: Python with these arguments. Its output goes to a file.

    devices: of CPUs; None: as many as `EACH` has.
    """
    environment = {
        **os.environ,
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join(
            [str(TESTS.parent), str(TESTS / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    if kind == "cpu":
        environment |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices or EACH[kind]),
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # which takes less time, as in other tests
        }
    else:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(PROCESSES)))).split(",")
        environment |= {"CUDA_VISIBLE_DEVICES": seen[index]}
    with open(log, "w") as output:
        return subprocess.Popen(
            [sys.executable, *map(str, command)], env=environment, stdout=output, stderr=subprocess.STDOUT
        )


def start_all(command: Command, kind: str, directory: Path, devices: int | None = None) -> list[subprocess.Popen]:
    """The processes; the output of each goes to INDEX.log. devices: as of `start`."""
    address = free_address()
    return [
        start(command(address, index), kind, index, directory / f"{index}.log", devices) for index in range(PROCESSES)
    ]


def worker(name: str, directory: Path, *arguments: object) -> Command:
    """A script of tests/mesh with ADDRESS COUNT INDEX, these arguments and DIRECTORY/INDEX.json."""
    script = TESTS / "mesh" / name
    return lambda address, index: (script, address, PROCESSES, index, *arguments, directory / f"{index}.json")


def logs(directory: Path) -> list[str]:
    """The ends of the processes' outputs."""
    return [(directory / f"{index}.log").read_text()[-4000:] for index in range(PROCESSES)]


def finish(processes: Sequence[subprocess.Popen], seconds: int = SECONDS) -> list[int]:
    """Their exit statuses, once the last one has died; processes that are stuck are ended."""
    *others, dying = processes
    try:
        return [dying.wait(seconds), *(process.wait(MINUTE) for process in others)][::-1]
    finally:
        for process in processes:
            process.kill()
