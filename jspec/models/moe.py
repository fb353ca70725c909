"""Mixture of experts: a token goes through the few MLPs that a router chose (Shazeer et al., arXiv 1701.06538)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jspec.core.struct import struct
from jspec.models import layers
from jspec.models.router import Router
from pallas_kernels.group_rows import group_rows
from pallas_kernels.grouped_matmul import grouped_matmul


@dataclasses.dataclass(frozen=True)
class Routed:
    """Experts of a width and the router that chooses among them.

    shared_width: of the MLP that reads every token, too; 0: there is none. It is cut into experts of the others' width,
      so that one product reads all that a token goes through.
    shared_gate: whether each token has a gate on what that MLP adds (Qwen3-Next).
    """

    router: Router
    width: int
    shared_width: int = 0
    shared_gate: bool = False

    def __post_init__(self):
        if self.shared_gate and not self.shared_width:
            raise ValueError("shared_gate=True: with shared_width=0 there is no MLP that it could be on")

    @property
    def shared(self) -> int:
        """How many experts that MLP is: the last one is filled up with zeros, which add nothing."""
        return -(-self.shared_width // self.width)


@struct
class RoutedParams:
    """Y experts of width F, F2 = 2 F: X that a router chooses among, in float32, then those that read every token."""

    router: Float[Array, "X E"]
    bias: Float[Array, " X"] | None
    """On the scores, for the choice alone (DeepSeek-V3)."""
    gate_up: Float[Array, "Y E F2"]
    down: Float[Array, "Y F E"]
    shared_gate: Float[Array, "E 1"] | None = None
    """On what the experts add that read every token."""


def layer_mlp(x: Float[Array, "*batch E"], layer: Any, config: Any) -> Float[Array, "*batch E"]:
    """What a layer makes of each token: its MLP, or its experts in place of it.

    layer: has gate_up and down, or experts; None what it has not.
    config: says experts, `Routed`, where the layer has some.
    """
    if layer.experts is None:
        return layers.gated_mlp(x, layer.gate_up, layer.down)
    return routed_mlp(x, layer.experts, config.experts)


def routed_mlp(x: Float[Array, "*batch E"], experts: RoutedParams, routed: Routed) -> Float[Array, "*batch E"]:
    """What the experts that the router chooses, and those that read every token, make of each, with gated MLPs."""
    flat = x.reshape(-1, x.shape[-1])
    ids, weights = routed.router.route(router_logits(flat.astype(jnp.float32), experts.router), experts.bias)
    if routed.shared:
        gate = jnp.ones((1, 1), jnp.float32)
        if experts.shared_gate is not None:
            # Else XLA makes this product again, in one thread, for each number of the weights below.
            logit = lax.optimization_barrier(layers.linear(flat, experts.shared_gate))
            gate = jax.nn.sigmoid(logit.astype(jnp.float32))
        weights = jnp.concatenate([weights, jnp.broadcast_to(gate, (len(flat), routed.shared))], axis=1)
    return experts_mlp(flat, ids, weights, experts.gate_up, experts.down, jax.nn.silu).reshape(x.shape)


def router_logits(x: Float[Array, "T E"], router: Float[Array, "X E"]) -> Float[Array, "T X"]:
    """What a router thinks of each expert for each token.

    Its weights are [out, in], other than all others': a GPU makes one kernel of the product of one token with them.
    """
    return jnp.matmul(x, router.T, precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)


def experts_mlp(
    x: Float[Array, "T E"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T a"],
    gate_up: Float[Array, "Y E F2"],
    down: Float[Array, "Y F E"],
    activation: Callable[[Array], Array],
) -> Float[Array, "T E"]:
    """The weighted sum of what the experts `ids`, and the last a - k of all, make of each token, summed in float32.

    Tokens are put in the order of their experts, so that each expert's are one block of a grouped product.
    """
    always = weights.shape[1] - ids.shape[1]
    order, place, sizes = group_rows(ids, gate_up.shape[0] - always, always)
    inner = grouped_matmul(x, gate_up, sizes, rows=order, activation=activation)
    out = jnp.take(grouped_matmul(inner, down, sizes), place, axis=0, mode="clip")
    return (weights[:, :, None] * out.astype(jnp.float32)).sum(1).astype(x.dtype)
