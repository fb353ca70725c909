"""The model that `jspec bench` measures: a checkpoint, or a preset with random weights, on one device or several."""

import argparse
import dataclasses
from collections.abc import Mapping

import jax
from jaxtyping import PyTree

from jspec.bench import weights
from jspec.bench.presets import PRESETS, Preset, eagle_head
from jspec.checkpoints.files import resolve_dtype
from jspec.checkpoints.split import splits_draft
from jspec.core.sharding import Placement, make_placement
from jspec.core.types import Params
from jspec.core.xla_options import prepare_collectives
from jspec.engine.arguments import naming_models
from jspec.engine.model import load
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft
from jspec.models.llama import require_llama
from jspec.models.quantized import BLOCKS, FORMATS, check_split_groups, quantize_shapes

_DRAFT_NAMES = {
    "eagle": "EAGLE head",
    "block": "block draft",
    "standalone": "smaller model of its vocabulary",
    "frozen-kv-mtp": "assistant",
    "mtp": "MTP heads",
}
"""Drafter -> the kind of draft model that it uses."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """The model to measure. Leaves of `params` are arrays, or shapes of random weights that are not made yet.

    placement: the devices over which weights are split, or that have copies of them; None: they are on one.
    """

    name: str
    target: Decoder
    draft: Draft | None
    params: Params
    placement: Placement | None = None

    def make(self) -> Params:
        """The weights, with random ones in place of shapes."""
        made = weights.random_weights(self.params, self.target.vocab_size, placement=self.placement)
        return jax.block_until_ready(made)


def of(options: argparse.Namespace) -> Subject:
    """The model that these options of `jspec bench` name.

    Raises:
      ValueError, OSError: they contradict each other, or the model does not suit them.
    """
    if options.weights == BLOCKS and options.checkpoint:
        raise ValueError(f"--weights {BLOCKS}: requires --preset; a checkpoint that is stored so keeps its weights")
    if options.exact and options.weights in (*FORMATS, BLOCKS):
        raise ValueError(f"--exact: no exact forward with --weights {options.weights} yet; omit one of them")
    if options.exact and options.kv:
        raise ValueError(f"--exact: no exact forward with --kv {options.kv} yet; omit one of them")
    if options.exact and options.tensor > 1:
        raise ValueError(f"--exact: no exact forward with --tensor {options.tensor} yet; omit one of them")
    subject = _loaded(options) if options.checkpoint else _shaped(options)
    if options.kv:
        subject = dataclasses.replace(subject, target=subject.target.with_kv(options.kv))
    if options.exact:
        subject = dataclasses.replace(subject, target=subject.target.exactly())
    if set(options.mode) == {"plain"}:
        return dataclasses.replace(subject, draft=None, params=Params(subject.params.target))
    return subject


def _loaded(options: argparse.Namespace) -> Subject:
    """A checkpoint, with a random head if it has no draft."""
    with naming_models({"--draft": options.draft, "--checkpoint": options.checkpoint}):
        given = {"dtype": options.dtype, "weights": options.weights, **devices_of(options)}
        model = load(options.checkpoint, draft=options.draft, **given)
    if model.draft is not None or options.drafter == "standalone":
        return Subject(model.name, model.target, model.draft, model.params, model.placement)
    head = eagle_head(require_llama(model.target, "a random head"))
    return _with_draft(model.name, model.target, model.params.target, head, model.placement, options)


def devices_of(options: argparse.Namespace) -> dict[str, int]:
    """The arguments of `jspec.load` for more than one device."""
    return {name: size for name in ("tensor", "data") if (size := getattr(options, name)) > 1}


def _shaped(options: argparse.Namespace) -> Subject:
    """A preset."""
    preset, dtype = PRESETS[options.preset], resolve_dtype(options.dtype)
    drafts = _drafts(preset)
    drafter = options.drafter or next(name for name, draft in drafts.items() if draft)
    draft = drafts[drafter]
    if draft is None:
        others = ", ".join(name for name, other in PRESETS.items() if _drafts(other)[drafter])
        raise ValueError(
            f"--drafter {drafter}: {options.preset} has no {_DRAFT_NAMES[drafter]}; those that do: {others}"
        )
    devices = devices_of(options)
    target, placement = preset.target, make_placement(devices.get("tensor"), None, jax.devices(), devices.get("data"))
    if placement is not None:
        prepare_collectives()
        target = target.split(placement.size)
    shapes = quantize_shapes(target.param_shapes(dtype), options.weights)
    check_split_groups(shapes, options.tensor)
    return _with_draft(options.preset, target, shapes, draft, placement, options)


def _with_draft(
    name: str, target: Decoder, params: PyTree, draft: Draft, placement: Placement | None, options: argparse.Namespace
) -> Subject:
    """A target with a random draft, which is split as `jspec.load` would split it."""
    dtype = params.embed.dtype
    if placement is not None:
        splits = splits_draft(draft, dtype, placement.size, options.weights)
        placement = dataclasses.replace(placement, draft=splits)
        draft = draft.split(placement.size) if placement.draft else draft
    shapes = quantize_shapes(draft.param_shapes(dtype), options.weights)
    if placement is not None and placement.draft:
        check_split_groups(shapes, placement.size)
    return Subject(name, target, draft, Params(params, shapes), placement)


def _drafts(preset: Preset) -> Mapping[str, Draft | None]:
    """Drafter -> its draft model, or None."""
    return {
        "eagle": preset.head,
        "block": preset.block,
        "standalone": preset.standalone,
        "frozen-kv-mtp": preset.assistant,
        "mtp": preset.mtp,
    }
