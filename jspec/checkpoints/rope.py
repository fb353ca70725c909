"""The rotary positions of a config.json, of a model or a draft, to a `Rope` and back.

Older files have `rope_theta` and `rope_scaling`, newer ones both in `rope_parameters`.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from jspec.checkpoints.config import FULL, SLIDING
from jspec.checkpoints.fields import MOST_LENGTH, MOST_NUMBER, Fields
from jspec.checkpoints.files import CheckpointError
from jspec.models.rope import DynamicRope, LinearRope, Llama3Rope, LongRope, ProportionalRope, Rope, Scaling, YarnRope

# Sections of several positions of a token differ in images only.
_ALWAYS = "type", "rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "finetuned"
_ORIGINAL = "original_max_position_embeddings"
_INITIAL = "initial_context_length"
_SYNONYMS = {"mrope": "default", "su": "longrope"}
_RENAMED = {"original_length": _ORIGINAL, "share": "partial_rotary_factor"}
"""Fields of scalings -> their keys, where the names differ."""


def parse_rope(
    config: Fields, head_dim: int, theta: float | None = 10_000.0, *, share: float | None = None, draft: bool = False
) -> Rope:
    """The rotary positions of a config.json of either generation.

    Args:
      config: with `max_position_embeddings`, if the scaling depends on it.
      head_dim: dimensions of a head, or of its part with a position.
      theta: the base if none is stated; None: it must be.
      share: `partial_rotary_factor` if it is not stated; None: it must be 1, the family rotates whole heads.
      draft: whether to prefer the base in `rope_parameters`, with a warning, if there is another one beside it.

    Raises:
      CheckpointError: a kind of rotation or a key that is not supported, a parameter that is missing or out of bounds,
        or two that contradict each other.
    """
    rope = config.section("rope_scaling").joined(config.section("rope_parameters"))
    return parse_section(rope, config, head_dim, theta, share=share, draft=draft)


def parse_section(
    rope: Fields,
    config: Fields,
    head_dim: int,
    theta: float | None = 10_000.0,
    *,
    share: float | None = None,
    draft: bool = False,
    kinds: tuple[str, ...] = ("default", "linear", "dynamic", "yarn", "longrope", "llama3"),
) -> Rope:
    """The rotary positions of one section, of all layers or of those of a type.

    config: the file around it. kinds: those of the family. Other arguments and errors are as in `parse_rope`.
    """
    # Other keys would belong to another kind, or to a rotation of another program.
    kind = _read_kind(rope, kinds)
    keys = (*_ALWAYS, *_keys(kind))
    unknown = [rope.describe(key) for key in rope.keys() if key not in keys]
    if unknown:
        raise CheckpointError(
            f"{config.where}: not supported: {', '.join(unknown)}: the keys of rope_type={kind!r} are {', '.join(keys)}"
        )
    # The base, the share of rotated dimensions, and the scaling.
    base = _read_theta(rope, config, theta, draft)
    if kind == "yarn" and base == 1:
        raise rope.wrong("rope_theta", base, "must be above 1 with rope_type='yarn'")
    part = 1.0 if kind == "proportional" else _read_share(rope, config, head_dim, share)
    if kind == "default":
        return Rope(base, None, part, sections="mrope_section" in rope.keys())
    scaling = _SCALINGS[kind][1](rope, config)
    pairs = int(head_dim * part) // 2
    if isinstance(scaling, LongRope) and {len(scaling.short_factor), len(scaling.long_factor)} != {pairs}:
        raise CheckpointError(
            f"{config.where}: {rope.path}short_factor and long_factor have {len(scaling.short_factor)} and "
            f"{len(scaling.long_factor)} entries: must have {pairs}, one for each pair of rotated dimensions"
        )
    return Rope(base, scaling, part, sections="mrope_section" in rope.keys())


def parse_layer_ropes(
    config: Fields, head_dim: int, theta: float, sliding: Fields | None = None, sliding_theta: float | None = None
) -> tuple[Rope, Rope]:
    """The rotations of full and of sliding layers; `rope_scaling` of older files concerns full layers only.

    theta, sliding_theta: the bases if none are stated; None: the same.
    sliding: the object with the base of sliding layers of older files; None: `config`.
    """
    newer = config.section("rope_parameters")
    unknown = [key for key in newer.keys() if key not in (FULL, SLIDING)]
    if unknown:
        raise CheckpointError(f"{config.where}: rope_parameters has the keys {unknown}: must be {FULL}, {SLIDING}")
    full, local = map(newer.section, (FULL, SLIDING))
    rope = parse_section(config.section("rope_scaling").joined(full), config, head_dim, theta)
    return rope, parse_section(local, sliding or config, head_dim, sliding_theta or theta)


def describe_rope(rope: Rope) -> dict[str, Any]:
    """The `rope_parameters` of a config.json."""
    described: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.share != 1:
        described["partial_rotary_factor"] = rope.share
    if rope.scaling is None:
        return described
    kind = next(kind for kind, (scaling, _) in _SCALINGS.items() if isinstance(rope.scaling, scaling))
    for name, value in vars(rope.scaling).items():
        if value is not None:
            described[_RENAMED.get(name, name)] = list(value) if isinstance(value, tuple) else value
    return described | {"rope_type": kind}


def _read_kind(rope: Fields, kinds: tuple[str, ...]) -> str:
    stated = [rope.read_text(key) for key in ("rope_type", "type") if rope.has(key)]
    names = list(dict.fromkeys(_SYNONYMS.get(name, name) for name in stated)) or ["default"]
    if len(names) > 1:
        raise CheckpointError(f"{rope.where}: {rope.describe('rope_type')}, but {rope.describe('type')}")
    if names[0] not in kinds:
        raise CheckpointError(f"{rope.where}: rope_type={stated[0]!r} is not supported; must be {' or '.join(kinds)}")
    return names[0]


def _keys(kind: str) -> list[str]:
    """The keys of a kind of scaling: the fields of its class."""
    if kind == "default":
        return []
    fields = [_RENAMED.get(field.name, field.name) for field in dataclasses.fields(_SCALINGS[kind][0])]
    return [*fields, "factor"] if "factor" not in fields else fields


def _read_share(rope: Fields, config: Fields, head_dim: int, default: float | None) -> float:
    """The share of rotated dimensions."""
    stated = rope if rope.has("partial_rotary_factor") else config
    share = stated.read_number("partial_rotary_factor", default or 1.0, above=0, most=1)
    if default is None and share != 1:
        raise CheckpointError(f"{config.where}: not supported: {stated.describe('partial_rotary_factor')}: must be 1")
    rotary = int(head_dim * share)
    if rotary % 2 or (head_dim - rotary) % 2 or not rotary:
        raise CheckpointError(
            f"{config.where}: partial_rotary_factor={share}: must rotate a positive, even number of the {head_dim} "
            "dimensions of a head, and leave an even number"
        )
    return share


def _read_theta(rope: Fields, config: Fields, default: float | None, draft: bool) -> float:
    """The base, stated in one of two places."""
    if default is None and not rope.has("rope_theta"):
        return config.read_number("rope_theta", least=1, most=MOST_NUMBER)
    outer = config.read_number("rope_theta", default or 1.0, least=1, most=MOST_NUMBER)
    theta = rope.read_number("rope_theta", outer, least=1, most=MOST_NUMBER)
    if config.has("rope_theta") and theta != outer:
        problem = f"rope_theta has two values, {outer} and {rope.path}rope_theta={theta}"
        if not draft:
            raise CheckpointError(f"{config.where}: {problem}: must have one")
        warnings.warn(f"{config.where}: {problem}: the draft uses the second, like transformers", stacklevel=2)
    return theta


def _read_original(rope: Fields, config: Fields) -> int:
    """The context of the training: in the section or beside it, or all of the context."""
    stated = [fields.read_int(_ORIGINAL, most=MOST_LENGTH) for fields in (rope, config) if fields.has(_ORIGINAL)]
    if len(set(stated)) > 1:
        raise rope.wrong(_ORIGINAL, stated[0], f"must be the same as {config.describe(_ORIGINAL)}")
    if stated:
        return stated[0]
    length = config.read_int("max_position_embeddings", most=MOST_LENGTH)
    if config.read_int(_INITIAL, length, most=MOST_LENGTH) != length:
        raise CheckpointError(
            f"{config.where}: the key {rope.name(_ORIGINAL)!r} is missing: transformers takes "
            f"max_position_embeddings={length} and OpenAI's code {config.describe(_INITIAL)}: add one of them"
        )
    return length


def _read_factor(rope: Fields) -> float:
    return rope.read_number("factor", least=1, most=MOST_NUMBER)


def _implied_factor(rope: Fields, config: Fields, original: int) -> float:
    """The factor; if it is not stated, of the length by the original one."""
    if rope.has("factor"):
        return _read_factor(rope)
    length = config.read_int("max_position_embeddings", most=MOST_LENGTH)
    if original > length:
        raise rope.wrong(_ORIGINAL, original, f"must be at most {length} without a factor")
    return length / original


def _parse_dynamic(rope: Fields, config: Fields) -> Scaling:
    length = config.read_int("max_position_embeddings", most=MOST_LENGTH)
    if (original := rope.read_int(_ORIGINAL, length, most=MOST_LENGTH)) != length:
        problem = f"must be max_position_embeddings={length} with rope_type='dynamic', whose frequencies change there"
        raise rope.wrong(_ORIGINAL, original, problem)
    return DynamicRope(_read_factor(rope), length)


def _parse_yarn(rope: Fields, config: Fields) -> Scaling:
    original, length = _read_original(rope, config), config.read_int("max_position_embeddings", most=MOST_LENGTH)
    fast, slow = (
        rope.read_number(f"beta_{name}", default, above=0, most=MOST_NUMBER)
        for name, default in (("fast", 32.0), ("slow", 1.0))
    )
    if fast < slow:
        raise rope.wrong("beta_fast", fast, f"must be at least beta_slow={slow}")
    return YarnRope(
        factor=_implied_factor(rope, config, original) if original != length else _read_factor(rope),
        original_length=original,
        beta_fast=fast,
        beta_slow=slow,
        mscale=rope.read_number("mscale", None, least=0, most=MOST_NUMBER),
        mscale_all_dim=rope.read_number("mscale_all_dim", None, least=0, most=MOST_NUMBER),
        attention_factor=rope.read_number("attention_factor", None, above=0, most=MOST_NUMBER),
        truncate=rope.read_flag("truncate", True),
    )


def _parse_llama3(rope: Fields, config: Fields) -> Scaling:
    low, high = (rope.read_number(f"{name}_freq_factor", above=0, most=MOST_NUMBER) for name in ("low", "high"))
    if high <= low:
        raise rope.wrong("high_freq_factor", high, f"must be above low_freq_factor={low}")
    original = _read_original(rope, config) if config.has(_ORIGINAL) else rope.read_int(_ORIGINAL, most=MOST_LENGTH)
    return Llama3Rope(_read_factor(rope), low, high, original)


def _parse_longrope(rope: Fields, config: Fields) -> Scaling:
    original = _read_original(rope, config)
    factor = _implied_factor(rope, config, original)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    length = config.read_int("max_position_embeddings", most=MOST_LENGTH)
    if length > original:
        warnings.warn(
            f"{config.where}: {rope.path}long_factor is not used: contexts are limited to {_ORIGINAL}={original}, "
            "for which short_factor holds",
            stacklevel=2,
        )
    return LongRope(
        *(rope.read_floats(f"{name}_factor", above=0, most=MOST_NUMBER) for name in ("short", "long")),
        original_length=original,
        attention_factor=rope.read_number("attention_factor", magnitude, above=0, most=MOST_NUMBER),
    )


def _parse_proportional(rope: Fields, config: Fields) -> Scaling:
    if rope.read_number("factor", 1.0) != 1:
        raise CheckpointError(f"{rope.where}: {rope.describe('factor')}: must be 1 with rope_type='proportional'")
    return ProportionalRope(rope.read_number("partial_rotary_factor", 1.0, above=0, most=1))


_SCALINGS: Mapping[str, tuple[type[Scaling], Callable[[Fields, Fields], Scaling]]] = {
    "linear": (LinearRope, lambda rope, config: LinearRope(_read_factor(rope))),
    "dynamic": (DynamicRope, _parse_dynamic),
    "yarn": (YarnRope, _parse_yarn),
    "longrope": (LongRope, _parse_longrope),
    "llama3": (Llama3Rope, _parse_llama3),
    "proportional": (ProportionalRope, _parse_proportional),
}
"""rope_type -> its class and its parser, from the section and the file around it."""
