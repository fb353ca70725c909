"""What attention operations share, in plain JAX: visibility, scores and one softmax over several parts of the keys."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

LOG2_E = 1.4426950408889634


def row_mask(mask: jax.Array | None, nodes: int, rows: int) -> jax.Array:
    """Which of a round's rows each node sees, Bool[B or 1, N, R].

    Args:
      mask: returned as it is; None: the causal mask of a chain, whose last `nodes` rows belong to the nodes.
    """
    if mask is not None:
        return mask
    return jnp.tril(jnp.ones((1, nodes, rows), bool), rows - nodes)


def masked_scores(
    queries: jax.Array, keys: jax.Array, visible: jax.Array, scale: float, soft_cap: float | None
) -> jax.Array:
    """Scores [B, K, M, S] of queries [B, K, M, D] and keys [B, S, K, D] in float32; -inf where they are not visible."""
    products = scale * jnp.einsum(
        "bkmd,bskd->bkms", queries, keys, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    if soft_cap is not None:
        products = soft_cap * jnp.tanh(products / soft_cap)
    return jnp.where(visible, products, -jnp.inf)


def attend(parts: Sequence[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """One softmax over several parts of the keys, without a copy that joins them; float32 [B, K, M, D].

    Args:
      parts: for each part its `masked_scores` and its values [B, S, K, D].
    """
    highest = [scores.max(-1, keepdims=True) for scores, _ in parts]
    peak = functools.reduce(jnp.maximum, highest)
    weights = [jnp.exp(scores - peak) for scores, _ in parts]
    totals = [weight.sum(-1, keepdims=True) for weight in weights]
    summed = [
        jnp.einsum(
            "bkms,bskd->bkmd",
            weight.astype(values.dtype),
            values,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        for weight, (_, values) in zip(weights, parts, strict=True)
    ]
    return functools.reduce(jnp.add, summed) / functools.reduce(jnp.add, totals)


def scores_in_base_2(products: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """Scores of a softmax in base 2, whose exponential is a hardware instruction: products, scaled and soft-capped."""
    if soft_cap is None:
        return products * (scale * LOG2_E)
    return jnp.tanh(products * (scale / soft_cap)) * (soft_cap * LOG2_E)
