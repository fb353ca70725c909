"""Ways to propose tokens, one module each, and the one table of their names."""

from jspec.core.types import Drafter
from jspec.drafters.eagle import Eagle
from jspec.drafters.frozen_kv_mtp import FrozenKvMtp
from jspec.drafters.mtp import Mtp
from jspec.drafters.ngram import Ngram
from jspec.drafters.plain import Plain
from jspec.drafters.standalone import Standalone

DRAFTERS = {
    "eagle": Eagle,
    "frozen-kv-mtp": FrozenKvMtp,
    "mtp": Mtp,
    "ngram": Ngram,
    "plain": Plain,
    "standalone": Standalone,
}
"""Name -> class; a name alone stands for the class's defaults."""


def resolve(drafter: "str | Drafter | None") -> Drafter:
    """The drafter that a name, an object or None (plain decoding) stands for.

    Raises:
      ValueError: an unknown name.
      TypeError: an object that is no drafter.
    """
    if drafter is None:
        return Plain()
    if isinstance(drafter, str):
        if drafter not in DRAFTERS:
            raise ValueError(f"drafter={drafter!r} is unknown; there are {', '.join(sorted(DRAFTERS))}")
        return DRAFTERS[drafter]()
    missing = [
        name for name in ("depth", "capture_layers", "bind", "init", "draft", "extend") if not hasattr(drafter, name)
    ]
    if missing or isinstance(drafter, type):
        given = drafter.__name__ if isinstance(drafter, type) else type(drafter).__name__
        why = "give an object, not a class" if isinstance(drafter, type) else f"it has no {', '.join(missing)}"
        raise TypeError(f"drafter={given} is not a drafter: {why}")
    return drafter
