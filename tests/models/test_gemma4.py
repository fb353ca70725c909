"""Gemma 4: output and logits equal `transformers`, in contexts of many windows, and nothing beyond a window is read."""

import json

import hf
import pytest
from parity import check_logits, check_output, check_refused, check_saved, check_unused, edit, transformers
from safetensors.numpy import load_file, save_file

import jspec
from jspec.drafters import Ngram, Standalone

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
    for k, drafter in enumerate((None, Ngram(depth=12), CHAIN, TREE, jspec.Eagle(depth=3), jspec.Eagle(4, width=3)))
    for window in ((8, 16, 64)[(i + k) % 3],)
    for page_size, chunk in (((1, 16, 5)[(i + k // 2) % 3], (None, 20, 7)[(i + 2 * k) % 3]),)
    if (i + k) % 2
]
"""Every second pair of a kind and a drafter."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "window", "drafter", "page_size", "chunk"), [*OFTEN, *RARELY])
def test_greedy_output_equals_transformers(pair, kind, window, drafter, page_size, chunk, monkeypatch):
    out = check_output(pair(f"gemma4-{kind}", sliding_window=window), drafter, page_size, chunk, monkeypatch)
    if isinstance(drafter, Standalone | jspec.Eagle):
        assert out.stats.accept_length > (1.2 if isinstance(drafter, Standalone) else 1.05)


# Checkpoints


ATOL = 1e-4
"""The order of summation depends on the processor, and differs in `transformers`."""


def as_on_the_hub(raw):
    """The older generation's format, with separate keys for full layers."""
    (full, *_) = raw.pop("per_layer_config").values()
    raw["global_head_dim"], raw["num_global_key_value_heads"] = full["head_dim"], full.get("num_key_value_heads")
    raw["torch_dtype"] = raw.pop("dtype")
    if raw["moe_intermediate_size"] is not None:
        raw["expert_intermediate_size"] = raw.pop("moe_intermediate_size")


@pytest.mark.slow(unless=("dense-new config", "shared-old config", "experts-new config"))
@pytest.mark.parametrize("old_config", [False, True], ids=["new config", "old config"])
@pytest.mark.parametrize("kind", hf.GEMMA4_KINDS)
def test_logits_equal_transformers(tmp_path, kind, old_config):
    oracle = hf.build(f"gemma4-{kind}", seed=3)
    hf.save(oracle, tmp_path, sharded=old_config)
    if old_config:
        edit(tmp_path, as_on_the_hub)
    check_logits(oracle, tmp_path, atol=ATOL)


@pytest.mark.slow(unless=("dense-changes1", "shared-changes4"))
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dense", {"attention_k_eq_v": False, "num_global_key_value_heads": None}),
        ("dense", {"final_logit_softcapping": None, "num_attention_heads": 8}),
        ("dense", {"layer_types": ["full_attention"] * 2}),
        ("dense", {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "sliding_window": 1}),
        ("shared", {"use_double_wide_mlp": False}),
        ("shared", {"num_kv_shared_layers": 0}),
    ],
)
def test_logits_equal_transformers_with_other_options(tmp_path, kind, changes):
    oracle = hf.build(f"gemma4-{kind}", seed=4, **changes)
    check_logits(oracle, hf.save(oracle, tmp_path), atol=ATOL)


def test_the_text_model_of_a_multimodal_one(tmp_path):
    vision = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8, intermediate_size=16)
    text = hf.gemma4_config("shared")
    config = transformers.Gemma4Config(text_config=text.to_dict(), vision_config=vision, audio_config=None)
    whole = hf.randomize(transformers.Gemma4ForConditionalGeneration(config).eval(), seed=3)
    hf.save(whole, tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.vision_tower.") for name in names), "there is nothing to skip"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 96]}))
    edit(tmp_path, lambda raw: raw["text_config"].update(eos_token_id=7))
    loaded = check_logits(lambda ids: whole(input_ids=ids), tmp_path, atol=ATOL)
    assert loaded.eos == (1, 7, 96)


def test_a_tied_head_and_projections_of_sharing_layers_may_be_there(tmp_path):
    oracle = hf.build("gemma4-shared")
    hf.save(oracle, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        tensors[f"model.layers.2.self_attn.{name}"] = tensors[f"model.layers.0.self_attn.{name}"]
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, path)
    check_logits(oracle, tmp_path, atol=ATOL)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.bias", "model.towers.weight", "model.layers.3.x"])
def test_an_unused_tensor_is_an_error(tmp_path, name):
    hf.save(hf.build("gemma4-dense"), tmp_path)
    check_unused(tmp_path, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"vocab_size_per_layer_input": 50}, "vocab_size_per_layer_input=50 with vocab_size=97"),
        ({"layer_types": ["sliding_attention"] * 4}, "the last layer must be full_attention"),
        ({"layer_types": ["full_attention"] * 3}, "must be 4 of"),
        ({"layer_types": ["linear_attention"] * 4}, "must be 4 of sliding_attention, full_attention"),
        ({"per_layer_config": {"1": {"rope_theta": 1.0}}}, "per_layer_config of layer 1"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1.0}}},
            "rope_type='yarn' is not supported; must be default or proportional",
        ),
        ({"num_kv_shared_layers": 3}, "layer 1 has no layer of its kind to share with among the first 1"),
        ({"num_key_value_heads": 3}, "is not a multiple of kv_heads=3"),
        ({"sliding_window": None}, "sliding_window=None: must be an int"),
        ({"head_dim": "absent"}, "'head_dim' is missing"),
    ],
)
def test_unsupported_configs_are_errors(tmp_path, change, message):
    check_refused(
        tmp_path,
        {**hf.gemma4_config("shared").to_dict(), "architectures": ["Gemma4ForCausalLM"], **change},
        message,
    )


@pytest.mark.parametrize("kind", hf.GEMMA4_KINDS)
def test_our_checkpoint_loads_in_transformers_and_here(tmp_path, pair, kind):
    check_saved(tmp_path, pair(f"gemma4-{kind}", sliding_window=16))
