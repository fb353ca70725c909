"""Norms, linear layers and the gated MLP.

Weights are stored [in, out], the transpose of checkpoints: with the contracted dimension first, XLA on CPU multiplies
five rows by them 2.5 times faster (docs/decisions.md).
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from jspec.core.sharding import TENSOR, sum_over_devices
from jspec.models.quantized import Quantized, quantized_product
from pallas_kernels import norm, rotary
from pallas_kernels.exact_matmul import exact_matmul
from pallas_kernels.gated_matmul import gated_matmul
from pallas_kernels.platform import exactness, platform, result_alone
from pallas_kernels.residual_norm import residual_norm

GEMV_MAX_WEIGHTS = {"gpu": 10_000_000, "tpu": math.inf}
"""Size of a matrix below which XLA, on a platform, lowers its product with a single row to a sum over columns,
slower than a matrix product with six rows (docs/decisions.md). A product with two equal rows is a matrix product.
"""


Rotation = tuple[Float[Array, "#B #N half"], Float[Array, "#B #N half"]]
"""Cosine and sine of the angles by which the pairs of each head are rotated, see `Rope.rotation`."""


@dataclasses.dataclass(frozen=True)
class SelectedToken:
    """The only token of each sequence whose hidden state is needed, and the rows of the round it sees."""

    token: Int[Array, " B"]
    mask: Bool[Array, "B 1 N"]

    @classmethod
    def from_index(
        cls,
        token: Int[Array, " B"] | None,
        mask: Bool[Array, "#B N R"] | None,
        tokens: Int[Array, "B N"],
        earlier: PyTree,
    ) -> "SelectedToken | None":
        """The selection of a forward; None if no token is selected, there is only one, or there are `earlier` rows.

        token: index of the selected token; None: all tokens are needed.
        mask: None: each token sees all tokens up to its own.
        """
        batch, nodes = tokens.shape
        if token is None or nodes == 1 or earlier is not None:
            return None
        if mask is None:
            return cls(token, jnp.arange(nodes, dtype=jnp.int32)[None, None] <= token[:, None, None])
        mask = jnp.broadcast_to(mask, (batch, *mask.shape[1:]))
        return cls(token, take_token(mask, token))


def take_token(x: Shaped[Array, "B N *rest"], token: Int[Array, " B"]) -> Shaped[Array, "B 1 *rest"]:
    """One token's part of each sequence."""
    return jnp.take_along_axis(x, token.reshape(-1, *[1] * (x.ndim - 1)), axis=1, mode="clip")


def linear(
    x: Float[Array, "*batch in"],
    weight: Float[Array, "in out"] | Quantized,
    bias: Float[Array, " out"] | None = None,
    *,
    exact: bool = False,
) -> Float[Array, "*batch out"]:
    """x @ weight + bias. In float32 the products are exact float32 on every platform, not TF32.

    exact: a token's result does not depend on the other tokens, to the bit; not for a quantized weight.
    """
    if exact:
        out = exact_matmul(x.reshape(-1, x.shape[-1]), require_wide(weight))
        return add_bias(out.reshape(*x.shape[:-1], -1), bias)
    # Double a single row: XLA lowers its product to a slow sum over columns.
    alone = x.size == x.shape[-1] and weight.size < GEMV_MAX_WEIGHTS.get(platform(), 0)
    rows = jnp.broadcast_to(x.reshape(1, -1), (2, x.shape[-1])) if alone else x
    if isinstance(weight, Quantized):
        out = quantized_product(rows, weight)
    else:
        out = jnp.matmul(rows, weight, precision=exactness(x))
    if alone:
        out = out[:1].reshape(*x.shape[:-1], -1)
    return add_bias(result_alone(out), bias)


def divided_linear(
    x: Float[Array, "*batch in"], weight: Float[Array, "in out"] | Quantized
) -> Float[Array, "*batch out"] | Float[Array, "P *batch out"]:
    """The exact product, or the sums over parts of its contraction, for `add_rms_norm` and `split_heads` to add up."""
    out = exact_matmul(x.reshape(-1, x.shape[-1]), require_wide(weight), parts=True)
    return out.reshape(*out.shape[:-2], *x.shape[:-1], -1)


def require_wide(weight: Float[Array, "*stack in out"] | Quantized) -> Float[Array, "*stack in out"]:
    """The weight of an exact product.

    Raises:
      ValueError: it is quantized.
    """
    if isinstance(weight, Quantized):
        raise ValueError("exact=True: no exact products of quantized weights yet; load the model with weights='wide'")
    return weight


def add_bias(x: Float[Array, "*batch out"], bias: Float[Array, " out"] | None) -> Float[Array, "*batch out"]:
    """x + bias; `x` itself if there is none."""
    return x if bias is None else x + bias.reshape((1,) * (x.ndim - 1) + bias.shape)


def rms_norm(
    x: Float[Array, "*batch E"], weight: Float[Array, " E"], eps: float, *, exact: bool = False
) -> Float[Array, "*batch E"]:
    """Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467), computed in float32; `exact` as in `linear`."""
    return _add_norm(x, None, weight, eps)[1] if exact else norm.rms_norm(x, weight, eps)


def add_rms_norm(
    x: Float[Array, "*batch E"],
    branch: Float[Array, "*batch E"] | Float[Array, "P *batch E"],
    weight: Float[Array, " E"],
    eps: float,
    *,
    exact: bool = False,
) -> tuple[Float[Array, "*batch E"], Float[Array, "*batch E"]]:
    """The residual stream with a branch added, and its `rms_norm`.

    exact: as in `linear`; the branch may then come from `divided_linear`.
    """
    if exact:
        return _add_norm(x, branch, weight, eps)
    x = x + branch
    return x, norm.rms_norm(x, weight, eps)


def _add_norm(x, branch, weight, eps: float, *, wide: bool = False) -> tuple[Array, Array]:
    stream, normed = residual_norm(x, branch, (None, weight), eps=eps, wide=wide, exact=True)
    assert normed is not None
    return stream, normed


def wide_rms_norm(
    x: Float[Array, "*batch E"], weight: Float[Array, " E"] | None, eps: float, *, exact: bool = False
) -> Float[Array, "*batch E"]:
    """`rms_norm` whose weight (None: 1) is applied in float32 too, before the result is rounded, as in Gemma."""
    return _add_norm(x, None, weight, eps, wide=True)[1] if exact else norm.wide_rms_norm(x, weight, eps)


def layer_norm(
    x: Float[Array, "*batch E"], weight: Float[Array, " E"], bias: Float[Array, " E"], eps: float
) -> Float[Array, "*batch E"]:
    """Layer norm (Ba, Kiros and Hinton, arXiv 1607.06450), computed in float32."""
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scaled = centered * lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
    weight, bias = (array.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + array.shape) for array in (weight, bias))
    return (scaled * weight + bias).astype(x.dtype)


def look_up(
    table: Float[Array, "R E"], tokens: Int[Array, "B N"], vocab_size: int, devices: int
) -> Float[Array, "B N E"]:
    """Rows of an embedding of `vocab_size` tokens; each of several devices has the next R, or all.

    On one device the table may be any other, such as the rows of a batch.
    """
    if devices == 1 or table.shape[0] == vocab_size:
        return jnp.take(table, tokens, axis=0, mode="clip")
    rows = table.shape[0]
    index = jnp.clip(tokens, 0, vocab_size - 1) - lax.axis_index(TENSOR).astype(jnp.int32) * rows
    here = (index >= 0) & (index < rows)
    # Exact: all devices but one add zeros.
    part = jnp.where(here[..., None], jnp.take(table, index, axis=0, mode="clip"), jnp.zeros((), table.dtype))
    return sum_over_devices(part, vocab_size // rows)


def gated_mlp(
    x: Float[Array, "*batch E"],
    gate_up: Float[Array, "E F2"] | Quantized,
    down: Float[Array, "F E"] | Quantized,
    activation: Callable[[Array], Array] = jax.nn.silu,
    *,
    exact: bool = False,
) -> Float[Array, "*batch E"] | Float[Array, "P *batch E"]:
    """Gated MLP, down(activation(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202), gate and up in one product.

    exact: as in `linear`; the result may then be divided, as in `divided_linear`.
    """
    # The exact forward: a fixed order of additions.
    if exact:
        inner = exact_matmul(x.reshape(-1, x.shape[-1]), require_wide(gate_up), activation=activation)
        return divided_linear(inner.reshape(*x.shape[:-1], -1), down)
    # The fused kernel reads wide weights.
    if isinstance(gate_up, Quantized) or x.size == x.shape[-1]:
        gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
        inner = activation(gate) * up
    else:
        inner = gated_matmul(x, gate_up, activation=activation)
    return linear(inner, down)


def gelu(x: Float[Array, "*batch E"]) -> Float[Array, "*batch E"]:
    """GELU (Hendrycks and Gimpel, arXiv 1606.08415), approximated by tanh."""
    return jax.nn.gelu(x, approximate=True)


def rotate(x: Float[Array, "B N H D"], rotation: Rotation) -> Float[Array, "B N H D"]:
    """Rotates the pairs (i, i + D/2) of each head."""
    return rotary.rotate(x, *rotation)
