"""gpt-oss: its hidden states equal those of `transformers`; defaults, and options of `load`."""

import json

import hf
import oss
import pytest
from parity import check_logits, transformers

import jspec
from jspec.checkpoints import language_model

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.slow(unless="sharded")
@pytest.mark.parametrize("layout", ["one file", "sharded"])
def test_logits_and_captured_layers_equal_transformers(tmp_path, layout):
    """With some products beyond the bounds of the gate; one layout is that of the older generation."""
    oracle, outside = hf.build("gpt_oss", seed=3), []
    experts = oracle.model.layers[0].mlp.experts
    experts.register_forward_hook(
        lambda module, given, _: outside.append(
            ((given[0] @ module.gate_up_proj[0] + module.gate_up_proj_bias[0]).abs() > module.limit).any()
        )
    )
    hf.save(oracle, tmp_path, sharded=layout == "sharded", old_config=layout == "sharded")
    check_logits(oracle, tmp_path, "gpt_oss")
    assert any(outside)


def config_json(**changes):
    raw = {**hf.GPT_OSS, "architectures": ["GptOssForCausalLM"], "rms_norm_eps": 1e-5, **changes}
    return {key: value for key, value in raw.items() if value != "absent"}


def test_what_a_configuration_leaves_out_has_the_defaults_of_transformers(tmp_path):
    """Every second layer slides, and other keys have the defaults of `transformers`."""
    left_out = ("head_dim", "num_key_value_heads", "sliding_window", "swiglu_limit")
    raw = config_json(**dict.fromkeys(left_out, "absent"), num_attention_heads=8)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = language_model.parse_config(language_model.Source(tmp_path).config)
    theirs = transformers.GptOssConfig(**{key: value for key, value in raw.items() if key != "architectures"})
    assert theirs.layer_types == [SLIDING, FULL, SLIDING]
    assert found.windows == (theirs.sliding_window, None, theirs.sliding_window)
    assert (found.head_dim, found.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    # Versions up to 5.17 have constants.
    gate = getattr(theirs, "swiglu_limit", 7.0), getattr(theirs, "swiglu_alpha", 1.702)
    assert (found.gate_limit, found.gate_slope) == gate


@pytest.mark.parametrize(
    ("options", "target"), [({"exact": True}, oss.KINDS["sinks"].exactly()), ({"tensor": 1}, oss.KINDS["sinks"])]
)
def test_a_model_is_loaded_with_options_of_the_family(tmp_path, options, target):
    language_model.save(tmp_path, oss.KINDS["sinks"], oss.params("sinks"), dtype="float32")
    assert jspec.load(tmp_path, **options).target == target


def test_an_assistant_cannot_be_trained_for_it():
    learner = pytest.importorskip("jspec.train.assistant", reason='needs optax: pip install -e ".[train]"')
    with pytest.raises(ValueError, match="attention has sinks yet, and the target is of type GptOss"):
        learner.require_keys(oss.KINDS["sinks"])
