"""Rotary positions (Su et al., arXiv 2104.09864): frequencies of all kinds, as `transformers` computes them.

The order of a head's dimensions is this package's: pairs are (i, i + D/2). Frequencies are constants of a program,
computed in float32 like those of `transformers`.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int

from jspec.models.layers import Rotation

Frequencies = Float32[np.ndarray, " pairs"]


@dataclasses.dataclass(frozen=True)
class Scaling:
    """A change of the frequencies, mostly for contexts longer than those of the training."""

    @property
    def magnitude(self) -> float:
        """The factor on rotated features."""
        return 1.0

    def limit(self, length: int) -> int:
        """The longest context with these frequencies, at most `length`."""
        return length

    def apply(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """The frequencies in place of those without scaling, by default these. theta: their base."""
        return frequencies


@dataclasses.dataclass(frozen=True)
class LinearRope(Scaling):
    """Positions divided by a factor (`rope_type: linear`)."""

    factor: float

    def apply(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """As in `Scaling`."""
        return frequencies / np.float32(self.factor)


@dataclasses.dataclass(frozen=True)
class DynamicRope(Scaling):
    """A base growing with contexts of more than `original_length` tokens (`rope_type: dynamic`).

    Keys in a cache would have to be rotated again as it grows, so only shorter contexts are supported.
    """

    factor: float
    original_length: int

    def limit(self, length: int) -> int:
        """As in `Scaling`."""
        return min(length, self.original_length)


@dataclasses.dataclass(frozen=True)
class LongRope(Scaling):
    """A factor for each pair (LongRoPE, Ding et al., arXiv 2402.13753; `rope_type: longrope`).

    Contexts of more than `original_length` tokens have other factors, also for their first tokens; only shorter ones
    are supported.

    short_factor: of each pair, in these contexts. long_factor: in longer ones.
    attention_factor: the magnitude.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    attention_factor: float

    @property
    def magnitude(self) -> float:
        """As in `Scaling`."""
        return self.attention_factor

    def limit(self, length: int) -> int:
        """As in `Scaling`."""
        return min(length, self.original_length)

    def apply(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """As in `Scaling`."""
        return frequencies / np.array(self.short_factor, np.float32)


@dataclasses.dataclass(frozen=True)
class ProportionalRope(Scaling):
    """Rotation of the first `share` of the pairs, at the frequencies of a whole head (`rope_type: proportional`)."""

    share: float

    def apply(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """As in `Scaling`."""
        count = len(frequencies)
        return np.where(np.arange(count) < int(self.share * count), frequencies, np.float32(0))


@dataclasses.dataclass(frozen=True)
class Llama3Rope(Scaling):
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def apply(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """As in `Scaling`: low frequencies are divided, those in between interpolated."""
        turns = np.float32(self.original_length / (2 * math.pi)) * frequencies
        fast = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return ((1 - fast) * frequencies / self.factor + fast * frequencies).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class YarnRope(Scaling):
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
        """As in `Scaling`."""
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

    def apply(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """As in `Scaling`: fast ones stay, slow ones are divided, with a ramp between two pairs."""
        dim = 2 * len(frequencies)

        def pair_of(turns: float) -> float:
            """The (fractional) index of the pair with this number of turns within the original context."""
            return dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        pair = np.arange(dim // 2, dtype=np.float32)
        slow = np.clip((pair - low) / (high - low or 0.001), 0, 1)
        return (frequencies / self.factor * slow + frequencies * (1 - slow)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Rope:
    """How queries and keys are rotated by their positions.

    theta: the base of the frequencies.
    scaling: None: none.
    share: of the dimensions of a head that rotate, whose pairs come first in this package's order.
    sections: whether tokens of images have positions in several dimensions (mrope); those of text have one.
    """

    theta: float = 10_000.0
    scaling: Scaling | None = None
    share: float = 1.0
    sections: bool = dataclasses.field(default=False, compare=False, repr=False)

    @property
    def magnitude(self) -> float:
        """The factor on rotated features."""
        return 1.0 if self.scaling is None else self.scaling.magnitude

    def limit(self, length: int) -> int:
        """The longest context with these frequencies, at most `length`."""
        return length if self.scaling is None else self.scaling.limit(length)

    def rotary_dim(self, head_dim: int) -> int:
        """Rotated dimensions of a head."""
        return int(head_dim * self.share)

    def frequencies(self, head_dim: int) -> Float32[np.ndarray, " half"]:
        """Radians per position of each of the head_dim / 2 pairs; 0 for pairs at rest."""
        dim = self.rotary_dim(head_dim)
        exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(max(dim, 1))
        frequencies = np.float32(1) / np.float32(self.theta) ** exponents
        if self.scaling is not None:
            frequencies = self.scaling.apply(frequencies, self.theta)
        return np.pad(frequencies, (0, head_dim // 2 - len(frequencies)))

    def order(self, head_dim: int, interleaved: bool = False) -> np.ndarray:
        """For each dimension of a head here, its index in a checkpoint's head.

        There the first ones rotate, in pairs (i, i + r/2) of r, or (2 i, 2 i + 1). Here all of D are pairs
        (i, i + D/2), rotating ones first. Queries and keys are in one order, so their products are the same.

        interleaved: whether pairs are neighbors.
        """
        rotary, index = self.rotary_dim(head_dim), np.arange(head_dim)
        turning = index[:rotary].reshape(-1, 2).T if interleaved else index[:rotary].reshape(2, -1)
        return np.concatenate([turning, index[rotary:].reshape(2, -1)], axis=1).reshape(-1)

    def rotation(self, positions: Int[Array, "#B #N"], head_dim: int, dtype: DTypeLike) -> Rotation:
        """Cosine and sine of the angles, position times frequency, to rotate the pairs of each head."""
        frequencies = self.frequencies(head_dim).reshape(1, 1, -1)
        angle = positions.astype(jnp.float32)[..., None] * frequencies
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        if self.magnitude != 1:
            # Only rotated pairs are scaled.
            magnitude = jnp.where(frequencies == 0, 1, jnp.float32(self.magnitude))
            cos, sin = magnitude * cos, magnitude * sin
        return cos.astype(dtype), sin.astype(dtype)
