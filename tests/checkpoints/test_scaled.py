"""Checkpoints that store 8-bit matrices with scales: linear layers keep them as they are, or are widened."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scaled_files as files

import jspec
from jspec.checkpoints.files import CheckpointError
from jspec.models.quantized import Quantized, is_matrix, quantize

WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": {"dynamic": True}}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
INT8 = {**COMPRESSED, "format": "int-quantized", "config_groups": {"group_0": {"weights": {**WEIGHTS, "type": "int"}}}}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 16], "activation_scheme": "dynamic"}
FORMATS = {"blocks": BLOCKS, "channels": COMPRESSED, "tensors": COMPRESSED, "int8": INT8}


def store(path, model, form, head=False):
    """Writes a checkpoint with 8-bit matrices, and one with their values in float32. head: the LM head, too."""
    config, make = files.MODELS[model]
    rng = np.random.default_rng(0)

    def change(name, tensor):
        if not files.is_linear(name) and not (head and name == "lm_head.weight"):
            return None
        shape = {
            "blocks": [-(-size // each) for size, each in zip(tensor.shape, (24, 16), strict=True)],
            "tensors": [1, 1],
        }.get(form, [len(tensor), 1])
        scale = (np.abs(tensor).max() / (448 if form != "int8" else 127) * rng.uniform(1, 2, shape)).astype(np.float32)
        whole = scale
        if form == "blocks":
            whole = np.kron(scale, np.ones((24, 16), np.float32))[: tensor.shape[0], : tensor.shape[1]]
        values = np.rint(tensor / whole) if form == "int8" else tensor / whole
        values = np.ascontiguousarray(values.astype(np.int8 if form == "int8" else ml_dtypes.float8_e4m3fn))
        ending = "_scale_inv" if form == "blocks" else "_scale"
        narrow = {name: values, name + ending: scale[0] if form == "tensors" else scale}
        if form == "int8":
            narrow[name.replace(".weight", ".input_scale")] = np.ones(1, np.float32)
        return narrow, values.astype(np.float32) * whole

    return files.store(path, config, make(), FORMATS[form], change)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A function that writes a pair of checkpoints once."""
    return functools.cache(lambda model, form, head=False: store(tmp_path_factory.mktemp(model), model, form, head))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", files.MODELS)
def test_linear_layers_are_those_stored(stored, model, form):
    path = stored(model, form, head=form == "channels")
    got = jspec.load(path / "narrow").params.target
    expected = jspec.load(path / "wide").params.target
    files.assert_same_values(got, expected)
    leaves = jax.tree_util.tree_leaves_with_path(got, is_leaf=is_matrix)
    narrow = {path[-1].name: leaf for path, leaf in leaves if is_matrix(leaf)}
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
    files.assert_same_logits(*(jspec.load(stored(model, form) / kind) for kind in ("narrow", "wide")))


@pytest.mark.slow
def test_drafted_tokens_and_rounds_are_those_of_the_widened_weights(stored):
    path, drafter = stored("llama", "blocks"), jspec.Standalone(depth=3)
    models = (jspec.load(path / kind, draft=path / kind) for kind in ("narrow", "wide"))
    files.assert_same_rounds(*models, files.PROMPTS, drafter, above=2, max_new_tokens=20, page_size=16)


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
    files.assert_stored_bytes_are_counted(stored("experts", "blocks") / "narrow", monkeypatch)


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
    files.damaged(stored("llama", "channels") / "narrow", tmp_path, quantization_config=method)
    with pytest.raises(CheckpointError, match=r"quantization_config=.*is not supported; must have quant_method='fp8'"):
        jspec.load(tmp_path)


NAN = np.full((32, 32), np.nan, ml_dtypes.float8_e4m3fn)
EXPERT = "mlp.experts.1.up_proj.weight"


DAMAGED = (
    ("blocks", "llama", {"self_attn.o_proj.weight_scale_inv": None}, "weight_scale_inv' is missing"),
    ("channels", "llama", {"self_attn.o_proj.weight_scale": np.ones((3, 1), "f4")}, r"has shape \(3, 1\)"),
    ("channels", "llama", {"mlp.up_proj.weight_scale": np.full((64, 1), np.nan, "f4")}, "are NaN or inf"),
    ("channels", "llama", {"self_attn.k_proj.weight": NAN}, "k_proj.weight has values that are NaN"),
    ("blocks", "experts", {EXPERT: np.ones((24, 32), "f4"), f"{EXPERT}_scale_inv": None}, "must all have 8 bits, or"),
)


@pytest.mark.parametrize(("form", "model", "change", "message"), DAMAGED)
def test_damaged_checkpoints_are_refused(stored, tmp_path, form, model, change, message):
    tensors = {f"model.layers.0.{name}": value for name, value in change.items()}
    source = stored(model, form) / "narrow"
    assert tensors.keys() <= files.load_file(source / "model.safetensors").keys()
    with pytest.raises(CheckpointError, match=message):
        jspec.load(files.damaged(source, tmp_path, tensors))


def test_a_part_that_is_stored_wide_widens_the_others(stored, tmp_path):
    source, name = stored("llama", "channels"), "model.layers.0.self_attn.k_proj.weight"
    wide = files.load_file(source / "wide" / "model.safetensors")[name]
    files.damaged(source / "narrow", tmp_path, {name: wide, f"{name}_scale": None})
    first, second = jspec.load(tmp_path).params.target.layers
    expected = jspec.load(source / "wide").params.target.layers[0]
    np.testing.assert_array_equal(first.qkv, expected.qkv)
    assert isinstance(second.qkv, Quantized) and isinstance(first.o, Quantized)
