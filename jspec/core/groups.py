"""Data parallelism: a batch split over groups of devices with equal weights (`jspec.core.sharding`).

Each group runs the loop for the next sequences alone. Per-sequence arrays are stacked: [groups, B / groups, ...].
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jspec.core.automaton import Automaton
from jspec.core.sharding import Placement, over
from jspec.core.types import DecodeState, Params, Prompts

T = TypeVar("T")


def count(placement: Placement | None) -> int:
    """Groups of devices."""
    return 1 if placement is None else placement.groups


def batch_of(placement: Placement | None, batch: int) -> int:
    """Sequences of one group, of `batch` in total; some of the last ones may be copies that have finished."""
    return -(-batch // count(placement))


def prefill(
    placement: Placement | None, read: Callable[[Params, Prompts], DecodeState], params: Params, prompts: Prompts
) -> DecodeState:
    """The state before the first round, on the devices of a placement; stacked if there are several groups.

    Padding of the last group are finished copies of the last sequence.

    read: `jspec.core.prefill.prefill` without its arrays, which are the other arguments.
    """
    if count(placement) == 1:
        return over(placement, read, params, prompts)
    # Automata have tables, which groups have in common, and the states of sequences.
    automata = [Automaton() if x is None else x for x in (prompts.stop, prompts.grammar)]
    tables = [dataclasses.replace(x, state=None) for x in automata]
    states = [x.state for x in automata]
    # Sequences that fill up the last group.
    batch = prompts.ids.shape[0]
    index = np.arange(batch_of(placement, batch) * count(placement))
    bare = dataclasses.replace(prompts, stop=Automaton(), grammar=None)
    bare, states = jax.tree.map(lambda x: x[np.minimum(index, batch - 1)], (bare, states))
    copies = index >= batch
    length, limit = jnp.where(copies, 1, bare.length), jnp.where(copies, 1, bare.limit)
    bare = dataclasses.replace(bare, length=length, limit=limit)

    def local(params: Params, tables: list[Automaton], sequences: tuple[Prompts, PyTree]) -> DecodeState:
        bare, states = sequences
        stop, grammar = (dataclasses.replace(x, state=state) for x, state in zip(tables, states, strict=True))
        return read(params, dataclasses.replace(bare, stop=stop, grammar=grammar))

    return over(placement, local, params, tables, stack(placement, (bare, states)), shared=(0, 1))


def stack(placement: Placement | None, tree: T) -> T:
    """Arrays [B, ...] of all sequences as those of groups, [groups, B / groups, ...]; themselves if there is one."""
    groups = count(placement)
    return tree if groups == 1 else jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), tree)


def unstack(placement: Placement | None, tree: T, batch: int) -> T:
    """The opposite of `stack`, for the first `batch` sequences."""
    if count(placement) == 1:
        return tree
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:batch], tree)
