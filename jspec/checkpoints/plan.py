"""An open checkpoint: its configuration is checked, and its weights can be read."""

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

from jax.typing import DTypeLike
from jaxtyping import PyTree

from jspec.checkpoints.tensors import Tensors
from jspec.core.sharding import Placement


class Splittable(Protocol):
    """The configuration of a target or a draft."""

    def param_shapes(self, dtype: DTypeLike) -> PyTree:
        """The weights as `jax.ShapeDtypeStruct`s."""
        ...

    def split(self, devices: int) -> Self:
        """The configuration split over this number of devices; raises ValueError if it cannot be."""
        ...


C = TypeVar("C", bound=Splittable)


@dataclasses.dataclass(frozen=True)
class Checkpoint(Generic[C]):
    """A loaded language model or draft.

    params: the weights, in the structure of its family or kind, such as `LlamaParams`.
    eos: end-of-text ids; none for drafts with a layout of their own.
    """

    config: C
    params: PyTree
    eos: tuple[int, ...] = ()


def unchanged(config: Any, tensors: Tensors) -> Any:
    """The configuration itself, for weights split as they are stored."""
    return config


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
    as_stored: Callable[[C, Tensors], C] = unchanged

    def over(self, placement: Placement) -> "Plan[C]":
        """Split the weights over devices. Only these are then read onto the right devices.

        Raises:
          ValueError: they cannot be split.
        """
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
        """Read the weights.

        Raises:
          CheckpointError: a tensor is missing, damaged or not used, or has an unexpected shape.
        """
        return Checkpoint(self.config, self.read_params(self.config, self.tensors), self.eos)


def can_split(config: Splittable, devices: int) -> bool:
    """Whether a model can be split over this number of devices."""
    try:
        config.split(devices)
    except ValueError:
        return False
    return True
