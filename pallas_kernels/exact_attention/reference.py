"""Exact attention in plain JAX: a loop over nodes, each of which reads its own sequence of keys in blocks."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import BLOCK, SEGMENT, fold, paths, scores_in_base_2, shared_mask, sink_state
from pallas_kernels.each import map_each
from pallas_kernels.paged_attention.reference import paged_attention


def exact_attention(
    q: jax.Array,
    k_rows: jax.Array,
    v_rows: jax.Array | None,
    pool: jax.Array | None,
    page_table: jax.Array | None,
    prefix_length: jax.Array | None,
    mask: jax.Array | None,
    *,
    layer: int | jax.Array,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    first_row: jax.Array | None = None,
) -> jax.Array:
    """Arguments as in `api.exact_attention`."""
    v_rows = k_rows if v_rows is None else v_rows
    batch, nodes, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[1:3]
    if first_row is not None:
        mask = shared_mask(jnp.broadcast_to(first_row[:, None], (batch, nodes)), nodes, rows)
    path, count = paths(mask, batch, nodes, rows)
    shared = k_rows.shape[0] == 1
    capacity = 0 if page_table is None or pool is None else page_table.shape[1] * pool.shape[3]
    blocks = -(-(capacity + rows) // BLOCK)
    if window is not None:
        # A window overlaps this many blocks at most.
        blocks = min(blocks, -(-(window - 1) // BLOCK) + 1)
    if prefix_length is None:
        prefix_length = jnp.zeros(batch, jnp.int32)

    def attend(node: tuple[jax.Array, ...]) -> jax.Array:
        """The result of one node, [K, G, D]."""
        sequence, query, path, count = node
        committed = prefix_length[sequence]
        end = committed + count
        queries = query.reshape(kv_heads, heads // kv_heads, dim)
        start = None if window is None else jnp.maximum(end - window, 0)

        def sees(position: jax.Array) -> jax.Array:
            return position < end if start is None else (position < end) & (position >= start)

        def keys_and_values(position: jax.Array) -> list[jax.Array]:
            row = path[jnp.clip(position - committed, 0, rows - 1)]
            pair = [part[0 if shared else sequence, row] for part in (k_rows, v_rows)]
            if pool is not None and page_table is not None:
                page = page_table[sequence, jnp.minimum(position // pool.shape[3], page_table.shape[1] - 1)]
                stored = (pool[layer, kind, page, position % pool.shape[3]] for kind in (0, -1))
                before = (position < committed)[:, None, None]
                pair = [jnp.where(before, old, new) for old, new in zip(stored, pair, strict=True)]
            return [jnp.where(sees(position)[:, None, None], part, 0) for part in pair]

        def absorb(block: jax.Array, states: tuple) -> tuple:
            merged, (peak, total, summed) = states
            position = block * BLOCK + jnp.arange(BLOCK)
            keys, values = keys_and_values(position)
            scores = scores_in_base_2(_product("kgd,skd->kgs", queries, keys), scale, soft_cap)
            scores = jnp.where(sees(position), scores, -jnp.inf)
            higher = jnp.maximum(peak, scores.max(-1))
            base = jnp.where(higher == -jnp.inf, 0.0, higher)
            weights, fade = jnp.exp2(scores - base[..., None]).astype(values.dtype), jnp.exp2(peak - base)
            new = _product("kgs,skd->kgd", weights, values)
            state = higher, total * fade + _product("kgs,s->kg", weights, ones), summed * fade[..., None] + new
            # A segment that is complete goes to the others.
            whole, folded = (block + 1) % (SEGMENT // BLOCK) == 0, fold(merged, state)
            return jax.tree.map(lambda done, before: jnp.where(whole, done, before), (folded, empty), (merged, state))

        nothing = jnp.full(queries.shape[:2], -jnp.inf, jnp.float32)
        ones = jnp.ones(BLOCK, v_rows.dtype)
        empty = nothing, jnp.zeros_like(nothing), jnp.zeros(queries.shape, jnp.float32)
        turn = absorb if start is None else lambda index, states: absorb(start // BLOCK + index, states)
        result = fold(*lax.fori_loop(0, blocks, turn, (empty, empty)))
        if sinks is not None:
            result = fold(result, sink_state(sinks.reshape(queries.shape[:2]), dim))
        _, total, summed = result
        return (summed / total[..., None]).astype(q.dtype)

    sequence = jnp.repeat(jnp.arange(batch), nodes)
    per_node = (sequence, q.reshape(-1, heads, dim), path.reshape(-1, rows), count.reshape(-1))
    return map_each(attend, per_node).reshape(q.shape)


def rounded_attention(
    *arrays: Any, window: int | None = None, first_row: jax.Array | None = None, **options: Any
) -> jax.Array:
    """As `exact_attention`, in one softmax with other last bits; the same one with a window or without values."""
    q, _, values, *_ = arrays
    if window is not None or values is None:
        return exact_attention(*arrays, window=window, first_row=first_row, **options)
    first_row = first_row if first_row is None else jnp.broadcast_to(first_row[:, None], q.shape[:2])
    return paged_attention(*arrays, first_row=first_row, **options)


def _product(expression: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(expression, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
