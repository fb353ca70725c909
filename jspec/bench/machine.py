"""The machine: its memory bandwidths, measured on random data, and what identifies it in a measurement."""

import dataclasses
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec.core.package import VERSION
from jspec.models import layers

WARM_UP = 2
"""Untimed calls: the first compiles, the second runs before command buffers are captured."""
BURST = 0.1
"""Minimum seconds of a burst of calls. The host's overhead per burst is 0.4 ms on a machine with an H100."""
COPY_BYTES = {"cpu": 2**26}
"""Bytes of the copied array, by platform; 2**30 on all others. Larger than any hardware cache."""


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """The bytes moved by an operation, and the seconds of each repetition."""

    bytes: int
    seconds: list[float]

    @property
    def gb_per_second(self) -> float:
        """In 1e9 bytes, from the median time."""
        return self.bytes / statistics.median(self.seconds) / 1e9


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where and when something is measured; None: unknown. `Measurement` has most of these fields."""

    date: str
    commit: str | None
    jspec: str | None
    jax: str
    driver: str | None
    device: str
    device_count: int
    xla_flags: str
    compilation_cache: str | None


def copy_bandwidth(repeats: int) -> Bandwidth:
    """Bandwidth of a copy of `COPY_BYTES`, read and written."""
    size = COPY_BYTES.get(jax.default_backend(), 2**30)
    source = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    # The addition keeps XLA from aliasing input and output instead of copying.
    return Bandwidth(2 * size, seconds_of(jax.jit(lambda x: x + 1), source, repeats=repeats))


def gemv_bandwidth(hidden_size: int, vocab_size: int, dtype: DTypeLike, repeats: int) -> Bandwidth:
    """Bandwidth of the product of one row with an LM head: [1, hidden_size] x [hidden_size, vocab_size]."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (1, hidden_size), dtype)
    weight = jax.random.normal(keys[1], (hidden_size, vocab_size), dtype)
    return Bandwidth(weight.nbytes, seconds_of(jax.jit(layers.linear), x, weight, repeats=repeats))


def seconds_of(function: Callable, *arguments: object, repeats: int, burst: float = BURST) -> list[float]:
    """Seconds per call, `repeats` times: each the mean over a burst of calls of `burst` seconds or more.

    The host waits for the last call of a burst only.
    """

    def elapsed(count: int) -> float:
        out, began = None, time.perf_counter()
        for _ in range(count):
            out = function(*arguments)
        jax.block_until_ready(out)
        return time.perf_counter() - began

    # Compile and warm up.
    for _ in range(WARM_UP):
        elapsed(1)
    # Double the calls until a burst is long enough.
    count = 1
    while elapsed(count) < burst:
        count *= 2
    return [elapsed(count) / count for _ in range(repeats)]


def environment(device_count: int = 1) -> Environment:
    """The machine, the versions and the time. device_count: devices in use."""
    return Environment(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit(),
        jspec=VERSION,
        jax=jax.__version__,
        driver=_driver(Path("/proc/driver/nvidia/version")) if jax.default_backend() == "gpu" else None,
        device=jax.devices()[0].device_kind,
        device_count=device_count,
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        compilation_cache=jax.config.values.get("jax_compilation_cache_dir"),
    )


def commit() -> str | None:
    """The commit of the checkout of this file; None if it is not in one."""
    source = Path(__file__).resolve()

    # Ask git, if the package lies in a checkout.
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source.parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", source.name)  # fails for an installed copy inside another checkout
        commit = git("rev-parse", "--short", "HEAD")
        return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return None


def _driver(path: Path) -> str | None:
    """The version in the file of NVIDIA's kernel module."""
    try:
        version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return version[0] if version else None
