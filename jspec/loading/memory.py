"""The memory of a generation, and whether the device has it."""

import dataclasses
import functools
import os
from collections.abc import Collection
from typing import Any

import jax
from jax.core import Tracer
from jaxtyping import PyTree

from jspec.cache.pages import fit_page_size
from jspec.core.sharding import Device
from jspec.core.types import Drafter, Params, Target
from jspec.loading import host_memory
from jspec.models.decoder import Decoder
from jspec.models.quantized import dtype_names
from jspec.models.sizes import Shapes, shapes_of, tree_bytes
from pallas_kernels import platform

HEADROOM = 0.05
"""Fraction of the device's memory reserved for activations and logits."""


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes of the state of a generation.

    batch: number of sequences.
    capacity: tokens per sequence in the caches.
    target, draft: bytes of the target's cache and of the drafter's state.
    options: bytes of the stop automaton and of the sampling parameters, for any capacity.
    logits: bytes of the logits of whole texts; models without keys and values compute them in each forward.
    """

    batch: int
    capacity: int
    target: int
    draft: int
    options: int = 0
    logits: int = 0

    @property
    def growing(self) -> int:
        """Bytes of what grows with the capacity."""
        return self.target + self.draft + self.logits

    @property
    def total(self) -> int:
        """Bytes in total."""
        return self.growing + self.options

    def __str__(self) -> str:
        per_token = self.growing / (self.batch * self.capacity)
        text = (
            f"{self.batch} sequences of {self.capacity} tokens take {gigabytes(self.total)}, {per_token:,.0f} bytes "
            f"per token: {gigabytes(self.target)} for the target's cache and {gigabytes(self.draft)} for the draft's"
        )
        others = {"the logits of whole texts": self.logits}
        if self.options >= 1e7:
            others["stop strings and biases"] = self.options
        return text + "".join(f", and {gigabytes(size)} for {what}" for what, size in others.items() if size)


def need(
    params: Params, target: Target, drafter: Drafter, batch: int, capacity: int, page_size: int, options: int = 0
) -> Need:
    """What the caches of a generation need, and the logits of whole texts. Allocates nothing. options: as in `Need`."""
    asked = _need(shapes_of(params), target, drafter, batch, capacity, fit_page_size(page_size, capacity))
    return dataclasses.replace(asked, options=options)


@functools.lru_cache(maxsize=256)
def _need(shapes: Shapes, target: Target, drafter: Drafter, batch: int, capacity: int, page_size: int) -> Need:
    """`need` without options."""
    cache = jax.eval_shape(lambda p: target.init_cache(p, batch, capacity, page_size), shapes.tree.target)
    draft = jax.eval_shape(lambda p: drafter.init(p, batch, capacity, page_size), shapes.tree)
    logits = logit_bytes(target, drafter, batch, capacity)
    return Need(batch, capacity, tree_bytes(cache), tree_bytes(draft), logits=logits)


def logit_bytes(target: Target, drafter: Drafter, batch: int, capacity: int) -> int:
    """Bytes of the logits of whole texts in a forward of the target or of a draft, one after the other."""
    models = (target, getattr(drafter, "model", None))
    return max(model.logit_bytes(batch, capacity) if isinstance(model, Decoder) else 0 for model in models)


def free_bytes(device: Any = None) -> tuple[int, int] | None:
    """Bytes free for JAX on a device (None: the default one), and its limit; None if they are unknown."""
    device = device or jax.local_devices()[0]
    if device.platform == "cpu":
        return host_memory.free_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats or "bytes_in_use" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"], stats["bytes_limit"]


def least_free(devices: Collection[Device] | None) -> tuple[int, int] | None:
    """`free_bytes` of the device with the least; None: of the default device. CPU devices share one memory evenly."""
    reports = [free_bytes(device) for device in devices or [None]]
    known = [report for report in reports if report is not None]
    if len(known) < len(reports):
        return None
    sharing = sum(device.platform == "cpu" for device in devices or []) or 1
    free, limit = min(known)
    return free // sharing, limit // sharing


def usable_fraction() -> float:
    """The fraction of the default device's memory for an engine, by default.

    A CPU shares its memory with other programs; an allocation failure would end them, too.
    """
    return 0.75 if jax.devices()[0].platform == "cpu" else 0.9


def check_weights(name: str, shapes: PyTree, what: str = "weights", devices: Collection[Device] | None = None) -> None:
    """Check that weights fit into the free memory of a device, before any of them is made or read.

    name: whose they are, for the message. what: what they are, if not weights.
    shapes: `jax.ShapeDtypeStruct`s; arrays do not count, as they have their memory.
    devices: each of them needs the memory; None: the default device.

    Raises:
      ValueError: they do not fit; the message states what is needed and what is free.
    """
    missing = [leaf for leaf in jax.tree.leaves(shapes) if not isinstance(leaf, jax.Array)]
    memory, needed = least_free(devices), tree_bytes(missing)
    if memory is not None and needed > memory[0]:
        free, limit = map(gigabytes, memory)
        dtypes = ", ".join(dtype_names(shapes))
        where = "" if devices is None else f" on each of {len(devices)} devices"
        raise ValueError(
            f"{name}: {gigabytes(needed)} of {what} ({dtypes}){where} do not fit: {free} of {limit} are free{_advice()}"
        )


def fit(
    params: Params,
    target: Target,
    drafter: Drafter,
    batch: int,
    page_size: int,
    preferred: int,
    minimum: int,
    options: int = 0,
) -> int:
    """The capacity of a generation, in tokens per sequence: `preferred`, or `minimum` if that does not fit.

    params: if they are traced, they stand for weights on the default device.
    options: as in `Need`.

    Raises:
      ValueError: `minimum` does not fit, either; the message states what is needed, what is free and how much fits.
    """
    weights = jax.tree.leaves(params.target)
    placed = weights and isinstance(weights[0], jax.Array) and not isinstance(weights[0], Tracer)
    # The memory of the devices with the weights.
    memory = least_free(weights[0].sharding.addressable_devices if placed else None)
    if memory is None:
        return preferred
    free, limit = memory
    budget = free - int(HEADROOM * limit)
    # The larger capacity, or the smaller.
    for capacity in (preferred, minimum):
        asked = need(params, target, drafter, batch, capacity, page_size, options)
        if asked.total <= budget:
            return capacity
    # How much would fit.
    per_token = max(asked.growing / (batch * minimum), 1)
    left = max(0, int((budget - options) / per_token))
    raise ValueError(
        f"this generation does not fit: {asked}. JAX can use {gigabytes(limit)} of the device: {gigabytes(free)} are "
        f"free, and {HEADROOM:.0%} of the total is reserved for activations. At most {left} tokens fit: "
        f"{left // batch} in each of {batch} sequences, or {left // minimum} sequences of {minimum}{_advice()}"
    )


def explain(error: Exception, asked: Need) -> None:
    """Adds a note with the size of the caches to an allocation error."""
    if "RESOURCE_EXHAUSTED" in str(error):
        error.add_note(f"jspec: {asked}, in addition to weights and activations{_advice()}")


def gigabytes(count: int) -> str:
    """Human-readable byte count."""
    return f"{count / 1e9:,.2f} GB"


def _advice() -> str:
    if platform.platform() != "gpu" or "XLA_PYTHON_CLIENT_MEM_FRACTION" in os.environ:
        return ""
    return (
        ". JAX uses three quarters of a GPU's memory by default; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the "
        "environment, before it starts, to let it use more"
    )
