"""Assistants in training: shape, initial weights, and unrolling over the target's keys and values.

A chain that starts at row p reads the keys and values of rows 0 to p and stays at position p in all of its steps, as in
`drafters.FrozenKvMtp`. So the rows of a text, each a chain of its own, attend causally to the target's rows.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from jspec.core.struct import struct
from jspec.core.types import ForwardOutput, Params
from jspec.drafters import FrozenKvMtp
from jspec.models import Assistant, AssistantParams
from jspec.models.decoder import Decoder
from jspec.models.gemma4 import Gemma4LayerParams
from jspec.train import model, ttt
from jspec.train.model import CausalAttention
from jspec.train.recipe import AssistantShape

Pair = tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]]

DEFAULT_LAYERS = 4
"""Layers of the assistants of Gemma 4."""


@struct
class Observed:
    """What an assistant reads of its target's forward over a text."""

    hidden: Float[Array, "B T Et"]
    """The hidden states after the final norm."""
    rows: dict[int, Pair]
    """Keys and values, by the layer of their origin."""


@dataclasses.dataclass(frozen=True)
class FrozenRows:
    """Takes the place of a cache: B T sequences of one node each, whose prefixes are those of B texts.

    rows: keys and values of the texts, by the reading layer.
    causal: attention among the tokens of a text.
    """

    rows: Mapping[int, Pair]
    causal: CausalAttention

    def attend(
        self,
        layer: int,
        q: Float[Array, "BT 1 H D"],
        k: Float[Array, "BT 1 K D"],
        v: Float[Array, "BT 1 K D"],
        start: Int[Array, " BT"],
        mask: Array | None,
        scale: float,
        positions: Array | None,
    ) -> Float[Array, "BT 1 H D"]:
        """Attention of sequence b T + p over rows 0 to p of text b, where `start` must be p + 1.

        No node attends to itself, so `k`, `v` and `mask` are unused; positions are those of the rows.
        """
        keys, values = self.rows[layer]
        queries = q.reshape(*keys.shape[:2], *q.shape[2:])
        return self.causal.attend(layer, queries, keys, values, None, None, scale).reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class AssistantLearner(ttt.UnrolledLearner):
    """An assistant for a target."""

    config: Assistant
    target: Decoder
    replays: ClassVar[bool] = False

    def __post_init__(self):
        if self.config.clusters is not None:
            raise ValueError(
                f"clusters={self.config.clusters}: an assistant with an LM head of clusters cannot be trained; use "
                "clusters=None"
            )

    @classmethod
    def configure(cls, target: Decoder, shape: AssistantShape) -> Assistant:
        """An assistant with the target's shape except for what is given."""
        target = require_keys(target)
        # Layers of the target to read.
        reads, count = shape.reads, shape.num_layers
        if reads is None:
            reads = default_reads(target, min(DEFAULT_LAYERS, target.num_layers) if count is None else count)
        elif count not in (None, len(reads)):
            raise ValueError(f"num_layers={count}: must be {len(reads)}, the length of reads={reads}, or be omitted")
        if not reads or not all(0 <= layer < target.num_layers for layer in reads):
            raise ValueError(
                f"reads={reads}: each must be between 0 and {target.num_layers - 1}, a layer of the target"
            )
        config = Assistant(
            vocab_size=target.vocab_size,
            target_hidden_size=target.hidden_size,
            target_layers=reads,
            head_dims=tuple(target.layer_keys(layer).head_dim for layer in reads),
            rms_norm_eps=target.rms_norm_eps,
            target_head=shape.target_head,
            **shape.sizes(target),
        )
        FrozenKvMtp().bind(target, config)
        return config

    def describe(self, target: str) -> tuple[str, str]:
        """Its kind, its target layers, and its LM head."""
        layers = ", ".join(map(str, self.config.target_layers))
        head = "the LM head of the target" if self.config.target_head else "an LM head of its own"
        return (
            f"An assistant for {target} (frozen-KV MTP, as the assistants of Gemma 4)",
            f"that read the keys and values of the target's layers {layers}, {head}; it has no cache",
        )

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The hidden state after the final norm."""
        return (self.target.num_layers + 1,)

    def logits_per_token(self) -> float:
        """Those of one step."""
        return self.config.vocab_size

    def init(self, target: PyTree, ids: Array | None, key: Key[Array, ""]) -> AssistantParams:
        """Random weights, except for the last layers if the widths agree.

        Then the final norm and the LM head are the target's, and the next step reads the output of that norm unchanged.
        """
        assert ids is None
        config, decoder = self.config, self.target
        keys = iter(jax.random.split(key, 5 * config.num_layers + 4))
        width, outer = config.hidden_size, config.target_hidden_size
        embedded = decoder.embed(target, jnp.arange(min(len(target.embed), 1024), dtype=jnp.int32)[None])
        spreads = jnp.concatenate([jnp.full(outer, _spread(x)) for x in (embedded, target.norm)])
        norm, post = jnp.ones(width, jnp.float32), model.init_matrix(next(keys), width, outer)
        head = model.init_matrix(next(keys), width, config.vocab_size).T
        if width == outer:
            norm, post = target.norm.astype(jnp.float32), jnp.eye(width, dtype=jnp.float32)
            head = jnp.array(target.embed if target.lm_head is None else target.lm_head.T, jnp.float32)
        return AssistantParams(
            # Embeddings may be much smaller than hidden states; scaling gives both the same weight.
            pre_projection=model.init_matrix(next(keys), 2 * outer, width) / spreads[:, None],
            layers=tuple(
                _init_layer(shapes, decoder.layer_scale(layer), keys)
                for shapes, layer in zip(config.param_shapes(jnp.float32).layers, config.target_layers, strict=True)
            ),
            norm=norm,
            post_projection=post,
            head=None if config.target_head else head,
            clusters=None,
        )

    def observe(self, out: ForwardOutput) -> Observed:
        """The hidden states, and the keys and values of its target layers."""
        assert out.hidden is not None
        sources = {self.target.kv_source_layer(layer) for layer in self.config.target_layers}
        return Observed(out.hidden, {layer: out.rows[layer] for layer in sources})

    def begin(self, params: Params, observed: Observed) -> Float[Array, "B T Et"]:
        """The target's hidden states."""
        return observed.hidden

    def forward(
        self, params: Params, tokens: Int[Array, "B T"], observed: Observed, carry: Float[Array, "B T Et"], step: int
    ) -> tuple[Float[Array, "B T V"], Float[Array, "B T Et"]]:
        """The carry is its own hidden states."""
        batch, length = tokens.shape
        rows = {layer: observed.rows[self.target.kv_source_layer(layer)] for layer in self.config.target_layers}
        cache = FrozenRows(rows, model.causal_attention(self.target, str(carry.dtype)))
        position = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
        read = ttt.shift(tokens, step + 1).reshape(-1, 1)
        hidden = carry.reshape(batch * length, 1, -1)
        out = self.config.apply(params, self.target, read, hidden, cache, position + 1, position)
        return out.logits.reshape(batch, length, -1), out.hidden.reshape(carry.shape)


def require_keys(target: Decoder) -> Decoder:
    """`target`, if an assistant can be trained for it: all layers have per-head keys and values, and no sinks."""
    if target.has_sinks:
        raise ValueError(
            "an assistant cannot be trained for a target whose attention has sinks yet, and the target is of type "
            f"{type(target).__name__}"
        )
    attends = len(target.attention_layers) == target.num_layers
    if attends and all(target.layer_keys(layer).latent is None for layer in range(target.num_layers)):
        return target
    raise ValueError(
        "an assistant can only be trained for a target whose layers all have per-head keys and values, "
        f"but the target is of type {type(target).__name__}"
    )


def default_reads(target: Decoder, count: int) -> tuple[int, ...]:
    """The target layers that an assistant of `count` layers reads: the last ones, in the target's order.

    If the target has layers of several kinds, they are the last layer of each kind, and the first of these repeats to
    make up the count: as in the assistants of Gemma 4, whose last layer reads full attention and the others a sliding
    window.
    """
    last = sorted({target.layer_keys(layer): layer for layer in range(target.num_layers)}.values())
    if not len(last) <= count <= target.num_layers:
        raise ValueError(
            f"num_layers={count}: must be between {len(last)} and {target.num_layers}; or name the layers in reads"
        )
    if len(last) > 1:
        return (*last[:1] * (count - len(last)), *last)
    return tuple(range(target.num_layers - count, target.num_layers))


def _spread(x: Float[Array, "*shape"]) -> Float[Array, ""]:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def _init_layer(shapes: PyTree, scale: float, keys: Iterator[Key[Array, ""]]) -> Gemma4LayerParams:
    """Random weights, with norms of 1, except that of queries if the target's `scale` leaves large products."""
    layer = model.init_layer(shapes, keys)
    (dim,) = shapes.q_norm.shape
    return dataclasses.replace(layer, q_norm=jnp.full(dim, dim**-0.5 / scale, jnp.float32))
