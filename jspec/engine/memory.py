"""What a generation takes of a device's memory, and whether it is there."""

import dataclasses
import math
import os
from typing import Any

import jax
import jax.numpy as jnp

from jspec.core.types import Drafter, Params, Target
from pallas_kernels import platform

HEADROOM = 0.05
"""Share of a device's memory that is left to activations and logits."""


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes that the state of a generation takes.

    batch, capacity: its rows, and the tokens that each has room for.
    target, draft: bytes of the target's cache and of the drafter's state.
    """

    batch: int
    capacity: int
    target: int
    draft: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.target + self.draft

    def __str__(self) -> str:
        each = self.total / (self.batch * self.capacity)
        return (
            f"{self.batch} rows of {self.capacity} tokens take {gigabytes(self.total)}, {each:,.0f} bytes a token: "
            f"{gigabytes(self.target)} for the target's cache and {gigabytes(self.draft)} for the draft's"
        )


def need(params: Params, target: Target, drafter: Drafter, batch: int, capacity: int, page_size: int) -> Need:
    """What the caches of a generation will take; nothing is allocated."""
    cache = jax.eval_shape(lambda p: target.init_cache(p, batch, capacity, page_size), params.target)
    draft = jax.eval_shape(lambda p: drafter.init(p, batch, capacity, page_size), params)
    return Need(batch, capacity, tree_bytes(cache), tree_bytes(draft))


def tree_bytes(arrays: Any) -> int:
    """Bytes of all arrays in a pytree."""
    leaves = [leaf for leaf in jax.tree.leaves(arrays) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def free_bytes(device: Any = None) -> tuple[int, int] | None:
    """Bytes that JAX may still take of a device's memory, and those that it may take in all.

    device: None: the default one. A CPU does not say: None.
    """
    stats = (device or jax.devices()[0]).memory_stats() or {}
    if "bytes_limit" not in stats or "bytes_in_use" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"], stats["bytes_limit"]


def fit(params: Params, target: Target, drafter: Drafter, batch: int, page_size: int, wanted: int, least: int) -> int:
    """The capacity of a generation: `wanted` tokens a row, or where these do not fit the `least` that it needs.

    Raises:
      ValueError: the least does not fit either; the message holds the arithmetic.
    """
    (device, *_) = jax.tree.leaves(params.target)[0].devices()
    memory = free_bytes(device)
    if memory is None:
        return wanted
    free, limit = memory
    room = free - int(HEADROOM * limit)
    for capacity in (wanted, least):
        asked = need(params, target, drafter, batch, capacity, page_size)
        if asked.total <= room:
            return capacity
    each = asked.total / (batch * least)
    left = max(0, int(room / each))
    raise ValueError(
        f"this generation does not fit: {asked}. Of the {gigabytes(limit)} that JAX may take of the device, "
        f"{gigabytes(free)} are free, and {HEADROOM:.0%} of all is kept for activations. Room for {left} tokens is "
        f"left: {left // batch} in each of {batch} rows, or {left // least} rows of {least}{_advice()}"
    )


def explain(error: Exception, asked: Need) -> None:
    """Adds to an error of the allocator what was asked of it."""
    if "RESOURCE_EXHAUSTED" in str(error):
        error.add_note(f"jspec: {asked}, beside the weights and the activations{_advice()}")


def gigabytes(count: int) -> str:
    """A number of bytes, to be read."""
    return f"{count / 1e9:,.2f} GB"


def _advice() -> str:
    if platform.platform() != "gpu" or "XLA_PYTHON_CLIENT_MEM_FRACTION" in os.environ:
        return ""
    return (
        ". JAX takes three quarters of a GPU's memory; with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment, "
        "set before it starts, it takes more"
    )
