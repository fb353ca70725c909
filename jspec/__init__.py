"""Speculative decoding for JAX, on GPU and TPU: pure functions and one XLA program that loops on the device."""

from jspec.analysis.check_drafter import check_drafter
from jspec.analysis.inspect_round import Round, inspect_round
from jspec.core.sampling import Sampling
from jspec.core.xla_options import loop_options
from jspec.drafters import Eagle, FrozenKvMtp, Mtp, Ngram, Plain, Standalone
from jspec.engine.generate import generate, generate_ids, stream
from jspec.engine.model import Model, load
from jspec.engine.result import Generation, GenerationStats, Piece

__all__ = [
    "Eagle",
    "FrozenKvMtp",
    "Generation",
    "GenerationStats",
    "Model",
    "Mtp",
    "Ngram",
    "Piece",
    "Plain",
    "Round",
    "Sampling",
    "Standalone",
    "check_drafter",
    "generate",
    "generate_ids",
    "load",
    "inspect_round",
    "loop_options",
    "stream",
]
