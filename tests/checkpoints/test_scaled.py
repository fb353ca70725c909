"""Checkpoints that store 8-bit matrices with scales: linear layers keep them as they are, or are widened."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import toy
from safetensors.numpy import save_file
from scaled_files import MODELS, is_linear, load_file, values

import jspec
from jspec.checkpoints import language_model
from jspec.checkpoints.files import CheckpointError
from jspec.models.quantized import Quantized, is_matrix, quantize

PROMPTS = [ids[:length].tolist() for ids, length in zip(toy.IDS, toy.LENGTHS, strict=True)]
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": {"dynamic": True}}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
INT8 = {
    **COMPRESSED,
    "format": "int-quantized",
    "config_groups": {"group_0": {"weights": {**WEIGHTS, "type": "int"}}},
}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 16], "activation_scheme": "dynamic"}
FORMATS = {"blocks": BLOCKS, "channels": COMPRESSED, "tensors": COMPRESSED, "int8": INT8}


def store(path, model, form, head=False):
    """Writes a checkpoint with 8-bit matrices, and one with their values in float32. head: the LM head, too."""
    config, make = MODELS[model]
    for kind in ("narrow", "wide"):
        language_model.save(path / kind, config, make(), dtype="float32")
    rng, narrow, wide = np.random.default_rng(0), {}, {}
    for name, tensor in load_file(path / "wide" / "model.safetensors").items():
        narrow[name] = wide[name] = tensor
        if not is_linear(name) and not (head and name == "lm_head.weight"):
            continue
        shape = {
            "blocks": [-(-size // each) for size, each in zip(tensor.shape, (24, 16), strict=True)],
            "tensors": [1, 1],
        }.get(form, [len(tensor), 1])
        scale = (np.abs(tensor).max() / (448 if form != "int8" else 127) * rng.uniform(1, 2, shape)).astype(np.float32)
        whole = scale
        if form == "blocks":
            whole = np.kron(scale, np.ones((24, 16), np.float32))[: tensor.shape[0], : tensor.shape[1]]
        kind = np.int8 if form == "int8" else ml_dtypes.float8_e4m3fn
        narrow[name] = np.ascontiguousarray(
            (np.rint(tensor / whole) if form == "int8" else tensor / whole).astype(kind)
        )
        narrow[name + ("_scale_inv" if form == "blocks" else "_scale")] = scale[0] if form == "tensors" else scale
        wide[name] = narrow[name].astype(np.float32) * whole
        if form == "int8":
            narrow[name.replace(".weight", ".input_scale")] = np.ones(1, np.float32)
    save_file(narrow, path / "narrow" / "model.safetensors")
    save_file(wide, path / "wide" / "model.safetensors")
    file = path / "narrow" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": FORMATS[form]}))
    return path


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A function that writes a pair of checkpoints once."""
    made = {}

    def pair(model, form, head=False):
        key = (model, form, head)
        if key not in made:
            made[key] = store(tmp_path_factory.mktemp(model), *key)
        return made[key]

    return pair


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_linear_layers_are_those_stored(stored, model, form):
    path = stored(model, form, head=form == "channels")
    got = jspec.load(path / "narrow").params.target
    expected = jspec.load(path / "wide").params.target
    for (name, x), (_, y) in zip(values(got), values(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), jax.tree_util.keystr(name))
    found = jax.tree_util.tree_leaves_with_path(got, is_leaf=is_matrix)
    narrow = {path[-1].name: leaf for path, leaf in found if is_matrix(leaf)}
    fields = {"llama": {"qkv"}, "experts": {"qkv"}, "latents": {"down_projection", "query"}}[model]
    assert set(narrow) == fields | {"o", "gate_up", "down"} | ({"lm_head"} if form == "channels" else set())
    kind = np.int8 if form == "int8" else ml_dtypes.float8_e4m3fn
    for name, leaf in narrow.items():
        assert (leaf.narrow.dtype, leaf.scale.dtype, leaf.dtype) == (kind, np.float32, np.float32)
        rows = leaf.shape[-2]
        assert leaf.group == (16 if form == "blocks" and rows > 16 else None), name
        assert leaf.scale.shape == (*leaf.shape[:-2], -(-rows // 16) if form == "blocks" else 1, leaf.shape[-1])


@pytest.mark.slow(unless=("llama-blocks", "experts-blocks"))
@pytest.mark.parametrize("form", ("blocks", "channels"))
@pytest.mark.parametrize("model", ("llama", "experts", "latents"))
def test_logits_are_those_of_the_widened_weights(stored, model, form):
    config, _ = MODELS[model]
    loaded = [jspec.load(stored(model, form) / kind) for kind in ("narrow", "wide")]
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, (2, 9)), jnp.int32)

    @jax.jit
    def logits(params):
        cache = loaded[0].target.init_cache(params, 2, 16, 4)
        return loaded[0].target.apply(params, tokens, jnp.arange(9, dtype=jnp.int32)[None], cache, None).logits

    got, expected = (np.asarray(logits(each.params.target)) for each in loaded)
    np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.slow
def test_drafted_tokens_and_rounds_are_those_of_the_widened_weights(stored):
    path = stored("llama", "blocks")
    options = {"max_new_tokens": 20, "page_size": 16}
    narrow, wide = (jspec.load(path / kind, draft=path / kind) for kind in ("narrow", "wide"))
    plain = jspec.generate(narrow, PROMPTS, drafter=None, **options)
    runs = [jspec.generate(model, PROMPTS, drafter=jspec.Standalone(depth=3), **options) for model in (narrow, wide)]
    assert runs[0].tokens == runs[1].tokens == plain.tokens
    np.testing.assert_array_equal(runs[0].stats.rounds, runs[1].stats.rounds)
    assert runs[0].stats.accept_length > 2


@pytest.mark.parametrize("form", ("blocks", "int8"))
def test_other_weights_can_be_chosen(stored, form):
    path = stored("llama", form)
    wide = jspec.load(path / "wide").params.target
    for weights in ("wide", "fp8"):
        got = jspec.load(path / "narrow", weights=weights).params.target
        if weights == "wide":
            assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {np.dtype(np.float32)}
        for x, y in ((got.layers[0].qkv, wide.layers[0].qkv), (got.lm_head, wide.lm_head)):
            y = y if weights == "wide" else jax.jit(quantize, static_argnames="weights")(y, weights=weights)
            for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
                np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    half = jspec.load(path / "narrow", dtype="bfloat16").params.target
    assert half.embed.dtype == jnp.bfloat16 and isinstance(half.layers[0].o, Quantized)
    assert half.layers[0].o.dtype == jnp.bfloat16


def test_memory_counts_what_is_stored(stored, monkeypatch):
    from jspec.loading import memory

    size = memory.tree_bytes(jspec.load(stored("experts", "blocks") / "narrow").params)
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: (size, 10**9))
    jspec.load(stored("experts", "blocks") / "narrow")
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: (size - 1, 10**9))
    with pytest.raises(ValueError, match="do not fit"):
        jspec.load(stored("experts", "blocks") / "narrow")


def test_exact_forwards_refuse_them_before_they_are_read(stored):
    with pytest.raises(ValueError, match=r"the weights are quantized, which exact=True does not support: .*'wide'"):
        jspec.load(stored("llama", "channels") / "narrow", exact=True)
    assert jspec.load(stored("llama", "channels") / "narrow", exact=True, weights="wide").target.exact


def group(**changes):
    return {**COMPRESSED, "config_groups": {"group_0": {"weights": {**WEIGHTS, **changes}}}}


@pytest.mark.parametrize(
    "method",
    (
        group(num_bits=4),
        group(strategy="group"),
        group(symmetric=False),
        group(dynamic=True),
        group(type="int"),
        {**COMPRESSED, "format": "nvfp4-pack-quantized"},
        {**COMPRESSED, "config_groups": {}},
        {**COMPRESSED, "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}},
        {"quant_method": "mxfp4"},
        {"quant_method": "fp8"},
        {**BLOCKS, "fmt": "e5m2"},
    ),
    ids=lambda method: "-".join(map(str, [*method][:3])),
)
def test_other_methods_are_refused(stored, tmp_path, method):
    source = stored("llama", "channels") / "narrow"
    raw = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": method}))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"quantization_config=.*is not supported; must have quant_method='fp8'"):
        jspec.load(tmp_path)


@pytest.mark.parametrize(
    ("form", "model", "change", "message"),
    (
        ("blocks", "llama", {"layers.0.self_attn.o_proj.weight_scale_inv": None}, "weight_scale_inv' is missing"),
        ("channels", "llama", {"layers.0.self_attn.o_proj.weight_scale": np.ones((3, 1), "f4")}, r"has shape \(3, 1\)"),
        ("channels", "llama", {"layers.1.mlp.up_proj.weight_scale": np.full((64, 1), np.nan, "f4")}, "are NaN or inf"),
        ("channels", "llama", {"layers.1.self_attn.q_proj.weight": "nan"}, "q_proj.weight has values that are NaN"),
        ("blocks", "experts", {"layers.0.mlp.experts.1.up_proj.weight": "wide"}, "must all have 8 bits, or none"),
    ),
)
def test_damaged_checkpoints_are_refused(stored, tmp_path, form, model, change, message):
    source = stored(model, form) / "narrow"
    tensors = load_file(source / "model.safetensors")
    for name, value in change.items():
        name = f"model.{name}"
        old = tensors.pop(name)
        if isinstance(value, str):
            tensors[name] = old.astype(np.float32)
            if value == "nan":
                tensors[name] = tensors[name] * np.float32(np.nan)
                tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
            else:
                tensors.pop(name + "_scale_inv")
        elif value is not None:
            tensors[name] = value
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=message):
        jspec.load(tmp_path)


def test_a_part_that_is_stored_wide_widens_the_others(stored, tmp_path):
    source = stored("llama", "channels")
    tensors, name = load_file(source / "narrow" / "model.safetensors"), "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = load_file(source / "wide" / "model.safetensors")[name]
    del tensors[name + "_scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "narrow" / "config.json").read_bytes())
    first, second = jspec.load(tmp_path).params.target.layers
    expected = jspec.load(source / "wide").params.target.layers[0]
    np.testing.assert_array_equal(first.qkv, expected.qkv)
    assert isinstance(second.qkv, Quantized) and isinstance(first.o, Quantized)
