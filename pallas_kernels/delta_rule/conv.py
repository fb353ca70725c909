"""The short causal convolution before the delta rule, over the nodes of a token tree.

Dimensions: B batch, N new nodes, R rows of the round, C channels, W inputs that the convolution remembers.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.delta_rule.linear import suffix_sum


def short_conv(
    window: Float[Array, "B W C"],
    inputs: Float[Array, "B R C"],
    weight: Float[Array, "W1 C"],
    mask: Bool[Array, "#B N R"] | None,
    nodes: int,
) -> Float[Array, "B N C"]:
    """A causal convolution, channel by channel, over each node and its W = W1 - 1 nearest ancestors.

    Args:
      window: the inputs before the root, oldest first.
      weight: oldest input first, the node's own last.
      mask: as in `api.tree_delta_rule`; None: a chain, whose last `nodes` tokens are the nodes.

    Returns:
      the sums, in float32.
    """
    count, rows = window.shape[1], inputs.shape[1]
    line = jnp.concatenate([window, inputs], axis=1)
    wide = weight.astype(jnp.float32)
    out = inputs[:, rows - nodes :].astype(jnp.float32) * wide[count][None, None]
    ancestor = _chain_ancestor(line, nodes) if mask is None else _tree_ancestor(line, mask)
    for distance in range(1, count + 1):
        out = out + ancestor(distance).astype(jnp.float32) * wide[count - distance][None, None]
    return out


def _chain_ancestor(line: jax.Array, nodes: int) -> Callable[[int], jax.Array]:
    """A function that returns the inputs of the ancestors at a distance [B, N, C], for the last nodes of a chain."""

    def ancestor(distance: int) -> jax.Array:
        first = line.shape[1] - nodes - distance
        return line[:, first : first + nodes]

    return ancestor


def _tree_ancestor(line: jax.Array, mask: jax.Array) -> Callable[[int], jax.Array]:
    """The same for the nodes of a tree; `line` holds the window, then the rows."""
    window = line.shape[1] - mask.shape[2]
    visible = jnp.concatenate([jnp.ones((*mask.shape[:2], window), bool), mask], axis=2)
    steps = suffix_sum(visible.astype(jnp.int32))
    column = jnp.arange(line.shape[1], dtype=jnp.int32)[None, None]

    def ancestor(distance: int) -> jax.Array:
        # A node sees one row of each generation, and nearer ones have higher indices.
        index = jnp.where(visible & (steps == distance), column, 0).sum(-1, dtype=jnp.int32)
        return jnp.take_along_axis(line, index[:, :, None], axis=1, mode="clip")

    return ancestor


def slide(
    window: Float[Array, "B W C"], inputs: Float[Array, "B A C"], length: Int[Array, " B"]
) -> Float[Array, "B W C"]:
    """The window after the first `length[b]` inputs."""
    line = jnp.concatenate([window, inputs], axis=1)
    index = length[:, None] + jnp.arange(window.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(line, index[:, :, None], axis=1, mode="clip")
