"""Checkpoint directories of drafts of all kinds."""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import PyTree

from jspec.checkpoints import assistant, atomic, block, eagle, language_model, scaled
from jspec.checkpoints.draft import DraftKind
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError, resolve_dtype, write_tensors
from jspec.checkpoints.gguf_model import GgufModel
from jspec.checkpoints.plan import Plan, refuse_split, splits_draft
from jspec.checkpoints.source import Source
from jspec.checkpoints.tensors import FLOATS, TensorFiles
from jspec.checkpoints.vocabulary import check_padding
from jspec.core.sharding import Placement
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft
from jspec.models.llama import Llama

DRAFT_KINDS = (assistant.KIND, block.KIND, eagle.KIND)
"""The kinds of drafts; the first match is used. A checkpoint of no kind is a small language model's."""


_PREFIXED = {f"model.{name}.weight" for name in ("fc", "midlayer.hidden_norm", "layers.0.hidden_norm")}
"""Tensors of heads under the prefix of a model."""
_MASKS = ("pard_token", "ptd_token_id")
"""Keys of the mask token of a language model."""
_MARKOV = ("markov_w1.", "markov_w2.", "gate_proj.", "joint_proj.")
"""Tensors of the Markov head of ModelOpt's DSpark, without the name of their module."""


def plan(source: Source, target: Decoder, dtype: str | None = None, weights: str | None = None) -> Plan[Draft]:
    """Plan to read a draft of any kind from an open directory, without reading weights.

    Args:
      target: the configuration of its target.
      dtype: as in `language_model.load`; use the same for both.
      weights: as `Tensors.weights`.

    Raises:
      CheckpointError: a file is missing or damaged, an option is not supported, a tensor is missing, has an unexpected
        shape or is not used, or the draft does not suit the target.
      ValueError: an unknown dtype.
    """
    # Some writers keep the names of the whole model, others those of the head.
    files = source.files
    if not isinstance(files, GgufModel):
        if _PREFIXED & files.names():
            files.rename(lambda name: name.removeprefix("model."))
        if "markov_w1.weight" in files.names():
            files.rename(_with_module)
    # A kind of draft with a layout of its own.
    for kind in DRAFT_KINDS:
        if kind.matches(source):
            return kind.plan(source, target, dtype, weights)
    # Any other draft is a language model with the target's vocabulary.
    plan: Plan[Any] = language_model.plan(source, dtype=dtype, mtp=False, weights=weights)
    check_padding(source.config.where, plan.config.vocab_size, target.vocab_size)
    return _with_masks(plan, source.config)


_EMBED = "embed_tokens.weight"


def warn_of_embedding(target: Source, draft: Source) -> None:
    """Warn if a draft that uses the target's embedding has one whose values differ: it may be trained with it."""
    names = [name for name in target.files.names() if name.endswith(_EMBED)]
    if isinstance(target.files, GgufModel) or len(names) != 1 or _EMBED not in draft.files.names():
        return
    pairs = [(target.files, names[0]), (draft.files, _EMBED)]
    shapes = [files.shape(name) for files, name in pairs]
    if any(len(shape) != 2 for shape in shapes) or shapes[0][1] != shapes[1][1]:
        return
    # 16 rows that both have; vocabularies may be padded differently.
    count = min(shape[0] for shape in shapes)
    first = min(1000, count // 2)
    tables = [_rows(files, name, range(first, min(first + 16, count))) for files, name in pairs]
    if all(table.dtype in FLOATS for table in tables) and not np.allclose(
        *(table.astype(np.float32) for table in tables), rtol=0.02, atol=1e-4
    ):
        warnings.warn(
            f"{draft.config.where}: {_EMBED} differs from the target's embedding, which is used instead; if the draft "
            'was trained with its own, add "embed_requires_grad": true to config.json',
            stacklevel=2,
        )


def _rows(files: TensorFiles, name: str, rows: range) -> np.ndarray:
    """Some rows of a matrix."""
    return files.part(name, (rows, range(files.shape(name)[1]))) if files.has_parts(name) else files.get(name)[rows]


def _with_masks(plan: Plan[Any], fields: Fields) -> Plan[Any]:
    """A language model that drafts all tokens at once, if its config.json has a mask token (PARD)."""
    tokens = {key: token for key in _MASKS if (token := fields.read_int(key, None, least=0)) is not None}
    if not tokens:
        return plan
    key, token = next(iter(tokens.items()))
    if len(set(tokens.values())) > 1:
        raise CheckpointError(f"{fields.where}: {' and '.join(map(fields.describe, tokens))} must be the same")
    if not isinstance(plan.config, Llama):
        raise fields.wrong(key, token, f"drafts of type {type(plan.config).__name__} have no masks; those of Llama do")
    if token >= plan.config.vocab_size:
        raise fields.wrong(key, token, f"must be below vocab_size={plan.config.vocab_size}, a row of the embedding")
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, mask_token=token))


def _with_module(name: str) -> str:
    """The name of a tensor of ModelOpt's DSpark as the other layouts have it."""
    if name.startswith("confidence_proj."):
        return name.replace("confidence_", "confidence_head.", 1)
    return f"markov_head.{name}" if name.startswith(_MARKOV) else name


def place(plan: Plan[Draft], name: str, placement: Placement, draft_tensor: bool | None = None) -> Plan[Draft]:
    """Split a draft beside a target over devices, or leave it whole on each; ValueError if it cannot be so.

    name: the draft's, for messages.
    placement: the target's.
    draft_tensor: whether to split it; None: if it must be, or is faster so.
    """
    # A reader of the target's cache must be split with it.
    config, tensors, devices = plan.config, plan.tensors, placement.size
    required = config.follows_target and devices > 1
    if required and draft_tensor is False:
        raise ValueError(
            f"draft_tensor=False: draft={name!r} reads keys and values of the target, and is split as it is; omit "
            "draft_tensor"
        )
    # Whole.
    if draft_tensor is False or devices == 1:
        return plan
    # Split, if it can be.
    try:
        split = plan.over(placement)
    except ValueError as error:
        problem = f"draft={name!r} cannot be split: {error}"
        if required:
            raise ValueError(f"{problem}; it reads keys and values of the target, which are") from None
        if draft_tensor:
            raise ValueError(f"draft_tensor=True: {problem}; omit draft_tensor") from None
        return plan
    return split if draft_tensor or splits_draft(config, tensors.dtype, devices, tensors.weights) else plan


def save(
    directory: str | Path,
    config: Draft,
    params: PyTree,
    *,
    layout: str | None = None,
    dtype: str = "bfloat16",
    weights: str | None = None,
    verifier: str | None = None,
) -> None:
    """Write config.json and model.safetensors to a directory, which is created if needed.

    Args:
      config: of a draft of one of the `DRAFT_KINDS`.
      layout: None: the first of the kind to hold the draft. EAGLE heads have "safeailab", for SGLang and vLLM,
        and EAGLE-3 heads "speculators", for vLLM; block drafts "deepspec" and "z-lab", for SGLang and vLLM, and
        "speculators". SGLang ignores `norm_before_residual`, `input_norm`, norms of heads and biases of the attention
        of EAGLE heads, and drafts less well with them.
      dtype: precision of the stored weights; integers keep theirs.
      weights: "int8": matrices have 8 bits and a scale for each output, as compressed-tensors stores them.
      verifier: the target's directory or hub id, which "speculators" records for vLLM.

    Raises:
      ValueError: an unknown layout, dtype or `weights`, a draft beyond the layout, or one that is split.
    """
    refuse_split(config)
    kind, layout = _kind_of(config), choose_layout(config, params, layout)
    if weights not in (None, "int8"):
        raise ValueError(f"weights={weights!r}: must be 'int8' or None")
    # Integers and bools keep their types.
    raw, stored = kind.describe(layout, config, params, verifier) | {kind.dtype_key: dtype}, resolve_dtype(dtype)
    arrays = {name: np.asarray(tensor) for name, tensor in kind.named_tensors(layout, config, params)}
    if weights is not None:
        raw, arrays = raw | {"quantization_config": scaled.INT8_CONFIG}, scaled.to_int8(arrays)
    scales = {name for name in arrays if name.endswith("_scale")}
    contiguous = {
        name: np.ascontiguousarray(array if array.dtype.kind in "iub" or name in scales else array.astype(stored))
        for name, array in arrays.items()
    }
    # The directory changes as a whole.
    with atomic.staged(directory, key="config.json", replaced=atomic.WEIGHTS) as stage:
        (stage / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        write_tensors(contiguous, stage / "model.safetensors")


def _kind_of(config: Draft) -> DraftKind:
    return next(kind for kind in DRAFT_KINDS if isinstance(config, kind.config))


def choose_layout(config: Draft, params: PyTree, layout: str | None = None) -> str:
    """The layout of a draft's checkpoint: this one or, if None, the first of its kind; ValueError if it cannot hold it.

    params: weights or their shapes.
    """
    kind = _kind_of(config)
    if layout is not None and layout not in kind.layouts:
        raise ValueError(f"layout={layout!r}: must be one of {', '.join(kind.layouts)}")
    candidates = kind.layouts if layout is None else (layout,)
    for name in candidates:
        try:
            kind.describe(name, config, params, None)
        except ValueError:
            if name == candidates[-1]:
                raise
        else:
            return name
    raise AssertionError("a kind has a layout")
