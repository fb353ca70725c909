"""The options of loading, checked together, and the plans of a target and its draft."""

import dataclasses

import jax
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import PyTree

from jspec.cache.narrow import check_kv
from jspec.checkpoints import drafts, language_model
from jspec.checkpoints.adapter import Adapter
from jspec.checkpoints.plan import Plan
from jspec.checkpoints.source import Source
from jspec.core.checks import check_flag, check_int, check_text
from jspec.core.sharding import Placement, make_placement
from jspec.core.xla_options import prepare_collectives
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft
from jspec.models.quantized import FORMATS, WIDE, check_weights, has_quantized, refuse_quantized
from jspec.models.sizes import tree_bytes
from pallas_kernels import exact_attention


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How a model is held; TypeError or ValueError for invalid options, or two that do not go together.

    placement: the devices over which it is split; None: it is on the default device.
    dtype, exact, weights, kv, draft_tensor: as in `jspec.load`.
    """

    placement: Placement | None = None
    dtype: str | None = None
    exact: bool | None = None
    weights: str | None = None
    kv: str | None = None
    draft_tensor: bool | None = None

    def __post_init__(self):
        # Types of weights and of the cache.
        if self.dtype is not None:
            check_text("dtype", self.dtype)
        check_weights(self.weights, WIDE)
        check_kv(self.kv)
        if self.exact is not None and check_flag("exact", self.exact) and (problem := self.not_exact()):
            raise ValueError(f"exact=True: {problem}")
        # The split of the draft.
        if self.draft_tensor is not None:
            check_flag("draft_tensor", self.draft_tensor)
            if self.placement is None or self.placement.size == 1:
                raise ValueError(f"draft_tensor={self.draft_tensor}: requires tensor or mesh")

    def not_exact(self) -> str | None:
        """Why there is no exact forward with the other options; None: there may be one."""
        if self.kv is not None:
            return f"no exact forward with kv={self.kv!r} yet; omit one of them"
        if self.weights in FORMATS:
            return f"no exact forward with weights={self.weights!r} yet; omit one of them"
        return None

    def is_exact(self, config: Decoder, params: PyTree) -> bool:
        """Whether the forward of a target with these weights, or their shapes, is exact.

        By default it is in half precision, where texts would differ often, on GPUs that the kernels have tiles for. On
        others its speed has not been measured.
        Not if arrays without a placement are on several devices, which would all gather the matrices for the kernels.
        """
        if self.exact is not None:
            return self.exact
        able = self.not_exact() is None and config.not_exact() is None and not has_quantized(params)
        able = able and config.exact_kernels and params.embed.dtype.itemsize == 2
        able = able and (self.placement is not None or not _on_several_devices(params.embed))
        return able and exact_attention.OPERATION.tuned()

    def of_target(self, config: Decoder) -> "LoadOptions":
        """The options for a target: None keeps an exact forward, where the other options allow."""
        exact = config.exact and self.not_exact() is None
        return self if self.exact is not None else dataclasses.replace(self, exact=exact)

    def configured(self, config: Decoder, params: PyTree) -> Decoder:
        """The configuration of a target with these weights, or their shapes, with its forward and caches.

        Raises:
          ValueError: the model does not have what the options ask for.
        """
        if self.exact:
            refuse_quantized(params, "exact=True")
        return config.configured(exact=self.is_exact(config, params), kv=self.kv)


def _on_several_devices(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and len(leaf.sharding.device_set) > 1


def place_model(tensor: object, data: object, mesh: Mesh | None) -> Placement | None:
    """Choose the devices, as `make_placement`; None: the default device."""
    tensor, data = (
        None if size is None else check_int(axis, size, least=1) for axis, size in (("tensor", tensor), ("data", data))
    )
    placement = make_placement(tensor, mesh, jax.devices(), data)
    if placement is not None:
        prepare_collectives()
    return placement


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """A target and its draft, ready to be read: everything but the values of weights is checked.

    draft: None: the draft, if there is any, is the MTP heads of the target's checkpoint.
    """

    target: Plan[Decoder]
    draft: Plan[Draft] | None

    def memory(self) -> PyTree:
        """Needs of one device while the target is read, or the draft after it if they are larger, as shapes."""
        alone = self.target.memory()
        if self.draft is None:
            return alone
        return max(alone, (self.target.held(), self.draft.memory()), key=tree_bytes)


def plan_model(source: Source, draft: Source | None, options: LoadOptions, adapter: Adapter | None = None) -> ModelPlan:
    """Plan what `jspec.load` reads from open directories.

    adapter: merged into the target's weights as they are read.

    Raises:
      CheckpointError: a file is missing or damaged, an option in it is not supported, or the draft does not suit the
        target.
      ValueError: the models do not have what the options ask for, or cannot be split.
    """
    # The target and its devices.
    precision = {"dtype": options.dtype, "weights": options.weights}
    target = language_model.plan(source, mtp=draft is None, adapter=adapter, **precision)
    if options.placement is not None:
        target = target.over(options.placement)
    if draft is None:
        _check_heads(target.config, options.draft_tensor)

    # Its forward and caches.
    config = options.configured(target.config, target.held())

    # The draft.
    if draft is None:
        return ModelPlan(target, None)
    small = drafts.plan(draft, config, options.dtype, options.weights)
    if options.placement is not None:
        small = drafts.place(small, draft.name, options.placement, options.draft_tensor)
    return ModelPlan(target, small)


def _check_heads(target: Decoder, draft_tensor: bool | None) -> None:
    """Raise ValueError if there are no MTP heads to split, or they are not to be split."""
    heads = getattr(target, "mtp_layers", 0)
    if draft_tensor is not None and not (heads and draft_tensor):
        problem = "MTP heads are always split" if heads else "no draft is loaded"
        raise ValueError(f"draft_tensor={draft_tensor}: {problem}; omit it")
