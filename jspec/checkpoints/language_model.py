"""Checkpoint directories of language models of all families: reading and writing them.

Reading copies one tensor at a time, or the part for one device, to the device, so the host never holds the
whole model.
"""

import dataclasses
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from jspec.checkpoints import atomic, deepseek, gemma3, gemma4, gpt_oss, llama, qwen3_next
from jspec.checkpoints.adapter import AdaptedFiles, Adapter
from jspec.checkpoints.config import family_of, reading, unknown_family
from jspec.checkpoints.family import Family
from jspec.checkpoints.fields import MOST_LENGTH, MOST_SIZE, Fields, read_fields, refuse
from jspec.checkpoints.files import DTYPES, CheckpointError, find_file, resolve_dtype, write_shards
from jspec.checkpoints.plan import Checkpoint, Plan, refuse_split
from jspec.checkpoints.source import Source
from jspec.checkpoints.spelling import STOCK
from jspec.checkpoints.tensors import HEAD
from jspec.core.checks import check_int
from jspec.models.decoder import Decoder
from jspec.models.quantized import refuse_quantized
from jspec.models.sizes import count_parameters

FAMILIES: tuple[Family[Any], ...] = (
    *llama.FAMILIES,
    gemma3.FAMILY,
    gemma4.FAMILY,
    deepseek.FAMILY,
    qwen3_next.FAMILY,
    gpt_oss.FAMILY,
)
"""All families of language models; a new one is one more entry."""

_OTHERS: dict[str, tuple[object, ...]] = {
    **{key: STOCK[key] for key in ("use_rope", "rope_interleave", "rope_interleaved")},
    **{key: STOCK[key] for key in ("residual_multiplier", "embedding_multiplier", "logits_scaling")},
    **dict.fromkeys(("rope_is_neox_style", "is_neox_style"), (True,)),
    **dict.fromkeys(("mla_nope", "indexer_rope_interleave"), (False,)),
    **{"logit_scale": (1.0,), "index_topk_freq": (1,)},
    "hidden_act_alpha": (1.702,),
    **dict.fromkeys(("attention_multiplier", "attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"), ()),
    **dict.fromkeys(("attention_chunk_size", "llama_4_scaling", "rswa_window"), ()),
    **dict.fromkeys(("index_topk_pattern", "index_skip_topk_offset", "layer_rope_theta", "attention_sinks"), ()),
    **dict.fromkeys(("swiglu_limit", "swa_head_dim", "swa_num_key_value_heads"), ()),
}
"""Options that vLLM, SGLang or `transformers` reads in a class of this name -> values without effect; none: it must be
absent, zero or empty."""

MOST_PARAMETERS = 10**13
"""Bound of the parameters of a model, several times those of the largest ones."""


def load(directory: str | Path, *, dtype: str | None = None, mtp: bool = True) -> Checkpoint[Decoder]:
    """Loads a checkpoint of any family in `FAMILIES` onto the default device.

    directory: holds config.json and model.safetensors, or its shards with model.safetensors.index.json.
    dtype: as in `jspec.load`.
    mtp: whether to read MTP heads, if there are any.

    Raises:
      CheckpointError: a file is missing or damaged, the architecture or an option is not supported, a tensor is missing
        or has an unexpected shape, or, in all families but Llama, a tensor is not used.
      ValueError: an unknown dtype.
    """
    return plan(Source(directory), dtype=dtype, mtp=mtp).read()


def plan(
    source: Source,
    *,
    dtype: str | None = None,
    mtp: bool = True,
    weights: str | None = None,
    adapter: Adapter | None = None,
) -> Plan[Decoder]:
    """What `load` reads from an open directory; reads no weights itself.

    weights: as `Tensors.weights`.
    adapter: merged into the tensors as they are read.
    """
    family = _family_of(source.config)
    parsed: Any = parse_config(source.config)
    eos = _read_eos(source, parsed.vocab_size)
    if adapter is not None:
        files = adapter.over(source.safetensors, family.modalities)
        source, parsed = source.replaced(files), _untied(parsed, files)
    tensors = family.open_tensors(source, resolve_dtype(dtype))
    tensors.weights = weights
    untied = source.config.read_flag("tie_word_embeddings", None) is False
    if untied and getattr(parsed, "tie_embeddings", False) and HEAD in tensors.names():
        # The flag in the section of the text model may be a default.
        parsed = dataclasses.replace(parsed, tie_embeddings=False)
    config = family.with_mtp(parsed, tensors, mtp)
    if mtp:
        _check_heads(source, config.mtp_layers)
    if (count := count_parameters(config.param_shapes(tensors.dtype))) > MOST_PARAMETERS:
        problem = f"describes {count:.1e} parameters: must describe at most {MOST_PARAMETERS:.0e}"
        raise CheckpointError(f"{source.config.where}: {problem}")
    return Plan(config, tensors, family.read_params, eos, family.as_stored)


def _untied(config: Any, files: AdaptedFiles) -> Any:
    """The configuration with an LM head of its own, if an adapter changes only one of two tied weights."""
    tied = getattr(config, "tie_embeddings", HEAD not in files.names())
    if not tied or (changed := files.unties()) is None:
        return config
    if hasattr(config, "tie_embeddings"):
        return dataclasses.replace(config, tie_embeddings=False)
    raise CheckpointError(
        f"{files.adapter.directory}: changes {changed}, which is both embedding and LM head in models of type "
        f"{type(config).__name__}: must leave it as it is"
    )


def _check_heads(source: Source, count: int) -> None:
    """Warn if a checkpoint without the tensors of MTP heads declares some, as what `transformers` writes does.

    count: heads with tensors; CheckpointError if another number is declared.
    """
    for fields in (source.config, source.config.section("text_config")):
        for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
            if not fields.is_set(key) or fields.read_int(key) == count:
                continue
            problem = f"{fields.where}: {fields.describe(key)}, but the checkpoint lists "
            if count:
                raise CheckpointError(f"{problem}the tensors of {count} MTP head{'s' * (count > 1)}")
            warnings.warn(f"{problem}no tensors of MTP heads: loaded without these", stacklevel=2)


def parse_config(config: Fields) -> Decoder:
    """Parse a config.json."""
    sections = config, config.section("text_config")
    for fields in sections:
        # Every model of `transformers` reads it.
        refuse(config.where, fields.unsupported({"is_causal": (True,)}))
    with reading(config.where):
        parsed = _family_of(config).parse_config(config)
    # Options of other forwards, but for those that the family reads.
    for fields in sections:
        others = {key: values for key, values in _OTHERS.items() if fields.name(key) not in config.reads}
        wrong = fields.unsupported({key: values for key, values in others.items() if values})
        wrong += [fields.describe(key) for key, values in others.items() if not values and fields.is_set(key)]
        refuse(config.where, wrong)
    # Attention in chunks is that of all positions for texts of the length without it.
    chunked = config.section("dual_chunk_attention_config")
    if chunked.keys():
        most = chunked.read_int("original_max_position_embeddings", most=MOST_LENGTH)
        problem = f"{config.where}: dual_chunk_attention_config is not supported: texts have at most {most} tokens"
        warnings.warn(problem, stacklevel=2)
        parsed = dataclasses.replace(parsed, max_length=min(parsed.max_length, most))
    return parsed


def _family_of(config: Fields) -> Family[Any]:
    for family in FAMILIES:
        if family_of(config, family.architectures) is not None:
            return family
    names = [name for family in FAMILIES for name in family.architectures]
    raise unknown_family(config, [name for name in names if name != name.lower()])


def family_by_config(config: Decoder) -> Family[Any]:
    """The family of a configuration, with its readers and writers; ValueError if `FAMILIES` lacks it."""
    for family in FAMILIES:
        if type(config) is family.config:
            return family
    raise ValueError(f"{type(config).__name__} is not the configuration of a family in FAMILIES")


def _read_eos(source: Source, vocab_size: int) -> tuple[int, ...]:
    """All end-of-text ids: config.json may list fewer of them than generation_config.json."""
    files = [source.config, source.config.section("text_config")]
    generation = find_file(source.directory, "generation_config.json")
    if generation is not None:
        files.append(read_fields(generation))
    return ends_of_text(files, vocab_size)


def ends_of_text(files: Sequence[Fields], vocab_size: int) -> tuple[int, ...]:
    """The end-of-text ids, by any of these files."""
    ids = set()
    for file in files:
        stated = file.int_or_ints("eos_token_id", least=-1, most=MOST_SIZE)
        # Some files have -1 for none, or a token of another vocabulary.
        if others := [i for i in stated if i >= vocab_size]:
            warnings.warn(
                f"{file.where}: {file.describe('eos_token_id')}: {others} are no ids of the vocabulary of {vocab_size} "
                "tokens and end no text",
                stacklevel=2,
            )
        ids |= {i for i in stated if 0 <= i < vocab_size}
    return tuple(sorted(ids))


def save(
    directory: str | Path,
    config: Decoder,
    params: PyTree,
    *,
    dtype: str = "bfloat16",
    eos: tuple[int, ...] = (),
    max_shard_bytes: int | None = None,
) -> None:
    """Writes config.json, generation_config.json and the weights to a directory; creates it if needed.

    A failed write, on a full disk say, leaves the directory as it was.

    Args:
      dtype: precision of the stored weights.
      eos: end-of-text ids.
      max_shard_bytes: a new file is started before the next tensor would exceed this size; None: one file.

    Raises:
      TypeError, ValueError: an entry of `eos` is not an id of the vocabulary, or the weights are split over devices.
    """
    # Refuse split or quantized weights, and ids outside the vocabulary.
    family = family_by_config(config)
    refuse_split(config)
    refuse_quantized(params, "writing a checkpoint")
    for token in eos:
        check_int("eos", token, least=0, most=config.vocab_size - 1)
    # The configuration.
    raw = family.describe(config) | {"dtype": dtype}
    if eos:
        raw["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
    # Replace the files together.
    replaced = (*atomic.WEIGHTS, "generation_config.json")
    with atomic.staged(directory, key="config.json", replaced=replaced) as stage:
        if eos:
            (stage / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}, indent=2) + "\n")
        (stage / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        write_shards(stage, family.named_tensors(config, params), DTYPES[dtype], max_shard_bytes)
