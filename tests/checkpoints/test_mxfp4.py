"""Checkpoints whose experts are in MXFP4: read exactly, kept in 4 bits, equal to `transformers`, refused if damaged."""

import dataclasses

import jax
import numpy as np
import optional
import oss
import pytest
from random_models import arrays_of, random_weights
from safetensors.numpy import load_file
from scaled_files import assert_same_logits, assert_same_rounds, assert_same_values, damaged, store

import jspec
from jspec.checkpoints import language_model
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.mxfp4 import Mxfp4Tensors
from jspec.checkpoints.source import Source
from jspec.models.moe import Routed
from jspec.models.quantized import dtype_names, is_matrix

METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
CONFIG = dataclasses.replace(oss.KINDS["sinks"], experts=Routed(oss.SHAPE["experts"].router, width=64), hidden_size=32)
"""With one block of each row of the first matrices, and two of the second."""


def decode(nibble: int, exponent: int) -> float:
    """A value of 4 bits, one of sign, two of the exponent and one of the fraction, by its definition."""
    sign, power, fraction = nibble >> 3, nibble >> 1 & 3, nibble & 1
    value = fraction / 2 if power == 0 else (1 + fraction / 2) * 2.0 ** (power - 1)
    return (-value if sign else value) * 2.0 ** (exponent - 127)


def encoded(rng, count, out, width):
    """Random blocks and scales of matrices [out, width], and their values as [width, out]."""
    blocks = rng.integers(0, 256, (count, out, width // 32, 16)).astype(np.uint8)
    scales = rng.integers(119, 125, (count, out, width // 32)).astype(np.uint8)
    wide = np.zeros((count, width, out), np.float32)
    for matrix, row, block, byte in np.ndindex(blocks.shape):
        for half in (0, 1):
            nibble = int(blocks[matrix, row, block, byte]) >> 4 * half & 15
            wide[matrix, 32 * block + 2 * byte + half, row] = decode(nibble, int(scales[matrix, row, block]))
    return blocks, scales, wide


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A checkpoint in MXFP4, and one with its values in float32."""
    rng = np.random.default_rng(0)

    def change(name, tensor):
        if not name.endswith(("gate_up_proj", "down_proj")):
            return None
        count, width, out = tensor.shape
        blocks, scales, wide = encoded(rng, count, out, width)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, wide

    return store(tmp_path_factory.mktemp("mxfp4"), CONFIG, random_weights(CONFIG), METHOD, change)


def experts(params):
    return [matrix for layer in params.layers for matrix in (layer.experts.gate_up, layer.experts.down)]


def test_weights_are_those_that_were_stored(stored):
    """Experts have 4 bits, and 8 for the scale of each block; everything else is as in the other checkpoint."""
    got, expected = (language_model.load(stored / kind, dtype="float32").params for kind in ("narrow", "wide"))
    assert_same_values(got, expected)
    assert sum(map(is_matrix, jax.tree.leaves(got, is_leaf=is_matrix))) == len(experts(got))
    for matrix in experts(got):
        count, rows, columns = matrix.shape
        assert (matrix.narrow.dtype, matrix.scale.dtype, matrix.group) == (np.int32, np.uint8, 32)
        # One block of 128 rows, of which there are 32 or 64.
        assert matrix.narrow.shape == (count, 16, columns) and matrix.filling == 128 - rows
        assert matrix.scale.shape == (count, rows // 32, columns)
    assert dtype_names(got) == ["float32", "float4_e2m1fn", "uint8"]


def test_logits_are_those_of_the_widened_weights(stored):
    assert_same_logits(*(jspec.load(stored / kind, dtype="float32") for kind in ("narrow", "wide")))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_widened_weights_are_exact(stored, dtype):
    got = jspec.load(stored / "narrow", weights="wide", dtype=dtype).params.target
    expected = language_model.load(stored / "wide", dtype="float32").params
    assert not any(map(is_matrix, experts(got)))
    for x, y in zip(experts(got), experts(expected), strict=True):
        assert x.dtype == dtype
        np.testing.assert_array_equal(np.asarray(x, np.float32), y)


@pytest.mark.parametrize("weights", [None, "wide", "fp8"])
def test_memory_is_that_of_the_weights(stored, weights):
    """What is compared with free memory before anything is read."""
    source = Source(stored / "narrow")
    tensors = Mxfp4Tensors(source.safetensors, np.float32)
    tensors.weights = weights
    shapes = tensors.shapes(CONFIG.param_shapes(np.float32))
    made = jspec.load(stored / "narrow", weights=weights, dtype="float32").params.target
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    first = jax.tree.leaves(tensors.memory(CONFIG.param_shapes(np.float32)))
    assert sum(x.size * x.dtype.itemsize for x in first) >= sum(x.nbytes for x in jax.tree.leaves(made))


@pytest.mark.slow
def test_drafted_tokens_and_rounds_are_those_of_the_widened_weights(stored):
    models = (jspec.load(stored / kind, dtype="float32") for kind in ("narrow", "wide"))
    prompts = [[1, 2, 3] * 5, list(range(1, 40))]
    assert_same_rounds(*models, prompts, jspec.Ngram(depth=3), above=1.1, max_new_tokens=24)


@pytest.mark.slow
def test_transformers_reads_the_same_weights(stored):
    torch = optional.needed("torch")
    transformers = optional.needed("transformers")
    method = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        stored / "narrow", dtype=torch.float32, quantization_config=method
    ).state_dict()
    ours = arrays_of(CONFIG, language_model.load(stored / "wide", dtype="float32").params)
    names = [name for name in ours if name.endswith(("gate_up_proj", "down_proj"))]
    assert len(names) == 2 * CONFIG.num_layers
    for name in names:
        np.testing.assert_array_equal(theirs[name].float().numpy(), ours[name], name)


GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
DAMAGE = {
    "NaN": (GATE_UP + "_scales", lambda x: np.full_like(x, 255), "_scales has values above 252, whose weights are NaN"),
    "types": (GATE_UP + "_blocks", lambda x: x.astype(np.int32), "_blocks has dtype int32; must be uint8"),
    "scales": (
        GATE_UP + "_scales",
        lambda x: x[:, :, :0],
        r"_scales \(6, 128, 0\); must be \(experts, out, blocks, 16",
    ),
    "no scales": (GATE_UP + "_scales", lambda x: None, "gate_up_proj_scales' is missing"),
    "blocks": (GATE_UP + "_blocks", lambda x: x[..., :8], r"_blocks has shape \(6, 128, 1, 8\)"),
    "width": (GATE_UP + "_bias", lambda x: x[:, 1:], r"gate_up_proj_bias has shape \(6, 127\)"),
    "experts": ("model.layers.1.mlp.experts.down_proj_blocks", lambda x: x[1:], r"down_proj_blocks has shape \(5, 32"),
    "no sinks": ("model.layers.0.self_attn.sinks", lambda x: None, "self_attn.sinks' is missing"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_experts_are_errors(stored, tmp_path, case):
    name, change, message = DAMAGE[case]
    changed = change(load_file(stored / "narrow" / "model.safetensors")[name])
    with pytest.raises(CheckpointError, match=message):
        language_model.load(damaged(stored / "narrow", tmp_path, {name: changed}))


def test_values_that_a_dtype_cannot_hold(stored, tmp_path):
    scales = load_file(stored / "narrow" / "model.safetensors")[GATE_UP + "_scales"]
    damaged(stored / "narrow", tmp_path, {GATE_UP + "_scales": np.full_like(scales, 150)})
    with pytest.raises(CheckpointError, match="values that are infinite in float16: choose another dtype"):
        jspec.load(tmp_path, weights="wide", dtype="float16")


def test_quantized_weights_are_not_written(stored, tmp_path):
    loaded = language_model.load(stored / "narrow", dtype="float32")
    with pytest.raises(ValueError, match="the weights are quantized, which writing a checkpoint does not support"):
        language_model.save(tmp_path, loaded.config, loaded.params)
