"""The training-time test of EAGLE-3: a head is unrolled over its own features as in drafting, and learns from all of it
(Li et al., EAGLE-3, arXiv 2503.01840, section 3).

Row p starts with the target's feature at position p. At step k it reads its own output of step k - 1 and the text's
token at p + k + 1, and is to say what the target says there, of the token at p + k + 2.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jspec.cache.mha import Rows
from jspec.models import EagleHead
from jspec.models.eagle_head import HeadOutput
from jspec.struct import struct
from jspec.types import Params


@dataclasses.dataclass(frozen=True)
class TttAttention:
    """Stands in for a cache: what a row of step k would see of a cache and of its own chain while drafting.

    length: T, the rows of a step.
    """

    length: int

    def attend(
        self,
        layer: int,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B R K D"],
        v: Float[Array, "B R K D"],
        start: None,
        mask: None,
        scale: float,
    ) -> Float[Array, "B T H D"]:
        """Attention of row p at step k, over the rows 0 to p of step 0 and the row p of the steps 1 to k.

        R = (k + 1) T: the steps' rows, one step after the other. `start` and `mask` must be None.
        """
        assert start is None and mask is None
        batch, length, heads, dim = q.shape
        kv_heads = k.shape[2]
        shape, dot = (batch, -1, length, kv_heads, dim), partial(jnp.einsum, precision=lax.Precision.HIGHEST)
        (first_k, own_k), (first_v, own_v) = (jnp.split(x.reshape(shape), [1], axis=1) for x in (k, v))
        query = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
        causal = dot("btkgd,bskd->bkgts", query, first_k[:, 0], preferred_element_type=jnp.float32) * scale
        own = dot("btkgd,bitkd->bkgti", query, own_k, preferred_element_type=jnp.float32) * scale
        column = jnp.arange(length, dtype=jnp.int32)
        causal = jnp.where((column[:, None] >= column[None])[None, None, None], causal, -jnp.inf)
        # One softmax over both, without an array that holds both.
        highest = jnp.maximum(causal.max(-1, keepdims=True), own.max(-1, keepdims=True, initial=-jnp.inf))
        causal, own = (jnp.exp(scores - lax.stop_gradient(highest)) for scores in (causal, own))
        total = causal.sum(-1) + own.sum(-1)
        out = dot("bkgts,bskd->btkgd", causal.astype(v.dtype), first_v[:, 0], preferred_element_type=jnp.float32)
        out = out + dot("bkgti,bitkd->btkgd", own.astype(v.dtype), own_v, preferred_element_type=jnp.float32)
        return (out / jnp.moveaxis(total, 3, 1)[..., None]).astype(q.dtype).reshape(q.shape)


@struct
class Lesson:
    """What the target says after each token of a text."""

    probs: Float[Array, "B T Vd"]
    """Its distribution within the draft's vocabulary."""
    known: Bool[Array, "B T"]
    """Its choice lies in the draft's vocabulary."""
    beyond: Bool[Array, ""]
    """What `known` is taken for behind the end of the text, where the logits count as zeros."""


@struct
class Figures:
    """Of each of K steps, over a batch."""

    loss: Float[Array, " K"]
    """Cross-entropy from the target's distribution in nats, summed over the rows that count, by B T."""
    agreed: Int[Array, " K"]
    """Rows that count where the head's choice is the target's."""
    chained: Int[Array, " K"]
    """Those that agreed at all earlier steps, too: chains of which a decoder would keep more than k tokens."""
    counted: Int[Array, " K"]
    """Rows within the loss mask."""


def teach(logits: Float[Array, "B T V"], ids: Int[Array, " Vd"] | None) -> Lesson:
    """The lesson in a target's logits.

    ids: the draft's vocabulary, as target ids; None: all.
    """
    if ids is None:
        return Lesson(jax.nn.softmax(logits), jnp.ones(logits.shape[:2], bool), jnp.array(True))
    inside = jnp.zeros(logits.shape[-1], bool).at[ids].set(True)
    probs = jax.nn.softmax(jnp.take(logits, ids, axis=-1, mode="clip"))
    return Lesson(probs, jnp.take(inside, jnp.argmax(logits, axis=-1), mode="clip"), inside[0])


def forward(
    config: EagleHead,
    target: Any,
    params: Params,
    tokens: Int[Array, "B T"],
    feature: Float[Array, "B T E"],
    earlier: Rows | None,
    step: int,
) -> HeadOutput:
    """Step `step` of the unrolled head: all rows at once, each as the chain that starts there.

    Args:
      tokens: the text; row p reads the token at p + step + 1, and 0 behind its end.
      feature: at step 0 `config.fuse` of the target's hidden states, later the output of the step before.
      earlier: rows of the step before; None at step 0.
    """
    length = tokens.shape[1]
    positions = jnp.arange(length, dtype=jnp.int32)[None] + step
    read = shift(tokens, step + 1)
    return config.apply(params, target, read, feature, positions, TttAttention(length), None, earlier=earlier)


def figures(
    config: EagleHead,
    target: Any,
    params: Params,
    tokens: Int[Array, "B T"],
    hidden: Float[Array, "B T C"],
    lesson: Lesson,
    mask: Float[Array, "B T"],
    steps: int,
    *,
    recompute: bool = True,
) -> Figures:
    """Unrolls the head over `steps` steps and compares each with the target, differentiable in `params.draft`.

    Args:
      config, target: configurations of the head and of its target.
      params: weights of both, in the precision of the forward.
      tokens: the text.
      hidden: what the target's layers `config.capture` held at each token.
      lesson: what the target said after each token.
      mask: 1 where the text counts, 0 elsewhere. Row p of step k counts if the token at p + k does.
      recompute: the backward pass makes what is inside of a step anew, most of all its logits, and keeps K features
        and rows only.
    """
    chain = jnp.ones(tokens.shape, bool)
    feature, rows, found = config.fuse(params.draft, hidden), None, []
    for step in range(steps):
        run = partial(_step, config, target, step=step)
        run = jax.checkpoint(run) if recompute else run
        feature, rows, loss, agreed = run(params, tokens, feature, rows, lesson, mask)
        chain = chain & agreed
        counts = [jnp.sum(x, dtype=jnp.int32) for x in (agreed, chain, shift(mask, step) > 0)]
        found.append((loss, *counts))
    return Figures(*(jnp.stack(column) for column in zip(*found, strict=True)))


def total(loss: Float[Array, " K"], decay: float) -> Float[Array, ""]:
    """The loss of all steps, of which step k counts decay^k."""
    return jnp.sum(loss * jnp.asarray(decay ** np.arange(loss.size), jnp.float32))


def _step(config: EagleHead, target: Any, params: Params, tokens, feature, rows, lesson: Lesson, mask, *, step: int):
    """Feature and rows of the next step, the loss of this one, and the counting rows that agree with the target."""
    out = forward(config, target, params, tokens, feature, rows, step)
    probs = shift(lesson.probs, step + 1, jnp.float32(1 / lesson.probs.shape[-1]))
    weight = shift(mask, step) * shift(lesson.known, step + 1, lesson.beyond).astype(mask.dtype)
    loss = jnp.mean(weight * optax.softmax_cross_entropy(out.logits, probs))
    agreed = (weight > 0) & (jnp.argmax(out.logits, axis=-1) == jnp.argmax(probs, axis=-1))
    return out.feature, out.rows, loss, agreed


def shift(x: Shaped[Array, "B T *rest"], count: int, fill: Any = 0) -> Shaped[Array, "B T *rest"]:
    """Moves everything `count` rows to the left; `fill` comes in behind the end."""
    kept = x[:, count:]
    return jnp.concatenate([kept, jnp.full_like(x[:, : x.shape[1] - kept.shape[1]], fill)], axis=1)
