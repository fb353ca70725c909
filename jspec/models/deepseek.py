"""DeepSeek V2, V2-Lite, V3 and V3.2 (arXiv 2405.04434, 2412.19437, 2512.02556): latent attention, many experts.

Queries are projected in two steps with a norm between them, or in one (V2-Lite); the first step and the projection to
the token's cache row are one matrix. Rotated dimensions are pairs (i, i + R/2), as everywhere in this package;
checkpoints have pairs (2 i, 2 i + 1) and are permuted when they are read. In V3.2 an indexer in each layer selects what
its attention reads.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jspec.cache import DsaCache, LayerKeys, MlaCache
from jspec.cache.dsa import DsaRows, IndexQuery
from jspec.cache.mla import MlaRows, UpProjections
from jspec.cache.narrow import stored_dtype
from jspec.core.sharding import check_split, sum_over_devices
from jspec.core.struct import leaf, struct
from jspec.models import layers
from jspec.models.decoder import Decoder
from jspec.models.moe import Routed, RoutedParams, layer_mlp, mlp_shapes
from jspec.models.mtp_head import MtpParams, mtp_shapes
from jspec.models.sizes import shape_of
from pallas_kernels import parts

LATENT_EPS = 1e-6
"""Epsilon of the norms of queries and latents; independent of the other norms' epsilon."""


@struct
class IndexerParams:
    """Weights of a layer's indexer: J heads of width I, JI = J * I."""

    query: Float[Array, "Q JI"]
    key: Float[Array, "E I"]
    key_norm: Float[Array, " I"]
    key_norm_bias: Float[Array, " I"]
    weights: Float[Array, "E J"]
    """Weights of the heads' scores, in float32. Nothing here is split or quantized: heads' scores are added up before
    tokens are selected, and selected by small differences.
    """


@struct
class DeepseekLayerParams:
    """Weights of one layer, [in, out].

    DOWN = Q + C + R: the widths of the queries' first step, the latent and the rotary key. QD = H * (P + R): the width
    of the queries; without a first step Q is QD. Where heads are split over devices, each has all of C, R and a first
    step.
    """

    attention_norm: Float[Array, " E"]
    down_projection: Float[Array, "E DOWN"] = leaf(split=-1, linear=True)
    query_norm: Float[Array, " Q"] | None
    query: Float[Array, "Q QD"] | None = leaf(split=-1, linear=True)
    """Both None if queries are projected in one step."""
    latent_norm: Float[Array, " C"]
    up: UpProjections
    o: Float[Array, "HV E"] = leaf(split=-2, linear=True)
    mlp_norm: Float[Array, " E"]
    gate_up: Float[Array, "E F2"] | None = leaf(split=-1, linear=True)
    down: Float[Array, "F E"] | None = leaf(split=-2, linear=True)
    experts: RoutedParams | None
    """Experts; mutually exclusive with gate_up and down."""
    indexer: IndexerParams | None = None


@struct
class DeepseekParams:
    """Weights of a model. `lm_head` is None if the embedding is the LM head."""

    embed: Float[Array, "V E"] = leaf(split=-2, if_even=True)
    layers: tuple[DeepseekLayerParams, ...]
    norm: Float[Array, " E"]
    lm_head: Float[Array, "E V"] | None = leaf(split=-1, if_even=True, linear=True)
    mtp: tuple[MtpParams, ...] = ()
    """MTP heads, which draft for this target; its own forward does not read them."""


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of latent attention, in the words of the papers.

    q_rank: width of the queries' first step; None: queries are projected in one step.
    kv_rank: width of the latent.
    nope_dim, rope_dim: dimensions of each head's keys that do not rotate, and that do.
    value_dim: dimensions of each head's values.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Width of a cache row."""
        return self.kv_rank + self.rope_dim


@dataclasses.dataclass(frozen=True)
class Indexer:
    """Heads of an indexer, the width of its keys, and the maximum number of tokens it selects."""

    heads: int
    size: int
    top_k: int


@dataclasses.dataclass(frozen=True)
class Deepseek(Decoder):
    """The configuration of a model; static, hashable by value, with its forward as methods.

    intermediate_size: width of the MLP of the first `dense_layers` layers, which have no experts.
    mtp_layers: MTP heads in `DeepseekParams.mtp`.
    indexer: the indexer of each layer, in V3.2; None: attention reads all tokens.
    tensor: devices over which heads, MLPs and the vocabulary are split; the sizes here are those of the whole model.
    kv: see `with_kv`; indexers' keys keep their precision.
    exact: see `exactly`.
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
    tensor: int = 1
    exact: bool = False
    kv: str | None = None

    def exactly(self) -> Self:
        """As in `Decoder.exactly`.

        Raises:
          ValueError: the model is split over devices, or has indexers.
        """
        if self.indexer is not None:
            raise ValueError("exact=True: attention that reads what an indexer selects has no exact forward yet")
        return super().exactly()

    def split(self, devices: int) -> Self:
        """The configuration whose heads, MLPs and experts are split over that many devices; latents are whole.

        Raises:
          ValueError: the number does not divide them.
        """
        widths = {"columns of each expert": self.experts.width}
        if self.dense_layers:
            widths["columns of the MLP"] = self.intermediate_size
        check_split(devices, {"heads": self.num_heads, **widths})
        return dataclasses.replace(self, tensor=devices)

    @property
    def down_width(self) -> int:
        """Width of the first projection of a layer, on one device."""
        sizes = self.latent
        queries = self.num_heads // self.tensor * (sizes.nope_dim + sizes.rope_dim)
        return (sizes.q_rank or queries) + sizes.width

    def layer_experts(self, layer: int) -> Routed | None:
        """The experts of a layer; layers after the last are those of `mtp`."""
        return None if layer < self.dense_layers else self.experts

    def mtp_layer(self) -> "Deepseek":
        """The layer of an MTP head as a decoder of its own; the bits of drafts do not matter, so it is not exact."""
        return dataclasses.replace(self, num_layers=1, dense_layers=0, mtp_layers=0, exact=False)

    def param_shapes(self, dtype: DTypeLike) -> DeepseekParams:
        """The weights as `jax.ShapeDtypeStruct`s; embedding and LM head of MTP heads are the target's."""
        shape, width, vocabulary = shape_of(dtype), self.hidden_size, self.vocab_size
        norm, count = shape((width,)), self.num_layers
        stack = [self._layer_shapes(index, dtype) for index in range(count + self.mtp_layers)]
        return DeepseekParams(
            embed=shape((vocabulary, width)),
            layers=tuple(stack[:count]),
            norm=norm,
            lm_head=None if self.tie_embeddings else shape((width, vocabulary)),
            mtp=tuple(mtp_shapes(layer, norm, dtype) for layer in stack[count:]),
        )

    def _layer_shapes(self, index: int, dtype: DTypeLike) -> DeepseekLayerParams:
        shape, width, heads, latent = shape_of(dtype), self.hidden_size, self.num_heads, self.latent
        queries = heads * (latent.nope_dim + latent.rope_dim)
        return DeepseekLayerParams(
            attention_norm=shape((width,)),
            down_projection=shape((width, self.down_width * self.tensor)),
            query_norm=shape((latent.q_rank,)) if latent.q_rank else None,
            query=shape((latent.q_rank, queries)) if latent.q_rank else None,
            latent_norm=shape((latent.kv_rank,)),
            up=UpProjections(
                shape((heads, latent.nope_dim, latent.kv_rank)), shape((heads, latent.kv_rank, latent.value_dim))
            ),
            o=shape((heads * latent.value_dim, width)),
            mlp_norm=shape((width,)),
            **mlp_shapes(self.layer_experts(index), self.intermediate_size, width, dtype),
            indexer=None if self.indexer is None else self._indexer_shapes(self.indexer, dtype),
        )

    def _indexer_shapes(self, sizes: Indexer, dtype: DTypeLike) -> IndexerParams:
        shape, width, total = shape_of(dtype), self.hidden_size, sizes.heads * sizes.size
        return IndexerParams(
            query=shape((self.latent.q_rank, total)),
            key=shape((width, sizes.size)),
            key_norm=shape((sizes.size,)),
            key_norm_bias=shape((sizes.size,)),
            weights=shape((width, sizes.heads), dtype=jnp.float32),
        )

    def empty_cache(self, batch: int, capacity: int, page_size: int, dtype: DTypeLike) -> MlaCache | DsaCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens."""
        layers, width = self.num_layers, self.latent.width
        stored = stored_dtype(self.kv, dtype)
        if self.indexer is None:
            return MlaCache.empty(batch, capacity, page_size, layers=layers, width=width, dtype=stored)
        index = {"index_width": self.indexer.size, "top_k": self.indexer.top_k, "index_dtype": dtype}
        return DsaCache.empty(batch, capacity, page_size, layers=layers, width=width, dtype=stored, **index)

    def layer_keys(self, layer: int) -> LayerKeys:
        """The rows of a layer."""
        return LayerKeys(1, self.latent.width, latent=self.latent.kv_rank, kv=self.kv)

    def kv_bytes(self, context: int, itemsize: int, target: Decoder | None = None) -> int:
        """As in `Decoder`; with indexers, the keys of all tokens and the rows of those that one token selects."""
        if self.indexer is None:
            return super().kv_bytes(context, itemsize)
        selected = self.layer_keys(0).row_bytes(itemsize) * min(context, self.indexer.top_k)
        return self.num_layers * (self.indexer.size * context * itemsize + selected)

    def layer_frequencies(self, layer: int) -> Float[Array, " half"]:
        """How the rotary part of those rows is rotated: radians per position, for each pair of dimensions."""
        return layers.rope_frequencies(self.latent.rope_dim, self.rope_theta, self.rope_scaling)

    def layer_scale(self, layer: int) -> float:
        """The factor on the products of queries and keys."""
        scale = (self.latent.nope_dim + self.latent.rope_dim) ** -0.5
        return scale if self.rope_scaling is None else scale * self.rope_scaling.score_scale

    def rotation(
        self, positions: Int[Array, "#B #N"], dtype: DTypeLike
    ) -> tuple[Float[Array, "#B #N half"], Float[Array, "#B #N half"]]:
        """Cosine and sine of each token's angles, see `layers.rotation`."""
        magnitude = 1.0 if self.rope_scaling is None else self.rope_scaling.magnitude
        return layers.rotation(positions, self.layer_frequencies(0), dtype, magnitude)

    def run_layers(
        self,
        params: PyTree,
        tokens: Int[Array, "B N"],
        x: Float[Array, "B N E"],
        positions: Int[Array, "#B #N"],
        attend: Callable[..., Array],
        earlier: MlaRows | DsaRows | None,
        selected: layers.SelectedToken | None,
    ) -> Iterator[tuple[Float[Array, "B N E"], tuple[Array, ...]]]:
        """Yields, after each layer, the residual stream and the layer's rows of this round."""
        rotation = self.rotation(positions, x.dtype)
        for index, layer in enumerate(params.layers):
            own = None if earlier is None else earlier[index]
            here_selected = selected if index + 1 == self.num_layers else None
            x, rows = self.layer(layer, x, rotation, partial(attend, index), own, here_selected)
            yield x, rows

    def layer(
        self,
        layer: DeepseekLayerParams,
        x: Float[Array, "B N E"],
        rotation: tuple[Float[Array, "#B #N half"], Float[Array, "#B #N half"]],
        attend: Callable[..., Array],
        earlier: tuple[Float[Array, "B M _"], ...] | None,
        selected: layers.SelectedToken | None = None,
    ) -> tuple[Float[Array, "B N E"], tuple[Float[Array, "B M _"], ...]]:
        """Attention, then the MLP, each added to the residual stream `x`.

        rotation: the angles of each token, see `rotation`.
        attend: the cache's `attend` for this layer.
        earlier: this round's earlier rows.
        selected: the tokens whose stream is returned, [B, 1, E]; rows are returned for all tokens.

        Returns the residual stream, and the rows of this round including `earlier`, followed by the keys of the indexer
        if there is one.
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
        if selected is not None:
            x, q, query = jax.tree.map(lambda each: layers.take_token(each, selected.token), (x, q, query))
            attend = partial(attend, mask=selected.mask)
        row, *keys = rows
        if query is not None:
            attend = partial(attend, keys=keys[0], query=query)
        seen = attend(q, row, layer.up, scale=self.layer_scale(0))
        x = x + sum_over_devices(self._linear(seen.reshape(*x.shape[:2], -1), layer.o), self.tensor)
        mlp = layer_mlp(self.norm(x, layer.mlp_norm), layer, self.experts, exact=self.exact)
        return x + sum_over_devices(parts.whole(mlp, x.ndim, x.dtype), self.tensor), rows

    def _linear(self, x, weight):
        return layers.linear(x, weight, exact=self.exact)

    def _project(self, layer: DeepseekLayerParams, normed, rotation):
        """Queries [B, N, H, P + R], rows [B, N, C + R], and the input of the queries' second step."""
        sizes = self.latent
        down = self._linear(normed, layer.down_projection)
        q, latent, shared = jnp.split(down, [down.shape[-1] - sizes.width, down.shape[-1] - sizes.rope_dim], axis=-1)
        middle = None
        if layer.query is not None:
            assert layer.query_norm is not None
            middle = layers.rms_norm(q, layer.query_norm, LATENT_EPS, exact=self.exact)
            q = self._linear(middle, layer.query)
        q = q.reshape(*q.shape[:2], self.num_heads // self.tensor, -1)
        q = jnp.concatenate([q[..., : sizes.nope_dim], layers.rotate(q[..., sizes.nope_dim :], *rotation)], axis=-1)
        shared = layers.rotate(shared[:, :, None], *rotation)[:, :, 0]
        latent = layers.rms_norm(latent, layer.latent_norm, LATENT_EPS, exact=self.exact)
        return q, jnp.concatenate([latent, shared], axis=-1), middle

    def _index(self, indexer: IndexerParams, normed, middle, rotation) -> tuple[IndexQuery, Float[Array, "B N I"]]:
        """The query of a layer's indexer, and its keys; the first R features of both are rotated."""
        assert self.indexer is not None
        rope = self.latent.rope_dim

        def rotated(x):
            return jnp.concatenate([layers.rotate(x[..., :rope], *rotation), x[..., rope:]], axis=-1)

        heads = layers.linear(middle, indexer.query).reshape(*normed.shape[:2], -1, self.indexer.size)
        key = layers.layer_norm(layers.linear(normed, indexer.key), indexer.key_norm, indexer.key_norm_bias, LATENT_EPS)
        weights = layers.linear(normed.astype(jnp.float32), indexer.weights) * self.indexer.heads**-0.5
        return IndexQuery(rotated(heads), weights), rotated(key[:, :, None])[:, :, 0]
