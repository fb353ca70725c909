"""gpt-oss: output, logits and hidden states equal `transformers`, in contexts of many windows and all layouts."""

import dataclasses
import json

import hf
import jax
import numpy as np
import oss
import pytest
import toy
from parity import check_output, check_refused, check_saved, read, torch, transformers

import jspec
from jspec.checkpoints import language_model
from jspec.core.types import Params
from jspec.drafters import Standalone, Suffix
from jspec.models import EagleHead

SLIDING, FULL = "sliding_attention", "full_attention"


def random_head(config: EagleHead):
    """Random weights of an EAGLE-3 head of the whole vocabulary."""
    rng, shapes = np.random.default_rng(3), dataclasses.replace(config.param_shapes(np.float32), ids=None)

    def random(shape):
        values = rng.normal(size=shape.shape).astype(np.float32)
        return values * np.float32(shape.shape[0] ** -0.5) if values.ndim > 1 else 1 + values * np.float32(0.2)

    return jax.device_put(jax.tree.map(random, shapes))


def with_random_head(model):
    """The same target with an EAGLE-3 head that is nearly never right."""
    shape = dict(vocab_size=97, draft_vocab_size=97, target_hidden_size=32, capture_layers=(0, 1, 3))
    head = dataclasses.replace(toy.HEAD, **shape)
    return dataclasses.replace(model, params=Params(model.params.target, random_head(head)), draft=head)


CASES = {
    "plain": (None, 16, 20),
    "suffix": (Suffix(depth=8, width=3, num_nodes=20), 5, 20),
    "suffix chain": (Suffix(depth=12), 1, None),
    "standalone tree": (Standalone(depth=4, width=3, num_nodes=24), 16, 7),
    "random head": (jspec.Eagle(depth=3), 16, None),
    "random head tree": (jspec.Eagle(depth=4, width=3, num_nodes=12), 5, 7),
    "fitted head tree": (jspec.Eagle(depth=4, width=3), 1, None),
}
"""Drafter, page size and columns of a chunk. A chain of 12, trees and a chunk of 20 are longer than a window."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_greedy_output_equals_transformers(pair, case, monkeypatch):
    ours = pair("gpt_oss")
    model = with_random_head(ours.model) if case.startswith("random head") else None
    out = check_output(ours, *CASES[case], monkeypatch, model)
    assert out.stats.accept_length > {"standalone tree": 1.2, "fitted head tree": 1.05}.get(case, 0.99)


def check_states(oracle, directory):
    """Logits and the inputs of all layers, which drafts read: the last entry of the oracle's is after the norm."""
    loaded = language_model.load(directory, dtype="float32")
    ids = np.random.default_rng(1).integers(0, 97, (2, 150)).astype(np.int32)
    with torch.no_grad():
        wanted = oracle(torch.tensor(ids), output_hidden_states=True)
    out = read(loaded.config, loaded.params, ids, tuple(range(loaded.config.num_layers + 2)))
    np.testing.assert_allclose(out.logits, wanted.logits.numpy(), atol=5e-5, rtol=0)
    states = np.split(np.asarray(out.hidden), loaded.config.num_layers + 2, axis=-1)
    del states[-2]
    for ours, theirs in zip(states, wanted.hidden_states, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=5e-5, rtol=0)
    return loaded


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
    check_states(oracle, tmp_path)
    assert any(outside)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "attention_bias": False},
        {"layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 1},
        {"layer_types": [FULL] * 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"swiglu_alpha": 1.0, "swiglu_limit": 7.0, "num_experts_per_tok": 4, "num_key_value_heads": 1},
        {"rope_parameters": {**hf.GPT_OSS["rope_parameters"], "truncate": True}, "head_dim": 24},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_logits_equal_transformers_with_other_options(tmp_path, changes):
    oracle = hf.build("gpt_oss", seed=4, **changes)
    check_states(oracle, hf.save(oracle, tmp_path))


@pytest.mark.slow
def test_chunks_trees_and_committed_paths_give_the_logits_of_whole_texts():
    jspec.check_target(jspec.Model("sinks", oss.KINDS["sinks"], Params(oss.params("sinks")), None, (), None))


@pytest.mark.slow
def test_our_checkpoint_loads_in_transformers_and_here(tmp_path, pair):
    check_saved(tmp_path, pair("gpt_oss"))


def config_json(**changes):
    raw = {**hf.GPT_OSS, "architectures": ["GptOssForCausalLM"], "rms_norm_eps": 1e-5, **changes}
    return {key: value for key, value in raw.items() if value != "absent"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"layer_types": [SLIDING] * 4}, "must be 3 of sliding_attention, full_attention"),
        ({"layer_types": ["linear_attention"] * 3}, "must be 3 of sliding_attention, full_attention"),
        ({"sliding_window": None}, "sliding_window=None: must be an int"),
        ({"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads=3"),
        ({"num_experts_per_tok": 7}, "chosen=7: must be between 1 and 6"),
        ({"num_local_experts": "absent"}, "'num_local_experts' is missing"),
        ({"rope_parameters": "absent"}, "'rope_theta' is missing"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, "rope_type='axial' is not supported"),
        ({"swiglu_limit": 0}, "swiglu_limit=0: must be above 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is not supported; must have quant_method='mxfp4'"),
    ],
)
def test_unsupported_configs_are_errors(tmp_path, change, message):
    check_refused(tmp_path, config_json(**change), message)


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
    ("options", "target"),
    [({"exact": True}, oss.KINDS["sinks"].exactly()), ({"tensor": 1}, oss.KINDS["sinks"])],
)
def test_a_model_is_loaded_with_options_of_the_family(tmp_path, options, target):
    language_model.save(tmp_path, oss.KINDS["sinks"], oss.params("sinks"), dtype="float32")
    assert jspec.load(tmp_path, **options).target == target


def test_an_assistant_cannot_be_trained_for_it():
    learner = pytest.importorskip("jspec.train.assistant", reason='needs optax: pip install -e ".[train]"')
    with pytest.raises(ValueError, match="attention has sinks yet, and the target is of type GptOss"):
        learner.require_keys(oss.KINDS["sinks"])
