"""Mixture of experts: a router chooses a few MLPs for each token (Shazeer et al., arXiv 1701.06538)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jspec.core.struct import leaf, struct
from jspec.models.ops import Branch, Ops
from jspec.models.quantized import Quantized
from pallas_kernels.group_rows import group_rows
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


@dataclasses.dataclass(frozen=True)
class Routed:
    """Experts of one width and their router.

    shared_width: width of an MLP for every token; 0: there is none. It is split into experts of the same
      width as the others: one product covers all experts of a token.
    shared_gate: whether each token has a gate on the output of that MLP (Qwen3-Next).
    """

    router: Router
    width: int
    shared_width: int = 0
    shared_gate: bool = False

    def __post_init__(self):
        if self.shared_gate and not self.shared_width:
            raise ValueError("shared_gate=True requires shared_width > 0")

    @property
    def shared(self) -> int:
        """Number of experts the shared MLP is split into; the last one is padded with zeros."""
        return -(-self.shared_width // self.width)

    def unread_share(self, tokens: int) -> float:
        """Expected share of all experts left out by a forward of `tokens` tokens, each expert equally likely."""
        router = self.router
        return (1 - router.chosen / router.count) ** tokens * router.count / (router.count + self.shared)


@struct
class RoutedParams:
    """Y experts of width F, F2 = 2 F: X for a router to choose among, then the shared ones, for every token."""

    router: Float[Array, "X E"]
    """In float32."""
    bias: Float[Array, " X"] | None
    """Added to the scores for the choice only, not for the weights (DeepSeek-V3)."""
    gate_up: Float[Array, "Y E F2"] = leaf(split=-1, linear=True)
    down: Float[Array, "Y F E"] = leaf(split=-2, linear=True)
    shared_gate: Float[Array, "E 1"] | None = None
    """Gate on the output of the shared experts."""


def layer_mlp(x: Float[Array, "*batch E"], layer: PyTree, routed: Routed | None, ops: Ops) -> Branch:
    """The output of a layer's MLP, or of its experts, for each token.

    layer: weights with `gate_up` and `down`, or with `experts`; the others are None.
    routed: describes the experts; ignored if the layer has none.
    """
    if layer.experts is None:
        return ops.mlp(x, layer.gate_up, layer.down)
    assert routed is not None
    return ops.sum(routed_mlp(x, layer.experts, routed, ops))


def routed_mlp(
    x: Float[Array, "*batch E"], experts: RoutedParams, routed: Routed, ops: Ops
) -> Float[Array, "*batch E"]:
    """The sum of the experts the router chooses for each token and of the shared ones, as gated MLPs."""
    # Route.
    flat = x.reshape(-1, x.shape[-1])
    logits = ops.linear_transposed(flat.astype(jnp.float32), experts.router)
    ids, weights = routed.router.route(logits, experts.bias, ops)
    # Shared experts follow the routed ones, with one weight for all.
    if routed.shared:
        gate = jnp.ones((1, 1), jnp.float32)
        if experts.shared_gate is not None:
            # Without the barrier XLA recomputes this product, in one thread, for each element of the weights below.
            logit = lax.optimization_barrier(ops.linear(flat, experts.shared_gate))
            gate = jax.nn.sigmoid(logit.astype(jnp.float32))
        weights = jnp.concatenate([weights, jnp.broadcast_to(gate, (len(flat), routed.shared))], axis=1)
    out = experts_mlp(flat, ids, weights, experts.gate_up, experts.down, jax.nn.silu, ops)
    return out.reshape(x.shape)


def experts_mlp(
    x: Float[Array, "T E"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T a"],
    gate_up: Float[Array, "Y E F2"] | Quantized,
    down: Float[Array, "Y F E"] | Quantized,
    activation: Callable[[Array], Array],
    ops: Ops,
) -> Float[Array, "T E"]:
    """The weighted sum, in float32, of the outputs of the experts `ids` and of the last a - k, the shared experts.

    Tokens are sorted by expert, and each expert has one block of a grouped product.
    """
    always = weights.shape[1] - ids.shape[1]
    order, place, sizes = group_rows(ids, gate_up.shape[0] - always, always)
    inner = ops.grouped(x, gate_up, sizes, rows=order, activation=activation)
    out = jnp.take(ops.grouped(inner, down, sizes), place, axis=0, mode="clip")
    return ops.weighted_sum(weights, out).astype(x.dtype)
