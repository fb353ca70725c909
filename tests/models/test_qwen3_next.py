"""Qwen3-Next and Qwen3.5: output equals `transformers`' plain greedy decoding, and checkpoints load completely."""

import dataclasses
import json

import hf
import jax.numpy as jnp
import numpy as np
import optional
import pytest
import toy
from parity import check_logits, check_saved, edit, transformers
from safetensors.numpy import load_file, save_file

from jspec.bench.presets import PRESETS
from jspec.checkpoints import language_model
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError
from jspec.core.types import DraftTree
from jspec.models import MtpParams
from jspec.models.rope import Rope

LINEAR, FULL = "linear_attention", "full_attention"


# Checkpoints


def test_the_text_model_of_a_multimodal_one_and_its_mtp_head(tmp_path):
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, num_position_embeddings=16
    )
    text = hf.build("qwen3_5").config.to_dict()
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    whole = hf.randomize(transformers.Qwen3_5ForConditionalGeneration(config).eval(), seed=3)
    hf.save(whole, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert any(name.startswith("model.visual.") for name in tensors), "there is nothing to skip"
    (prefix,) = {name.split("layers.1.")[0] for name in tensors if "layers.1." in name}
    assert prefix == "model.language_model."
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 96]}))
    rng = np.random.default_rng(0)
    shapes = {"fc.weight": (32, 64), "norm.weight": (32,)}
    shapes |= {f"pre_fc_norm_{part}.weight": (32,) for part in ("embedding", "hidden")}
    mtp = {f"mtp.{name}": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    mtp |= {
        name.replace(prefix + "layers.1.", "mtp.layers.0."): x for name, x in tensors.items() if "layers.1." in name
    }
    save_file({**tensors, **mtp}, path)
    loaded = check_logits(lambda ids: whole(input_ids=ids), tmp_path, "qwen3_5")
    assert loaded.eos == (1, 96)
    (head,) = loaded.params.mtp
    assert loaded.config.mtp_layers == 1
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stated, "mtp_num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match="mtp_num_hidden_layers=2, but the checkpoint lists the tensors of 1 MTP"):
        language_model.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(stated))
    toy.assert_same(head.layer, loaded.params.layers[1])
    np.testing.assert_array_equal(head.projection, mtp["mtp.fc.weight"].T)
    np.testing.assert_array_equal(head.hidden_norm, 1 + mtp["mtp.pre_fc_norm_hidden.weight"])
    save_file({**tensors, **mtp, "mtp.layers.1.x": np.zeros(3, np.float32)}, path)
    with pytest.raises(
        CheckpointError,
        match=r"1 unused tensor\(s\) in the checkpoint; this model does not read them: mtp\.layers\.1\.x",
    ):
        language_model.load(tmp_path)


QWEN3_6 = {
    "attention_bias": False,
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262_144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "rope_type": "default",
    },
    "vocab_size": 248_320,
}
QWEN3_6_SIZES = {
    "qwen3.6-27b": {
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "linear_num_value_heads": 48,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
    },
    "qwen3.6-35b-a3b": {
        "hidden_size": 2048,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
    },
}


@pytest.mark.parametrize("size", QWEN3_6_SIZES)
def test_a_configuration_of_qwen3_6(size):
    """The published values, in the classes of Qwen3.5."""
    kind = "qwen3_5_moe" if "a3b" in size else "qwen3_5"
    name = "Qwen3_5MoeForConditionalGeneration" if "a3b" in size else "Qwen3_5ForConditionalGeneration"
    text = {**QWEN3_6, **QWEN3_6_SIZES[size], "model_type": f"{kind}_text", "tie_word_embeddings": False}
    text["layer_types"] = ([LINEAR] * 3 + [FULL]) * (text["num_hidden_layers"] // 4)
    raw = {"architectures": [name], "model_type": kind, "text_config": text, "vision_config": {"depth": 27}}
    preset = PRESETS[size].target
    found = language_model.parse_config(Fields(raw))
    assert found == dataclasses.replace(preset, rope=Rope(1e7, share=0.25))
    assert language_model.family_by_config(found).describe(found)["num_hidden_layers"] == found.num_layers


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_our_checkpoint_loads_in_transformers_and_here(tmp_path, pair, family):
    ours = pair(family)
    model = ours.model
    full = next(
        layer
        for layer, attends in zip(model.params.target.layers, model.target.is_full_attention, strict=True)
        if attends
    )
    ones = jnp.ones(32)
    head = MtpParams(ones, 2 * ones, jnp.ones((64, 32)), full, 3 * ones)
    params = dataclasses.replace(model.params.target, mtp=(head,))
    check_saved(tmp_path, ours, family, dataclasses.replace(model.target, mtp_layers=1), params)


def test_stacked_experts_are_those_of_separate_tensors(tmp_path):
    oracle = hf.build("qwen3_5_moe", layer_types=[LINEAR], seed=2)
    hf.save(oracle, tmp_path)
    path, experts = tmp_path / "model.safetensors", "model.layers.0.mlp.experts"
    tensors = load_file(path)
    before = language_model.load(tmp_path, dtype="float32").params
    parts = {
        name: [tensors.pop(f"{experts}.{i}.{name}_proj.weight") for i in range(6)] for name in ("gate", "up", "down")
    }
    fused = {
        f"{experts}.gate_up_proj": np.stack(
            [np.concatenate(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        )
    }
    save_file({**tensors, **fused, f"{experts}.down_proj": np.stack(parts["down"])}, path)
    toy.assert_same(language_model.load(tmp_path, dtype="float32").params, before)


# What changes the forward of `transformers`, or is often in configurations, for a change of every key.
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0}
FLIPS = {
    **dict(rms_norm_eps=0.1, vocab_size=96, num_experts_per_tok=1, norm_topk_prob=False, mlp_only_layers=[1]),
    **{"decoder_sparse_step": 2, "sliding_window": 4, "use_cache": False, "attention_dropout": 0.5, "is_causal": False},
    **{"partial_rotary_factor": 0.5, "rope_theta": 100.0, "full_attention_interval": 2, "hidden_act": "relu"},
    **{"output_gate_type": "sigmoid", "linear_num_key_heads": 1, "tie_word_embeddings": True, "mlp_bias": True},
    **{"rope_parameters": {**ROPE, "rope_theta": 100.0}, "rope_scaling": {**YARN, "type": "yarn"}},
    **{
        "rope parameters": ROPE | YARN | {"rope_type": "yarn"},
        "a larger share": {**ROPE, "partial_rotary_factor": 0.5},
    },
    **{"sections": {**ROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": False}, "attention_bias": True},
}


@pytest.mark.slow(unless=("qwen3_next-is_causal", "qwen3_5_moe-norm_topk_prob"))
@pytest.mark.parametrize("key", FLIPS)
@pytest.mark.parametrize("family", ("qwen3_next", "qwen3_5", "qwen3_5_moe"))
def test_a_changed_key_changes_what_it_changes_in_transformers(tmp_path, family, key):
    """One key of a config.json is another: the logits are those of `transformers` with it, or it is refused by name."""
    torch, ids = optional.needed("torch"), toy.IDS[:1, :16]
    hf.save(hf.build(family), tmp_path)
    name = key if key in ("mlp_bias", "attention_bias") or "_" in key else "rope_parameters"
    edit(tmp_path, lambda raw: raw | {name: FLIPS[key]})
    try:
        loaded = language_model.load(tmp_path, dtype="float32")
    except CheckpointError as error:
        # Other sizes need other tensors.
        known = name, "config.json implies", "tensor", "intermediate_size", "rope_type"
        assert any(word in str(error) for word in known)
        return
    config, params = loaded.config, loaded.params
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    cache = config.init_cache(params, 1, 16, 16)
    ours = config.forward(params, DraftTree(jnp.asarray(ids, jnp.int32)), cache, jnp.zeros(1, jnp.int32)).logits
    np.testing.assert_allclose(ours, expected, atol=3e-4)
