"""Cases for every backend of every operation on a cache: a table of shapes, and random arrays for a case.

A pool is larger than its sequences need, its pages are assigned in random order, and all that is not committed is NaN.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one call. `prefix` holds the committed rows of each sequence, or is None where there is no prefix."""

    name: str
    prefix: tuple[int, ...] | None = (5, 0, 12)
    nodes: int = 4
    earlier: int = 0
    """Rows of this round that precede those of the nodes."""
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    pages: int = 3
    tree: bool = False
    layers: int = 2
    dtype: str = "float32"
    soft_cap: float | None = None
    windows: bool = False
    """Each node sees the prefix from its own position on."""
    keep_first: int = 0
    """And this number of positions at the beginning."""
    sinks: bool = False
    selected: bool = False
    """Each node sees a part of the prefix, in attention to latent rows."""
    stored: str | None = None
    """The dtype of the pool; None: `dtype`."""

    @property
    def rows(self) -> int:
        return self.earlier + self.nodes

    @property
    def batch(self) -> int:
        return 3 if self.prefix is None else len(self.prefix)

    @property
    def capacity(self) -> int:
        return self.pages * self.page_size

    @property
    def pool_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.stored or self.dtype)


CASES = (
    Case("one_node", nodes=1),
    Case("prefix_full_and_empty", prefix=(12, 0, 12, 1), nodes=3),
    Case("nothing_committed", prefix=(0, 0), nodes=5),
    Case("page_of_1", page_size=1, pages=13, prefix=(13, 7, 0)),
    Case("page_of_3", page_size=3, pages=5, prefix=(15, 4, 3), tree=True),
    Case("page_of_16", page_size=16, prefix=(16, 17, 48, 0), head_dim=64),
    Case("page_of_64", page_size=64, pages=2, prefix=(128, 63, 65), head_dim=128, tree=True),
    Case("2_queries_a_head", heads=4, nodes=5, tree=True),
    Case("3_queries_a_head", heads=3, kv_heads=1, nodes=7, head_dim=64, tree=True),
    Case("4_queries_a_head", heads=8, nodes=2, head_dim=128),
    Case("nodes_17_tree", nodes=17, tree=True, page_size=16),
    Case("nodes_33_chain", nodes=33, heads=4, page_size=16, pages=4, prefix=(31, 20, 0)),
    Case("nodes_33_tree", nodes=33, heads=4, kv_heads=1, tree=True),
    Case("earlier_rows", nodes=1, earlier=3),
    Case("earlier_rows_chain", nodes=3, earlier=5, heads=4),
    Case("earlier_rows_tree", nodes=4, earlier=9, heads=4, tree=True),
    Case("no_prefix_chain", prefix=None, nodes=9),
    Case("no_prefix_tree", prefix=None, nodes=9, heads=4, tree=True),
    Case("one_sequence_one_layer", prefix=(6,), layers=1),
    Case("bfloat16_chain", dtype="bfloat16", heads=4, head_dim=64, page_size=16, prefix=(48, 0, 20)),
    Case("bfloat16_tree", dtype="bfloat16", heads=6, head_dim=128, nodes=16, tree=True, page_size=16),
    Case("narrow_pool_chain", stored="float8_e4m3fn", nodes=3, heads=4, page_size=3, pages=5, prefix=(14, 3, 0)),
    Case("narrow_pool_tree", dtype="bfloat16", stored="float8_e4m3fn", nodes=5, tree=True, head_dim=64, page_size=16),
    Case("bfloat16_earlier_rows", dtype="bfloat16", nodes=2, earlier=4, page_size=1, pages=12),
)

ATTENTION_CASES = (
    *CASES,
    Case("head_dim_24", head_dim=24, nodes=5),
    Case("head_dim_256", head_dim=256, nodes=2, tree=True),
    Case("8_queries_a_head", heads=8, kv_heads=1, nodes=3, tree=True),
    Case("nodes_64_tree", nodes=64, heads=4, kv_heads=1, tree=True, page_size=16, prefix=(37,)),
    Case("chunk_after_a_prefix", nodes=40, heads=4, page_size=16, pages=4, prefix=(64, 3)),
    Case("soft_cap", soft_cap=1.5, tree=True),
    Case("windows_chain", windows=True, nodes=5, heads=4, page_size=2, pages=20, prefix=(40, 33, 0)),
    Case("windows_tree", windows=True, nodes=9, tree=True, page_size=16, pages=4, prefix=(64, 50, 20)),
    Case("first_chain", windows=True, keep_first=3, nodes=5, page_size=2, pages=20, prefix=(40, 33, 2, 0)),
    Case(
        "first_tree", windows=True, keep_first=17, nodes=9, heads=4, tree=True, page_size=16, pages=20, prefix=(320, 9)
    ),
    Case("bfloat16_windows_soft_cap", dtype="bfloat16", windows=True, soft_cap=2.0, tree=True, head_dim=64),
)
"""Those, and cases that differ for attention only."""
SINK_CASES = (
    Case("sinks_chain", sinks=True, nodes=5, heads=6, page_size=3, pages=7, prefix=(20, 3, 0)),
    Case("sinks_windows_tree", sinks=True, windows=True, nodes=9, heads=4, kv_heads=1, tree=True, prefix=(12, 7)),
    Case("sinks_no_prefix", sinks=True, prefix=None, nodes=9, heads=4),
    Case("bfloat16_sinks_soft_cap", dtype="bfloat16", sinks=True, soft_cap=2.0, heads=4, head_dim=64),
)
"""For attention with sinks."""


def rng_of(case: Case) -> np.random.Generator:
    """A generator seeded by the name of the case."""
    return np.random.default_rng(list(case.name.encode()))


def normal(rng, shape, dtype: str) -> np.ndarray:
    return rng.normal(size=shape).astype(jnp.dtype(dtype))


def page_table(rng, case: Case, spare: int = 4) -> tuple[np.ndarray, int]:
    """Pages of each sequence in random order, and the number of all pages, of which `spare` belong to no sequence."""
    total = case.batch * case.pages + spare
    table = rng.permutation(total)[: case.batch * case.pages]
    return table.reshape(case.batch, case.pages).astype(np.int32), total


def pool(rng, case: Case, table: np.ndarray, total: int, lengths, starts=None, row=None) -> np.ndarray:
    """Random rows before each sequence's length (and from its start on, or first ones to keep); NaN everywhere else.

    row: its parts, and its shape; None: keys and values of all heads.
    """
    row = row or (2, case.kv_heads, case.head_dim)
    full = np.full((case.layers, row[0], total, case.page_size, *row[1:]), np.nan, case.pool_dtype)
    for b, length in enumerate(lengths):
        for t in range(length):
            if starts is not None and case.keep_first <= t < starts[b]:
                continue
            at = table[b, t // case.page_size], t % case.page_size
            full[:, :, *at] = normal(rng, (case.layers, *row), case.pool_dtype)
    return full


def tree_mask(rng, case: Case) -> np.ndarray:
    """Which rows each node sees: some of the earlier ones, its ancestors and itself."""
    mask = np.zeros((case.batch, case.nodes, case.rows), bool)
    for b in range(case.batch):
        for node in range(case.nodes):
            if node:
                mask[b, node] = mask[b, rng.integers(node)]
            else:
                mask[b, 0, : case.earlier] = rng.integers(0, 2, case.earlier)
            mask[b, node, case.earlier + node] = True
    return mask


def attention_inputs(case: Case) -> tuple:
    """Arguments of `paged_attention`, in order, up to the mask. All that is not committed, or before all windows, is
    NaN."""
    rng = rng_of(case)
    q = normal(rng, (case.batch, case.nodes, case.heads, case.head_dim), case.dtype)
    k, v = (normal(rng, (case.batch, case.rows, case.kv_heads, case.head_dim), case.dtype) for _ in range(2))
    mask = tree_mask(rng, case) if case.tree else None
    if case.prefix is None:
        return q, k, v, None, None, None, mask
    table, total = page_table(rng, case)
    starts = attention_options(case)["prefix_start"]
    first = None if starts is None else starts.min(1)
    return q, k, v, pool(rng, case, table, total, case.prefix, first), table, np.array(case.prefix, np.int32), mask


def attention_options(case: Case) -> dict[str, Any]:
    """Its options. Windows begin in the second half of the prefix; some nodes see none of it."""
    starts = sinks = None
    if case.windows:
        prefix = np.array(case.prefix, np.int32)[:, None]
        starts = rng_of(case).integers(prefix // 2, prefix + 1, (case.batch, case.nodes)).astype(np.int32)
    if case.sinks:
        sinks = normal(rng_of(case), (case.heads,), "float32") * 3
    options = {"layer": case.layers - 1, "scale": 0.3, "soft_cap": case.soft_cap, "keep_first": case.keep_first}
    return {**options, "prefix_start": starts, "sinks": sinks}


ROPE = 8
"""Rotary elements of a latent row; the number of latent ones is a case's head_dim."""


def latent_inputs(case: Case, rope: int = ROPE) -> tuple:
    """Arguments of `mla_attention`, in order, up to the mask. All that is not committed is NaN."""
    rng = rng_of(case)
    queries = (case.batch, case.nodes, case.heads)
    q_latent, q_rope = (normal(rng, (*queries, size), case.dtype) for size in (case.head_dim, rope))
    width = case.head_dim + rope
    rows = normal(rng, (case.batch, case.rows, width), case.dtype)
    mask = tree_mask(rng, case) if case.tree else None
    if case.prefix is None:
        return q_latent, q_rope, rows, None, None, None, mask
    table, total = page_table(rng, case)
    latents = pool(rng, case, table, total, case.prefix, row=(1, width))
    return q_latent, q_rope, rows, latents, table, np.array(case.prefix, np.int32), mask


def latent_options(case: Case) -> dict[str, Any]:
    """Its options. Where a part of the prefix is selected, some nodes see no committed position."""
    seen = rng_of(case).random((case.batch, case.nodes, case.capacity)) < 0.4 if case.selected else None
    return {"layer": case.layers - 1, "scale": 0.3, "prefix_mask": seen}


def attention_shapes(case: Case) -> tuple:
    """The shapes of `attention_inputs`."""
    head = case.kv_heads, case.head_dim
    own = jax.ShapeDtypeStruct((case.batch, case.rows, *head), case.dtype)
    q = jax.ShapeDtypeStruct((case.batch, case.nodes, case.heads, case.head_dim), case.dtype)
    return q, own, own, *_cache_shapes(case, (2, *head))


def latent_shapes(case: Case, rope: int = 64) -> tuple:
    """The shapes of `latent_inputs`."""
    new, width = jax.ShapeDtypeStruct, case.head_dim + rope
    queries = [new((case.batch, case.nodes, case.heads, size), case.dtype) for size in (case.head_dim, rope)]
    return *queries, new((case.batch, case.rows, width), case.dtype), *_cache_shapes(case, (1, width))


def _cache_shapes(case: Case, row: tuple[int, ...]) -> tuple:
    """The shapes of a pool, of its page table, of the prefixes and of the mask."""
    new = jax.ShapeDtypeStruct
    mask = new((case.batch, case.nodes, case.rows), "bool") if case.tree else None
    if case.prefix is None:
        return None, None, None, mask
    stored = new((case.layers, row[0], case.batch * case.pages, case.page_size, *row[1:]), case.pool_dtype)
    return stored, new((case.batch, case.pages), "int32"), new((case.batch,), "int32"), mask


def attention_by_hand(q, k, v, pool, *cache, layer=0, prefix_start=None, keep_first=0, **options):
    """One softmax per query, in float64. cache: page table, prefixes and mask."""
    seen = None
    if prefix_start is not None:
        position = np.arange(cache[0].shape[1] * pool.shape[3])
        seen = (position >= prefix_start[:, :, None]) | (position < keep_first)
    return _by_hand(q, k, v, (None if pool is None else pool[layer], *cache), seen, **options)


def latent_by_hand(q_latent, q_rope, rows, pool, *cache, layer=0, prefix_mask=None, **options):
    """The same over latent rows: one head of keys, of which the first columns are the values."""
    q, k = np.concatenate([q_latent, q_rope], axis=-1), rows[:, :, None]
    stored = None if pool is None else pool[layer][[0, 0]][..., None, :]
    out = _by_hand(q, k, k, (stored, *cache), prefix_mask, **options)
    return out[..., : q_latent.shape[-1]]


def _by_hand(q, k, v, cache, seen, *, scale=1.0, soft_cap=None, sinks=None):
    """seen: which positions of the prefix each node sees; None: all."""
    (batch, nodes, heads, _), (pool, table, prefix, mask) = q.shape, cache
    rows, group = k.shape[1], heads // k.shape[2]
    out = np.zeros((*q.shape[:3], v.shape[-1]), np.float64)
    for b, n, h in np.ndindex(batch, nodes, heads):
        own = np.arange(rows) <= rows - nodes + n if mask is None else mask[b, n]
        keys, values = [k[b, own, h // group]], [v[b, own, h // group]]
        for t in range(0 if prefix is None else prefix[b]):
            if seen is None or seen[b, n, t]:
                at = table[b, t // pool.shape[2]], t % pool.shape[2], h // group
                keys.append(pool[0, *at][None])
                values.append(pool[1, *at][None])
        keys, values = (np.concatenate([part.astype(np.float64) for part in parts]) for parts in (keys, values))
        scores = keys @ q[b, n, h].astype(np.float64) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        if sinks is not None:
            scores, values = np.append(scores, sinks[h]), np.append(values, np.zeros_like(values[:1]), axis=0)
        weights = np.exp(scores - scores.max())
        out[b, n, h] = weights / weights.sum() @ values
    return out


def compaction_inputs(case: Case, *, with_path: bool, lengths: tuple[int, ...] | None = None) -> tuple:
    """Arguments of `kv_compact`, in order. Rows start after the case's prefix, and some do not fit."""
    rng = rng_of(case)
    table, total = page_table(rng, case)
    shape = (case.layers, 2, total, case.page_size, case.kv_heads, case.head_dim)
    rows = normal(rng, (case.layers, 2, case.batch, case.nodes, case.kv_heads, case.head_dim), case.dtype)
    accepted = max(case.nodes - 1, 1) if with_path else case.nodes
    path = np.sort(rng.integers(0, case.nodes, (case.batch, accepted)), axis=1).astype(np.int32) if with_path else None
    if lengths is None:
        # The first sequence accepts all, the last one nothing, the others any number.
        lengths = (accepted, *rng.integers(0, accepted + 1, max(case.batch - 2, 0)), 0)[: case.batch]
    start = np.array(case.prefix or (0,) * case.batch, np.int32)
    return normal(rng, shape, case.dtype), rows, table, start, path, np.array(lengths, np.int32)


SPLIT = Case("splits", prefix=(96, 0, 17, 33), heads=4, nodes=6, tree=True, page_size=16, pages=6)
"""For kernels that split prefixes and tiles."""
SHARED_MEMORY = 227 * 1024
"""Bytes that a program of an H100 can have."""


def assert_close(out, expected, dtype="float32"):
    """Values are of unit variance. In bfloat16 the weights of the softmax and the result are rounded to 8 bits."""
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance)
