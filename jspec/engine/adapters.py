"""The LoRA adapters of an engine: beside the weights of its model, and chosen by request."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jspec.checkpoints.adapter_stack import AdapterStack
from jspec.core.checks import check_text
from jspec.core.types import Params
from jspec.loading.model import Model, open_adapter
from jspec.models.decoder import Decoder
from jspec.runner.request import Request

Adapting: TypeAlias = str | Path | Mapping[str, Any]
"""The source of an adapter: a directory or a hub id, or tensors by name."""


class Adapters:
    """The adapters of an engine.

    Attributes:
      names: of the adapters.

    Raises:
      CheckpointError, ValueError, TypeError: a directory without an adapter for the model, or of one that can only be
        merged; or a model without adapters.
    """

    def __init__(self, model: Model, sources: Mapping[str, str | Path]):
        # Without adapters the weights are those of the model.
        self.names, self._stack = tuple(sources), None
        if not sources:
            return
        for name in sources:
            if not check_text("adapters", name):
                raise ValueError("adapters: must have names of at least one character")
        if not isinstance(model.target, Decoder):
            raise ValueError(f"adapters: models of type {type(model.target).__name__} have none; omit them")
        if model.placement is not None:
            raise ValueError(f"adapters: must be of one device, but the model is split over {model.placement}")
        # Open all directories first.
        adapters = {name: open_adapter(source) for name, source in sources.items()}
        self._stack = AdapterStack(model.target, adapters)

    def over(self, params: Params) -> Params:
        """The weights with all adapters beside them."""
        if self._stack is None:
            return params
        return dataclasses.replace(params, target=self._stack.over(params.target))

    def assign(self, requests: Sequence[Request], name: str | None) -> None:
        """Give requests an adapter; None: none. Those of one share no pages with those of others.

        Raises:
          ValueError: there is none of this name.
        """
        stack = self._stack
        if stack is None:
            if name is not None:
                raise ValueError(f"adapter={name!r}: must be None in an engine without adapters")
            return
        # The salt keeps the pages of adapters apart.
        index = stack.index(name)
        for request in requests:
            request.adapter, request.salt = index, f"{index}:{request.salt}"

    def replace(self, name: str, source: Adapting) -> None:
        """As `Engine.update_adapter`; what runs is not changed."""
        if self._stack is None:
            raise ValueError(f"adapter={name!r}: must be one of the engine's, which has none")
        if isinstance(source, Mapping):
            self._stack.replace(name, self._stack.adapter(name).with_tensors(source))
        else:
            self._stack.replace(name, open_adapter(source))
