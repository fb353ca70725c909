"""Frozen dataclasses that are pytrees."""

import dataclasses
from typing import TypeVar, dataclass_transform

import jax

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def struct(cls: type[T]) -> type[T]:
    """A frozen dataclass whose fields are pytree children, so instances can cross jit and while_loop."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))
