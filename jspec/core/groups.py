"""Sequences that are split over groups of devices with equal weights (data parallelism).

Each group has the next sequences of a batch and runs the loop for them alone, see `jspec.core.sharding`. What belongs
to sequences is stacked: [groups, B / groups, ...].
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PyTree

from jspec.core.automaton import Automaton
from jspec.core.sharding import Placement, over
from jspec.core.types import DecodeState, Params, RowSampling

T = TypeVar("T")


def count(placement: Placement | None) -> int:
    """Groups of devices."""
    return 1 if placement is None else placement.groups


def batch_of(placement: Placement | None, batch: int) -> int:
    """Sequences of one group, of `batch` in total; some of the last ones may be copies that have finished."""
    return -(-batch // count(placement))


def prefill(
    placement: Placement | None,
    read: Callable[..., DecodeState],
    params: Params,
    ids: Int[Array, "B T"],
    length: Int[Array, " B"],
    limit: Int[Array, " B"],
    key: Key[Array, " B"],
    stop: Automaton,
    row_sampling: RowSampling | None,
    grammar: Automaton | None,
) -> DecodeState:
    """The state before the first round, on the devices of a placement; stacked if there are several groups.

    Where `batch_of` leaves sequences to fill up, these are copies of the last one that have finished.

    read: `jspec.core.decode.prefill` without its arrays, which are the other arguments.
    """
    if count(placement) == 1:
        return over(placement, read, params, ids, length, limit, key, stop, row_sampling, grammar)
    batch = ids.shape[0]
    index = np.arange(batch_of(placement, batch) * count(placement))
    copies = index >= batch
    automata = [Automaton() if each is None else each for each in (stop, grammar)]
    tables = [dataclasses.replace(each, state=None) for each in automata]
    own = ids, length, limit, key, row_sampling, [each.state for each in automata]
    ids, length, limit, key, row_sampling, states = jax.tree.map(lambda x: x[np.minimum(index, batch - 1)], own)
    length, limit = jnp.where(copies, 1, length), jnp.where(copies, 1, limit)

    def local(params: Params, tables: list[Automaton], own: PyTree) -> DecodeState:
        *arrays, row_sampling, states = own
        stop, grammar = (dataclasses.replace(x, state=state) for x, state in zip(tables, states, strict=True))
        return read(params, *arrays, stop, row_sampling, grammar)

    own = stack(placement, (ids, length, limit, key, row_sampling, states))
    return over(placement, local, params, tables, own, shared=(0, 1))


def stack(placement: Placement | None, tree: T) -> T:
    """Arrays [B, ...] of all sequences as those of groups, [groups, B / groups, ...]; themselves if there is one."""
    groups = count(placement)
    return tree if groups == 1 else jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), tree)


def unstack(placement: Placement | None, tree: T, batch: int) -> T:
    """The opposite of `stack`, for the first `batch` sequences."""
    if count(placement) == 1:
        return tree
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:batch], tree)
