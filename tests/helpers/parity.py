"""What tests against `transformers` share: pairs of a model and its oracle, and how their outputs are compared.

A module that imports this one is skipped where torch or transformers is not installed.
"""

import dataclasses
import functools
import json
import re
from typing import Any

import hf
import jax
import numpy as np
import optional
import pytest
import toy
from safetensors.numpy import load_file, save_file

import jspec
from jspec.checkpoints import language_model
from jspec.checkpoints.files import CheckpointError
from jspec.core import tree
from jspec.core.types import Params
from jspec.generation import run

torch, transformers = optional.lazy("torch", "transformers")

NEW_TOKENS = 24
LENGTHS = (1, 9, 30, 75)
"""Longer than windows, the original context of scaled positions (64) and a block of the delta rule."""
FEW = (1, 5, 12, 16)
"""For families without any of these, whose drafts are noisier."""
NOISE = {"gemma": 0.1, "gpt_oss": 0.1, "deepseek": 0.03, "llama": 0.25, "qwen3": 0.25, "qwen3_": 0.01}
NOISE |= {"qwen3_moe": 0.05} | dict.fromkeys(hf.VARIANTS, 0.1)
"""The beginning of a family's name -> the noise of its draft, in standard deviations of the target's weights."""
LOGITS: dict[str, dict[str, Any]] = {
    "": dict(atol=5e-5),
    **dict.fromkeys([*hf.VARIANTS, "gemma"], dict(atol=1e-4)),
    "gpt_oss": dict(atol=5e-5, states=True),
    "qwen3_": dict(atol=1e-3, count=40),
    "qwen3_moe": dict(atol=5e-5),
}
"""How logits are compared. The order of summation depends on the processor, and differs in `transformers`; of Gemma it
matters more. Of recurrent layers both are 2e-4 off, at logits of 8, from float64: gated norms amplify small values."""
SAVED = {"": 1e-6, **dict.fromkeys([*hf.VARIANTS, "gemma3"], 1e-5), "qwen3_": 1e-3, "qwen3_moe": 1e-6}
"""How much the logits of a checkpoint of ours may differ in `transformers`."""
RANDOM_HEAD = "random head"


def by_family(table: dict[str, Any], family: str) -> Any:
    """The value of the longest beginning of a family's name that a table has."""
    return table[max((name for name in table if family.startswith(name)), key=len)]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target with a noisy copy of it as its draft, and the target's oracle."""

    model: jspec.Model
    oracle: Any
    lengths: tuple[int, ...] = LENGTHS

    @functools.cached_property
    def texts(self) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts of several lengths and the oracle's continuations."""
        return hf.continuations(self.oracle, self.lengths, NEW_TOKENS)

    @property
    def rows(self) -> np.ndarray:
        """The prompts with their continuations."""
        return toy.padded([prompt + new for prompt, new in zip(*self.texts, strict=True)])[0]

    @functools.cached_property
    def with_head(self) -> jspec.Model:
        """The same target with an EAGLE head that was fitted to the continuations."""
        target = self.model.target
        layers = (0, 1, target.num_layers)
        head = dataclasses.replace(
            toy.HEAD, vocab_size=97, draft_vocab_size=80, target_hidden_size=32, capture_layers=layers
        )
        params = toy.fit_head(target, head, self.model.params.target, self.rows)
        return dataclasses.replace(self.model, params=params, draft=head)

    def with_draft(self, kind: str) -> jspec.Model:
        """The same target with a draft that is nearly never right: a random EAGLE-3 head, or a small Llama."""
        target = self.model.params.target
        if kind == RANDOM_HEAD:
            shape = dict(vocab_size=97, draft_vocab_size=97, target_hidden_size=32, capture_layers=(0, 1, 3))
            config: Any = dataclasses.replace(toy.HEAD, **shape)
            params = toy.random_leaves(dataclasses.replace(config.param_shapes(np.float32), ids=None), seed=3)
        else:
            config = dataclasses.replace(toy.DRAFT, vocab_size=97)
            params = toy.random_params(config, seed=1)
        return dataclasses.replace(self.model, params=Params(target, params), draft=config)


def pairs(directories):
    """A function from a family of `hf.build` and its changes to the pair, which is made once."""

    @functools.cache
    def make(family: str, **changes) -> Pair:
        changes = {"mlp_only_layers": (0,), **changes} if family == "qwen3_moe" else changes
        build = functools.partial(hf.build, family, **changes)
        model, oracle = hf.noisy_pair(build, by_family(NOISE, family), directories.mktemp("pair"))
        return Pair(model, oracle, FEW if family in ("llama", "qwen3") else LENGTHS)

    return make


def check_output(pair, drafter, page_size, chunk, monkeypatch, model=None):
    """Greedy tokens are the oracle's. chunk: columns in which prompts are read; model: None: that of the pair."""
    if chunk is not None:
        monkeypatch.setattr(run, "prefill_chunk", lambda batch: chunk)
    model = model or (pair.with_head if isinstance(drafter, jspec.Eagle) else pair.model)
    out = jspec.generate(model, pair.texts[0], drafter=drafter, max_new_tokens=NEW_TOKENS, page_size=page_size)
    for prompt, ours, theirs in zip(pair.texts[0], out.tokens, pair.texts[1], strict=True):
        assert ours == theirs, hf.margin(pair.oracle, prompt, ours, theirs)
    return out


@functools.partial(jax.jit, static_argnames=("config", "capture_layers"))
def read(config, params, ids, capture_layers=()):
    cache = config.init_cache(params, 2, 16, 16)
    return config.forward(params, tree.chain(ids), cache, None, capture_layers=capture_layers)


def check_logits(oracle, directory, family):
    """The checkpoint in a directory has the oracle's logits, at many positions: scaled frequencies differ beyond the
    original context of 64. With `states` in `LOGITS`, also the inputs of all layers, which drafts read."""
    options = {"count": 150, "states": False, **by_family(LOGITS, family)}
    loaded = language_model.load(directory, dtype="float32")
    ids = np.random.default_rng(1).integers(0, loaded.config.vocab_size, (2, options["count"])).astype(np.int32)
    with torch.no_grad():
        asked = {"output_hidden_states": True} if options["states"] else {}
        expected = oracle(torch.tensor(ids.astype(np.int64)), **asked)
    close = functools.partial(np.testing.assert_allclose, atol=options["atol"], rtol=0)
    every = tuple(range(loaded.config.num_layers + 2)) if options["states"] else ()
    out = read(loaded.config, loaded.params, ids, every)
    close(out.logits, expected.logits.numpy())
    if every:
        states = np.split(np.asarray(out.hidden), len(every), axis=-1)
        del states[-2]  # the last entry of the oracle's is after the norm
        for ours, theirs in zip(states, expected.hidden_states, strict=True):
            close(ours, theirs.numpy())
    return loaded


def save(oracle, directory, *, sharded=False, old=False):
    """Writes a checkpoint of `transformers`. old: with a config.json in the older generation's format."""
    kind = oracle.config.model_type
    hf.save(oracle, directory, sharded=sharded, old_config=old and kind not in OLDER)
    if old and kind in OLDER:
        edit(directory, OLDER[kind])
    return directory


def _older_gemma3(raw):
    """Keys beside each other, and every layer but the third is sliding."""
    rope = raw.pop("rope_parameters")
    raw["rope_theta"], raw["rope_local_base_freq"] = 1e6, 1e4
    raw["rope_scaling"] = {key: value for key, value in rope["full_attention"].items() if key != "rope_theta"}
    raw["torch_dtype"], raw["sliding_window_pattern"] = raw.pop("dtype"), 3
    del raw["layer_types"]


def _older_gemma4(raw):
    """Separate keys for full layers."""
    (full, *_) = raw.pop("per_layer_config").values()
    raw["global_head_dim"], raw["num_global_key_value_heads"] = full["head_dim"], full.get("num_key_value_heads")
    raw["torch_dtype"] = raw.pop("dtype")
    if raw["moe_intermediate_size"] is not None:
        raw["expert_intermediate_size"] = raw.pop("moe_intermediate_size")


def _older_qwen3_next(raw):
    rope = raw.pop("rope_parameters")
    raw |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"]}
    raw |= {"rope_scaling": None, "full_attention_interval": 2, "torch_dtype": raw.pop("dtype")}
    del raw["layer_types"]


OLDER = {"gemma3_text": _older_gemma3, "gemma4_text": _older_gemma4, "qwen3_next": _older_qwen3_next}
"""model_type -> how config.json becomes one of the older generation; others by `hf.save`."""


def check_saved(directory, pair, family, config=None, params=None, eos=(1, 96)):
    """A checkpoint of ours loads in `transformers` and here. config, params: None: those of the pair's target."""
    model, oracle = pair.model, pair.oracle
    config, params = config or model.target, params or model.params.target
    language_model.save(directory, model.target, params, dtype="float32", eos=eos, max_shard_bytes=30_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    raw = json.loads((directory / "config.json").read_text())
    if "swiglu_limit" in raw:
        hf.set_gate(theirs, raw)
    assert type(theirs) is type(oracle)
    assert theirs.generation_config.eos_token_id == list(eos)
    ids = torch.tensor(np.random.default_rng(1).integers(0, 97, (1, 40)))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, oracle(ids).logits, atol=by_family(SAVED, family), rtol=0)
    ours = language_model.load(directory, dtype="float32")
    assert (ours.config, ours.eos) == (config, eos)
    toy.assert_same(ours.params, params)


def edit(directory, change):
    """Changes config.json by a function, which changes the dict or returns another."""
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    changed = change(raw)
    path.write_text(json.dumps(raw if changed is None else changed))


def check_unused(directory, name):
    """Another tensor in the checkpoint of a directory is an error."""
    path = directory / "model.safetensors"
    save_file({**load_file(path), name: np.zeros(3, np.float32)}, path)
    message = f"1 unused tensor(s) in the checkpoint; this model does not read them: {name}"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        language_model.load(directory)


def check_refused(directory, raw, message):
    """A config.json is refused before any weight is read: there are none. A value "absent" is left out."""
    (directory / "config.json").write_text(json.dumps({key: x for key, x in raw.items() if x != "absent"}))
    save_file({}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        language_model.load(directory)
