"""Gemma 3: output and logits equal `transformers`, whose files have four spellings of the two rotations."""

import json

import hf
import pytest
from parity import check_logits, check_output, check_refused, check_saved, check_unused, edit, transformers
from safetensors.numpy import load_file, save_file

import jspec
from jspec.drafters import Ngram, Standalone

ATOL = 1e-4
"""As of Gemma 4."""
CASES = [
    (None, 16, None),
    (Ngram(depth=12), 1, 20),
    (Standalone(depth=4), 5, 7),
    (Standalone(depth=4, width=3, num_nodes=24), 16, 20),
    (jspec.Eagle(depth=4, width=3), 16, 7),
]
"""Drafter, page size and columns of a chunk; a chain of 12, trees and chunks are longer than the window of 8."""


@pytest.mark.slow(unless=("drafter1", "drafter3"))
@pytest.mark.parametrize(("drafter", "page_size", "chunk"), CASES)
def test_greedy_output_equals_transformers(pair, drafter, page_size, chunk, monkeypatch):
    out = check_output(pair("gemma3"), drafter, page_size, chunk, monkeypatch)
    if isinstance(drafter, Standalone | jspec.Eagle):
        assert out.stats.accept_length > (1.2 if isinstance(drafter, Standalone) else 1.05)


def as_on_the_hub(raw):
    """The older generation's format: keys beside each other, and every layer but the third is sliding."""
    rope = raw.pop("rope_parameters")
    raw["rope_theta"], raw["rope_local_base_freq"] = 1e6, 1e4
    raw["rope_scaling"] = {key: value for key, value in rope["full_attention"].items() if key != "rope_theta"}
    raw["torch_dtype"], raw["sliding_window_pattern"] = raw.pop("dtype"), 3
    del raw["layer_types"]


@pytest.mark.parametrize("old_config", [False, True], ids=["new config", "old config"])
def test_logits_equal_transformers(tmp_path, old_config):
    oracle = hf.build("gemma3", seed=3)
    hf.save(oracle, tmp_path, sharded=old_config)
    if old_config:
        edit(tmp_path, as_on_the_hub)
    check_logits(oracle, tmp_path, atol=ATOL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"final_logit_softcapping": 3.0, "num_key_value_heads": 4},
        {"rope_parameters": None, "sliding_window": 1},
        {"layer_types": ["full_attention"] * 4},
        {"layer_types": ["sliding_attention"] * 4, "head_dim": 32},
    ],
)
def test_logits_equal_transformers_with_other_options(tmp_path, changes):
    oracle = hf.build("gemma3", seed=4, **changes)
    check_logits(oracle, hf.save(oracle, tmp_path), atol=ATOL)


@pytest.mark.parametrize("root", [None, "model.language_model."], ids=["written names", "other names"])
def test_the_text_model_of_a_multimodal_one(tmp_path, root):
    vision = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=28)
    text = transformers.Gemma3TextConfig(**hf.GEMMA3)
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4)
    whole = hf.randomize(transformers.Gemma3ForConditionalGeneration(config).eval(), seed=3)
    hf.save(whole, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert any("vision_tower." in name for name in tensors), "there is nothing to skip"
    # Names of the two generations: the tensors of the text model keep what follows the root.
    (embed,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    if root is not None:
        theirs = embed.removesuffix("embed_tokens.weight")
        renamed = {name.replace(theirs, root, 1): tensor for name, tensor in tensors.items()}
        assert renamed.keys() != tensors.keys()
        save_file(renamed, path, metadata={"format": "pt"})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 96]}))
    loaded = check_logits(lambda ids: whole(input_ids=ids), tmp_path, atol=ATOL)
    assert loaded.eos == (1, 96)


def test_an_unused_tensor_is_an_error(tmp_path):
    hf.save(hf.build("gemma3"), tmp_path)
    check_unused(tmp_path, "model.layers.1.self_attn.q_proj.bias")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"layer_types": ["full_attention"] * 3}, "must be 4 of"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters has the keys \['rope_type'\]"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "factor=4.0, but .*full_attention.factor=8.0"),
        ({"rope_local_base_freq": 5.0}, "rope_theta has two values, 5.0 and .*sliding_attention.rope_theta=10000.0"),
        ({"num_key_value_heads": 3}, "is not a multiple of kv_heads=3"),
        ({"hidden_size": "absent"}, "'hidden_size' is missing"),
    ],
)
def test_unsupported_configs_are_errors(tmp_path, change, message):
    raw = transformers.Gemma3TextConfig(**hf.GEMMA3).to_dict()
    check_refused(tmp_path, {**raw, "architectures": ["Gemma3ForCausalLM"], **change}, message)


def test_our_checkpoint_loads_in_transformers_and_here(tmp_path, pair):
    check_saved(tmp_path, pair("gemma3"), atol=1e-5)
