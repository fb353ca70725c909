"""Rotary positions of all kinds: frequencies and magnitudes equal those of `transformers`, whatever their spelling."""

import hf
import jax.numpy as jnp
import numpy as np
import pytest
from parity import check_logits, transformers

from jspec.checkpoints import language_model
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.rope import describe_rope, parse_rope

DIM, ORIGINAL = 16, "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [2.0 + 0.3 * i for i in range(8)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
KINDS = {
    "default": {"rope_type": "default"},
    "mrope": {"rope_type": "mrope", "mrope_section": [2, 3, 3]},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {key: value for key, value in hf.LLAMA3_ROPE.items() if key != "rope_theta"},
    "yarn": YARN,
    "yarn of ModelOpt": {**YARN, "factor": 32.0},
    "yarn of all the context": {"rope_type": "yarn", "factor": 4.0},
    "yarn bounds": {**YARN, "beta_fast": 4, "beta_slow": 2.5},
    "yarn untruncated": {**YARN, "truncate": False},
    "yarn one bound": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn mscale": {**YARN, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn half mscale": {**YARN, "mscale": 0.7},
    "yarn attention": {**YARN, "attention_factor": 1.3, "mscale": 0.7, "mscale_all_dim": 1.0},
    "longrope": {**LONGROPE, ORIGINAL: 128},
    "longrope factor": {**LONGROPE, ORIGINAL: 128, "factor": 2.0},
    "longrope attention": {**LONGROPE, ORIGINAL: 128, "attention_factor": 1.2},
}


def theirs(rope: dict, theta: float):
    """The rotary embedding of `transformers`."""
    text = {**rope, "rope_type": "default"} if rope["rope_type"] == "mrope" else rope
    shape = {key: value for key, value in hf.BASE.items() if key != "head_dim"}
    config = transformers.LlamaConfig(**shape, head_dim=DIM, rope_parameters={**text, "rope_theta": theta})
    return transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)


def spellings(rope: dict, theta: float) -> dict[str, dict]:
    """The ways to write the same rotation."""
    older = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
    return {
        "rope_parameters": {"rope_parameters": {**rope, "rope_theta": theta}},
        "theta beside": {"rope_parameters": rope, "rope_theta": theta},
        "rope_scaling": {"rope_scaling": rope, "rope_theta": theta},
        "type": {"rope_scaling": older, "rope_theta": theta, "rope_parameters": None},
        "theta in rope_scaling": {"rope_scaling": {**older, "rope_theta": theta}},
        "theta apart": {"rope_scaling": older, "rope_parameters": {"rope_theta": theta}},
        "both": dict(rope_scaling={**rope, **older}, rope_theta=theta, rope_parameters={**rope, "rope_theta": theta}),
    }


@pytest.mark.filterwarnings("ignore:.*long_factor is not used")
@pytest.mark.parametrize("theta", [1e4, 5e6])
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_and_spellings_equal_transformers(kind, theta):
    oracle = theirs(KINDS[kind], theta)
    raw = {"max_position_embeddings": hf.BASE["max_position_embeddings"]}
    ropes = [parse_rope(Fields({**raw, **spelling}), DIM) for spelling in spellings(KINDS[kind], theta).values()]
    assert set(ropes) == {ropes[0]}
    (rope, *_) = ropes
    np.testing.assert_allclose(rope.frequencies(DIM), oracle.inv_freq.numpy(), rtol=5e-7)
    assert rope.magnitude == pytest.approx(oracle.attention_scaling, rel=1e-6)
    import torch

    positions = np.array([[0, 1, 77, 127]])
    cos, sin = oracle(torch.zeros(1), torch.tensor(positions))
    for ours, expected in zip(rope.rotation(jnp.asarray(positions), DIM, jnp.float32), (cos, sin), strict=True):
        np.testing.assert_allclose(ours, expected[..., : DIM // 2].numpy(), atol=2e-5)
    # What is written is read again.
    again = {"max_position_embeddings": rope.limit(512), "rope_parameters": describe_rope(rope)}
    assert parse_rope(Fields(again), DIM) == rope


def test_pairs_at_rest_are_not_scaled():
    """As in Qwen3.5 with YaRN: the magnitude is of rotated pairs only."""
    raw = {"rope_parameters": {**YARN, "rope_theta": 1e4}, "max_position_embeddings": 256}
    rope = parse_rope(Fields(raw), DIM, share=0.5)
    cos, _ = rope.rotation(jnp.zeros((1, 1), jnp.int32), DIM, jnp.float32)
    np.testing.assert_allclose(cos[0, 0], [rope.magnitude] * 4 + [1.0] * 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_scaling": {**YARN, "alpha": 1000.0}}, "not supported: rope_scaling.alpha=1000.0"),
        ({"rope_scaling": {"factor": 4.0}}, "not supported: rope_scaling.factor=4.0: the keys of rope_type='default'"),
        ({"rope_scaling": {"rope_type": "axial"}}, "rope_type='axial' is not supported; must be default or linear"),
        ({"rope_scaling": dict(rope_type="default", type="yarn")}, "rope_type='default', but rope_scaling.type='yarn'"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "rope_type='yarn', but rope_parameters"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'rope_scaling.factor' is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling.factor=0.5: must be from 1 to"),
        ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}}, "beta_fast=1.0: must be at least beta_slow=2.0"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta=1.0: must be above 1 with rope_type='yarn'"),
        ({"rope_scaling": YARN, ORIGINAL: 32}, "must be the same as original_max"),
        ({"rope_scaling": {**YARN, ORIGINAL: 1024, "factor": None}}, "must be at most 512 with"),
        ({"rope_scaling": {**LONGROPE, "short_factor": SHORT[:7]}}, "have 7 and 8 entries: must have 8"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [0.0] * 8}}, r"short_factor\[0\]=0.0: must be above 0"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, ORIGINAL: 64}},
            f"{ORIGINAL}=64: must be max_position_embeddings=512 with rope_type='dynamic'",
        ),
        (dict(rope_theta=1e4, rope_parameters={"rope_theta": 1e6}), "rope_theta has two values, 10000.0 and rope_para"),
        ({"partial_rotary_factor": 0.5}, "not supported: partial_rotary_factor=0.5: must be 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor=0.5: must be 1"),
    ],
)
def test_other_rotations_are_errors(raw, message):
    with pytest.raises(CheckpointError, match=message):
        parse_rope(Fields({"max_position_embeddings": 512, **raw}), DIM)


def test_of_two_bases_a_draft_uses_the_newer_one():
    raw = {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}
    with pytest.warns(
        UserWarning, match="two values, 1000000.0 and rope_parameters.rope_theta=10000.0: the draft uses"
    ):
        assert parse_rope(Fields(raw), DIM, draft=True).theta == 1e4


def test_contexts_end_where_frequencies_would_change():
    """Keys in the cache would have to be rotated anew."""
    build = {key: value for key, value in hf.BASE.items() if value is not None}
    raw = {**build, "architectures": ["LlamaForCausalLM"], ORIGINAL: 128}
    with pytest.warns(UserWarning, match="contexts are limited to original_max_position_embeddings=128"):
        assert language_model.parse_config(Fields({**raw, "rope_scaling": LONGROPE})).max_length == 128
    raw |= {"rope_scaling": {"type": "dynamic", "factor": 4.0}}
    assert language_model.parse_config(Fields(raw)).max_length == 512


ROPES = {
    "linear": {**KINDS["linear"], "rope_theta": 1e4},
    "dynamic": {**KINDS["dynamic"], "rope_theta": 1e4},
    "yarn": {**YARN, "rope_theta": 1e6},
    "longrope": {**LONGROPE, ORIGINAL: 256, "rope_theta": 1e4},
}


@pytest.mark.slow(unless=("llama-yarn", "qwen3_5-yarn"))
@pytest.mark.filterwarnings("ignore:.*long_factor is not used")
@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5", "gpt_oss", "deepseek-v3"])
def test_logits_with_scaled_positions(tmp_path, family, kind):
    rope = dict(ROPES[kind])
    if family == "qwen3_5":
        rope |= {"partial_rotary_factor": 0.5}
    pairs = 4 if family in ("qwen3_5", "deepseek-v3") else 8
    rope |= {key: rope[key][:pairs] for key in ("short_factor", "long_factor") if key in rope}
    oracle = hf.build(family, seed=6, rope_parameters=rope)
    check_logits(oracle, hf.save(oracle, tmp_path), family)
