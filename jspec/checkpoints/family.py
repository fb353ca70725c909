"""What a family of language models provides to be read from and written to Hugging Face checkpoints."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from jax.typing import DTypeLike
from jaxtyping import PyTree

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.plan import unchanged
from jspec.checkpoints.source import Source
from jspec.checkpoints.tensors import Tensors
from jspec.models.decoder import Decoder

C = TypeVar("C", bound=Decoder)


def open_safetensors(source: Source, dtype: DTypeLike) -> Tensors:
    """The tensors of a checkpoint, which are converted to `dtype` when they are read."""
    return Tensors(source.safetensors, dtype)


def without_mtp(config: C, tensors: Tensors, wanted: bool) -> C:
    """The configuration itself, for families whose checkpoints have no MTP heads."""
    return config


@dataclasses.dataclass(frozen=True)
class Family(Generic[C]):
    """A family of language models. docs/extending-models.md walks through one.

    config: the class of its configurations.
    architectures: classes of `transformers` -> model_type.
    parse_config: the configuration that a config.json describes.
    describe: the config.json of a configuration.
    read_params: weights, with the shapes of `config.param_shapes`.
    named_tensors: weights under their Hugging Face names, [out, in].
    open_tensors: the tensors of a checkpoint.
    with_mtp: the configuration with the MTP heads that are wanted and that the checkpoint has.
    as_stored: the configuration, after it is split over devices, for weights that stay in the format of the checkpoint.
    """

    config: type[C]
    architectures: Mapping[str, str]
    parse_config: Callable[[Fields], C]
    describe: Callable[[C], dict[str, Any]]
    read_params: Callable[[C, Tensors], PyTree]
    named_tensors: Callable[[C, PyTree], Iterator[tuple[str, Any]]]
    open_tensors: Callable[[Source, DTypeLike], Tensors] = open_safetensors
    with_mtp: Callable[[C, Tensors, bool], C] = without_mtp
    as_stored: Callable[[C, Tensors], C] = unchanged
