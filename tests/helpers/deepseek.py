"""Tiny random models of DeepSeek's families, without `transformers`."""

import dataclasses

import random_models

from jspec.models.deepseek import Deepseek, Indexer, Latent
from jspec.models.moe import Routed, Router

MLA = Deepseek(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    latent=Latent(q_rank=24, kv_rank=20, nope_dim=12, rope_dim=8, value_dim=16),
    experts=Routed(Router(count=6, chosen=2, sigmoid=True, normalize=True), width=16, shared_width=16),
    dense_layers=1,
    max_length=512,
)
KINDS = {"mla": MLA, "dsa": dataclasses.replace(MLA, indexer=Indexer(heads=16, size=12, top_k=12))}
"""V3; and V3.2, whose attention reads 12 tokens."""

params = random_models.weights_of(KINDS)
