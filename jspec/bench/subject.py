"""The model of a measurement: a checkpoint, or a preset with random weights, on one device or several."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from jspec.bench import weights
from jspec.bench.machine import environment
from jspec.bench.measure import BenchSetup
from jspec.bench.measurement import Scalar
from jspec.bench.options import CaseOptions, SubjectOptions, devices_of, drafter_of, window_of
from jspec.bench.presets import DRAFTS, PRESETS, eagle_head
from jspec.checkpoints.files import resolve_dtype
from jspec.checkpoints.plan import splits_draft
from jspec.core.sharding import Placement, make_placement
from jspec.core.types import Drafter, Params
from jspec.core.xla_options import prepare_collectives
from jspec.drafters import Plain
from jspec.loading.model import Model
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft
from jspec.models.llama import require_llama
from jspec.models.quantized import check_split_groups, quantize_shapes
from jspec.models.sizes import count_parameters


@dataclasses.dataclass(frozen=True)
class Subject:
    """The model to measure. Leaves of `params` are arrays, or shapes of random weights, before `make`.

    placement: of split or copied weights over devices; None: they are on one.
    """

    name: str
    target: Decoder
    draft: Draft | None
    params: Params
    placement: Placement | None = None

    def make(self) -> Params:
        """The weights, with random ones in place of shapes."""
        arrays = weights.random_weights(self.params, self.target.vocab_size, placement=self.placement)
        return jax.block_until_ready(arrays)


def of(options: SubjectOptions, model: Model | None = None) -> Subject:
    """The model of these options, from a loaded checkpoint or (None) a preset; ValueError if it does not suit them."""
    subject = _shaped(options) if model is None else _loaded(options, model)
    exact = bool(options.exact) if model is None or options.exact is not None else subject.target.exact
    kv = None if subject.target.kv == options.kv else options.kv
    subject = dataclasses.replace(subject, target=subject.target.configured(exact=exact, kv=kv))
    if set(options.mode) == {"plain"}:
        return dataclasses.replace(subject, draft=None, params=Params(subject.params.target))
    return subject


def drafters_of(options: SubjectOptions, subject: Subject) -> dict[str, Drafter]:
    """Mode -> its bound drafter; ValueError if the shape of the draft, or a mode, does not suit it."""
    bound = {}
    for mode in options.mode:
        drafter = drafter_of(mode, _drafter_name(options, subject), options)
        bound[mode] = Plain() if drafter is None else drafter.bind(subject.target, subject.draft)
    return bound


def _drafter_name(options: SubjectOptions, subject: Subject) -> str:
    return options.drafter or ("eagle" if subject.draft is None else subject.draft.drafter)


def setup_of(
    options: CaseOptions, subject: Subject, params: Params, *, repeats: int = 1, split: bool = False
) -> BenchSetup:
    """What all cases share. params: the weights, or their shapes."""
    assert options.tokens_per_round is not None
    return BenchSetup(
        subject.target,
        params,
        tokens_per_round=options.tokens_per_round,
        rounds=options.rounds,
        repeats=repeats,
        page_size=options.page_size,
        split=split and subject.placement is None,
        draft=subject.draft,
        placement=subject.placement,
    )


def described(options: SubjectOptions, subject: Subject, params: Params, names: Sequence[str]) -> dict[str, Any]:
    """The fields of a `RunReport`. params: the weights, or their shapes. names: options for `settings`."""
    return {
        "model": subject.name,
        "dtype": str(params.target.embed.dtype),
        "command": options.command,
        "environment": environment(math.prod(devices_of(options).values())),
        "settings": settings_of(options, subject, names),
        "parameters": {"target": count_parameters(params.target), "draft": count_parameters(params.draft)},
    }


def settings_of(options: SubjectOptions, subject: Subject, names: Sequence[str]) -> dict[str, Scalar]:
    """The settings of a line of data: the drafter, these options, and those of formats and devices."""
    settings = {"drafter": _drafter_name(options, subject), **{name: getattr(options, name) for name in names}}
    settings |= {name: getattr(options, name) for name in ("weights", "kv") if getattr(options, name)}
    if subject.draft is not None:
        settings |= window_of(_drafter_name(options, subject), options)
    settings |= devices_of(options)
    return settings | ({"exact": True} if subject.target.exact else {})


def _loaded(options: SubjectOptions, model: Model) -> Subject:
    """A checkpoint, with a random head if it has no draft."""
    if model.draft is not None or options.drafter == "standalone":
        return Subject(model.name, model.target, model.draft, model.params, model.placement)
    head = eagle_head(require_llama(model.target, "a random head"))
    return _with_draft(model.name, model.target, model.params.target, head, model.placement, options)


def _shaped(options: SubjectOptions) -> Subject:
    """A preset."""
    assert options.preset is not None
    preset, dtype = PRESETS[options.preset], resolve_dtype(options.dtype)
    # The draft of the drafter, or the first there is.
    drafts = preset.drafts
    drafter = options.drafter or next(name for name, draft in drafts.items() if draft)
    draft = drafts[drafter]
    if draft is None:
        others = ", ".join(name for name, other in PRESETS.items() if other.drafts[drafter])
        raise ValueError(f"--drafter {drafter}: {options.preset} has no {DRAFTS[drafter]}; those that do: {others}")
    # Split the target over devices.
    devices = devices_of(options)
    target, placement = preset.target, make_placement(devices.get("tensor"), None, jax.devices(), devices.get("data"))
    if placement is not None:
        prepare_collectives()
        target = target.split(placement.size)
    shapes = quantize_shapes(target.param_shapes(dtype), options.weights)
    check_split_groups(shapes, devices.get("tensor", 1))
    return _with_draft(options.preset, target, shapes, draft, placement, options)


def _with_draft(
    name: str, target: Decoder, params: PyTree, draft: Draft, placement: Placement | None, options: SubjectOptions
) -> Subject:
    """A target with a random draft, split as by `jspec.load`."""
    # Split the draft, where it can be.
    dtype = params.embed.dtype
    if placement is not None:
        # The draft follows, where its shape allows.
        splits = splits_draft(draft, dtype, placement.size, options.weights)
        placement = dataclasses.replace(placement, draft=splits)
        draft = draft.split(placement.size) if placement.draft else draft
    # Quantize its weights as those of the target.
    shapes = quantize_shapes(draft.param_shapes(dtype), options.weights)
    if placement is not None and placement.draft:
        check_split_groups(shapes, placement.size)
    return Subject(name, target, draft, Params(params, shapes), placement)
