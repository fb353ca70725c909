"""Formats of strings as regexes (JSON Schema 2020-12, Validation, 7.3). Each allows part of its format's texts."""

_YEAR = r"(\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)"
_DATE = _YEAR + r"-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_COUNT = r"\d{1,4}"
_CLOCK = f"T({_COUNT}H({_COUNT}M({_COUNT}S)?)?|{_COUNT}M({_COUNT}S)?|{_COUNT}S)"
_DAYS = f"({_COUNT}Y({_COUNT}M({_COUNT}D)?)?|{_COUNT}M({_COUNT}D)?|{_COUNT}D)"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?"
_HOST = rf"({_LABEL}\.){{0,4}}[a-zA-Z]([a-zA-Z0-9-]{{0,30}}[a-zA-Z0-9])?"
_NAME = "[a-zA-Z0-9]+(-[a-zA-Z0-9]+)*"
"""A label of any length: a small automaton, as its product with a counter must be."""
_MAILBOX = r"[a-zA-Z0-9_+-]{1,20}(\.[a-zA-Z0-9_+-]{1,20}){0,2}"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_GROUP = "[0-9a-fA-F]{1,4}"
_PATH = r"([a-zA-Z0-9._~!$&'()*+,;=:@/-]|%[0-9a-fA-F]{2})*"


def _ipv6() -> str:
    """Eight groups, or fewer around one double colon."""
    before = [f"({_GROUP}:){{{count - 1}}}{_GROUP}" if count else "" for count in range(8)]
    after = [f"({_GROUP}(:{_GROUP}){{0,{6 - count}}})?" if count < 7 else "" for count in range(8)]
    shortened = "|".join(f"{left}::{right}" for left, right in zip(before, after, strict=True))
    return f"({_GROUP}:){{7}}{_GROUP}|{shortened}"


FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DAYS}({_CLOCK})?|{_CLOCK}|{_COUNT}W)",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": rf"{_MAILBOX}@({_LABEL}\.){{1,3}}[a-zA-Z]{{2,12}}",
    "hostname": _HOST,
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": _ipv6(),
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]*://({_NAME}\.)*[a-zA-Z]+(:[1-9]\d{{0,3}})?(/{_PATH})?(\?{_PATH})?(#{_PATH})?",
}
"""Name -> regex (RFC 3339, 9562, 5321, 1123, 4291, 3986), without year 0 (invalid in Python) and February 29."""
