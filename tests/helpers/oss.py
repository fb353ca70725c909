"""A tiny random gpt-oss, without `transformers`."""

import random_models

from jspec.models.gpt_oss import GptOss
from jspec.models.moe import Routed, Router
from jspec.models.rope import Rope, YarnRope

SHAPE = dict(
    vocab_size=61,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=512,
    experts=Routed(Router(count=6, chosen=2, normalize=True), width=16),
    rope=Rope(scaling=YarnRope(factor=4.0, original_length=64, truncate=False)),
    gate_limit=1.5,
)
KINDS = {
    "sinks": GptOss(**SHAPE, windows=(8, None)),
    "tied": GptOss(**SHAPE, windows=(None, 8, 8), tie_embeddings=True, attention_bias=False),
}

params = random_models.weights_of(KINDS)
