"""Sampling parameters that a checkpoint recommends, in its generation_config.json."""

from pathlib import Path

from jspec.checkpoints.fields import read_fields
from jspec.checkpoints.files import CheckpointError, find_file
from jspec.core.sampling import Sampling

_OFF = {"top_k": (0, -1), "top_p": (1.0,), "min_p": (0.0,)}
"""Values that turn a parameter off."""


def read_sampling(directory: Path) -> Sampling | None:
    """The recommended parameters; None if there are none. `do_sample` makes no difference."""
    path = find_file(directory, "generation_config.json")
    if path is None:
        return None
    fields = read_fields(path)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {name: fields.value(name) for name in names if fields.has(name)}
    values = {name: value for name, value in values.items() if value not in _OFF.get(name, ())}
    try:
        sampling = Sampling(**values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    return None if sampling == Sampling() else sampling
