"""A bound of the characters of a text by its tokens, known without tokenizing it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

WHITESPACE = " \t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""Unicode's White_Space; special tokens may take any number of these characters beside them."""
_SHORTENING = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
"""Normalizers -> characters that become one at most; Unicode composes at most four."""
_PART = 2**16
_KEEPING = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")
"""Steps before tokenizing that drop no character, unless their behavior is "Removed"."""


@dataclasses.dataclass(frozen=True)
class LengthBound:
    """Characters of a text for each of its tokens.

    per_token: most of them.
    uncounted: characters that may have no token.
    """

    per_token: int
    uncounted: str

    def least_tokens(self, text: str, most: int) -> int:
        """A lower bound of the tokens of a text; counts no further than it takes to be above `most`."""
        characters = 0
        # Other threads run between two parts.
        for begin in range(0, len(text), _PART):
            part = text[begin : begin + _PART]
            characters += len(part) - sum(map(part.count, self.uncounted))
            if characters > most * self.per_token:
                break
        return -(-characters // self.per_token)


def length_bound(tokenizer: Mapping[str, Any], byte_of: Mapping[str, int]) -> LengthBound | None:
    """The bound of a tokenizer; None: it has none.

    tokenizer: the content of tokenizer.json.
    byte_of: character -> byte in ByteLevel.
    """
    # Every counted character must reach the model.
    steps = _steps(tokenizer["pre_tokenizer"], "pretokenizers")
    normalizers = _steps(tokenizer["normalizer"], "normalizers")
    if any(step["type"] not in _KEEPING or step.get("behavior") == "Removed" for step in steps):
        return None
    # There, each must be part of some token.
    model, uncounted = tokenizer["model"], WHITESPACE
    names = [name for name, *_ in model["vocab"]] if isinstance(model["vocab"], list) else list(model["vocab"])
    if any(step["type"] == "ByteLevel" for step in [*steps, *normalizers]):
        # Bytes without a token are dropped; characters beyond ASCII have others, of continuation.
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
    """One step or several. name: of the list in a sequence."""
    if step is None:
        return []
    return [one for part in step[name] for one in _steps(part, name)] if step["type"] == "Sequence" else [step]


def _shortening(normalizer: Mapping[str, Any], uncounted: str) -> int:
    """Characters that become one at most; 0: without a bound."""
    if normalizer["type"] != "Replace":
        return _SHORTENING.get(normalizer["type"], 0)
    pattern, content = normalizer["pattern"].get("String", ""), normalizer["content"]
    return math.ceil(len(pattern) / len(content)) if content and not set(content) & set(uncounted) else 0
