"""Shared parts of `check_drafter`, `check_rule` and `check_target`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from tqdm.auto import tqdm

from jspec.core import stopping
from jspec.core.types import Prompts, RowSampling
from jspec.engine.model import Model

Case = TypeVar("Case")


def run_checks(
    function: str, name: str, case: Case, checks: Sequence[Callable[[Case], str]], progress: bool
) -> tuple[str, ...]:
    """Run the checks of a case in order; returns what each has shown.

    function: the public function, for the notes of errors.
    name: what is checked, for messages.

    Raises:
      AssertionError: the first failed check.
    """
    shown = []
    with tqdm(checks, unit="check", disable=not progress) as bar:
        for check in bar:
            try:
                shown.append(check(case))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            except Exception as error:
                error.add_note(f"raised in {function}({name}(...)), by {check.__name__}")
                raise
    return tuple(shown)


def report(title: str, passed: Sequence[str], *summary: str) -> str:
    """The text of a report: a title, a line per passed check, and a summary."""
    return "\n".join([title, *(f"  ok  {check}" for check in passed), *summary])


def check_same_form(returns: str, before: PyTree, after: PyTree) -> None:
    """Check that a state or a cache keeps its structure, shapes and dtypes.

    returns: the beginning of the message, such as "draft returns a state of another form".

    Raises:
      AssertionError: it does not.
    """
    old, new = (
        {jax.tree_util.keystr(path) or "the state": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
        for state in (before, after)
    )
    for name in dict.fromkeys([*old, *new]):
        was, is_now = describe(old.get(name)), describe(new.get(name))
        if was != is_now:
            raise AssertionError(f"{returns}: {name} is {is_now}, but was {was}")
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise AssertionError(f"{returns}: it is {jax.tree.structure(after)}, but was {jax.tree.structure(before)}")


def describe(leaf: Any) -> str:
    """The dtype and the shape of an array, for messages."""
    return "missing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"


def in_float32(model: Model) -> Model:
    """Cast the weights of a model to float32."""

    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return dataclasses.replace(model, params=jax.tree.map(cast, model.params))


def abstract_prompts(batch: int, width: int, sampling: RowSampling | None = None) -> Prompts:
    """Prompts for `jax.eval_shape`; only their shapes matter."""
    count, keys = jnp.zeros(batch, jnp.int32), jax.random.split(jax.random.key(0), batch)
    return Prompts(jnp.zeros((batch, width), jnp.int32), count, count, keys, stopping.init(None, batch), sampling)
