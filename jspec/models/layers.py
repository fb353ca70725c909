"""Norms, rotary positions, linear layers and the gated MLP.

Weights are stored [in, out], the transpose of checkpoints: with the contracted dimension first, XLA on CPU multiplies
five rows by them 2.5 times faster (docs/decisions.md).
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from jspec.core.sharding import TENSOR, sum_over_devices
from jspec.models.quantized import Quantized, quantized_product
from pallas_kernels import norm, rotary
from pallas_kernels.add_norm import add_norm
from pallas_kernels.exact_matmul import exact_matmul
from pallas_kernels.gated_matmul import gated_matmul
from pallas_kernels.platform import exactness, platform, result_alone

GEMV_MAX_WEIGHTS = {"gpu": 10_000_000, "tpu": math.inf}
"""Size of a matrix below which XLA, on a platform, lowers its product with a single row to a sum over columns,
slower than a matrix product with six rows (docs/decisions.md). A product with two equal rows is a matrix product.
"""


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclasses.dataclass(frozen=True)
class YarnRope:
    """Frequency scaling of YaRN (Peng et al., arXiv 2309.00071), with the two magnitudes of DeepSeek.

    original_length: the context of the training; it becomes `factor` times as long.
    beta_fast, beta_slow: turns within that context; frequencies above the first stay, below the second are divided.
    mscale: magnitude of the rotated features; None: 1.
    mscale_all_dim: magnitude of the scores; None: not scaled.
    attention_factor: overrides the magnitude of the rotated features implied by the two above.
    truncate: whether the two bounds are rounded to whole pairs.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """The factor on rotated features."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    @property
    def score_scale(self) -> float:
        """The factor on scores, in DeepSeek."""
        return self._scale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _scale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


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
    return add_norm(x, None, weight, eps=eps)[1] if exact else norm.rms_norm(x, weight, eps)


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
        return add_norm(x, branch, weight, eps=eps)
    x = x + branch
    return x, norm.rms_norm(x, weight, eps)


def wide_rms_norm(
    x: Float[Array, "*batch E"], weight: Float[Array, " E"] | None, eps: float, *, exact: bool = False
) -> Float[Array, "*batch E"]:
    """`rms_norm` whose weight (None: 1) is applied in float32 too, before the result is rounded, as in Gemma."""
    if exact:
        return add_norm(x, None, weight, eps=eps, wide=True)[1]
    return norm.wide_rms_norm(x, weight, eps)


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


def rope_frequencies(head_dim: int, theta: float, scaling: Llama3Rope | YarnRope | None) -> Float[Array, " half"]:
    """Rotation in radians per position of each of the head_dim / 2 pairs (Su et al., arXiv 2104.09864, section 3.2)."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    # No scaling, or YaRN.
    if scaling is None:
        return frequency
    if isinstance(scaling, YarnRope):
        return frequency * _yarn_factors(head_dim, theta, scaling)
    # Llama 3.1: low frequencies are divided, those between are interpolated.
    wavelength = 2 * math.pi / frequency
    low = scaling.original_length / scaling.low_freq_factor
    high = scaling.original_length / scaling.high_freq_factor
    smooth = (scaling.original_length / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    scaled = jnp.where(wavelength > low, frequency / scaling.factor, between)
    return jnp.where(wavelength < high, frequency, scaled)


def _yarn_factors(head_dim: int, theta: float, scaling: YarnRope) -> Float[Array, " half"]:
    """The factor on each frequency: 1 for fast ones, 1 / factor for slow ones, and a ramp between them."""

    def pair_of(turns: float) -> float:
        """The (fractional) index of the pair with this number of turns within the original context."""
        return head_dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    # Interpolate the factor between two pairs.
    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pair = jnp.arange(head_dim // 2, dtype=jnp.float32)
    slow = jnp.clip((pair - low) / max(high - low, 0.001), 0.0, 1.0)
    return 1.0 - slow + slow / scaling.factor


def rotation(
    positions: Int[Array, "#B #N"], frequencies: Float[Array, " half"], dtype: DTypeLike, magnitude: float = 1.0
) -> tuple[Float[Array, "#B #N half"], Float[Array, "#B #N half"]]:
    """Cosine and sine of the angles, position times frequency, to rotate the pairs of each head.

    magnitude: an additional factor on the rotated pairs.
    """
    angle = positions.astype(jnp.float32)[..., None] * frequencies.reshape(1, 1, -1)
    return (magnitude * jnp.cos(angle)).astype(dtype), (magnitude * jnp.sin(angle)).astype(dtype)


def proportional_frequencies(head_dim: int, theta: float, share: float) -> Float[Array, " half"]:
    """`rope_frequencies` of the first `share` of the pairs; the others do not rotate."""
    rotated = int(share * head_dim // 2)
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    return jnp.where(jnp.arange(head_dim // 2) < rotated, frequency, 0.0)


def rope(
    x: Float[Array, "B N H D"], positions: Int[Array, "#B #N"], frequencies: Float[Array, " half"]
) -> Float[Array, "B N H D"]:
    """Rotates the pairs (i, i + D/2) of each head by position times frequency."""
    return rotate(x, *rotation(positions, frequencies, x.dtype))


def rotate(
    x: Float[Array, "B N H D"], cos: Float[Array, "#B #N half"], sin: Float[Array, "#B #N half"]
) -> Float[Array, "B N H D"]:
    """Rotates the pairs (i, i + D/2) of each head by the angles of `rotation`."""
    return rotary.rotate(x, cos, sin)
