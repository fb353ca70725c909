"""Tiny random models of further families, without `transformers`."""

import functools

import gemma

from jspec.checkpoints import language_model
from jspec.models.decoder import Decoder
from jspec.models.gemma3 import Gemma3
from jspec.models.gemma4 import Attention
from jspec.models.rope import LinearRope, Rope

_SLIDING = Attention(kv_heads=2, head_dim=8, window=8, rope=Rope())
_FULL = Attention(kv_heads=2, head_dim=8, window=None, rope=Rope(1e6, LinearRope(8.0)))
KINDS: dict[str, Decoder] = {
    "gemma3": Gemma3(**{**gemma.SHAPE, "soft_cap": None}, attention=(_SLIDING, _FULL, _SLIDING), query_scalar=12),
}


@functools.cache
def params(kind: str, seed: int = 0):
    """Weights with a spread that keeps logits apart."""
    return language_model.read_params(KINDS[kind], gemma.RandomTensors(seed))
