"""The config.json of EAGLE heads: the meaning of the keys in each layout, and unsupported values."""

import json
from dataclasses import replace
from functools import partial

import deepseek
import eagle_files
import pytest
from eagle_files import TARGET, edit, load, random_head
from eagle_oracle import layer_config

from jspec.checkpoints import drafts, eagle, speculators
from jspec.checkpoints.language_model import CheckpointError
from jspec.models.rope import Llama3Rope, Rope


@pytest.fixture
def head(tmp_path):
    """A function that writes a random head."""
    return partial(eagle_files.make_head, tmp_path / "head")


def test_the_layers_configuration_only_has_differences(head):
    """Missing keys have the defaults of the layer's kind, not those of a Llama's config.json."""

    def shorten(raw, kind):
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_hidden_layers",
            "head_dim",
        )
        layer = {key: raw["transformer_layer_config"][key] for key in sizes}
        return edit(raw, transformer_layer_config={**layer, "num_key_value_heads": 2, "model_type": kind})

    config = load(head(partial(shorten, kind="llama"), layout="speculators")).config
    assert (config.rms_norm_eps, config.rope.theta, config.max_length) == (1e-6, 1e4, 2048)
    config = load(head(partial(shorten, kind="qwen3"), layout="speculators", qk_norm=True)).config
    assert (config.rms_norm_eps, config.rope.theta, config.max_length) == (1e-6, 1e4, 32768)
    with pytest.raises(CheckpointError, match="'layers.0.self_attn.q_norm.weight' is missing"):
        load(head(partial(shorten, kind="qwen3"), layout="speculators"))


@pytest.mark.slow
def test_layer_defaults_are_those_of_transformers(needs):
    transformers = needs("transformers")
    for kind, defaults in speculators.LAYER_DEFAULTS.items():
        theirs = transformers.AutoConfig.for_model(kind).to_dict()
        assert defaults == {key: theirs[key] for key in defaults}
        assert theirs["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
        assert theirs.get("head_dim", 128) == 128 and theirs["num_key_value_heads"] == 32


def test_defaults_of_the_older_layout(head):
    config = load(head(lambda raw: edit(raw, max_position_embeddings="absent", rms_norm_eps="absent"))).config
    assert (config.max_length, config.rope.theta, config.capture_layers) == (512, 1e4, (2, 4, 5))
    assert config.rms_norm_eps == 1e-6


@pytest.mark.parametrize(
    "layout, keys, capture_layers",
    [
        ("eagle1", {}, (9,)),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}}, (2, 5, 8)),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 4, 6]}}, (0, 5, 7)),
        # The last layer of 8 leaves 7, so these enter.
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}}, (1, 4, 8)),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 4, 5)),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}, (1, 4, 8)),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": None}, (2, 4, 5)),
    ],
)
def test_captured_layers(head, layout, keys, capture_layers):
    assert load(head(layout=layout, **keys)).config.capture_layers == capture_layers


@pytest.mark.parametrize(
    ("ids", "inputs", "outputs"),
    [([2, 4, 5], (2, 4, 5), "what enters .* as vLLM does"), ([0, 3, 6], (0, 3, 6), "what leaves .* as SGLang does")],
)
def test_ids_that_writers_count_differently(head, ids, inputs, outputs):
    """With latent attention, both servers count what enters layers."""
    directory = head(eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    with pytest.warns(UserWarning, match=outputs):
        captured = load(directory).config.capture_layers
    assert captured == (inputs if "enters" in outputs else tuple(i + 1 for i in ids))
    latent = replace(deepseek.MLA, vocab_size=TARGET.vocab_size, hidden_size=16, num_layers=8)
    assert load(directory, latent).config.capture_layers == inputs


def test_the_number_of_captured_layers(head):
    """Two layers are read if two are listed."""
    raw, stored = random_head()
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 4]}
    two = {"fc.weight": stored["fc.weight"][:, :32]}
    loaded = load(head(eagle_config=ids, tensors=two, num_aux_hidden_states=2))
    assert loaded.config.capture_layers == (2, 5) and loaded.params.fc.shape == (32, 16)
    with pytest.raises(CheckpointError, match=r"fc.weight has shape \(16, 48\), but config.json implies \(16, 32\)"):
        load(head(eagle_config=ids))
    with pytest.raises(CheckpointError, match="num_aux_hidden_states=3: .* selects 2 layers"):
        load(head(eagle_config=ids, tensors=two, num_aux_hidden_states=3))


@pytest.mark.parametrize(
    "layers, ids, message",
    [
        (6, None, r"=\[1, 2, 2\] \(the default, for deeper targets\): must ascend, .* as the target has 6 layers"),
        (8, [1, 6, 4], r"layer_ids=\[1, 6, 4\]: must ascend, from -1 to at most 7, as the target has 8 layers"),
        (8, [1, 4, 9], r"=\[1, 4, 9\]: must ascend"),
        (8, [1, 1, 4], r"=\[1, 1, 4\]: must ascend"),
    ],
)
def test_invalid_captured_layers(head, layers, ids, message):
    directory = head(eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    with pytest.raises(CheckpointError, match=message):
        load(directory, replace(TARGET, num_layers=layers))


UNSUPPORTED = [
    ("eagle3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.* is not supported; must have"),
    ("eagle3", {"hidden_act": "gelu"}, "gelu"),
    ("eagle3", {"layer_types": ["sliding_attention"]}, "'sliding_window' is missing"),
    (
        "eagle3",
        {"layer_types": ["linear_attention"]},
        "layer_types=.'linear_attention'.: must be 1 of sliding_attention, full_attention",
    ),
    ("eagle3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("eagle3", {"logit_scale": 0.25}, "logit_scale"),
    ("eagle3", {"is_causal": False}, "is_causal"),
    ("eagle3", {"rope_scaling": {"rope_type": "axial", "factor": 4.0}}, "axial"),
    ("eagle3", {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor.*missing"),
    ("eagle3", {"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm"),
    ("eagle3", {"eagle_config": {"new_option": 3}}, "eagle_config.new_option=3"),
    ("eagle3", {"fc_norm": True}, r"fc_norm=True.*'fc_norm.0.weight' is missing"),
    ("eagle3", {"norm_before_fc": True}, r"norm_before_fc=True.*'input_norm.weight' is missing"),
    ("eagle3", {"fc_norm": True, "norm_before_fc": True}, "norm_before_fc together with fc_norm"),
    ("eagle3", {"vocab_size": 1086}, "vocab_size=1086, but the target has 61 tokens: must be the same"),
    ("eagle3", {"draft_vocab_size": 62}, "draft_vocab_size=62: must be between 1 and vocab_size=61"),
    ("eagle3", {"draft_vocab_size": 22}, r"d2t has shape \(23,\), but config.json implies \(22,\)"),
    ("eagle3", {"target_hidden_size": 32}, "target_hidden_size=32: must be 16, the target's width"),
    ("eagle3", {"num_key_value_heads": 3}, "multiple"),
    ("eagle3", {"num_hidden_layers": "absent"}, "num_hidden_layers.*missing"),
    ("eagle3", {"intermediate_size": "wide"}, "intermediate_size='wide': must be an int"),
    ("eagle1", {"mlp_bias": True}, "mlp_bias"),
    ("eagle1", {"architectures": ["LlamaForCausalLMEagle3"]}, r"fc.weight has shape \(16, 32\)"),
    ("speculators", {"speculators_model_type": "eagle"}, "speculators_model_type='eagle'"),
    ("speculators", {"speculators_model_type": "peagle", "mask_token_id": 5}, "mask_token_id=5"),
    ("speculators", {"transformer_layer_config": "absent"}, "'transformer_layer_config' is missing"),
    (
        "speculators",
        {"transformer_layer_config": {"model_type": "gemma"}},
        "'gemma' is not supported.*llama, qwen2, qwen3",
    ),
    ("speculators", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
]


@pytest.mark.parametrize("layout, changes, message", UNSUPPORTED)
def test_unsupported_configurations(head, layout, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load(head(lambda raw: edit(raw, **changes), layout=layout))


def test_flags_that_contradict_the_weights(head):
    for options, flag in (({"fc_norm": "fc_norm"}, "fc_norm"), ({"norm_before_fc": True}, "norm_before_fc")):
        with pytest.raises(CheckpointError, match=f"{flag}=False, but the tensor .* is present"):
            load(head(lambda raw, flag=flag: edit(raw, **{flag: False}), **options))
        load(head(lambda raw, flag=flag: edit(raw, **{flag: "absent"}), **options))


def test_an_option_of_the_layer_in_speculators(head):
    def change(raw):
        return edit(raw, transformer_layer_config={**raw["transformer_layer_config"], "mlp_bias": True})

    with pytest.raises(CheckpointError, match="mlp_bias"):
        load(head(change, layout="speculators"))


@pytest.mark.slow
def test_transformers_reads_the_written_config(needs, head, tmp_path):
    transformers = needs("transformers")
    rope = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=64)
    loaded = load(head())
    config = replace(loaded.config, rope=Rope(5e5, rope))
    for layout in eagle.LAYOUTS:
        drafts.save(tmp_path / layout, config, loaded.params, layout=layout)
        assert load(tmp_path / layout).config == config
        layer = layer_config(json.loads((tmp_path / layout / "config.json").read_text()))
        read = transformers.LlamaConfig.from_dict(layer)
        assert read.rope_parameters["rope_theta"] == 5e5 and read.rope_parameters["rope_type"] == "llama3"
        assert (read.hidden_size, read.num_key_value_heads, read.head_dim, read.rms_norm_eps) == (16, 2, 8, 1e-5)
