"""Bases of drafters: the options, the checks and the optional members that several have in common."""

import dataclasses
from typing import Any, ClassVar, Generic, Self, TypeVar

from jaxtyping import Array, Float, Int, PyTree

from jspec.cache.window import within
from jspec.core.grow import Shape
from jspec.core.options import check_options, option, set_checked
from jspec.core.propose import propose
from jspec.core.types import DRAFTER_PARTS, Committed, DecodeState, Drafter, DraftNeeds, Params, Proposal, Target

MAX_DEPTH = 127
"""Tokens of the longest chain: the depth of an accepted draft is recorded in 8 bits, `DecodeState.origin`."""

M = TypeVar("M")
T = TypeVar("T")


def bound(drafter: object, part: T | None) -> T:
    """A field set by `bind`; ValueError before."""
    if part is None:
        raise ValueError(f"this {type(drafter).__name__} is not bound: use what its bind(target, draft) returns")
    return part


def check_drafter(name: str, drafter: object) -> None:
    """Raises TypeError unless `drafter` is one. name: of the argument, for the message."""
    if isinstance(drafter, type):
        raise TypeError(f"{name}={drafter.__name__} is not a drafter: give an object, not a class")
    # Not `hasattr`, which would evaluate `capture_layers`, and that may raise before `bind`.
    missing = [part for part in DRAFTER_PARTS if part not in dir(drafter)]
    if missing:
        raise TypeError(f"{name}={type(drafter).__name__} is not a drafter: it has no {', '.join(missing)}")


def check_needs(drafter: object, width: int, needs: DraftNeeds) -> None:
    """Raises ValueError if an acceptance rule needs chains, and trees are wider."""
    if needs.chains and width > 1:
        name = type(drafter).__name__
        raise ValueError(f"accept='block' judges chains only: give {name} width=1, or use another rule")


class TokenDrafter:
    """Base of `Plain`, `Ngram` and `Suffix`, which work with any target and need no weights.

    Subclasses are frozen dataclasses of options. Unless they override it, they have no state.
    """

    capture_layers = ()

    def __post_init__(self):
        check_options(self, type(self).__name__)

    def bind(self, target: Target, draft: object) -> Self:
        """Works with any target."""
        return self

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> Any:
        """No state."""
        return None

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> Any:
        """No-op."""
        return None


@dataclasses.dataclass(frozen=True)
class ModelDrafter(Generic[M]):
    """Base of the drafters with a draft model, and the options of all of them.

    Of the optional members of drafters (`jspec.core.optional`) it has `adapt`, `shares`, `further` and `resume`.

    depth: tokens of the longest chain, from 1 to 64.
    width: maximum children of a node, and nodes expanded per generation, from 1, a chain, to 64.
    num_nodes: nodes of the tree, root included; None: 32, or fewer if fewer are proposed.
    sampled: sample the drafts from the draft's own distribution, as "rejection" and "block" need.
    scored: estimate the acceptance of chains, too, as `Pruned` needs.
    target, model: the configurations of the target and of the draft; set by `bind`.
    """

    depth: Any
    width: int = 1
    num_nodes: int | None = None
    sampled: bool = option(False)
    scored: bool = option(False)
    target: Target | None = None
    model: M | None = None

    shared_options: ClassVar[tuple[str, ...]] = ("target", "model", "sampled", "scored")
    """Options that must be equal for `draft` to work with the state of another drafter of the class."""
    further: ClassVar[int] = 0
    """No extra rows: as many as in the target's cache."""

    def __post_init__(self):
        name = type(self).__name__
        check_options(self, name)
        if self.depth is None and type(self).depth is None:  # `bind` sets the depth, and checks the number of nodes.
            set_checked(self, width=Shape.checked(name, 1, self.width, None).width)
        else:
            set_checked(self, **vars(Shape.checked(name, self.depth, self.width, self.num_nodes)))

    @property
    def shape(self) -> Shape:
        """The shape of its trees."""
        return Shape(self.depth, self.width, self.num_nodes)

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The hidden state after the target's final norm, read by the draft; ValueError before `bind`."""
        return (self._target.num_layers + 1,)

    def adapt(self, needs: DraftNeeds) -> Self:
        """Samples the drafts if the acceptance rule requires it."""
        check_needs(self, self.width, needs)
        return dataclasses.replace(self, sampled=self.sampled or needs.sampled)

    def shares(self, other: Drafter) -> bool:
        """Whether this drafter can draft from the state of another: equal `shared_options`, and no wider.

        If one forward drafts all tokens, it must be no deeper, too.
        """
        if not isinstance(other, type(self)):
            return False
        alike = all(getattr(self, name) == getattr(other, name) for name in self.shared_options)
        deep = self.depth <= other.depth or not getattr(self.model, "at_once", False)
        return alike and deep and self.width <= other.width

    def resume(self, state: PyTree, slots: Int[Array, " n"], length: Int[Array, " n"]) -> PyTree:
        """Itself: the next `extend` sets all but the cache."""
        return state

    def propose(
        self, s: DecodeState, logits: Float[Array, "B M Vd"], path: Int[Array, "B M g"], ids: Array | None = None
    ) -> Proposal:
        """The children of nodes, from the draft's logits (`jspec.core.propose.propose`)."""
        vocabulary, ranking = self._target.vocab_size, {"sampled": self.sampled, "scored": self.scored}
        return propose(s, logits, path, width=self.width, vocab_size=vocabulary, ids=ids, **ranking)

    @property
    def _target(self) -> Target:
        return bound(self, self.target)

    @property
    def _model(self) -> M:
        return bound(self, self.model)

    # Checks, for `bind`

    def check_kind(
        self, draft: object, kind: type[T] | tuple[type[T], ...], needs: str, hint: str = 'jspec.load(..., draft="...")'
    ) -> T:
        """The configuration of the draft model, of this class or of one of these; ValueError if it is another one.

        needs, hint: the kind of draft, and how to get one, for the message.
        """
        if isinstance(draft, kind):
            return draft
        loaded = "none is loaded" if draft is None else f"the loaded draft is of type {type(draft).__name__}"
        raise ValueError(f"drafter {type(self).__name__} needs {needs}, but {loaded}: {hint}")

    def check_width(self, tokens: int, name: str) -> None:
        """Raises ValueError if a node has more children than the draft has tokens, called `name` in the message."""
        if self.width > tokens:
            raise ValueError(f"{type(self).__name__}(width={self.width}): must be at most {tokens}, {name}")


@dataclasses.dataclass(frozen=True)
class WindowedDrafter(ModelDrafter[M]):
    """Base of the drafters whose draft has a cache that may be read within a window; further options.

    window: last positions visible to the draft, its own included; None: all. Attention reads fewer rows, as in training
      (arXiv 2605.09992). Other drafts may be proposed; the text and the memory stay the same.
    keep_first: first positions visible in addition, from 0 to `window` (the attention sinks of StreamingLLM, arXiv
      2309.17453). Sliding-window layers keep none.
    """

    window: int | None = option(None, least=1, most=2**31 - 1)
    keep_first: int = option(0, least=0)

    shared_options: ClassVar[tuple[str, ...]] = (*ModelDrafter.shared_options, "window", "keep_first")

    def __post_init__(self):
        super().__post_init__()
        name, window, first = type(self).__name__, self.window, self.keep_first
        if first and window is None:
            raise ValueError(f"{name}(keep_first={first}): requires a window; without one, a draft sees all positions")
        if window is not None and first > window:
            raise ValueError(f"{name}(window={window}, keep_first={first}): must keep no more positions than it has")

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Layers of the target read by the draft; ValueError before `bind`."""
        model: Any = self._model
        return model.capture_layers

    def seen(self, cache: Any) -> Any:
        """The part of its cache visible to the draft."""
        return within(cache, self.window, self.keep_first)

    def check_features(self, draft: Any, target: Target, name: str) -> None:
        """Raises ValueError unless a draft model that reads hidden states suits the target and the options.

        name: the kind of draft model, for the message.
        """
        check_made_for(name, target, vocab_size=draft.vocab_size, hidden_size=draft.target_hidden_size)
        layers, last = draft.capture_layers, target.num_layers + 1
        if list(layers) != sorted(set(layers)) or not all(0 <= layer <= last for layer in layers):
            raise ValueError(f"the {name} reads the layers {layers}: they must ascend, from 0 to {last}")
        self.check_width(draft.draft_vocab_size, f"the vocabulary of the {name}")
        self.check_windowed(draft)

    def check_windowed(self, draft: Any) -> None:
        """Raises ValueError if the layers of a draft model cannot have the window."""
        if self.window is None:
            return
        name, kind = type(self).__name__, type(draft).__name__
        if not hasattr(draft, "layer_windows"):
            raise ValueError(f"{name}(window={self.window}): a draft of type {kind} has no layer_windows, so no window")
        try:
            windows = draft.layer_windows()
        except ValueError as error:
            message = f"{name}(window={self.window}): a draft of type {kind} cannot have a window: {error}"
            raise ValueError(message) from None
        if self.keep_first and None not in windows:
            raise ValueError(
                f"{name}(keep_first={self.keep_first}): each layer of the draft has a sliding window of its own, which "
                "keeps no first positions; must be 0"
            )


def check_made_for(name: str, target: Target, *, vocab_size: int, hidden_size: int) -> None:
    """Raises ValueError if a draft model, of the kind `name`, was made for a target with other sizes than these."""
    sizes = ("vocabulary", vocab_size, target.vocab_size), ("hidden size", hidden_size, target.hidden_size)
    for field, size, actual in sizes:
        if size != actual:
            raise ValueError(f"the {name} was made for a target with {field} {size}, but this target has {actual}")
