"""Keywords of the methods of an engine."""

from typing import TypedDict

from jspec.generation.options import BatchKeywords, RequestKeywords


class QueueKeywords(TypedDict, total=False):
    """Keywords of `Engine.generate` beside those of `jspec.generate`."""

    priority: int
    salt: str
    adapter: str | None
    progress: bool


class KeywordsOfOne(RequestKeywords, QueueKeywords, total=False):
    """Keywords of `Engine.generate` for a single prompt."""


class KeywordsOfSeveral(BatchKeywords, QueueKeywords, total=False):
    """Keywords of `Engine.generate` for several prompts."""


class StreamKeywords(RequestKeywords, total=False):
    """Keywords of `Engine.stream`."""

    adapter: str | None
