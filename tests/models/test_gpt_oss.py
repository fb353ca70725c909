"""gpt-oss: output, logits and hidden states equal `transformers`, in contexts of many windows and all layouts."""

import dataclasses
import functools
import json

import hf
import jax
import numpy as np
import oss
import pytest
import toy
from safetensors.numpy import save_file

import jspec
from jspec.checkpoints import language_model
from jspec.checkpoints.files import CheckpointError
from jspec.core import tree
from jspec.core.types import Params
from jspec.drafters import Standalone, Suffix
from jspec.engine import run
from jspec.models import EagleHead

torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[parity]"')
transformers = pytest.importorskip("transformers", reason='needs transformers: pip install -e ".[parity]"')

NEW_TOKENS = 24
LENGTHS = (1, 9, 30, 70)
"""The window has 8 tokens, and the original context 64."""
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Such small models are slower with two threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target with a noisy copy as its draft, and the target's oracle."""
    return hf.noisy_pair(lambda: hf.build("gpt_oss"), 0.1, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def expected(pair):
    """Prompts of several lengths and the oracle's continuations."""
    return hf.continuations(pair[1], LENGTHS, NEW_TOKENS)


def random_head(config: EagleHead):
    """Random weights of an EAGLE-3 head of the whole vocabulary."""
    rng, shapes = np.random.default_rng(3), dataclasses.replace(config.param_shapes(np.float32), ids=None)

    def random(shape):
        values = rng.normal(size=shape.shape).astype(np.float32)
        return values * np.float32(shape.shape[0] ** -0.5) if values.ndim > 1 else 1 + values * np.float32(0.2)

    return jax.device_put(jax.tree.map(random, shapes))


@pytest.fixture(scope="module")
def with_head(pair, expected):
    """The same target with an EAGLE-3 head, random or fitted to the outputs."""

    @functools.cache
    def make(fitted):
        model, texts = pair[0], np.zeros((len(LENGTHS), max(LENGTHS) + NEW_TOKENS), np.int32)
        for row, prompt, new in zip(texts, *expected, strict=True):
            row[: len(prompt) + len(new)] = prompt + new
        shape = dict(vocab_size=97, draft_vocab_size=80 if fitted else 97, target_hidden_size=32)
        head = dataclasses.replace(toy.HEAD, **shape, capture_layers=(0, 1, 3))
        target = model.params.target
        params = toy.fit_head(model.target, head, target, texts) if fitted else Params(target, random_head(head))
        return dataclasses.replace(model, params=params, draft=head)

    return make


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
def test_greedy_output_equals_transformers(pair, expected, with_head, case, monkeypatch):
    drafter, page_size, chunk = CASES[case]
    (model, oracle), (prompts, wanted) = pair, expected
    if "head" in case:
        model = with_head(case.startswith("fitted"))
    if chunk is not None:
        monkeypatch.setattr(run, "prefill_chunk", lambda batch: chunk)
    out = jspec.generate(model, prompts, drafter=drafter, max_new_tokens=NEW_TOKENS, page_size=page_size)
    for prompt, ours, theirs in zip(prompts, out.tokens, wanted, strict=True):
        assert ours == theirs, hf.margin(oracle, prompt, ours, theirs)
    least = {"standalone tree": 1.2, "fitted head tree": 1.05, "random head": 0.99, "random head tree": 0.99}
    assert out.stats.accept_length > least.get(case, 0.99)


@functools.partial(jax.jit, static_argnames="config")
def read(config, params, ids):
    cache = config.init_cache(params, 2, 16, 16)
    layers = tuple(range(config.num_layers + 2))
    return config.forward(params, tree.chain(ids), cache, None, capture_layers=layers)


def check_states(oracle, directory):
    """Logits and the inputs of all layers, which drafts read: the last entry of the oracle's is after the norm."""
    loaded = language_model.load(directory, dtype="float32")
    ids = np.random.default_rng(1).integers(0, 97, (2, 150)).astype(np.int32)
    with torch.no_grad():
        wanted = oracle(torch.tensor(ids), output_hidden_states=True)
    out = read(loaded.config, loaded.params, ids)
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
def test_options(tmp_path, changes):
    oracle = hf.build("gpt_oss", seed=4, **changes)
    check_states(oracle, hf.save(oracle, tmp_path))


@pytest.mark.slow
def test_chunks_trees_and_committed_paths_give_the_logits_of_whole_texts():
    jspec.check_target(jspec.Model("sinks", oss.KINDS["sinks"], Params(oss.params("sinks")), None, (), None))


@pytest.mark.slow
def test_our_checkpoint_loads_in_transformers_and_here(tmp_path, pair):
    model, oracle = pair
    language_model.save(
        tmp_path, model.target, model.params.target, dtype="float32", eos=(1, 96), max_shard_bytes=30_000
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    hf.set_gate(theirs, json.loads((tmp_path / "config.json").read_text()))
    assert type(theirs) is type(oracle)
    ids = torch.tensor(np.random.default_rng(1).integers(0, 97, (1, 40)))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, oracle(ids).logits, atol=1e-6, rtol=0)
    ours = language_model.load(tmp_path, dtype="float32")
    assert (ours.config, ours.eos) == (model.target, (1, 96))
    toy.assert_same(ours.params, model.params.target)


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
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type='llama3' is not supported"),
        ({"swiglu_limit": 0}, "swiglu_limit=0: must be above 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is not supported; must have quant_method='mxfp4'"),
    ],
)
def test_unsupported_configs_are_errors(tmp_path, change, message):
    """Before any weight is read: there are none."""
    (tmp_path / "config.json").write_text(json.dumps(config_json(**change)))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        language_model.load(tmp_path)


def test_what_a_configuration_leaves_out(tmp_path):
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
def test_options_of_the_family(tmp_path, options, target):
    language_model.save(tmp_path, oss.KINDS["sinks"], oss.params("sinks"), dtype="float32")
    assert jspec.load(tmp_path, **options).target == target


def test_an_assistant_cannot_be_trained_for_it():
    learner = pytest.importorskip("jspec.train.assistant", reason='needs optax: pip install -e ".[train]"')
    with pytest.raises(ValueError, match="attention has sinks yet, and the target is of type GptOss"):
        learner.require_keys(oss.KINDS["sinks"])
