"""`load`: bundled names, directories and hub ids, and drafts with another tokenizer."""

import json
import shutil

import pytest
import toy

import jspec
from jspec.checkpoints import language_model, source
from jspec.checkpoints.language_model import CheckpointError
from jspec.checkpoints.plan import Plan
from jspec.core.package import ASSETS
from jspec.loading import hub


@pytest.fixture
def directories(tmp_path):
    for name, config in (("target", toy.TARGET), ("draft", toy.DRAFT)):
        language_model.save(tmp_path / name, config, toy.random_params(config), dtype="float32", eos=(3,))
    return tmp_path


def test_a_directory_with_a_draft(directories):
    loaded = jspec.load(directories / "target", draft=str(directories / "draft"), dtype="float32")
    assert (loaded.target, loaded.draft) == (toy.TARGET, toy.DRAFT)
    assert loaded.eos == (3,) and loaded.tokenizer is None
    assert "2 layers" in repr(loaded) and "draft of 1 layers" in repr(loaded)
    assert jspec.generate(loaded, [1, 2], max_new_tokens=4).tokens == (
        jspec.generate(loaded, [1, 2], max_new_tokens=4, drafter=None).tokens
    )


def test_a_directory_without_a_draft(directories):
    loaded = jspec.load(directories / "target")
    assert loaded.draft is None and loaded.params.draft is None
    assert "no draft" in repr(loaded)


def test_a_hub_id_is_downloaded(directories, monkeypatch):
    downloads = []

    def snapshot_download(name, allow_patterns, ignore_patterns):
        downloads.append((name, allow_patterns, ignore_patterns))
        return str(directories / name.split("/")[1])

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", snapshot_download)
    loaded = jspec.load("somebody/target", draft="somebody/draft", exact=False)
    assert loaded.target == toy.TARGET and loaded.draft == toy.DRAFT
    assert [name for name, *_ in downloads] == ["somebody/target", "somebody/draft"]
    assert "*.safetensors" in downloads[0][1] and "original/*" in downloads[0][2]


def test_a_failed_download_is_an_error(monkeypatch):
    def snapshot_download(name, allow_patterns, ignore_patterns):
        raise OSError("offline")

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(
        CheckpointError, match="somebody/target: no such directory, and the download from the hub failed .offline"
    ):
        jspec.load("somebody/target")


def test_a_hub_out_of_reach_is_an_error_with_its_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(hub.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="not in the hub's cache, and the hub cannot be reached .*HF_HUB_OFFLINE"):
        jspec.load("somebody/target")


def test_each_directory_is_opened_once(directories, monkeypatch):
    opened, read_fields = [], source.read_fields
    monkeypatch.setattr(source, "read_fields", lambda path: opened.append(path) or read_fields(path))
    jspec.load(directories / "target", draft=directories / "draft")
    assert opened == [directories / "target" / "config.json", directories / "draft" / "config.json"]


def test_unknown_names():
    with pytest.raises(
        ValueError,
        match="'bundled:gpt' is unknown; bundled models: python-assistant, python-block, python-eagle3, python-small, "
        "python-tiny",
    ):
        jspec.load("bundled:gpt")
    with pytest.raises(CheckpointError, match="/no/such/place: no such directory"):
        jspec.load("/no/such/place")


def test_a_draft_with_another_tokenizer_is_an_error(directories, monkeypatch):
    assets = ASSETS / "python-small"
    for name in ("target", "draft"):
        shutil.copy(assets / "tokenizer_config.json", directories / name)
        shutil.copy(assets / "tokenizer.json", directories / name)
    assert jspec.load(directories / "target", draft=directories / "draft").tokenizer is not None
    path = directories / "draft" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    monkeypatch.setattr(Plan, "read", None)  # Known before any weight is read.
    with pytest.raises(ValueError, match="has a different tokenizer than"):
        jspec.load(directories / "target", draft=directories / "draft")


def test_the_end_of_text_of_the_tokenizer_ends_texts(tmp_path):
    """Chat models may name another token in generation_config.json."""
    shutil.copytree(ASSETS / "python-tiny", tmp_path / "model")
    path = tmp_path / "model/tokenizer_config.json"
    raw = json.loads(path.read_text())
    (end,) = jspec.load(tmp_path / "model").eos
    assert jspec.load(tmp_path / "model").tokenizer.vocabulary()[raw["eos_token"]] == end
    path.write_text(json.dumps({**raw, "eos_token": "def"}))
    loaded = jspec.load(tmp_path / "model")
    other = loaded.tokenizer.vocabulary().get("def")
    assert other is not None and loaded.eos == tuple(sorted((end, other)))
