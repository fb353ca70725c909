"""What the language models of all families share: reading a token tree, and the path from tokens to logits."""

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jspec.cache import HybridCache, LayerKeys, RecurrentLayer
from jspec.cache.narrow import check_kv
from jspec.core import tree
from jspec.core.pieces import Pieces
from jspec.core.sharding import check_split
from jspec.core.struct import leaf, struct
from jspec.core.types import Cache, DraftTree, ForwardOutput, Params
from jspec.models import layers
from jspec.models.draft import Draft
from jspec.models.layers import ForwardBatch, Reading
from jspec.models.moe import Routed
from jspec.models.sizes import keys_bytes, lm_head, tree_bytes
from jspec.models.stack import LayerShape
from jspec.models.weights import linear, plain


@struct
class ModelParams:
    """Weights of a language model."""

    embed: Float[Array, "V E"] = leaf(split=-2, if_even=True)
    layers: tuple[PyTree, ...]
    norm: Float[Array, " E"]
    lm_head: Float[Array, "E V"] | None = leaf(split=-1, if_even=True, linear=True, default=None)
    """None: the embedding is the LM head."""
    mtp: tuple[PyTree, ...] = ()
    """MTP heads, which draft for this target; its own forward does not read them."""
    ids: Int[Array, " Vd"] | None = None
    """Target ids of the columns of `lm_head`, in a draft with some of the target's tokens; None: all."""


class Decoder(LayerShape, Draft):
    """A language model. A family is a frozen dataclass of hyperparameters with these methods; weights are arguments.

    The defaults suit weights with `embed`, `layers`, `norm` and `lm_head` (None if the embedding is the LM head).
    """

    vocab_size: int
    max_length: int
    mtp_layers: int = 0
    """MTP heads in its checkpoint."""
    tie_embeddings: bool = False
    """Whether the embedding is the LM head."""
    drafter: ClassVar[str] = "standalone"
    exact_kernels: ClassVar[bool] = True
    """Whether GPUs have kernels for all parts of its exact forward, if it has one."""
    has_sinks: ClassVar[bool] = False
    """Whether its attention has sinks, see `paged_attention`."""

    @abc.abstractmethod
    def layer_keys(self, layer: int) -> LayerKeys:
        """The keys and values read by a layer: its own, or those it shares with another layer."""

    def run_layers(
        self, params: PyTree, x: Float[Array, "B N E"], batch: ForwardBatch
    ) -> Iterator[tuple[Float[Array, "B N E"], PyTree]]:
        """Yields, after each layer, the residual stream and the layer's rows of this round.

        x: the stream before the first layer. After the last one it may have the selected tokens only, [B, 1, E].
        """
        rotation = self.layer_rotation(0, batch.positions, x.dtype)
        for layer, reading in zip(params.layers, batch.readings(self.num_layers, self.exact), strict=True):
            x, rows = self.run_layer(layer, x, rotation, reading)
            yield x, rows

    def run_layer(
        self, layer: PyTree, x: Float[Array, "B N E"], rotation: layers.Rotation, reading: Reading
    ) -> tuple[Float[Array, "B M E"], PyTree]:
        """The residual stream after one layer, and the layer's rows of this round, including earlier ones.

        A family has this method, or `run_layers` if its layers differ in more than their weights.

        rotation: the angles of each token, see `Rope.rotation`.
        """
        raise NotImplementedError(f"models of type {type(self).__name__} have no layers")

    # Defaults

    @property
    def embed_factor(self) -> float:
        """The factor of `embed` on rows of the embedding."""
        return 1.0

    def layer_rotation(self, layer: int, positions: Int[Array, "#B #N"], dtype: DTypeLike) -> layers.Rotation:
        """How those keys are rotated at each position, see `Rope.rotation`."""
        return self.rope.rotation(positions, self.head_dim, dtype)

    def layer_scale(self, layer: int) -> float:
        """The factor on the products of queries and those keys."""
        return self.head_dim**-0.5

    def empty_cache(self, batch: int, capacity: int, page_size: int, dtype: DTypeLike) -> Cache:
        """An empty cache for `batch` sequences of up to `capacity` tokens: the part of one device, if it is split."""
        specs = [spec if isinstance(spec, int) else spec.split(self.tensor) for spec in self.cache_specs()]
        return HybridCache.empty(batch, capacity, page_size, layers=specs, dtype=dtype)

    def cache_specs(self) -> list[LayerKeys | RecurrentLayer | int]:
        """What a hybrid cache keeps of each layer: keys and values, a state, or the rows of another layer."""
        sources = map(self.kv_source_layer, range(self.num_layers))
        return [self.layer_keys(layer) if source == layer else source for layer, source in enumerate(sources)]

    def kv_source_layer(self, layer: int) -> int:
        """The layer whose keys and values `layer` reads: itself, unless it shares another's."""
        return layer

    @property
    def attention_layers(self) -> Sequence[int]:
        """The layers with attention to the whole context; the others keep a state of fixed size."""
        return range(self.num_layers)

    def split(self, devices: int) -> Self:
        """The configuration with heads, MLPs, experts and caches split over devices; experts within each expert.

        Raises:
          ValueError: the number does not divide the query heads or a width, or does not suit the heads of keys and
            values of some layer; or no model of the family can be split.
        """
        if not _has_field(type(self), "tensor"):
            return super().split(devices)
        keys = {layer: self.layer_keys(layer) for layer in self.attention_layers}
        # Layers with the same number of heads are alike.
        first = {layer.kv_heads: index for index, layer in reversed(keys.items()) if layer.latent is None}
        place = " in layer {}" if len(first) > 1 else ""
        copied = {f"heads of keys and values{place.format(first[count])}": count for count in sorted(first)}
        check_split(devices, {"heads": self.num_heads, **self.split_widths()}, copied)
        return dataclasses.replace(self, tensor=devices)  # pyright: ignore[reportArgumentType]  # a dataclass

    def split_widths(self) -> dict[str, int]:
        """What devices share besides heads of attention -> its size."""
        experts = [self.layer_experts(layer) for layer in range(self.num_layers)]
        routed = next(filter(None, experts), None)
        widths = {} if routed is None else {"columns of each expert": routed.width}
        return widths | ({"columns of the MLP": self.intermediate_size} if None in experts else {})

    def exactly(self) -> Self:
        """The configuration whose forward gives a token the same bits, whatever is read beside it.

        Neither the number of tokens, the shape of the tree, the batch nor the size of pages changes a bit of the hidden
        states and logits.

        Raises:
          ValueError: there is no such forward, or its cache is narrow.
        """
        if (problem := self.not_exact()) is not None:
            raise ValueError(f"exact=True: {problem}")
        return dataclasses.replace(self, exact=True)  # pyright: ignore[reportArgumentType]  # a dataclass

    def not_exact(self) -> str | None:
        """Why there is no such forward; None: there is one."""
        if not _has_field(type(self), "exact"):
            kinds = ", ".join(sorted(kind.__name__ for kind in _subclasses(Decoder) if _has_field(kind, "exact")))
            return f"models of type {type(self).__name__} have no exact forward yet; those of type {kinds} do"
        return None if self.kv is None else f"no exact forward with kv={self.kv!r} yet; omit one of them"

    def with_kv(self, kv: str) -> Self:
        """The configuration whose caches keep keys and values in a format of `jspec.cache.narrow.KV_FORMATS`.

        Raises:
          ValueError: an unknown format, caches of this family have none, or the forward is exact.
        """
        check_kv(kv)
        if not _has_field(type(self), "kv"):
            raise ValueError(f"kv={kv!r}: models of type {type(self).__name__} have no narrow cache yet; omit kv")
        if self.exact:
            raise ValueError(f"kv={kv!r}: no exact forward with a narrow cache yet; omit kv, or use exact=False")
        return dataclasses.replace(self, kv=kv)  # pyright: ignore[reportArgumentType]  # a dataclass

    def configured(self, *, exact: bool, kv: str | None) -> Self:
        """The configuration with or without an exact forward and with a narrow cache, as by `exactly` and `with_kv`."""
        config = self.exactly() if exact else self
        if self.exact and not exact:
            config = dataclasses.replace(self, exact=False)  # pyright: ignore[reportArgumentType]  # a dataclass
        return config if kv is None else config.with_kv(kv)

    def layer_experts(self, layer: int) -> Routed | None:
        """The experts of a layer; None if it has none."""
        return None

    def embed(self, params: PyTree, tokens: Int[Array, "B N"]) -> Float[Array, "B N E"]:
        """The input of the first layer."""
        return layers.look_up(params.embed, tokens, self.vocab_size, self.tensor)

    def norm(self, x: Float[Array, "*batch E"], weight: Float[Array, " E"]) -> Float[Array, "*batch E"]:
        """The family's norm of the residual stream, such as the one between the last layer and the LM head."""
        return self.ops.rms_norm(x, weight, self.rms_norm_eps)

    def unembed(self, params: PyTree, normed: Float[Array, "B N E"]) -> Float[Array, "B N V"]:
        """The LM head alone: logits in float32 of hidden states after the final norm."""
        size = self.vocab_size if (ids := self.ids(params)) is None else ids.size
        return self.ops.unembed(normed, params.embed, params.lm_head, size)

    def ids(self, params: PyTree) -> Int[Array, " Vd"] | None:
        """Target ids of its logits, as a draft of hot tokens; None: its own vocabulary."""
        return params.ids if isinstance(params, ModelParams) else None

    def mtp_layer(self) -> "Decoder":
        """The layer of an MTP head as a decoder of its own; ValueError if the family has no MTP heads."""
        raise ValueError(f"{type(self).__name__} checkpoints have no MTP heads")

    # Bytes

    def forward_bytes(self, params: PyTree, tokens: int = 1) -> int:
        """Bytes of weights read by one forward of `tokens` tokens: layers, norm and LM head.

        The embedding is a gather and does not count, unless it is the LM head. Of a mixture of experts, the average
        choice of the tokens counts, with equally likely experts.

        params: arrays or shapes.
        """
        return tree_bytes((params.layers, params.norm, lm_head(params))) - self.unread_expert_bytes(params, tokens)

    def unread_expert_bytes(self, params: PyTree, tokens: int) -> int:
        """Bytes of experts left out by a forward of `tokens` tokens, on average."""
        unread = 0.0
        for index, layer in enumerate(params.layers):
            routed = self.layer_experts(index)
            if routed is not None:
                unread += routed.unread_share(tokens) * tree_bytes((layer.experts.gate_up, layer.experts.down))
        return int(unread)

    def kv_bytes(self, context: int, itemsize: int, target: "Decoder | None" = None) -> int:
        """Bytes of keys and values read by one forward for a sequence of `context` tokens; see also `state_bytes`.

        If the model is split over devices, those of one of them.

        target: ignored; as a draft, a language model reads its own keys.
        """
        return keys_bytes(map(self.layer_keys, self.attention_layers), context, itemsize, self.tensor)

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of the states of fixed size of a sequence, on one device if the model is split."""
        return 0

    def logit_bytes(self, batch: int, capacity: int) -> int:
        """Bytes of logits computed by each forward for all of `capacity` tokens; 0: only those of the new ones."""
        return 0

    def outline(self) -> str:
        """The sizes of the model in a few words."""
        return f"{self.num_layers} layers, width {self.hidden_size}"

    # As a draft: see `models.draft`

    def layer_windows(self) -> Sequence[int | None]:
        """For each layer, the positions a token sees, its own included, or None: all; ValueError without such keys."""
        if len(self.attention_layers) < self.num_layers:
            raise ValueError("some of its layers keep a state of fixed size instead of a row for each position")
        keys = [self.layer_keys(layer) for layer in range(self.num_layers)]
        if any(layer.latent is not None for layer in keys):
            raise ValueError("attention to its latent keys has no windows")
        return [layer.window for layer in keys]

    def summary(self) -> str:
        """The draft in a few words."""
        return f"{'parallel ' if self.at_once else ''}draft of {self.num_layers} layers"

    def step_bytes(self, params: Params) -> int:
        """Bytes of weights read by one forward while drafting."""
        draft = params.draft  # At once, all but the LM head is read after the round before.
        return tree_bytes(lm_head(draft)) if self.at_once else self.forward_bytes(draft)

    def extend_bytes(self, params: Params) -> int:
        """Bytes of weights read after a round."""
        return self.forward_bytes(params.draft) - (self.step_bytes(params) if self.at_once else 0)

    # The forward

    @property
    def packs(self) -> bool:
        """Whether `forward` reads pieces of prompts (`jspec.core.pieces`): if its layers have keys of heads."""
        layers = range(self.num_layers)
        return len(self.attention_layers) == len(layers) and all(self.layer_keys(i).latent is None for i in layers)

    @property
    def packs_nodes(self) -> bool:
        """Whether it verifies packed nodes (`jspec.core.ragged`): if all layers attend, without an indexer."""
        return len(self.attention_layers) == self.num_layers and getattr(self, "indexer", None) is None

    @property
    def refuses_embeds(self) -> str | None:
        """Why a prompt cannot hold embeddings; None: it can."""
        if getattr(getattr(self, "rope", None), "sections", False):
            return "has positions in several dimensions (mrope)"
        return None

    def init_cache(self, params: PyTree, batch: int, capacity: int, page_size: int) -> Cache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, in the precision of `params`."""
        return self.empty_cache(batch, capacity, page_size, params.embed.dtype)

    def forward(
        self,
        params: PyTree,
        draft_tree: DraftTree,
        cache: PyTree,
        start: Int[Array, " B"] | None,
        *,
        capture_layers: tuple[int, ...] = (),
        select: Int[Array, " B"] | None = None,
        pieces: Pieces | None = None,
    ) -> ForwardOutput:
        """Reads all nodes of a token tree whose root is at position `start[b]`; writes nothing (see `apply`).

        pieces: of prompts, see `packs`.
        """
        # A node has the position of its depth.
        positions = tree.depths(draft_tree)
        if start is not None:
            positions = start[:, None] + positions
        mask = tree.ancestor_mask(draft_tree)
        options = {"mask": mask, "select": select, "embeds": draft_tree.embeds, "pieces": pieces}
        batch = ForwardBatch(draft_tree.tokens, positions, cache, start, **options)
        return self.apply(params, batch, capture_layers=capture_layers)

    def apply(self, params: PyTree, batch: ForwardBatch, *, capture_layers: tuple[int, ...] = ()) -> ForwardOutput:
        """One forward over the tokens of a batch.

        capture_layers: what is returned, concatenated in layer order, as `hidden`: i < L for the input of layer i
          (the residual stream), L for the output of the last layer, L + 1 for that output after the final norm.

        Returns:
          logits in float32, of the selected tokens or of all, the rows of this round ([B, R] of them), and the hidden
          states or None.
        """
        embedded = self.embed(params, batch.tokens)
        if batch.embeds is not None:
            rows = batch.embeds.rows.astype(embedded.dtype)
            embedded = jnp.where(batch.embeds.mask[:, :, None], rows, embedded)
        rows, states = [], [embedded]
        # The last layer's output is needed for all tokens if it is captured.
        captures_last = max(capture_layers, default=0) >= self.num_layers
        for state, layer_rows in self.run_layers(params, embedded, batch.of_all() if captures_last else batch):
            rows.append(layer_rows)
            states.append(state)
        x = states[-1]
        if len(rows) + 1 in capture_layers:
            states.append(self.norm(x, params.norm))
        # Logits, of the selected token only if one is.
        logits = self.unembed(params, self.norm(batch.take(x), params.norm))
        captured = [state for index, state in enumerate(states) if index in capture_layers]
        return ForwardOutput(logits, tuple(rows), jnp.concatenate(captured, axis=-1) if captured else None)


def model_weights(config: Decoder, layers: Iterable[PyTree], root: str = "model.", **entries: Any) -> ModelParams:
    """The table of a model with these layers.

    root: with what the names of tensors begin.
    entries: other ones than those here.
    """
    width, vocabulary = config.hidden_size, config.vocab_size
    usual = {
        "embed": plain(root + "embed_tokens.weight", vocabulary, width),
        "norm": plain(root + "norm.weight", width),
        "lm_head": None if config.tie_embeddings else linear(width, {"lm_head.weight": vocabulary}),
    }
    return ModelParams(layers=tuple(layers), **usual | entries)


def _has_field(kind: type, name: str) -> bool:
    return name in getattr(kind, "__dataclass_fields__", {})


def _subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
