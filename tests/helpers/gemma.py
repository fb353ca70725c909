"""Tiny random models of each kind of Gemma 4, without `transformers`."""

import dataclasses

import random_models

from jspec.models.gemma4 import Attention, Gemma4
from jspec.models.moe import Routed, Router
from jspec.models.rope import ProportionalRope, Rope

SLIDING = Attention(kv_heads=2, head_dim=8, window=8, rope=Rope())
FULL = Attention(kv_heads=2, head_dim=16, window=None, rope=Rope(1e6, ProportionalRope(0.25)))
VALUES_ARE_KEYS = dataclasses.replace(FULL, kv_heads=1, values_are_keys=True)
SHAPE = dict(vocab_size=61, hidden_size=32, intermediate_size=64, num_heads=4, max_length=512, soft_cap=30.0)
EXPERTS = Routed(Router(count=6, chosen=2, normalize=True), width=16)
KINDS = {
    "dense": Gemma4(**SHAPE, attention=(SLIDING, SLIDING, VALUES_ARE_KEYS)),
    "shared": Gemma4(**SHAPE, attention=(SLIDING, FULL) * 2, shared_layers=2, double_wide_mlp=True, per_layer_size=8),
    "experts": Gemma4(**SHAPE, attention=(SLIDING, VALUES_ARE_KEYS), experts=EXPERTS),
}

params = random_models.weights_of(KINDS)
