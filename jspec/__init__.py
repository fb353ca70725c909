"""Speculative decoding for JAX, on GPU and TPU: pure functions and one XLA program that loops on the device."""

from jspec.drafters import Eagle, FrozenKvMtp, Mtp, Ngram, Plain, Standalone
from jspec.generate import Generation, GenerationStats, Piece, generate, generate_ids, stream
from jspec.look import Round, look_at_round
from jspec.model import Model, load
from jspec.sampling import Sampling

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
    "generate",
    "generate_ids",
    "load",
    "look_at_round",
    "stream",
]
