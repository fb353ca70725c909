"""An open checkpoint: its configuration is checked, and its weights can be read."""

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from jax.typing import DTypeLike
from jaxtyping import PyTree

from jspec.checkpoints.tensors import Tensors
from jspec.core.sharding import Placement
from jspec.models.draft import Draft
from jspec.models.quantized import quantize_shapes
from jspec.models.sizes import tree_bytes

C = TypeVar("C", bound=Draft)
BYTES_PER_SECOND = 3.58e12
"""What a GPU reads of its memory, here of one H200."""
SUM_SECONDS = 8e-6
"""Time in which its neighbors and it add up a few vectors."""


@dataclasses.dataclass(frozen=True)
class Checkpoint(Generic[C]):
    """A loaded language model or draft.

    params: the weights, in the structure of its family or kind, such as `ModelParams`.
    eos: end-of-text ids; none for drafts with a layout of their own.
    """

    config: C
    params: PyTree
    eos: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan(Generic[C]):
    """The weights `read` will read, and their devices.

    config: the configuration; `over` splits it.
    tensors: the open files, with the dtype, the format and the devices of the weights.
    read_params: reads the weights of a configuration.
    as_stored: adapts a split configuration to weights in the format of the checkpoint.
    """

    config: C
    tensors: Tensors
    read_params: Callable[[C, Tensors], PyTree]
    eos: tuple[int, ...] = ()
    as_stored: Callable[[C, Tensors], C] = lambda config, tensors: config

    def over(self, placement: Placement) -> "Plan[C]":
        """Split the weights over devices, and read only the parts of each; ValueError if they cannot be split."""
        tensors = copy.copy(self.tensors)
        tensors.placement, tensors.fits = placement, partial(can_split, self.config)
        config = self.config if placement.size == 1 else self.config.split(placement.size)
        return dataclasses.replace(self, config=self.as_stored(config, tensors), tensors=tensors)

    def held(self) -> PyTree:
        """The weights on one device, as shapes."""
        return self.tensors.held(self.config.param_shapes(self.tensors.dtype))

    def memory(self) -> PyTree:
        """Needs of one device while the weights are read, as shapes."""
        return self.tensors.memory(self.config.param_shapes(self.tensors.dtype))

    def read(self) -> Checkpoint[C]:
        """Read the weights."""
        return Checkpoint(self.config, self.read_params(self.config, self.tensors), self.eos)


def can_split(config: Draft, devices: int) -> bool:
    """Whether a model can be split over this number of devices."""
    try:
        config.split(devices)
    except ValueError:
        return False
    return True


def splits_draft(config: Draft, dtype: DTypeLike, devices: int, weights: str | None = None) -> bool:
    """Whether a draft is split like its target, unless the caller chooses: if it must be, or is faster so.

    To split a draft saves the time in which a device reads the parts of the others, and adds a sum after each attention
    and each MLP and a gather of logits. So heads of one layer are split, and small models of many layers are not.

    weights: the format of its matrices, as in `Tensors.weights`.
    """
    if devices == 1 or config.follows_target:
        return devices > 1
    if not can_split(config, devices):
        return False
    saved = tree_bytes(quantize_shapes(config.param_shapes(dtype), weights)) * (1 - 1 / devices) / BYTES_PER_SECOND
    return saved > SUM_SECONDS * (2 * config.num_layers + 1)


def refuse_split(config: object) -> None:
    """Raises ValueError if weights are split: the columns of fused ones are then sorted by device."""
    if (devices := getattr(config, "tensor", 1)) > 1:
        raise ValueError(
            f"the weights are split over {devices} devices: load them without tensor or mesh to write them"
        )
