"""Checkpoint directories of EAGLE heads: reading them into a configuration and weights, and writing them.

There are two layouts (jspec/checkpoints/eagle_config.py): "safeailab" has the first layer of an EAGLE-3 head under
`midlayer`, "speculators" under `layers.0`.

What is optional in a head's weights is read where it is there, and what nothing here reads is an error, as the drafts
would silently be others than the head was trained to make.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.checkpoints import eagle_config, torch_file
from jspec.checkpoints.files import CheckpointError, Tensors, on_device, read_json, resolve_dtype, write_tensors
from jspec.checkpoints.llama import name_layer, read_layer
from jspec.models import EagleHead, EagleParams, LanguageModel, LlamaParams
from jspec.models.llama import LayerParams

_UNREAD = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
"""Tensors that are copies of the target's, or serve in training only."""


@dataclasses.dataclass(frozen=True)
class EagleCheckpoint:
    """A head: its configuration and weights."""

    config: EagleHead
    params: EagleParams


def is_head(directory: str | Path) -> bool:
    """Whether a checkpoint directory holds an EAGLE head (of any kind, `load` may refuse it), not a language model.

    Raises:
      CheckpointError: a file that is missing or damaged.
    """
    raw = read_json(Path(directory) / "config.json")
    names = [str(name).lower() for name in raw.get("architectures") or []]
    if eagle_config.is_speculators(raw) or any("eagle" in name for name in names):
        return True
    # The configuration of an EAGLE-1 head is that of an ordinary Llama.
    with _HeadTensors(Path(directory), np.float32) as tensors:
        return "fc.weight" in tensors.names()


def load(directory: str | Path, *, target: LanguageModel, dtype: str | None = None) -> EagleCheckpoint:
    """Loads an EAGLE-1, EAGLE-2 or EAGLE-3 head of either layout onto the default device.

    The target's embedding is used, as in SGLang, and not the copy of it that many heads come with, unless the head has
    another width than the target or says that it trained its own (`embed_requires_grad`).

    Args:
      directory: holds config.json and model.safetensors (or shards with an index), or pytorch_model.bin.
      target: the configuration of the model that the head was made for.
      dtype: as in `checkpoint.load`; give both the same.

    Raises:
      CheckpointError: a file that is missing or damaged, an option or a tensor that nothing here reads, a tensor that
        is missing or has another shape than the configuration says, a head that does not suit the target.
      ValueError: an unknown dtype.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    where = str(directory / "config.json")
    raw = read_json(directory / "config.json")
    with _HeadTensors(directory, resolve_dtype(dtype)) as tensors:
        config = eagle_config.parse_config(raw, tensors.names(), target, where)
        params = _read_params(config, raw, tensors, where)
        tensors.check_all_read(config)
    return EagleCheckpoint(config, params)


class _HeadTensors(Tensors):
    """The tensors of a head, which may also lie in pytorch_model.bin."""

    def __init__(self, directory: Path, dtype):
        super().__init__(directory, dtype)
        self.saved: dict[str, np.ndarray] | None = None
        if self.weight_map is not None or (directory / "model.safetensors").exists():
            return
        path = directory / "pytorch_model.bin"
        if not path.exists():
            raise CheckpointError(f"{directory}: there is neither model.safetensors nor pytorch_model.bin")
        saved = torch_file.read(path)
        if not isinstance(saved, dict) or not all(isinstance(value, np.ndarray) for value in saved.values()):
            raise CheckpointError(f"{path}: holds no table of tensors by name, which a checkpoint is")
        self.saved = saved

    def names(self) -> set[str]:
        return super().names() if self.saved is None else set(self.saved)

    def get(self, name: str) -> np.ndarray:
        if self.saved is None:
            return super().get(name)
        self.asked.add(name)
        if name not in self.saved:
            raise CheckpointError(f"{self.directory}: the tensor {name!r} is missing")
        # Not the mapped file itself, which an array on a CPU could go on to use.
        return np.array(self.saved[name])

    def optional(self, name: str, *shape: int) -> Array | None:
        """A tensor on the device, or None where there is none."""
        return self.device(name, *shape) if name in self.names() else None

    def check_all_read(self, config: EagleHead) -> None:
        """Raises where there are tensors that would change the forward, had they been read."""
        copies = {"lm_head.weight"} if config.version == 1 else set()
        unread = {name for name in self.names() - self.asked - _UNREAD - copies if not name.endswith("inv_freq")}
        if unread:
            raise CheckpointError(
                f"{self.directory}: has tensors that an EAGLE-{config.version} head has not, so that it is one of "
                f"another kind, or config.json says too little: {', '.join(sorted(unread))}"
            )


def _read_params(config: EagleHead, raw: Mapping[str, Any], tensors: _HeadTensors, where: str) -> EagleParams:
    names, width, eagle3 = tensors.names(), config.hidden_size, config.version == 3
    vocab, captured = config.draft_vocab_size, len(config.capture_layers) * config.target_hidden_size
    first = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
    qk_norm = (raw.get("transformer_layer_config") or {}).get("model_type") == "qwen3"
    layers = tuple(
        _read_head_layer(config, tensors, f"layers.{index}." if index else first, index, qk_norm)
        for index in range(config.num_layers)
    )
    own_embed = width != config.target_hidden_size or raw.get("embed_requires_grad")
    own_head = "lm_head.weight" in names or vocab != config.vocab_size or width != config.target_hidden_size
    input_norm = _check_flags(raw, ("norm_before_fc",), "input_norm.weight", names, where)
    fc_norms = None
    if eagle3:
        legacy = ["aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"]
        chunks = legacy if legacy[0] in names else [f"fc_norm.{i}.weight" for i in range(len(config.capture_layers))]
        if _check_flags(raw, ("fc_norm", "use_aux_norm"), chunks[0], names, where):
            fc_norms = tuple(tensors.device(name, config.target_hidden_size) for name in chunks)
    return EagleParams(
        embed=tensors.device("embed_tokens.weight", config.vocab_size, width) if own_embed else None,
        fc=tensors.fused([("fc.weight", width)], captured if eagle3 else 2 * width),
        fc_bias=tensors.optional("fc.bias", width),
        fc_norms=fc_norms,
        input_norm=tensors.device("input_norm.weight", captured) if eagle3 and input_norm else None,
        hidden_norm=tensors.device(first + "hidden_norm.weight", width) if eagle3 else None,
        layers=layers,
        norm=tensors.device("norm.weight", width) if eagle3 else None,
        lm_head=tensors.fused([("lm_head.weight", vocab)], width) if eagle3 and own_head else None,
        ids=_read_ids(config, tensors) if eagle3 else None,
    )


def _check_flags(raw: Mapping[str, Any], keys: tuple[str, ...], tensor: str, names: set[str], where: str) -> bool:
    """Whether a tensor is there; raises where a flag in config.json says otherwise."""
    said = [key for key in keys if raw.get(key) is not None]
    if said and any(raw[key] for key in said) != (tensor in names):
        there = "there" if tensor in names else "missing"
        flags = ", ".join(f"{key}={raw[key]}" for key in said)
        raise CheckpointError(f"{where}: {flags}, but the tensor {tensor!r} is {there}")
    return tensor in names


def _read_head_layer(config: EagleHead, tensors: _HeadTensors, prefix: str, index: int, qk_norm: bool) -> LayerParams:
    """One decoder layer. qk_norm: it must have norms of heads; it may in any case."""
    names, width = tensors.names(), config.hidden_size
    own, other = prefix + "input_layernorm.weight", prefix + "hidden_norm.weight"
    norm = None
    if index == 0:
        norm = tensors.device(own, width) if config.version == 3 else None
    elif own in names and other in names:
        norm = tensors.device(own, width)
        if not jnp.array_equal(norm, tensors.device(other, width)):
            raise CheckpointError(
                f"{tensors.directory}: {own} and {other} differ, and of a later layer vLLM reads the first and SGLang "
                "the second: keep the one that the head was trained with"
            )
    else:
        norm = tensors.device(other if other in names else own, width)
    return read_layer(
        config,
        tensors,
        prefix,
        norm,
        reads=2 * width if config.version == 3 and index == 0 else width,
        qkv_bias=prefix + "self_attn.q_proj.bias" in names,
        o_bias=prefix + "self_attn.o_proj.bias" in names,
        qk_norm=qk_norm or prefix + "self_attn.q_norm.weight" in names,
    )


def _read_ids(config: EagleHead, tensors: _HeadTensors) -> Int[Array, " Vd"] | None:
    """The target's ids of the draft's vocabulary. d2t holds what is to be added to an id of the draft."""
    names, count, vocab = tensors.names(), config.draft_vocab_size, config.vocab_size
    ids = np.arange(count, dtype=np.int64)
    if "d2t" in names or count != vocab:
        ids = ids + tensors.stored("d2t", count).astype(np.int64)
    if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= vocab:
        raise CheckpointError(
            f"{tensors.directory}: d2t leads to the token ids {ids[:3]} to {ids[-1]}, which do not ascend inside of a "
            f"vocabulary of {vocab}: it must hold offsets, id of the target = id of the draft + d2t"
        )
    if "t2d" in names and not np.array_equal(np.flatnonzero(tensors.stored("t2d", vocab)), ids):
        raise CheckpointError(f"{tensors.directory}: t2d marks other tokens than d2t leads to")
    return None if count == vocab else on_device(ids.astype(np.int32))


def save(
    directory: str | Path,
    config: EagleHead,
    params: EagleParams,
    *,
    layout: str,
    dtype: str = "bfloat16",
    verifier: str | None = None,
) -> None:
    """Writes config.json and model.safetensors, into a directory that is made if needed.

    SGLang reads "safeailab" and vLLM both; but SGLang knows neither `norm_before_residual` and `input_norm` nor norms
    of heads and biases of the attention, and drafts less well with a head that has them.

    Args:
      layout: "safeailab", or for EAGLE-3 heads "speculators".
      dtype: precision of the stored weights.
      verifier: the target's directory or hub id, which "speculators" records for vLLM to serve.

    Raises:
      ValueError: an unknown layout or dtype, or a head that the layout has no place for.
    """
    stored = resolve_dtype(dtype)
    raw = eagle_config.describe(layout, config, params, dtype, verifier)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    named = _named_tensors(config, params, layout)
    tensors = {name: np.ascontiguousarray(np.asarray(tensor).astype(stored)) for name, tensor in named}
    if params.ids is not None:
        ids = np.asarray(params.ids, np.int64)
        tensors["d2t"] = ids - np.arange(ids.size)
        tensors["t2d"] = np.isin(np.arange(config.vocab_size), ids)
    write_tensors(tensors, directory / "model.safetensors")


def _named_tensors(config: EagleHead, params: EagleParams, layout: str) -> Iterator[tuple[str, Any]]:
    """All weights but the vocabulary's, under their names in a layout, [out, in]."""
    midlayer = config.version == 3 and layout == "safeailab"
    first = "midlayer." if midlayer else "layers.0."
    for index, layer in enumerate(params.layers):
        prefix = f"layers.{index}." if index else first
        yield from name_layer(config, layer, prefix)
        if layer.attention_norm is not None:
            yield prefix + "input_layernorm.weight", layer.attention_norm
            if midlayer and index:
                # What SGLang reads in place of the other, as it has one class for all layers.
                yield prefix + "hidden_norm.weight", layer.attention_norm
    for index, norm in enumerate(params.fc_norms or ()):
        yield f"fc_norm.{index}.weight", norm
    yield "fc.weight", np.asarray(params.fc).T
    optional = {
        "embed_tokens.weight": params.embed,
        "fc.bias": params.fc_bias,
        "input_norm.weight": params.input_norm,
        first + "hidden_norm.weight": params.hidden_norm,
        "norm.weight": params.norm,
        "lm_head.weight": None if params.lm_head is None else np.asarray(params.lm_head).T,
    }
    yield from ((name, tensor) for name, tensor in optional.items() if tensor is not None)


def read_hot_tokens(path: str | Path) -> list[int]:
    """A list of token ids from a file: .json, or .pt as the authors of FR-Spec publish them (a list or a tensor).

    Raises:
      CheckpointError: no such file, or no list of integers in it.
    """
    path = Path(path)
    if path.suffix == ".json":
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file") from None
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    else:
        value = torch_file.read(path)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise CheckpointError(f"{path}: holds no list of integers, which token ids are")
    return value


def with_hot_tokens(
    config: EagleHead, params: EagleParams, target_params: LlamaParams, ids: Sequence[int] | Int[np.ndarray, " Vd"]
) -> EagleCheckpoint:
    """The head with its vocabulary cut to the tokens `ids`, so that its LM head costs less (FR-Spec, arXiv 2502.14856).

    Args:
      config, params: a head with the target's whole vocabulary, as EAGLE-1 and EAGLE-2 heads have.
      target_params: the target's weights, whose LM head such a head uses.
      ids: token ids in any order, each once.

    Raises:
      ValueError: a head whose vocabulary is cut already; ids that are none, are repeated, or are not of the vocabulary.
    """
    if params.ids is not None:
        raise ValueError(f"the head's vocabulary is cut to {config.draft_vocab_size} tokens already")
    given = np.asarray(ids)
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
        raise ValueError(f"ids has the shape {given.shape} and the dtype {given.dtype}: give a list of token ids")
    chosen = np.unique(given)
    if chosen.size != given.size:
        raise ValueError(f"ids has {given.size} entries, of which only {chosen.size} differ: give each token id once")
    if chosen[0] < 0 or chosen[-1] >= config.vocab_size:
        raise ValueError(
            f"ids reaches from {chosen[0]} to {chosen[-1]}: the vocabulary has {config.vocab_size} tokens, from 0 on"
        )
    head = _columns(params.lm_head, chosen) if params.lm_head is not None else _target_columns(target_params, chosen)
    cut = dataclasses.replace(params, lm_head=head.astype(params.fc.dtype), ids=on_device(chosen.astype(np.int32)))
    return EagleCheckpoint(dataclasses.replace(config, draft_vocab_size=int(chosen.size)), cut)


def _target_columns(params: LlamaParams, ids: np.ndarray) -> Float[Array, "E Vd"]:
    return jnp.take(params.embed, ids, axis=0).T if params.lm_head is None else _columns(params.lm_head, ids)


def _columns(lm_head: Float[Array, "E V"], ids: np.ndarray) -> Float[Array, "E Vd"]:
    return jnp.take(lm_head, ids, axis=1)
