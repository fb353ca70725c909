"""Mixture of experts: a router chooses a few MLPs for each token (Shazeer et al., arXiv 1701.06538)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jspec.core.struct import leaf, struct
from jspec.models import layers
from jspec.models.quantized import Quantized
from jspec.models.router import Router
from pallas_kernels.exact_matmul import exact_matmul
from pallas_kernels.group_rows import group_rows
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.platform import exactness


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


class MlpParams(Protocol):
    """The weights of a layer's MLP: `gate_up` and `down`, or `experts`; the others are None."""

    @property
    def gate_up(self) -> Float[Array, "E F2"] | None:
        """Gate and up projections, fused."""
        ...

    @property
    def down(self) -> Float[Array, "F E"] | None:
        """The down projection."""
        ...

    @property
    def experts(self) -> RoutedParams | None:
        """Experts and their router."""
        ...


def layer_mlp(
    x: Float[Array, "*batch E"], layer: MlpParams, routed: Routed | None, *, exact: bool = False
) -> Float[Array, "*batch E"] | Float[Array, "P *batch E"]:
    """The output of a layer's MLP, or of its experts, for each token.

    routed: describes the experts; ignored if the layer has none.
    exact: as in `layers.gated_mlp`.
    """
    if layer.experts is None:
        assert layer.gate_up is not None and layer.down is not None
        return layers.gated_mlp(x, layer.gate_up, layer.down, exact=exact)
    assert routed is not None
    return routed_mlp(x, layer.experts, routed, exact=exact)


def routed_mlp(
    x: Float[Array, "*batch E"], experts: RoutedParams, routed: Routed, *, exact: bool = False
) -> Float[Array, "*batch E"]:
    """The sum of the experts the router chooses for each token and of the shared ones, as gated MLPs.

    exact: as in `layers.linear`.
    """
    # Route.
    flat = x.reshape(-1, x.shape[-1])
    logits = router_logits(flat.astype(jnp.float32), experts.router, exact=exact)
    ids, weights = routed.router.route(logits, experts.bias, exact=exact)
    # Shared experts follow the routed ones, with one weight for all.
    if routed.shared:
        gate = jnp.ones((1, 1), jnp.float32)
        if experts.shared_gate is not None:
            # Without the barrier XLA recomputes this product, in one thread, for each element of the weights below.
            logit = lax.optimization_barrier(layers.linear(flat, experts.shared_gate, exact=exact))
            gate = jax.nn.sigmoid(logit.astype(jnp.float32))
        weights = jnp.concatenate([weights, jnp.broadcast_to(gate, (len(flat), routed.shared))], axis=1)
    out = experts_mlp(flat, ids, weights, experts.gate_up, experts.down, jax.nn.silu, exact=exact)
    return out.reshape(x.shape)


def router_logits(x: Float[Array, "T E"], router: Float[Array, "X E"], *, exact: bool = False) -> Float[Array, "T X"]:
    """Router logits, [tokens, experts].

    Its weights are [out, in], unlike all other weights here: the product with one token is then a single GPU kernel.

    exact: as in `layers.linear`.
    """
    if exact:
        return exact_matmul(x, router, transposed=True)
    return jnp.matmul(x, router.T, precision=exactness(x))


def experts_mlp(
    x: Float[Array, "T E"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T a"],
    gate_up: Float[Array, "Y E F2"] | Quantized,
    down: Float[Array, "Y F E"] | Quantized,
    activation: Callable[[Array], Array],
    *,
    exact: bool = False,
) -> Float[Array, "T E"]:
    """The weighted sum, in float32, of the outputs of the experts `ids` and of the last a - k, the shared experts.

    Tokens are sorted by expert, and each expert has one block of a grouped product.

    exact: as in `layers.linear`.
    """
    always = weights.shape[1] - ids.shape[1]
    order, place, sizes = group_rows(ids, gate_up.shape[0] - always, always)
    inner = grouped(x, gate_up, sizes, rows=order, activation=activation, exact=exact)
    out = jnp.take(grouped(inner, down, sizes, exact=exact), place, axis=0, mode="clip")
    return weighted_sum(weights, out, exact=exact).astype(x.dtype)


def weighted_sum(
    weights: Float[Array, "T a"], out: Float[Array, "T a E"], *, exact: bool = False
) -> Float[Array, "T E"]:
    """The outputs of a token's experts times their weights, added in float32; `exact` as in `layers.linear`."""
    weighted = weights[:, :, None] * out.astype(jnp.float32)
    if not exact:
        return weighted.sum(1)
    # A reduction would be divided by its shape, and products merged with sums where the compiler sees fit.
    weighted = lax.optimization_barrier(weighted)
    return functools.reduce(jnp.add, [weighted[:, i] for i in range(weighted.shape[1])])


def grouped(
    x: Float[Array, "T E"],
    weight: Float[Array, "Y E F"] | Quantized,
    sizes: Int[Array, " Y"],
    *,
    exact: bool = False,
    rows: Int[Array, " S"] | None = None,
    activation: Callable[[Array], Array] | None = None,
) -> Float[Array, "S M"]:
    """`grouped_matmul` with the matrices of experts, quantized or not."""
    options: dict[str, Any] = {"rows": rows, "activation": activation, "exact": exact}
    if not isinstance(weight, Quantized):
        return grouped_matmul(x, weight, sizes, **options)
    if exact:
        layers.require_wide(weight)
    codes = None if weight.filling is None else weight.codes
    options |= {"scale": weight.scale, "group": weight.group, "codes": codes, "zero": weight.zero}
    return grouped_matmul(x, weight.narrow, sizes, **options)
