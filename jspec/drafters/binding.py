"""What drafters with a draft model share: the checks of `bind`, and those before it."""

from typing import TypeVar

from jspec.core.checks import check_flag
from jspec.core.grow import check_shape
from jspec.core.types import DraftNeeds, Target

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
