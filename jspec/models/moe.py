"""Mixture of experts: a router chooses a few MLPs for each token (Shazeer et al., arXiv 1701.06538)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from jspec.core.struct import leaf, struct
from jspec.models.ops import Branch, Ops
from jspec.models.quantized import Quantized
from jspec.models.router import Router
from pallas_kernels.group_rows import group_rows


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
