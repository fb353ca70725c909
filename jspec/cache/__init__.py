"""What a model remembers of committed tokens: one module a kind of cache."""

from jspec.cache.mha import MhaCache

__all__ = ["MhaCache"]
