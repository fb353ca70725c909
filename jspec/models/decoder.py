"""What language models of all families share: how they read a token tree, and the way from tokens to logits."""

import abc
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.cache import LayerKeys
from jspec.core import tree
from jspec.core.types import DraftTree, ForwardOutput
from jspec.models import layers


class Decoder(abc.ABC):
    """A language model. A family is a frozen dataclass of static numbers with these methods, weights are arguments."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    mtp_layers: int = 0
    """MTP heads that its checkpoint holds."""
    drafter: ClassVar[str] = "standalone"
    """The drafter that such a model is the draft of."""

    @abc.abstractmethod
    def empty_cache(self, batch: int, capacity: int, page_size: int, dtype: Any) -> Any:
        """An empty cache for `batch` sequences of `capacity` rows."""

    def source(self, layer: int) -> int:
        """The layer whose keys and values `layer` reads: itself, unless it shares another's."""
        return layer

    @abc.abstractmethod
    def layer_keys(self, layer: int) -> LayerKeys:
        """The keys and values that a layer reads, its own or those of the layer whose it shares."""

    @abc.abstractmethod
    def layer_frequencies(self, layer: int) -> Float[Array, " half"]:
        """How those keys are rotated: radians a position, for each pair of dimensions."""

    @abc.abstractmethod
    def layer_scale(self, layer: int) -> float:
        """The factor on the products of queries and those keys."""

    @abc.abstractmethod
    def embed(self, params: Any, tokens: Int[Array, "B N"]) -> Float[Array, "B N E"]:
        """What the first layer reads."""

    @abc.abstractmethod
    def run_layers(
        self,
        params: Any,
        tokens: Int[Array, "B N"],
        x: Float[Array, "B N E"],
        positions: Int[Array, "#B #N"],
        attend: Any,
        earlier: Any,
        only: layers.Only | None,
    ) -> Iterator[tuple[Float[Array, "B N E"], Any]]:
        """Yields after each layer the residual stream, which begins as `x`, and the layer's rows of this round.

        attend: the cache's `attend`, given all but what a layer knows: (layer, q, k, v, scale=) of most caches.
        earlier: as in `apply`.
        only: where it is given, the last layer may yield the stream of these tokens alone, [B, 1, E], and saves what
          the others would take.
        """

    @abc.abstractmethod
    def norm(self, x: Float[Array, "B N E"], weight: Float[Array, " E"]) -> Float[Array, "B N E"]:
        """The family's norm of the residual stream, such as that between the last layer and the LM head."""

    @abc.abstractmethod
    def unembed(self, params: Any, normed: Float[Array, "B N E"]) -> Float[Array, "B N V"]:
        """The LM head alone: logits, in float32, of hidden states that have been through the final norm."""

    def mtp_layer(self) -> "Decoder":
        """The layer of an MTP head as a decoder of its own.

        Raises:
          ValueError: a family whose checkpoints hold none.
        """
        raise ValueError(f"checkpoints of a {type(self).__name__} hold no MTP heads")

    def init_cache(self, params: Any, batch: int, capacity: int, page_size: int) -> Any:
        """An empty cache for `batch` sequences of `capacity` rows, in the precision of `params`."""
        return self.empty_cache(batch, capacity, page_size, params.embed.dtype)

    def forward(
        self,
        params: Any,
        draft_tree: DraftTree,
        cache: Any,
        start: Int[Array, " B"] | None,
        *,
        capture_layers: tuple[int, ...] = (),
        select: Int[Array, " B"] | None = None,
    ) -> ForwardOutput:
        """Reads all nodes of a token tree whose root stands at position `start[b]`; writes nothing (see `apply`)."""
        positions = tree.depths(draft_tree)
        if start is not None:
            positions = start[:, None] + positions
        return self.apply(
            params,
            draft_tree.tokens,
            positions,
            cache,
            start,
            mask=tree.ancestor_mask(draft_tree),
            select=select,
            capture_layers=capture_layers,
        )

    def apply(
        self,
        params: Any,
        tokens: Int[Array, "B N"],
        positions: Int[Array, "#B #N"],
        cache: Any,
        start: Int[Array, " B"] | None,
        *,
        mask: Bool[Array, "#B N R"] | None = None,
        earlier: Any = None,
        select: Int[Array, " B"] | None = None,
        capture_layers: tuple[int, ...] = (),
    ) -> ForwardOutput:
        """One forward over N tokens a sequence, given the first `start[b]` committed rows of `cache`.

        Args:
          start: committed rows to attend to; None: none.
          mask: which of the round's R rows each token sees; None: all up to its own.
          earlier: R - N rows of this round from earlier forwards, before the N new ones.
          select: the only token of each sequence that is sent to the LM head; logits are then [B, 1, V].
          capture_layers: what is returned, concatenated in the order of the layers, as `hidden`: i < L for the input of
            layer i (the residual stream), L for the output of the last layer, L + 1 for the same after the final norm.

        Returns:
          logits in float32, the rows of this round ([B, R] of them), and the hidden states or None.
        """
        embedded = self.embed(params, tokens)
        attend = partial(cache.attend, start=start, mask=mask)
        rows, states = [], [embedded]
        only = (
            layers.Only.of(select, mask, tokens, earlier) if max(capture_layers, default=0) < self.num_layers else None
        )
        for state, own in self.run_layers(params, tokens, embedded, positions, attend, earlier, only):
            rows.append(own)
            states.append(state)
        x = states[-1]
        if len(rows) + 1 in capture_layers:
            states.append(self.norm(x, params.norm))
        if select is not None and x.shape[1] > 1:
            x = layers.take_token(x, select)
        logits = self.unembed(params, self.norm(x, params.norm))
        captured = [state for index, state in enumerate(states) if index in capture_layers]
        return ForwardOutput(logits, tuple(rows), jnp.concatenate(captured, axis=-1) if captured else None)
