"""Checks the results of a user's drafter, rule or target while a program is traced.

Only types, shapes and dtypes are known then; `jspec.check_drafter`, `check_rule` and `check_target` check values.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jspec.core.types import Acceptance, DraftTree, ForwardOutput


def check_draft(drafter: object, result: object, batch: int, depth: int) -> tuple[DraftTree, PyTree]:
    """Check the tree and the state of `drafter.draft`; TypeError or ValueError for another type, shape or dtype."""
    name = f"{_name(drafter)}.draft"
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], DraftTree):
        raise TypeError(f"{name}: returns {_kinds(result)}; must return (jspec.core.types.DraftTree, state)")
    draft_tree, state = result
    tokens, parents = draft_tree.tokens, draft_tree.parents
    _check_integers(name, "tokens", tokens, (batch, None))
    if parents is not None:
        _check_integers(name, "parents", parents, tokens.shape)
    elif tokens.shape[1] - 1 > depth:
        raise ValueError(f"{name}: returns a chain of {tokens.shape[1] - 1} drafts; must have at most depth={depth}")
    if draft_tree.packed is not None and (parents is not None or draft_tree.limit is None):
        raise ValueError(f"{name}: returns packed={draft_tree.packed}; must be None but for a chain with a limit")
    return draft_tree, state


def check_output(target: Any, out: object, tokens: int) -> ForwardOutput:
    """Check the result of `target.forward`, with `tokens` rows of logits per sequence; TypeError or ValueError."""
    name = f"{_name(target)}.forward"
    if not isinstance(out, ForwardOutput):
        raise TypeError(f"{name}: returns {_kinds(out)}; must return a jspec.core.types.ForwardOutput")
    logits = out.logits
    if logits.ndim != 3 or logits.shape[1:] != (tokens, target.vocab_size) or logits.dtype != jnp.float32:
        raise ValueError(
            f"{name}: returns logits {describe(logits)}; must be float32[B, {tokens}, {target.vocab_size}]"
        )
    return out


def check_acceptance(rule: object, result: object, draft_tree: DraftTree) -> Acceptance:
    """Check the result of an acceptance rule; TypeError or ValueError for another type, shape or dtype."""
    name = getattr(rule, "__name__", type(rule).__name__)
    if not isinstance(result, Acceptance):
        raise TypeError(f"accept={name}: returns {_kinds(result)}; must return a jspec.core.types.Acceptance")
    batch = draft_tree.tokens.shape[0]
    _check_integers(f"accept={name}", "length", result.length, (batch,))
    _check_integers(f"accept={name}", "tokens", result.tokens, (batch, None))
    if result.tokens.shape[1] <= draft_tree.generations:
        raise ValueError(
            f"accept={name}: returns tokens {describe(result.tokens)}; must have a column for each of "
            f"{draft_tree.generations} drafts and for the token after them"
        )
    if result.path is not None:
        _check_integers(f"accept={name}", "path", result.path, (batch, None))
    elif draft_tree.parents is not None:
        raise ValueError(f"accept={name}: returns path=None for a tree; must be the accepted nodes")
    return result


def check_same_form(name: str, before: PyTree, after: PyTree) -> None:
    """Raises ValueError if the structure of a state, or a shape or dtype in it, has changed, so no loop can carry it.

    name: the function that returns it.
    """
    old, new = (
        {jax.tree_util.keystr(path): describe(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
        for state in (before, after)
    )
    for path in dict.fromkeys([*old, *new]):
        if old.get(path) != new.get(path):
            raise ValueError(
                f"{name}: returns a state of another form: {path or 'it'} is {new.get(path, 'missing')}, but was "
                f"{old.get(path, 'missing')}; must stay the same"
            )
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ValueError(
            f"{name}: returns a state of another form: it is {jax.tree.structure(after)}, but was "
            f"{jax.tree.structure(before)}; must stay the same"
        )


def check_unchanged(drafter: object, before: PyTree, after: PyTree) -> None:
    """Raises ValueError if `draft` of a branch returns another state, which would be lost."""
    old, new = (jax.tree.leaves(state) for state in (before, after))
    if len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True)):
        raise ValueError(f"{_name(drafter)}.draft: returns another state; a branch of a drafter must return s.draft")


def _check_integers(name: str, field: str, array: Any, shape: tuple[int | None, ...]) -> None:
    actual = getattr(array, "shape", ())
    fits = len(actual) == len(shape) and all(size in (length, None) for length, size in zip(actual, shape, strict=True))
    if not fits or not jnp.issubdtype(array.dtype, jnp.integer):
        expected = ", ".join("N" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: returns {field} {describe(array)}; must be int32[{expected}]")


def describe(leaf: Any) -> str:
    """The dtype and the shape of an array, for messages."""
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else f"of type {type(leaf).__name__}"


def _kinds(result: object) -> str:
    """The types of a result, for messages."""
    if isinstance(result, tuple):
        return f"({', '.join(_kinds(item) for item in result)})"
    return "an array" if isinstance(result, jax.Array) else type(result).__name__


def _name(part: object) -> str:
    return type(part).__name__
