"""The operations of layers: a family chooses them, and its configuration how they are computed."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jspec.core.sharding import gather_last, in_order, sum_over_devices
from jspec.models import layers
from jspec.models.adapted import Adapted
from jspec.models.quantized import Quantized, Weight
from pallas_kernels import norm, parts
from pallas_kernels.exact_matmul import exact_matmul
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.platform import exactness
from pallas_kernels.residual_norm import residual_norm
from pallas_kernels.split_heads import split_heads

Branch = Float[Array, "*batch E"] | Float[Array, "P *batch E"]
"""The output of attention or an MLP, whole or in parts, as some operations leave it, such as one of each device."""


@dataclasses.dataclass(frozen=True)
class Ops:
    """Operations of layers, whose order of additions depends on the shapes; static, hashable by value.

    devices: heads and MLPs are split over them.
    kv: the format in which caches keep keys and values, whose scales a layer may have; None: none.
    """

    devices: int = 1
    kv: str | None = None
    exact: ClassVar[bool] = False
    """Whether a token's results do not depend on the other tokens, to the bit."""

    # Products

    def linear(self, x: Float[Array, "*batch in"], weight: Weight, bias: Array | None = None) -> Array:
        """x @ weight + bias."""
        return layers.linear(x, weight, bias)

    def projection(self, x: Float[Array, "*batch in"], weight: Weight, bias: Array | None = None) -> Branch:
        """`linear`, for `split_heads`."""
        return self.linear(x, weight, bias)

    def branch(self, x: Float[Array, "*batch in"], weight: Weight, bias: Array | None = None) -> Branch:
        """x @ weight + bias, the end of a branch; each device has some columns of `x`."""
        return layers.add_bias(self.sum(self.linear(x, weight)), bias)

    def mlp(
        self, x: Array, gate_up: Weight, down: Weight, activation: Callable[[Array], Array] = jax.nn.silu
    ) -> Branch:
        """A gated MLP, see `layers.gated_mlp`."""
        return self.sum(layers.gated_mlp(x, gate_up, down, activation))

    def unembed(self, normed: Float[Array, "B N E"], embed: Array, lm_head: Weight | None, size: int) -> Array:
        """Logits in float32 of `size` tokens. lm_head: None: it is the transposed embedding."""
        logits = self.linear(normed, embed.T if lm_head is None else lm_head)
        return gather_last(logits, size).astype(jnp.float32)

    def linear_transposed(self, x: Float[Array, "T in"], weight: Float[Array, "out in"]) -> Float[Array, "T out"]:
        """x @ weight.T: with a router stored so, the product with one token is a single GPU kernel."""
        return jnp.matmul(x, weight.T, precision=exactness(x))

    def grouped(
        self,
        x: Float[Array, "T E"],
        weight: Float[Array, "Y E F"] | Quantized,
        sizes: Int[Array, " Y"],
        *,
        rows: Int[Array, " S"] | None = None,
        activation: Callable[[Array], Array] | None = None,
    ) -> Float[Array, "S M"]:
        """`grouped_matmul` with the matrices of experts, quantized or not."""
        options: dict[str, Any] = {"rows": rows, "activation": activation, "exact": self.exact}
        if not isinstance(weight, Quantized):
            return grouped_matmul(x, weight, sizes, **options)
        codes = None if weight.filling is None else weight.codes
        options |= {"scale": weight.scale, "group": weight.group, "codes": codes, "zero": weight.zero}
        return grouped_matmul(x, weight.narrow, sizes, **options)

    # Norms and heads

    def rms_norm(self, x: Float[Array, "*batch E"], weight: Float[Array, " E"], eps: float) -> Array:
        """Root-mean-square norm, see `pallas_kernels.norm`."""
        return norm.rms_norm(x, weight, eps)

    def wide_rms_norm(self, x: Float[Array, "*batch E"], weight: Float[Array, " E"] | None, eps: float) -> Array:
        """`rms_norm` whose weight (None: 1) is applied in float32 too, before the result is rounded, as in Gemma."""
        return norm.wide_rms_norm(x, weight, eps)

    def add_norm(
        self, x: Float[Array, "*batch E"], branch: Branch, weight: Float[Array, " E"], eps: float
    ) -> tuple[Array, Array]:
        """The residual stream with a branch added, and its `rms_norm`."""
        x = x + branch
        return x, norm.rms_norm(x, weight, eps)

    def residual_norm(self, x: Array, branch: Array | None, norms: Any, factor: Array | None, eps: float) -> Any:
        """The stream with a normed branch added, and its norm: `residual_norm` of Gemma's norms."""
        return residual_norm(x, branch, norms, factor, eps=eps, wide=True, exact=self.exact)

    def split_heads(self, qkv: Branch, rotation: layers.Rotation, *norms: Array | None, **options: Any) -> Any:
        """Queries, keys and values of a `projection`, normed and rotated."""
        return split_heads(qkv, *rotation, *norms, **options, exact=self.exact)

    # Sums

    def sum(self, x: Branch) -> Branch:
        """The sum of what each device has."""
        return sum_over_devices(x, self.devices)

    def add(self, x: Float[Array, "*batch E"], branch: Branch) -> Float[Array, "*batch E"]:
        """The residual stream with a branch added."""
        return x + self.whole(branch, x)

    def whole(self, branch: Array, like: Array) -> Array:
        """A branch or a projection as one array, with the type and the number of dimensions of `like`."""
        return parts.whole(branch, like.ndim, like.dtype)

    def softmax(self, x: Float[Array, "T X"]) -> Float[Array, "T X"]:
        """The softmax of each row."""
        return jax.nn.softmax(x, axis=-1)

    def sum_columns(self, x: Float[Array, "T X"]) -> Float[Array, "T 1"]:
        """The sum of each row."""
        return x.sum(-1, keepdims=True)

    def weighted_sum(self, weights: Float[Array, "T a"], out: Float[Array, "T a E"]) -> Float[Array, "T E"]:
        """The outputs of a token's experts times their weights, added in float32."""
        return (weights[:, :, None] * out.astype(jnp.float32)).sum(1)

    def apart(self, x: Array) -> Array:
        """`x`, a product; a compiler does not merge it with a sum, as it would in some shapes."""
        return x

    def rounded(self, x: Array) -> Array:
        """`x`, a product or quotient of elements; rounded before a sum that follows, also in one kernel."""
        return x


@dataclasses.dataclass(frozen=True)
class ExactOps(Ops):
    """Operations whose order of additions does not depend on the shape, with wide weights."""

    exact: ClassVar[bool] = True

    def linear(self, x: Float[Array, "*batch in"], weight: Weight, bias: Array | None = None) -> Array:
        """As in `Ops`."""
        if isinstance(weight, Adapted):
            return layers.add_bias(self.apart(weight.product(x, self.linear(x, weight.weight), self.linear)), bias)
        out = exact_matmul(x.reshape(-1, x.shape[-1]), _wide(weight))
        return layers.add_bias(out.reshape(*x.shape[:-1], -1), bias)

    def projection(self, x: Float[Array, "*batch in"], weight: Weight, bias: Array | None = None) -> Branch:
        """As in `Ops`; without a bias or changes, the sums over parts of the contraction."""
        if bias is not None or isinstance(weight, Adapted):
            return self.linear(x, weight, bias)
        out = exact_matmul(x.reshape(-1, x.shape[-1]), _wide(weight), parts=True)
        return out.reshape(*out.shape[:-2], *x.shape[:-1], -1)

    def branch(self, x: Float[Array, "*batch in"], weight: Weight, bias: Array | None = None) -> Branch:
        """As in `projection`; of more than two devices, the parts are theirs."""
        if self.devices == 1:
            return self.projection(x, weight, bias)
        if self.devices == 2 or bias is not None:
            return super().branch(x, weight, bias)
        return in_order(self.linear(x, weight), self.devices)

    def mlp(
        self, x: Array, gate_up: Weight, down: Weight, activation: Callable[[Array], Array] = jax.nn.silu
    ) -> Branch:
        """As in `Ops`."""
        if isinstance(gate_up, Adapted):
            gate, up = jnp.split(self.linear(x, gate_up).astype(jnp.float32), 2, axis=-1)
            return self.branch((activation(gate) * up).astype(x.dtype), down)
        inner = exact_matmul(x.reshape(-1, x.shape[-1]), _wide(gate_up), activation=activation)
        return self.branch(inner.reshape(*x.shape[:-1], -1), down)

    def unembed(self, normed: Float[Array, "B N E"], embed: Array, lm_head: Weight | None, size: int) -> Array:
        """As in `Ops`. The kernel reads the embedding as it is stored; a transposed operand would be a copy."""
        if lm_head is not None:
            return super().unembed(normed, embed, lm_head, size)
        flat = self.linear_transposed(normed.reshape(-1, normed.shape[-1]), embed)
        return gather_last(flat.reshape(*normed.shape[:-1], -1), size).astype(jnp.float32)

    def linear_transposed(self, x: Float[Array, "T in"], weight: Float[Array, "out in"]) -> Float[Array, "T out"]:
        """As in `Ops`."""
        return exact_matmul(x, weight, transposed=True)

    def grouped(self, x: Array, weight: Weight, sizes: Int[Array, " Y"], **options: Any) -> Float[Array, "S M"]:
        """As in `Ops`."""
        return super().grouped(x, _wide(weight), sizes, **options)

    def rms_norm(self, x: Float[Array, "*batch E"], weight: Float[Array, " E"], eps: float) -> Array:
        """As in `Ops`."""
        return self.add_norm(x, None, weight, eps)[1]

    def wide_rms_norm(self, x: Float[Array, "*batch E"], weight: Float[Array, " E"] | None, eps: float) -> Array:
        """As in `Ops`."""
        return self.residual_norm(x, None, (None, weight), None, eps)[1]

    def add_norm(
        self, x: Float[Array, "*batch E"], branch: Branch | None, weight: Float[Array, " E"], eps: float
    ) -> tuple[Array, Array]:
        """As in `Ops`. branch: None: 0."""
        stream, normed = residual_norm(x, branch, (None, weight), eps=eps, exact=True)
        assert normed is not None
        return stream, normed

    def sum(self, x: Array) -> Array:
        """As in `Ops`, in the order of the devices. Collectives choose one by the shape; two terms have none."""
        return super().sum(x) if self.devices <= 2 else self.whole(in_order(x, self.devices), x)

    def softmax(self, x: Float[Array, "T X"]) -> Float[Array, "T X"]:
        """As in `Ops`."""
        powers = jnp.exp(x - x.max(-1, keepdims=True))
        return powers / self.sum_columns(powers)

    def sum_columns(self, x: Float[Array, "T X"]) -> Float[Array, "T 1"]:
        """As in `Ops`: by halves, each an operation on elements. No compiler reorders these."""
        while x.shape[-1] > 1:
            half = -(-x.shape[-1] // 2)
            x = x[:, :half] + jnp.pad(x[:, half:], ((0, 0), (0, 2 * half - x.shape[-1])))
        return x

    def weighted_sum(self, weights: Float[Array, "T a"], out: Float[Array, "T a E"]) -> Float[Array, "T E"]:
        """As in `Ops`: a reduction would be divided by its shape."""
        weighted = self.apart(weights[:, :, None] * out.astype(jnp.float32))
        return functools.reduce(jnp.add, [weighted[:, i] for i in range(weighted.shape[1])])

    def apart(self, x: Array) -> Array:
        """As in `Ops`."""
        return lax.optimization_barrier(self.rounded(x))

    def rounded(self, x: Array) -> Array:
        """As in `Ops`: XLA drops barriers for CPUs before LLVM makes one instruction of both, but not a clip."""
        most = jnp.finfo(x.dtype).max
        return jnp.clip(x, -most, most)


def _wide(weight: Weight) -> Float[Array, "*stack in out"]:
    """The weight of an exact product; ValueError if it is quantized."""
    if isinstance(weight, Quantized):
        raise ValueError("exact=True: no exact products of quantized weights yet; load the model with weights='wide'")
    return weight
