"""Which installed packages may be trained on: those whose metadata state a permissive license and no other."""

import re
from email.message import Message

PERMISSIVE = frozenset(
    """0BSD AFL-2.1 AFL-3.0 Apache-2.0 Artistic-2.0 BlueOak-1.0.0 BSD-1-Clause BSD-2-Clause BSD-3-Clause BSL-1.0
    CC0-1.0 CNRI-Python HPND HPND-Markus-Kuhn ISC MIT MIT-0 MIT-CMU MulanPSL-2.0 NCSA PostgreSQL PSF-2.0 Python-2.0
    Unicode-3.0 Unicode-DFS-2016 Unlicense W3C Zlib ZPL-2.1""".split()
)
"""SPDX identifiers of licenses that allow any use of the text and require at most a notice."""

_COPYLEFT = re.compile(
    r"\b([AL]?GPL|MPL|EPL|EUPL|CDDL|CeCILL|SSPL|BUSL|GNU|Mozilla|copyleft|proprietary|non-?commercial)", re.IGNORECASE
)
_NAMES = re.compile(
    r"\b(MIT|Apache|ISC|ISCL|PSF|HPND|CC0|Unlicense|zlib|BSD|Python Software Foundation|Historical Permission Notice"
    r"|Public Domain)\b|\d-clause BSD",
    re.IGNORECASE,
)
_PHRASES = ("Permission is hereby granted, free of charge", "Redistribution and use in source and binary forms")


def classify(metadata: Message) -> tuple[str, bool]:
    """The license that a distribution's metadata state, and whether it is permissive.

    Reads License-Expression, then the classifiers, then the License field. Without a license in any of them, the result
    is ("unknown", False).
    """
    expression = metadata.get("License-Expression")
    if expression:
        return expression, is_permissive_expression(expression)
    classifiers = [line.split("::")[-1].strip() for line in metadata.get_all("Classifier") or [] if _is_license(line)]
    if classifiers:
        return ", ".join(classifiers), all(_is_permissive_name(name) for name in classifiers)
    field = (metadata.get("License") or "").strip()
    if not field or field.upper() == "UNKNOWN":
        return "unknown", False
    if "\n" not in field and is_permissive_expression(field):
        return field, True
    first = field.splitlines()[0].strip()[:60]
    if _COPYLEFT.search(field):
        return first, False
    return first, bool(_NAMES.search(first)) or any(phrase in field for phrase in _PHRASES)


def is_permissive_expression(expression: str) -> bool:
    """Whether an SPDX expression allows a permissive license: on one side of an OR, on both sides of an AND."""
    tokens = re.findall(r"[()]|[^\s()]+", expression)
    try:
        value, rest = _either(tokens)
    except IndexError:
        return False
    return value and not rest


def _either(tokens: list[str]) -> tuple[bool, list[str]]:
    value, rest = _both(tokens)
    while rest and rest[0].upper() == "OR":
        other, rest = _both(rest[1:])
        value = value or other
    return value, rest


def _both(tokens: list[str]) -> tuple[bool, list[str]]:
    value, rest = _single(tokens)
    while rest and rest[0].upper() == "AND":
        other, rest = _single(rest[1:])
        value = value and other
    return value, rest


def _single(tokens: list[str]) -> tuple[bool, list[str]]:
    if tokens[0] == "(":
        value, rest = _either(tokens[1:])
        return value, rest[1:]
    # An exception only adds permissions.
    rest = tokens[3:] if len(tokens) > 2 and tokens[1].upper() == "WITH" else tokens[1:]
    return tokens[0] in PERMISSIVE, rest


def _is_license(classifier: str) -> bool:
    return classifier.startswith("License ::") and classifier.strip() != "License :: OSI Approved"


def _is_permissive_name(name: str) -> bool:
    return bool(_NAMES.search(name)) and not _COPYLEFT.search(name)
