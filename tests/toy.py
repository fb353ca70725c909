"""Tiny random models, so that the whole loop runs in seconds."""

import jax
import jax.numpy as jnp

from jspec.models import Llama, LlamaParams
from jspec.models.llama import LayerParams

TARGET = Llama(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=512,
    qk_norm=True,
)
DRAFT = Llama(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_length=512,
    tie_embeddings=True,
)


def random_params(config: Llama, seed: int = 0, dtype=jnp.float32) -> LlamaParams:
    """Weights with a spread that keeps logits apart, so that the argmax is no matter of rounding."""
    keys = iter(jax.random.split(jax.random.key(seed), 4 * config.num_layers + 2))

    def matrix(*shape):
        return (jax.random.normal(next(keys), shape) * shape[0] ** -0.5).astype(dtype)

    width, heads, kv_heads, dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    ones, norm = jnp.ones(width, dtype), jnp.ones(dim, dtype) if config.qk_norm else None
    layers = tuple(
        LayerParams(
            attention_norm=ones,
            qkv=matrix(width, (heads + 2 * kv_heads) * dim),
            qkv_bias=None,
            q_norm=norm,
            k_norm=norm,
            o=matrix(heads * dim, width),
            o_bias=None,
            mlp_norm=ones,
            gate_up=matrix(width, 2 * config.intermediate_size),
            down=matrix(config.intermediate_size, width),
        )
        for _ in range(config.num_layers)
    )
    head = None if config.tie_embeddings else matrix(width, config.vocab_size)
    return LlamaParams(matrix(config.vocab_size, width), layers, ones, head)
