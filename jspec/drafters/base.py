"""Base of drafters with a draft model: their options, checks of `bind`, and optional members."""

import dataclasses
from typing import Any, ClassVar, Self, TypeVar

from jspec.cache.window import within
from jspec.core.checks import check_flag, check_int
from jspec.core.grow import Shape
from jspec.core.types import Drafter, DraftNeeds, Target
from jspec.models.draft import WindowedDraft

T = TypeVar("T")


def set_checked(drafter: object, **values: object) -> None:
    """Sets fields of a frozen drafter to checked values, in its `__post_init__`."""
    for name, value in values.items():
        object.__setattr__(drafter, name, value)


def bound(drafter: object, part: T | None) -> T:
    """A field set by `bind`.

    Raises:
      ValueError: the drafter is not bound.
    """
    if part is None:
        raise ValueError(f"this {type(drafter).__name__} is not bound: use what its bind(target, draft) returns")
    return part


def check_needs(drafter: object, width: int, needs: DraftNeeds) -> None:
    """Checks the width of trees against an acceptance rule.

    Raises:
      ValueError: the rule needs chains.
    """
    if needs.chains and width > 1:
        name = type(drafter).__name__
        raise ValueError(f"accept='block' judges chains only: give {name} width=1, or use another rule")


class ModelDrafter:
    """Base of `Eagle`, `Block`, `Standalone`, `Mtp` and `FrozenKvMtp`.

    Subclasses are frozen dataclasses with some of these options, and with `target` and `model`, set by `bind`. Of the
    optional members of drafters (`jspec.core.optional`) it has `adapt`, `shares` and `further`.
    """

    depth: Any
    width: int
    num_nodes: int | None
    sampled: bool
    window: int | None = None
    keep_first: int = 0
    target: Any = None
    model: Any = None

    shared_options: ClassVar[tuple[str, ...]] = ("target", "model", "sampled", "window", "keep_first")
    """Options that must be equal for `draft` to work with the state of another drafter of the class."""
    further: ClassVar[int] = 0
    """No extra rows: as many as in the target's cache."""

    @property
    def shape(self) -> Shape:
        """The shape of its trees."""
        return Shape(self.depth, self.width, self.num_nodes)

    def seen(self, cache: Any) -> Any:
        """The part of its cache visible to the draft."""
        return within(cache, self.window, self.keep_first)

    def adapt(self, needs: DraftNeeds) -> Self:
        """Samples the drafts if the acceptance rule requires it."""
        check_needs(self, self.width, needs)
        return dataclasses.replace(self, sampled=self.sampled or needs.sampled)  # pyright: ignore[reportArgumentType]

    def shares(self, other: Drafter) -> bool:
        """Whether `draft` works with the state of another one: with these options, and at least as wide."""
        if not isinstance(other, type(self)):
            return False
        alike = all(getattr(self, name) == getattr(other, name) for name in self.shared_options)
        return alike and self.width <= other.width

    # Checks, for `__post_init__` and `bind`

    def check_shape(self, depth: int) -> None:
        """Checks the options of trees.

        depth: tokens of the longest chain, None replaced by its default.

        Raises:
          TypeError, ValueError: as `Shape.checked`; `sampled` is not a bool.
        """
        name = type(self).__name__
        # Checked values replace the given ones.
        shape = Shape.checked(name, depth, self.width, self.num_nodes)
        sampled = check_flag("sampled", self.sampled, owner=name)
        set_checked(self, width=shape.width, num_nodes=shape.num_nodes, sampled=sampled)
        if self.depth is not None:
            set_checked(self, depth=shape.depth)

    def check_window(self) -> None:
        """Checks the options of the draft's window.

        Raises:
          TypeError, ValueError: not counts of positions; first positions without a window, or more than it has.
        """
        name = type(self).__name__
        window, keep_first = self.window, check_int("keep_first", self.keep_first, least=0, owner=name)
        if window is not None:
            window = check_int("window", window, least=1, most=2**31 - 1, owner=name)
            if keep_first > window:
                raise ValueError(
                    f"{name}(window={window}, keep_first={keep_first}): must keep no more positions than the window has"
                )
        elif keep_first:
            raise ValueError(
                f"{name}(keep_first={keep_first}): requires a window; without one, a draft sees all positions"
            )
        set_checked(self, window=window, keep_first=keep_first)

    def check_kind(self, draft: object, kind: type[T], needs: str, hint: str = 'jspec.load(..., draft="...")') -> T:
        """The configuration of the draft model, of this class or with this protocol.

        needs, hint: what the drafter needs, and how to get it, for the message.

        Raises:
          ValueError: it is another one, or None.
        """
        if isinstance(draft, kind):
            return draft
        loaded = "none is loaded" if draft is None else f"the loaded draft is of type {type(draft).__name__}"
        raise ValueError(f"drafter {type(self).__name__} needs {needs}, but {loaded}: {hint}")

    def check_windowed(self, draft: object) -> None:
        """Checks the layers of a draft model against the window.

        Raises:
          ValueError: they cannot.
        """
        if self.window is None:
            return
        name, kind = type(self).__name__, type(draft).__name__
        if not isinstance(draft, WindowedDraft):
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
    """Checks a draft model against its target.

    name: what the draft model is, for the message.
    vocab_size, hidden_size: of the target it was made for.

    Raises:
      ValueError: the target differs.
    """
    sizes = ("vocabulary", vocab_size, target.vocab_size), ("hidden size", hidden_size, target.hidden_size)
    for field, size, actual in sizes:
        if size != actual:
            raise ValueError(f"the {name} was made for a target with {field} {size}, but this target has {actual}")


def check_reads(name: str, target: Target, layers: tuple[int, ...]) -> None:
    """Checks the layers of the target read by a draft model.

    Raises:
      ValueError: they do not ascend, or the target has no such layers.
    """
    last = target.num_layers + 1
    if list(layers) != sorted(set(layers)) or not all(0 <= layer <= last for layer in layers):
        raise ValueError(f"the {name} reads the layers {layers}: they must ascend, from 0 to {last}")
