"""MTP heads as checkpoints of each family hold them: drafts of `transformers`, and output of plain decoding."""

import dataclasses
import functools
import sys

import hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jspec
from jspec import tree
from jspec.drafters import Mtp
from jspec.models import MtpHeads

torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[parity]"')
transformers = pytest.importorskip("transformers", reason='needs transformers: pip install -e ".[parity]"')

NEW_TOKENS = 24
LENGTHS = (1, 9, 30, 50)
LAYER_TYPES = {
    "qwen3_next": ["linear_attention", "full_attention"] * 2,
    "qwen3_5": ["linear_attention", "full_attention"],
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two threads only slow such small models down."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function that writes a checkpoint of a family with so many heads: its directory, and the target's oracle."""

    @functools.cache
    def make(family, heads):
        types = LAYER_TYPES.get(family)
        oracle = hf.build(family, **({"layer_types": types, "num_hidden_layers": len(types)} if types else {}))
        directory = hf.save(oracle, tmp_path_factory.mktemp("family"))
        hf.add_mtp(directory, heads)
        return directory, oracle

    return make


@pytest.fixture(scope="module")
def models(checkpoints):
    """A function that loads such a checkpoint, and fits the heads to what its oracle continues some prompts with.

    Returns the model, its oracle, the prompts and the oracle's new tokens.
    """

    @functools.cache
    def make(family, heads):
        directory, oracle = checkpoints(family, heads)
        model = jspec.load(directory, dtype="float32")
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 97, n).tolist() for n in LENGTHS]
        wanted = [hf.greedy(oracle, prompt, NEW_TOKENS) for prompt in prompts]
        texts = [
            (prompt + new + rng.integers(0, 97, 50).tolist())[: max(LENGTHS) + NEW_TOKENS]
            for prompt, new in zip(prompts, wanted, strict=True)
        ]
        params = toy.fit_heads(model.target, model.draft, model.params, np.array(texts, np.int32))
        return dataclasses.replace(model, params=params), oracle, prompts, wanted

    return make


@pytest.mark.parametrize(
    ("family", "heads"),
    [("deepseek-v3", 2), *(pytest.param(f, 1, marks=pytest.mark.slow) for f in ("deepseek-v32", "qwen3_5"))],
)
def test_heads_of_the_checkpoint_are_the_models_draft(checkpoints, family, heads):
    directory, _ = checkpoints(family, heads)
    model = jspec.load(directory)
    assert isinstance(model.draft, MtpHeads)
    assert (model.draft.count, len(model.params.draft), model.target.mtp_layers) == (heads, heads, 0)
    assert model.params.target.mtp == ()
    assert f"{heads} MTP head{'s' * (heads > 1)})" in repr(model)
    assert all(own.embed is None and own.lm_head is None for own in model.params.draft), "they are the target's"


CHAINS, TREE = [Mtp(depth=depth, heads=1) for depth in (1, 2, 3)], Mtp(depth=4, width=3, num_nodes=14, heads=1)
OFTEN = [("deepseek-v3", 2, "auto", 16, None), ("qwen3_5", 1, TREE, 1, 20)]
"""Family, heads, drafter, page size and columns of a chunk."""
FAMILIES = [("deepseek-v3", 1), ("deepseek-v3", 2), ("deepseek-v32", 1), ("qwen3_next", 1), ("qwen3_5", 1)]
RARELY = [
    (*family, drafter, (1, 16, 5)[(i + k) % 3], (None, 20, 7)[(2 * i + k) % 3])
    for i, family in enumerate(FAMILIES)
    for k, drafter in enumerate(("auto", *CHAINS, TREE, *([Mtp(depth=2)] if family[1] == 2 else [])))
]


def matrix():
    for i, point in enumerate([*OFTEN, *RARELY]):
        yield pytest.param(*point, marks=() if i < len(OFTEN) else pytest.mark.slow)


@pytest.mark.parametrize(("family", "heads", "drafter", "page_size", "chunk"), list(matrix()))
def test_greedy_output_equals_transformers(models, family, heads, drafter, page_size, chunk, monkeypatch):
    model, oracle, prompts, wanted = models(family, heads)
    if chunk is not None:
        monkeypatch.setattr(sys.modules["jspec.generate"], "prefill_chunk", lambda batch: chunk)
    out = jspec.generate(model, prompts, drafter=drafter, max_new_tokens=NEW_TOKENS, page_size=page_size)
    for prompt, ours, theirs in zip(prompts, out.tokens, wanted, strict=True):
        assert ours == theirs, hf.margin(oracle, prompt, ours, theirs)
    assert out.stats.accept_length > 1.2
