"""Checkpoints of every family and kind of draft, and damaged values for the keys of their config.json."""

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import block_files
import deepseek
import eagle_files
import families
import gemma
import hf
import jax
import numpy as np
import oss
import qwen
import toy
from safetensors.numpy import save_file

from jspec.checkpoints import assistant, block, drafts, eagle, gemma4, language_model
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.source import Source
from jspec.models import BlockHead
from jspec.models.assistant import Clusters
from jspec.models.decoder import Decoder
from jspec.models.moe import Routed, Router
from jspec.models.rope import Llama3Rope, Rope, YarnRope
from jspec.models.weights import write

ABSENT = object()
VALUES = (
    *(ABSENT, None, True, False, 0, 1, -1, 2, 3, 2.5, 0.5, 1e-46, 1e39, 10**6, 10**12, 10**30),
    *(math.nan, math.inf, -math.inf, "", "x", "4", "\ud800", [], [1], [None], [[]], {}, {"x": 1}, {"x": {"y": [1]}}),
)
"""What a value in config.json is replaced by."""


@dataclasses.dataclass(frozen=True)
class Base:
    """An intact checkpoint. load: returns the configuration; describe: its config.json."""

    name: str
    directory: Path
    raw: dict
    load: Callable[[Path], Any]
    describe: Callable[[Any], dict]


def weights(config: Decoder):
    """Weights of the right shapes."""
    return jax.tree.map(lambda leaf: np.full(leaf.shape, 0.01, leaf.dtype), config.param_shapes(np.float32))


_ROPE = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=64)
_V2 = dataclasses.replace(
    deepseek.MLA,
    experts=Routed(Router(count=6, chosen=2, groups=3, kept_groups=2, scale=2.0), width=16, shared_width=16),
    rope=Rope(scaling=YarnRope(factor=4.0, original_length=64, mscale=1.0, mscale_all_dim=1.0)),
)
_MOE = Routed(Router(count=4, chosen=2, normalize=True), width=16)
MODELS: dict[str, Decoder] = {
    "llama": dataclasses.replace(toy.TARGET, qk_norm=False, rope=Rope(scaling=_ROPE), attention_bias=True),
    "tied": toy.DRAFT,
    "qwen3": toy.TARGET,
    "qwen3_moe": dataclasses.replace(toy.TARGET, experts=_MOE, dense_layers=(1,)),
    **{f"gemma4 {kind}": config for kind, config in gemma.KINDS.items()},
    **families.KINDS,
    **{f"qwen3_next {kind}": config for kind, config in qwen.KINDS.items()},
    **{f"gpt_oss {kind}": config for kind, config in oss.KINDS.items()},
    **{f"deepseek {kind}": config for kind, config in deepseek.KINDS.items()},
    "deepseek v2": _V2,
    "deepseek mtp": dataclasses.replace(deepseek.MLA, mtp_layers=2),
}


def bases(root: Path) -> list[Base]:
    """All of them, written below `root`."""
    made = [_model(root / name, name, config) for name, config in MODELS.items()]
    made += [_older(root / "older"), *(_wrapped(root / f"wrapped {name}", name) for name in ("gemma4", "qwen3_next"))]
    made += [_head(root / name, name) for name in eagle_files.HEADS]
    blocks = ("z-lab sliding", "dflash2", "deepspec rnn", "specforge dspark", "speculators dspark")
    made += [_block(root / name, name) for name in blocks]
    return [*made, own_assistant(root / "assistant"), _gemma4_assistant(root / "gemma4 assistant")]


def mutations(raw: dict) -> Iterator[tuple[tuple, Any]]:
    """Paths of keys and list entries in a config.json, each with every other value."""
    for path in _paths(raw):
        for value in VALUES:
            yield path, value


def changed(raw: dict, path: tuple, value: Any) -> dict:
    """A copy with another value at a path."""
    raw = copy.deepcopy(raw)
    inner: Any = raw
    for key in path[:-1]:
        inner = inner[key]
    if value is ABSENT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return raw


def contradictions(described: Any, raw: Any, path: str = "") -> list[str]:
    """The keys that both objects have with different values; null, missing and empty ones say nothing."""
    if isinstance(described, dict) and isinstance(raw, dict):
        both = [key for key in described if raw.get(key) not in (None, []) and described[key] is not None]
        return [found for key in both for found in contradictions(described[key], raw[key], f"{path}.{key}")]
    if isinstance(described, bool) or isinstance(raw, bool) or not isinstance(raw, int | float):
        # All dimensions rotate in either kind, if the share of those that do is missing.
        same = type(described) is type(raw) and (described == raw or (described, raw) == ("default", "proportional"))
    else:
        same = isinstance(described, int | float) and described in (raw, float(raw))
    return [] if same else [f"{path}: {raw!r} was read as {described!r}"]


def _paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, (*path, key))
    elif isinstance(value, list) and value:
        yield (*path, 0)
        yield (*path, len(value) - 1)


def _load_model(directory: Path) -> Decoder:
    return language_model.load(directory, dtype="float32").config


def _model(directory: Path, name: str, config: Decoder) -> Base:
    language_model.save(directory, config, weights(config), dtype="float32", eos=(3,))
    raw = json.loads((directory / "config.json").read_text())
    # What other programs write as well.
    raw |= {"hidden_act": "silu", "pretraining_tp": 1} if name in ("llama", "deepseek v2") else {}
    return Base(name, directory, raw, _load_model, _described)


def _described(config: Decoder) -> dict:
    described = language_model.family_by_config(config).describe(config)
    # Each layer's own entry takes precedence over these.
    own = ("global_head_dim", "num_global_key_value_heads") if "per_layer_config" in described else ()
    own += () if described.get("hidden_size_per_layer_input") else ("vocab_size_per_layer_input",)
    # Checkpoints may leave out the MTP heads that their configuration counts.
    own += () if described.get("num_nextn_predict_layers") else ("num_nextn_predict_layers",)
    return {key: value for key, value in described.items() if key not in own}


def _older(directory: Path) -> Base:
    """A Llama in the older generation's format."""
    base = _model(directory, "older", MODELS["llama"])
    scaling = dict(base.raw["rope_parameters"])
    raw = {key: value for key, value in base.raw.items() if key != "rope_parameters"}
    raw |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    return dataclasses.replace(base, raw=raw)


def _wrapped(directory: Path, family: str) -> Base:
    """The text model of a multimodal one."""
    kind, architecture = {
        "gemma4": ("shared", "Gemma4ForConditionalGeneration"),
        "qwen3_next": ("experts", "Qwen3_5MoeForConditionalGeneration"),
    }[family]
    config = MODELS[f"{family} {kind}"]
    base = _model(directory, f"wrapped {family}", config)
    raw = {"architectures": [architecture], "text_config": base.raw, "tie_word_embeddings": family == "gemma4"}
    return dataclasses.replace(base, raw=raw, describe=lambda config: {"text_config": _text(config)})


def _text(config: Decoder) -> dict:
    return {key: value for key, value in _described(config).items() if key not in ("architectures", "model_type")}


def _head(directory: Path, name: str) -> Base:
    layout = str(eagle_files.HEADS[name].get("layout", "eagle3"))
    eagle_files.make_head(directory, **eagle_files.HEADS[name])  # pyright: ignore[reportArgumentType]
    raw = json.loads((directory / "config.json").read_text())

    def load(directory: Path):
        made = drafts.plan(Source(directory), eagle_files.TARGET, "float32").read()
        return made.config, made.params

    def describe(made) -> dict:
        config, params = made
        if isinstance(config, Decoder):
            return language_model.family_by_config(config).describe(config)
        layout_written = "speculators" if layout == "speculators" else "safeailab"
        described = eagle.describe(layout_written, config, params, None)
        # These say what other programs need, not what this head is.
        flags = ("fc_norm",) if "use_aux_norm" in raw else ()  # the same flag by its older name
        own = (
            *flags,
            "architectures",
            "tie_word_embeddings",
            "speculators_config",
            "bias",
            "qkv_bias",
            "draft_vocab_size",
        )
        described["transformer_layer_config"] = described.get("transformer_layer_config") or {}
        inner = described["transformer_layer_config"]
        for key in ("attention_bias", "tie_word_embeddings", "model_type", "bos_token_id", "eos_token_id"):
            inner.pop(key, None)
            described.pop(key, None)
        return {key: value for key, value in described.items() if key not in own}

    return Base(name, directory, raw, load, describe)


def _block(directory: Path, name: str) -> Base:
    block_files.make_draft(directory, **block_files.DRAFTS[name])
    raw = json.loads((directory / "config.json").read_text())

    def load(directory: Path):
        made = drafts.plan(Source(directory), block_files.TARGET, "float32").read()
        return made.config, made.params

    def describe(made) -> dict:
        config, params = made
        if isinstance(config, Decoder):
            return language_model.family_by_config(config).describe(config)
        if not isinstance(config, BlockHead):
            return {}
        # What both layouts cannot hold is compared by the tests of checkpoints.
        plain = dataclasses.replace(config, logit_scale=1.0, soft_cap=None)
        described = block.describe("speculators", plain, params, None)
        heads = ("block_size", "mask_token_id", "markov_rank", *block_files.CONVOLUTIONS, *block_files.SELECTOR)
        found = {key: described[key] for key in heads if key in described}
        shape = {key: value for key, value in described["transformer_layer_config"].items() if key in _SHAPE}
        if "speculators_model_type" in raw:
            ids = {"aux_hidden_state_layer_ids": described["aux_hidden_state_layer_ids"]}
            return {**found, **ids, "transformer_layer_config": shape}
        ids = {"target_layer_ids": [layer - 1 for layer in config.capture_layers]}
        # The section of the method takes precedence.
        inner = {key: value for key, value in {**found, **ids}.items() if key in raw.get("dflash_config", {})}
        return {**shape, **inner} if "dflash_config" not in raw else {**shape, "dflash_config": inner}

    return Base(name, directory, raw, load, describe)


_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "attention_bias",
)


def own_assistant(directory: Path) -> Base:
    config = dataclasses.replace(toy.CLUSTERED, clusters=Clusters(count=61, chosen=5))
    drafts.save(directory, config, toy.in_clusters(config, toy.random_assistant(config)), dtype="float32")
    raw = json.loads((directory / "config.json").read_text())
    return Base("assistant", directory, raw, _loads_for(toy.TARGET), assistant.describe)


def _gemma4_assistant(directory: Path) -> Base:
    text = {**hf.GEMMA4, **hf.GEMMA4_KINDS["dense"], "vocab_size": 96}
    shape = {"num_hidden_layers": len(text["layer_types"]), "architectures": ["Gemma4ForCausalLM"]}
    target = gemma4.parse_config(Fields({**text, **shape}))
    raw = hf.assistant_config("dense", ordered=True, vocab_size=96)
    config = assistant.parse_config(Fields(raw), target)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    params = toy.in_clusters(config, toy.random_assistant(config))
    named = {name: np.ascontiguousarray(tensor) for name, tensor in write(config.weights(), params)}
    save_file(named, directory / "model.safetensors")

    def describe(config) -> dict:
        described = assistant.describe(config)
        top = ("backbone_hidden_size", "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k")
        inner = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")
        return {key: described[key] for key in top if key in described} | {
            "text_config": {key: described[key] for key in inner} | {"num_hidden_layers": config.num_layers}
        }

    return Base("gemma4 assistant", directory, raw, _loads_for(target), describe)


def _loads_for(target: Decoder) -> Callable[[Path], Any]:
    return lambda directory: drafts.plan(Source(directory), target, "float32").read().config


TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
    }
).encode()
"""A tokenizer.json of two tokens."""
