"""Assistants: draft models without keys and values of their own, which read the target's (frozen-KV MTP).

Gemma 4 comes with such models; the equations are those of `Gemma4AssistantForCausalLM` in transformers 5.22. An
assistant joins a token with a hidden state of the target's width, and each of its layers attends, with queries alone,
to what one layer of the target has committed. It stands at one position through a whole round, and what it returns is
the hidden state of its next step.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jspec.core.struct import struct
from jspec.core.types import Params
from jspec.models import layers
from pallas_kernels.residual_norm import residual_norm
from pallas_kernels.topk import topk

_AT_ONCE = 16
"""Clusters that are chosen by one top-k: as many as the kernel of a GPU finds. XLA's own would be a sort there."""


@struct
class AssistantLayerParams:
    """Weights of one layer, [in, out]. HD = H * D of the target's layer that it reads, F2 = 2 * F."""

    attention_norm: Float[Array, " E"]
    q: Float[Array, "E HD"]
    q_norm: Float[Array, " D"]
    o: Float[Array, "HD E"]
    attention_out_norm: Float[Array, " E"]
    mlp_norm: Float[Array, " E"]
    gate_up: Float[Array, "E F2"]
    down: Float[Array, "F E"]
    mlp_out_norm: Float[Array, " E"]
    scalar: Float[Array, ""]
    """Factor on all that leaves the layer."""


@struct
class ClusterParams:
    """An LM head whose V tokens lie in C clusters of S: only the rows of the likeliest clusters are read."""

    centroids: Float[Array, "E C"]
    ids: Int[Array, "C S"]
    """The tokens of each cluster."""
    head: Float[Array, "C S E"]


@struct
class AssistantParams:
    """Weights of an assistant, [in, out]. Et is the target's width."""

    pre_projection: Float[Array, "Et2 E"]
    """From the token's embedding in the target, and the hidden state behind it."""
    layers: tuple[AssistantLayerParams, ...]
    norm: Float[Array, " E"]
    post_projection: Float[Array, "E Et"]
    head: Float[Array, "V E"] | None
    """None where the LM head is one of clusters, or the target's."""
    clusters: ClusterParams | None


@dataclasses.dataclass(frozen=True)
class Clusters:
    """`count` clusters of tokens, of which the likeliest `chosen` are looked into."""

    count: int
    chosen: int


@struct
class AssistantOutput:
    """What a forward of an assistant returns. Vc: the vocabulary, or the tokens of the chosen clusters."""

    logits: Float[Array, "B N Vc"]
    ids: Int[Array, "B N Vc"] | None
    """The tokens that these are of; None: all."""
    hidden: Float[Array, "B N Et"]
    """What takes the place of the target's hidden state in the next step."""


@dataclasses.dataclass(frozen=True)
class Assistant:
    """The configuration of an assistant; static, hashable by value, with the forward as its methods.

    reads: for each layer, the target's layer whose keys and values it reads.
    head_dims: of those layers.
    clusters: of the LM head; None: it reads the whole vocabulary.
    target_head: there is no LM head, and the target's reads what `post_projection` makes.
    """

    vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    reads: tuple[int, ...]
    head_dims: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    clusters: Clusters | None = None
    target_head: bool = False
    drafter: ClassVar[str] = "frozen-kv-mtp"
    """The drafter that such a model is the draft of."""

    def __post_init__(self):
        if len(self.reads) != len(self.head_dims) or not self.reads:
            raise ValueError(
                f"reads={self.reads}, head_dims={self.head_dims}: each layer, of at least 1, has one of both"
            )
        if self.clusters is None:
            return
        if self.target_head:
            raise ValueError(f"clusters={self.clusters}, target_head=True: the target's LM head has no clusters")
        count, chosen = self.clusters.count, self.clusters.chosen
        if count < 1 or self.vocab_size % count:
            raise ValueError(f"clusters={self.clusters}: the {self.vocab_size} tokens are no multiple of {count}")
        if not 1 <= chosen <= count:
            raise ValueError(f"clusters={self.clusters}: between 1 and {count} are chosen")

    @property
    def num_layers(self) -> int:
        """Layers of the assistant."""
        return len(self.reads)

    @property
    def candidates(self) -> int:
        """Tokens that have a logit."""
        if self.clusters is None:
            return self.vocab_size
        return self.vocab_size // self.clusters.count * self.clusters.chosen

    def apply(
        self,
        params: Params,
        target: Any,
        tokens: Int[Array, "B N"],
        hidden: Float[Array, "B N Et"],
        cache: Any,
        length: Int[Array, " B"],
        positions: Int[Array, " B"],
    ) -> AssistantOutput:
        """One step after N (token, hidden state) pairs a sequence, none of which sees another; writes nothing.

        Args:
          params: the target's weights, whose embedding it reads, and in `params.draft` its own.
          target: the target's configuration (`jspec.models.decoder.Decoder`).
          hidden: the target's after its final norm, or `hidden` of an earlier output.
          cache: the target's.
          length: committed rows of each sequence; windows are those of the last of them.
          positions: by which the queries of each sequence are rotated.
        """
        own: AssistantParams = params.draft
        joined = jnp.concatenate([target.embed(params.target, tokens), hidden], axis=-1)
        x = layers.linear(joined, own.pre_projection)
        normed = self._norm(x, own.layers[0].attention_norm)
        following = [*(layer.attention_norm for layer in own.layers[1:]), own.norm]
        for layer, read, norm in zip(own.layers, self.reads, following, strict=True):
            seen = layers.linear(self._attend(layer, read, target, normed, cache, length, positions), layer.o)
            x, normed = self._add(x, seen, layer.attention_out_norm, layer.mlp_norm)
            mlp = layers.gated_mlp(normed, layer.gate_up, layer.down, layers.gelu)
            x, normed = self._add(x, mlp, layer.mlp_out_norm, norm, layer.scalar)
        out = layers.linear(normed, own.post_projection)
        if self.target_head:
            return AssistantOutput(target.unembed(params.target, out), None, out)
        logits, ids = self._unembed(own, normed)
        return AssistantOutput(logits, ids, out)

    def _norm(self, x, weight):
        return layers.wide_rms_norm(x, weight, self.rms_norm_eps)

    def _add(self, x, branch, weight, following, factor=None) -> tuple[Array, Array]:
        stream, normed = residual_norm(x, branch, weight, following, factor, eps=self.rms_norm_eps)
        assert normed is not None
        return stream, normed

    def _attend(self, layer: AssistantLayerParams, read: int, target, normed, cache, length, positions):
        """What a layer's queries find in the target's layer `read`, [B, N, HD]: zero where nothing is committed."""
        batch, nodes, _ = normed.shape
        keys = target.layer_keys(read)
        q = layers.linear(normed, layer.q)
        q = self._norm(q.reshape(batch, nodes, self.num_heads, keys.head_dim), layer.q_norm)
        q = layers.rope(q, positions[:, None], target.layer_frequencies(read))
        # Nodes have no rows of their own. Zeros are in their place, which only those see that find no prefix: a softmax
        # over nothing would be NaN.
        rows = jnp.zeros((batch, nodes, keys.kv_heads, keys.head_dim), q.dtype)
        mask = jnp.broadcast_to((length == 0)[:, None, None], (batch, nodes, nodes))
        last = jnp.maximum(length - 1, 0)[:, None]
        scale = target.layer_scale(read)
        seen = cache.attend(read, q, rows, rows, length, mask, scale, positions=last)
        return seen.reshape(batch, nodes, -1)

    def _unembed(self, own: AssistantParams, normed) -> tuple[Array, Array | None]:
        """Logits in float32, and the ids that they are of."""
        if own.clusters is None or self.clusters is None:
            assert own.head is not None
            return layers.linear(normed, own.head.T).astype(jnp.float32), None
        chosen = _largest(layers.linear(normed, own.clusters.centroids), self.clusters.chosen)
        rows = jnp.take(own.clusters.head, chosen, axis=0, mode="clip")
        precision = lax.Precision.HIGHEST if normed.dtype == jnp.float32 else None
        logits = jnp.einsum("bnkse,bne->bnks", rows, normed, precision=precision).astype(jnp.float32)
        ids = jnp.take(own.clusters.ids, chosen, axis=0, mode="clip")
        return logits.reshape(*normed.shape[:2], -1), ids.reshape(*normed.shape[:2], -1)


def _largest(scores: Float[Array, "B N C"], count: int) -> Int[Array, "B N k"]:
    """The places of the `count` largest scores, in descending order."""
    place, found = jnp.arange(scores.shape[-1], dtype=jnp.int32), []
    for begin in range(0, count, _AT_ONCE):
        _, best, _ = topk(scores, min(_AT_ONCE, count - begin))
        found.append(best)
        taken = (best[..., None] == place.reshape(1, 1, 1, -1)).any(2)
        scores = jnp.where(taken, -jnp.inf, scores)
    return jnp.concatenate(found, axis=-1)
