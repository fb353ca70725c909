"""Caches of committed tokens: one module per kind."""

from jspec.cache.dsa import DsaCache
from jspec.cache.hybrid import HybridCache, LayerKeys
from jspec.cache.mha import MhaCache
from jspec.cache.mla import MlaCache
from jspec.cache.recurrent import RecurrentCache, RecurrentLayer, RecurrentRows
from jspec.cache.swa import SlidingCache

__all__ = [
    "DsaCache",
    "HybridCache",
    "LayerKeys",
    "MhaCache",
    "MlaCache",
    "RecurrentCache",
    "RecurrentLayer",
    "RecurrentRows",
    "SlidingCache",
]
