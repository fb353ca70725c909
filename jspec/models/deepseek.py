"""DeepSeek V2, V2-Lite, V3 and V3.2 (arXiv 2405.04434, 2412.19437, 2512.02556): latent attention, many experts.

Queries are projected in two steps with a norm between them, or in one (V2-Lite); what makes them and the token's row of
the cache is one matrix. Rotated dimensions are pairs (i, i + R/2), as everywhere here: checkpoints, which have pairs
(2 i, 2 i + 1), are permuted as they are read. V3.2 has an indexer in each layer, which says what its attention reads.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.cache import DsaCache, LayerKeys, MlaCache
from jspec.cache.dsa import DsaRows, IndexQuery
from jspec.cache.mla import MlaRows, UpProjections
from jspec.core.struct import struct
from jspec.models import layers
from jspec.models.decoder import Decoder
from jspec.models.moe import Routed, RoutedParams, layer_mlp
from jspec.models.mtp_head import MtpParams

LATENT_EPS = 1e-6
"""What the norms of queries and latents add to the mean square, whatever other norms do."""


@struct
class IndexerParams:
    """Weights of a layer's indexer: J heads of I numbers, JI = J * I."""

    query: Float[Array, "Q JI"]
    key: Float[Array, "E I"]
    key_norm: Float[Array, " I"]
    key_norm_bias: Float[Array, " I"]
    weights: Float[Array, "E J"]
    """Of the heads' answers, in float32."""


@struct
class DeepseekLayerParams:
    """Weights of one layer, [in, out].

    DOWN = Q + C + R: the numbers of queries' first step, of the latent and of the rotary key. QD = H * (P + R), those
    of queries; without a first step Q is QD.
    """

    attention_norm: Float[Array, " E"]
    down_projection: Float[Array, "E DOWN"]
    query_norm: Float[Array, " Q"] | None
    query: Float[Array, "Q QD"] | None
    """None, both, where queries are projected in one step."""
    latent_norm: Float[Array, " C"]
    up: UpProjections
    o: Float[Array, "HV E"]
    mlp_norm: Float[Array, " E"]
    gate_up: Float[Array, "E F2"] | None
    down: Float[Array, "F E"] | None
    experts: RoutedParams | None
    """In place of the MLP."""
    indexer: IndexerParams | None = None


@struct
class DeepseekParams:
    """Weights of a model. `lm_head` is None where the embedding serves as the head."""

    embed: Float[Array, "V E"]
    layers: tuple[DeepseekLayerParams, ...]
    norm: Float[Array, " E"]
    lm_head: Float[Array, "E V"] | None
    mtp: tuple[MtpParams, ...] = ()
    """What drafts for this target; its own forward does not read them."""


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of latent attention.

    query: of queries' first step, None: there is one step only.
    size: of the latent.
    key: unrotated numbers of each head's keys. rope: rotated ones. value: of each head's values.
    """

    query: int | None
    size: int
    key: int
    rope: int
    value: int

    @property
    def width(self) -> int:
        """Numbers of a row of the cache."""
        return self.size + self.rope


@dataclasses.dataclass(frozen=True)
class Indexer:
    """Heads of an indexer, the numbers of its keys, and how many tokens it selects at most."""

    heads: int
    size: int
    top_k: int


@dataclasses.dataclass(frozen=True)
class Deepseek(Decoder):
    """The configuration of a model; static, hashable by value, with its forward as methods.

    intermediate_size: width of the MLP of layers without experts, the first `dense_layers`.
    mtp_layers: how many layers there are in `DeepseekParams.mtp`.
    indexer: of each layer, in V3.2; None: attention reads all tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    latent: Latent
    experts: Routed
    dense_layers: int
    max_length: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: layers.YarnRope | None = None
    tie_embeddings: bool = False
    mtp_layers: int = 0
    indexer: Indexer | None = None

    def layer_experts(self, layer: int) -> Routed | None:
        """The experts of a layer; layers behind the last are those of `mtp`."""
        return None if layer < self.dense_layers else self.experts

    def mtp_layer(self) -> "Deepseek":
        """The layer of an MTP head as a decoder of its own."""
        return dataclasses.replace(self, num_layers=1, dense_layers=0, mtp_layers=0)

    def empty_cache(self, batch: int, capacity: int, page_size: int, dtype: Any) -> MlaCache | DsaCache:
        """An empty cache for `batch` sequences of `capacity` rows."""
        shape = {"layers": self.num_layers, "width": self.latent.width, "dtype": dtype}
        if self.indexer is not None:
            shape |= {"index_width": self.indexer.size, "top_k": self.indexer.top_k}
            return DsaCache.empty(batch, capacity, page_size, **shape)
        return MlaCache.empty(batch, capacity, page_size, **shape)

    def layer_keys(self, layer: int) -> LayerKeys:
        """The rows that a layer makes."""
        return LayerKeys(1, self.latent.width, latent=self.latent.size)

    def layer_frequencies(self, layer: int) -> Float[Array, " half"]:
        """How the rotated part of those rows is rotated: radians a position, for each pair of dimensions."""
        return layers.rope_frequencies(self.latent.rope, self.rope_theta, self.rope_scaling)

    def layer_scale(self, layer: int) -> float:
        """The factor on the products of queries and keys."""
        scale = (self.latent.key + self.latent.rope) ** -0.5
        return scale if self.rope_scaling is None else scale * self.rope_scaling.score_scale

    def embed(self, params: DeepseekParams, tokens: Int[Array, "B N"]) -> Float[Array, "B N E"]:
        """What the first layer reads."""
        return jnp.take(params.embed, tokens, axis=0, mode="clip")

    def rotation(
        self, positions: Int[Array, "#B #N"], dtype: Any
    ) -> tuple[Float[Array, "#B #N half"], Float[Array, "#B #N half"]]:
        """Cosine and sine of the angles of each token, see `layers.rotation`."""
        magnitude = 1.0 if self.rope_scaling is None else self.rope_scaling.magnitude
        return layers.rotation(positions, self.layer_frequencies(0), dtype, magnitude)

    def run_layers(
        self,
        params: DeepseekParams,
        tokens: Int[Array, "B N"],
        x: Float[Array, "B N E"],
        positions: Int[Array, "#B #N"],
        attend: Callable[..., Array],
        earlier: MlaRows | DsaRows | None,
        only: layers.Only | None,
    ) -> Iterator[tuple[Float[Array, "B N E"], tuple[Array, ...]]]:
        """Yields after each layer the residual stream and the layer's rows of this round."""
        rotation = self.rotation(positions, x.dtype)
        for index, layer in enumerate(params.layers):
            own = None if earlier is None else earlier[index]
            here_only = only if index + 1 == self.num_layers else None
            x, rows = self.layer(layer, x, rotation, partial(attend, index), own, here_only)
            yield x, rows

    def layer(
        self,
        layer: DeepseekLayerParams,
        x: Float[Array, "B N E"],
        rotation: tuple[Float[Array, "#B #N half"], Float[Array, "#B #N half"]],
        attend: Callable[..., Array],
        earlier: tuple[Float[Array, "B M _"], ...] | None,
        only: layers.Only | None = None,
    ) -> tuple[Float[Array, "B N E"], tuple[Float[Array, "B M _"], ...]]:
        """Attention, then the MLP, each added to the residual stream `x`.

        rotation: of each token, see `rotation`.
        attend: the cache's `attend` of this layer.
        earlier: this round's earlier rows.
        only: the tokens whose stream is returned, [B, 1, E]; the rows are those of all.

        Returns the residual stream, and the rows of this round, `earlier` included; where there is an indexer, its keys
        behind them.
        """
        normed = self.norm(x, layer.attention_norm)
        q, row, middle = self._project(layer, normed, rotation)
        rows: tuple[Array, ...] = (row,)
        query = None
        if layer.indexer is not None:
            query, key = self._index(layer.indexer, normed, middle, rotation)
            rows = (row, key)
        if earlier is not None:
            rows = tuple(jnp.concatenate(pair, axis=1) for pair in zip(earlier, rows, strict=True))
        if only is not None:
            x, q, query = jax.tree.map(lambda each: layers.take_token(each, only.token), (x, q, query))
            attend = partial(attend, mask=only.mask)
        row, *keys = rows
        if query is not None:
            attend = partial(attend, keys=keys[0], query=query)
        seen = attend(q, row, layer.up, scale=self.layer_scale(0))
        x = x + layers.linear(seen.reshape(*x.shape[:2], -1), layer.o)
        return x + layer_mlp(self.norm(x, layer.mlp_norm), layer, self), rows

    def norm(self, x: Float[Array, "B N E"], weight: Float[Array, " E"]) -> Float[Array, "B N E"]:
        """The norm of the residual stream."""
        return layers.rms_norm(x, weight, self.rms_norm_eps)

    def unembed(self, params: DeepseekParams, normed: Float[Array, "B N E"]) -> Float[Array, "B N V"]:
        """The LM head alone: logits, in float32, of hidden states that have been through the final norm."""
        weight = params.embed.T if params.lm_head is None else params.lm_head
        return layers.linear(normed, weight).astype(jnp.float32)

    def _project(self, layer: DeepseekLayerParams, normed, rotation):
        """Queries [B, N, H, P + R], rows [B, N, C + R], and what the second step of queries reads."""
        sizes = self.latent
        down = layers.linear(normed, layer.down_projection)
        q, latent, shared = jnp.split(down, [down.shape[-1] - sizes.width, down.shape[-1] - sizes.rope], axis=-1)
        middle = None
        if layer.query is not None:
            assert layer.query_norm is not None
            middle = layers.rms_norm(q, layer.query_norm, LATENT_EPS)
            q = layers.linear(middle, layer.query)
        q = q.reshape(*q.shape[:2], self.num_heads, -1)
        q = jnp.concatenate([q[..., : sizes.key], layers.rotate(q[..., sizes.key :], *rotation)], axis=-1)
        shared = layers.rotate(shared[:, :, None], *rotation)[:, :, 0]
        return q, jnp.concatenate([layers.rms_norm(latent, layer.latent_norm, LATENT_EPS), shared], axis=-1), middle

    def _index(self, indexer: IndexerParams, normed, middle, rotation) -> tuple[IndexQuery, Float[Array, "B N I"]]:
        """What a layer's indexer asks, and its keys; the first R numbers of both are rotated."""
        assert self.indexer is not None
        rope = self.latent.rope

        def rotated(x):
            return jnp.concatenate([layers.rotate(x[..., :rope], *rotation), x[..., rope:]], axis=-1)

        heads = layers.linear(middle, indexer.query).reshape(*normed.shape[:2], -1, self.indexer.size)
        key = layers.layer_norm(layers.linear(normed, indexer.key), indexer.key_norm, indexer.key_norm_bias, LATENT_EPS)
        weights = layers.linear(normed.astype(jnp.float32), indexer.weights) * self.indexer.heads**-0.5
        return IndexQuery(rotated(heads), weights), rotated(key[:, :, None])[:, :, 0]
