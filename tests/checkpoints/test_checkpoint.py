"""Checkpoints round-trip in every layout; errors name what is missing, damaged or unsupported."""

import contextlib
import json
import shutil
from dataclasses import replace

import hostile
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import toy
from batches import read_by
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file
from scaled_files import equal

from jspec.checkpoints import files, language_model, llama, tensors
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.language_model import CheckpointError
from jspec.checkpoints.source import Source
from jspec.core.sharding import Placement
from jspec.models.rope import Llama3Rope, Rope

ROPE = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=64)


@pytest.fixture
def saved(tmp_path):
    language_model.save(tmp_path, toy.TARGET, toy.random_params(toy.TARGET), dtype="float32", eos=(3,))
    return tmp_path


def edit_config(directory, **changes):
    path = directory / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))


@pytest.mark.parametrize("max_shard_bytes", [None, 10_000, 1])
@pytest.mark.parametrize(
    "config", [toy.TARGET, toy.DRAFT, replace(toy.DRAFT, rope=Rope(scaling=ROPE))], ids=["qwen3", "tied", "llama3"]
)
def test_round_trip(tmp_path, config, max_shard_bytes):
    params = toy.random_params(config)
    language_model.save(tmp_path, config, params, dtype="float32", eos=(3, 9), max_shard_bytes=max_shard_bytes)
    loaded = language_model.load(tmp_path, dtype="float32")
    assert loaded.config == config
    assert equal(loaded.params, params)
    assert loaded.eos == (3, 9)
    names = [path.name for path in tmp_path.glob("*.safetensors")]
    assert (names == ["model.safetensors"]) == (max_shard_bytes is None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_precision_of_weights_and_logits(saved, dtype):
    loaded = language_model.load(saved, dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype(dtype)}
    cache = loaded.config.init_cache(loaded.params, 1, 16, 16)
    assert cache.pool.dtype == jnp.dtype(dtype)
    batch = read_by(np.array([[1, 2]], np.int32), np.array([[0, 1]], np.int32), cache)
    out = jax.jit(loaded.config.apply)(loaded.params, batch)
    assert out.logits.dtype == jnp.float32


def test_bfloat16_on_disk(saved):
    path = saved / "model.safetensors"
    halves = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in load_file(path).items()}
    save_file(halves, path)
    loaded = language_model.load(saved, dtype="float32")
    expected = halves["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(np.asarray(loaded.params.norm), expected)


def test_default_precision_is_the_platforms(saved):
    expected = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    assert language_model.load(saved).params.embed.dtype == expected


def test_unknown_dtype(saved):
    with pytest.raises(ValueError, match="dtype='int4': must be one of float32, bfloat16, float16"):
        language_model.load(saved, dtype="int4")


OTHERS = {
    **{"logit_scale": 0.5, "rope_is_neox_style": False, "attention_chunk_size": 8},
    **{"swiglu_limit": 7.0, "attention_multiplier": 0.2, "llama_4_scaling": {"beta": 0.1}, "is_causal": False},
    **{"residual_multiplier": 0.7, "final_logit_softcapping": 30.0, "rope_interleave": True, "index_topk_freq": 2},
}


@pytest.mark.parametrize("key", OTHERS)
def test_options_of_other_forwards_are_named(saved, key):
    edit_config(saved, **{key: OTHERS[key]})
    with pytest.raises(CheckpointError, match=f"{key}="):
        language_model.load(saved)


def test_options_without_effect(saved):
    edit_config(saved, logit_scale=1.0, rope_interleave=False, llama_4_scaling=None, clip_qkv=None, pretraining_tp=2)
    language_model.load(saved)


def test_attention_in_chunks_bounds_the_context(saved):
    edit_config(saved, dual_chunk_attention_config={"chunk_size": 32, "original_max_position_embeddings": 40})
    with pytest.warns(UserWarning, match="dual_chunk_attention_config is not supported: texts have at most 40 tokens"):
        assert language_model.load(saved).config == replace(toy.TARGET, max_length=40)


@pytest.mark.parametrize("ids", [-1, 61, [3, 61]])
def test_ends_of_text_outside_the_vocabulary(saved, ids):
    """-1 is no token in some files."""
    edit_config(saved, eos_token_id=ids)
    with contextlib.nullcontext() if ids == -1 else pytest.warns(UserWarning, match=r"=.*: \[61\] are no ids"):
        assert language_model.load(saved).eos == (3,)


def test_files_of_another_name_are_listed(saved):
    (saved / "model.safetensors").rename(saved / "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors.index.json.*, but model-00001-of-00001.safetensors"):
        _ = Source(saved).files


@pytest.mark.parametrize(
    "config_eos, generation_eos, expected", [(2, [5, 4], (2, 4, 5)), (None, 7, (7,)), (7, None, (7,))]
)
def test_eos_is_the_union_of_both_files(saved, config_eos, generation_eos, expected):
    edit_config(saved, eos_token_id=config_eos)
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    assert language_model.load(saved).eos == expected


def test_both_generations_of_config():
    new = llama.describe(replace(toy.TARGET, rope=Rope(5e5, ROPE)))
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    scaling = {key: value for key, value in new["rope_parameters"].items() if key != "rope_theta"}
    scaling["type"] = scaling.pop("rope_type")
    old |= {"rope_theta": 5e5, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    assert llama.parse_config(Fields(old)) == llama.parse_config(Fields(new))
    assert llama.parse_config(Fields(old)).rope == Rope(5e5, ROPE)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*not supported.*LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "axial", "factor": 4.0}}, "axial"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor.*missing"),
        ({"num_hidden_layers": "absent"}, "num_hidden_layers.*missing"),
        ({"vocab_size": None}, "vocab_size=None: must be an int"),
        ({"num_key_value_heads": 3}, "multiple"),
    ],
)
def test_unsupported_config(saved, changes, message):
    edit_config(saved, **changes)
    with pytest.raises(CheckpointError, match=message):
        language_model.load(saved)


def test_missing_directory(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        language_model.load(tmp_path / "nowhere")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_missing_file(saved, file):
    (saved / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file}: no such file"):
        language_model.load(saved)


def test_wrong_shape(saved):
    edit_config(saved, intermediate_size=65)
    with pytest.raises(
        CheckpointError, match=r"gate_proj.weight has shape \(64, 32\), but config.json implies \(65, 32\)"
    ):
        language_model.load(saved)


def test_files_of_tensors_that_are_not_read(tmp_path):
    """A stale copy, a shard missing in the index, and weights in the layout of another program are named."""
    params, other = toy.random_params(toy.DRAFT), toy.random_params(toy.DRAFT, seed=9)
    language_model.save(tmp_path / "shards", toy.DRAFT, params, max_shard_bytes=2000)
    language_model.save(tmp_path / "one", toy.DRAFT, other)
    shutil.copy(tmp_path / "one/model.safetensors", tmp_path / "shards")
    with pytest.warns(
        UserWarning, match="not read: model.safetensors; .* the files in model.*index.json; transformers"
    ):
        loaded = language_model.load(tmp_path / "shards", dtype="bfloat16")
    np.testing.assert_array_equal(loaded.params.embed, params.embed.astype(jnp.bfloat16))
    shutil.copy(tmp_path / "one/model.safetensors", tmp_path / "one/consolidated.safetensors")
    with pytest.warns(
        UserWarning, match="not read: consolidated.safetensors; the weights are those of model.safetensors$"
    ):
        language_model.load(tmp_path / "one")
    shard = sorted((tmp_path / "shards").glob("model-*"))[-1]
    shard.unlink()
    with (
        pytest.warns(UserWarning, match="not read"),
        pytest.raises(CheckpointError, match=f"{shard.name}: no such file, which model.safetensors.index.json names"),
    ):
        language_model.load(tmp_path / "shards")


def test_mtp_heads_that_no_index_lists(tmp_path):
    config = hostile.MODELS["deepseek mtp"]
    language_model.save(tmp_path, config, hostile.weights(config), max_shard_bytes=1)
    assert language_model.load(tmp_path).config.mtp_layers == 2
    index = tmp_path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    heads = tuple(f"model.layers.{config.num_layers + head}." for head in range(2))
    raw["weight_map"] = {name: file for name, file in raw["weight_map"].items() if not name.startswith(heads)}
    index.write_text(json.dumps(raw))
    with (
        pytest.warns(UserWarning, match="num_nextn_predict_layers=2, but the checkpoint lists no tensors of MTP heads"),
        pytest.warns(UserWarning, match=r"not read: model-\d+-of-\d+.safetensors, .*; the weights are the files in"),
    ):
        assert language_model.load(tmp_path).config.mtp_layers == 0


def test_an_index_that_disagrees_with_its_files(tmp_path):
    """What the listed files have counts, as for transformers; a tensor in two of them is refused."""
    language_model.save(
        tmp_path, toy.DRAFT, params := toy.random_params(toy.DRAFT), dtype="float32", max_shard_bytes=9000
    )
    index = tmp_path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    files, name = sorted(set(raw["weight_map"].values())), "model.norm.weight"
    others = {key: file for key, file in raw["weight_map"].items() if key != name}
    assert raw["weight_map"][name] in others.values()
    for listed in (others, {**others, name: next(file for file in files if file != raw["weight_map"][name])}):
        index.write_text(json.dumps({"weight_map": listed}))
        np.testing.assert_array_equal(language_model.load(tmp_path, dtype="float32").params.norm, params.norm)
    twice = tmp_path / next(file for file in files if file != raw["weight_map"][name])
    files_of_twice = load_file(twice)
    save_file({**files_of_twice, name: np.zeros(32, np.float32)}, twice)
    index.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=f"both model-.* and model-.* have the tensor '{name}'"):
        language_model.load(tmp_path)


def test_the_outer_flag_of_tied_embeddings(tmp_path):
    """transformers 5.5 and later write true in the section of the text model of a checkpoint with an LM head."""
    config = replace(hostile.MODELS["qwen3_next experts"], tie_embeddings=False)
    params = hostile.weights(config)
    params = replace(params, lm_head=params.lm_head + 1)
    language_model.save(tmp_path, config, params, dtype="float32")
    text = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    raw = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    for outer in (False, True, None):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": outer}))
        if outer is False:
            np.testing.assert_array_equal(language_model.load(tmp_path, dtype="float32").params.lm_head, params.lm_head)
            continue
        with pytest.raises(CheckpointError, match="tie_word_embeddings.*differs"):
            language_model.load(tmp_path)


@pytest.mark.filterwarnings("ignore:.* not read")
def test_missing_shard_and_missing_entry(tmp_path):
    language_model.save(tmp_path, toy.DRAFT, toy.random_params(toy.DRAFT), max_shard_bytes=1)
    index = tmp_path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    shard = raw["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="lists no file for the tensor 'model.norm.weight'"):
        language_model.load(tmp_path)
    raw["weight_map"]["model.norm.weight"] = shard
    index.write_text(json.dumps(raw))
    (tmp_path / shard).unlink()
    with pytest.raises(CheckpointError, match=f"{shard}: no such file"):
        language_model.load(tmp_path)


def test_a_transposed_tensor_is_not_copied_on_the_host(monkeypatch):
    """JAX transposes it while it copies to the device."""
    copied, device_put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *rest: copied.append(x) or device_put(x, *rest))
    stored = np.arange(12, dtype=np.float32).reshape(3, 4)
    placement = Placement(Mesh(np.array(jax.devices()[:1]), ("tensor",)))
    for put in (files.on_device, placement.copy):
        copied.clear()
        np.testing.assert_array_equal(put(stored.T), stored.T)
        assert len(copied) == 1 and np.shares_memory(copied[0], stored)


def test_loading_holds_one_tensor_at_a_time(saved, monkeypatch):
    """While loading, the host holds at most one fused tensor, never the model."""
    sizes = []
    on_device = tensors.on_device
    monkeypatch.setattr(tensors, "on_device", lambda x: sizes.append(np.asarray(x).nbytes) or on_device(x))
    loaded = language_model.load(saved)
    leaves = [leaf.nbytes for leaf in jax.tree.leaves(loaded.params)]
    assert sorted(sizes) == sorted(leaves), "each weight goes to the device once, fused and by itself"
