"""Models in GGUF files are those of directories; what is quantized is widened, or kept exactly; files are hostile."""

import dataclasses
import struct
from functools import partial

import families
import gguf
import gguf_files
import jax
import numpy as np
import pytest
import tiny_targets
import toy
from gguf import GGMLQuantizationType as Kind
from random_models import random_weights
from scaled_files import EXPERTS, PROMPTS, assert_same_values, equal, values

import jspec
from jspec.checkpoints import language_model
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.gguf_file import KINDS, GgufFile
from jspec.checkpoints.gguf_model import ARCHITECTURES
from jspec.models.quantized import Quantized, is_matrix
from jspec.models.rope import Llama3Rope, LongRope, Rope, YarnRope

GEMMA3 = dataclasses.replace(families.KINDS["gemma3"], query_scalar=8)
LLAMA = dataclasses.replace(toy.TARGET, qk_norm=False)
_KINDS = families.KINDS
VARIANTS = {
    "qwen2": dataclasses.replace(_KINDS["qwen2"], windows=()),
    "smollm3": dataclasses.replace(_KINDS["smollm3"], num_layers=5, resting=(3,)),
    "granite": _KINDS["granite"],
    "olmo2": dataclasses.replace(_KINDS["olmo3"], kind="olmo2", windows=(), rope=Rope(), window_rope=None),
    "olmo3": _KINDS["olmo3"],
    "phi3": dataclasses.replace(
        _KINDS["phi3"], rope=Rope(1e4, LongRope((1.0, 1.25), (2.0, 3.0), 512, attention_factor=1.125), 0.5)
    ),
    "phi3 window": dataclasses.replace(_KINDS["phi3"], rope=Rope(), windows=(8,) * 3),
    "glm4": dataclasses.replace(_KINDS["glm4"], attention_bias=True),
}
NAMES = {"olmo3": "olmo2", "phi3 window": "phi3"}
"""Models -> their architectures, where the names differ."""


MODELS = {
    "llama": (LLAMA, lambda: toy.random_params(LLAMA)),
    "qwen3": (toy.TARGET, lambda: toy.random_params(toy.TARGET)),
    "qwen3moe": (dataclasses.replace(EXPERTS, dense_layers=()), None),
    "gemma3": (GEMMA3, lambda: families.params("gemma3")),
    **{kind: (config, partial(random_weights, config)) for kind, config in VARIANTS.items()},
}


def all_experts():
    weights = tiny_targets.weights(EXPERTS)
    return dataclasses.replace(weights, layers=(weights.layers[0],) * 2)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A function that writes a file and its model's directory."""

    def write(architecture, **options):
        folder = tmp_path_factory.mktemp(architecture)
        config, make = MODELS[architecture]
        language_model.save(folder, config, (make or all_experts)(), dtype="float32")
        return gguf_files.write(folder / "model.gguf", folder, NAMES.get(architecture, architecture), **options), folder

    return write


@pytest.mark.parametrize("architecture", MODELS)
def test_a_file_is_read_as_its_directory(stored, architecture):
    path, folder = stored(architecture)
    read, expected = (jspec.load(source, dtype="float32") for source in (path, folder))
    for name, value in vars(expected.target).items():
        stored_as = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        assert getattr(read.target, name) == stored_as, name
    # 1 is added to some norms and subtracted again.
    assert_same_values(read.params, expected.params, atol=1e-6, rtol=0)
    assert read.tokenizer is None and read.eos == ()


def test_a_set_of_files(stored, tmp_path):
    path, folder = stored("qwen3", kinds={"attn_q": Kind.Q8_0})
    whole = jspec.load(path, dtype="float32")
    reader = gguf.GGUFReader(path)
    metadata = {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith(("GGUF.", "general."))
    }
    for number in range(3):
        name = tmp_path / f"x-0000{number + 1}-of-00003.gguf"
        writer = gguf.GGUFWriter(name, "qwen3")
        for key, value in {**(metadata if number == 0 else {}), "split.no": number, "split.count": 3}.items():
            gguf_files.add(writer, key, value)
        for tensor in reader.tensors[number::3]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        gguf_files.close(writer)
    first, second, last = sorted(tmp_path.iterdir())
    assert equal(jspec.load(first, dtype="float32").params, whole.params)
    with pytest.raises(CheckpointError, match="split.no=1: must be 0"):
        jspec.load(second)
    last.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=r"x-00003.*split.no, split.count=\(1, 3\): must be \(2, 3\)"):
        jspec.load(first)
    last.unlink()
    with pytest.raises(CheckpointError, match="x-00003-of-00003.gguf: no such file"):
        jspec.load(first)


def test_a_draft_in_a_file(stored):
    path, folder = stored("qwen3")
    model = jspec.load(folder, draft=path, dtype="float32")
    assert equal(model.params.target, model.params.draft)


def test_factors_of_llama_3_are_its_scaling(stored):
    length = np.arange(0, 16, 2) / 16
    wavelengths = 2 * np.pi * 10_000.0**length
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    assert factors.min() == 1 and 1 < factors.max() < 8.01
    path, _ = stored("llama", tensors={"rope_freqs.weight": factors})
    assert language_model.load(path).config.rope.scaling == Llama3Rope(float(factors.max()), 1.0, 4.0, 8192)
    path, _ = stored("llama", tensors={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(CheckpointError, match="rope_freqs.weight does not have the factors of rope_type='llama3'"):
        language_model.load(path)


def test_scaled_positions(stored):
    path, _ = stored("qwen3")
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128, "finetuned": True}
    edit(path, {f"qwen3.rope.scaling.{key}": value for key, value in scaling.items()})
    assert language_model.load(path).config.rope.scaling == YarnRope(4.0, 128)


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_widened_in_parts(tmp_path, kind):
    kind, rng = Kind[kind], np.random.default_rng(1)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = rng.integers(0, 256, (6, 512 // per_block * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("before", np.ones(5, np.float32))
    writer.add_tensor("x", rows, raw_dtype=kind)
    file = GgufFile(gguf_files.close(writer))
    assert file.tensors["x"].shape == (6, 512)
    with np.errstate(all="ignore"):
        whole = gguf.dequantize(rows.view(np.float32) if kind == Kind.F32 else rows, kind)
        for part in (slice(None), slice(2, 4), np.array([5, 0, 3])):
            np.testing.assert_array_equal(file.rows("x", part), whole[part])


@pytest.mark.parametrize(("kind", "stored_as"), [("Q8_0", np.int8), ("Q4_0", np.int32)])
def test_eight_and_four_bits_are_kept_exactly(stored, kind, stored_as):
    path, _ = stored("llama", kinds={"token_embd": Kind.Q4_1, "^output": Kind.F32, "": Kind[kind]})
    narrow, wide = (jspec.load(path, dtype="float32", weights=weights) for weights in (None, "wide"))
    matrices = [leaf for leaf in jax.tree.leaves(narrow.params, is_leaf=is_matrix) if isinstance(leaf, Quantized)]
    assert len(matrices) == 4 * LLAMA.num_layers
    assert {leaf.narrow.dtype for leaf in matrices} == {np.dtype(stored_as)}
    assert {(leaf.shape[-2], leaf.group) for leaf in matrices} == {(32, None), (64, 32)}
    assert_same_values(narrow.params, wide.params)
    outputs = [jspec.generate(model, PROMPTS, max_new_tokens=8).tokens for model in (narrow, wide)]
    assert outputs[0] == outputs[1]


def test_types_side_by_side_are_widened(stored):
    path, folder = stored("qwen3", kinds={r"attn_q\.": Kind.Q8_0, r"attn_k\.": Kind.Q4_0, "ffn_": Kind.Q5_1})
    read, exact = (jspec.load(source, dtype="float32") for source in (path, folder))
    assert not any(map(is_matrix, jax.tree.leaves(read.params, is_leaf=is_matrix)))
    for (place, left), (_, right) in zip(values(read.params), values(exact.params), strict=True):
        np.testing.assert_allclose(left, right, atol=0.1, err_msg=jax.tree_util.keystr(place))


UNFIT = [
    ("qwen3", {"general.architecture": "mamba"}, "general.architecture='mamba' is not supported; must be one of llama"),
    ("qwen3", {"split.count": 3}, "split.count=3: the name of the first file must end in -00001-of-00003.gguf"),
    ("qwen3", {"split.count": 3, "split.no": 2}, "split.no=2: must be 0, the first file of the set"),
    ("qwen3", {"general.architecture": "qwen35"}, "general.architecture='qwen35' is not supported"),
    (
        "qwen3",
        {"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 2.0, "qwen3.rope.scaling.attn_factor": 1.5},
        "rope.scaling.attn_factor=1.5: must be 1",
    ),
    ("qwen3", {"qwen3.logit_scale": 0.5}, "not supported: qwen3.logit_scale=0.5"),
    ("llama", {"llama.expert_count": 8}, "not supported: llama.expert_count=8"),
    ("qwen3", {"qwen3.attention.value_length": 8}, "qwen3.attention.value_length=8: must be 16"),
    ("qwen3", {"qwen3.attention.head_count": -1}, "qwen3.attention.head_count=-1: must be from 1"),
    ("qwen3", {"qwen3.attention.head_count_kv": [2, 1]}, "num_key_value_heads=.*must be an int"),
    ("qwen3", {"qwen3.rope.dimension_count": 8}, "partial_rotary_factor=0.5"),
    ("qwen3", {"qwen3.rope.scaling.type": "spiral"}, "rope_type='spiral' is not supported"),
    ("qwen3", {"qwen3.embedding_length": 64}, r"has shape \(61, 32\), but config.json implies \(61, 64\)"),
    ("qwen3", {"qwen3.block_count": 3}, "'model.layers.2.input_layernorm.weight' is missing"),
    ("qwen3", {"qwen3.block_count": 1}, "unused tensor"),
    ("qwen3", {"tokenizer.ggml.eos_token_id": 2**31}, "eos_token_id=2147483648: must be from 0 to"),
]


@pytest.mark.parametrize(("architecture", "metadata", "error"), UNFIT)
def test_metadata_that_does_not_fit(stored, architecture, metadata, error):
    path, _ = stored(architecture)
    edit(path, metadata)
    with pytest.raises(CheckpointError, match=error):
        jspec.load(path)


def edit(path, metadata):
    """Write a file anew with other metadata."""
    reader = gguf.GGUFReader(path)
    before = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    architecture = {**before, **metadata}.pop("general.architecture")
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    writer = gguf.GGUFWriter(path.with_suffix(".new"), architecture)
    for key, value in {**before, **metadata}.items():
        if key != "general.architecture":
            writer.add_int32(key, value) if value == -1 else gguf_files.add(writer, key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    gguf_files.close(writer).replace(path)


def header(*parts):
    """A header of these parts: counts are 64-bit integers, types 32-bit ones."""
    return b"".join(part if isinstance(part, bytes) else struct.pack("<Q", part) for part in parts)


def kind(value):
    return struct.pack("<I", value)


def text(value):
    return header(len(value), value)


def tensor(name=b"w", dims=(64,), type=0, offset=0):
    return text(name) + kind(len(dims)) + header(*dims) + kind(type) + header(offset)


START = b"GGUF" + kind(3)
ONE, TWO = START + header(1, 0), START + header(2, 0)
"""Files of one and of two tensors, without metadata."""
KEY = START + header(0, 1) + text(b"k")
HOSTILE = {
    "empty": (b"", "cannot be read"),
    "another format": (b"PK\3\4" + bytes(60), "not a GGUF file: must begin with GGUF"),
    "another version": (b"GGUF" + kind(1) + bytes(60), "version=1: must be 2 or 3"),
    "other byte order": (b"GGUF" + struct.pack(">I", 3) + bytes(60), "version=50331648: must be 2 or 3"),
    "cut": (START + header(0), "it ends at byte 16, within its header"),
    "more keys than bytes": (START + header(0, 2**63), "ends at byte 24, within its header"),
    "more tensors than bytes": (START + header(2**60, 0), "has 0 more bytes, for 1152921504606846976 entries"),
    "a long key": (START + header(0, 1, 2**62, b"general"), "ends at byte 39, within its header"),
    "a long list": (KEY + kind(9) + kind(8) + header(2**62), "0 more bytes, for 4611"),
    "a long list of numbers": (KEY + kind(9) + kind(0) + header(2**62), "within its header"),
    "a list of lists": (KEY + kind(9) + kind(9) + header(0), "the type 9, which is unknown or"),
    "an unknown type of value": (KEY + kind(77), "the value of 'k' has the type 77"),
    "a key twice": (START + header(0, 2) + (text(b"k") + kind(7) + b"\1") * 2, "the key 'k' has two values"),
    "no UTF-8": (START + header(0, 1) + text(b"\xff"), "is not UTF-8"),
    "no axes": (ONE + tensor(dims=()), "has 0 axes: must have 1 to 4"),
    "an unknown type": (ONE + tensor(type=99), "'w' has the type 99: must be one of F32, F16, BF16, Q4_0"),
    "integers": (ONE + tensor(type=26), "has the type I32"),
    "a part of a block": (ONE + tensor(dims=[48], type=8), r"axes \[48\]: must have rows of whole Q8_0 blocks"),
    "an axis of 0": (ONE + tensor(dims=[32, 0]), "must have rows"),
    "beyond the end": (ONE + tensor(), "'w' is at 64 to 320; it must be in the 57 bytes"),
    "far beyond": (ONE + tensor(offset=2**62) + bytes(999), "must be in the 1056 bytes"),
    "huge": (ONE + tensor(dims=[2**40] * 4) + bytes(999), "must be in the"),
    "not aligned": (ONE + tensor(offset=8) + bytes(999), "aligned to 32"),
    "one over another": (
        TWO + tensor() + tensor(b"v", offset=32) + bytes(999),
        "in the .* bytes of the file, from .* on",
    ),
    "twice": (TWO + tensor() + tensor(offset=256) + bytes(999), "'w' is there twice"),
    "alignment": (
        START + header(1, 1) + text(b"general.alignment") + kind(4) + kind(0) + tensor(),
        "general.alignment=0: must be from 8",
    ),
    "nothing in it": (START + header(0, 0), "the key 'general.architecture' is missing"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(tmp_path, case):
    data, error = HOSTILE[case]
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"x.gguf: .*{error}"):
        language_model.load(tmp_path / "x.gguf")


def test_any_cut_of_a_file_is_refused(stored, tmp_path):
    path, _ = stored("qwen3")
    data, rng = path.read_bytes(), np.random.default_rng(0)
    cut = tmp_path / "cut.gguf"
    for length in (*range(0, 400, 7), *rng.integers(400, len(data), 60)):
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="cut.gguf"):
            GgufFile(cut)


def test_values_that_are_not_finite(stored):
    path, folder = stored("qwen3", kinds={"attn_v": Kind.Q5_0})
    file = GgufFile(path)
    place = file.tensors["blk.0.attn_v.weight"].begin
    del file
    data = bytearray(path.read_bytes())
    data[place : place + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="model.layers.0.self_attn.v_proj.weight has values that are NaN"):
        jspec.load(path)


def test_places_of_files(tmp_path):
    with pytest.raises(CheckpointError, match="no such"):
        jspec.load(tmp_path / "missing.gguf")
    assert {NAMES.get(name, name) for name in MODELS} == set(ARCHITECTURES)
