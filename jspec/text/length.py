"""A lower bound of the number of tokens of a text, without tokenizing it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

WHITESPACE = " \t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""Unicode's White_Space; a special token may absorb any number of these characters beside it."""
_SHORTENING = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
"""Normalizer -> maximum characters that become one; Unicode composes at most four."""
_PART = 2**16
"""Characters counted at a time; other threads run in between."""
_KEEPING = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")
"""Pre-tokenizers that drop no character, unless their behavior is "Removed"."""


@dataclasses.dataclass(frozen=True)
class LengthBound:
    """Bound of the characters of a text.

    per_token: maximum characters per token.
    uncounted: characters that may be in no token.
    """

    per_token: int
    uncounted: str

    def least_tokens(self, text: str, most: int) -> int:
        """A lower bound of the tokens of a text; stops counting once it is above `most`."""
        characters = 0
        for begin in range(0, len(text), _PART):
            part = text[begin : begin + _PART]
            characters += len(part) - sum(map(part.count, self.uncounted))
            if characters > most * self.per_token:
                break
        return -(-characters // self.per_token)


def length_bound(tokenizer: Mapping[str, Any], byte_of: Mapping[str, int]) -> LengthBound | None:
    """The bound for a tokenizer, or None if there is none.

    tokenizer: the content of tokenizer.json.
    byte_of: character -> byte in the alphabet of ByteLevel.
    """
    # Pre-tokenizers must pass on every counted character.
    steps = _steps(tokenizer["pre_tokenizer"], "pretokenizers")
    normalizers = _steps(tokenizer["normalizer"], "normalizers")
    if any(step["type"] not in _KEEPING or step.get("behavior") == "Removed" for step in steps):
        return None
    # In the model, each must become part of some token.
    model, uncounted = tokenizer["model"], WHITESPACE
    names = [name for name, *_ in model["vocab"]] if isinstance(model["vocab"], list) else list(model["vocab"])
    if any(step["type"] == "ByteLevel" for step in [*steps, *normalizers]):
        # Bytes without a token are dropped. A character beyond ASCII is kept if its continuation bytes have tokens.
        missing = sorted(byte for name, byte in byte_of.items() if name not in set(names))
        uncounted += "".join(chr(byte) for byte in missing if byte < 0x80)
        known = model["type"] == "BPE" and not any(0x80 <= byte < 0xC0 for byte in missing)
    elif model.get("byte_fallback"):
        known = model["type"] in ("BPE", "Unigram") and {f"<0x{byte:02X}>" for byte in range(256)} <= set(names)
    else:
        known = model["type"] == "BPE" and model.get("unk_token") is not None and not model.get("fuse_unk")
    shortening = math.prod(_shortening(step, uncounted) for step in normalizers)
    longest = max(map(len, [*names, *(token["content"] for token in tokenizer["added_tokens"])]), default=0)
    return LengthBound(shortening * longest, uncounted) if known and shortening * longest else None


def _steps(step: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """The steps of a component. name: the key of the list in a `Sequence`."""
    if step is None:
        return []
    return [inner for part in step[name] for inner in _steps(part, name)] if step["type"] == "Sequence" else [step]


def _shortening(normalizer: Mapping[str, Any], uncounted: str) -> int:
    """Maximum characters that become one; 0: unbounded."""
    if normalizer["type"] != "Replace":
        return _SHORTENING.get(normalizer["type"], 0)
    pattern, content = normalizer["pattern"].get("String", ""), normalizer["content"]
    return math.ceil(len(pattern) / len(content)) if content and not set(content) & set(uncounted) else 0
