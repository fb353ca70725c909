"""Tokenizers in GGUF files: byte-level BPE, and SentencePiece's BPE, from the lists in the metadata.

The metadata names how text is split before BPE (`tokenizer.ggml.pre`); the meaning of a name, and the tokens added to
a text, are those of llama.cpp's src/llama-vocab.cpp.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jspec.checkpoints.fields import MOST_NUMBER, Fields
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.gguf_file import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER = range(1, 5)
"""Types of tokens; others are unused ones and bytes."""
_SPACE = "▁"
"""A space in SentencePiece's tokens."""

_WORD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_letters(digits: str, marks: str = "") -> str:
    """Contractions, letters, digits, other characters and spaces. marks: of accents, as further letters."""
    return rf"{_CONTRACTION}|{_WORD}[\p{{L}}{marks}]+|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_REST}"


def _by_case(digits: str, contraction: str = "") -> str:
    """Words end where a capital follows a small letter."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        rf"{_WORD}{upper}*{lower}+{contraction}|{_WORD}{upper}+{lower}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
    )


@dataclasses.dataclass(frozen=True)
class Split:
    """What precedes byte-level BPE.

    pattern: of the pieces of a text; None: GPT-2's.
    before: of pieces to split off first.
    whole: whether a piece needs no merges if it is a token.
    composed: whether characters are composed (NFC).
    bos: whether BOS is added if the file does not say so.
    """

    pattern: str | None = None
    before: str | None = None
    whole: bool = False
    composed: bool = False
    bos: bool = False


_LLAMA_3 = _by_letters(r"\p{N}{1,3}")
SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), Split()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), Split(before=r"\p{N}")),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), Split(_LLAMA_3, whole=True, bos=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), Split(_LLAMA_3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Split(_by_letters(r"\p{N}"), composed=True)),
    "qwen35": Split(_by_letters(r"\p{N}", r"\p{M}"), composed=True),
    "tekken": Split(_by_case(r"\p{N}"), whole=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Split(_by_case(r"\p{N}{1,3}", _CONTRACTION + "?"))),
}
"""`tokenizer.ggml.pre` -> what precedes BPE."""
_MODELS = ("gpt2", "llama")


Parts: TypeAlias = tuple[tokenizers.Tokenizer, dict[str, tuple[str, str]], dict[str, str]]
"""A tokenizer, as `TokenizerFiles` has its parts: backend, chat templates and special tokens."""


def read_gguf_tokenizer(path: Path) -> Parts | None:
    """Read the tokenizer of a file; None if it has none. CheckpointError if it is damaged, or of an unknown kind."""
    metadata = GgufFile(path).metadata
    kind = metadata.read_text("tokenizer.ggml.model", "no_vocab")
    if kind == "no_vocab":
        return None
    if kind not in _MODELS:
        raise metadata.wrong("tokenizer.ggml.model", repr(kind), f"must be one of {', '.join(_MODELS)}")
    # Tokens, and their types.
    tokens = list(metadata.read_texts("tokenizer.ggml.tokens", ()))
    types = metadata.read_ints("tokenizer.ggml.token_type", None) or (_NORMAL,) * len(tokens)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens has {len(tokens)} entries, {len(set(tokens))} different ones, and "
            f"tokenizer.ggml.token_type {len(types)}: must be as many"
        )
    special = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.read_int(f"tokenizer.ggml.{key}_token_id", None, least=0, most=len(tokens) - 1)
        if token is not None:
            special[f"{role}_token"] = tokens[token]
    # The tokenizer.
    try:
        if kind == "gpt2":
            backend, adds_bos = _byte_level(metadata, tokens)
        else:
            backend, adds_bos = _sentence_piece(metadata, tokens, types, special.get("unk_token")), True
    except CheckpointError:
        raise
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{path}: not a valid tokenizer ({error})") from None
    _add_tokens(backend, tokens, types)
    _frame(backend, metadata, special, adds_bos)
    return backend, _templates(metadata), special


def _merges(metadata: Fields) -> list[tuple[str, str]] | None:
    """The merges of a file, best first; None: it states none."""
    merges = metadata.read_texts("tokenizer.ggml.merges", None)
    if merges is None:
        return None
    pairs = [tuple(merge.split(" ")) for merge in merges]
    wrong = next((merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None)
    if wrong is not None:
        raise metadata.wrong("tokenizer.ggml.merges", repr(wrong), "must be two tokens with a space between them")
    return pairs  # pyright: ignore[reportReturnType]  # pairs, as checked


def _byte_level(metadata: Fields, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE, and whether BOS is added by default."""
    name = metadata.read_text("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise metadata.wrong("tokenizer.ggml.pre", repr(name), f"must be one of {', '.join(SPLITS)}")
    split = SPLITS[name]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, _merges(metadata) or [], ignore_merges=split.whole))
    if split.composed:
        backend.normalizer = normalizers.NFC()
    patterns = [pattern for pattern in (split.before, split.pattern) if pattern is not None]
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    bytes_of_pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_of_pieces])
    backend.decoder = decoders.ByteLevel()
    return backend, split.bos


def _sentence_piece(
    metadata: Fields, tokens: Sequence[str], types: Sequence[int], unknown: str | None
) -> tokenizers.Tokenizer:
    """BPE over characters, with a token for each byte of other characters."""
    # Runs of spaces are stored as such, if users of the training defined them.
    spelled = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocabulary = {token: i for i, token in enumerate(spelled)}
    merges = _merges(metadata)
    if merges is None:
        scores = metadata.read_floats("tokenizer.ggml.scores", above=-MOST_NUMBER, most=MOST_NUMBER)
        if len(scores) != len(tokens):
            raise CheckpointError(
                f"{metadata.where}: tokenizer.ggml.scores has {len(scores)} entries: must have {len(tokens)}"
            )
        merges = _implied_merges(vocabulary, scores, types)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    # A space may be added before each piece of text, and is not decoded then.
    prefix = metadata.read_flag("tokenizer.ggml.add_space_prefix", True)
    before = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return backend


def _implied_merges(vocabulary: dict[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """All pairs of tokens whose text is a token, by its score; tokens defined by users of the training come first."""
    order = sorted(vocabulary.items(), key=lambda item: (types[item[1]] != _USER, -scores[item[1]]))
    return [
        (token[:at], token[at:])
        for token, _ in order
        for at in range(len(token) - 1, 0, -1)
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Mark the tokens to find in a text before it is split; special ones add nothing to a text."""
    added = [
        AddedToken(token, normalized=False, special=kind != _USER)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER) and backend.token_to_id(token) is not None
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _frame(backend: tokenizers.Tokenizer, metadata: Fields, special: dict[str, str], adds_bos: bool) -> None:
    """Add the tokens at both ends of a text."""
    frame, ends = ["$A"], []
    for role, default in (("bos", adds_bos), ("eos", False)):
        key = f"tokenizer.ggml.add_{role}_token"
        if not metadata.read_flag(key, default):
            continue
        if f"{role}_token" not in special:
            raise metadata.wrong(key, True, f"requires {role}_token_id")
        token = special[f"{role}_token"]
        ends.append({"id": role, "ids": [backend.token_to_id(token)], "tokens": [token]})
        frame.insert(0 if role == "bos" else len(frame), role)
    if ends:
        backend.post_processor = processors.TemplateProcessing(single=frame, special_tokens=ends)  # pyright: ignore[reportArgumentType]


def _templates(metadata: Fields) -> dict[str, tuple[str, str]]:
    """The chat templates by name: the default one, and others listed in the file."""
    keys = {"default": "tokenizer.chat_template"}
    keys |= {name: f"tokenizer.chat_template.{name}" for name in metadata.read_texts("tokenizer.chat_templates", ())}
    return {
        name: (metadata.read_text(key), f"{metadata.where}: {key}") for name, key in keys.items() if metadata.has(key)
    }
