"""The lower bound of the tokens of a text holds for every text; a tokenizer that admits none has none."""

import random
import unicodedata

import fake_engine
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from jspec.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def bpe(vocabulary, merges=(), **options):
    return tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(vocabulary)}, list(merges), **options))


def byte_level(normalizer=None, **step):
    backend = bpe([*ALPHABET, "ab", "abab"], [("a", "b"), ("ab", "ab")])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(**step)
    backend.normalizer, backend.decoder = normalizer, decoders.ByteLevel()
    return backend


def without_byte(names):
    backend = bpe([one for one in ALPHABET if one not in names])
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    return backend


def without_bytes():
    """As those of models that have not seen all control characters and planes."""
    return without_byte("ĄñòÀ")  # 0x04, 0xF1, 0xF2 and 0xC0


def llama():
    backend = bpe(["<unk>", *BYTES, "▁", "a", "▁a"], [("▁", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def with_stripping():
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<|user|>", lstrip=True, rstrip=True)])
    return backend


def composing():
    backend = bpe(["?", "\u1f82"], unk_token="?")
    backend.normalizer = normalizers.NFC()
    return backend


def unigram(names):
    backend = tokenizers.Tokenizer(models.Unigram([(name, -1.0) for name in names], 0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


BOUNDED = {
    "bundled": lambda: tokenizers.Tokenizer.from_file(str(fake_engine.ASSETS / "tokenizer.json")),
    "bytes": byte_level,
    "without bytes": without_bytes,
    "nfc": composing,
    "replace": lambda: byte_level(normalizers.Replace("abcd", "z")),
    "llama": llama,
    "stripping": with_stripping,
    "unigram": lambda: unigram(["<unk>", "▁", "a", *BYTES]),
    "unknown": lambda: bpe(["<unk>", "a"], unk_token="<unk>"),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens(name):
    tokenizer, source = Tokenizer(BOUNDED[name]()), random.Random(0)
    composed = unicodedata.normalize("NFD", "\u1f82\ud55c\u01d8")
    pieces = ["a", "ab", "abcd", " ", "\n\t", "\u3000", "é", composed, "雪", "😀", "<|user|>", "0", "'s", "▁", "<unk>"]
    pieces += ["\4", "\U00040000"]
    for length in (0, 1, 2, 5, 40):
        for _ in range(60):
            text = "".join(source.choice(pieces) * source.choice((1, 1, 30)) for _ in range(length))
            least = tokenizer.least_tokens(text, 10**9)
            assert least <= len(tokenizer.encode(text)), text
    assert tokenizer.least_tokens("x" * 10**6, 10**9) > 10**6 / 500
    assert 5 < tokenizer.least_tokens("x" * 10**6, 5) < tokenizer.least_tokens("x" * 10**6, 10**9)


def splitting(behavior):
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("a", behavior), pre_tokenizers.ByteLevel()])
    return backend


def by_words():
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


UNBOUNDED = {
    "words": by_words,
    "removed": lambda: splitting("removed"),
    "replaced by nothing": lambda: byte_level(normalizers.Replace("x", "")),
    "replaced by regex": lambda: byte_level(normalizers.Replace(tokenizers.Regex("x+"), "x")),
    "strip": lambda: byte_level(normalizers.StripAccents()),
    "fused": lambda: bpe(["<unk>", "a"], unk_token="<unk>", fuse_unk=True),
    "without continuation": lambda: without_byte("Ģ"),
    "replaced by spaces": lambda: byte_level(normalizers.Replace("x", " ")),
    "dropped": lambda: bpe(["a", "b"]),
    "some bytes": lambda: unigram(["<unk>", "▁", "a", *BYTES[1:]]),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_tokenizer_without_a_bound(name):
    assert Tokenizer(UNBOUNDED[name]()).least_tokens("x" * 10**6, 10**9) == 0


def test_a_split_that_keeps_all_is_bounded():
    assert Tokenizer(splitting("isolated")).least_tokens("x" * 9, 10**9) == 3
