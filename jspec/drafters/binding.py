"""What drafters with a draft model share: the checks of `bind`, and those before it."""

from typing import TypeVar

from jspec.core.checks import check_flag, check_int
from jspec.core.grow import check_shape
from jspec.core.types import DraftNeeds, Target
from jspec.models.draft import WindowedDraft

T = TypeVar("T")


def set_checked(drafter: object, **values: object) -> None:
    """Sets fields of a frozen drafter to values that were checked, for its `__post_init__`."""
    for name, value in values.items():
        object.__setattr__(drafter, name, value)


def check_options(drafter: object, *, depth: object, width: object, num_nodes: object, sampled: object) -> None:
    """Checks the options that all drafters with trees share, for their `__post_init__`.

    depth: its tokens, or those that None stands for.

    Raises:
      TypeError, ValueError: as `check_shape`; `sampled` is not a bool.
    """
    name = type(drafter).__name__
    depth, width, num_nodes = check_shape(name, depth, width, num_nodes)
    sampled = check_flag("sampled", sampled, owner=name)
    set_checked(drafter, width=width, num_nodes=num_nodes, sampled=sampled)
    if getattr(drafter, "depth", None) is not None:
        set_checked(drafter, depth=depth)


def check_window(drafter: object, *, window: object, keep_first: object) -> None:
    """Checks the options that narrow the draft's attention, for `__post_init__`.

    Raises:
      TypeError, ValueError: not counts of positions; first positions without a window, or more than it has.
    """
    name = type(drafter).__name__
    keep_first = check_int("keep_first", keep_first, least=0, owner=name)
    if window is not None:
        window = check_int("window", window, least=1, most=2**31 - 1, owner=name)
        if keep_first > window:
            raise ValueError(
                f"{name}(window={window}, keep_first={keep_first}): must keep no more positions than the window has"
            )
    elif keep_first:
        raise ValueError(f"{name}(keep_first={keep_first}): requires a window; without one, a draft sees all positions")
    set_checked(drafter, window=window, keep_first=keep_first)


def check_windowed(drafter: object, draft: object, *, window: int | None, keep_first: int) -> None:
    """Checks that the layers of a draft model can honor a drafter's window, for `bind`.

    Raises:
      ValueError: they cannot.
    """
    if window is None:
        return
    name, kind = type(drafter).__name__, type(draft).__name__
    if not isinstance(draft, WindowedDraft):
        raise ValueError(f"{name}(window={window}): a draft of type {kind} has no layer_windows, so no window")
    try:
        own = draft.layer_windows()
    except ValueError as error:
        raise ValueError(f"{name}(window={window}): a draft of type {kind} cannot have a window: {error}") from None
    if keep_first and None not in own:
        raise ValueError(
            f"{name}(keep_first={keep_first}): each layer of the draft has a sliding window of its own, which keeps no "
            "first positions; must be 0"
        )


def describe_loaded(draft: object) -> str:
    """The end of an error message about a draft of the wrong type."""
    return "but none is loaded" if draft is None else f"but the loaded draft is of type {type(draft).__name__}"


def check_made_for(name: str, target: Target, *, vocab_size: int, hidden_size: int) -> None:
    """Checks that a draft model fits its target.

    name: what the draft model is, for the message.
    vocab_size, hidden_size: those of the target that it was made for.

    Raises:
      ValueError: the target differs.
    """
    for field, wanted, given in (
        ("vocabulary", vocab_size, target.vocab_size),
        ("hidden size", hidden_size, target.hidden_size),
    ):
        if wanted != given:
            raise ValueError(f"the {name} was made for a target with {field} {wanted}, but this target has {given}")


def bound(drafter: object, part: T | None) -> T:
    """A field that `bind` sets.

    Raises:
      ValueError: the drafter is not bound.
    """
    if part is None:
        raise ValueError(f"this {type(drafter).__name__} is not bound: use what its bind(target, draft) returns")
    return part


def check_needs(drafter: object, width: int, needs: DraftNeeds) -> None:
    """Checks that trees of this width suit an acceptance rule.

    Raises:
      ValueError: the rule needs chains.
    """
    if needs.chains and width > 1:
        name = type(drafter).__name__
        raise ValueError(f"accept='block' judges chains only: give {name} width=1, or use another rule")
