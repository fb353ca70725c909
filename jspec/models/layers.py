"""How a layer reads a round, norms, linear layers and the gated MLP.

Weights are stored [in, out], the transpose of checkpoints: with the contracted dimension first, XLA on CPU multiplies
five rows by them 2.5 times faster (docs/decisions.md).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from jspec.core.embeds import Embeds
from jspec.core.pieces import Pieces, begin_of
from jspec.core.sharding import TENSOR, sum_over_devices
from jspec.core.struct import struct
from jspec.models.adapted import Adapted
from jspec.models.quantized import Quantized, quantized_product
from pallas_kernels import rotary
from pallas_kernels.gated_matmul import gated_matmul
from pallas_kernels.platform import exactness, platform, result_alone

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


@struct
class ForwardBatch:
    """The N tokens that a forward reads for each sequence, and the rows that they see.

    cache: committed rows; training passes a stand-in with `attend` only.
    start: committed rows to attend to; None: none. With pieces, the position of each: a prompt has the committed rows
      before its first piece.
    mask: the rows each token sees, of the round's R; None: all up to its own.
    earlier: R - N rows of this round from earlier forwards, before the N new ones.
    select: the only token of each sequence whose output is needed; None: all are.
    embeds: in the places of some tokens; None: there are none.
    pieces: of prompts, which see the rows of the pieces before them; None: each sequence has rows of its own.
    """

    tokens: Int[Array, "B N"]
    positions: Int[Array, "#B #N"]
    cache: PyTree
    start: Int[Array, " B"] | None
    mask: Bool[Array, "#B N R"] | None = None
    earlier: PyTree = None
    select: Int[Array, " B"] | None = None
    embeds: Embeds | None = None
    pieces: Pieces | None = None

    @property
    def selected(self) -> SelectedToken | None:
        """The selected tokens; None if all are needed, there is only one, or there are earlier rows."""
        (batch, nodes), token, mask = self.tokens.shape, self.select, self.mask
        if token is None or nodes == 1 or self.earlier is not None:
            return None
        if self.pieces is not None:
            row, first = jnp.arange(batch * nodes, dtype=jnp.int32)[None], self.pieces.first * nodes
            last = jnp.arange(batch, dtype=jnp.int32) * nodes + token
            return SelectedToken(token, ((row >= first[:, None]) & (row <= last[:, None]))[:, None])
        if mask is None:
            return SelectedToken(token, jnp.arange(nodes, dtype=jnp.int32)[None, None] <= token[:, None, None])
        mask = jnp.broadcast_to(mask, (batch, *mask.shape[1:]))
        return SelectedToken(token, take_token(mask, token))

    def readings(self, count: int, exact: bool = False) -> "Iterator[Reading]":
        """The readings of `count` layers. Only the last one goes on with the selected tokens.

        exact: whether the attention is, see `jspec.models.ops.ExactOps`.
        """
        selected, options = self.selected, {"exact": True} if exact else {}
        for index in range(count):
            yield Reading(self, index, selected if index + 1 == count else None, options)

    def of_all(self) -> "ForwardBatch":
        """The same tokens, all of which are needed."""
        return dataclasses.replace(self, select=None)

    def take(self, x: Shaped[Array, "B N *rest"]) -> Shaped[Array, "B M *rest"]:
        """What belongs to the selected token, if there is one and `x` has all tokens."""
        return x if self.select is None or x.shape[1] == 1 else take_token(x, self.select)


def take_token(x: Shaped[Array, "B N *rest"], token: Int[Array, " B"]) -> Shaped[Array, "B 1 *rest"]:
    """One token's part of each sequence."""
    return jnp.take_along_axis(x, token.reshape(-1, *[1] * (x.ndim - 1)), axis=1, mode="clip")


@dataclasses.dataclass(frozen=True)
class Reading:
    """How one layer reads the tokens of a forward.

    selected: the tokens whose stream is needed after the layer, [B, 1, E]; None: all of them. Rows are those of all.
    options: of the cache's `attend`.
    """

    batch: ForwardBatch
    layer: int
    selected: SelectedToken | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def earlier(self) -> Any:
        """The layer's rows of this round from earlier forwards; None: there are none."""
        return None if self.batch.earlier is None else self.batch.earlier[self.layer]

    def bound(self, **options: Any) -> "Reading":
        """With options of `attend`."""
        return dataclasses.replace(self, options={**self.options, **options})

    def rows(self, *rows: Shaped[Array, "B N ..."]) -> tuple[Shaped[Array, "B R ..."], ...]:
        """The rows of this round after the earlier ones."""
        if self.earlier is None:
            return rows
        return tuple(jnp.concatenate(pair, axis=1) for pair in zip(self.earlier, rows, strict=True))

    def take(self, x: Shaped[Array, "B N *rest"]) -> Shaped[Array, "B M *rest"]:
        """The part of the selected tokens, or of all."""
        return x if self.selected is None else take_token(x, self.selected.token)

    @property
    def positions(self) -> Int[Array, "#B #M"]:
        """Their positions."""
        positions = self.batch.positions
        return positions if self.selected is None else self.take(jnp.broadcast_to(positions, self.batch.tokens.shape))

    def attend(self, q: Float[Array, "B N H D"], *rows: Any, **options: Any) -> Float[Array, "B M H _"]:
        """The attention of these tokens to the cache and the rows of this round."""
        if self.selected is not None:
            options["mask"] = self.selected.mask
        return self.attend_all(self.take(q), *rows, **options)

    def attend_all(self, *args: Any, **options: Any) -> Any:
        """The cache's `attend` for the layer, for all tokens."""
        batch = self.batch
        options = {"start": begin_of(batch.start, batch.pieces), "mask": batch.mask, **self.options, **options}
        if batch.pieces is not None:
            options["pieces"] = batch.pieces
        return batch.cache.attend(self.layer, *args, **options)


def linear(
    x: Float[Array, "*batch in"],
    weight: Float[Array, "in out"] | Quantized | Adapted,
    bias: Float[Array, " out"] | None = None,
) -> Float[Array, "*batch out"]:
    """x @ weight + bias. In float32 the products are exact float32 on every platform, not TF32."""
    if isinstance(weight, Adapted):
        multiply = functools.partial(jnp.matmul, precision=exactness(x))
        return add_bias(weight.product(x, linear(x, weight.weight), multiply), bias)
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


def add_bias(x: Float[Array, "*batch out"], bias: Float[Array, " out"] | None) -> Float[Array, "*batch out"]:
    """x + bias; `x` itself if there is none."""
    return x if bias is None else x + bias.reshape((1,) * (x.ndim - 1) + bias.shape)


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
    gate_up: Float[Array, "E F2"] | Quantized | Adapted,
    down: Float[Array, "F E"] | Quantized | Adapted,
    activation: Callable[[Array], Array] = jax.nn.silu,
) -> Float[Array, "*batch E"]:
    """Gated MLP, down(activation(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202), gate and up in one product."""
    # The fused kernel reads wide weights.
    if isinstance(gate_up, Quantized | Adapted) or x.size == x.shape[-1]:
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
