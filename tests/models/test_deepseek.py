"""DeepSeek V2 and V3: scaled positions, published checkpoints, which load or raise clear errors, and the cache."""

import dataclasses
import re

import hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from parity import check_logits, check_unused, transformers
from safetensors.numpy import load_file, save_file

import jspec
from jspec.checkpoints import deepseek as deepseek_checkpoint
from jspec.checkpoints import language_model
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError
from jspec.core import tree
from jspec.models import layers
from jspec.models.rope import Rope
from pallas_kernels import platform

# Checkpoints


YARN = hf.DEEPSEEK_KINDS["v3"]["rope_parameters"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mscale": 0.7, "mscale_all_dim": 0.3, "factor": 40.0},
        {"mscale": None, "mscale_all_dim": None, "beta_fast": 4, "truncate": False},
        {"attention_factor": 1.3, "original_max_position_embeddings": 4096},
    ],
)
def test_scaled_positions_are_those_of_transformers(changes):
    rope = {key: value for key, value in {**YARN, **changes}.items() if value is not None}
    theirs = transformers.DeepseekV3Config(**{**hf.DEEPSEEK, "rope_parameters": rope, "qk_rope_head_dim": 32})
    raw = {**theirs.to_dict(), "architectures": ["DeepseekV3ForCausalLM"]}
    ours = deepseek_checkpoint.parse_config(Fields(raw))
    made = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3RotaryEmbedding(theirs)
    np.testing.assert_allclose(ours.rope.frequencies(32), made.inv_freq.numpy(), rtol=2e-6)
    assert ours.rope.magnitude == pytest.approx(made.attention_scaling)
    attention = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention(theirs, 0)
    assert ours.layer_scale(0) == pytest.approx(attention.scaling)
    assert deepseek_checkpoint.parse_config(Fields(deepseek_checkpoint.describe(ours))) == ours


def test_the_magnitude_of_yarn_reaches_the_scores(tmp_path):
    rope = {**YARN, "mscale": 0.5, "mscale_all_dim": 1.0, "factor": 40.0}
    oracle = hf.build("deepseek-v3", rope_parameters=rope)
    loaded = check_logits(oracle, hf.save(oracle, tmp_path), "deepseek-v3")
    assert loaded.config.rope.magnitude < 0.9


def published(directory, *, shared: bool = True):
    """A tiny V3 as published: after the last layer comes an MTP head with its own embedding and LM head."""
    oracle, last = hf.build("deepseek-v3"), "model.layers.2."
    tensors = hf.add_mtp(hf.save(oracle, directory))
    if not shared:
        tensors[last + "embed_tokens.weight"] = tensors[last + "embed_tokens.weight"] + np.float32(1)
        tensors[last + "shared_head.head.weight"] = tensors[last + "shared_head.head.weight"] * np.float32(2)
    tensors[last + "self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, directory / "model.safetensors")
    return oracle, tensors


@pytest.mark.parametrize("shared", (True, False))
def test_a_published_checkpoint_loads_completely(tmp_path, shared):
    oracle, tensors = published(tmp_path, shared=shared)
    loaded = check_logits(oracle, tmp_path, "deepseek-v3")
    assert loaded.config.mtp_layers == 1
    (mtp,) = loaded.params.mtp
    np.testing.assert_array_equal(mtp.projection, tensors["model.layers.2.eh_proj.weight"].T)
    np.testing.assert_array_equal(mtp.layer.experts.down[5], tensors["model.layers.2.mlp.experts.5.down_proj.weight"].T)
    assert (mtp.embed is None, mtp.lm_head is None) == (shared, shared)
    language_model.save(tmp_path / "again", loaded.config, loaded.params, dtype="float32")
    again = load_file(tmp_path / "again" / "model.safetensors")
    copies = ("inv_freq", *(("2.embed_tokens.weight", "shared_head.head.weight") if shared else ()))
    assert set(tensors) - set(again) == {name for name in tensors if name.endswith(copies)}
    for name, tensor in again.items():
        np.testing.assert_array_equal(tensor, tensors[name], name)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_a_proj.bias", "model.layers.3.x", "model.layers.2.norm"])
def test_an_unused_tensor_is_an_error(tmp_path, name):
    published(tmp_path)
    check_unused(tmp_path, name)


def test_a_part_of_an_mtp_head_is_an_error(tmp_path):
    published(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.2.hnorm.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"'model.layers.2.hnorm.weight' is missing"):
        language_model.load(tmp_path)


# The cache


def test_a_prefix_is_read_as_latents(pair, monkeypatch):
    """No head has keys (width 12, or 20 with the rotary part) or values (width 16) of the 40 positions.

    This is so in the reference, whose arrays can be seen; the kernels have none.
    """
    monkeypatch.setattr(platform, "platform", lambda: "cpu")
    model = pair("deepseek-v3").model
    cache = model.target.init_cache(model.params.target, 2, 40, 4)
    given = tree.chain(jnp.zeros((2, 5), jnp.int32)), cache, jnp.array([9, 30])
    program = str(jax.make_jaxpr(model.target.forward)(model.params.target, *given))
    assert "f32[2,40,1,28]" in program
    assert not re.search(r"f32\[2,(40,4|4,40),\d+\]", program)


def test_an_assistant_finds_no_keys_of_heads(pair):
    model = pair("deepseek-v2").model
    draft = dataclasses.replace(
        toy.ASSISTANT, vocab_size=97, target_layers=(0, 1), head_dims=(28, 28), num_heads=4, target_hidden_size=32
    )
    with pytest.raises(ValueError, match="layer 0 of the target uses latent attention"):
        jspec.FrozenKvMtp(depth=2).bind(model.target, draft)


def test_interleaved_positions_are_rotated_as_halves():
    """Weights are permuted on load, so that no round permutes anything."""
    x = np.random.default_rng(0).normal(size=(1, 3, 1, 8)).astype(np.float32)
    order = np.arange(8).reshape(-1, 2).T.reshape(-1)
    cos, sin = Rope().rotation(jnp.arange(3)[None], 8, jnp.float32)
    even, odd = x[..., ::2], x[..., 1::2]
    wide = [np.asarray(turn)[:, :, None] for turn in (cos, sin)]
    wanted = np.concatenate([even * wide[0] - odd * wide[1], odd * wide[0] + even * wide[1]], axis=-1)
    np.testing.assert_allclose(layers.rotate(jnp.asarray(x[..., order]), (cos, sin)), wanted, rtol=1e-6)
