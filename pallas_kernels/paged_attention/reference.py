"""Paged tree attention in plain XLA: runs on every platform and is the oracle of the kernels beside it."""

import functools

import jax.numpy as jnp
from jax import lax


def paged_attention(
    q, k_rows, v_rows, pool, page_table, prefix_length, mask, *, layer, scale, soft_cap=None, prefix_start=None
):
    """Gathers each sequence's pages, then one softmax over prefix and rows. Arguments as in `api.paged_attention`."""
    batch, nodes, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[1:3]
    group = heads // kv_heads
    # The queries that share a key head stand together: [B, K, N * G, D].
    queries = q.reshape(batch, nodes, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    queries = queries.reshape(batch, kv_heads, nodes * group, dim)
    visible = jnp.repeat(row_mask(mask, nodes, rows), group, axis=1)[:, None]
    parts = [(scores(queries, k_rows, visible, scale, soft_cap), v_rows)]
    if prefix_length is not None:
        pages = pool.at[layer, :, page_table].get(mode="clip")
        keys = pages[:, :, 0].reshape(batch, -1, kv_heads, dim)
        values = pages[:, :, 1].reshape(batch, -1, kv_heads, dim)
        visible = _prefix_mask(prefix_length, prefix_start, keys.shape[1])
        # A weight of zero does not silence a NaN, and a free page may hold anything.
        values = jnp.where(visible.any(1)[:, :, None, None], values, jnp.zeros((), values.dtype))
        visible = jnp.repeat(visible, group, axis=1) if prefix_start is not None else visible
        parts.append((scores(queries, keys, visible[:, None], scale, soft_cap), values))
    out = attend(parts).astype(q.dtype).reshape(batch, kv_heads, nodes, group, dim)
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)


def row_mask(mask, nodes, rows):
    """The visibility of a round's rows, Bool[B or 1, N, R]: `mask` itself, or for None the causal mask of a chain."""
    if mask is not None:
        return mask
    return jnp.tril(jnp.ones((1, nodes, rows), bool), rows - nodes)


def _prefix_mask(prefix_length, prefix_start, capacity):
    """The committed positions that each node sees, Bool[B, N, S]; without windows Bool[B, 1, S] for all of them."""
    position = jnp.arange(capacity)[None, None]
    committed = position < prefix_length[:, None, None]
    return committed if prefix_start is None else committed & (position >= prefix_start[:, :, None])


def scores(queries, keys, visible, scale, soft_cap):
    """Scores [B, K, M, S] of queries [B, K, M, D] and keys [B, S, K, D] in float32; -inf where they are not visible."""
    products = scale * jnp.einsum(
        "bkmd,bskd->bkms", queries, keys, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    if soft_cap is not None:
        products = soft_cap * jnp.tanh(products / soft_cap)
    return jnp.where(visible, products, -jnp.inf)


def attend(parts):
    """One softmax over several parts of the keys, without a copy that joins them; float32.

    parts: of each the `scores`, and the values [B, S, K, D].
    """
    highest = [part.max(-1, keepdims=True) for part, _ in parts]
    peak = functools.reduce(jnp.maximum, highest)
    weights = [jnp.exp(part - peak) for part, _ in parts]
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
