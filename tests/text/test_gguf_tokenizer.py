"""Tokenizers in GGUF files are those that the metadata describes; damaged ones are refused."""

import json

import gguf
import gguf_files
import numpy as np
import pytest
import tokenizers

from jspec.checkpoints.files import CheckpointError
from jspec.cli import train
from jspec.core.package import ASSETS
from jspec.text.gguf_tokenizer import SPLITS
from jspec.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "   three before, two after  ",
    "Hello, world! I'll see WE'RE can't",
    "def f(x):\n    return x**2  # 12345\n\n\nclass A:\n\t\tpass\r\n",
    "1234567890 3.14 ½ Ⅷ ٣",
    "naïve café – 東京 😀👍🏽 Å",
    "a\u00a0b\u200bc \u2581 \x01",
    "camelCaseHTTPServer/path",
    "<|endoftext|>after",
]
SOURCE = json.loads((ASSETS / "python-small" / "tokenizer.json").read_text())
VOCABULARY, MERGES = SOURCE["model"]["vocab"], [" ".join(pair) for pair in SOURCE["model"]["merges"]]
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUBLISHED = {
    "gpt-2": [None],
    "smollm": [{"type": "Digits", "individual_digits": True}, None],
    "llama-bpe": [
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen2": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "qwen35": [
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}
"""How models with these names split a text, by their tokenizer.json; None: the split of ByteLevel itself."""


def write(path, metadata):
    writer = gguf.GGUFWriter(path / "x.gguf", "llama")
    for key, value in metadata.items():
        gguf_files.add(writer, key, value)
    writer.add_tensor("token_embd.weight", np.ones((1, 1), np.float32))
    return gguf_files.close(writer)


def byte_level(path, pre="smollm", **changes):
    raw = gguf_files.tokenizer_metadata(
        VOCABULARY, pre, merges=MERGES, token_type=[3] + [1] * (len(VOCABULARY) - 1), eos_token_id=0, bos_token_id=0
    )
    raw |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return write(path, {key: value for key, value in raw.items() if value is not None})


@pytest.mark.parametrize("name", PUBLISHED)
def test_byte_level_bpe_splits_as_published(tmp_path, name):
    loaded = Tokenizer.load(byte_level(tmp_path, name))
    assert loaded is not None
    steps = [
        {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
        if isinstance(step, str)
        else step
        for step in PUBLISHED[name]
        if step is not None
    ]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": None in PUBLISHED[name]}
    source = {**SOURCE, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, last]}}
    source["normalizer"] = {"type": "NFC"} if name.startswith("qwen") else None
    expected = tokenizers.Tokenizer.from_str(json.dumps(source))
    for line in TEXTS:
        ids = loaded.encode(line, special=False)
        assert ids == expected.encode(line, add_special_tokens=False).ids, line
        assert loaded.decode(ids) == expected.decode(ids)
        assert b"".join(map(loaded.token_bytes().__getitem__, ids)).decode() == loaded.decode(ids)
    assert loaded.special_ids == {"<|endoftext|>": 0}
    assert loaded.special_roles == {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


@pytest.mark.parametrize(
    ("pre", "flags", "frame"),
    [
        ("smollm", {}, (0, 0)),
        ("smollm", {"add_bos_token": True}, (1, 0)),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, (1, 1)),
        ("smollm", {"add_bos_token": False, "add_eos_token": True}, (0, 1)),
        ("llama-bpe", {}, (1, 0)),
        ("llama-bpe", {"add_bos_token": False}, (0, 0)),
        ("tekken", {}, (1, 0)),
    ],
)
def test_the_flags_of_the_file(tmp_path, pre, flags, frame):
    loaded = Tokenizer.load(byte_level(tmp_path, pre, **flags))
    inner = loaded.encode("hi there", special=False)
    assert 0 not in inner
    assert loaded.encode("hi there") == [0] * frame[0] + inner + [0] * frame[1]


def test_templates(tmp_path):
    path = write(
        tmp_path,
        {
            **gguf_files.tokenizer_metadata({"a": 0, "b": 1}, "gpt-2", merges=["a b"], bos_token_id=1),
            "tokenizer.ggml.tokens": ["a", "b", "ab"],
            "tokenizer.ggml.token_type": [1, 1, 1],
            "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
            "tokenizer.chat_template.tool_use": "tools",
            "tokenizer.chat_templates": ["tool_use"],
        },
    )
    loaded = Tokenizer.load(path)
    assert sorted(loaded.templates) == ["default", "tool_use"]
    messages = [{"role": "user", "content": "ab"}]
    assert loaded.apply_chat_template(messages) == "bab"
    assert loaded.apply_chat_template(messages, tools=[]) == "tools"
    assert loaded.chat(messages) == [1, 2]


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<unk>", "<s>", "</s>", "<tool>", "  ", *BYTES, *"▁habcde", "ha", "▁h", "▁ha"]
"""As SentencePiece lists them. `ha` has a better score than `▁h`, though it comes first here, too."""


def sentence_piece(path, **changes):
    types = [2, 3, 3, 4, 4, *[6] * 256, *[1] * (len(PIECES) - 261)]
    raw = {
        **{"model": "llama", "tokens": PIECES, "token_type": types, "bos_token_id": 1, "eos_token_id": 2},
        **{"unknown_token_id": 0, "scores": [0.0 if kind != 1 else -float(i) for i, kind in enumerate(types)]},
        **changes,
    }
    return write(path, {f"tokenizer.ggml.{key}": value for key, value in raw.items() if value is not None})


def spelled(tokenizer, line, **options):
    names = {i: token for token, i in tokenizer.vocabulary().items()}
    return [names[i] for i in tokenizer.encode(line, **options)]


def test_sentence_piece(tmp_path):
    loaded = Tokenizer.load(sentence_piece(tmp_path))
    assert spelled(loaded, "ha a") == ["<s>", "▁ha", "▁", "a"]
    assert spelled(loaded, "é<tool>ha</s>", special=False) == ["▁", "<0xC3>", "<0xA9>", "<tool>", "▁ha", "</s>"]
    # Runs of spaces that users of the training defined are joined before anything else.
    assert spelled(loaded, " ha", special=False) == ["▁▁", "ha"]
    for line in ("ha a", "  h", "é ▁", "a\n\tb", "漢 h"):
        ids = loaded.encode(line, special=False)
        assert loaded.decode(ids) == line.replace("▁", " ")
    assert loaded.leading_spaces(loaded.vocabulary()["▁ha"]) == 1
    assert loaded.special_ids.keys() == {"<unk>", "<s>", "</s>"}


def test_without_a_space_before(tmp_path):
    loaded = Tokenizer.load(sentence_piece(tmp_path, add_space_prefix=False, add_bos_token=False, add_eos_token=True))
    assert spelled(loaded, "ha ha") == ["ha", "▁ha", "</s>"]
    assert loaded.decode(loaded.encode(" ha")) == " ha"


def test_merges_follow_the_scores(tmp_path):
    scores = [0.0] * len(PIECES)
    scores[PIECES.index("ha")], scores[PIECES.index("▁h")] = -5.0, -1.0
    loaded = Tokenizer.load(sentence_piece(tmp_path, scores=scores, add_bos_token=False))
    assert spelled(loaded, "hah") == ["▁ha", "h"]
    scores[PIECES.index("▁ha")] = -9.0
    loaded = Tokenizer.load(sentence_piece(tmp_path, scores=scores, add_bos_token=False, merges=["▁ h"]))
    assert spelled(loaded, "ha") == ["▁h", "a"]


@pytest.mark.parametrize(
    ("make", "changes", "error"),
    [
        (byte_level, {"pre": "spiral"}, "tokenizer.ggml.pre='spiral': must be one of gpt-2"),
        (byte_level, {"model": "bert"}, "tokenizer.ggml.model='bert': must be one of gpt2, llama"),
        (byte_level, {"token_type": [1]}, "has 4096 entries, 4096 different ones, and tokenizer.ggml.token_type 1"),
        (byte_level, {"tokens": ["a"] * 4096}, "has 4096 entries, 1 different ones"),
        (byte_level, {"merges": ["a"]}, "tokenizer.ggml.merges='a': must be two tokens"),
        (byte_level, {"merges": ["a ☃"]}, "not a valid tokenizer"),
        (byte_level, {"eos_token_id": 4096}, "tokenizer.ggml.eos_token_id=4096: must be from 0 to 4095"),
        (byte_level, {"bos_token_id": None, "add_bos_token": True}, "add_bos_token=True: requires bos_token_id"),
        (byte_level, {"add_bos_token": 1}, "tokenizer.ggml.add_bos_token=1: must be"),
        (sentence_piece, {"scores": [1.0]}, "tokenizer.ggml.scores has 1 entries: must have 271"),
        (sentence_piece, {"scores": [float("nan")] * 271}, r"tokenizer.ggml.scores\[0\]=nan"),
    ],
)
def test_damaged_tokenizers(tmp_path, make, changes, error):
    with pytest.raises(CheckpointError, match=f"x.gguf: .*{error}"):
        Tokenizer.load(make(tmp_path, **changes))


def test_a_file_without_a_tokenizer(tmp_path):
    assert Tokenizer.load(write(tmp_path, {"tokenizer.ggml.model": "no_vocab"})) is None
    assert set(PUBLISHED) <= set(SPLITS)


def test_training_data_in_the_tokens_of_a_file(tmp_path):
    """`jspec train data` writes the same ones to its directory."""
    path = byte_level(tmp_path, eos_token_id=0)
    (tmp_path / "a.txt").write_text("a line of text\n" * 400)
    assert (
        train.main(["data", "--tokenizer", str(path), "--text", str(tmp_path / "a.txt"), "--out", str(tmp_path / "d")])
        == 0
    )
    of_data, of_file = Tokenizer.load(tmp_path / "d"), Tokenizer.load(path)
    assert of_data is not None and of_file is not None
    assert of_data.vocabulary() == of_file.vocabulary()
    for text in TEXTS:
        assert of_data.encode(text) == of_file.encode(text)
    tokens = np.load(tmp_path / "d" / "train.npy")
    assert of_file.decode(tokens[:20].tolist()).startswith("a line of text\na line of")
