"""Presets of `jspec bench`, their random weights, and the bytes that a round of them reads."""

import dataclasses

import gemma
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen
import toy

from jspec.bench import weights
from jspec.bench.measure import BenchSetup, measure
from jspec.bench.presets import PRESETS
from jspec.checkpoints import language_model
from jspec.core.types import Params
from jspec.drafters import Eagle, FrozenKvMtp, Mtp, Standalone
from jspec.loading import memory
from jspec.models.moe import Routed, Router
from jspec.models.sizes import count_parameters

ROUTED = Routed(Router(count=8, chosen=2), width=8)
TINY = PRESETS["tiny"]


@pytest.mark.parametrize(
    ("name", "published"),
    (
        ("llama-3.1-8b", 8.03e9),
        ("llama-3.2-1b", 1.24e9),
        ("qwen3-8b", 8.19e9),
        ("qwen3-0.6b", 0.60e9),
        ("smollm2-135m", 0.135e9),
        ("llama-3.3-70b", 70.6e9),
        ("qwen3-32b", 32.8e9),
        ("gemma-4-31b", 30.7e9),
        ("deepseek-v2-lite", 15.7e9),
        ("qwen3-30b-a3b", 30.5e9),
        # 8 billion with the encoders of images and sound, of 150 and 300 million.
        ("gemma-4-e4b", 7.5e9),
        ("qwen3-next", 79.7e9),
        ("qwen3.5-9b", 9.0e9),
        ("deepseek-v3.2", 671e9),
        # 27, 35 and 122 billion with the encoder of images and the MTP head.
        ("qwen3.6-27b", 26.9e9),
        ("qwen3.6-35b-a3b", 34.7e9),
        ("qwen3.5-122b-a10b", 122.1e9),
        ("gpt-oss-20b", 20.9e9),
        ("gpt-oss-120b", 116.8e9),
    ),
)
def test_a_preset_has_the_published_number_of_parameters(name, published):
    shapes = PRESETS[name].target.param_shapes(jnp.bfloat16)
    assert count_parameters(shapes) == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("name", "head", "target", "step", "extend", "kv"),
    (
        ("llama-3.1-8b", 424.7e6, 15.01e9, 0.749e9, 0.849e9, 128 * 1024),
        ("qwen3-8b", 399.5e6, 15.14e9, 0.698e9, 0.799e9, 144 * 1024),
    ),
)
def test_bytes_are_those_of_the_literature(name, head, target, step, extend, kv):
    """Worked out by hand from the published shapes, in bfloat16."""
    preset = PRESETS[name]
    params = _shapes(name)
    assert count_parameters(params.draft) == pytest.approx(head, rel=1e-3)
    assert preset.target.forward_bytes(params.target) == pytest.approx(target, rel=1e-3)
    assert preset.head.step_bytes(params) == pytest.approx(step, rel=1e-3)
    assert preset.head.extend_bytes(params) == pytest.approx(extend, rel=1e-3)
    assert preset.target.kv_bytes(1, 2) == kv
    assert preset.target.kv_bytes(512, 2) == 512 * kv
    plain = weights.round_bytes(params, preset.target, None, depth=0, batch=8, context=512)
    assert plain == preset.target.forward_bytes(params.target) + 8 * 512 * kv
    chain = weights.round_bytes(params, preset.target, preset.head, depth=5, batch=8, context=512)
    assert chain - plain == pytest.approx(extend + 4 * step + 5 * 8 * 512 * 4096, rel=1e-3)
    narrow = weights.round_bytes(params, preset.target, preset.head, depth=5, batch=8, context=512, seen=100)
    assert chain - narrow == 5 * 8 * 412 * 4096


@pytest.mark.parametrize("version", (1, 3))
def test_an_eagle_head_reads_every_weight_of_its_own_once(version):
    """With all optional weights: what a round reads are the weights, without ids, plus the LM head that is shared."""
    head, target = dataclasses.replace(TINY.head, version=version), TINY.target.param_shapes(jnp.float32)
    width, captured, own = 16, 3 * 16, head.param_shapes(jnp.float32)
    bias, norm = (jax.ShapeDtypeStruct((size,), jnp.float32) for size in (width, captured))
    three = {"input_norm": norm, "fc_norms": (bias,) * 3} if version == 3 else {}
    own = dataclasses.replace(own, fc_bias=bias, **three)
    params = Params(target, own)
    shared = memory.tree_bytes(target.lm_head) if version == 1 else 0
    assert head.extend_bytes(params) == memory.tree_bytes(dataclasses.replace(own, ids=None)) + shared
    fused = 0 if version == 1 else memory.tree_bytes((own.fc, own.fc_bias, own.fc_norms, own.input_norm))
    assert head.extend_bytes(params) - head.step_bytes(params) == fused


def test_a_tied_model_reads_its_embedding_as_the_head():
    params, config = _shapes("llama-3.2-1b"), PRESETS["llama-3.2-1b"].target
    assert config.forward_bytes(params.target) == memory.tree_bytes(params.target)
    # A draft that is a language model reads in `extend` what it reads in a step.
    pair = Params(_shapes("llama-3.1-8b").target, params.target)
    assert config.extend_bytes(pair) == config.step_bytes(pair) == memory.tree_bytes(params.target)


def test_bytes_of_an_assistants_round():
    """Worked out by hand, in bfloat16: 31B, and E4B's head of clusters; windows bound what is read of a context."""
    params, preset = _shapes("gemma-4-31b"), PRESETS["gemma-4-31b"]
    assert preset.target.forward_bytes(params.target) == pytest.approx(61.4e9, rel=1e-3)
    windows, full = 50 * 1024 * 2 * 16 * 256 * 2, 10 * 2 * 4 * 512 * 2
    assert preset.target.kv_bytes(32_768, 2) == windows + 32_768 * full
    assert preset.target.kv_bytes(100, 2) == 100 * (windows // 1024 + full)
    # Projections, then queries, outputs and MLPs of three sliding layers and a full one, then the head.
    layers = 3 * 2 * 32 * 256 * 1024 + 2 * 32 * 512 * 1024 + 4 * 3 * 1024 * 8192
    step = 2 * (3 * 5376 * 1024 + layers + 262_144 * 1024)
    assert preset.assistant.step_bytes(params) == pytest.approx(step, rel=1e-4)
    plain = weights.round_bytes(params, preset.target, None, depth=0, batch=2, context=4096)
    chain = weights.round_bytes(params, preset.target, preset.assistant, depth=5, batch=2, context=4096)
    read = 2 * (3 * 1024 * 2 * 16 * 256 * 2 + 4096 * 2 * 4 * 512 * 2)
    assert chain - plain == pytest.approx(5 * step + 5 * read, rel=1e-4), "and nothing for an extension"
    small = PRESETS["gemma-4-e4b"]
    layers = 3 * 2 * 8 * 256 * 256 + 2 * 8 * 512 * 256 + 4 * 3 * 256 * 2048
    step = 2 * (3 * 2560 * 256 + layers + 2048 * 256 + 32 * 128 * 256)
    assert small.assistant.step_bytes(_shapes("gemma-4-e4b")) == pytest.approx(step, rel=1e-3)


def test_bytes_of_recurrent_layers_and_of_the_experts_that_are_read():
    """Worked out by hand, in bfloat16: 80B-A3B has 36 layers with states and 12 with keys."""
    params, preset = _shapes("qwen3-next"), PRESETS["qwen3-next"]
    state = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert preset.target.state_bytes(2) == state
    assert preset.target.kv_bytes(100, 2) == 100 * 12 * 2 * 2 * 256 * 2
    expert = 48 * 3 * 2048 * 512 * 2
    plain = weights.round_bytes(params, preset.target, None, depth=0, batch=1, context=100)
    every = preset.target.forward_bytes(params.target, 10_000)
    assert plain == pytest.approx(every - 502 * expert + 100 * 24_576 + 2 * state, rel=1e-6)
    two = weights.round_bytes(params, preset.target, None, depth=0, batch=2, context=100)
    # The second token chooses 100 / 512 experts that the first one has chosen, too.
    assert two - plain == pytest.approx((10 - 100 / 512) * expert + 100 * 24_576 + 2 * state, rel=1e-6)


def test_bytes_of_experts_are_those_that_are_chosen():
    """Worked out by hand, in bfloat16: 6 of the 64 experts of each of 26 layers for a token, all of them for many."""
    config = PRESETS["deepseek-v2-lite"].target
    params = config.param_shapes(jnp.bfloat16)
    expert, routers = 2 * 3 * 2048 * 1408, 26 * 4 * 2048 * 64
    attention = 2048 * (16 * 192 + 576) + 16 * (128 + 128) * 512 + 16 * 128 * 2048
    shared = 26 * 2 * expert + 2 * 3 * 2048 * 10_944 + 2 * 27 * attention + 2 * 2048 * 102_400 + routers
    assert config.forward_bytes(params) == pytest.approx(shared + 26 * 6 * expert, rel=1e-3)
    two = 64 * (1 - (1 - 6 / 64) ** 2)
    assert config.forward_bytes(params, 2) == pytest.approx(shared + 26 * two * expert, rel=1e-3)
    everything = memory.tree_bytes(params) - memory.tree_bytes(params.embed)
    assert config.forward_bytes(params, 1000) == everything
    assert config.kv_bytes(100, 2) == 100 * 27 * 576 * 2
    draft = PRESETS["deepseek-v2-lite"].standalone
    pair = Params(params, draft.param_shapes(jnp.bfloat16))
    plain = weights.round_bytes(pair, config, None, depth=0, batch=1, context=0)
    assert plain == config.forward_bytes(params)
    chain = weights.round_bytes(pair, config, draft, depth=3, batch=2, context=0)
    drafting = 3 * draft.forward_bytes(pair.draft)
    assert chain == config.forward_bytes(params, 8) + drafting
    grown = weights.round_bytes(pair, config, draft, depth=3, batch=2, context=0, nodes=12)
    assert grown == config.forward_bytes(params, 24) + drafting


def test_the_floor_of_a_tree_is_that_of_all_its_nodes():
    preset = PRESETS["tiny-deepseek"]
    params = Params(*(config.param_shapes(jnp.float32) for config in (preset.target, preset.standalone)))
    setup = BenchSetup(preset.target, params, tokens_per_round=2, rounds=4, repeats=1, page_size=8)
    drafter = Standalone(depth=2, width=2, num_nodes=6).bind(preset.target, preset.standalone)
    row = measure(setup, "tree", drafter, 3, preset.target.max_length, lambda _: None)
    sizes = {"depth": 2, "batch": 3, "context": preset.target.max_length, "nodes": 6}
    assert row.problem is not None and "the context length is" in row.problem
    assert row.floor_bytes == weights.round_bytes(params, preset.target, preset.standalone, **sizes)


def test_shapes_of_deepseek_and_of_experts_are_those_of_their_checkpoints(tmp_path):
    for config in (PRESETS["tiny-deepseek"].target, dataclasses.replace(TINY.target, qk_norm=True, experts=ROUTED)):
        shapes = config.param_shapes(jnp.float32)
        language_model.save(tmp_path, config, weights.random_weights(shapes, 128), dtype="float32")
        loaded = language_model.load(tmp_path, dtype="float32")
        assert loaded.config == config
        assert jax.tree.map(lambda x: (x.shape, x.dtype), loaded.params) == jax.tree.map(
            lambda x: (x.shape, x.dtype), shapes
        )


def _shapes(name):
    """Shapes of the weights of a target and its first draft."""
    preset = PRESETS[name]
    return Params(*(each.param_shapes(jnp.bfloat16) for each in (preset.target, preset.head or preset.assistant)))


@pytest.mark.parametrize("name", PRESETS)
def test_the_drafts_of_a_preset_suit_its_target(name):
    preset = PRESETS[name]
    drafts = {Eagle: preset.head, Standalone: preset.standalone, FrozenKvMtp: preset.assistant, Mtp: preset.mtp}
    assert any(drafts.values())
    for drafter, draft in drafts.items():
        assert draft is None or drafter(depth=5, width=8).bind(preset.target, draft)
    count = preset.target.num_layers
    assert preset.head is None or name.startswith("tiny") or preset.head.capture_layers == (2, count // 2, count - 3)


def test_shapes_are_those_that_the_model_runs_with():
    for kind in gemma.KINDS:
        shapes = gemma.KINDS[kind].param_shapes(jnp.float32)
        assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, gemma.params(kind))
    for kind, config in qwen.KINDS.items():
        shapes = config.param_shapes(jnp.float32)
        assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, qwen.params(kind))
    own = toy.random_assistant(toy.ASSISTANT)
    for config, made in ((toy.ASSISTANT, own), (toy.CLUSTERED, toy.in_clusters(toy.CLUSTERED, own))):
        shapes = config.param_shapes(jnp.float32)
        assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, made)


def test_random_weights_are_what_the_shapes_say_and_keep_what_is_there():
    target, head = PRESETS["tiny"].target, PRESETS["tiny"].head
    shapes = Params(target.param_shapes(jnp.bfloat16), head.param_shapes(jnp.bfloat16))
    made = weights.random_weights(shapes, target.vocab_size)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    assert np.std(np.asarray(made.target.layers[1].gate_up, np.float32)) == pytest.approx(weights.SPREAD, rel=0.1)
    assert not np.array_equal(made.target.layers[0].qkv, made.target.layers[1].qkv)
    np.testing.assert_array_equal(made.draft.ids, 2 * np.arange(64))
    kept = weights.random_weights(Params(made.target, shapes.draft), target.vocab_size)
    assert all(a is b for a, b in zip(jax.tree.leaves(kept.target), jax.tree.leaves(made.target), strict=True))


def test_bytes_of_an_mtp_head_and_of_indexed_attention():
    """Worked out by hand, in bfloat16: a head has one of the 61 layers; of a long context 2,048 rows are read."""
    preset = PRESETS["deepseek-v3.2"]
    shapes = Params(preset.target.param_shapes(jnp.bfloat16), preset.mtp.param_shapes(jnp.bfloat16))
    expert, index = 2 * 3 * 7168 * 2048, 61 * 2 * 128
    layer = memory.tree_bytes(shapes.draft[0].layer) - (256 - 8) * expert
    other = 2 * (2 * 7168 * 7168 + 3 * 7168 + 7168 * 129_280)
    assert preset.mtp.step_bytes(shapes) == pytest.approx(layer + other, rel=1e-6)
    assert preset.mtp.extend_bytes(shapes) == preset.mtp.step_bytes(shapes)
    assert preset.target.kv_bytes(1000, 2) == 1000 * (index + 61 * 2 * 576)
    assert preset.target.kv_bytes(100_000, 2) == 100_000 * index + 61 * 2 * 2048 * 576
    assert preset.mtp.kv_bytes(100_000, 2, preset.target) == (100_000 * index + 61 * 2 * 2048 * 576) // 61
