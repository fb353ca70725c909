"""Verifies chains of different lengths in one forward without padding: T nodes of all sequences in a row.

Everything except attention is computed per node. Attention unpacks the nodes to chains, as in a padded forward, so that
the committed rows of a sequence are read once for all of its nodes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree, Shaped

from jspec.core import tree
from jspec.core.returned import check_output
from jspec.core.struct import struct
from jspec.core.types import DraftTree, ForwardOutput


@struct
class Packing:
    """Indices from the T packed nodes of a forward to chains [B, N], and back."""

    sequence: Int[Array, " T"]
    """The sequence of each packed node; arbitrary for padding."""
    column: Int[Array, " T"]
    """Its index in the chain, 0 for the root; -1 for padding."""
    place: Int[Array, "B N"]
    """The packed node of each node of a chain; beyond the verified nodes, the last one."""


def pack(count: Int[Array, " B"], total: int, width: int) -> Packing:
    """Packs the first `count[b]` nodes of each sequence's chain of `width` nodes; `total` is at least their sum."""
    batch = count.shape[0]
    # A cumulative sum and a binary search, both written as comparisons: XLA fuses them.
    before = np.tri(batch, k=-1, dtype=bool)
    begin = jnp.where(before, count[None], 0).sum(1, dtype=jnp.int32)
    node = jnp.arange(total, dtype=jnp.int32)
    sequence = ((begin + count)[None] <= node[:, None]).sum(1, dtype=jnp.int32)
    inside = sequence < batch
    sequence = jnp.minimum(sequence, batch - 1)
    column = jnp.where(inside, node - begin[sequence], -1)
    place = begin[:, None] + jnp.clip(jnp.arange(width, dtype=jnp.int32)[None], 0, jnp.maximum(count - 1, 0)[:, None])
    return Packing(sequence, column, jnp.minimum(place, total - 1))


def forward(
    target: Any,
    params: PyTree,
    draft_tree: DraftTree,
    cache: Any,
    start: Int[Array, " B"],
    *,
    capture_layers: tuple[int, ...] = (),
) -> ForwardOutput:
    """As `target.forward`, for a chain with `packed`. A sequence with a limit of -1 has no nodes.

    The results of nodes beyond the limit are those of the last node within it.
    """
    total, limit = draft_tree.packed, draft_tree.limit
    assert total is not None and limit is not None
    packing = pack(limit + 1, total, draft_tree.tokens.shape[1])
    # One forward over T sequences of one node; padding repeats a root.
    sequence, column = packing.sequence, jnp.maximum(packing.column, 0)
    out = target.forward(
        _of_sequences(params, sequence),
        tree.chain(draft_tree.tokens[sequence, column][:, None]),
        _Unpacking(cache, packing, start),
        start[sequence] + column,
        capture_layers=capture_layers,
    )
    out = check_output(target, out, 1)
    return jax.tree.map(lambda x: x[:, 0][packing.place], out)


@struct
class _Unpacking:
    """A cache with attention for packed nodes, [T, 1, ...]."""

    cache: PyTree
    packing: Packing
    start: Int[Array, " B"]
    """Committed rows of each sequence."""

    def attend(self, layer: int, *inputs: Any, start: Any, mask: Any, **options: Any) -> Shaped[Array, "T 1 ..."]:
        """As `Cache.attend`. start, mask: those of single nodes; not used."""
        packing, nodes = self.packing, self.packing.sequence.shape[0]

        def unpack(x: Any) -> Any:
            packed = isinstance(x, jax.Array) and x.shape[:2] == (nodes, 1)
            return x[:, 0][packing.place] if packed else x

        # As chains, causal attention shows a node its ancestors. Results beyond the verified nodes are dropped.
        inputs, options = jax.tree.map(unpack, (inputs, options))
        out = self.cache.attend(layer, *inputs, start=self.start, mask=None, **options)
        return out[packing.sequence, jnp.maximum(packing.column, 0)][:, None]


def _of_sequences(weights: PyTree, sequence: Int[Array, " T"]) -> PyTree:
    """The weights for nodes of these sequences; adapters, for example, depend on the sequence."""

    def per_sequence(x: object) -> bool:
        return hasattr(x, "of_sequences")

    return jax.tree.map(lambda x: x.of_sequences(sequence) if per_sequence(x) else x, weights, is_leaf=per_sequence)
