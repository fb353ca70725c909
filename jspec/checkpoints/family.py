"""Reading and writing Hugging Face checkpoints of a family of language models."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from typing import Any, Generic, TypeVar

from jax.typing import DTypeLike
from jaxtyping import PyTree

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.source import Source
from jspec.checkpoints.tensors import Tensors
from jspec.models import weights
from jspec.models.decoder import Decoder

C = TypeVar("C", bound=Decoder)


@dataclasses.dataclass(frozen=True)
class Family(Generic[C]):
    """A family of language models. docs/extending-models.md walks through one.

    config: class of the configurations.
    architectures: classes of `transformers` -> model_type.
    parse_config: returns the configuration of a config.json.
    describe: returns the config.json of a configuration.
    table: returns the table of a configuration's weights (`jspec.models.weights`), for a checkpoint with tensors of
      these names; for no names, the table to write. By default it does not depend on names.
    modalities: name prefixes of tensors of other modalities, which are ignored.
    spare: whether a tensor of this name may remain unread; by default none may.
    open_tensors: opens the tensors of a checkpoint, in this dtype.
    with_mtp: returns the configuration with the MTP heads of the checkpoint, if the flag is True.
    as_stored: adapts a configuration, already split over devices, to weights that stay in the checkpoint's format.
    """

    config: type[C]
    architectures: Mapping[str, str]
    parse_config: Callable[[Fields], C]
    describe: Callable[[C], dict[str, Any]]
    table: Callable[[C, Set[str]], PyTree] = lambda config, names: config.weights()
    modalities: tuple[str, ...] = ()
    spare: Callable[[C, str], bool] = lambda config, name: False
    open_tensors: Callable[[Source, DTypeLike], Tensors] = lambda source, dtype: Tensors(source.safetensors, dtype)
    with_mtp: Callable[[C, Tensors, bool], C] = lambda config, tensors, enabled: config
    as_stored: Callable[[C, Tensors], C] = lambda config, tensors: config

    def read_params(self, config: C, tensors: Tensors) -> PyTree:
        """The weights of a model, with the shapes of `config.param_shapes`; CheckpointError if they do not fit."""
        table = self.table(config, tensors.names())
        params = weights.read(table, tensors)
        if table.lm_head is None:
            tensors.compare_head(*table.embed.tensors, config.vocab_size, config.hidden_size)
        tensors.leave(*self.modalities)
        tensors.refuse_unread("model", partial(self.spare, config))
        return params

    def named_tensors(self, config: C, params: PyTree) -> Iterator[tuple[str, Any]]:
        """All weights under their Hugging Face names, those of MTP heads included."""
        if heads := len(getattr(params, "mtp", ())):
            config = dataclasses.replace(config, mtp_layers=heads)  # pyright: ignore[reportArgumentType]  # a dataclass
        return weights.write(self.table(config, set()), params)
