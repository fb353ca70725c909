"""The table of drafters that propose by themselves."""

from collections.abc import Callable

from jspec.core.types import Drafter
from jspec.drafters.block import Block
from jspec.drafters.eagle import Eagle
from jspec.drafters.frozen_kv_mtp import FrozenKvMtp
from jspec.drafters.mtp import Mtp
from jspec.drafters.ngram import Ngram
from jspec.drafters.plain import Plain
from jspec.drafters.standalone import Standalone
from jspec.drafters.suffix import Suffix

PROPOSING: dict[str, Callable[..., Drafter]] = {
    "block": Block,
    "eagle": Eagle,
    "frozen-kv-mtp": FrozenKvMtp,
    "mtp": Mtp,
    "ngram": Ngram,
    "plain": Plain,
    "standalone": Standalone,
    "suffix": Suffix,
}
"""Name -> class."""
