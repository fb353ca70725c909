"""The EAGLE drafter against its head run by hand: what it remembers and does not compute."""

import dataclasses
import functools

import deepseek
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from batches import read_by
from planted import weights_of

import jspec
from jspec.core import accept, tree
from jspec.core.method import Method
from jspec.core.round import step
from jspec.core.types import Params
from jspec.drafters import Eagle, Standalone, readings
from jspec.loading.model import Model
from pallas_kernels import norm

ROUNDS = (0, 1, 4)
HEAD = dataclasses.replace(toy.LATENT_HEAD, num_layers=1)


@functools.cache
def forwards(config):
    """The target's and the head's forward over whole sequences, jitted."""
    target = jax.jit(functools.partial(toy.TARGET.forward, capture_layers=config.capture_layers))
    return target, jax.jit(config.apply, static_argnums=1)


def read_by_hand(drafter, tokens):
    """The target's features of a sequence, and the head's cached keys and values of all its pairs."""
    weights, config = weights_of(drafter), drafter.model
    run, head = forwards(config)
    row = np.array([tokens + [0] * (toy.CAPACITY + 8 - len(tokens))], np.int32)
    out = run(weights.target, tree.chain(jax.device_put(row)), toy.TARGET.init_cache(weights.target, 1, 4, 4), None)
    feature = jax.jit(config.fuse)(weights.draft, out.hidden)
    following = np.roll(row, -1, axis=1)
    positions = np.arange(row.shape[1], dtype=np.int32)[None]
    cache = config.init_cache(weights.draft, 1, 4, 4)
    return np.array(feature), head(weights, toy.TARGET, read_by(following, positions, cache), feature).rows


def drafted(drafter, until):
    weights = weights_of(drafter)
    s = toy.run(drafter, weights, toy.start(drafter, weights), until)
    return s, jax.jit(drafter.draft)(weights, s)[0]


@pytest.mark.slow
@pytest.mark.parametrize("config", (toy.HEAD, toy.MASKED_HEAD), ids=("head", "masks"))
@pytest.mark.parametrize("until", ROUNDS)
def test_the_heads_cache_is_what_one_forward_over_all_pairs_makes(until, config):
    drafter = Eagle(depth=3).bind(toy.TARGET, config)
    s, _ = drafted(drafter, until)
    pool, table = np.array(s.draft.cache.pool), np.array(s.draft.cache.page_table)
    for b, tokens in enumerate(toy.generated(s)):
        _, rows = read_by_hand(drafter, tokens)
        for layer, pair in enumerate(rows):
            for i, expected in enumerate(pair):
                committed = pool[layer, i, table[b]].reshape(-1, *pool.shape[4:])
                pairs = len(tokens) - 1
                np.testing.assert_allclose(committed[:pairs], expected[0, :pairs], rtol=1e-4, atol=1e-5)
                assert not committed[pairs:].any(), "a row without a pair was written"


@pytest.mark.slow
def test_without_exact_attention_a_node_proposes_something_else():
    shape = dict(depth=4, width=4, num_nodes=40)
    trees = [drafted(Eagle(**shape, exact=exact).bind(toy.TARGET, toy.HEAD), 4)[1] for exact in (True, False)]
    assert not np.array_equal(trees[0].tokens, trees[1].tokens)


@pytest.mark.parametrize("name", ("eagle", "eagle_tree", "eagle_masks"))
def test_only_the_selected_row_reaches_the_lm_head(name):
    drafter = toy.bound_drafters()[name]
    weights = weights_of(drafter)
    s = toy.start(drafter, weights)
    seen = []

    class Spy(Eagle):
        def extend(self, params, s, committed):
            assert committed.tokens.shape[1] == drafter.depth + 1, "the stride is uniform, also in a tree"
            seen.append(str(jax.make_jaxpr(super().extend)(params, s, committed)))
            return super().extend(params, s, committed)

    spy = Spy(**{field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)})
    jax.eval_shape(functools.partial(step, method=Method(toy.TARGET, spy, accept.greedy)), weights, s)
    made = {line.split(":")[1].split("=")[0].strip() for line in seen[-1].splitlines() if "dot_general" in line}
    logits = {shape for shape in made if shape.endswith(f",{toy.HEAD.draft_vocab_size}]")}
    # With masks, none before the next round.
    assert logits == (set() if drafter.model.at_once else {f"f32[3,1,{toy.HEAD.draft_vocab_size}]"})
    assert len(made) > 4, "the program text was not parsed"


def test_a_head_with_masks_has_no_readings_of_its_output():
    """It never reads it, so `norm_output` cannot be wrong."""
    fields = []
    for name in ("eagle", "eagle_masks"):
        drafter = toy.bound_drafters()[name]
        view = readings.as_read(weights_of(drafter), toy.TARGET, drafter.model)
        fields.append({reading.field for reading, _ in readings.other_readings(view, toy.TARGET)})
    assert fields[0] - fields[1] == {"norm_output"} and "norm_before_residual" in fields[1]


@pytest.mark.parametrize(
    ("kind", "model", "other"), ((Eagle, toy.MASKED_HEAD, toy.HEAD), (Standalone, toy.MASKED, toy.NEAR))
)
def test_drafts_with_masks_work_with_the_state_of_deeper_ones(kind, model, other):
    """It has an output for each generation."""
    shallow, deep = (kind(depth=depth).bind(toy.TARGET, model) for depth in (2, 4))
    assert shallow.shares(deep) and not deep.shares(shallow)
    shallow, deep = (kind(depth=depth).bind(toy.TARGET, other) for depth in (2, 4))
    assert shallow.shares(deep) and deep.shares(shallow)


@pytest.mark.slow
@pytest.mark.parametrize("shape", (dict(depth=3), dict(depth=3, width=3, num_nodes=12)))
def test_a_head_and_a_target_with_latents(shape):
    """Both caches are of latents: tokens are those of plain decoding, in fewer rounds."""
    target, weights = deepseek.MLA, deepseek.params("mla")
    ids = toy.IDS.tolist()
    plain = Model("latents", target, Params(weights, None), None, ())
    sampled = jspec.Sampling(temperature=0.5)
    for sampling in (None, sampled):
        expected = jspec.generate(plain, ids, max_new_tokens=24, sampling=sampling, drafter=None, ignore_eos=True)
        texts = np.concatenate([toy.IDS, expected.tokens], axis=1)
        model = dataclasses.replace(plain, params=toy.fit_head(target, HEAD, weights, texts), draft=HEAD)
        options = dict(drafter=Eagle(**shape), max_new_tokens=24, sampling=sampling, ignore_eos=True)
        out = jspec.generate(model, ids, **options)
        assert out.tokens == expected.tokens
        assert out.stats.accept_length > 1.5
    out = jspec.generate(model, ids, accept="rejection", **options)
    assert out.stats.accept_length > 1.1


@pytest.mark.parametrize("name", ("eagle_masks", "standalone_masks"))
def test_each_weight_of_a_draft_with_masks_is_read_once_per_round(name):
    """All but the LM head after the round before."""
    drafter = toy.bound_drafters()[name]
    weights = weights_of(drafter)
    model, draft = drafter.model, weights.draft
    unread = {field: None for field in ("embed", "ids", "mask_hidden", "mask_embed") if hasattr(draft, field)}
    total = sum(x.nbytes for x in jax.tree.leaves(dataclasses.replace(draft, **unread)))
    assert model.step_bytes(weights) == draft.lm_head.nbytes
    assert model.step_bytes(weights) + model.extend_bytes(weights) == total


def test_captured_layers_are_layer_inputs_the_last_output_and_its_norm():
    """L = 2 layers: 0 and 1 are their inputs, 2 is the output of the last layer, and 3 is the input of the LM head."""
    weights, target = toy.params().target, toy.TARGET
    chain, cache = tree.chain(jnp.asarray(toy.IDS)), target.init_cache(weights, 3, 4, 4)
    run = jax.jit(target.forward, static_argnames="capture_layers")
    out = run(weights, chain, cache, None, capture_layers=(0, 1, 2, 3))
    states = jnp.split(out.hidden, 4, axis=-1)
    np.testing.assert_array_equal(states[0], weights.embed[toy.IDS])
    np.testing.assert_allclose(target.unembed(weights, states[3]), out.logits, atol=1e-5)
    np.testing.assert_allclose(norm.rms_norm(states[2], weights.norm, target.rms_norm_eps), states[3], atol=1e-6)
    deeper = dataclasses.replace(weights, layers=weights.layers[1:])
    again = dataclasses.replace(target, num_layers=1)
    beyond = jax.jit(functools.partial(again.apply, capture_layers=(1,)))
    skipped = dataclasses.replace(deeper, embed=states[1].reshape(-1, target.hidden_size))
    index = jnp.arange(toy.IDS.size, dtype=jnp.int32).reshape(toy.IDS.shape)
    positions = jnp.arange(toy.IDS.shape[1], dtype=jnp.int32)[None]
    np.testing.assert_allclose(beyond(skipped, read_by(index, positions, cache)).hidden, states[2], atol=1e-5)
    for capture_layers in ((1,), (0, 2)):
        narrow = run(weights, chain, cache, None, capture_layers=capture_layers).hidden
        np.testing.assert_array_equal(narrow, jnp.concatenate([states[i] for i in capture_layers], axis=-1))
    assert run(weights, chain, cache, None).hidden is None
