"""Log-probabilities under the target's own, unprocessed logits, in float32.

They do not depend on the shape of the batch, to the bit.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core import sums
from jspec.core.types import Support, TopTokens
from pallas_kernels.topk import topk


def of_tokens(logits: Float[Array, "B M V"], tokens: Int[Array, "B M"]) -> Float[Array, "B M"]:
    """log p of one token at each of M nodes."""
    logit = jnp.take_along_axis(logits, tokens[:, :, None], axis=2)[:, :, 0]
    return logit - sums.logsumexp(logits)[:, :, 0]


def most_probable(logits: Float[Array, "B M V"], k: int) -> TopTokens:
    """The k most probable tokens at each of M nodes, [B, M, k], k <= V; equally probable ones in order of ids."""
    # The normalizer is that of `of_tokens`, so that a token has the same log-probability in both.
    values, ids, _ = topk(logits, k)
    return TopTokens(ids, values - sums.logsumexp(logits))


def support(processed: Float[Array, "B M V"], k: int) -> Support:
    """The tokens with a probability at each of M nodes: at most k ids of them, or of the others.

    processed: logits after sampling parameters and grammars, -inf where a token is removed.
    """
    allowed = ~jnp.isneginf(processed)
    count = allowed.sum(-1, dtype=jnp.int32)[..., None]
    # The n-th listed token is where the running count reaches n.
    listed = jnp.where(count <= k, allowed, ~allowed)
    running = jnp.cumsum(listed, axis=-1, dtype=jnp.int32)
    search = functools.partial(jnp.searchsorted, v=jnp.arange(1, k + 1, dtype=jnp.int32))
    ids = jax.vmap(jax.vmap(search))(running).astype(jnp.int32)
    return Support(count[..., 0], jnp.where(ids < processed.shape[-1], ids, -1))
