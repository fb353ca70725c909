"""Qwen3-Next and Qwen3.5: output equals `transformers`' plain greedy decoding, and checkpoints load completely."""

import dataclasses
import functools
import json

import hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from safetensors.numpy import load_file, save_file

import jspec
from jspec.bench.presets import PRESETS
from jspec.checkpoints import language_model
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError
from jspec.core import tree
from jspec.core.types import DraftTree, Params
from jspec.drafters import Ngram, Standalone
from jspec.engine import run
from jspec.models import MtpParams

torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[parity]"')
transformers = pytest.importorskip("transformers", reason='needs transformers: pip install -e ".[parity]"')

slow = pytest.mark.slow
NEW_TOKENS = 24
LENGTHS = (1, 9, 30, 75)
"""The last prompt is longer than a block of the delta rule."""
LINEAR, FULL = "linear_attention", "full_attention"
LAYERS = {
    "qwen3_next": (LINEAR, FULL, LINEAR),
    "qwen3_5": (LINEAR, FULL),
    "qwen3_5_moe": (LINEAR, LINEAR, LINEAR, FULL),
}


def build(family, **changes):
    layers = changes.pop("layer_types", LAYERS[family])
    return hf.build(family, layer_types=list(layers), num_hidden_layers=len(layers), **changes)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Such small models are slower with two threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A function from a family to a target with a noisy copy as its draft, and the target's oracle."""

    @functools.cache
    def make(family):
        return hf.noisy_pair(lambda: build(family), 0.01, tmp_path_factory.mktemp(family))

    return make


@pytest.fixture(scope="module")
def expected(pair):
    """A function that returns prompts of several lengths and the oracle's continuations."""

    @functools.cache
    def make(family):
        return hf.continuations(pair(family)[1], LENGTHS, NEW_TOKENS)

    return make


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


def matrix():
    for i, point in enumerate([*OFTEN, *RARELY]):
        yield pytest.param(*point, marks=() if i < len(OFTEN) else slow)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "drafter", "page_size", "chunk"), list(matrix()))
def test_greedy_output_equals_transformers(pair, expected, family, drafter, page_size, chunk, monkeypatch):
    model, oracle = pair(family)
    prompts, wanted = expected(family)
    if drafter == "llama":
        model, drafter = with_llama(model), CHAIN
    elif isinstance(drafter, jspec.Eagle):
        texts = np.zeros((len(LENGTHS), max(LENGTHS) + NEW_TOKENS), np.int32)
        for row, prompt, new in zip(texts, prompts, wanted, strict=True):
            row[: len(prompt) + len(new)] = prompt + new
        head = dataclasses.replace(toy.HEAD, vocab_size=97, draft_vocab_size=80, capture_layers=(0, 1, 2))
        params = toy.fit_head(model.target, head, model.params.target, texts)
        model = dataclasses.replace(model, params=params, draft=head)
    if chunk is not None:
        monkeypatch.setattr(run, "prefill_chunk", lambda batch: chunk)
    out = jspec.generate(model, prompts, drafter=drafter, max_new_tokens=NEW_TOKENS, page_size=page_size)
    for prompt, ours, theirs in zip(prompts, out.tokens, wanted, strict=True):
        assert ours == theirs, hf.margin(oracle, prompt, ours, theirs)
    if isinstance(drafter, Standalone) and model.draft == model.target:
        assert out.stats.accept_length > 1.5


def test_a_rejected_branch_leaves_no_trace(pair):
    """After a tree and the commit of one path, the cache and the next logits equal those of a plain run."""
    model, _ = pair("qwen3_5")
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


def read_logits(loaded, ids):
    cache = loaded.config.init_cache(loaded.params, len(ids), 16, 16)
    given = loaded.params, tree.chain(jnp.asarray(ids, jnp.int32)), cache, None
    return np.asarray(jax.jit(loaded.config.forward)(*given).logits)


def check_logits(oracle, directory, count=40):
    loaded = language_model.load(directory, dtype="float32")
    ids = np.random.default_rng(1).integers(0, loaded.config.vocab_size, (2, count))
    with torch.no_grad():
        wanted = oracle(torch.tensor(ids)).logits.numpy()
    # Compared with float64, both are 2e-4 off at logits of 8: gated norms amplify small values.
    np.testing.assert_allclose(read_logits(loaded, ids), wanted, atol=1e-3, rtol=0)
    return loaded


def edit(directory, change):
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    changed = change(raw)
    path.write_text(json.dumps(raw if changed is None else changed))


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
        pytest.param(
            "qwen3_next", {"decoder_sparse_step": 2, "linear_conv_kernel_dim": 3}, False, marks=pytest.mark.slow
        ),
        pytest.param("qwen3_5_moe", {"linear_num_value_heads": 2}, False, marks=pytest.mark.slow),
        pytest.param("qwen3_5", {"head_dim": 32, "num_attention_heads": 6}, False, marks=pytest.mark.slow),
    ],
)
def test_logits_equal_transformers(tmp_path, family, changes, old):
    oracle = build(family, seed=3, **changes)
    hf.save(oracle, tmp_path, sharded=old)
    if old:
        edit(tmp_path, as_on_the_hub)
    check_logits(oracle, tmp_path)


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
    loaded = check_logits(lambda ids: whole(input_ids=ids), tmp_path)
    assert loaded.eos == (1, 96)
    (head,) = loaded.params.mtp
    assert loaded.config.mtp_layers == 1
    toy.assert_same(head.layer, loaded.params.layers[1])
    np.testing.assert_array_equal(head.projection, mtp["mtp.fc.weight"].T)
    np.testing.assert_array_equal(head.hidden_norm, 1 + mtp["mtp.pre_fc_norm_hidden.weight"])
    save_file({**tensors, **mtp, "mtp.layers.1.x": np.zeros(3, np.float32)}, path)
    with pytest.raises(
        CheckpointError,
        match=r"1 unused tensor\(s\) in the checkpoint; this text model does not read them: mtp\.layers\.1\.x",
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
    assert found == dataclasses.replace(preset, rope_theta=1e7, rotary_share=0.25)
    assert language_model.describe(found)["num_hidden_layers"] == found.num_layers


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_our_checkpoint_loads_in_transformers_and_here(tmp_path, pair, family):
    model, oracle = pair(family)
    full = next(
        layer
        for layer, attends in zip(model.params.target.layers, model.target.is_full_attention, strict=True)
        if attends
    )
    ones = jnp.ones(32)
    head = MtpParams(ones, 2 * ones, jnp.ones((64, 32)), full, 3 * ones)
    params = dataclasses.replace(model.params.target, mtp=(head,))
    language_model.save(tmp_path, model.target, params, dtype="float32", eos=(1, 96), max_shard_bytes=30_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(theirs) is type(oracle)
    ids = torch.tensor(np.random.default_rng(1).integers(0, 97, (1, 40)))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, oracle(ids).logits, atol=1e-3, rtol=0)
    ours = language_model.load(tmp_path, dtype="float32")
    assert (ours.config, ours.eos) == (dataclasses.replace(model.target, mtp_layers=1), (1, 96))
    toy.assert_same(ours.params, params)


def test_stacked_experts(tmp_path):
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
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), name: np.zeros(3, np.float32)}, path)
    with pytest.raises(
        CheckpointError, match=rf"1 unused tensor\(s\) in the checkpoint; this text model does not read them: {name}"
    ):
        language_model.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ({"layer_types": ["sliding_attention"] * 3}, "must be 3 of linear_attention, full_attention"),
        ({"layer_types": [LINEAR]}, "must be 3 of"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}}, "must be default or mrope"),
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
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v != "absent"}))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        language_model.load(tmp_path)
