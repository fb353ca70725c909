"""Gemma 4: output and logits equal `transformers`, in contexts of many windows; what its cache takes and never reads."""

import dataclasses
import functools
import json
import sys

import hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from safetensors.numpy import load_file, save_file

import jspec
from jspec import accept, checkpoint, decode, memory, stopping, tree
from jspec.checkpoint_files import CheckpointError
from jspec.drafters import Ngram, Plain, Standalone
from jspec.models.gemma4 import Attention, Experts, Gemma4
from jspec.types import Params

torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[parity]"')
transformers = pytest.importorskip("transformers", reason='needs transformers: pip install -e ".[parity]"')

NEW_TOKENS = 24
LENGTHS = (1, 9, 30, 70)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two threads only slow such small models down."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A function that makes of a kind and a window a target with a noisy copy as its draft, and the target's oracle."""

    @functools.cache
    def make(kind, window):
        directory = tmp_path_factory.mktemp(kind)
        oracle, noisy = (hf.build(f"gemma4-{kind}", sliding_window=window) for _ in range(2))
        with torch.no_grad():
            for weight in noisy.parameters():
                noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
                weight.add_(0.1 * weight.std(correction=0) * noise)
        target, draft = (
            checkpoint.load(hf.save(model, directory / name), dtype="float32")
            for name, model in (("target", oracle), ("draft", noisy))
        )
        return jspec.Model(kind, target.config, Params(target.params, draft.params), None, (), draft.config), oracle

    return make


@pytest.fixture(scope="module")
def expected(pair):
    """A function that makes prompts of several lengths and what the oracle continues them with."""

    @functools.cache
    def make(kind, window):
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 97, n).tolist() for n in LENGTHS]
        return prompts, [hf.greedy(pair(kind, window)[1], prompt, NEW_TOKENS) for prompt in prompts]

    return make


def with_head(model, expected):
    """The same target with an EAGLE head that has seen the outputs."""
    texts = np.zeros((len(LENGTHS), max(LENGTHS) + NEW_TOKENS), np.int32)
    for row, prompt, new in zip(texts, *expected, strict=True):
        row[: len(prompt) + len(new)] = prompt + new
    shape = dict(vocab_size=97, draft_vocab_size=80, target_hidden_size=32, capture=(0, 1, 2))
    head = dataclasses.replace(toy.HEAD, **shape)
    return dataclasses.replace(model, params=toy.fit_head(model.target, head, model.params.target, texts), draft=head)


CHAIN, TREE = Standalone(depth=4), Standalone(depth=4, width=3, num_nodes=24)
"""The tree has more nodes than the shortest window has tokens; it is 4 deep."""
OFTEN = [
    ("dense", 8, Ngram(depth=12), 1, 20),
    ("dense", 16, TREE, 16, None),
    ("shared", 8, TREE, 1, 7),
    ("shared", 16, None, 16, 20),
    ("experts", 8, CHAIN, 16, 20),
]
"""Kind, window, drafter, page size and columns of a chunk. A chain of 12 and a chunk of 20 are longer than a window."""
RARELY = [
    (kind, window, drafter, page_size, chunk)
    for i, kind in enumerate(hf.GEMMA4_KINDS)
    for j, window in enumerate((8, 16, 64))
    for k, drafter in enumerate((None, Ngram(depth=12), CHAIN, TREE, jspec.Eagle(depth=3), jspec.Eagle(4, width=3)))
    for page_size, chunk in (((1, 16, 5)[(i + j + k) % 3], (None, 20, 7)[(i + k) % 3]),)
]


def matrix():
    for i, (kind, window, drafter, page_size, chunk) in enumerate([*OFTEN, *RARELY]):
        marks = () if i < len(OFTEN) else pytest.mark.slow
        yield pytest.param(kind, window, drafter, page_size, chunk, marks=marks)


@pytest.mark.parametrize(("kind", "window", "drafter", "page_size", "chunk"), list(matrix()))
def test_greedy_output_equals_transformers(pair, expected, kind, window, drafter, page_size, chunk, monkeypatch):
    model, oracle = pair(kind, window)
    prompts, wanted = expected(kind, window)
    if isinstance(drafter, jspec.Eagle):
        model = with_head(model, (prompts, wanted))
    if chunk is not None:
        monkeypatch.setattr(sys.modules["jspec.generate"], "prefill_chunk", lambda batch: chunk)
    out = jspec.generate(model, prompts, drafter=drafter, max_new_tokens=NEW_TOKENS, page_size=page_size)
    for prompt, ours, theirs in zip(prompts, out.tokens, wanted, strict=True):
        assert ours == theirs, hf.margin(oracle, prompt, ours, theirs)
    if isinstance(drafter, Standalone | jspec.Eagle):
        assert out.stats.accept_length > (1.5 if isinstance(drafter, Standalone) else 1.05)
