"""Whether a model that is read is split over devices."""

from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeAlias, TypeVar

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jspec.checkpoints.tensors import Tensors
from jspec.core.sharding import Placement, held_heads
from jspec.models.quantized import quantize_shapes
from jspec.models.sizes import tree_bytes

BYTES_PER_SECOND = 3.58e12
"""What a GPU reads of its memory, here of one H200."""
SUM_SECONDS = 8e-6
"""Time in which its neighbors and it add up a few vectors."""


class Splittable(Protocol):
    """The configuration of a target or a draft."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    def param_shapes(self, dtype: DTypeLike) -> PyTree:
        """The weights as `jax.ShapeDtypeStruct`s."""
        ...

    def split(self, devices: int) -> Self:
        """The configuration split over that many devices; raises ValueError if it cannot be."""
        ...


Place: TypeAlias = Callable[[Splittable, DTypeLike], Placement | None]
"""The placement of a model in a precision; None: whole on each device."""


def whole(config: Splittable, dtype: DTypeLike) -> None:
    """The `Place` of models that are not split."""
    return None


C = TypeVar("C", bound=Splittable)


def placed(config: C, tensors: Tensors, place: Place) -> C:
    """The configuration of one device, after the tensors are told over which they are split."""
    placement = place(config, tensors.dtype)
    if placement is None:
        return config
    tensors.placement = placement
    return config if placement.size == 1 else config.split(placement.size)


def place_draft(
    config: Splittable, dtype: DTypeLike, *, target: Placement, wanted: bool | None, weights: str | None = None
) -> Placement | None:
    """The placement of a draft; None: each device has all of it.

    To split a draft saves the time in which a device reads the parts of the others, and adds a sum after each attention
    and each MLP and a gather of logits. So heads of one layer are split, and small models of many layers are not.

    target: the placement of the target.
    wanted: whether to split it; None: if that makes a step of the draft faster.
    weights: the format of its matrices, as in `language_model.read`.

    Raises:
      ValueError: it is to be split, and cannot be.
    """
    devices = target.size
    if wanted is None:
        saved = tree_bytes(quantize_shapes(config.param_shapes(dtype), weights)) * (1 - 1 / devices) / BYTES_PER_SECOND
        wanted = saved > SUM_SECONDS * (2 * config.num_layers + 1) and _fits(config, devices)
    if not wanted:
        return None
    config.split(devices)
    return target


def _fits(config: Splittable, devices: int) -> bool:
    try:
        config.split(devices)
    except ValueError:
        return False
    return True


def copy_heads(parts: Sequence[np.ndarray], *, kv_heads: int, devices: int) -> Sequence[np.ndarray]:
    """Columns of queries, and of keys and values if there are any, with the copies of their heads that devices need.

    kv_heads: heads of keys and values.
    """
    queries, *others = parts
    copies = held_heads(kv_heads, devices) // kv_heads
    if copies == 1:
        return parts
    repeated = (np.repeat(part.reshape(*part.shape[:-1], kv_heads, -1), copies, axis=-2) for part in others)
    return [queries, *(part.reshape(*queries.shape[:-1], -1) for part in repeated)]


def refuse_split(config: object) -> None:
    """Raises ValueError if weights of this configuration are split, as the columns of fused ones are then sorted by
    device.
    """
    if (devices := getattr(config, "tensor", 1)) > 1:
        raise ValueError(
            f"the weights are split over {devices} devices: load them without tensor or mesh to write them"
        )
