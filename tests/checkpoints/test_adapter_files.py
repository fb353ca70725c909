"""Adapters as files: merged, or refused with the key or the tensor, before weights are read."""

import json
import re

import lora_files
import numpy as np
import optional
import pytest
import toy
from safetensors.numpy import load_file, save_file

import jspec
from jspec import cli
from jspec.checkpoints import language_model
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.scaled import INT8_CONFIG, to_int8
from jspec.checkpoints.tensors import Tensors
from jspec.loading import fingerprint

PROMPT = [3, 1, 4, 1, 5]
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    language_model.save(directory, toy.TARGET, toy.random_params(toy.TARGET), dtype="float32")
    return directory


@pytest.fixture
def adapter(base, tmp_path):
    return lora_files.write(base, tmp_path / "adapter")


def test_weights_are_those_of_the_merged_checkpoint_in_all_formats(base, adapter, tmp_path):
    merged = lora_files.merge(base, adapter, tmp_path / "merged")
    for options in ({}, {"weights": "int8"}, {"dtype": "bfloat16"}, {"weights": "int4", "dtype": "bfloat16"}):
        got, expected = (
            jspec.load(source, adapter=change, **options).params for source, change in ((base, adapter), (merged, None))
        )
        toy.assert_same(got, expected)
    plain, changed = jspec.load(base), jspec.load(base, adapter=adapter)
    assert fingerprint.of_weights(plain.params) != fingerprint.of_weights(changed.params)
    out = [jspec.generate(model, [PROMPT], max_new_tokens=8).tokens for model in (plain, changed, jspec.load(merged))]
    assert out[0] != out[1] == out[2]


def test_a_torch_file_is_read(base, adapter):
    torch = optional.needed("torch")
    expected = jspec.load(base, adapter=adapter).params
    tensors = load_file(adapter / lora_files.WEIGHTS)
    torch.save({name: torch.tensor(array) for name, array in tensors.items()}, adapter / "adapter_model.bin")
    (adapter / lora_files.WEIGHTS).unlink()
    toy.assert_same(jspec.load(base, adapter=adapter).params, expected)


def test_the_draft_stays_as_it_is(base, adapter):
    model = jspec.load(base, draft=base, adapter=adapter)
    toy.assert_same(model.params.draft, jspec.load(base).params.target)
    toy.assert_same(model.params.target, jspec.load(base, adapter=adapter).params.target)


def test_commands_take_an_adapter(base, adapter, tmp_path, capsys):
    assert cli.main(["generate", "--model", str(base), "--adapter", str(tmp_path / "none"), "x"]) == 2
    assert f"--adapter {tmp_path}/none: no such directory" in capsys.readouterr().err
    assert cli.main(["bench", "--preset", "tiny", "--adapter", str(adapter)]) == 2
    assert "--adapter" in capsys.readouterr().err


CONFIGS = [
    ({"peft_type": "IA3"}, "peft_type='IA3' (must be 'LORA')"),
    ({"bias": "all"}, "bias='all' (must be 'none')"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' (must be one of True, False"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out=True (must be absent or null)"),
    ({"layer_replication": [[0, 1]]}, "layer_replication=[[0, 1]] (must be absent"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices=[3] (must be absent"),
    ({"lora_bias": True}, "lora_bias=True (must"),
    ({"next_years_option": "on"}, "next_years_option='on' (must be absent or null)"),
    ({"r": 0}, "r=0: must"),
    ({"lora_alpha": "x"}, "lora_alpha='x': must"),
    ({"use_rslora": 1}, "use_rslora=1: must"),
    ({"rank_pattern": [3]}, "rank_pattern=[3]: must be an object"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj=0: must"),
    ({"alpha_pattern": {"(.+)+q": 1}}, "alpha_pattern.(.+)+q='(.+)+q': must be a regular expression of at most"),
    ({"target_modules": "(a*)*b"}, "target_modules='(a*)*b': must be a regular expression of at most"),
    ({"target_modules": "(a"}, "target_modules='(a': must be a regular expression (missing"),
    ({"target_modules": "(?=a)"}, "or a list of names"),
    ({"target_modules": 3}, "target_modules=3: must be a list"),
    ({"target_modules": ".*", "layers_to_transform": [0]}, "layers_to_transform=[0]: must be null if"),
    ({"target_modules": ["k_proj"]}, "down_proj.lora_A.weight is for no module of target_modules=('k_proj',)"),
    ({"target_modules": r".*\.1\..*"}, "layers.0.mlp.down_proj.lora_A.weight is for no module of target_modules='.*"),
    ({"exclude_modules": ["q_proj"]}, "self_attn.q_proj.lora_A.weight is for no module"),
    ({"layers_to_transform": [1]}, "layers.0.mlp.down_proj.lora_A.weight is for no module of target_modules="),
    ({"r": 2}, "lora_A.weight has shape (3, 64): must be (2, 64)"),
    ({"rank_pattern": {"q_proj": 5}}, "q_proj.lora_A.weight has shape (3, 32): must be (5, 32)"),
    ({"use_dora": True}, "must have a lora_magnitude_vector with use_dora=True"),
]


@pytest.mark.parametrize(("values", "problem"), CONFIGS)
def test_an_unsupported_option_is_refused_by_name(base, adapter, values, problem, monkeypatch):
    lora_files.edit(adapter, **values)
    assert problem in _refusal(base, adapter, monkeypatch)


def _rename(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def _rename_pair(tensors, module):
    for factor in ("lora_A.weight", "lora_B.weight"):
        tensors[f"{module}.{factor}"] = tensors.pop(f"{Q}.{factor}")


def _set(name, *shape, value=0.0):
    return lambda tensors: tensors.update({name: np.full(shape, value, np.float32)})


TENSORS = [
    (lambda tensors: tensors.pop(f"{Q}.lora_B.weight"), "q_proj.lora_A.weight has no factor B beside it"),
    (lambda tensors: tensors.pop(f"{Q}.lora_A.weight"), "q_proj.lora_B.weight has no factor A beside it"),
    (_set(f"{Q}.lora_A.weight", 3, 31), "q_proj.lora_A.weight has shape (3, 31): must be (3, 32)"),
    (_set(f"{Q}.lora_B.weight", 3), "q_proj.lora_B.weight has shape (3,): must be (64, 3)"),
    (_set(f"{Q}.lora_A.weight", 3, 32, value=np.nan), "q_proj.lora_A.weight has values that are NaN or infinite"),
    (_set("model.x", 1), "model.x must begin with base_model.model."),
    (_set("base_model.model.lm_head.weight", 61, 32), "lm_head.weight must be a factor of a module, or belong to a"),
    (_set(f"{Q}.lora_magnitude_vector", 64), "lora_magnitude_vector must have none with use_dora=False"),
    (_rename(f"{Q}.lora_A.weight", Q.replace("0", "7") + ".lora_A.weight"), "has no factor"),
    (
        lambda tensors: _rename_pair(tensors, Q.replace("0", "7")),
        "layers.7.self_attn.q_proj.lora_A.weight belongs to no tensor of the checkpoint",
    ),
    (
        lambda tensors: _rename_pair(tensors, PIXELS),
        "vision_tower.layers.0.self_attn.q_proj.lora_A.weight belongs to no tensor of the checkpoint",
    ),
]
PIXELS = "base_model.model.vision_tower.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(("change", "problem"), TENSORS)
def test_a_wrong_tensor_is_refused_by_name(base, adapter, change, problem, monkeypatch):
    lora_files.edit_tensors(adapter, change)
    assert problem in _refusal(base, adapter, monkeypatch)


def _refusal(base, adapter, monkeypatch):
    """The message of the refusal, before a tensor of the checkpoint is read."""
    monkeypatch.setattr(Tensors, "put", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(CheckpointError, match=re.escape(str(adapter))) as refusal:
        jspec.load(base, adapter=adapter)
    return str(refusal.value)


def test_replaced_modules_have_the_shape_of_the_checkpoint(base, adapter):
    lora_files.edit(adapter, modules_to_save=["lm_head"])
    lora_files.edit_tensors(adapter, _set("base_model.model.lm_head.weight", 60, 32))
    with pytest.raises(CheckpointError, match=re.escape("lm_head.weight has shape (60, 32): must be (61, 32)")):
        jspec.load(base, adapter=adapter)
    lora_files.edit_tensors(adapter, _set("base_model.model.lm_head.weight", 61, 32, value=0.5))
    np.testing.assert_array_equal(jspec.load(base, adapter=adapter).params.target.lm_head, 0.5)


def test_files_are_required(base, adapter):
    (adapter / lora_files.WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="contains neither adapter_model.safetensors nor adapter_model.bin"):
        jspec.load(base, adapter=adapter)
    (adapter / lora_files.CONFIG).unlink()
    with pytest.raises(CheckpointError, match="adapter_config.json: no such file"):
        jspec.load(base, adapter=adapter)


def test_quantized_matrices_are_refused(base, adapter, tmp_path):
    narrow = lora_files.merge(base, adapter, tmp_path / "narrow", scale=0.0)
    save_file(to_int8(load_file(base / "model.safetensors")), narrow / "model.safetensors")
    config = narrow / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": INT8_CONFIG}))
    with pytest.raises(CheckpointError, match="lora_A.weight is for .* which is quantized, of dtype int8"):
        jspec.load(narrow, adapter=adapter)
