"""Sampling parameters that a checkpoint recommends."""

import json
import shutil

import pytest

import jspec
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.generation_config import read_sampling
from jspec.core.sampling import Sampling
from jspec.loading.hub import locate


@pytest.mark.parametrize(
    ("values", "sampling"),
    [
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}, Sampling(0.6, 20, 0.95)),
        ({"do_sample": False, "repetition_penalty": 1.05, "max_new_tokens": 5}, Sampling(repetition_penalty=1.05)),
        ({"temperature": 1.0, "top_k": 0, "top_p": 1, "min_p": None, "eos_token_id": 3}, None),
        ({"temperature": 0}, Sampling(temperature=0.0)),
        (None, None),
    ],
    ids=str,
)
def test_what_a_file_recommends(tmp_path, values, sampling):
    if values is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert read_sampling(tmp_path) == sampling


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"top_p": 1.5}, {"top_k": 2.5}, {"min_p": True}], ids=str)
def test_an_invalid_value_is_refused_by_name(tmp_path, values):
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"generation_config.json: Sampling.{next(iter(values))}="):
        read_sampling(tmp_path)


def test_a_loaded_model_has_them(tmp_path):
    source = jspec.load("bundled:python-tiny")
    assert source.sampling is None
    directory = tmp_path / "model"
    shutil.copytree(locate("bundled:python-tiny"), directory)
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    assert jspec.load(directory).sampling == Sampling(temperature=0.5)
