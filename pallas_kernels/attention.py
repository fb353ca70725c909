"""Shared parts of attention in plain JAX: visibility, scores, and one softmax over several parts of the keys."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

LOG2_E = 1.4426950408889634
BLOCK = 64
"""Positions of a block of exact attention."""
SEGMENT = 128
"""Positions of a partial softmax of exact attention; a multiple of `BLOCK`."""


def row_mask(mask: jax.Array | None, nodes: int, rows: int) -> jax.Array:
    """The visibility of a round's rows to each node, Bool[B or 1, N, R].

    Args:
      mask: returned as it is; None: the causal mask of a chain, whose last `nodes` rows belong to the nodes.
    """
    if mask is not None:
        return mask
    return jnp.tril(jnp.ones((1, nodes, rows), bool), rows - nodes)


def shared_mask(first_row: jax.Array, nodes: int, rows: int) -> jax.Array:
    """The visibility of rows common to all sequences, Bool[B, N, R]: node n of sequence b is row b * N + n.

    Args:
      first_row: the first visible row of each node, Int[B, N].
    """
    row = jnp.arange(rows, dtype=jnp.int32)[None, None]
    last = jnp.arange(first_row.shape[0] * nodes, dtype=jnp.int32).reshape(-1, nodes, 1)
    return (row >= first_row[:, :, None]) & (row <= last)


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
    # Relative to the highest score of all parts.
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


def paths(mask: jax.Array | None, batch: int, nodes: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """The visible rows of each node in order, Int[B, N, R], and their number, Int[B, N].

    Args:
      mask: as in `row_mask`.
    """
    visible = jnp.broadcast_to(row_mask(mask, nodes, rows), (batch, nodes, rows))
    rank = jnp.cumsum(visible, axis=-1, dtype=jnp.int32) - 1
    row = jnp.arange(rows, dtype=jnp.int32)
    sequence, node = jnp.arange(batch)[:, None, None], jnp.arange(nodes)[None, :, None]
    path = jnp.zeros((batch, nodes, rows), jnp.int32)
    path = path.at[sequence, node, jnp.where(visible, rank, rows)].set(row, mode="drop")
    return path, rank[..., -1] + 1


State = tuple[jax.Array, jax.Array, jax.Array]
"""The running peak [...], total [...] and weighted sum [..., D] of a softmax in base 2."""


def fold(first: State, second: State) -> State:
    """Merge two parts of a softmax. An empty part changes no bit of the other."""
    peak = jnp.maximum(first[0], second[0])
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    one, other = jnp.exp2(first[0] - base), jnp.exp2(second[0] - base)
    total = first[1] * one + second[1] * other
    return peak, total, first[2] * one[..., None] + second[2] * other[..., None]


def sink_state(sinks: jax.Array, dim: int) -> State:
    """The state of attention sinks: a score per element of `sinks`, and a value of zeros."""
    peak = sinks.astype(jnp.float32) * LOG2_E
    return peak, jnp.ones_like(peak), jnp.zeros((*peak.shape, dim), jnp.float32)


def check_rows(
    q: jax.Array,
    k_rows: jax.Array,
    v_rows: jax.Array,
    mask: jax.Array | None,
    first_row: jax.Array | None = None,
) -> None:
    """Check the queries and the round's own rows.

    first_row: the first visible rows of the nodes, of rows common to all sequences.

    Raises:
      ValueError: they do not fit together.
    """
    batch, nodes, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[1:3]
    if k_rows.shape != v_rows.shape:
        raise ValueError(f"k_rows {k_rows.shape} and v_rows {v_rows.shape} must have the same shape")
    if first_row is not None and (mask is not None or k_rows.shape[:2] != (1, batch * nodes)):
        raise ValueError(f"first_row: requires no mask, and k_rows {k_rows.shape} of the shape {(1, batch * nodes)}")
    # Common rows have those of all nodes, and a mask or first_row decides which of them each node sees.
    common = k_rows.shape[0] == 1 and rows >= batch * nodes and (first_row is not None or mask is not None)
    if (k_rows.shape[0] != batch and not common) or k_rows.shape[3] != dim:
        raise ValueError(
            f"k_rows {k_rows.shape}: must have the batch of {batch} and the dimension {dim} of q {q.shape}"
        )
    if not q.dtype == k_rows.dtype == v_rows.dtype:
        dtypes = f"{q.dtype}, {k_rows.dtype} and {v_rows.dtype}"
        raise ValueError(f"q, k_rows and v_rows must have the same dtype, not {dtypes}")
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, which is not a multiple of the {kv_heads} key heads")
    if rows < nodes:
        raise ValueError(f"k_rows has {rows} rows: must have at least one for each of the {nodes} nodes of q")
    check_mask(mask, batch, nodes, rows)


def check_mask(mask: jax.Array | None, batch: int, nodes: int, rows: int) -> None:
    """Raises ValueError unless a mask of the round's rows has a shape of this size."""
    if mask is not None and mask.shape not in ((batch, nodes, rows), (1, nodes, rows)):
        raise ValueError(
            f"mask {mask.shape}: must be {(batch, nodes, rows)}, for {batch} sequences, {nodes} nodes and {rows} rows"
        )


def check_scores(q: jax.Array, soft_cap: float | None, sinks: jax.Array | None) -> None:
    """Raises ValueError unless the bound of scores and the sinks suit the queries."""
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks {sinks.shape}: must be {q.shape[2:3]}, one for each head of q")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap={soft_cap}: must be above 0, or None for no bound")


def check_prefix(
    batch: int,
    name: str,
    rows: jax.Array,
    pool: jax.Array | None,
    page_table: jax.Array | None,
    prefix_length: jax.Array | None,
    layer: int,
    planes: int = 2,
) -> None:
    """Check the committed rows.

    batch: B, the number of sequences.
    name, rows: the round's own rows, [B or 1, R, ...].
    planes: planes of the pool; 1 if the keys are also the values.

    Raises:
      ValueError: they do not fit the round's own rows.
    """
    if prefix_length is None:
        return
    if pool is None or page_table is None:
        raise ValueError("prefix_length requires pool and page_table")
    row = rows.shape[2:]
    expected = ("L", planes, "P", "page", *row)
    if pool.ndim != len(expected) or (pool.shape[1], *pool.shape[4:]) != (planes, *row):
        raise ValueError(f"pool {pool.shape}: must be {expected} for {name} {rows.shape}")
    if not 0 <= layer < pool.shape[0]:
        raise ValueError(f"layer={layer}: must be between 0 and {pool.shape[0] - 1}, the layers of the pool")
    if page_table.shape[0] != batch or prefix_length.shape != (batch,):
        raise ValueError(
            f"page_table {page_table.shape} and prefix_length {prefix_length.shape}: "
            f"must have a row of pages and a length for each of the {batch} sequences"
        )
