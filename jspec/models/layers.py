"""The parts models are made of. Weights are stored [in, out], checkpoints hold them the other way round: with the
contracted dimension first, XLA on CPU multiplies five rows by them 2.5 times faster (docs/log.md).
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


def linear(
    x: Float[Array, "*batch in"], weight: Float[Array, "in out"], bias: Float[Array, " out"] | None = None
) -> Float[Array, "*batch out"]:
    """x @ weight + bias. In float32 the products are exact float32 on every platform, not TF32."""
    # Asked for in a narrow precision too, the highest would keep a compiler from its fastest products.
    out = jnp.matmul(x, weight, precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)
    return out if bias is None else out + bias.reshape((1,) * (out.ndim - 1) + bias.shape)


def rms_norm(x: Float[Array, "*batch E"], weight: Float[Array, " E"], eps: float) -> Float[Array, "*batch E"]:
    """Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467), computed in float32."""
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight.reshape((1,) * (x.ndim - 1) + weight.shape) * scaled.astype(x.dtype)


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


def proportional_frequencies(head_dim: int, theta: float, share: float) -> Float[Array, " half"]:
    """`rope_frequencies` of which only the first `share` are kept: the other pairs stand still."""
    kept = int(share * head_dim // 2)
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    return jnp.where(jnp.arange(head_dim // 2) < kept, frequency, 0.0)


def rope(
    x: Float[Array, "B N H D"], positions: Int[Array, "#B #N"], frequencies: Float[Array, " half"]
) -> Float[Array, "B N H D"]:
    """Rotates the pairs (i, i + D/2) of each head by position times frequency."""
    angle = positions.astype(jnp.float32)[..., None, None] * frequencies.reshape(1, 1, 1, -1)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
