"""Agreement of several processes with devices of all of them, as after `jax.distributed.initialize()`.

Each must make the same calls with the same arguments: if programs differ, the processes wait for each other forever.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Int, PyTree

from jspec.core.sharding import Placement

_BYTES = 16
"""Bytes of a digest."""
_MOST_ANNOUNCED = 4096
"""Maximum bytes of a text of `announced`."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def fetch(tree: PyTree) -> Any:
    """Copies arrays to the host. If this process lacks a part of one, all processes must call this alike."""
    return jax.tree.map(_fetch, tree)


def _fetch(array: Any) -> Any:
    if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
        return multihost_utils.process_allgather(array, tiled=True)
    return jax.device_get(array)


def least(placement: Placement | None, value: int) -> int:
    """The minimum of 64-bit values over the processes of a placement."""
    if not _is_shared(placement):
        return value
    values = multihost_utils.process_allgather(np.frombuffer(np.int64(value).tobytes(), np.uint8))
    return int(np.ascontiguousarray(values).view(np.int64).min())


def announced(text: str) -> str:
    """Broadcasts the text of process 0 (ValueError beyond 4,096 bytes); all processes must call this."""
    data = text.encode()
    if len(data) > _MOST_ANNOUNCED:
        raise ValueError(f"text: has {len(data)} bytes; must have at most {_MOST_ANNOUNCED}")
    padded = np.frombuffer(data.ljust(_MOST_ANNOUNCED, b"\0"), np.uint8)
    return multihost_utils.process_allgather(padded)[0].tobytes().rstrip(b"\0").decode()


@contextlib.contextmanager
def agreement(placement: Placement | None, names: Sequence[str]) -> Generator[Callable[[Mapping[str, object]], None]]:
    """A context to check arguments in, and to compare them over processes by calling the yielded function.

    If one process fails earlier, the others fail, too. In a single process only its own checks count.

    names: of the values, compared by `repr`.

    Raises:
      ValueError: the values of two processes differ, or another process has failed; in every process.
    """
    compared = False

    def compare(values: Mapping[str, object]) -> None:
        nonlocal compared
        compared = True
        if _is_shared(placement):
            _check(names, multihost_utils.process_allgather(np.stack([_digest(values[name]) for name in names])))

    try:
        yield compare
    except Exception:
        if not compared and _is_shared(placement):
            multihost_utils.process_allgather(np.zeros((len(names), _BYTES), np.uint8))
        raise


def _is_shared(placement: Placement | None) -> bool:
    return placement is not None and placement.spans_processes


def stable_repr(value: object) -> str:
    """The `repr` of a value, without addresses of objects."""
    return _ADDRESS.sub("", repr(value))


def _digest(value: object) -> Int[np.ndarray, " bytes"]:
    return np.frombuffer(hashlib.sha256(stable_repr(value).encode()).digest()[:_BYTES], np.uint8)


def _check(names: Sequence[str], digests: Int[np.ndarray, "processes names bytes"]) -> None:
    """Raises ValueError unless all processes have the same digests; zeros mean failure."""
    for process, digest in enumerate(digests):  # Failures first.
        if not digest.any():
            raise ValueError(f"process {process} has refused this call: the reason is in its own error")
    for index, name in enumerate(names):
        for process, digest in enumerate(digests):
            if (digest[index] != digests[0][index]).any():
                raise ValueError(
                    f"{name}: differs between process 0 and process {process}; all processes must make the same calls "
                    "with the same arguments"
                )
