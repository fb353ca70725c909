"""Files that a stranger made: each ends in an error that names the file, or is read as it is; none hangs."""

import dataclasses
import json
import os
import pickle
import random
import re
import struct
import zipfile
from functools import partial

import eagle_files
import hostile
import ml_dtypes
import numpy as np
import pytest
import test_hostile_configs
import test_torch_file
import toy
from safetensors.numpy import load_file, save_file

import jspec
from jspec.checkpoints import language_model, torch_file
from jspec.checkpoints.files import CheckpointError, parse_json
from jspec.text.tokenizer import Tokenizer

CONFIG = toy.TARGET


@pytest.fixture
def saved(tmp_path):
    """A checkpoint in one file."""
    directory = tmp_path / "saved"
    language_model.save(directory, CONFIG, hostile.weights(CONFIG), dtype="float32", eos=(3,))
    return directory


@pytest.fixture
def sharded(tmp_path):
    """The same in shards."""
    directory = tmp_path / "sharded"
    language_model.save(directory, CONFIG, hostile.weights(CONFIG), dtype="float32", max_shard_bytes=20_000)
    return directory


def refused(directory, message: str, load=None):
    """Loading ends in an error of our own that names the directory or one of its files."""
    with test_hostile_configs.no_hang(), pytest.raises(CheckpointError, match=message) as error:
        (load or partial(language_model.load, dtype="float32"))(directory)
    assert str(directory) in str(error.value)


def edit_tensors(directory, **changes):
    path = directory / "model.safetensors"
    save_file({**load_file(path), **{name.replace("__", "."): tensor for name, tensor in changes.items()}}, path)


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Which files are read


@pytest.mark.filterwarnings("ignore:.* not read")
@pytest.mark.parametrize(
    "name", ["../x", "../saved/model.safetensors", "/etc/passwd", "", ".", "..", "a/b", "a\\b", "x\0", "x" * 5000]
)
def test_an_index_names_a_file_elsewhere(sharded, name):
    index = sharded / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    edit_json(index, weight_map=dict.fromkeys(raw["weight_map"], name))
    refused(sharded, "must name a file in this directory|no such file")


@pytest.mark.filterwarnings("ignore:.* not read")
@pytest.mark.parametrize("value", [5, None, [], {}, True, "x", {"a": 5}, {"a": ["x"]}, {"a": {}}])
def test_an_index_of_other_types(sharded, value):
    edit_json(sharded / "model.safetensors.index.json", weight_map=value)
    refused(sharded, "weight_map|lists no file")


KINDS = {
    "directory": (lambda path: path.mkdir(), "must be a regular file"),
    "broken link": (lambda path: path.symlink_to("nowhere"), "no such file"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_a_file_of_a_checkpoint_that_is_no_file(saved, name, kind):
    make, message = KINDS[kind]
    (saved / name).unlink(missing_ok=True)
    make(saved / name)
    refused(saved, f"{re.escape(name)}.*{message}")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_of_a_tokenizer_that_is_no_file(tmp_path, name):
    (tmp_path / "tokenizer.json").write_bytes(hostile.TOKENIZER)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    refused(tmp_path, f"{re.escape(name)}.*must be a regular file", Tokenizer.load)


def test_a_file_of_torch_that_is_no_file(tmp_path):
    directory = eagle_files.make_head(tmp_path / "head")
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").mkdir()
    refused(directory, "must be a regular file", eagle_files.load)


def test_links_of_the_hub_cache_and_within_the_directory(saved, tmp_path):
    root = tmp_path / "models--org--name"
    blobs, snapshot = root / "blobs", root / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for index, path in enumerate(sorted(saved.iterdir())):
        path.rename(blobs / str(index))
        (snapshot / path.name).symlink_to(os.path.join("..", "..", "blobs", str(index)))
    assert language_model.load(snapshot, dtype="float32").config == CONFIG
    (tmp_path / "link").symlink_to(snapshot)
    assert language_model.load(tmp_path / "link", dtype="float32").config == CONFIG
    (snapshot / "model.safetensors").unlink()
    refused(snapshot, "no such file")


# JSON


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not readable"),
        (b"\xff\xfe{}", "not readable"),
        (b"\xef\xbb\xbf{}", "not readable"),
        (b'{"a": 1, "a": 2}', "the key 'a' has two values"),
        (b'{"a": {"b": 1, "b": [1]}}', "the key 'b' has two values"),
        (b"[" * 100_000, "not readable"),
        (b'{"a":' * 100_000, "not readable"),
        (b"{}x", "not readable"),
        (b"{", "not readable"),
        (b"\x00", "not readable"),
        (b"[]", "must hold a JSON object"),
    ],
)
def test_json_that_is_refused(saved, data, message):
    (saved / "config.json").write_bytes(data)
    refused(saved, f"config.json.*{message}")


def test_json_that_is_read():
    assert parse_json(b'{"a": "[[[{\\"[", "b": 1, "b": 1}', "x") == {"a": '[[[{"[', "b": 1}


def test_a_huge_json_file(saved):
    with (saved / "config.json").open("r+b") as file:
        file.truncate(2**40)
    refused(saved, "has 1099511627776 bytes: must have at most")


# Headers of safetensors


def header_of(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(path, header, body, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry | {"dtype": "F64"},
        lambda entry: entry | {"dtype": 5},
        lambda entry: entry | {"dtype": None},
        lambda entry: entry | {"shape": [33]},
        lambda entry: entry | {"shape": [-32]},
        lambda entry: entry | {"shape": [2**62, 2**62]},
        lambda entry: entry | {"shape": [32.0]},
        lambda entry: entry | {"shape": "32"},
        lambda entry: entry | {"shape": [1] * 100},
        lambda entry: entry | {"data_offsets": [0, 128]},
        lambda entry: entry | {"data_offsets": [-1, 127]},
        lambda entry: entry | {"data_offsets": [2**60, 2**60 + 128]},
        lambda entry: entry | {"data_offsets": [entry["data_offsets"][1], entry["data_offsets"][0]]},
        lambda entry: entry | {"data_offsets": [0]},
        lambda entry: entry | {"data_offsets": None},
        *(lambda entry, other=other: other for other in ({}, [], 5, None)),
    ],
)
def test_a_header_that_lies(saved, change):
    path = saved / "model.safetensors"
    header, body = header_of(path)
    with_header(path, header | {NORM: change(header[NORM])}, body)
    refused(saved, "model.safetensors: damaged|is missing")


def test_other_headers(saved):
    path = saved / "model.safetensors"
    header, body = header_of(path)
    for length in (0, 1, 7, 2**24, 2**31, 2**40, 2**63, 2**64 - 1):
        with_header(path, header, body, length)
        refused(saved, "model.safetensors: damaged")
    for text in (b"[]", b"5", b"null", b"{", b"[" * 100_000, b"\xff", b'{"a": NaN}'):
        with_header(path, text, body)
        refused(saved, "model.safetensors: damaged")
    for other in (body[:-1], body[:-100], body + b"x", b""):
        with_header(path, header, other)
        refused(saved, "model.safetensors: damaged")
    intact = path.read_bytes()
    for size in (0, 4, 100):
        path.write_bytes(intact[:size])
        refused(saved, "model.safetensors: damaged")
    twice = f', "{NORM}": {json.dumps(header[NORM] | {"dtype": "I32"})}}}'
    with_header(path, json.dumps(header).encode()[:-1] + twice.encode(), body)
    refused(saved, f"model.safetensors: damaged.*the key '{NORM}' has two values")
    del header["model.embed_tokens.weight"]
    with_header(path, header, body)
    refused(saved, "invalid offset for tensor")
    header, body = header_of(saved / "model.safetensors")
    with_header(path, header | {NORM: header[NORM] | {"dtype": "F4"}}, body)
    refused(saved, "damaged|has the type 'F4': must be one of")


@pytest.mark.slow
def test_random_damage_to_headers(saved):
    """Bytes of the header changed at random: an error of our own, or the model as it was."""
    path, generator = saved / "model.safetensors", random.Random(0)
    intact = path.read_bytes()
    (size,) = struct.unpack("<Q", intact[:8])
    for _ in range(300):
        data = bytearray(intact)
        for _ in range(generator.choice((1, 1, 2, 8))):
            data[generator.randrange(size + 8)] = generator.randrange(256)
        path.write_bytes(data)
        try:
            with test_hostile_configs.no_hang():
                assert language_model.load(saved, dtype="float32").config == CONFIG
        except CheckpointError as error:
            assert str(saved) in str(error)


# Values


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(saved, dtype, value):
    for name, shape in (("model.norm.weight", (32,)), ("lm_head.weight", (61, 32))):
        tensor = np.ones(shape, dtype)
        tensor.reshape(-1)[-1] = value
        edit_tensors(saved, **{name: tensor})
        refused(saved, f"{name} has values that are NaN or infinite")
        edit_tensors(saved, **{name: np.ones(shape, np.float32)})
    largest = np.full(32, ml_dtypes.finfo(dtype).max, dtype)
    edit_tensors(saved, **{"model.norm.weight": largest})
    if dtype == np.float64:
        refused(saved, "values that are infinite in float32: choose another dtype")
    else:
        assert language_model.load(saved, dtype="float32").params.norm.max() == largest[0].astype(np.float32)


def test_weights_too_large_for_the_chosen_precision(saved):
    edit_tensors(saved, **{NORM: np.full(32, 1e5, np.float32)})
    refused(saved, "infinite in float16: choose another dtype", partial(language_model.load, dtype="float16"))
    assert language_model.load(saved, dtype="bfloat16").params.norm.max() > 9e4


@pytest.mark.parametrize("dtype", "bool uint8 int8 int16 int32 int64 uint64 float8_e4m3fn float8_e5m2".split())
def test_weights_of_another_type(saved, dtype):
    kind = getattr(ml_dtypes, dtype) if dtype.startswith("float8") else np.dtype(dtype)
    path = saved / "model.safetensors"
    stored = load_file(path)
    for name in (NORM, "model.embed_tokens.weight"):
        save_file({**stored, name: stored[name].astype(kind)}, path)
        refused(saved, f"{name} has dtype {dtype}; must be one of")


def test_tensors_that_config_json_denies(saved):
    path, stored = saved / "model.safetensors", load_file(saved / "model.safetensors")
    for name in ("model.layers.2.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias", "x"):
        save_file({**stored, name: np.ones(32, np.float32)}, path)
        refused(saved, f"1 unused tensor.*{name}")
    save_file({**stored, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}, path)
    language_model.load(saved)
    save_file(stored, path)
    edit_json(saved / "config.json", num_hidden_layers=1)
    refused(saved, "unused tensor")
    edit_json(saved / "config.json", num_hidden_layers=3)
    refused(saved, "'model.layers.2.* is missing")


def test_an_lm_head_that_config_json_denies(saved):
    edit_json(saved / "config.json", tie_word_embeddings=True)
    stored = load_file(saved / "model.safetensors")
    language_model.load(saved)  # the weights of the fixture are equal
    edit_tensors(saved, **{"lm_head.weight": stored["lm_head.weight"] * 2})
    refused(saved, "lm_head.weight differs from it")


@pytest.mark.parametrize(
    "ids", [-2, 10**12, 2.5, "3", True, [3, 10**12], [[3]], {"a": 1}, [None], float("nan"), "", [3.0]]
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_ids_that_end_a_text(saved, file, ids):
    edit_json(saved / file, eos_token_id=ids)
    refused(saved, f"{file}: eos_token_id")


@pytest.mark.parametrize(
    "offsets",
    [
        np.full(23, 2**63 - 1),
        np.arange(23) + np.array([2**63 - 1] + [0] * 22, dtype=np.uint64).view(np.int64),
        np.array([-(2**63)] * 23),
        -np.arange(23),
        np.full(23, 61),
        np.zeros(23, np.float32),
        np.zeros(23, bool),
        np.full(23, 2**64 - 1, np.uint64),
        np.zeros(22, np.int64),
        np.zeros((23, 1), np.int64),
    ],
)
def test_maps_of_a_vocabulary(tmp_path, offsets):
    refused(eagle_files.make_head(tmp_path / "head", tensors={"d2t": offsets}), "d2t", eagle_files.load)


@pytest.mark.parametrize("marks", [np.full(61, 2), np.full(61, -1), np.ones(61), np.ones(61, np.float32), np.ones(60)])
def test_marks_of_a_vocabulary(tmp_path, marks):
    refused(eagle_files.make_head(tmp_path / "head", tensors={"t2d": marks}), "t2d", eagle_files.load)


def test_an_assistant_for_another_target(tmp_path):
    base = hostile.own_assistant(tmp_path / "assistant")
    language_model.save(tmp_path / "target", toy.DRAFT, hostile.weights(toy.DRAFT), dtype="float32")
    with pytest.raises(CheckpointError, match="made for a target with hidden size 32, but this target has 16"):
        jspec.load(tmp_path / "target", draft=base.directory)


def test_a_draft_with_another_vocabulary(saved, tmp_path):
    other = dataclasses.replace(toy.DRAFT, vocab_size=29)
    language_model.save(tmp_path / "draft", other, hostile.weights(other), dtype="float32")
    message = "vocab_size=29, but the target has 61 tokens: must be the same, but for at most 1024 rows"
    with pytest.raises(CheckpointError, match=message):
        jspec.load(saved, draft=tmp_path / "draft")


# Files of torch


def test_a_pickle_that_inflates(tmp_path):
    path = tmp_path / "x.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x/data.pkl", "w", force_zip64=True) as file:
            for _ in range(64):
                file.write(bytes(2**20))
    with pytest.raises(CheckpointError, match="has a x/data.pkl of 67108864 bytes: must have at most"):
        torch_file.read(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps([1], 2))
        archive.writestr("x/byteorder", bytes(2**25))
    with pytest.raises(CheckpointError, match="byteorder of 33554432 bytes"):
        torch_file.read(path)


@pytest.mark.slow
def test_a_pickle_that_refers_to_itself(tmp_path):
    value = [1]
    for _ in range(60):
        value = [value, value]
    with test_hostile_configs.no_hang(), pytest.raises(CheckpointError, match="holds more than"):
        torch_file.read(test_torch_file.write(tmp_path / "x.bin", value))
    value = []
    value.append(value)
    with pytest.raises(CheckpointError, match="damaged"):
        torch_file.read(test_torch_file.write(tmp_path / "x.bin", value))


@pytest.mark.parametrize("shape", [(10**6, 10**6), (2**62, 4), (2**21, 1), (10**30, 1)])
def test_a_tensor_that_is_broadcast_to_any_size(tmp_path, shape):
    data = {"0": test_torch_file.SIX.tobytes()}
    pickled = test_torch_file.tensor_pickle(shape=shape, strides=(0, 0))
    with pytest.raises(CheckpointError, match="has a storage of only 6 elements|damaged"):
        torch_file.read(test_torch_file.write(tmp_path / "x.bin", pickled, storages=data))


def test_a_zip_directory_that_is_huge(tmp_path):
    path = test_torch_file.write(tmp_path / "x.bin", [1])
    data = bytearray(path.read_bytes())
    data[-10:-6] = struct.pack("<I", 2**30)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="zip directory of 1073741824 bytes"):
        torch_file.read(path)


def test_random_damage_to_files_of_torch(tmp_path):
    intact = test_torch_file.write(
        tmp_path / "x.bin", test_torch_file.tensor_pickle(), storages={"0": test_torch_file.SIX.tobytes()}
    ).read_bytes()
    generator = random.Random(0)
    for _ in range(300):
        data = bytearray(intact)
        for _ in range(generator.choice((1, 1, 2, 8))):
            data[generator.randrange(len(data))] = generator.randrange(256)
        (tmp_path / "x.bin").write_bytes(data)
        try:
            with test_hostile_configs.no_hang():
                torch_file.read(tmp_path / "x.bin")
        except CheckpointError as error:
            assert "x.bin" in str(error)


# Tokenizers


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"[" * 100_000, b"\xff", b'{"version": 5}', b'{"model": {"type": "BPE"}}', b"null"]
)
def test_a_tokenizer_that_is_damaged(tmp_path, data):
    (tmp_path / "tokenizer.json").write_bytes(data)
    refused(tmp_path, "tokenizer.json: not a valid tokenizer", Tokenizer.load)


def test_a_tokenizer_with_a_huge_id(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(hostile.TOKENIZER.replace(b'"a": 0', b'"a": 4294967295'))
    refused(tmp_path, "has the token id 4294967295: must be below", Tokenizer.load)


@pytest.mark.parametrize("value", [5, [], {}, {"content": 5}, None, True, "\ud800", {"content": "\ud800"}])
def test_special_tokens_of_other_types(tmp_path, value):
    (tmp_path / "tokenizer.json").write_bytes(hostile.TOKENIZER)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": value}))
    if "\ud800" in (value, *(value.values() if isinstance(value, dict) else ())):
        refused(tmp_path, "bos_token.*must be valid Unicode", Tokenizer.load)
    else:
        assert Tokenizer.load(tmp_path) is not None
