"""DeepSeek V2, V2-Lite, V3 and V3.2 (arXiv 2405.04434, 2412.19437, 2512.02556): latent attention, many experts.

Queries are projected in two steps with a norm between them, or in one (V2-Lite); the first step and the projection to
the token's cache row are one matrix. Rotated dimensions are pairs (i, i + R/2), as everywhere in this package;
checkpoints have pairs (2 i, 2 i + 1) and are permuted when they are read. In V3.2 an indexer in each layer selects what
its attention reads.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.cache import DsaCache, LayerKeys, MlaCache
from jspec.cache.dsa import IndexQuery
from jspec.cache.mla import UpProjections
from jspec.cache.narrow import stored_dtype
from jspec.core.struct import leaf, struct
from jspec.models import layers
from jspec.models.decoder import Decoder, ModelParams, model_weights
from jspec.models.expert_weights import layer_mlp_weights
from jspec.models.latent_weights import Latent, UpWeights
from jspec.models.layers import Reading
from jspec.models.moe import Routed, RoutedParams, layer_mlp
from jspec.models.mtp_head import MtpParams
from jspec.models.rope import Rope, YarnRope
from jspec.models.weights import fused, linear, plain, reordered


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
    experts: those of the other layers; None: there are none.
    mtp_layers: MTP heads in `ModelParams.mtp`.
    indexer: the indexer of each layer, in V3.2; None: attention reads all tokens.
    tensor: latents are whole on each device.
    kv: indexers' keys keep their precision.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    latent: Latent
    experts: Routed | None
    dense_layers: int
    max_length: int
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()
    tie_embeddings: bool = False
    mtp_layers: int = 0
    indexer: Indexer | None = None
    tensor: int = 1
    exact: bool = False
    kv: str | None = None
    exact_kernels: ClassVar[bool] = False  # none of latent attention

    def not_exact(self) -> str | None:
        """As in `Decoder.not_exact`; attention that reads what an indexer selects has no exact forward."""
        if self.indexer is not None:
            return "attention that reads what an indexer selects has no exact forward yet"
        return super().not_exact()

    def layer_experts(self, layer: int) -> Routed | None:
        """The experts of a layer; layers after the last are those of `mtp`."""
        return None if layer < self.dense_layers else self.experts

    def mtp_layer(self) -> "Deepseek":
        """The layer of an MTP head as a decoder of its own; the bits of drafts do not matter, so it is not exact."""
        return dataclasses.replace(self, num_layers=1, dense_layers=0, mtp_layers=0, exact=False)

    def weights(self) -> ModelParams:
        """The table of the weights; embedding and LM head of MTP heads are the target's."""
        return model_weights(
            self,
            map(self.layer_weights, range(self.num_layers)),
            mtp=tuple(self._mtp_weights(self.num_layers + index) for index in range(self.mtp_layers)),
        )

    def _mtp_weights(self, index: int) -> MtpParams:
        prefix, width = f"model.layers.{index}.", self.hidden_size
        return MtpParams(
            token_norm=plain(prefix + "enorm.weight", width),
            hidden_norm=plain(prefix + "hnorm.weight", width),
            projection=linear(2 * width, {prefix + "eh_proj.weight": width}),
            layer=self.layer_weights(index),
            norm=plain(prefix + "shared_head.norm.weight", width),
        )

    def layer_weights(
        self, index: int, prefix: str | None = None, input_width: int | None = None
    ) -> DeepseekLayerParams:
        """The table of a layer; those after the last are the layers of MTP heads.

        prefix: of the names of its tensors; None: that of a language model.
        input_width: width of the attention's input; None: the model's.
        """
        # Names and shapes.
        prefix, width, latent = prefix or f"model.layers.{index}.", self.hidden_size, self.latent
        attention, rank = prefix + "self_attn.", latent.q_rank
        experts = self.layer_experts(index)
        up: Any = UpWeights(attention + "kv_b_proj.weight", self.num_heads, latent)
        return DeepseekLayerParams(
            attention_norm=plain(prefix + "input_layernorm.weight", width),
            down_projection=self._down_weights(attention, input_width or width),
            query_norm=plain(attention + "q_a_layernorm.weight", rank) if rank else None,
            query=reordered(linear(rank, {attention + "q_b_proj.weight": self._query_width}), self._query_order)
            if rank
            else None,
            latent_norm=plain(attention + "kv_a_layernorm.weight", latent.kv_rank),
            up=up,
            o=linear(self.num_heads * latent.value_dim, {attention + "o_proj.weight": width}),
            mlp_norm=plain(prefix + "post_attention_layernorm.weight", width),
            **layer_mlp_weights(experts, prefix + "mlp.", self.intermediate_size, width, "shared_experts."),
            indexer=None if self.indexer is None else self._indexer_weights(self.indexer, attention + "indexer."),
        )

    def _down_weights(self, prefix: str, width: int) -> Any:
        """The first step of queries, or their only one, beside the projection to a cache row. width: of the input."""
        latent, two_steps = self.latent, self.latent.q_rank is not None

        def parts(first: Any, rows: Any) -> list[Any]:
            # Each device has the whole row; and the whole first step of queries, unless it is their only one.
            return [np.tile(first.T, self.tensor) if two_steps else first.T, np.tile(rows.T, self.tensor)]

        name = prefix + ("q_a_proj.weight" if two_steps else "q_proj.weight")
        outs = {name: latent.q_rank or self._query_width, prefix + "kv_a_proj_with_mqa.weight": latent.width}
        stored = {name: (out, width) for name, out in outs.items()}
        columns = latent.q_rank * self.tensor if latent.q_rank else self._query_width
        shape = width, columns + latent.width * self.tensor
        joined = fused(shape, stored, parts, lambda joined: np.split(joined.T, [-latent.width]))
        return reordered(joined, None if two_steps else self._query_order, latent.row_order(1, latent.width))

    @property
    def _query_width(self) -> int:
        return self.num_heads * (self.latent.nope_dim + self.latent.rope_dim)

    @property
    def _query_order(self) -> np.ndarray:
        return self.latent.row_order(self.num_heads, self.latent.nope_dim + self.latent.rope_dim)

    def _indexer_weights(self, sizes: Indexer, prefix: str) -> IndexerParams:
        """A layer's indexer, whose rotated dimensions are pairs (i, i + R/2) in checkpoints too."""
        width, rank = self.hidden_size, self.latent.q_rank
        assert rank is not None
        weights = linear(width, {prefix + "weights_proj.weight": sizes.heads})
        return IndexerParams(
            query=linear(rank, {prefix + "wq_b.weight": sizes.heads * sizes.size}),
            key=linear(width, {prefix + "wk.weight": sizes.size}),
            key_norm=plain(prefix + "k_norm.weight", sizes.size),
            key_norm_bias=plain(prefix + "k_norm.bias", sizes.size),
            weights=dataclasses.replace(weights, dtype=jnp.float32),
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

    def layer_rotation(self, layer: int, positions: Int[Array, "#B #N"], dtype: DTypeLike) -> layers.Rotation:
        """How the rotary part of those rows is rotated at each position."""
        return self.rope.rotation(positions, self.latent.rope_dim, dtype)

    def layer_scale(self, layer: int) -> float:
        """The factor on the products of queries and keys."""
        scale = (self.latent.nope_dim + self.latent.rope_dim) ** -0.5
        return scale * self.rope.scaling.score_scale if isinstance(self.rope.scaling, YarnRope) else scale

    def run_layer(
        self, layer: DeepseekLayerParams, x: Float[Array, "B N E"], rotation: layers.Rotation, reading: Reading
    ) -> tuple[Float[Array, "B M E"], tuple[Float[Array, "B R _"], ...]]:
        """Attention, then the MLP, each added to the stream `x`. Rows end with the keys of the indexer, if any."""
        return self.run_normed(layer, x, self.norm(x, layer.attention_norm), rotation, reading)

    def run_normed(
        self,
        layer: DeepseekLayerParams,
        x: Float[Array, "B N E"],
        normed: Float[Array, "B N X"],
        rotation: layers.Rotation,
        reading: Reading,
    ) -> tuple[Float[Array, "B M E"], tuple[Float[Array, "B R _"], ...]]:
        """`run_layer` with another input of the attention, `normed`."""
        # Queries and the row of the cache.
        q, row, middle = self._project(layer, normed, rotation)
        # Rows of this round; with an indexer its keys, and what they are compared with.
        options = {}
        if layer.indexer is None:
            rows = reading.rows(row)
        else:
            query, key = self._index(layer.indexer, normed, middle, rotation)
            rows = reading.rows(row, key)
            options = {"keys": rows[1], "query": jax.tree.map(reading.take, query)}
        # Attention.
        x, ops = reading.take(x), self.ops
        seen = reading.attend(q, rows[0], layer.up, scale=self.layer_scale(0), **options)
        x = x + ops.sum(ops.linear(seen.reshape(*x.shape[:2], -1), layer.o))
        # MLP.
        return ops.add(x, layer_mlp(self.norm(x, layer.mlp_norm), layer, self.experts, ops)), rows

    def _project(self, layer: DeepseekLayerParams, normed, rotation):
        """Queries [B, N, H, P + R], rows [B, N, C + R], and the input of the queries' second step."""
        sizes = self.latent
        # Split the joined projection: queries, latent, rotary part.
        down = self.ops.linear(normed, layer.down_projection)
        q, latent, shared = jnp.split(down, [down.shape[-1] - sizes.width, down.shape[-1] - sizes.rope_dim], axis=-1)
        middle = None
        # The second step of queries.
        if layer.query is not None:
            assert layer.query_norm is not None
            middle = self.ops.rms_norm(q, layer.query_norm, sizes.eps)
            q = self.ops.linear(middle, layer.query)
        # Rotate, and normalize the latent.
        q = q.reshape(*q.shape[:2], self.num_heads // self.tensor, -1)
        q = jnp.concatenate([q[..., : sizes.nope_dim], layers.rotate(q[..., sizes.nope_dim :], rotation)], axis=-1)
        shared = layers.rotate(shared[:, :, None], rotation)[:, :, 0]
        latent = self.ops.rms_norm(latent, layer.latent_norm, sizes.eps)
        return q, jnp.concatenate([latent, shared], axis=-1), middle

    def _index(self, indexer: IndexerParams, normed, middle, rotation) -> tuple[IndexQuery, Float[Array, "B N I"]]:
        """The query of a layer's indexer, and its keys; the first R features of both are rotated."""
        assert self.indexer is not None
        rope = self.latent.rope_dim

        # Only the first R features rotate.
        def rotated(x):
            return jnp.concatenate([layers.rotate(x[..., :rope], rotation), x[..., rope:]], axis=-1)

        # Queries, key and weights of the heads.
        heads = layers.linear(middle, indexer.query).reshape(*normed.shape[:2], -1, self.indexer.size)
        key, eps = layers.linear(normed, indexer.key), self.latent.eps
        key = layers.layer_norm(key, indexer.key_norm, indexer.key_norm_bias, eps)
        weights = layers.linear(normed.astype(jnp.float32), indexer.weights) * self.indexer.heads**-0.5
        return IndexQuery(rotated(heads), weights), rotated(key[:, :, None])[:, :, 0]
