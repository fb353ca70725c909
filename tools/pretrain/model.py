"""Language models that are trained from scratch: shapes, initial weights, and the forward over whole sequences."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jspec.models import Llama, ModelParams
from jspec.models.layers import ForwardBatch
from jspec.train.model import EMBEDDING_SPREAD, causal_attention, init_layer, init_matrix

SHAPES = {
    "python-small": Llama(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_length=1024,
        tie_embeddings=True,
        qk_norm=True,
    ),
    "python-tiny": Llama(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=384,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        max_length=1024,
        tie_embeddings=True,
    ),
}
"""The shapes of the bundled models, by name."""


@partial(jax.jit, static_argnames=("config",))
def init_params(config: Llama, key: Key[Array, ""]) -> ModelParams:
    """Random weights in float32: matrices with a standard deviation of in^-0.5, smaller at the end of a branch."""
    shapes = config.param_shapes(jnp.float32)
    keys = iter(jax.random.split(key, 4 * config.num_layers + 2))
    branch = (2 * config.num_layers) ** -0.5
    embed = jax.random.normal(next(keys), shapes.embed.shape, jnp.float32) * EMBEDDING_SPREAD
    head = None if shapes.lm_head is None else init_matrix(next(keys), *shapes.lm_head.shape)
    stack = tuple(init_layer(layer, keys, branch=branch) for layer in shapes.layers)
    return ModelParams(embed, stack, jnp.ones(shapes.norm.shape, jnp.float32), head)


def logits(config: Llama, params: ModelParams, tokens: Int[Array, "B N"], dtype: str) -> Float[Array, "B N V"]:
    """Logits in float32 of sequences that start at position 0, computed in `dtype` from weights of any precision."""
    batch, length = tokens.shape
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    # Embedded outside of the cast, so that the gradient of a frequent token is summed in the precision of the weights.
    rows = jnp.take(params.embed, tokens.reshape(-1), axis=0, mode="clip").astype(dtype)
    head = cast.embed.T if cast.lm_head is None else cast.lm_head
    cast = dataclasses.replace(cast, embed=rows, lm_head=head)
    index = jnp.arange(batch * length, dtype=jnp.int32).reshape(batch, length)
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    return config.apply(cast, ForwardBatch(index, positions, causal_attention(config, dtype), None)).logits
