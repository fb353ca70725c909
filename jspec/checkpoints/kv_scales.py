"""Scales of keys and values in checkpoints, one for each per layer, for 8-bit caches.

They are stored as `self_attn.k_scale` and `v_scale` (github.com/vllm-project/compressed-tensors), or beside the
projections as `k_proj.k_scale` (NVIDIA's ModelOpt) or `k_proj.output_scale`. A key is its row in the cache times the
scale.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.tensors import Tensors
from jspec.core.struct import Leaf
from jspec.models.weights import Stored

_NAMES = (("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale"))
_SPARE = ("q_scale", "q_proj.q_scale", "q_proj.output_scale")
"""Scales of queries, which are not quantized here."""


def is_known(scheme: Fields) -> bool:
    """Whether a `kv_cache_scheme` is absent, or fp8 with one scale per layer, as with `kv="fp8"`."""
    if not scheme.keys():
        return True
    is_fp8 = scheme.read_int("num_bits") == 8 and scheme.read_text("type") == "float"
    whole = scheme.read_text("strategy", None) in (None, "tensor")
    return is_fp8 and whole and scheme.read_flag("symmetric", True) and not scheme.read_flag("dynamic", False)


@dataclasses.dataclass(frozen=True)
class KvScales:
    """The scales of a layer in a table of weights, in float32. prefix: of the names in its attention."""

    prefix: str

    def shapes(self, dtype: DTypeLike) -> None:
        """None, because a configuration does not state whether a checkpoint has scales."""

    def check(self, tensors: Stored) -> None:
        """Does nothing, because scales are optional."""

    def read(self, tensors: Tensors, options: Leaf) -> Float[Array, "2"] | None:
        """The scales of keys and values, or None; CheckpointError if one is missing, is per head, or is not above 0."""
        names = tensors.names()
        tensors.asked |= {self.prefix + name for name in _SPARE} & names
        pair = next((pair for pair in _NAMES if names & {self.prefix + name for name in pair}), None)
        if pair is None:
            return None
        return tensors.put(options, [_read(tensors, self.prefix + name) for name in pair])

    def write(self, value: Float[Array, "2"] | None) -> Iterator[tuple[str, Any]]:
        """The scales under their names, if there are any."""
        if value is not None:
            for name, scale in zip(_NAMES[0], np.asarray(value), strict=True):
                yield self.prefix + name, scale.reshape(1)


def _read(tensors: Tensors, name: str) -> Any:
    shape = () if name not in tensors.names() else tensors.files.shape(name)
    if math.prod(shape) != 1:
        raise CheckpointError(
            f"{tensors.directory}: {name} has shape {tuple(shape)}; must have one value for all heads"
        )
    scale = tensors.stored(name, *shape).astype(np.float32).reshape(1)
    if isinstance(scale, np.ndarray) and not scale[0] > 0:
        raise CheckpointError(f"{tensors.directory}: {name} is {scale[0]}; must be above 0")
    return scale
