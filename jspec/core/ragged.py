"""Reads chains of different lengths in one forward without padding: T nodes of all sequences in a row.

All but attention is computed per node. Attention puts the nodes of a sequence side by side, as in a padded forward: the
committed rows of a sequence are read once for all of its nodes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree, Shaped

from jspec.core import tree
from jspec.core.returned import check_output
from jspec.core.struct import struct
from jspec.core.types import Committed, DraftTree, ForwardOutput


@struct
class Packing:
    """Where the nodes of each sequence are among the T nodes of a forward."""

    sequence: Int[Array, " T"]
    """The sequence of each node; any for padding."""
    column: Int[Array, " T"]
    """Its place in the chain, 0 for the root; below 0 for padding."""
    place: Int[Array, "B N"]
    """The packed node of each node of a chain; for those that are not read, the last one that is."""

    def row(self, x: PyTree) -> PyTree:
        """Arrays [B, N, ...] as [T, 1, ...]; padding repeats some root."""
        return jax.tree.map(lambda x: x[self.sequence, jnp.maximum(self.column, 0)][:, None], x)

    def chains(self, x: PyTree) -> PyTree:
        """Arrays [T, 1, ...] as [B, N, ...]."""
        return jax.tree.map(lambda x: x[:, 0][self.place], x)

    def attending(self, cache: PyTree, start: Int[Array, " B"]) -> "Attending":
        """The cache of the chains, for a forward over the row. start: committed rows of each sequence."""
        return Attending(cache, self, start)


def pack(count: Int[Array, " B"], total: int, width: int) -> Packing:
    """Places the first `count[b]` nodes of each sequence's chain of `width` nodes; they are at most `total`."""
    batch = count.shape[0]
    # Sums over earlier sequences and searches among the ends, both by comparison: XLA fuses them.
    before = np.tri(batch, k=-1, dtype=bool)
    begin = jnp.where(before, count[None], 0).sum(1, dtype=jnp.int32)
    node = jnp.arange(total, dtype=jnp.int32)
    sequence = ((begin + count)[None] <= node[:, None]).sum(1, dtype=jnp.int32)
    inside = sequence < batch
    sequence = jnp.minimum(sequence, batch - 1)
    column = jnp.where(inside, node - begin[sequence], -1)
    place = begin[:, None] + jnp.clip(jnp.arange(width, dtype=jnp.int32)[None], 0, jnp.maximum(count - 1, 0)[:, None])
    return Packing(sequence, column, jnp.minimum(place, total - 1))


def packing_of(committed: Committed) -> Packing | None:
    """How a draft reads what was committed without padding; None: with padding."""
    if committed.packed is None:
        return None
    return pack(committed.length, committed.packed, committed.tokens.shape[1])


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
    out = target.forward(
        _of_sequences(params, packing.sequence),
        tree.chain(packing.row(draft_tree.tokens)),
        packing.attending(cache, start),
        start[packing.sequence] + jnp.maximum(packing.column, 0),
        capture_layers=capture_layers,
    )
    return packing.chains(check_output(target, out, 1))


@struct
class Attending:
    """A cache whose attention takes packed nodes, [T, 1, ...]."""

    cache: PyTree
    packing: Packing
    start: Int[Array, " B"]
    """Committed rows of each sequence."""

    def attend(self, layer: int, *inputs: Any, start: Any, mask: Any, **options: Any) -> Shaped[Array, "T 1 ..."]:
        """As of the cache. start, mask: not used: they are those of single nodes."""
        packing, nodes = self.packing, self.packing.sequence.shape[0]

        def unpack(x: Any) -> Any:
            packed = isinstance(x, jax.Array) and x.shape[:2] == (nodes, 1)
            return packing.chains(x) if packed else x

        # A node sees its sequence's chain up to its own place; those of other places are not read.
        inputs, options = jax.tree.map(unpack, (inputs, options))
        return packing.row(self.cache.attend(layer, *inputs, start=self.start, mask=None, **options))


def _of_sequences(weights: PyTree, sequence: Int[Array, " T"]) -> PyTree:
    """The weights for nodes of these sequences, where some depend on the sequence."""

    def depends(x: object) -> bool:
        return hasattr(x, "of_sequences")

    return jax.tree.map(lambda x: x.of_sequences(sequence) if depends(x) else x, weights, is_leaf=depends)
