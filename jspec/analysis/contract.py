"""Shared parts of `check_drafter`, `check_rule`, `check_target` and `verify`."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from tqdm.auto import tqdm

from jspec.core import stopping
from jspec.core.checks import check_flag
from jspec.core.types import Prompts, RowSampling
from jspec.generation.result import Generation
from jspec.loading.model import Model

Case = TypeVar("Case")
Out = TypeVar("Out")


def run_checks(
    function: str, name: str, case: Case, checks: Sequence[Callable[[Case], str]], disable: bool | None
) -> tuple[str, ...]:
    """Run the checks of a case in order; returns what each has shown.

    function: the public function, for the notes of errors.
    name: what is checked, for messages.
    disable: the result of `hidden`.

    Raises:
      AssertionError: the first failed check.
    """
    shown = []
    with tqdm(checks, unit="check", disable=disable) as bar:
        for check in bar:
            try:
                shown.append(check(case))
                if not bar.disable:
                    bar.write(f"  ok  {shown[-1]}", file=sys.stderr)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            except Exception as error:
                error.add_note(f"raised in {function}({name}(...)), by {check.__name__}")
                raise
    return tuple(shown)


def hidden(progress: object) -> bool | None:
    """The option `disable` of tqdm from `progress` of a checker, a bool, or None for progress in a terminal.

    Raises:
      TypeError: another value.
    """
    return None if progress is None else not check_flag("progress", progress)


def report(title: str, passed: Sequence[str], *summary: str) -> str:
    """The text of a report: a title, a line per passed check, and a summary."""
    return "\n".join([title, *(f"  ok  {check}" for check in passed), *summary])


def difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """The first index of a difference, perhaps the end of one sequence; None: they are equal."""
    if list(one) == list(other):
        return None
    shared = min(len(one), len(other))
    return next((i for i in range(shared) if one[i] != other[i]), shared)


def same_rounds(one: Generation, other: Generation) -> bool:
    """Whether two generations have the same tokens in the same rounds."""
    return one.tokens == other.tokens and one.tokens_per_round == other.tokens_per_round


def require(check: Callable[..., Out], *args: Any) -> Out:
    """Run a check of `jspec.core.returned`; its error becomes an AssertionError."""
    try:
        return check(*args)
    except (TypeError, ValueError) as error:
        raise AssertionError(str(error)) from None


def in_float32(model: Model) -> Model:
    """Cast the weights of a model to float32."""

    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return dataclasses.replace(model, params=jax.tree.map(cast, model.params))


def abstract_prompts(batch: int, width: int, sampling: RowSampling | None = None) -> Prompts:
    """Prompts for `jax.eval_shape`; only their shapes matter."""
    count, keys = jnp.zeros(batch, jnp.int32), jax.random.split(jax.random.key(0), batch)
    return Prompts(jnp.zeros((batch, width), jnp.int32), count, count, keys, stopping.init(None, batch), sampling)
