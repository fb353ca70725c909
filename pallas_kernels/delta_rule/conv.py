"""The short causal convolution before the delta rule, over the nodes of a token tree.

Dimensions: B batch, N new nodes, R rows of the round, A accepted tokens, C channels, W inputs before the root, which
the convolution needs, W1 = W + 1.
"""

from collections.abc import Iterator

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
    """Depthwise causal convolution over each node and its W nearest ancestors.

    Args:
      window: the inputs before the root, oldest first.
      weight: oldest input first, the node's own last.
      inputs: of the rows; the nodes are the last ones.
      mask: as in `api.tree_delta_rule`; None: a chain.
      nodes: N.

    Returns:
      the sums, in float32.
    """
    width, rows = window.shape[1], inputs.shape[1]
    history = jnp.concatenate([window, inputs], axis=1)
    taps = weight.astype(jnp.float32)
    out = inputs[:, rows - nodes :].astype(jnp.float32) * taps[width][None, None]
    for distance, ancestor in enumerate(_ancestors(history, mask, nodes, width), 1):
        out = out + ancestor.astype(jnp.float32) * taps[width - distance][None, None]
    return out


def _ancestors(history: jax.Array, mask: jax.Array | None, nodes: int, count: int) -> Iterator[jax.Array]:
    """The inputs [B, N, C] of the nodes' parents, then of their grandparents, up to `count` generations.

    history: [B, W + R, C], the window, then the inputs of the rows.
    """
    if mask is None:
        first = history.shape[1] - nodes
        yield from (history[:, first - distance : first - distance + nodes] for distance in range(1, count + 1))
        return
    visible = jnp.concatenate([jnp.ones((*mask.shape[:2], count), bool), mask], axis=2)
    steps = suffix_sum(visible.astype(jnp.int32))
    column = jnp.arange(history.shape[1], dtype=jnp.int32)[None, None]
    for distance in range(1, count + 1):
        # A node sees its ancestors only, so the one at this distance has as many visible rows after it.
        index = jnp.where(visible & (steps == distance), column, 0).sum(-1, dtype=jnp.int32)
        yield jnp.take_along_axis(history, index[:, :, None], axis=1, mode="clip")


def slide(
    window: Float[Array, "B W C"], inputs: Float[Array, "B A C"], length: Int[Array, " B"]
) -> Float[Array, "B W C"]:
    """The window after committing the first `length[b]` inputs of each sequence."""
    history = jnp.concatenate([window, inputs], axis=1)
    index = length[:, None] + jnp.arange(window.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(history, index[:, :, None], axis=1, mode="clip")
