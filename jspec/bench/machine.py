"""What the machine can do, to compare with: its bandwidths, measured on random data."""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec.models import layers

WARM_UP = 2
"""Calls before the first that counts: one compiles, and one runs before command buffers are captured."""
BURST = 0.1
"""Seconds that calls in a row take at least, of which the host's part, to begin and to learn of the end, is 0.4 ms on a
machine with an H100."""
COPIED = {"cpu": 2**26}
"""Bytes of the array that is copied, by platform, and else 2**30: far more than any cache holds."""


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """Bytes moved by an operation, and the seconds it took, each time."""

    bytes: int
    seconds: list[float]

    @property
    def gb_per_second(self) -> float:
        """Of the median time, in 1e9 bytes."""
        return self.bytes / statistics.median(self.seconds) / 1e9


def copy_bandwidth(repeats: int) -> Bandwidth:
    """Bytes read and written by a copy of `COPIED` bytes."""
    size = COPIED.get(jax.default_backend(), 2**30)
    source = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    # An operation, since XLA copies nothing that it can alias.
    return Bandwidth(2 * size, seconds_of(jax.jit(lambda x: x + 1), source, repeats=repeats))


def gemv_bandwidth(hidden_size: int, vocab_size: int, dtype: Any, repeats: int) -> Bandwidth:
    """Bytes of an LM head that one row is multiplied by: [1, hidden_size] x [hidden_size, vocab_size]."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (1, hidden_size), dtype)
    weight = jax.random.normal(keys[1], (hidden_size, vocab_size), dtype)
    return Bandwidth(weight.nbytes, seconds_of(jax.jit(layers.linear), x, weight, repeats=repeats))


def seconds_of(function: Callable, *arguments: Any, repeats: int, burst: float = BURST) -> list[float]:
    """Seconds of a call, `repeats` times: each the mean of as many calls in a row as take `burst` seconds; the host
    awaits the last."""

    def elapsed(count):
        out, began = None, time.perf_counter()
        for _ in range(count):
            out = function(*arguments)
        jax.block_until_ready(out)
        return time.perf_counter() - began

    for _ in range(WARM_UP):
        elapsed(1)
    count = 1
    while elapsed(count) < burst:
        count *= 2
    return [elapsed(count) / count for _ in range(repeats)]


def environment() -> dict[str, Any]:
    """What figures hang on, beside the program."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "compilation_cache": jax.config.values.get("jax_compilation_cache_dir"),
    }
