"""One target, and drafts for it spelled in the ways of their writers: equal ones, and others by one flag.

A spelling changes config.json and tensors of a base draft, which is written as jspec itself documents it.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eagle_files
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import planted
import toy
from block_files import CONVOLUTIONS, DFLASH2, SELECTOR, random_draft
from eagle_files import LATENT, TARGET, V, any_head, random_head
from safetensors.numpy import save_file

from jspec.checkpoints import drafts, language_model
from jspec.checkpoints.plan import Checkpoint
from jspec.checkpoints.source import Source
from jspec.core import accept
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.core.round import draft as draft_round
from jspec.core.types import Params
from jspec.drafters import Block, Eagle, Standalone

Tensors = dict[str, np.ndarray]
Change = Callable[[dict, Tensors], tuple[dict, Tensors]]
# Ends of one text, so that positions matter.
PROMPTS = [list(map(int, np.random.default_rng(4).integers(0, V, 13)))[-length:] for length in range(4, 14)]
IDS = [1, 3, 6]
"""Captured layers, by what leaves them."""


# Changes


def top(**changes) -> Change:
    """Other values at the top level; "absent" removes a key."""
    return lambda raw, t: (eagle_files.edit(raw, **changes), t)


def inside(section: str, **changes) -> Change:
    """Other values in a section."""
    return lambda raw, t: ({**raw, section: eagle_files.edit(raw.get(section) or {}, **changes)}, t)


def move(section: str, *keys: str) -> Change:
    """Keys of the top level in a section."""

    def change(raw, t):
        inner = {**(raw.get(section) or {}), **{key: raw[key] for key in keys}}
        return {**{key: value for key, value in raw.items() if key not in keys}, section: inner}, t

    return change


def lift(section: str, **names: str) -> Change:
    """Keys of a section at the top level, under other names."""

    def change(raw, t):
        inner = {key: value for key, value in raw[section].items() if key not in names}
        others = {key: value for key, value in raw.items() if key != section} | ({section: inner} if inner else {})
        return {**others, **{name: raw[section][key] for key, name in names.items()}}, t

    return change


def rename(**names: str) -> Change:
    return lambda raw, t: ({names.get(key, key): value for key, value in raw.items()}, t)


def tensors(change: Callable[[Tensors], Tensors]) -> Change:
    return lambda raw, t: (raw, change(t))


def both(*changes: Change) -> Change:
    return lambda raw, t: functools.reduce(lambda pair, change: change(*pair), changes, (raw, t))


def without(*names: str) -> Change:
    return tensors(lambda t: {name: tensor for name, tensor in t.items() if name not in names})


def first_layer(name: str) -> Change:
    return tensors(lambda t: {key.replace("midlayer.", name): tensor for key, tensor in t.items()})


def prefixed(t: Tensors) -> Tensors:
    """Names of the whole model."""
    others = ("lm_head.", "d2t", "t2d")
    return {name if name.startswith(others) else f"model.{name}": x for name, x in t.items()}


@tensors
def interleaved(t: Tensors) -> Tensors:
    """Rows of q and k, their biases and norms in the order of rotated pairs (2 i, 2 i + 1); heads of 8 dimensions."""

    def turn(x):
        return x.reshape(-1, 2, 4, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    parts = (".q_proj.", ".k_proj.", ".q_norm.", ".k_norm.")
    return {name: turn(x) if any(part in name for part in parts) else x for name, x in t.items()}


def vocabulary(order: str, *, marks: bool = True, offsets: bool = True) -> Change:
    """Rows of the LM head in another order; ids as offsets or as they are; with t2d or without."""

    def change(t):
        ids = t["d2t"] + np.arange(len(t["d2t"]))
        rows = np.random.default_rng(9).permutation(len(ids)) if order == "frequency" else np.arange(len(ids))
        others = {name: x for name, x in t.items() if marks or name != "t2d"}
        names = [name for name in ("lm_head.weight", "markov_head.markov_w2.weight") if name in t]
        d2t = ids[rows] - np.arange(len(ids)) if offsets else ids[rows]
        return {**others, **{name: t[name][rows] for name in names}, "d2t": d2t}

    return tensors(change)


def padded(rows: int, *keys: str) -> Change:
    """A vocabulary with more rows, or fewer."""

    def pad(x):
        return np.concatenate([x, np.full((rows, *x.shape[1:]), 3, x.dtype)]) if rows > 0 else x[:rows]

    names = ("embed_tokens.weight", "lm_head.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    names += tuple(f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor"))

    def change(raw, t):
        raw = {**raw, "vocab_size": V + rows}
        stored = {name: pad(x) if name.removeprefix("model.") in names and len(x) == V else x for name, x in t.items()}
        if "t2d" in t:
            stored["t2d"] = np.concatenate([t["t2d"], np.zeros(rows, bool)])
        return raw, stored

    return change


def mask_in(row: int) -> Change:
    """The mask token in another row of the embedding."""

    def change(raw, t):
        embed = t["embed_tokens.weight"].copy()
        embed[row] = embed[V - 1]
        named = {"ptd_token_id": row}
        if "dflash_config" in raw:
            named = {"dflash_config": {**raw["dflash_config"], "mask_token_id": row}}
        return {**raw, **named}, {**t, "embed_tokens.weight": embed}

    return change


def speculators(kind: str, **keys: Any) -> Change:
    """The layout of speculators; keys: beside those of the layers."""
    outer = {"norm_before_residual": False} if kind in ("eagle3", "peagle") else {}

    def change(raw, t):
        flat = {**raw, **raw.get("dflash_config", {}), **raw.get("eagle_config", {})}
        moved = ("draft_vocab_size", "block_size", "mask_token_id", "markov_rank", "markov_head_type")
        moved = [key for key in moved if key in flat]
        drop = {*moved, "architectures", "dflash_config", "eagle_config", "num_target_layers"}
        drop |= {"norm_before_fc", "fc_norm", "target_layer_ids", "enable_confidence_head"}
        drop |= {"confidence_head_with_markov", "sample_from_anchor"}
        moved += [key for key in (*CONVOLUTIONS, *SELECTOR) if key in flat]
        layer = {"model_type": "llama", **{key: value for key, value in raw.items() if key not in drop}}
        spelled = {"speculators_model_type": kind, "transformer_layer_config": layer, **outer}
        return {**spelled, **{key: flat[key] for key in moved}, **keys}, t

    return both(change, first_layer("layers.0."))


def narrow(t: Tensors) -> Tensors:
    """Matrices of layers in fp8 with a scale for each row."""
    stored = {}
    for name, x in t.items():
        stored[name] = x
        if "_proj.weight" in name:
            scale = np.abs(x).max(axis=1, keepdims=True) / 448
            stored |= {name: (x / scale).astype(ml_dtypes.float8_e4m3fn), name + "_scale": scale.astype(np.float32)}
    return stored


def widened(t: Tensors) -> Tensors:
    """The values of `narrow`, in float32."""
    scales = {name: scale for name, scale in narrow(t).items() if name.endswith("_scale")}
    return {
        name: x.astype(np.float32) * scales[name + "_scale"] if name + "_scale" in scales else x
        for name, x in narrow(t).items()
        if name in t
    }


# Bases


@dataclasses.dataclass(frozen=True)
class Base:
    """A draft, and a drafter for it."""

    make: Callable[[], tuple[dict, Tensors]]
    drafter: Any


def head(**options) -> Callable[[], tuple[dict, Tensors]]:
    ids = {"eagle_aux_hidden_state_layer_ids": IDS, "use_aux_hidden_state": True}
    return lambda: sharp(*any_head(**{"eagle_config": ids, **options}))  # pyright: ignore[reportArgumentType]


def masked(raw: dict, t: Tensors) -> tuple[dict, Tensors]:
    """A head with masks, as vLLM reads it."""
    return {**raw, "ptd_token_id": V - 1}, {**t, "mask_hidden": eagle_files.HEADS["p-eagle"]["tensors"]["mask_hidden"]}


def block(**options) -> Callable[[], tuple[dict, Tensors]]:
    return lambda: sharp(*random_draft(**options))


def sharp(raw: dict, t: Tensors) -> tuple[dict, Tensors]:
    """Attention that matters: to few positions, with much weight."""
    factors = {
        ".q_proj.weight": 3.0,
        ".q_b_proj.weight": 6.0,
        ".kv_a_proj_with_mqa.weight": 6.0,
        ".kv_b_proj.weight": 2.0,
        ".q_norm.weight": 6.0,
        ".o_proj.weight": 3.0,
    }
    return raw, {
        name: next((np.float32(factor) * x for part, factor in factors.items() if part in name), x)
        for name, x in t.items()
    }


def model() -> tuple[dict, Tensors]:
    """A small Llama."""
    config = dataclasses.replace(TARGET, num_layers=1)
    t = {
        name: np.array(x) for name, x in language_model.FAMILIES[0].named_tensors(config, toy.random_params(config, 5))
    }
    return json.loads(json.dumps(language_model.family_by_config(config).describe(config))), t


EAGLE, BLOCK = Eagle(depth=3), Block()
NEXT = dict(layout="deepspec", markov="vanilla", confidence="hidden")
WINDOW = dict(layer_types=["sliding_attention"] * 2, sliding_window=5)
BASES = {
    "eagle1": Base(lambda: random_head("eagle1"), EAGLE),
    "eagle3": Base(head(), EAGLE),
    "eagle3 whole": Base(head(draft_vocab=None), EAGLE),
    "eagle3 default layers": Base(head(eagle_config=None), EAGLE),
    "eagle3 normed": Base(head(norm_before_fc=True, qkv_bias=True, qk_norm=True), EAGLE),
    "eagle3 fp8": Base(lambda: both(tensors(widened))(*head()()), EAGLE),
    "eagle3 yarn": Base(lambda: top(rope_scaling=YARN)(*head()()), EAGLE),
    "eagle3 latent": Base(head(latent={**LATENT, "qk_nope_head_dim": 2, "qk_rope_head_dim": 8}), EAGLE),
    "dflash": Base(block(), BLOCK),
    "dflash embedding": Base(block(embed=True), BLOCK),
    "dflash reduced": Base(block(draft_vocab=23, draft_vocab_size=23), BLOCK),
    "dflash fp8": Base(lambda: both(tensors(widened))(*block()()), BLOCK),
    "dflash window": Base(block(layer=WINDOW), BLOCK),
    "dflash window both ways": Base(block(layer=WINDOW, inner={"causal": False}), BLOCK),
    "jetspec": Base(block(inner={"causal": True}), BLOCK),
    "dflash2": Base(block(**DFLASH2), BLOCK),
    "dspark": Base(block(**NEXT), BLOCK),
    "dspark fill-in": Base(block(**NEXT, sample_from_anchor=False), BLOCK),
    "standalone": Base(model, Standalone(depth=3)),
    "p-eagle": Base(lambda: both(masked)(*head(num_layers=2, embed=True)()), EAGLE),
    "pard": Base(lambda: top(pard_token=V - 1)(*model()), Standalone(depth=3)),
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}


@functools.cache
def target_params():
    """Weights with sharp output, and layers that change what enters them."""
    stored = toy.random_params(TARGET)
    layers = tuple(dataclasses.replace(layer, o=3 * layer.o, down=3 * layer.down) for layer in stored.layers)
    return dataclasses.replace(stored, layers=layers, lm_head=4 * stored.lm_head)


def write(directory: Path, base: str, change: Change | None = None) -> Path:
    """Writes a spelling of a base."""
    raw, t = BASES[base].make()
    raw, t = (raw, t) if change is None else change(raw, t)
    directory.mkdir(exist_ok=True, parents=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file({name: np.ascontiguousarray(x) for name, x in t.items()}, directory / "model.safetensors")
    return directory


def read(directory: Path) -> Checkpoint:
    """The draft in a directory. How rows were ordered in the file has no part in a forward."""
    loaded = drafts.plan(Source(directory), TARGET, "float32").read()
    config = dataclasses.replace(loaded.config, neox=True) if hasattr(loaded.config, "neox") else loaded.config
    return dataclasses.replace(loaded, config=config)


def proposals(loaded: Checkpoint, base: str, drafter: Any = None, rounds: int = 0) -> list[np.ndarray]:
    """The drafts for each prompt after some rounds, then the arrays of the drafter's cache and the lengths.

    drafter: None: the base's.
    """
    both = SimpleNamespace(target=TARGET, draft=loaded.config, params=Params(target_params(), loaded.params))
    bound, s = planted.prefilled(both, PROMPTS, drafter or BASES[base].drafter, 24)
    method = Method(TARGET, bound, accept.greedy)
    if rounds:
        s = decode(both.params, s, jnp.int32(rounds), method=method)
    tree, _ = _draft(both.params, s, method=method)
    rows = jax.device_get((s.draft.cache, s.length))
    return [np.array(tree.tokens), *map(np.array, jax.tree.leaves(rows))]


_draft = jax.jit(draft_round, static_argnames=("method", "branch"))
