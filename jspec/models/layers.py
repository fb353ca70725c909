"""The parts models are made of. Weights are stored [in, out], checkpoints hold them the other way round: with the
contracted dimension first, XLA on CPU multiplies five rows by them 2.5 times faster (docs/log.md).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels import split_heads
from pallas_kernels.platform import platform

SMALL = 10_000_000
"""Weights of a matrix below which XLA, on a GPU, makes its product with a single row a sum over columns, which takes
longer than its matrix product with six (docs/log.md). Two equal rows are a matrix product.
"""


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclasses.dataclass(frozen=True)
class Only:
    """The one token of each sequence whose hidden state is wanted, and which rows of the round it sees."""

    token: Int[Array, " B"]
    mask: Bool[Array, "B 1 N"]

    @classmethod
    def of(
        cls, token: Int[Array, " B"] | None, mask: Bool[Array, "#B N R"] | None, tokens: Int[Array, "B N"], earlier: Any
    ) -> "Only | None":
        """Of what a forward is given; None where no token is selected, there is but one, or `earlier` rows are seen.

        mask: None: each token sees all up to its own.
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
    x: Float[Array, "*batch in"], weight: Float[Array, "in out"], bias: Float[Array, " out"] | None = None
) -> Float[Array, "*batch out"]:
    """x @ weight + bias. In float32 the products are exact float32 on every platform, not TF32."""
    alone = x.size == x.shape[-1] and weight.size < SMALL and platform() == "gpu"
    rows = jnp.broadcast_to(x.reshape(1, -1), (2, x.shape[-1])) if alone else x
    # Asked for in a narrow precision too, the highest would keep a compiler from its fastest products.
    out = jnp.matmul(rows, weight, precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)
    if alone:
        out = out[:1].reshape(*x.shape[:-1], -1)
    return out if bias is None else out + bias.reshape((1,) * (out.ndim - 1) + bias.shape)


def rms_norm(x: Float[Array, "*batch E"], weight: Float[Array, " E"], eps: float) -> Float[Array, "*batch E"]:
    """Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467), computed in float32."""
    return split_heads.rms_norm(x, weight, eps)


def wide_rms_norm(
    x: Float[Array, "*batch E"], weight: Float[Array, " E"] | None, eps: float
) -> Float[Array, "*batch E"]:
    """`rms_norm` whose weight (None: 1) is applied in float32 too, before the result is rounded, as Gemma does."""
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if weight is not None:
        scaled = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape) * scaled
    return scaled.astype(x.dtype)


def gated_mlp(
    x: Float[Array, "*batch E"],
    gate_up: Float[Array, "E F2"],
    down: Float[Array, "F E"],
    activation: Callable[[Array], Array] = jax.nn.silu,
) -> Float[Array, "*batch E"]:
    """Gated MLP, down(activation(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202), gate and up in one product."""
    gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
    return linear(activation(gate) * up, down)


def gelu(x: Float[Array, "*batch E"]) -> Float[Array, "*batch E"]:
    """Hendrycks and Gimpel, arXiv 1606.08415, in its approximation by tanh."""
    return jax.nn.gelu(x, approximate=True)


def rope_frequencies(head_dim: int, theta: float, scaling: Llama3Rope | None) -> Float[Array, " half"]:
    """Rotation in radians a position, for each of the head_dim / 2 pairs (Su et al., arXiv 2104.09864, section 3.2)."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    low = scaling.original_length / scaling.low_freq_factor
    high = scaling.original_length / scaling.high_freq_factor
    smooth = (scaling.original_length / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    scaled = jnp.where(wavelength > low, frequency / scaling.factor, between)
    return jnp.where(wavelength < high, frequency, scaled)


def rotation(
    positions: Int[Array, "#B #N"], frequencies: Float[Array, " half"], dtype: Any
) -> tuple[Float[Array, "#B #N half"], Float[Array, "#B #N half"]]:
    """Cosine and sine of the angles, position times frequency, by which the pairs of each head are rotated."""
    angle = positions.astype(jnp.float32)[..., None] * frequencies.reshape(1, 1, -1)
    return jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)


def proportional_frequencies(head_dim: int, theta: float, share: float) -> Float[Array, " half"]:
    """`rope_frequencies` of which only the first `share` are kept: the other pairs stand still."""
    kept = int(share * head_dim // 2)
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    return jnp.where(jnp.arange(head_dim // 2) < kept, frequency, 0.0)


def rope(
    x: Float[Array, "B N H D"], positions: Int[Array, "#B #N"], frequencies: Float[Array, " half"]
) -> Float[Array, "B N H D"]:
    """Rotates the pairs (i, i + D/2) of each head by position times frequency."""
    return split_heads.rotate(x, *rotation(positions, frequencies, x.dtype))
