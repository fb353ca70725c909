"""Fields that choose tokens and end a text: sampling parameters, seeds, stop strings and ids."""

import hashlib
from collections.abc import Mapping
from typing import Any

from jspec.core.checks import check_int, check_number, check_text
from jspec.core.sampling import Sampling
from jspec.generation.options import MAX_SEED
from jspec.serve.checks import check_whole

_MAX_STOP_STRINGS = 16
_MAX_STOP_BYTES = 256  # of all strings: each byte is a row of their automaton
PARAMETERS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")},
    "min_tokens": "min_new_tokens",
}
"""Fields -> those of `Sampling`."""
_WITHOUT_EFFECT = {("top_p", 1.0), ("top_k", -1), ("top_k", 0), ("min_p", 0.0)}
"""Fields of `Sampling` and values to turn them off, as other servers write them."""


def make_sampling(fields: Mapping[str, Any], defaults: Sampling) -> Sampling | None:
    """The sampling parameters; None if tokens are chosen greedily and nothing changes the logits.

    defaults: parameters where the request has none.
    """
    # Each field under its name in `Sampling`.
    values = {name: value for name, value in vars(defaults).items() if value is not None}
    values |= {name: fields[field] for field, name in PARAMETERS.items() if fields[field] is not None}
    if values.get("top_p") == 0:  # no token but the most probable one
        values |= {"top_p": 1.0, "top_k": 1}
    bias = values.pop("logit_bias", None) or None
    values = {name: value for name, value in values.items() if (name, value) not in _WITHOUT_EFFECT}
    # Greedy decoding ignores truncation.
    if values.get("temperature") == 0:
        values = {name: value for name, value in values.items() if name not in ("top_k", "top_p", "min_p")}
    sampling = Sampling(**values, logit_bias=bias)
    return None if sampling == Sampling(temperature=0.0) else sampling


def check_parameter(name: str, value: object) -> int | float:
    """A number that `Sampling` takes under the field's name there, or that turns it off."""
    field = PARAMETERS[name]
    whole = field in ("top_k", "min_new_tokens")
    number = check_whole(name, value, least=-1, most=2**31 - 1) if whole else check_number(name, value)
    if (field, number) in _WITHOUT_EFFECT or (field, number) == ("top_p", 0):
        return number
    # Report the error under the name of the request.
    try:
        parameter: dict[str, Any] = {field: number}
        Sampling(**parameter)
    except ValueError as error:
        raise ValueError(f"{name}={value!r}: {str(error).partition(': ')[2]}") from None
    return number


def check_bias(name: str, value: object, *, vocab_size: int) -> dict[int, float]:
    """The bias of each token id."""
    if not isinstance(value, dict):
        raise TypeError(f"{name}: must be an object of token id -> number")
    bias = {}
    for key, number in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20 and str(int(key)) == key and int(key) < vocab_size):
            raise ValueError(f"{name}[{key[:40]!r}]: keys must be token ids from 0 to {vocab_size - 1}")
        bias[int(key)] = check_number(f"{name}[{key!r}]", number)
    return bias


def check_seed(name: str, value: object) -> int | None:
    """A seed of `RequestOptions`; None, which is random, for -1. Integers beyond its width are hashed."""
    seed = check_whole(name, value, least=-(2**63), most=2**63 - 1)
    if seed == -1:
        return None
    if 0 <= seed <= MAX_SEED:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def check_stop(name: str, value: object, *, listed: bool = False) -> list[str]:
    """One or several stop strings, or others whose automaton is compiled. listed: not a string alone."""
    strings = [value] if isinstance(value, str) and not listed else value
    if not isinstance(strings, list) or len(strings) > _MAX_STOP_STRINGS:
        valid = "" if listed else "a string or "
        raise ValueError(f"{name}: must be {valid}a list of at most {_MAX_STOP_STRINGS} strings")
    for i, string in enumerate(strings):
        if not check_text(f"{name}[{i}]", string):
            raise ValueError(f"{name}[{i}]='': must not be empty, which would end every text at once")
    # Bounded, as they are compiled.
    size = sum(len(string.encode()) for string in strings)
    if size > _MAX_STOP_BYTES:
        raise ValueError(f"{name}: {size} bytes; must be at most {_MAX_STOP_BYTES} together")
    return strings


def check_ids(name: str, value: object, *, vocab_size: int, least: int = 0, most: int | None = None) -> list[int]:
    """Token ids of the vocabulary."""
    if not isinstance(value, list):
        raise TypeError(f"{name}: must be a list of token ids")
    if most is not None and len(value) > most:
        raise ValueError(f"{name}: {len(value)} tokens; must be at most {most}")
    if len(value) < least:
        raise ValueError(f"{name}: must have at least {least} token id")
    if not all(type(i) is int and 0 <= i < vocab_size for i in value):
        for i, token in enumerate(value):
            check_int(f"{name}[{i}]", token, least=0, most=vocab_size - 1)
    return value
