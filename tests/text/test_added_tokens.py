"""Tokens that tokenizer.json lacks and other files of a tokenizer have."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jspec.checkpoints.language_model import CheckpointError
from jspec.text.tokenizer import Tokenizer


@pytest.fixture
def directory(tmp_path):
    """A tokenizer of bytes, with "</t>" in its vocabulary and "<s>" as an added token."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab={**vocabulary, "</t>": 256}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


ADDED = {"content": "<|end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"added_tokens_decoder": {"258": {**ADDED, "special": True}}}},
        {"tokenizer_config.json": {"added_tokens_decoder": {"258": {**ADDED, "special": False}}}},
        {"added_tokens.json": {"<|end|>": 258}},
        {"added_tokens.json": {"<|end|>": 258}, "special_tokens_map.json": {"eos_token": "<|end|>"}},
        {
            "added_tokens.json": {"<|end|>": 300},
            "tokenizer_config.json": {"added_tokens_decoder": {"257": {**ADDED, "content": "<s>"}}},
        },
        # Tokens of the vocabulary that are not split in texts.
        {"tokenizer_config.json": {"eos_token": "</t>"}},
        {"tokenizer_config.json": {"additional_special_tokens": ["</t>"]}},
        {"special_tokens_map.json": {"pad_token": {**ADDED, "content": "</t>"}}},
    ],
    ids=["special", "other", "ids", "role", "stale ids", "known role", "known list", "known map"],
)
def test_tokens_that_only_other_files_have_are_those_of_transformers(directory, needs, files):
    transformers = needs("transformers")
    known = {"tokenizer_config.json": {}, "config.json": {"model_type": "llama"}}
    for name, raw in (known | files).items():
        raw = raw | {"tokenizer_class": "PreTrainedTokenizerFast"} if name == "tokenizer_config.json" else raw
        (directory / name).write_text(json.dumps(raw))
    text = "hi <|end|></t> <s>x"
    loaded = Tokenizer.load(directory)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    assert loaded.encode(text) == theirs.encode(text)
    assert loaded.decode(loaded.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert "<|end|>" not in loaded.vocabulary() or loaded.vocabulary()["<|end|>"] == 258


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"9" * 5000: {"content": "<|end|>"}}, "added_tokens_decoder.9+.: must be the id of a token"),
        ({"x": {"content": "<|end|>"}}, "added_tokens_decoder.x.: must be the id of a token"),
        ({"3": {"content": 5}}, "added_tokens_decoder.3.content=5"),
        ({"3": "x"}, "added_tokens_decoder.3='x': must be an object"),
    ],
)
def test_added_tokens_that_cannot_be_added(directory, raw, message):
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": raw}))
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(directory)


def test_a_token_whose_id_is_not_the_next_is_left_out(directory):
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"300": ADDED}}))
    with pytest.warns(UserWarning, match=r"lacks the token '<\|end\|>' with id 300, which cannot be added"):
        assert "<|end|>" not in Tokenizer.load(directory).vocabulary()


def test_special_tokens_without_an_id_are_named(directory):
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    with pytest.warns(UserWarning, match=r"lacks the special token '<\|end\|>'"):
        assert "<|end|>" not in Tokenizer.load(directory).vocabulary()
