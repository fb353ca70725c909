"""Proposes tokens from the logits of a draft model. Arrays only."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core import grammar as grammars
from jspec.core import sampling
from jspec.core.types import DecodeState, Proposal
from pallas_kernels.topk import topk


def propose(
    s: DecodeState,
    logits: Float[Array, "B M Vd"],
    path: Int[Array, "B M g"],
    *,
    width: int,
    vocab_size: int,
    ids: Int[Array, " Vd"] | Int[Array, "B M Vd"] | None = None,
    sampled: bool = False,
    scored: bool = False,
) -> Proposal:
    """Propose the `width` best children of M nodes, which are g tokens after the committed ones.

    With sampling, the target's choice after a node is the argmax of its processed logits plus the noise of that
    position (`accept.coupled`). Drafts are ranked by their own processed logits plus the same noise, so a draft with
    the target's logits proposes the target's choice. Because the noise is known, the softmax of that sum, not q, is the
    drafter's estimate of a token's probability of acceptance.

    Without sampling, a grammar masks the draft's own vocabulary. If none of its tokens may follow, all have the same
    score; the grammar replaces the proposals (`grammar.mend`) or the target rejects them.

    Args:
      path: the tokens from the first draft to each node.
      vocab_size: the target's.
      ids: target ids of the draft's vocabulary, shared or per node; None: the target's vocabulary.
      sampled: sample the children from q, without replacement and with independent noise, and return q, as some
        acceptance rules require.
      scored: return the scores of a single child, too.
    """
    options = s.sampling
    # Greedy: rank the draft's own vocabulary.
    if options is None:
        if s.grammar.table is not None:
            logits = grammars.forbid(s.grammar, logits, path, ids)
        index, scores = _best(logits, width, scored)
        return Proposal(_tokens(index, ids), scores, None)
    # Sampling: process the logits over the target's vocabulary like the target's own.
    if ids is not None:
        logits = _spread(logits, ids, vocab_size)
    logits = sampling.temper(options, sampling.adjust(s, logits, path))
    if options.temperature is None:
        tokens, scores = _best(logits, width, scored)
        return Proposal(tokens, scores, None)
    # Rank by logits plus noise; greedy sequences without noise.
    noise = _noise(s, logits.shape, path.shape[2], sampled)
    noisy = logits + jnp.where((options.temperature > 0).reshape(-1, 1, 1), noise, 0.0)
    tokens, scores = _best(noisy, width, scored)
    return Proposal(tokens, scores, jax.nn.softmax(logits, axis=-1) if sampled else None)


def _tokens(index: Int[Array, "B M W"], ids: Array | None) -> Int[Array, "B M W"]:
    """The target's ids of these indices; `ids` as in `propose`."""
    if ids is None:
        return index
    return ids.at[index].get(mode="clip") if ids.ndim == 1 else jnp.take_along_axis(ids, index, axis=2, mode="clip")


def _spread(logits: Float[Array, "B M Vd"], ids: Array, vocab_size: int) -> Float[Array, "B M V"]:
    """Logits over the target's vocabulary; -inf for ids without one."""
    everywhere = jnp.full((*logits.shape[:2], vocab_size), -jnp.inf)
    if ids.ndim == 1:
        return everywhere.at[:, :, ids].set(logits)
    batch, nodes = (jnp.arange(count, dtype=jnp.int32) for count in logits.shape[:2])
    return everywhere.at[batch[:, None, None], nodes[None, :, None], ids].set(logits)


def _noise(s: DecodeState, shape: tuple[int, ...], generation: int, sampled: bool) -> Float[Array, "B _ V"]:
    """The noise of the target's choice at the children's position, [B, 1, V]; if `sampled`, independent noise."""
    _, nodes, vocabulary = shape
    position = s.length + generation
    if not sampled:
        return sampling.gumbel(s.key, sampling.NOISE, position, 1, vocabulary)
    keys = sampling.stream(s.key, sampling.DRAFT, s.length)
    draw = jax.vmap(lambda key: jax.random.gumbel(jax.random.fold_in(key, generation), (nodes, vocabulary)))
    return draw(keys)


def _best(
    logits: Float[Array, "B M V"], width: int, scored: bool
) -> tuple[Int[Array, "B M W"], Float[Array, "B M W"] | None]:
    """The tokens with the highest logits and their log-probabilities; of a single token only if `scored`."""
    if width == 1 and not scored:
        return jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32), None
    best, tokens, log_sum_exp = topk(logits, width)
    return tokens, best - log_sum_exp[..., None]
