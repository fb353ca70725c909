"""Checkpoints of 4-bit matrices in words: read like the values that were packed, refused if they do not fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaled_files as files
from safetensors.numpy import save_file

import jspec
from jspec.checkpoints import language_model
from jspec.checkpoints.files import CheckpointError
from jspec.models.quantized import is_matrix

GROUP = 16


def compressed(**changes):
    weights = dict(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True, dynamic=False)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**weights, **changes}}},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
FORMATS = {
    "compressed": compressed(),
    "compressed_zeros": compressed(symmetric=False),
    "compressed_channel": compressed(strategy="channel", group_size=None),
    "compressed_8_bits": compressed(num_bits=8),
    "gptq": GPTQ,
    "gptq_v2": {**GPTQ, "format": "gptq_v2"},
    "gptq_column": {**GPTQ, "group_size": -1},
    "gptq_8_inputs": {**GPTQ, "group_size": 8},
    "awq": AWQ,
}


WHOLE = ("compressed_channel", "gptq_column")
"""Formats with one scale for each output."""
SIZES = {"gptq_8_inputs": 8, **dict.fromkeys(WHOLE)}
"""Format -> inputs that share a scale, None: all; of the others, `GROUP`."""


def pack(values, bits, order=None):
    """Words of 32 bits along the last axis, one value after the other. order: the column of each place of a word."""
    count = 32 // bits
    padded = np.pad(values, [(0, 0), (0, -values.shape[1] % count)]).astype(np.uint64)
    words = np.zeros((len(values), padded.shape[1] // count), np.uint64)
    for word in range(words.shape[1]):
        for place in range(count):
            column = word * count + (place if order is None else order[place])
            words[:, word] |= padded[:, column] << np.uint64(bits * place)
    return words.astype(np.uint32).view(np.int32)


def packed_layer(rng, shape, form):
    """Random tensors of a layer [out, in], by the end of their names, and its weights in float32."""
    out, width = shape
    bits = 8 if form == "compressed_8_bits" else 4
    size = SIZES.get(form, GROUP) or width
    groups = -(-width // size)
    q = rng.integers(0, 2**bits, shape)
    # The first format of GPTQ stores a zero point less one, and has none for 0.
    zeros = (
        rng.integers(1, 16, (out, groups)) if "zeros" in form or "q" in form else np.full((out, groups), 2**bits // 2)
    )
    scale = rng.uniform(0.5, 1, (out, groups)).astype(np.float16) * np.float16(0.05 / 2 ** (bits - 4))
    wide = (q - np.repeat(zeros, size, axis=1)[:, :width]) * np.repeat(scale.astype(np.float32), size, axis=1)[
        :, :width
    ]
    if form.startswith("compressed"):
        tensors = {".weight_packed": pack(q, bits), ".weight_scale": scale, ".weight_shape": np.array(shape)}
        if "zeros" in form:
            tensors[".weight_zero_point"] = np.ascontiguousarray(pack(zeros.T, bits).T)
    elif form.startswith("gptq"):
        stored = zeros - (form != "gptq_v2")
        tensors = {".qweight": pack(q, bits).T, ".scales": scale.T, ".qzeros": pack(stored.T, bits)}
        tensors[".g_idx"] = (np.arange(width) // size).astype(np.int32)
    else:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {".qweight": pack(q.T, bits, order), ".scales": scale.T, ".qzeros": pack(zeros.T, bits, order)}
    return {end: np.ascontiguousarray(tensor) for end, tensor in tensors.items()}, wide.astype(np.float32)


def store(path, model, form):
    """Writes a checkpoint of packed matrices, and one with their values in float32."""
    config, make = files.MODELS[model]
    rng = np.random.default_rng(0)

    def change(name, tensor):
        if not files.is_linear(name):
            return None
        tensors, wide = packed_layer(rng, tensor.shape, form)
        return {name.removesuffix(".weight") + end: part for end, part in tensors.items()}, wide

    return files.store(path, config, make(), FORMATS[form], change)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A function that writes a pair of checkpoints once."""
    return functools.cache(lambda model, form: store(tmp_path_factory.mktemp(model), model, form))


@pytest.mark.slow(unless=("experts-awq", "llama-compressed", "llama-gptq", "experts-gptq"))
@pytest.mark.parametrize(
    ("model", "form"),
    [*(("llama", form) for form in FORMATS), ("experts", "awq"), ("experts", "gptq"), ("latents", "compressed_zeros")],
)
def test_weights_are_those_that_were_packed(stored, model, form):
    path = stored(model, form)
    got, expected = (jspec.load(path / kind).params.target for kind in ("narrow", "wide"))
    files.assert_same_values(got, expected)
    matrices = [leaf for leaf in jax.tree.leaves(got, is_leaf=is_matrix) if is_matrix(leaf)]
    assert len(matrices) >= 8
    for leaf in matrices:
        # Groups that no kernel supports keep 8 bits.
        packed = form not in ("compressed_8_bits", "gptq_8_inputs")
        assert (leaf.narrow.dtype, leaf.scale.dtype, leaf.dtype) == (
            np.int32 if packed else np.int8,
            np.float32,
            np.float32,
        )
        assert (leaf.filling is not None) == packed
        assert (leaf.zero is not None) == (packed and form not in ("compressed", "compressed_channel"))
        size = SIZES.get(form, GROUP)
        assert leaf.group == (None if size is None or size >= leaf.shape[-2] else size)


@pytest.mark.parametrize("form", ("compressed_zeros", "awq"))
def test_logits_are_those_of_the_widened_weights(stored, form):
    files.assert_same_logits(*(jspec.load(stored("llama", form) / kind) for kind in ("narrow", "wide")))


@pytest.mark.slow
def test_drafted_tokens_and_rounds_are_those_of_the_widened_weights(stored):
    path, drafter = stored("llama", "gptq"), jspec.Standalone(depth=3)
    models = (jspec.load(path / kind, draft=path / kind) for kind in ("narrow", "wide"))
    files.assert_same_rounds(*models, files.PROMPTS, drafter, above=2, max_new_tokens=20, page_size=16)


def test_other_weights_can_be_chosen(stored):
    path = stored("llama", "awq")
    got, expected = (jspec.load(path / kind, weights="wide").params.target for kind in ("narrow", "wide"))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    half = jspec.load(path / "narrow", dtype="bfloat16").params.target
    assert half.embed.dtype == half.layers[0].o.dtype == jnp.bfloat16 and is_matrix(half.layers[0].o)


def test_memory_counts_packed_values(stored, monkeypatch):
    files.assert_stored_bytes_are_counted(stored("llama", "awq") / "narrow", monkeypatch)


@pytest.mark.parametrize(
    "method",
    (
        compressed(num_bits=3),
        compressed(type="float"),
        compressed(strategy="block"),
        compressed(dynamic=True),
        compressed(actorder="group"),
        {**compressed(), "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}},
        {
            **compressed(),
            "config_groups": {**compressed()["config_groups"], "b": compressed(num_bits=8)["config_groups"]["group_0"]},
        },
        {**GPTQ, "bits": 3},
        {**GPTQ, "checkpoint_format": "marlin"},
        {**AWQ, "bits": 8},
        {**AWQ, "version": "gemv"},
        {**GPTQ, "format": "marlin"},
        {**GPTQ, "format": "gptq", "checkpoint_format": "gptq_v2"},
    ),
    ids=str,
)
def test_other_methods_are_refused(stored, tmp_path, method):
    files.damaged(stored("llama", "awq") / "narrow", tmp_path, quantization_config=method)
    with pytest.raises(CheckpointError, match=r"quantization_config=.*is not supported; must have quant_method='fp8'"):
        jspec.load(tmp_path)


ROTATED = {"config_groups": {"R3": {"type": "hadamard", "apply": [{"location": "q_attn"}]}}}


@pytest.mark.parametrize(
    ("form", "key", "value"),
    [
        ("gptq", "dynamic", {"+:.*down.*": {"bits": 8}}),
        ("awq", "fused_attention", True),
        ("compressed", "transform_config", ROTATED),
        ("compressed", "sparsity_config", {"format": "sparse-24-bitmask"}),
    ],
)
def test_keys_of_other_forwards_are_refused(stored, tmp_path, form, key, value):
    files.damaged(stored("llama", form) / "narrow", tmp_path)
    method = FORMATS[form]
    for harmless in (dict(sparsity_config={"format": "dense"}, transform_config={}), dict(dynamic={}, lm_head=True)):
        files.configure(tmp_path, {**method, **harmless})
        jspec.load(tmp_path)
    files.configure(tmp_path, {**method, key: value})
    with pytest.raises(CheckpointError, match=f"not supported: quantization_config.{key}="):
        jspec.load(tmp_path)


LAYER, WORDS = "model.layers.0.self_attn.o_proj", np.full((8, 8), -1, np.int32)
ZEROS, SCALES = f"{LAYER}.qzeros", f"{LAYER}.scales"


@pytest.mark.parametrize(
    ("form", "change", "message"),
    (
        ("gptq", {f"{LAYER}.g_idx": np.arange(64, dtype=np.int32) % 8}, "g_idx groups inputs that are not successive"),
        ("gptq", {ZEROS: np.full((4, 4), -1, np.int32)}, "qzeros has zero points that this format does not def"),
        ("gptq", {ZEROS: np.zeros((3, 4), np.int32)}, r"qzeros has shape \(3, 4\), which is not that of 32 x 64"),
        ("gptq", {SCALES: None}, "o_proj.scales' is missing"),
        ("gptq", {SCALES: np.ones((3, 32), np.float16)}, r"weight_scale has shape \(32, 3\)"),
        ("gptq", {SCALES: np.full((4, 32), np.inf, np.float16)}, "weight_scale has values that are NaN or inf"),
        ("awq", {f"{LAYER}.qweight": WORDS}, r"o_proj.weight has shape \(64, 8\), but config.json implies \(32, 64\)"),
        ("awq", {f"{LAYER}.qweight": np.zeros((64, 4), np.float32)}, "qweight has dtype float32 .* of 32-bit integers"),
        ("awq", {f"{LAYER}.qweight": np.zeros(4, np.int32)}, r"qweight has shape \(4,\); must be a matrix"),
        ("awq", {ZEROS: None}, "o_proj.qzeros' is missing"),
        ("awq", {"model.layers.7.self_attn.o_proj.qweight": WORDS}, "unused tensor"),
        (
            "compressed",
            {f"{LAYER}.weight_shape": np.array([32, 8])},
            r"weight_packed has shape \(32, 8\) for a matrix of shape",
        ),
        ("compressed", {f"{LAYER}.weight_scale": np.ones((32, 1), np.float16)}, r"weight_scale has shape \(32, 1\)"),
    ),
    ids=lambda part: part if isinstance(part, str) else None,
)
def test_damaged_checkpoints_are_refused(stored, tmp_path, form, change, message):
    source, (name,) = stored("llama", form) / "narrow", change
    assert name in files.load_file(source / "model.safetensors") or ".7." in name
    with pytest.raises(CheckpointError, match=message):
        jspec.load(files.damaged(source, tmp_path, change))


def test_zero_points_that_leave_8_bits_are_refused(stored, tmp_path):
    """GPTQ of 8 bits keeps values whose zero is the middle of their range; others reach further than 8 bits."""
    config, make = files.MODELS["llama"]
    language_model.save(tmp_path, config, make(), dtype="float32")
    files.configure(tmp_path, {**GPTQ, "bits": 8, "sym": True})
    tensors, rng = files.load_file(tmp_path / "model.safetensors"), np.random.default_rng(0)
    for name in [name for name in tensors if files.is_linear(name)]:
        out, width = tensors.pop(name).shape
        parts = {
            "qweight": pack(rng.integers(0, 256, (out, width)), 8).T,
            "scales": np.full((width // GROUP, out), 0.01, np.float16),
            "qzeros": pack(np.full((width // GROUP, out), 127), 8),
        }
        tensors |= {name.replace("weight", end): np.ascontiguousarray(part) for end, part in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert jspec.load(tmp_path).params.target.layers[0].o.narrow.min() == -128
    tensors[f"{LAYER}.qzeros"] = pack(np.full((4, 32), 20), 8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="zero points whose distance to the values exceeds 8 bits"):
        jspec.load(tmp_path)
