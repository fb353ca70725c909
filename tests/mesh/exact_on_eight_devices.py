"""Exact models over devices: each text has the bits of plain decoding, alone, over the same devices.

test_mesh.py runs these tests in a process with eight CPU devices.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import product
import pytest
import tiny_targets as tiny

import jspec
from jspec.core import sharding, tree
from pallas_kernels import parts

POINTS = [
    product.make_point(*names)
    for names in (
        ("llama", "suffix", "tensor 4", "generate"),
        ("qwen3", "adaptive", "data 2 x tensor 2", "engine"),
        ("experts", "block", "tensor 4", "generate_ids"),
        ("latents", "ngram", "tensor 2", "generate"),
        ("windows", "suffix", "tensor 4", "generate"),
        ("windows and experts", "frozen_kv_mtp", "tensor 2", "generate"),
        ("sinks", "ngram", "tensor 4", "generate"),
    )
]
"""Each family with an exact forward; biases, a vocabulary that is not divided, and copies of heads among them."""
FAST = POINTS[0]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return product.Checkpoints(tmp_path_factory.mktemp("models"))


def load(checkpoints, point):
    draft = checkpoints.draft(point.family, point.drafter) if point.drafter in product.OF_FILES else None
    options = {"dtype": "bfloat16", "exact": True, "draft_tensor": point.draft_tensor}
    return jspec.load(checkpoints.target(point.family), draft=draft, **product.PLACEMENTS[point.placement], **options)


@pytest.mark.slow(unless=str(FAST))
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_a_text_has_the_bits_of_plain_decoding(point, checkpoints):
    """In bfloat16, with drafts, in batches and beside other slots: tokens, and log-probabilities to the bit."""
    kind = "mixed" if point.chosen == "rejection" else point.chosen
    point, model = dataclasses.replace(point, chosen=kind), load(checkpoints, point)
    assert model.target.exact
    drafted = product.ENTRIES[point.entry](model, point)
    assert sum(drafted["rounds"]) < sum(map(len, drafted["tokens"])) - len(drafted["tokens"]), "drafts are accepted"
    samplings = product.CHOSEN[kind]["sampling"] or [None] * 3
    for i, (prompt, sampling) in enumerate(zip(tiny.PROMPTS, samplings, strict=True)):
        options = {"seed": [product.SEEDS[i]], "sampling": sampling, "logprobs": True, "page_size": 8}
        alone = jspec.generate(model, [prompt], drafter=None, max_new_tokens=product.LIMITS[i], **options)
        assert drafted["tokens"][i] == alone.tokens[0]
        assert list(drafted["logprobs"][i]) == list(alone[0].logprobs)


@pytest.mark.parametrize("exact", (False, True))
def test_no_collective_chooses_the_order_of_a_sum(exact, checkpoints):
    """But that of a lookup, where all devices but one have zeros."""
    point = dataclasses.replace(FAST, drafter="plain")
    model = load(checkpoints, point)
    target = dataclasses.replace(model.target, exact=exact)
    shapes = jax.eval_shape(lambda: target.init_cache(model.placement.local(model.params.target), 1, 16, 16))

    def forward(params):
        cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return target.forward(params, tree.chain(jnp.zeros((1, 3), jnp.int32)), cache, None).logits

    program = jax.make_jaxpr(lambda params: sharding.over(model.placement, forward, params))(model.params.target)
    text = str(program)
    sums, gathers = text.count(" psum["), text.count(" all_gather[")
    branches = 2 * target.num_layers
    assert (sums, gathers) == ((1, 1 + branches) if exact else (1 + branches, 1))


@pytest.mark.parametrize("devices", (4, 8))
def test_large_terms_are_added_in_the_same_order(devices, monkeypatch):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), (sharding.TENSOR,))
    terms = jnp.asarray(np.random.default_rng(0).normal(size=(devices, 2, 3, 32)), jnp.float32)

    def add(x):
        return parts.whole(sharding.in_order(x[0], devices), 3, x.dtype)

    def run():
        spec = jax.sharding.PartitionSpec(sharding.TENSOR)
        over = jax.shard_map(add, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec(), check_vma=False)
        return str(jax.make_jaxpr(over)(terms)).count(" all_to_all["), np.asarray(over(terms))

    few, small = run()
    monkeypatch.setattr(sharding, "WORTH_A_STEP", 0)
    more, large = run()
    assert (few, more) == (0, 1)
    np.testing.assert_array_equal(small, large)
    np.testing.assert_array_equal(small, parts.add_parts(terms, terms.dtype))


def test_data_alone_is_exact(checkpoints):
    """Each group has all weights."""
    two = jspec.load(checkpoints.target("llama"), data=2, dtype="bfloat16", exact=True)
    one = jspec.load(checkpoints.target("llama"), dtype="bfloat16", exact=True)
    outs = [jspec.generate(model, tiny.PROMPTS, max_new_tokens=6, logprobs=True) for model in (two, one)]
    assert outs[0].tokens == outs[1].tokens
    for text, expected in zip(*outs, strict=True):
        np.testing.assert_array_equal(text.logprobs, expected.logprobs)
