"""Ways to propose tokens: one module each, and the table of their names."""

from collections.abc import Callable

from jspec.core.checks import shorten
from jspec.core.types import Drafter
from jspec.drafters.eagle import Eagle
from jspec.drafters.frozen_kv_mtp import FrozenKvMtp
from jspec.drafters.mtp import Mtp
from jspec.drafters.ngram import Ngram
from jspec.drafters.plain import Plain
from jspec.drafters.standalone import Standalone

DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "eagle": Eagle,
    "frozen-kv-mtp": FrozenKvMtp,
    "mtp": Mtp,
    "ngram": Ngram,
    "plain": Plain,
    "standalone": Standalone,
}
"""Name -> class; a name alone selects the class with its defaults."""


def resolve(drafter: str | Drafter | None) -> Drafter:
    """The drafter of a name, an object or None (plain decoding).

    Raises:
      ValueError: an unknown name.
      TypeError: an object that is not a drafter.
    """
    if drafter is None:
        return Plain()
    if isinstance(drafter, str):
        if drafter not in DRAFTERS:
            raise ValueError(f"drafter={shorten(drafter)} is unknown; valid names are {', '.join(sorted(DRAFTERS))}")
        return DRAFTERS[drafter]()
    if isinstance(drafter, type):
        raise TypeError(f"drafter={drafter.__name__} is not a drafter: give an object, not a class")
    # Not `hasattr`, which would evaluate `capture_layers`, and that may raise before `bind`.
    required = ("depth", "capture_layers", "bind", "init", "draft", "extend")
    missing = [name for name in required if name not in dir(drafter)]
    if missing:
        raise TypeError(f"drafter={type(drafter).__name__} is not a drafter: it has no {', '.join(missing)}")
    return drafter
