"""Models from arrays in memory, such as those of a training loop, under the names of a library."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from jspec.checkpoints import language_model
from jspec.checkpoints.fields import Fields, read_fields
from jspec.checkpoints.files import CheckpointError, resolve_dtype
from jspec.checkpoints.live import LiveArray
from jspec.checkpoints.loading import LoadOptions
from jspec.checkpoints.names import LIBRARIES, TRANSFORMERS, check_names, translate
from jspec.checkpoints.names.leaves import flatten
from jspec.checkpoints.plan import Plan
from jspec.checkpoints.source import ArrayFiles
from jspec.checkpoints.tensors import Tensors
from jspec.core.sharding import Placement, refuse_types, without_types
from jspec.core.struct import Leaf
from jspec.models.decoder import Decoder
from jspec.models.quantized import quantize

_WHERE = Path("arrays")
"""The name in error messages, where a checkpoint has a directory."""


class _Named(ArrayFiles):
    """Arrays in place of the files of a checkpoint; they may be traced."""

    def __init__(self, arrays: Mapping[str, Any]):
        super().__init__(_WHERE, arrays)

    def get(self, name: str) -> Any:
        """As in `TensorFiles`, without a copy."""
        array: Any = self._view(name)
        return LiveArray(array)


class LiveTensors(Tensors):
    """Tensors in place, without a copy on the host. Does not check for NaN or infinity."""

    checks_values = False

    def empty(self, *shape: int, like: str | None = None) -> Any:
        """An array to be filled, in the dtype of the model."""
        return LiveArray(jnp.zeros(shape, self.dtype))

    def put(self, options: Leaf, parts: Sequence[Any]) -> Any:
        """The concatenation of the parts on the last axis, quantized if the options ask for it."""
        arrays = [part.array for part in parts]
        if self.placement is not None:
            arrays = self.placement.arrange(options, arrays)
        array = arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-1)
        if self.weights is None or not options.linear:
            return array
        self.check_devices(options, array.shape)
        # Place nothing: this is traced, and `Placement.spread` places the result.
        return quantize(array, self.weights)


def parse(config: Mapping[str, Any] | str | Path | Decoder) -> tuple[Decoder, tuple[int, ...]]:
    """Parse a configuration. Returns it and the ids that end a text; CheckpointError as `language_model.parse_config`.

    config: the content of a config.json, its file or directory, or a configuration; otherwise TypeError.
    """
    if isinstance(config, Decoder):
        return config, ()
    if isinstance(config, str | Path):
        path = Path(config)
        fields = read_fields(path / "config.json" if path.is_dir() else path)
    elif isinstance(config, Mapping):
        fields = Fields(config, "config")
    else:
        raise TypeError(
            f"config is of type {type(config).__name__}: must be the content of a config.json, its file or directory, "
            "or the target of a model"
        )
    parsed = language_model.parse_config(fields)
    return parsed, language_model.ends_of_text([fields, fields.section("text_config")], parsed.vocab_size)


def plan(config: Decoder, arrays: PyTree, options: LoadOptions, names: str = TRANSFORMERS) -> Plan[Decoder]:
    """Plan a model of one of the families. `Plan.read` is one program, compiled once per set of shapes.

    The configuration of the plan has MTP heads if the arrays have weights for them.

    arrays: by Hugging Face name, or in the pytree of another library; on any devices, or traced.
    options: dtype None keeps the dtype of the arrays; placement None lets the program place the weights.
    names: the library of the names, a key of `names.LIBRARIES`, or `TRANSFORMERS`.

    Raises:
      CheckpointError: a value is not an array, dtypes differ, or the library has no names for this model.
      ValueError: an unknown dtype or library, or a model without support for the options.
    """
    # Check the options against the model; the placement defines the split.
    placement, dtype = options.placement, None if options.dtype is None else resolve_dtype(options.dtype)
    config.configured(exact=options.exact is True, kv=options.kv)
    if getattr(config, "tensor", 1) > 1:
        if placement is None:
            raise ValueError(
                f"config: is that of a model on {config.tensor} devices; tensor or mesh must be given, too"
            )
        config = dataclasses.replace(config, tensor=1)  # pyright: ignore[reportArgumentType]  # a dataclass
    # The arrays, by name.
    check_names(names, config)
    leaves = arrays if names == TRANSFORMERS else flatten(arrays, LIBRARIES[names].roots)
    checked = {name: _checked(name, array) for name, array in leaves.items()}
    tensors = LiveTensors(_Named(checked), _common_dtype(checked) if dtype is None else np.dtype(dtype))
    tensors.weights = options.weights
    # Arrays show whether there are MTP heads.
    if names == TRANSFORMERS:
        config = language_model.family_by_config(config).with_mtp(config, tensors, True)
    plan = Plan(config, tensors, partial(_read_params, names))
    return plan if placement is None else plan.over(placement)


def _common_dtype(arrays: Mapping[str, Array]) -> np.dtype:
    dtypes = {np.dtype(array.dtype) for array in arrays.values()}
    if len(dtypes) > 1:
        listed = ", ".join(sorted(map(str, dtypes)))
        raise CheckpointError(f"{_WHERE}: have the dtypes {listed}; dtype must be given")
    return next(iter(dtypes), np.dtype(np.float32))


def _read_params(names: str, config: Decoder, tensors: Tensors) -> PyTree:
    """The weights, from one call of the jitted `_fuse`."""
    assert isinstance(tensors.files, _Named)
    placement, arrays = tensors.placement, tensors.files.saved
    if placement is not None:
        arrays = {name: placement.gather(array) for name, array in arrays.items()}
    static = {"config": config, "dtype": np.dtype(tensors.dtype), "names": names}
    return _fuse(arrays, **static, placement=placement, weights=tensors.weights)


def _checked(name: object, array: Any) -> Array:
    if not isinstance(name, str):
        raise CheckpointError(f"{_WHERE}: have the key {name!r}; must have Hugging Face names")
    # An array whose values are available.
    if not isinstance(array, jax.Array | np.ndarray | Tracer):
        raise CheckpointError(f"{_WHERE}: {name} is of type {type(array).__name__}; must be an array")
    if isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.is_deleted():
        raise CheckpointError(
            f"{_WHERE}: {name} has been deleted, as donate_argnums of jax.jit does; give the arrays of the next step"
        )
    # `_fuse` needs arrays without explicit sharding in their types.
    if isinstance(array, Tracer):
        refuse_types(f"{_WHERE}: {name}", array)
    elif isinstance(array, jax.Array):
        return without_types(array)
    return array  # pyright: ignore[reportReturnType]  # a jitted program takes arrays of NumPy, too


@partial(jax.jit, static_argnames=("config", "dtype", "names", "placement", "weights"))
def _fuse(
    arrays: Mapping[str, Array],
    *,
    config: Decoder,
    dtype: np.dtype,
    names: str,
    placement: Placement | None,
    weights: str | None,
) -> PyTree:
    if names != TRANSFORMERS:
        arrays = translate(names, config, arrays)
    tensors = LiveTensors(_Named(arrays), dtype)
    tensors.placement, tensors.weights = placement, weights
    params = language_model.family_by_config(config).read_params(config, tensors)
    return params if placement is None else placement.spread(params)
