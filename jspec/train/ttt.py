"""The training-time test of EAGLE-3: a draft is unrolled over its own output as in drafting, and learns from all of it
(Li et al., EAGLE-3, arXiv 2503.01840, section 3).

Row p starts with what the target says of position p. At step k it reads its own output of step k - 1 and the text's
token at p + k + 1, and is to say what the target says there, of the token at p + k + 2.
"""

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jspec.core.struct import struct
from jspec.core.types import Params


class Unrolled(Protocol):
    """A draft as the test runs it."""

    def begin(self, params: Params, seen: Any) -> Any:
        """What step 0 is handed in place of an earlier step's.

        seen: what the draft reads of the target.
        """
        ...

    def forward(
        self, params: Params, tokens: Int[Array, "B T"], seen: Any, handed: Any, step: int
    ) -> tuple[Float[Array, "B T Vd"], Any]:
        """Step `step`: all rows at once, each as the chain that starts there.

        tokens: the text; row p reads the token at p + step + 1, and 0 behind its end.
        handed: what the step before returned.

        Returns the logits, and what the next step is handed.
        """
        ...


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
    """Rows that count where the draft's choice is the target's."""
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


def figures(
    draft: Unrolled,
    params: Params,
    tokens: Int[Array, "B T"],
    seen: Any,
    lesson: Lesson,
    mask: Float[Array, "B T"],
    steps: int,
    *,
    recompute: bool = True,
) -> Figures:
    """Unrolls a draft over `steps` steps and compares each with the target, differentiable in `params.draft`.

    Args:
      params: weights of the draft and of its target, in the precision of the forward.
      tokens: the text.
      seen: what the draft reads of the target.
      lesson: what the target said after each token.
      mask: 1 where the text counts, 0 elsewhere. Row p of step k counts if the token at p + k does.
      recompute: the backward pass makes what is inside of a step anew, most of all its logits, and keeps what K steps
        hand on only.
    """
    chain = jnp.ones(tokens.shape, bool)
    handed, found = draft.begin(params, seen), []
    for step in range(steps):
        run = partial(_step, draft, step=step)
        run = jax.checkpoint(run) if recompute else run
        handed, loss, agreed = run(params, tokens, seen, handed, lesson, mask)
        chain = chain & agreed
        counts = [jnp.sum(x, dtype=jnp.int32) for x in (agreed, chain, shift(mask, step) > 0)]
        found.append((loss, *counts))
    return Figures(*(jnp.stack(column) for column in zip(*found, strict=True)))


def total(loss: Float[Array, " K"], decay: float) -> Float[Array, ""]:
    """The loss of all steps, of which step k counts decay^k."""
    return jnp.sum(loss * jnp.asarray(decay ** np.arange(loss.size), jnp.float32))


def _step(draft: Unrolled, params: Params, tokens, seen, handed, lesson: Lesson, mask, *, step: int):
    """What the next step is handed, the loss of this one, and the counting rows that agree with the target."""
    logits, handed = draft.forward(params, tokens, seen, handed, step)
    probs = shift(lesson.probs, step + 1, jnp.float32(1 / lesson.probs.shape[-1]))
    weight = shift(mask, step) * shift(lesson.known, step + 1, lesson.beyond).astype(mask.dtype)
    loss = jnp.mean(weight * optax.softmax_cross_entropy(logits, probs))
    agreed = (weight > 0) & (jnp.argmax(logits, axis=-1) == jnp.argmax(probs, axis=-1))
    return handed, loss, agreed


def shift(x: Shaped[Array, "B T *rest"], count: int, fill: Any = 0) -> Shaped[Array, "B T *rest"]:
    """Moves everything `count` rows to the left; `fill` comes in behind the end."""
    kept = x[:, count:]
    return jnp.concatenate([kept, jnp.full_like(x[:, : x.shape[1] - kept.shape[1]], fill)], axis=1)
