"""Tiny random models of further families, without `transformers`."""

import functools
from collections.abc import Callable
from typing import Any

import deepseek
import gemma
import oss
import qwen
import random_models
import toy

from jspec.models.decoder import Decoder
from jspec.models.gemma3 import Gemma3
from jspec.models.gemma4 import Attention
from jspec.models.llama_variant import LlamaVariant
from jspec.models.rope import LinearRope, LongRope, Rope, YarnRope

_SLIDING = Attention(kv_heads=2, head_dim=8, window=8, rope=Rope())
_FULL = Attention(kv_heads=2, head_dim=8, window=None, rope=Rope(1e6, LinearRope(8.0)))
_SHAPE = dict(vocab_size=61, hidden_size=32, intermediate_size=64, num_layers=3, max_length=512)
_SHAPE |= dict(num_heads=4, num_kv_heads=2, head_dim=8)
_LONG = LongRope((1.0, 1.2), (2.0, 3.0), original_length=512, attention_factor=1.1)
KINDS: dict[str, Decoder] = {
    "qwen2": LlamaVariant(**_SHAPE, kind="qwen2", attention_bias=True, windows=(None, 8, 8)),
    "smollm3": LlamaVariant(**_SHAPE, kind="smollm3", resting=(1,), tie_embeddings=True),
    "olmo3": LlamaVariant(
        **_SHAPE,
        **dict(kind="olmo3", norms="after", wide_qk_norm=True, windows=(8, None, 8)),
        rope=Rope(5e5, YarnRope(4.0, 64)),
        window_rope=Rope(5e5),
    ),
    "phi3": LlamaVariant(**_SHAPE, kind="phi3", fused=("qkv", "gate_up"), rope=Rope(1e4, _LONG, 0.5)),
    "granite": LlamaVariant(
        **_SHAPE, kind="granite", embed_scale=3.0, residual_scale=0.7, score_scale=0.2, logit_divisor=2.5
    ),
    "glm4": LlamaVariant(
        **_SHAPE, kind="glm4", norms="both", interleaved=True, fused=("gate_up",), rope=Rope(share=0.5)
    ),
    "gemma3": Gemma3(**{**gemma.SHAPE, "soft_cap": None}, attention=(_SLIDING, _FULL, _SLIDING), query_scalar=12),
}

params = random_models.weights_of(KINDS)
MODELS: dict[str, tuple[Decoder, Callable[..., Any]]] = {
    "llama": (toy.TARGET, functools.cache(functools.partial(toy.random_params, toy.TARGET))),
    **{
        f"{family} {kind}": (config, functools.partial(module.params, kind))
        for family, module in {"gemma4": gemma, "deepseek": deepseek, "qwen3_next": qwen, "gpt_oss": oss}.items()
        for kind, config in module.KINDS.items()
    },
    **{kind: (config, functools.partial(params, kind)) for kind, config in KINDS.items()},
}
"""Name -> a tiny model of any family, and a function from a seed to its weights."""
