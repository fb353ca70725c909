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
import pytest
import toy
from safetensors.numpy import load_file, save_file

import jspec
from jspec.checkpoints import language_model
from jspec.checkpoints.files import CheckpointError
from jspec.core import tree
from jspec.generation import run

torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[parity]"')
transformers = pytest.importorskip("transformers", reason='needs transformers: pip install -e ".[parity]"')

NEW_TOKENS = 24
LENGTHS = (1, 9, 30, 75)
"""Longer than windows, the original context of scaled positions (64) and a block of the delta rule."""
FEW = (1, 5, 12, 16)
"""For families without any of these, whose drafts are noisier."""
NOISE = {"gemma": 0.1, "gpt_oss": 0.1, "deepseek": 0.03, "qwen3_": 0.01, "llama": 0.25, "qwen3": 0.25}
NOISE |= dict.fromkeys(hf.VARIANTS, 0.1)
"""The beginning of a family's name -> the noise of its draft, in standard deviations of the target's weights."""


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

    @functools.cached_property
    def with_head(self) -> jspec.Model:
        """The same target with an EAGLE head that was fitted to the continuations."""
        texts = np.zeros((len(self.lengths), max(self.lengths) + NEW_TOKENS), np.int32)
        for row, prompt, new in zip(texts, *self.texts, strict=True):
            row[: len(prompt) + len(new)] = prompt + new
        target = self.model.target
        layers = (0, 1, target.num_layers)
        head = dataclasses.replace(
            toy.HEAD, vocab_size=97, draft_vocab_size=80, target_hidden_size=32, capture_layers=layers
        )
        params = toy.fit_head(target, head, self.model.params.target, texts)
        return dataclasses.replace(self.model, params=params, draft=head)


def pairs(directories):
    """A function from a family of `hf.build` and its changes to the pair, which is made once."""

    @functools.cache
    def make(family: str, **changes) -> Pair:
        noise = next(noise for name, noise in NOISE.items() if family.startswith(name))
        model, oracle = hf.noisy_pair(lambda: hf.build(family, **changes), noise, directories.mktemp("pair"))
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


def check_logits(oracle, directory, atol=5e-5, count=150):
    """The checkpoint in a directory has the oracle's logits.

    count: positions; scaled frequencies differ beyond the original context of 64.
    """
    loaded = language_model.load(directory, dtype="float32")
    ids = np.random.default_rng(1).integers(0, loaded.config.vocab_size, (2, count)).astype(np.int32)
    with torch.no_grad():
        expected = oracle(torch.tensor(ids.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(read(loaded.config, loaded.params, ids).logits, expected, atol=atol, rtol=0)
    return loaded


def check_saved(directory, pair, config=None, params=None, eos=(1, 96), atol=1e-6):
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
        torch.testing.assert_close(theirs(ids).logits, oracle(ids).logits, atol=atol, rtol=0)
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
