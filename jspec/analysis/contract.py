"""Shared parts of `check_drafter`, `check_rule`, `check_target` and `verify`."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from tqdm.auto import tqdm

from jspec.core import stopping
from jspec.core.checks import check_flag
from jspec.core.types import Prompts, RowSampling
from jspec.loading.model import Model

Out = TypeVar("Out")


class Outcome(NamedTuple):
    """The verdict of a case, what was compared, and a message; see `jspec.analysis.verify.Finding`."""

    verdict: Any
    compared: int = 0
    message: str = ""


class Case(NamedTuple):
    """What a check runs: its name, and the function; it may raise AssertionError, and None means passed.

    quick: whether it runs the programs of the case before it, so that it is better run at once.
    """

    name: str
    run: Callable[[], Outcome | None]
    quick: bool = False


Cases = Iterator[Case]


def run_cases(function: str, name: str, cases: Iterable[Case], disable: bool | None) -> tuple[str, ...]:
    """Run cases in order; returns their names, or their messages. AssertionError if one has not passed.

    function, name: the public function, and what is checked, for messages.
    disable: the result of `hidden`.
    """
    shown = []
    with tqdm(list(cases), unit="check", disable=disable) as bar:
        for case in bar:
            try:
                outcome = case.run() or Outcome("passed")
                if outcome.verdict != "passed":
                    raise AssertionError(outcome.message)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            except Exception as error:
                error.add_note(f"raised in {function}({name}(...)): {case.name}")
                raise
            shown.append(outcome.message or case.name)
            if not bar.disable:
                bar.write(f"  ok  {shown[-1]}", file=sys.stderr)
    return tuple(shown)


def hidden(progress: object) -> bool | None:
    """The option `disable` of tqdm, from `progress` of a checker; None: in a terminal. TypeError if it is no bool."""
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


def depths_of(parents: Sequence[int]) -> list[int]:
    """Generations between each node and the root; a parent comes before its children."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root (excluded) to a node (included)."""
    return [*path_to(parents, int(parents[node])), int(node)] if node else []


def check_hashed(value: object, what: str) -> None:
    """Raises AssertionError if a static argument has no hash, or one of its identity."""
    try:
        hash(value)
    except TypeError as error:
        raise AssertionError(f"{error}: {what} is a static argument, so make it a frozen dataclass") from None
    if type(value).__hash__ is object.__hash__:
        raise AssertionError(
            "it is hashed by identity, so each new object compiles its programs again: make it a frozen dataclass"
        )


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
