"""The routers of mixtures of experts: which experts a token goes through."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.models.ops import Ops
from pallas_kernels.topk import topk


@dataclasses.dataclass(frozen=True)
class Router:
    """Chooses `chosen` of `count` experts for each token, and weights them by their scores.

    sigmoid: whether an expert's score is the sigmoid of its logit; otherwise it is a softmax over all experts.
    groups: groups of adjacent experts; only the `kept_groups` best take part in the choice (DeepSeek-V2, arXiv
      2405.04434, section 2.2.2).
    best_of_group: a group's score is the sum of this many of its best scores.
    normalize: whether the weights of the chosen experts are normalized to a sum of 1.
    scale: factor on the weights.
    """

    count: int
    chosen: int
    sigmoid: bool = False
    groups: int = 1
    kept_groups: int = 1
    best_of_group: int = 1
    normalize: bool = False
    scale: float = 1.0

    def __post_init__(self):
        # Groups of experts.
        if self.groups < 1 or self.count % self.groups:
            raise ValueError(f"groups={self.groups} must divide the number of experts ({self.count})")
        if not 1 <= self.kept_groups <= self.groups:
            raise ValueError(f"kept_groups={self.kept_groups}: must be between 1 and {self.groups}")
        size = self.count // self.groups
        if not 1 <= self.best_of_group <= min(size, 2):
            raise ValueError(f"best_of_group={self.best_of_group}: must be between 1 and {min(size, 2)}")
        # Experts of a token.
        if not 1 <= self.chosen <= self.kept_groups * size:
            raise ValueError(
                f"chosen={self.chosen}: must be between 1 and {self.kept_groups * size}, the experts of "
                f"kept_groups={self.kept_groups}"
            )

    def route(
        self, logits: Float[Array, "T X"], bias: Float[Array, " X"] | None, ops: Ops
    ) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        """The experts of each token, best first, and their weights in float32.

        bias: added to the scores for the choice only (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
        """
        logits = logits.astype(jnp.float32)
        if not ops.exact and not self.sigmoid and bias is None and self.kept_groups == self.groups:
            # A softmax keeps the order of the logits, so it is only computed for the chosen ones.
            best, ids, total = topk(logits, self.chosen)
            weights = jax.nn.softmax(best, axis=-1) if self.normalize else jnp.exp(best - total[:, None])
            return ids, weights * self.scale
        # Scores, of the best groups only.
        scores = jax.nn.sigmoid(logits) if self.sigmoid else ops.softmax(logits)
        choice = scores if bias is None else scores + bias[None]
        if self.kept_groups < self.groups:
            choice = jnp.where(self._kept(choice), choice, -jnp.inf)
        # The experts, and their weights without the bias.
        _, ids, _ = topk(choice, self.chosen)
        weights = jnp.take_along_axis(scores, ids, axis=1, mode="clip")
        if self.normalize:
            weights = weights / (ops.sum_columns(weights) + 1e-20)
        return ids, weights * self.scale

    def _kept(self, choice: Float[Array, "T X"]) -> Bool[Array, "T X"]:
        """Whether each expert is in one of the best groups."""
        # The score of a group: its best expert, or the sum of its best two.
        tokens, size = choice.shape[0], self.count // self.groups
        grouped = choice.reshape(tokens, self.groups, size)
        best = grouped.max(-1)
        if self.best_of_group == 2:
            first = jnp.argmax(grouped, axis=-1)[..., None] == jnp.arange(size)[None, None]
            best += jnp.where(first, -jnp.inf, grouped).max(-1)
        # Ranks are counted, not sorted: with a sort, a GPU could not run the loop as one graph.
        one, other, number = best[:, :, None], best[:, None, :], jnp.arange(self.groups)
        before = (number[None, :] < number[:, None])[None]
        rank = ((other > one) | (other == one) & before).sum(-1)
        return jnp.repeat(rank < self.kept_groups, size, axis=1)
