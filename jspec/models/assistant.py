"""Assistants: draft models without keys and values; they read the target's instead (frozen-KV MTP).

Gemma 4 ships with such models; the equations are those of `Gemma4AssistantForCausalLM` in transformers 5.22. An
assistant joins a token with a hidden state of the target's width. Each of its layers has queries only and attends to
the committed keys and values of one layer of the target. Its position is the same for a whole round, and its output is
the hidden state of its next step.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jspec.cache.narrow import multiplied
from jspec.core.sharding import check_split, gather_last
from jspec.core.struct import Leaf, leaf, struct
from jspec.core.types import Params
from jspec.models import layers
from jspec.models.candidates import largest
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft
from jspec.models.gemma4 import Gemma4LayerParams, layer_weights
from jspec.models.ops import Ops
from jspec.models.sizes import keys_bytes, tree_bytes
from jspec.models.weights import Stored, linear, plain
from pallas_kernels.platform import exactness

_EMBEDDING, _ORDER = "model.embed_tokens.weight", "masked_embedding.token_ordering"
"""The LM head, and the tokens of its clusters, in checkpoints."""


@struct
class ClusterParams:
    """An LM head whose V tokens are grouped in C clusters of S; only the rows of the most likely clusters are read."""

    centroids: Float[Array, "E C"]
    ids: Int[Array, "C S"]
    """The tokens of each cluster."""
    head: Float[Array, "C S E"]


@struct
class AssistantParams:
    """Weights of an assistant, [in, out]. Et is the target's width."""

    pre_projection: Float[Array, "Et2 E"] = leaf(linear=True)
    """From the target's embedding of the token, followed by the hidden state."""
    layers: tuple[Gemma4LayerParams, ...]
    """Layers with the keys and values of another layer."""
    norm: Float[Array, " E"]
    post_projection: Float[Array, "E Et"] = leaf(linear=True)
    head: Float[Array, "V E"] | None = leaf(split=-2, if_even=True)
    """None if the LM head is clustered, or the target's."""
    clusters: ClusterParams | None


@dataclasses.dataclass(frozen=True)
class ClusterWeights:
    """The entry of an LM head in clusters. Its rows are sorted by token in checkpoints."""

    count: int
    vocab_size: int
    width: int

    @property
    def _centroids(self) -> Any:
        return linear(self.width, {"masked_embedding.centroids.weight": self.count})

    def shapes(self, dtype: DTypeLike) -> ClusterParams:
        """As in `Entry`."""
        tokens = (self.count, self.vocab_size // self.count)
        ids, head = jax.ShapeDtypeStruct(tokens, jnp.int32), jax.ShapeDtypeStruct((*tokens, self.width), dtype)
        return ClusterParams(self._centroids.shapes(dtype), ids, head)  # pyright: ignore[reportArgumentType]  # shapes

    def check(self, tensors: Stored) -> None:
        """As in `Entry`."""
        self._centroids.check(tensors)
        tensors.expect(_EMBEDDING, self.vocab_size, self.width)
        tensors.expect(_ORDER, self.vocab_size)

    def read(self, tensors: Stored, options: Leaf) -> ClusterParams:
        """As in `Entry`. Raises ValueError if not every token is in one cluster."""
        # Rows are sorted by token in a checkpoint, and by cluster here.
        ids = tensors.integers(_ORDER, self.vocab_size)
        if not np.array_equal(np.sort(ids), np.arange(self.vocab_size)):
            raise ValueError(f"{_ORDER} must hold each of the {self.vocab_size} tokens once")
        head = tensors.read(_EMBEDDING, self.vocab_size, self.width)[ids]
        return ClusterParams(
            centroids=self._centroids.read(tensors, options),
            ids=tensors.put(options, [ids.reshape(self.count, -1).astype(np.int32)]),
            head=tensors.put(options, [head.reshape(self.count, -1, self.width)]),
        )

    def write(self, value: ClusterParams) -> Iterator[tuple[str, Any]]:
        """As in `Entry`."""
        ids, head = np.asarray(value.ids).reshape(-1), np.asarray(value.head)
        yield _EMBEDDING, head.reshape(len(ids), -1)[np.argsort(ids)]
        yield from self._centroids.write(value.centroids)
        yield _ORDER, ids.astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Clusters:
    """`count` clusters of tokens; a forward reads the `chosen` most likely ones."""

    count: int
    chosen: int


@struct
class AssistantOutput:
    """The result of a forward of an assistant. Vc: the vocabulary, or the tokens of the chosen clusters."""

    logits: Float[Array, "B N Vc"]
    ids: Int[Array, "B N Vc"] | None
    """The token of each logit; None: the whole vocabulary in order."""
    hidden: Float[Array, "B N Et"]
    """Replaces the target's hidden state in the next step."""


@dataclasses.dataclass(frozen=True)
class Assistant(Draft):
    """The configuration of an assistant; static, hashable by value, with the forward as its methods.

    target_layers: for each layer, the target's layer whose keys and values it reads.
    head_dims: head dimensions of those layers.
    clusters: clusters of the LM head; None: it reads the whole vocabulary.
    target_head: there is no LM head; the target's is applied to the output of `post_projection`.
    tensor: devices to split heads, MLPs and the LM head over, as in the target, but no clusters; the sizes
      here are those of the whole assistant.
    """

    vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    target_layers: tuple[int, ...]
    head_dims: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    clusters: Clusters | None = None
    target_head: bool = False
    tensor: int = 1
    drafter: ClassVar[str] = "frozen-kv-mtp"
    follows_target: ClassVar[bool] = True

    def __post_init__(self):
        # One target layer and one head dimension for each layer.
        if len(self.target_layers) != len(self.head_dims) or not self.target_layers:
            raise ValueError(
                f"target_layers={self.target_layers}, head_dims={self.head_dims}: must be non-empty and have the same "
                "length"
            )
        if self.clusters is None:
            return
        # Clusters divide the vocabulary.
        if self.target_head:
            raise ValueError(
                f"clusters={self.clusters}: must be None with target_head=True, as the target's LM head has no clusters"
            )
        count, read = self.clusters.count, self.clusters.chosen
        if count < 1 or self.vocab_size % count:
            raise ValueError(
                f"clusters={self.clusters}: vocab_size={self.vocab_size} is not a multiple of count={count}"
            )
        if not 1 <= read <= count:
            raise ValueError(f"clusters={self.clusters}: chosen must be between 1 and count={count}")

    def check_target(self, target: Decoder) -> None:
        """Raises ValueError if a target has another vocabulary, width or keys than those this assistant reads."""
        # Vocabulary and width.
        pairs = (self.vocab_size, target.vocab_size), (self.target_hidden_size, target.hidden_size)
        for field, (expected, actual) in zip(("vocabulary", "hidden size"), pairs, strict=True):
            if expected != actual:
                raise ValueError(
                    f"the assistant was made for a target with {field} {expected}, but this target has {actual}"
                )
        # The keys of each layer.
        for layer, head_dim in zip(self.target_layers, self.head_dims, strict=True):
            if not 0 <= layer < target.num_layers:
                raise ValueError(
                    f"the assistant reads layer {layer}, but this target has layers 0 to {target.num_layers - 1}"
                )
            keys = target.layer_keys(layer)
            if keys.latent is not None:
                raise ValueError(f"layer {layer} of the target uses latent attention; an assistant needs per-head keys")
            if keys.head_dim != head_dim or self.num_heads % keys.kv_heads:
                raise ValueError(
                    f"the assistant reads layer {layer} with {self.num_heads} heads of dimension {head_dim}, but this "
                    f"target has {keys.kv_heads} key heads of dimension {keys.head_dim} there"
                )

    def split(self, devices: int) -> Self:
        """The configuration split over devices: each has the query heads of its part of the cache.

        Raises:
          ValueError: the number does not divide the heads or the width of the MLP.
        """
        check_split(devices, {"heads": self.num_heads, "columns of the MLP": self.intermediate_size})
        return dataclasses.replace(self, tensor=devices)

    @property
    def num_layers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Layers of the assistant."""
        return len(self.target_layers)

    @property
    def candidates(self) -> int:
        """Tokens with a logit."""
        if self.clusters is None:
            return self.vocab_size
        return self.vocab_size // self.clusters.count * self.clusters.chosen

    def summary(self) -> str:
        """The draft in a few words."""
        return f"assistant of {self.num_layers} layers"

    def weights(self) -> AssistantParams:
        """The table of the weights."""
        # The LM head: clusters, the target's, or one of its own.
        width, outer = self.hidden_size, self.target_hidden_size
        clusters: Any = None
        if self.clusters is not None:
            clusters = ClusterWeights(self.clusters.count, self.vocab_size, width)
        own_head = clusters is None and not self.target_head
        return AssistantParams(
            pre_projection=linear(2 * outer, {"pre_projection.weight": width}),
            layers=tuple(self._layer_weights(f"model.layers.{i}.", size) for i, size in enumerate(self.head_dims)),
            norm=plain("model.norm.weight", width),
            post_projection=linear(width, {"post_projection.weight": outer}),
            head=plain(_EMBEDDING, self.vocab_size, width) if own_head else None,
            clusters=clusters,
        )

    def _layer_weights(self, prefix: str, head_dim: int) -> Gemma4LayerParams:
        width, queries = self.hidden_size, self.num_heads * head_dim
        qkv = linear(width, {prefix + "self_attn.q_proj.weight": queries})
        return layer_weights(prefix, width, queries, head_dim, self.intermediate_size, qkv)

    def step_bytes(self, params: Params) -> int:
        """Bytes of weights read by one forward: of a clustered LM head, the centroids and the chosen clusters."""
        draft: AssistantParams = params.draft
        head = tree_bytes(draft.head)
        if draft.clusters is not None:
            assert self.clusters is not None
            rows = tree_bytes(draft.clusters.head) * self.clusters.chosen // self.clusters.count
            head = tree_bytes(draft.clusters.centroids) + rows
        return head + tree_bytes((draft.pre_projection, draft.layers, draft.norm, draft.post_projection))

    def extend_bytes(self, params: Params) -> int:
        """0: an assistant has no rows, so it does not absorb committed tokens."""
        return 0

    def kv_bytes(self, context: int, itemsize: int, target: Decoder) -> int:
        """Bytes of the target's keys and values read by a forward on a device for `context` tokens of a sequence."""
        return keys_bytes(map(target.layer_keys, self.target_layers), context, itemsize, target.tensor)

    def apply(
        self,
        params: Params,
        target: Decoder,
        tokens: Int[Array, "B N"],
        hidden: Float[Array, "B N Et"],
        cache: PyTree,
        length: Int[Array, " B"],
        positions: Int[Array, " B"],
    ) -> AssistantOutput:
        """One step after N (token, hidden state) pairs per sequence, blind to each other; writes nothing.

        params: the target's weights, whose embedding it reads, and in `params.draft` its own.
        hidden: the target's hidden state after its final norm, or `hidden` of an earlier output.
        cache: the target's cache.
        length: committed rows of each sequence; sliding windows end at the last of them.
        positions: rotation of the queries of each sequence.
        """
        draft: PyTree = params.draft
        # Join the token's embedding with the hidden state.
        joined = jnp.concatenate([target.embed(params.target, tokens), hidden], axis=-1)
        x = layers.linear(joined, draft.pre_projection)
        normed = self._norm(x, draft.layers[0].attention_norm)
        following = [*(layer.attention_norm for layer in draft.layers[1:]), draft.norm]
        # Layers; each add computes the next norm, too.
        for layer, read, norm in zip(draft.layers, self.target_layers, following, strict=True):
            seen = self._attend(layer, read, target, params, normed, cache, length, positions)
            seen = self._ops.branch(seen, layer.o)
            x, normed = self._add(x, seen, layer.attention_out_norm, layer.mlp_norm)
            mlp = self._ops.mlp(normed, layer.gate_up, layer.down, layers.gelu)
            x, normed = self._add(x, mlp, layer.mlp_out_norm, norm, layer.scalar)
        # The hidden state of the next step, and the logits.
        out = layers.linear(normed, draft.post_projection)
        if self.target_head:
            return AssistantOutput(target.unembed(params.target, out), None, out)
        logits, ids = self._unembed(draft, normed)
        return AssistantOutput(logits, ids, out)

    @property
    def _ops(self) -> Ops:
        return Ops(self.tensor)

    def _norm(self, x, weight):
        return self._ops.wide_rms_norm(x, weight, self.rms_norm_eps)

    def _add(self, x, branch, weight, following, factor=None) -> tuple[Array, Array]:
        return self._ops.residual_norm(x, branch, (weight, following), factor, self.rms_norm_eps)

    def _attend(self, layer: Gemma4LayerParams, read: int, target, params, normed, cache, length, positions):
        """Attention of a layer's queries over the target's layer `read`, [B, N, HD]; zero if nothing is committed."""
        batch, nodes, _ = normed.shape
        keys = target.layer_keys(read).split(self.tensor)
        q = layers.linear(normed, layer.qkv)
        q = self._norm(q.reshape(batch, nodes, -1, keys.head_dim), layer.q_norm)
        q = layers.rotate(q, target.layer_rotation(read, positions[:, None], q.dtype))
        # Nodes have no rows of their own. Zeros take their place; they are seen only without a prefix, where a softmax
        # over nothing would be NaN.
        rows = jnp.zeros((batch, nodes, keys.kv_heads, keys.head_dim), q.dtype)
        mask = jnp.broadcast_to((length == 0)[:, None, None], (batch, nodes, nodes))
        last = jnp.maximum(length - 1, 0)[:, None]
        scale = target.layer_scale(read)
        scales = None if keys.kv is None else getattr(params.target.layers[read], "kv_scales", None)
        if scales is not None:
            q = multiplied(q, scales[0])
        seen = cache.attend(read, q, rows, rows, length, mask, scale, positions=last)
        if scales is not None:
            seen = multiplied(seen, scales[1])
        return seen.reshape(batch, nodes, -1)

    def _unembed(self, draft: AssistantParams, normed) -> tuple[Array, Array | None]:
        """Logits in float32, and the token of each, see `AssistantOutput.ids`."""
        # The whole vocabulary.
        if draft.clusters is None or self.clusters is None:
            assert draft.head is not None
            logits = gather_last(layers.linear(normed, draft.head.T), self.vocab_size)
            return logits.astype(jnp.float32), None
        # The tokens of the most likely clusters.
        clusters = largest(layers.linear(normed, draft.clusters.centroids), self.clusters.chosen)
        rows = jnp.take(draft.clusters.head, clusters, axis=0, mode="clip")
        logits = jnp.einsum("bnkse,bne->bnks", rows, normed, precision=exactness(normed)).astype(jnp.float32)
        ids = jnp.take(draft.clusters.ids, clusters, axis=0, mode="clip")
        return logits.reshape(*normed.shape[:2], -1), ids.reshape(*normed.shape[:2], -1)
