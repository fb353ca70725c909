"""Loading a target, its tokenizer and an optional draft."""

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jspec.checkpoints import drafts
from jspec.checkpoints.adapter import Adapter
from jspec.checkpoints.generation_config import read_sampling
from jspec.checkpoints.loading import LoadOptions, place_model, plan_model
from jspec.checkpoints.plan import Checkpoint
from jspec.checkpoints.source import Source
from jspec.core.checks import check_flag
from jspec.core.processes import agreement
from jspec.core.sampling import Sampling
from jspec.core.sharding import Placement
from jspec.core.types import Params
from jspec.drafters.hot_tokens import read_hot_tokens, trim, with_candidates
from jspec.loading import memory
from jspec.loading.hub import ADAPTER_FILES, DRAFT_FILES, bundled_draft, locate
from jspec.loading.probe import Fit, make_prompts, probe_fit
from jspec.loading.replacement import check_same_devices, check_same_shapes
from jspec.models import MtpHeads
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft
from jspec.models.quantized import dtype_names
from jspec.text.tokenizer import Tokenizer, check_same_tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A target ready to generate.

    name: where it was loaded from.
    target: its configuration.
    draft: the draft's configuration: a language model, an EAGLE head, an assistant or the MTP heads of the target's own
      checkpoint; None if no draft was loaded.
    params: weights of both.
    tokenizer: None if the checkpoint has none; prompts and outputs are then token ids.
    eos: end-of-text ids, of its files and of its tokenizer.
    placement: the devices over which weights and sequences are split, and whether the draft is; None: all are on one
      device.
    sampling: parameters that the checkpoint recommends, to pass on as `jspec.generate(..., sampling=model.sampling)`;
      None: none. Without `sampling`, generation is greedy.
    """

    name: str
    target: Decoder
    params: Params
    tokenizer: Tokenizer | None
    eos: tuple[int, ...]
    draft: Draft | None = None
    placement: Placement | None = None
    sampling: Sampling | None = None

    def __repr__(self) -> str:
        draft = "no draft" if self.draft is None else self.draft.summary()
        is_decoder = isinstance(self.target, Decoder)
        outline = self.target.outline() if is_decoder else f"target {type(self.target).__name__}"
        shape, dtypes = f"{outline}, vocabulary {self.target.vocab_size}", "/".join(dtype_names(self.params.target))
        devices = "" if self.placement is None else f" on {self.placement}"
        return f"Model({self.name!r}: {shape}, {dtypes}{devices}; {draft})"

    def with_params(self, params: Any) -> "Model":
        """Swap in other weights, by reference, such as those of a training loop. Compiles nothing.

        params: `Params` of target and draft, or the weights of the target alone.

        Raises:
          ValueError: another structure, shape or dtype than those of this model's, or of a split model, another
            sharding; with the path of the leaf.
        """
        params = params if isinstance(params, Params) else Params(params, self.params.draft)
        self.check_replacement(params)
        return dataclasses.replace(self, params=params)

    def check_replacement(self, params: Any) -> None:
        """Raises ValueError if weights cannot replace this model's without compiling; see `with_params`."""
        check_same_shapes(self.params, params)
        if self.placement is not None:
            check_same_devices(self.params, params)

    def by_group(self) -> "list[Model]":
        """This model on each group of its devices alone, without copies of weights."""
        placement = self.placement
        if placement is None or placement.groups == 1:
            return [self]
        parts = [placement.group(index) for index in range(placement.groups)]
        return [dataclasses.replace(self, params=part.restrict(self.params), placement=part) for part in parts]

    def with_draft(self, draft: "Model | None") -> "Model":
        """Use another language model as the draft, for the drafter `jspec.Standalone`; None: no draft.

        Raises:
          TypeError, ValueError: not a model, or one of another vocabulary.
        """
        # No draft: drop its weights, too.
        if draft is None:
            return dataclasses.replace(self, draft=None, params=Params(self.params.target))
        if not isinstance(draft, Model):
            raise TypeError(f"draft is of type {type(draft).__name__}: must be a jspec.Model, or None")
        # Both must have one vocabulary.
        if draft.target.vocab_size != self.target.vocab_size:
            raise ValueError(
                f"draft={draft.name!r}: has a vocabulary of {draft.target.vocab_size} tokens; must have "
                f"{self.target.vocab_size}, as {self.name!r}"
            )
        refuse_split(draft, "with_draft")
        # The draft is whole on each device.
        params, placement = Params(self.params.target, draft.params.target), self.placement
        if placement is not None:
            placement = dataclasses.replace(placement, draft=False)
            params = placement.complete(params)
        # The bits of drafts do not matter.
        config = draft.target.configured(exact=False, kv=None) if isinstance(draft.target, Decoder) else draft.target
        return dataclasses.replace(self, draft=config, params=params, placement=placement)

    def with_hot_tokens(self, tokens: str | Path | Sequence[int]) -> "Model":
        """Let the draft propose some tokens alone, so its LM head costs less; the output stays the same.

        The columns of a head that the draft shares with the target are a copy, which later weights of the target do not
        change.

        tokens: their ids, at least 64, or a file with a JSON list of them.

        Raises:
          ValueError: no such ids, no draft, one with another kind of LM head, or a split model.
        """
        refuse_split(self, "with_hot_tokens")
        if self.draft is None:
            raise ValueError(f"model={self.name!r}: must have a draft")
        ids = read_hot_tokens(tokens, self.target.vocab_size)
        draft, params = trim(self.params, self.target, self.draft, ids)
        return dataclasses.replace(self, draft=draft, params=params)

    def with_candidates(self, candidates: int = 128, rank: int = 128) -> "Model":
        """Let the LM head of an EAGLE-3 draft score candidates alone, as in EAGLE-4; the output stays the same.

        A product of low rank finds them: its factors are the largest singular vectors of the LM head.

        candidates: tokens to score, at least as many as a node of a tree has children.
        rank: of the product, at most the draft's width.

        Raises:
          TypeError, ValueError: no ints within bounds, no draft, one of another kind, or a split model.
        """
        refuse_split(self, "with_candidates")
        draft, params = with_candidates(self.params, self.target, self.draft, rank, candidates)
        return dataclasses.replace(self, draft=draft, params=params)


def refuse_split(model: Model, user: str) -> None:
    """Raise ValueError if the model is split over devices: `user` does not support this."""
    if model.placement is not None:
        raise ValueError(
            f"model={model.name!r}: is split over {model.placement}, which {user} does not support yet; "
            "load it without tensor, data and mesh, or use jspec.generate, stream, score or generate_ids"
        )


def load(
    source: str | Path,
    *,
    draft: str | Path | None = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    tensor: int | None = None,
    data: int | None = None,
    mesh: Mesh | None = None,
    draft_tensor: bool | None = None,
    exact: bool | None = None,
    weights: str | None = None,
    kv: str | None = None,
    probe: bool = False,
) -> Model:
    """Load a target, and a draft for it, onto the default device, or split it over several.

    Args:
      source: "bundled:python-small", a Hugging Face directory, a .gguf file, or a hub id such as "org/name".
      draft: a checkpoint of a draft, named the same way: a small language model with the target's vocabulary, or an
        EAGLE head or an assistant made for this target. None: the draft bundled with the target, or the MTP heads in
        its checkpoint, if any.
      adapter: a LoRA adapter of peft, a directory or a hub id, merged into the weights before they are quantized.
      dtype: "bfloat16", "float16" or "float32"; None is bfloat16 on an accelerator and float32 on a CPU.
      tensor: number of devices over which heads, MLPs and the vocabulary of the target are split (tensor parallelism);
        None: one, or those of `mesh`. See docs/several-gpus.md.
      data: number of groups of `tensor` devices over which the sequences of a batch are split (data parallelism); each
        group has all weights. None: one, or those of `mesh`.
      mesh: the devices to use, with the axes "tensor" and "data" or one of them. None: the first ones.
      draft_tensor: whether the draft is split, too, or whole on each device. None: whichever is faster; an assistant is
        always split.
      exact: the bits of a token's logits depend on its own context alone, not on drafts or on the rest of the batch, in
        half precision too; see docs/losslessness.md. None: on a Hopper GPU in half precision, with kernels.
      weights: "fp8" or "int8": the matrices of linear layers, of the draft too, are quantized as they are read, and
        have 8 bits and a scale for each column. "int4": they have 4 bits and a scale for each 128 rows of a column.
        "wide": all weights are in `dtype`. None: weights stored in 8 or 4 bits keep them. See docs/quantization.md.
      kv: "fp8": caches keep the target's keys and values, or latents, in 8 bits. None: in `dtype`. A float that rounds
        the other way can change a near-tie between drafted and plain output, see docs/quantization.md.
      probe: whether to warn of a draft that does not fit the target, or fits better under a neighboring reading of its
        checkpoint, see `probe_draft`.

    Raises:
      CheckpointError: files are missing, damaged or not supported.
      ValueError: an unknown dtype, format or bundled model, the draft's tokenizer differs, a model without an exact
        forward or a narrow cache, an unsupported number of devices, or weights too large for the memory of a device
        (known before any of them is read); or another process has failed.
      TypeError: an argument of the wrong type.
    """
    options = LoadOptions(place_model(tensor, data, mesh), dtype, exact, weights, kv, draft_tensor)
    if check_flag("probe", probe) and options.placement is not None:
        raise ValueError(f"probe=True: must be False for a model that is split over {options.placement}")
    # Each process reads other parts, so one alone may find an error.
    with agreement(options.placement, ("target", "draft")) as compare:
        model = _load(source, bundled_draft(source) if draft is None else draft, adapter, options)
        compare({"target": model.target, "draft": model.draft})
    if probe and model.draft is not None:
        warning = probe_draft(model).warning(str(source if draft is None else draft))
        if warning is not None:
            warnings.warn(warning, stacklevel=2)
    return model


def probe_draft(model: Model) -> Fit:
    """Whether the draft of a model proposes what the target writes, and whether it would under another reading.

    Nothing is changed. It takes some forwards over 200 tokens, seconds on two CPU cores for 100 million
    parameters.

    Raises:
      ValueError: the model has no draft, or is split over devices.
    """
    refuse_split(model, "probe")
    if model.draft is None:
        raise ValueError(f"model={model.name!r}: must have a draft")
    prompts = make_prompts(model.tokenizer, model.target.vocab_size)
    return probe_fit(model.params, model.target, model.draft, prompts, model.eos)


def _load(source: str | Path, draft: str | Path | None, adapter: str | Path | None, options: LoadOptions) -> Model:
    """Load in one of the processes. All errors but those of damaged weights precede the reading of weights."""
    # Open the files. Target and draft must have the same tokens.
    directory, draft_directory = locate(source), None if draft is None else locate(draft, DRAFT_FILES, "draft")
    tokenizer = Tokenizer.load(directory)
    if draft_directory is not None:
        check_same_tokens(tokenizer, Tokenizer.load(draft_directory), source, draft)
    target_files, recommended = Source(directory, str(source)), read_sampling(directory)
    change = None if adapter is None else open_adapter(adapter)
    draft_files = None if draft_directory is None else Source(draft_directory, str(draft))

    # Plan what each device gets.
    plan = plan_model(target_files, draft_files, options, change)
    name = str(source) if draft is None else f"{source} with draft={str(draft)!r}"
    devices = None if options.placement is None else options.placement.devices
    memory.check_weights(name, plan.memory(), devices=devices)

    # Read the weights.
    target = _complete(plan.target.read(), options.placement)
    small = None if plan.draft is None else _complete(plan.draft.read(), options.placement)
    if small is not None and draft_files is not None and getattr(small.params, "embed", 0) is None:
        drafts.warn_of_embedding(target_files, draft_files)
    model = assemble(str(source), target, small, tokenizer, options)
    return dataclasses.replace(model, eos=_ends(target, tokenizer), sampling=recommended)


def open_adapter(adapter: str | Path) -> Adapter:
    """Open the directory of an adapter, or download it."""
    return Adapter(locate(adapter, ADAPTER_FILES, "adapter"), str(adapter))


def _complete(loaded: Checkpoint, placement: Placement | None) -> Checkpoint:
    """Copy unsplit weights to all devices."""
    return loaded if placement is None else dataclasses.replace(loaded, params=placement.complete(loaded.params))


def assemble(
    name: str, target: Checkpoint, draft: Checkpoint | None, tokenizer: Tokenizer | None, options: LoadOptions
) -> Model:
    """Make a model of a target and a draft; draft None: the MTP heads of the target, if it has any."""
    if draft is None:
        target, draft = _split_heads(target)
    config = options.configured(target.config, target.params)
    draft_config, placement = None if draft is None else draft.config, options.placement
    if placement is not None:
        placement = dataclasses.replace(placement, draft=getattr(draft_config, "tensor", 1) > 1)
    params = Params(target.params, None if draft is None else draft.params)
    return Model(name, config, params, tokenizer, target.eos, draft_config, placement)


def _ends(target: Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The end-of-text ids: those of the model's files and the tokenizer's, as in vLLM and SGLang."""
    token = None if tokenizer is None else tokenizer.id_of(tokenizer.special_roles.get("eos_token", ""))
    ends = set(target.eos)
    if token is not None and token < target.config.vocab_size:
        ends.add(token)
    return tuple(sorted(ends))


def _split_heads(target: Checkpoint) -> tuple[Checkpoint, Checkpoint | None]:
    """Separate a language model from its MTP heads; None if there are none."""
    config = target.config
    if not config.mtp_layers:
        return target, None
    heads = Checkpoint(MtpHeads(config.mtp_layer(), config.mtp_layers), target.params.mtp)
    params = dataclasses.replace(target.params, mtp=())
    return dataclasses.replace(target, config=dataclasses.replace(config, mtp_layers=0), params=params), heads
