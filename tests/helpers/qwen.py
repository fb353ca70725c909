"""Tiny random models of Qwen3-Next's families, without `transformers`."""

import random_models

from jspec.cache import RecurrentLayer
from jspec.models.moe import Routed, Router
from jspec.models.qwen3_next import Qwen3Next

SHAPE = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=512,
    state=RecurrentLayer(key_heads=2, value_heads=4, key_dim=8, value_dim=12),
)
EXPERTS = Routed(Router(count=6, chosen=2, normalize=True), width=16, shared_width=24, shared_gate=True)
KINDS = {
    "dense": Qwen3Next(**SHAPE, is_full_attention=(False, True, False)),
    "experts": Qwen3Next(**SHAPE, is_full_attention=(False, False, True), experts=EXPERTS),
}

params = random_models.weights_of(KINDS)
