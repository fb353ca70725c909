"""Mixture of experts: a token goes through the few MLPs that a router chose (Shazeer et al., arXiv 1701.06538)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.models import layers
from jspec.models.router import Router
from jspec.struct import struct
from pallas_kernels.group_rows import group_rows
from pallas_kernels.grouped_matmul import grouped_matmul


@dataclasses.dataclass(frozen=True)
class Routed:
    """Experts of a width and the router that chooses among them.

    shared_width: of the MLP beside them, which reads every token; 0: there is none.
    shared_gate: whether each token has a gate on what that MLP adds (Qwen3-Next).
    """

    router: Router
    width: int
    shared_width: int = 0
    shared_gate: bool = False

    def __post_init__(self):
        if self.shared_gate and not self.shared_width:
            raise ValueError("shared_gate=True: with shared_width=0 there is no MLP that it could be on")


@struct
class RoutedParams:
    """X experts of width F, F2 = 2 F, and the router that chooses among them, in float32."""

    router: Float[Array, "E X"]
    bias: Float[Array, " X"] | None
    """On the scores, for the choice alone (DeepSeek-V3)."""
    gate_up: Float[Array, "X E F2"]
    down: Float[Array, "X F E"]
    shared_gate: Float[Array, "E 1"] | None = None
    """On what the MLP beside them adds."""


def layer_mlp(x: Float[Array, "*batch E"], layer: Any, config: Any) -> Float[Array, "*batch E"]:
    """What a layer makes of each token: its MLP, its experts in place of it, or both, their sum.

    layer: has gate_up and down, None where experts stand in their place, and experts, None where there are none.
    config: says experts, `Routed`, where the layer has some.
    """
    experts = layer.experts
    if experts is None:
        return layers.gated_mlp(x, layer.gate_up, layer.down)
    out = routed_mlp(x, experts, config.experts.router)
    if layer.gate_up is None:
        return out
    shared = layers.gated_mlp(x, layer.gate_up, layer.down)
    if experts.shared_gate is not None:
        shared = jax.nn.sigmoid(layers.linear(x, experts.shared_gate)) * shared
    return out + shared


def routed_mlp(x: Float[Array, "*batch E"], experts: RoutedParams, router: Router) -> Float[Array, "*batch E"]:
    """What the experts that the router chooses make of each token, with gated MLPs."""
    flat = x.reshape(-1, x.shape[-1])
    ids, weights = router.route(layers.linear(flat.astype(jnp.float32), experts.router), experts.bias)
    return experts_mlp(flat, ids, weights, experts.gate_up, experts.down, jax.nn.silu).reshape(x.shape)


def experts_mlp(
    x: Float[Array, "T E"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    gate_up: Float[Array, "X E F2"],
    down: Float[Array, "X F E"],
    activation: Callable[[Array], Array],
) -> Float[Array, "T E"]:
    """The weighted sum of what the experts `ids` make of each token, summed in float32.

    Tokens are put in the order of their experts, so that each expert's are one block of a grouped product.
    """
    order, place, sizes = group_rows(ids, gate_up.shape[0])
    inner = grouped_matmul(x, gate_up, sizes, rows=order, activation=activation)
    out = jnp.take(grouped_matmul(inner, down, sizes), place, axis=0, mode="clip")
    return (weights[:, :, None] * out.astype(jnp.float32)).sum(1).astype(x.dtype)
