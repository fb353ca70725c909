"""The possible tokens in the place of each new one, so that a trainer computes the same distribution again."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.core.types import Support


class TokenSupport(NamedTuple):
    """The possible tokens in the place of one: those left by top-k, top-p, min-p, grammars and forbidden ids.

    size: how many; 1 in a greedy sequence, and the vocabulary's if none was removed.
    ids: of these in order, or of all other tokens if these exceed the `support` of the request; None: both do.
    """

    size: int
    ids: list[int] | None


def token_supports(recorded: Support | None, tokens: Sequence[int], bound: int, vocab_size: int) -> list[TokenSupport]:
    """The support of each of some tokens of a sequence.

    recorded: NumPy arrays [n] and [n, k] with k at least the bound or the vocabulary; None: the sequence is greedy.
    bound: `support` of the request.
    """
    if recorded is None:
        return [TokenSupport(1, [token]) for token in tokens]
    width, supports = recorded.ids.shape[-1], []
    for count, row in zip(recorded.count.tolist(), np.asarray(recorded.ids), strict=True):
        wants_rest = count > bound
        if wants_rest and vocab_size - count > bound:
            supports.append(TokenSupport(count, None))
            continue
        listed = row[row >= 0]
        if wants_rest and count <= width:
            listed = np.setdiff1d(np.arange(vocab_size), listed)
        supports.append(TokenSupport(count, listed.tolist()))
    return supports


def support_array(supports: Sequence[TokenSupport], size: int | None = None) -> Int[np.ndarray, "n size"]:
    """The supports of n tokens as an array for `masked_logits`. Rows of -1 stand for all tokens, as padding does.

    size: columns; None: as many as the longest list of ids.

    Raises:
      ValueError: a support without ids, or with more than `size`.
    """
    longest = max((len(one.ids or ()) for one in supports), default=0)
    array = np.full((len(supports), max(1, longest) if size is None else size), -1, np.int32)
    for at, (count, ids) in enumerate(supports):
        if ids is None or len(ids) > array.shape[1]:
            listed = f"none of {count} ids, more than the bound" if ids is None else f"{len(ids)} ids"
            raise ValueError(
                f"supports[{at}]: lists {listed}; must list all, at most {array.shape[1]}: use a larger support or size"
            )
        # Removed tokens are negative.
        array[at, : len(ids)] = ids if len(ids) == count else -2 - np.array(ids, np.int32)
    return array


def masked_logits(logits: Float[Array, "*batch V"], support: Int[Array, "*batch k"]) -> Float[Array, "*batch V"]:
    """Logits with -inf in place of impossible tokens. Pure, for use under `jit` and `grad`.

    Their softmax is the distribution of a rollout without penalties and bias, if the logits are the same, divided by
    its temperature: `jax.nn.log_softmax(jspec.masked_logits(logits / temperature, support))`.

    support: rows of `support_array`.
    """
    rows, size = support.reshape(-1, support.shape[-1]), logits.shape[-1]
    removes = (rows < 0).all(-1, keepdims=True)
    ids = jnp.where(rows >= 0, rows, jnp.where(rows < -1, -2 - rows, size))
    listed = jnp.zeros((len(rows), size), bool).at[jnp.arange(len(rows))[:, None], ids].set(True, mode="drop")
    return jnp.where((listed ^ removes).reshape(logits.shape), logits, -jnp.inf)
