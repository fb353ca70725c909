"""MTP heads in checkpoints of each family: drafts equal `transformers`, output equals plain decoding."""

import dataclasses
import functools

import hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from parity import NEW_TOKENS, Pair, check_output, torch, transformers

import jspec
from jspec.checkpoints.tensors import Tensors
from jspec.core import tree
from jspec.drafters import Mtp
from jspec.models import MtpHeads
from jspec.models.layers import ForwardBatch

LENGTHS = (1, 9, 30, 50)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function that writes a checkpoint of a family with a number of heads; returns its directory and the oracle."""

    @functools.cache
    def make(family, heads):
        oracle = hf.build(family)
        directory = hf.save(oracle, tmp_path_factory.mktemp("family"))
        hf.add_mtp(directory, heads)
        return directory, oracle

    return make


@pytest.fixture(scope="module")
def pairs(checkpoints):
    """A function that loads such a checkpoint and fits the heads to the oracle's continuations of some prompts."""

    @functools.cache
    def make(family, heads):
        directory, oracle = checkpoints(family, heads)
        pair = Pair(jspec.load(directory, dtype="float32"), oracle, LENGTHS)
        ahead = np.arange(pair.rows.shape[1])[None] - np.array(LENGTHS)[:, None]
        judged = (ahead >= -1) & (ahead < NEW_TOKENS)
        params = toy.fit_heads(pair.model.target, pair.model.draft, pair.model.params, pair.rows, judged)
        return dataclasses.replace(pair, model=dataclasses.replace(pair.model, params=params))

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


@pytest.mark.parametrize(("family", "heads"), [("deepseek-v3", 2), pytest.param("qwen3_5", 1, marks=pytest.mark.slow)])
def test_heads_are_not_read_if_another_draft_is_loaded(checkpoints, family, heads, monkeypatch):
    directory, _ = checkpoints(family, heads)
    asked, get = [], Tensors.get
    monkeypatch.setattr(Tensors, "get", lambda self, name: (asked.append(name), get(self, name))[1])
    model = jspec.load(directory, draft=directory)
    assert model.draft == model.target and not model.params.target.mtp and not model.params.draft.mtp
    without = len(set(asked))
    assert jspec.load(directory).draft.count == heads
    assert len(set(asked)) > without


CHAINS, TREE = [Mtp(depth=depth, heads=1) for depth in (1, 2, 3)], Mtp(depth=4, width=3, num_nodes=14, heads=1)
OFTEN = [("deepseek-v3", 2, "auto", 16, None), ("qwen3_5", 1, TREE, 1, 20)]
"""Family, heads, drafter, page size and columns of a chunk."""
FAMILIES = [("deepseek-v3", 1), ("deepseek-v3", 2), ("deepseek-v32", 1), ("qwen3_next", 1), ("qwen3_5", 1)]
RARELY = [
    (*family, drafter, (1, 16, 5)[(i + k) % 3], (None, 20, 7)[(2 * i + k) % 3])
    for i, family in enumerate(FAMILIES)
    for k, drafter in enumerate(("auto", (TREE, CHAINS[i % 3])[i % 2], *([Mtp(depth=2)] if family[1] == 2 else [])))
    if family[1] == 2 or (i + k) % 2
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "heads", "drafter", "page_size", "chunk"), [*OFTEN, *RARELY])
def test_greedy_output_equals_transformers(pairs, family, heads, drafter, page_size, chunk, monkeypatch):
    out = check_output(pairs(family, heads), drafter, page_size, chunk, monkeypatch)
    assert out.stats.accept_length > 1.05


# What the heads propose


@pytest.fixture
def theirs(checkpoints, monkeypatch):
    """A function that loads DeepSeek-V3 with a number of heads in `transformers`."""
    from transformers.modeling_layers import MtpModel

    def load(heads):
        directory, oracle = checkpoints("deepseek-v3", heads)
        # This pattern, which selects the tensors of heads, only covers published checkpoints.
        pattern = [rf"model\.layers\.{oracle.config.num_hidden_layers + index}\..*" for index in range(heads)]
        monkeypatch.setattr(transformers.DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", pattern)
        transformers.utils.logging.disable_progress_bar()
        target = transformers.DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        return target, MtpModel.from_pretrained(target).eval()

    return load


@pytest.mark.slow
@pytest.mark.parametrize("heads", (pytest.param(1, marks=pytest.mark.slow), 2))
def test_logits_of_each_head_equal_transformers(checkpoints, theirs, heads):
    """For the heads of DeepSeek-V3, each over a whole text."""
    model = jspec.load(checkpoints("deepseek-v3", heads)[0], dtype="float32")
    target, oracle = theirs(heads)
    text = np.random.default_rng(3).integers(0, 97, (1, 41))
    ids = torch.tensor(text)
    with torch.no_grad():
        hidden = target(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
        position = torch.arange(1, 41)[None]
        cache = transformers.cache_utils.MtpCache(config=target.config.get_mtp_config())
        drafts, logits, _ = oracle(ids[:, 1:], hidden, torch.ones_like(ids[:, 1:]), position, cache)
    own = model.target.init_cache(model.params.target, 1, 4, 4)
    read = functools.partial(model.target.forward, capture_layers=(model.target.num_layers + 1,))
    feature = jax.jit(read)(model.params.target, tree.chain(jnp.asarray(text[:, :-1], jnp.int32)), own, None).hidden
    np.testing.assert_allclose(feature, hidden.numpy(), atol=1e-4, rtol=0)
    known, row = np.concatenate([text, drafts.numpy()], axis=1).astype(np.int32), jnp.arange(40, dtype=jnp.int32)[None]
    for index in range(heads):
        head = model.draft.head(index, model.target)
        cache = head.init_cache(model.params.draft, 1, 4, 4)
        tokens = jnp.asarray(known[:, 1 + index : 41 + index])
        batch = ForwardBatch(tokens, row, cache, None)
        out = jax.jit(head.apply, static_argnums=1)(model.params, model.target, batch, feature)
        np.testing.assert_allclose(out.logits[:, -1], logits[:, index].numpy(), atol=1e-4, rtol=0)
        feature = out.feature
