"""Loading a target, its tokenizer and an optional draft."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jspec.cache.narrow import check_kv
from jspec.checkpoints import drafts, language_model
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.language_model import Checkpoint
from jspec.checkpoints.source import Source
from jspec.checkpoints.split import Place, Splittable, place_draft, whole
from jspec.core.checks import check_flag, check_int, check_text, shorten
from jspec.core.package import ASSETS
from jspec.core.processes import agreement
from jspec.core.sharding import Placement, make_placement
from jspec.core.types import Params
from jspec.core.xla_options import prepare_collectives
from jspec.engine import memory
from jspec.models import MtpHeads, MtpParams
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft
from jspec.models.quantized import FORMATS, WIDE, check_weights, dtype_names, refuse_quantized
from jspec.text.tokenizer import Tokenizer

BUNDLED = {
    "python-small": {
        "eagle": "python-eagle3",
        "block": "python-block",
        "standalone": "python-tiny",
        "frozen-kv-mtp": "python-assistant",
    },
    "python-tiny": {},
}
"""Bundled models -> drafter -> its bundled draft; the first is the default."""

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
# Some EAGLE heads are published only in the older format, and the mask of some block drafts. A repository with both
# formats doubles the download, but drafts are small.
_DRAFT_FILES = [*_HUB_FILES, "pytorch_model.bin", "mask_embedding.pt"]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A target ready to generate.

    name: where it was loaded from.
    target: its configuration.
    draft: the draft's configuration: a language model, an EAGLE head, an assistant or the MTP heads of the target's own
      checkpoint; None if no draft was loaded.
    params: weights of both.
    tokenizer: None if the checkpoint has none; prompts and outputs are then token ids.
    eos: ids that end a text.
    placement: the devices over which weights and sequences are split, and whether the draft is; None: all are on one
      device.
    """

    name: str
    target: Decoder
    params: Params
    tokenizer: Tokenizer | None
    eos: tuple[int, ...]
    draft: Draft | None = None
    placement: Placement | None = None

    def __repr__(self) -> str:
        draft = "no draft" if self.draft is None else self.draft.summary()
        known = isinstance(self.target, Decoder)
        outline = self.target.outline() if known else f"target {type(self.target).__name__}"
        shape = f"{outline}, vocabulary {self.target.vocab_size}"
        devices = "" if self.placement is None else f" on {self.placement}"
        return f"Model({self.name!r}: {shape}, {_dtypes(self.params.target)}{devices}; {draft})"

    def with_params(self, params: Any) -> "Model":
        """This model with other weights, by reference, such as those of a training loop. Nothing is compiled anew.

        params: `Params` of target and draft, or the weights of the target alone.

        Raises:
          ValueError: another structure, shape or dtype than those of this model's, or of a model that is split, another
            sharding; with the path of the leaf.
        """
        params = params if isinstance(params, Params) else Params(params, self.params.draft)
        self.check_replacement(params)
        return dataclasses.replace(self, params=params)

    def check_replacement(self, params: Any) -> None:
        """Checks that weights can replace this model's without compiling anything.

        Raises:
          ValueError: as `with_params`.
        """
        _check_same_shapes(self.params, params)
        if self.placement is not None:
            _check_same_devices(self.params, params)

    def by_group(self) -> "list[Model]":
        """This model on each group of its devices alone. Weights that are there are not copied."""
        placement = self.placement
        if placement is None or placement.groups == 1:
            return [self]
        parts = [placement.group(index) for index in range(placement.groups)]
        return [dataclasses.replace(self, params=part.own(self.params), placement=part) for part in parts]

    def with_draft(self, draft: "Model | None") -> "Model":
        """This model with another language model as its draft, for the drafter `jspec.Standalone`; None: without one.

        Raises:
          TypeError, ValueError: not a model, or one of another vocabulary.
        """
        if draft is None:
            return dataclasses.replace(self, draft=None, params=Params(self.params.target))
        if not isinstance(draft, Model):
            raise TypeError(f"draft is of type {type(draft).__name__}: must be a jspec.Model, or None")
        if draft.target.vocab_size != self.target.vocab_size:
            raise ValueError(
                f"draft={draft.name!r}: has a vocabulary of {draft.target.vocab_size} tokens; must have "
                f"{self.target.vocab_size}, as {self.name!r}"
            )
        refuse_split(draft, "with_draft")
        params, placement = Params(self.params.target, draft.params.target), self.placement
        if placement is not None:
            placement = dataclasses.replace(placement, draft=False)
            params = placement.complete(params)
        return dataclasses.replace(self, draft=draft.target, params=params, placement=placement)


def _dtypes(params: Any) -> str:
    """The dtypes of weights."""
    return "/".join(dtype_names(params))


def _check_same_shapes(old: Any, new: Any) -> None:
    """Checks that weights can replace others without compiling anything.

    Raises:
      ValueError: another structure, shape or dtype, with the path of the leaf.
    """
    olds, structure = jax.tree_util.tree_flatten_with_path(old)
    news, other = jax.tree_util.tree_flatten_with_path(new)
    if structure != other:
        raise ValueError(f"params: their structure is not that of the model: {_difference(olds, news)}")
    for (path, x), (_, y) in zip(olds, news, strict=True):
        if not isinstance(y, jax.Array | np.ndarray) or x.shape != y.shape or x.dtype != y.dtype:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)}: is {_described(y)}; must be {x.dtype}{list(x.shape)}"
            )
    check_alive(new)


def _difference(olds: list[tuple[Any, Any]], news: list[tuple[Any, Any]]) -> str:
    """The first leaves that only one of two pytrees has."""
    known, given = ([f"params{jax.tree_util.keystr(path)}" for path, _ in leaves] for leaves in (olds, news))
    missing, unknown = [name for name in known if name not in given], [name for name in given if name not in known]
    found = [f"{name} is missing" for name in missing[:2]]
    found += [f"{name} is not one of its weights" for name in unknown[:2]]
    return "; ".join(found) or "its containers are of other types"


def _described(leaf: Any) -> str:
    if not isinstance(leaf, jax.Array | np.ndarray):
        return f"of type {type(leaf).__name__}"
    return f"{leaf.dtype}{list(leaf.shape)}"


def check_alive(params: Any, where: str = "params") -> None:
    """Checks that weights have not been donated to a program of the user's, which deletes them.

    where: what they are, for the message.

    Raises:
      ValueError: they have, with the path of the leaf.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise ValueError(
                f"{where}{jax.tree_util.keystr(path)}: has been deleted, as donate_argnums of jax.jit does; give the "
                "model its new weights with model.with_params, or copies"
            )


def _check_same_devices(old: Params, new: Params) -> None:
    """Checks that weights are split over devices as those that they replace: others have another order of columns.

    Raises:
      ValueError: they are not, with the path of the leaf.
    """
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True):
        if isinstance(x, Tracer) or isinstance(y, Tracer):
            continue
        where = f"params{jax.tree_util.keystr(path)}"
        if not isinstance(x, jax.Array):
            raise ValueError(f"{where}: is of type {type(x).__name__}; must be a jax.Array")
        if not x.sharding.is_equivalent_to(y.sharding, x.ndim):
            raise ValueError(
                f"{where}: has the sharding {x.sharding}; must have that of the model, {y.sharding}, as "
                "jspec.from_named(..., tensor=...) makes it"
            )


def load(
    source: str | Path,
    *,
    draft: str | Path | None = None,
    dtype: str | None = None,
    tensor: int | None = None,
    data: int | None = None,
    mesh: Mesh | None = None,
    draft_tensor: bool | None = None,
    exact: bool = False,
    weights: str | None = None,
    kv: str | None = None,
) -> Model:
    """Loads a target, and a draft for it, onto the default device, or splits it over several.

    Args:
      source: "bundled:python-small", a Hugging Face directory, or a hub id such as "org/name".
      draft: a checkpoint of a draft, named the same way: a small language model with the target's vocabulary, or an
        EAGLE head or an assistant made for this target. None: the draft bundled with the target, or the MTP heads in
        its checkpoint, if any.
      dtype: "bfloat16", "float16" or "float32"; None is bfloat16 on an accelerator and float32 on a CPU.
      tensor: number of devices over which heads, MLPs and the vocabulary of the target are split (tensor parallelism);
        None: one, or those of `mesh`. See docs/several-gpus.md.
      data: number of groups of `tensor` devices over which the sequences of a batch are split (data parallelism); each
        group has all weights. None: one, or those of `mesh`.
      mesh: the devices to use, with the axes "tensor" and "data" or one of them. None: the first ones.
      draft_tensor: whether the draft is split, too, or whole on each device. None: whichever is faster; an assistant is
        always split.
      exact: the bits of a token's logits depend on its own context alone, not on drafts or on the rest of the batch, in
        half precision too; on one device, for the families that docs/losslessness.md lists.
      weights: "fp8" or "int8": the matrices of linear layers, of the draft too, are quantized as they are read, and
        have 8 bits and a scale for each column. "int4": they have 4 bits and a scale for each 128 rows of a column.
        "wide": all weights are in `dtype`. None: those that a checkpoint stores in 8 or 4 bits keep them, and the
        others are in `dtype`. See docs/quantization.md.
      kv: "fp8": caches keep the target's keys and values, or latents, in 8 bits. None: in `dtype`. Drafted output
        equals plain output with the same `kv`. See docs/quantization.md.

    Raises:
      CheckpointError: files are missing, damaged or not supported.
      ValueError: an unknown dtype, format or bundled model, the draft's tokenizer differs, a model without an exact
        forward or a narrow cache, a number of devices over which it cannot be split, or weights that do not fit into
        the memory of a device, which is known before any of them is read; or another process has failed.
      TypeError: an argument of the wrong type.
    """
    tensor = None if tensor is None else check_int("tensor", tensor, least=1)
    data = None if data is None else check_int("data", data, least=1)
    exact = check_flag("exact", exact)
    check_weights(weights, WIDE)
    check_kv(kv)
    if exact and kv is not None:
        raise ValueError(f"exact=True: no exact forward with kv={kv!r} yet; omit one of them")
    if exact and weights in FORMATS:
        raise ValueError(f"exact=True: no exact forward with weights={weights!r} yet; omit one of them")
    if exact and (mesh is not None or (tensor or 1) > 1 or (data or 1) > 1):
        raise ValueError("exact=True: no exact forward of a model over several devices yet; omit tensor, data and mesh")
    placement = make_placement(tensor, mesh, jax.devices(), data)
    if placement is not None:
        prepare_collectives()
    if draft_tensor is not None:
        draft_tensor = check_flag("draft_tensor", draft_tensor)
        if placement is None or placement.size == 1:
            raise ValueError(f"draft_tensor={draft_tensor}: requires tensor or mesh")
    options = {"dtype": dtype, "draft_tensor": draft_tensor, "exact": exact, "weights": weights, "kv": kv}
    # Each process reads other parts, so one alone may find an error.
    with agreement(placement, _COMPARED) as compare:
        model = _load(source, draft, placement, **options)
        compare({"target": model.target, "draft": model.draft})
    return model


_COMPARED = ("target", "draft")
"""What several processes must agree in when they have loaded a model."""


def _load(
    source: str | Path,
    draft: str | Path | None,
    placement: Placement | None,
    *,
    dtype: str | None,
    draft_tensor: bool | None,
    exact: bool,
    weights: str | None,
    kv: str | None,
) -> Model:
    """`load` on the devices of a placement."""
    directory = locate(source)
    if dtype is not None:
        check_text("dtype", dtype)
    draft = bundled_draft(source) if draft is None else draft
    draft_directory = None if draft is None else locate(draft, _DRAFT_FILES, "draft")
    if placement is not None and placement.size > 1 and draft_directory is not None:
        draft_tensor = _split_draft(draft_directory, str(draft), draft_tensor)
    devices = None if placement is None else placement.devices
    check = partial(memory.check_weights, str(source), devices=devices)
    place: Place = whole
    if placement is not None:
        place = partial(_place_target, placement, draft is None, draft_tensor)
        if draft_directory is not None and draft_tensor:
            options = {"dtype": dtype, "devices": placement.size}
            check_draft = partial(drafts.check_split, draft_directory, str(draft), **options)
            place = partial(_place_beside, placement, check_draft)
    if exact:
        place, check = _whole_and_exact, partial(_check_exact, check)
    if kv is not None:
        place = partial(_place_with_kv, kv, place)
    loaded, heads, head_params = _load_target(directory, dtype, check, place, weights, mtp=draft is None)
    if exact:
        loaded = dataclasses.replace(loaded, config=loaded.config.exactly())
    if kv is not None:
        loaded = dataclasses.replace(loaded, config=loaded.config.with_kv(kv))
    tokenizer = Tokenizer.load(directory)
    config, params = heads, Params(loaded.params, head_params)
    if draft is not None and draft_directory is not None:
        _check_same_tokens(tokenizer, Tokenizer.load(draft_directory), source, draft)
        check = partial(memory.check_weights, str(draft), devices=devices)
        if placement is None:
            place = whole
        else:
            place = partial(place_draft, target=placement, wanted=draft_tensor, weights=weights)
        options = {"dtype": dtype, "check": check, "place": place, "weights": weights}
        small = drafts.load(draft_directory, target=loaded.config, **options)
        config, params = small.config, Params(loaded.params, small.params)
    if placement is not None:
        placement = dataclasses.replace(placement, draft=getattr(config, "tensor", 1) > 1)
        params = placement.complete(params)
    return Model(str(source), loaded.config, params, tokenizer, loaded.eos, config, placement)


def _split_draft(directory: Path, name: str, wanted: bool | None) -> bool | None:
    """Whether to split a draft beside a target that is split; None: if that is faster. wanted: by the caller.

    Raises:
      ValueError: it is not to be split, and must be.
    """
    if not drafts.follows_target(directory):
        return wanted
    if wanted is False:
        raise ValueError(
            f"draft_tensor=False: draft={name!r} reads keys and values of the target, and is split as it is; omit "
            "draft_tensor"
        )
    return True


def refuse_split(model: Model, user: str) -> None:
    """Raises ValueError if the model is split over devices, which `user` does not support."""
    if model.placement is not None:
        raise ValueError(
            f"model={model.name!r}: is split over {model.placement}, which {user} does not support yet; "
            "load it without tensor, data and mesh, or use jspec.generate, stream, score or generate_ids"
        )


def _place_target(
    placement: Placement, alone: bool, draft_tensor: bool | None, config: Splittable, dtype: DTypeLike
) -> Placement:
    """The `Place` of a target. alone: no draft is loaded but the MTP heads in its checkpoint, which are split as it is.

    Raises:
      ValueError: there are no such heads to split, or they are not to be split.
    """
    heads = getattr(config, "mtp_layers", 0)
    if alone and draft_tensor is not None and not (heads and draft_tensor):
        problem = "MTP heads are always split" if heads else "no draft is loaded"
        raise ValueError(f"draft_tensor={draft_tensor}: {problem}; omit it")
    return placement


def _place_beside(
    placement: Placement, check_draft: Callable[..., None], config: Splittable, dtype: DTypeLike
) -> Placement:
    """The `Place` of a target beside a draft that is to be split.

    check_draft: `drafts.check_split` of the draft, for the target's configuration.

    Raises:
      CheckpointError, ValueError: one of them cannot be split, which is known before any weights are read.
    """
    config.split(placement.size)  # Of two problems the target's comes first.
    check_draft(target=config)
    return placement


def _check_exact(check: drafts.Check, shapes: Any) -> None:
    """The `Check` of a model with an exact forward, which reads weights of 16 or 32 bits."""
    refuse_quantized(shapes, "exact=True")
    check(shapes)


def _whole_and_exact(config: Splittable, dtype: DTypeLike) -> None:
    """The `Place` of a model with an exact forward, on one device.

    Raises:
      ValueError: it has none, which is known before any of its weights is read.
    """
    assert isinstance(config, Decoder)
    config.exactly()


def _place_with_kv(kv: str, place: Place, config: Splittable, dtype: DTypeLike) -> Placement | None:
    """The `Place` of a model with a narrow cache.

    Raises:
      ValueError: it has none, which is known before any of its weights is read.
    """
    assert isinstance(config, Decoder)
    config.with_kv(kv)
    return place(config, dtype)


def _load_target(
    directory: Path, dtype: str | None, check: drafts.Check, place: Place, weights: str | None, *, mtp: bool
) -> tuple[Checkpoint, MtpHeads | None, tuple[MtpParams, ...] | None]:
    """A language model, and the MTP heads of its checkpoint and their weights; None if not wanted or none exist."""
    loaded = language_model.read(Source(directory), dtype=dtype, mtp=mtp, check=check, place=place, weights=weights)
    return take_heads(loaded)


def take_heads(loaded: Checkpoint) -> tuple[Checkpoint, MtpHeads | None, tuple[MtpParams, ...] | None]:
    """A language model without its MTP heads, the heads and their weights; None if there are none."""
    family: Any = loaded.config
    if not family.mtp_layers:
        return loaded, None, None
    config, params = dataclasses.replace(family, mtp_layers=0), dataclasses.replace(loaded.params, mtp=())
    heads = MtpHeads(family.mtp_layer(), family.mtp_layers)
    return dataclasses.replace(loaded, config=config, params=params), heads, loaded.params.mtp


def bundled_draft(source: str | Path, drafter: str | None = None) -> str | None:
    """The bundled draft of a bundled model, for a drafter (None: the default draft); None if there is none."""
    drafts = BUNDLED.get(str(source).removeprefix("bundled:"), {}) if str(source).startswith("bundled:") else {}
    name = next(iter(drafts.values()), None) if drafter is None else drafts.get(drafter)
    return name and f"bundled:{name}"


def locate(source: str | Path, files: Sequence[str] = _HUB_FILES, argument: str = "source") -> Path:
    """The directory of a checkpoint, downloaded first if `source` is a hub id.

    files: patterns of the files to download.
    argument: what `source` is called, for messages.

    Raises:
      TypeError: neither a str nor a Path.
      ValueError: an unknown bundled model, or an empty name.
      CheckpointError: neither a directory nor a hub id, or the download failed.
    """
    if not isinstance(source, str | Path):
        raise TypeError(f"{argument}={shorten(source)}: must be a str or a Path")
    name = str(source) if isinstance(source, Path) else check_text(argument, source)
    if not name or (isinstance(source, str) and not name.strip()):
        raise ValueError(
            f"{argument}={name!r}: must be bundled:NAME, a Hugging Face directory or a hub id; '.' is this directory"
        )
    if name.startswith("bundled:"):
        short = name.removeprefix("bundled:")
        known = sorted({*BUNDLED, *(draft for drafts in BUNDLED.values() for draft in drafts.values())})
        if short not in known:
            raise ValueError(f"{name!r} is unknown; bundled models: {', '.join(known)}")
        return ASSETS / short
    try:
        if Path(source).is_dir():
            return Path(source)
    except (OSError, ValueError) as error:  # A name that is too long, or has a NUL character.
        raise CheckpointError(
            f"{argument}={shorten(name)}: cannot be opened ({getattr(error, 'strerror', None) or error})"
        ) from None
    if isinstance(source, Path) or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        shown = name if len(name) <= 200 else shorten(name)
        raise CheckpointError(f'{shown}: no such directory (and not a hub id of the form "organization/name")')
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files)))
    except Exception as error:
        raise CheckpointError(f"{name}: no such directory, and the download from the hub failed ({error})") from error


def _check_same_tokens(target: Tokenizer | None, draft: Tokenizer | None, source, draft_source) -> None:
    """Raises if both have a tokenizer and an id means different tokens in them."""
    if target is None or draft is None or target.vocabulary() == draft.vocabulary():
        return
    raise ValueError(
        f"draft={str(draft_source)!r} has a different tokenizer than {str(source)!r}: "
        "each token id must mean the same token in the draft and the target"
    )
