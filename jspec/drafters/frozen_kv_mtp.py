"""Frozen-KV MTP: an assistant that reads the target's keys and values, and has none of its own.

Gemma 4's assistants are such drafts, and any model of `jspec.models.Assistant` is. The order of a round is that of
SGLang's frozen-KV MTP; its positions, too.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.grow import check_shape, grow, take_parents
from jspec.core.propose import propose
from jspec.core.tree import where_rows
from jspec.core.types import Committed, DecodeState, DraftTree, Frontier, Params, Proposal
from jspec.models import Assistant

POSITIONS = ("committed", "root")
"""Where an assistant stands: at the last committed row, as in SGLang and vLLM, or at the root, as in transformers."""


@dataclasses.dataclass(frozen=True)
class FrozenKvMtp:
    """Proposes with an assistant. Its state is one hidden vector: the target's at the last committed row.

    Each generation is one forward, the first one's included, which reads the root and that vector; the others read
    their nodes and what the forward before returned. All stand at one position, attend to the same frozen prefix and
    write nothing.

    depth: tokens of the longest chain, at least 1.
    width: children of a node at most, and nodes that are expanded in a generation; 1 is a chain.
    num_nodes: nodes of the tree, root included; None: 32, or as many as there can be.
    sampled: propose draws from the assistant's own law, as the rule "rejection" is at its best with.
    position: one of `POSITIONS`. Drafts may differ, and so the speed; the output does not.
    target, model: the configurations of the target and of the assistant; `bind` sets them.
    """

    depth: int = 5
    width: int = 1
    num_nodes: int | None = None
    sampled: bool = False
    position: str = "committed"
    target: Any = None
    model: Any = None

    def __post_init__(self):
        check_shape("FrozenKvMtp", self.depth, self.width, self.num_nodes)
        if self.position not in POSITIONS:
            raise ValueError(f"FrozenKvMtp(position={self.position!r}): give one of {', '.join(map(repr, POSITIONS))}")

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The target's hidden state after its final norm; of which layer is not known before `bind`."""
        return () if self.target is None else (self.target.num_layers + 1,)

    def bind(self, target, draft) -> "FrozenKvMtp":
        """Takes the assistant's configuration; it must have been made for a target of this shape."""
        if not isinstance(draft, Assistant):
            given = "none is loaded" if draft is None else f"a {type(draft).__name__} is loaded"
            raise ValueError(
                f'drafter FrozenKvMtp needs an assistant as draft, and {given}: jspec.load(..., draft="...")'
            )
        for name, ours, theirs in (
            ("vocabulary", draft.vocab_size, target.vocab_size),
            ("hidden size", draft.target_hidden_size, target.hidden_size),
        ):
            if ours != theirs:
                raise ValueError(
                    f"the assistant was made for a target with {name} {ours}, and this target's is {theirs}"
                )
        for layer, head_dim in zip(draft.reads, draft.head_dims, strict=True):
            if not 0 <= layer < target.num_layers:
                raise ValueError(
                    f"the assistant reads layer {layer}, and this target has the layers 0 to {target.num_layers - 1}"
                )
            keys = target.layer_keys(layer)
            if keys.latent is not None:
                raise ValueError(f"the assistant reads layer {layer}, which keeps latents there, no keys of heads")
            if keys.head_dim != head_dim or draft.num_heads % keys.kv_heads:
                raise ValueError(
                    f"the assistant reads layer {layer} with {draft.num_heads} heads of dimension {head_dim}, and this "
                    f"target has {keys.kv_heads} key heads of dimension {keys.head_dim} there"
                )
        if self.width > draft.candidates:
            raise ValueError(
                f"FrozenKvMtp(width={self.width}): the assistant gives {draft.candidates} tokens of the vocabulary a "
                "logit"
            )
        return dataclasses.replace(self, target=target, model=draft)

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> Float[Array, "B 1 E"]:
        """Zeros, which stand for the target's hidden state where nothing is committed."""
        return jnp.zeros((batch, 1, self.model.target_hidden_size), params.target.embed.dtype)

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, Float[Array, "B 1 E"]]:
        """One forward a generation."""
        return self.grow_from(params, s, *self.seed(params, s, s.draft)), s.draft

    def seed(
        self, params: Params, s: DecodeState, hidden: Float[Array, "B 1 E"]
    ) -> tuple[Float[Array, "B 1 E"], Proposal]:
        """The first generation: what the root's forward returns for the next one, and its children.

        hidden: the drafter's state.
        """
        frontier = Frontier(s.root, None, None, jnp.zeros((*s.root.shape, 0), jnp.int32))
        return self._step(params, s, hidden, frontier)

    def grow_from(self, params: Params, s: DecodeState, hidden: Float[Array, "B 1 E"], first: Proposal) -> DraftTree:
        """The tree, given what `seed` has made."""
        shape = {"depth": self.depth, "width": self.width, "num_nodes": self.num_nodes}
        return grow(
            s.root[:, 0], first, lambda hidden, frontier: self._step(params, s, hidden, frontier), hidden, **shape
        )

    def _step(self, params: Params, s: DecodeState, hidden, frontier: Frontier) -> tuple[Array, Proposal]:
        committed = s.length - 1
        position = committed if self.position == "root" else jnp.maximum(committed - 1, 0)
        before = take_parents(hidden, frontier)
        out = self.model.apply(params, self.target, frontier.tokens, before, s.cache, committed, position)
        vocabulary = self.target.vocab_size
        shape = {"width": self.width, "vocab_size": vocabulary, "ids": out.ids, "sampled": self.sampled}
        return out.hidden, propose(s, out.logits, frontier.path, **shape)

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> Float[Array, "B 1 E"]:
        """Keeps the target's hidden state at the last committed row."""
        assert committed.hidden is not None
        last = jnp.maximum(committed.length - 1, 0)
        hidden = jnp.take_along_axis(committed.hidden, last[:, None, None], axis=1, mode="clip")
        return where_rows(committed.length > 0, hidden, s.draft)
