"""Qwen3-Next and Qwen3.5: output equals `transformers`' plain greedy decoding, and checkpoints load completely."""

import dataclasses
import json

import hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from parity import check_logits, check_output, check_refused, check_saved, check_unused, edit, transformers
from safetensors.numpy import load_file, save_file

import jspec
from jspec.bench.presets import PRESETS
from jspec.checkpoints import language_model
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError
from jspec.core import tree
from jspec.core.types import DraftTree, Params
from jspec.drafters import Ngram, Standalone
from jspec.models import MtpParams
from jspec.models.rope import Rope

LINEAR, FULL = "linear_attention", "full_attention"
LAYERS = {
    "qwen3_next": (LINEAR, FULL, LINEAR),
    "qwen3_5": (LINEAR, FULL),
    "qwen3_5_moe": (LINEAR, LINEAR, LINEAR, FULL),
}


def sizes(family, layer_types=None):
    layers = layer_types or LAYERS[family]
    return {"layer_types": layers, "num_hidden_layers": len(layers)}


def build(family, seed=0, layer_types=None, **changes):
    return hf.build(family, seed, **sizes(family, layer_types), **changes)


def with_llama(model):
    """The same target with a small Llama as its draft."""
    config = dataclasses.replace(toy.DRAFT, vocab_size=97)
    return dataclasses.replace(
        model, params=Params(model.params.target, toy.random_params(config, seed=1)), draft=config
    )


CHAIN, TREE, WIDE = Standalone(depth=4), Standalone(depth=4, width=3, num_nodes=24), Standalone(depth=2, width=4)
OFTEN = [
    ("qwen3_next", Ngram(depth=12), 16, None),
    ("qwen3_5", Standalone(depth=3, width=2), 1, 20),
]
"""Family, drafter, page size and columns of a chunk; "llama": a chain of another family's draft."""
RARELY = [
    (family, drafter, page_size, chunk)
    for i, family in enumerate(LAYERS)
    for k, drafter in enumerate((None, Ngram(depth=12), CHAIN, TREE, WIDE, "llama", jspec.Eagle(depth=4, width=3)))
    for page_size, chunk in (((1, 16, 5)[(i + k) % 3], (None, 20, 7, 70)[(i + k) % 4]),)
    if (i + k) % 3 == 0
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "drafter", "page_size", "chunk"), [*OFTEN, *RARELY])
def test_greedy_output_equals_transformers(pair, family, drafter, page_size, chunk, monkeypatch):
    ours, model = pair(family, **sizes(family)), None
    if drafter == "llama":
        model, drafter = with_llama(ours.model), CHAIN
    out = check_output(ours, drafter, page_size, chunk, monkeypatch, model)
    if isinstance(drafter, Standalone) and model is None:
        assert out.stats.accept_length > 1.5


def test_a_rejected_branch_leaves_no_trace(pair):
    """After a tree and the commit of one path, the cache and the next logits equal those of a plain run."""
    model = pair("qwen3_5", **sizes("qwen3_5")).model
    target, params = model.target, model.params.target
    rng, start = np.random.default_rng(5), jnp.array([6, 3], jnp.int32)
    forward = jax.jit(target.forward)
    commit = jax.jit(lambda cache, *given: cache.commit(*given))
    empty = target.init_cache(params, 2, 32, 4)
    prompt = tree.chain(jnp.asarray(rng.integers(0, 97, (2, 6)), jnp.int32))
    cache = commit(empty, forward(params, prompt, empty, None).rows, jnp.zeros(2, jnp.int32), None, start)
    tokens = jnp.asarray(rng.integers(0, 97, (2, 8)), jnp.int32)
    drafted = DraftTree(tokens, jnp.array([[0, 0, 0, 1, 2, 3, 3, 6], [0, 0, 1, 2, 2, 3, 4, 4]], jnp.int32))
    path, length = jnp.array([[0, 1, 3, 6], [0, 1, 2, 2]], jnp.int32), jnp.array([4, 3], jnp.int32)
    after = commit(cache, forward(params, drafted, cache, start).rows, start, path, length)
    for column in range(4):
        one = tree.chain(jnp.take_along_axis(tokens, path[:, column, None], axis=1))
        rows = forward(params, one, cache, start + column).rows
        cache = commit(cache, rows, start + column, None, (column < length).astype(jnp.int32))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), after, cache)


# Checkpoints


ATOL = 1e-3
"""Compared with float64, both are 2e-4 off at logits of 8: gated norms amplify small values."""


def as_on_the_hub(raw):
    """The older generation's format of Qwen3-Next."""
    rope = raw.pop("rope_parameters")
    raw |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"]}
    raw |= {"rope_scaling": None, "full_attention_interval": 2, "torch_dtype": raw.pop("dtype")}
    del raw["layer_types"]


@pytest.mark.slow(unless="qwen3_next-changes1-False")
@pytest.mark.parametrize(
    ("family", "changes", "old"),
    [
        ("qwen3_next", {"layer_types": [LINEAR, FULL] * 2}, True),
        ("qwen3_next", {"norm_topk_prob": False, "mlp_only_layers": [1], "tie_word_embeddings": True}, False),
        pytest.param("qwen3_next", {"decoder_sparse_step": 2, "linear_conv_kernel_dim": 3}, False),
        ("qwen3_5_moe", {"linear_num_value_heads": 2}, False),
        ("qwen3_5", {"head_dim": 32, "num_attention_heads": 6}, False),
    ],
)
def test_logits_equal_transformers(tmp_path, family, changes, old):
    oracle = build(family, seed=3, **changes)
    hf.save(oracle, tmp_path, sharded=old)
    if old:
        edit(tmp_path, as_on_the_hub)
    check_logits(oracle, tmp_path, atol=ATOL, count=40)


def test_the_text_model_of_a_multimodal_one_and_its_mtp_head(tmp_path):
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, num_position_embeddings=16
    )
    text = build("qwen3_5").config.to_dict()
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
    loaded = check_logits(lambda ids: whole(input_ids=ids), tmp_path, atol=ATOL, count=40)
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
    assert language_model.describe(found)["num_hidden_layers"] == found.num_layers


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_our_checkpoint_loads_in_transformers_and_here(tmp_path, pair, family):
    ours = pair(family, **sizes(family))
    model = ours.model
    full = next(
        layer
        for layer, attends in zip(model.params.target.layers, model.target.is_full_attention, strict=True)
        if attends
    )
    ones = jnp.ones(32)
    head = MtpParams(ones, 2 * ones, jnp.ones((64, 32)), full, 3 * ones)
    params = dataclasses.replace(model.params.target, mtp=(head,))
    check_saved(tmp_path, ours, dataclasses.replace(model.target, mtp_layers=1), params, atol=1e-3)


def test_stacked_experts_are_those_of_separate_tensors(tmp_path):
    oracle = build("qwen3_5_moe", layer_types=[LINEAR], seed=2)
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


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.bias", "model.towers.weight", "model.layers.3.x"])
def test_an_unused_tensor_is_an_error(tmp_path, name):
    hf.save(build("qwen3_5"), tmp_path)
    check_unused(tmp_path, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"is_causal": False}, "is_causal=False"),
        ({"text_config": {"is_causal": False}}, "text_config.is_causal=False"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ({"layer_types": ["sliding_attention"] * 3}, "must be 3 of linear_attention, full_attention"),
        ({"layer_types": [LINEAR]}, "must be 3 of"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1.0}}, "must be default or linear or"),
        (
            {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.2}},
            "partial_rotary_factor=0.2: must rotate a positive, even number",
        ),
        ({"linear_num_value_heads": 3}, "value_heads=3 is not a multiple of key_heads=2"),
        ({"num_key_value_heads": 3}, "is not a multiple of num_kv_heads=3"),
        ({"num_experts": 0, "intermediate_size": "absent"}, "'intermediate_size' is missing"),
        ({"linear_key_head_dim": "absent"}, "'linear_key_head_dim' is missing"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim=None: must be an int"),
    ],
)
def test_unsupported_configs_are_errors(tmp_path, change, message):
    raw = {**build("qwen3_next").config.to_dict(), "architectures": ["Qwen3NextForCausalLM"], **change}
    check_refused(tmp_path, raw, message)


def test_a_key_that_transformers_ignores_is_an_error(tmp_path):
    """Qwen3.5's weights of experts are normalized in any case; Qwen3-Next's by the key."""
    raw = build("qwen3_5_moe").config.to_dict() | {"architectures": ["Qwen3_5MoeForCausalLM"], "norm_topk_prob": False}
    check_refused(tmp_path, raw, r"norm_topk_prob=False \(must be True\)")


# What changes the forward of `transformers`, or is often in configurations, for a change of every key.
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0}
FLIPS = {
    **{
        "rms_norm_eps": 0.1,
        "vocab_size": 96,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
    },
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


@pytest.mark.slow(unless=("qwen3_next-is_causal", "qwen3_5_moe-norm_topk_prob", "qwen3_5-sections"))
@pytest.mark.parametrize("key", FLIPS)
@pytest.mark.parametrize("family", LAYERS)
def test_a_changed_key_changes_what_it_changes_in_transformers(tmp_path, family, key):
    """One key of a config.json is another: the logits are those of `transformers` with it, or it is refused by name."""
    torch, ids = pytest.importorskip("torch"), toy.IDS[:1, :16]
    hf.save(build(family), tmp_path)
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
