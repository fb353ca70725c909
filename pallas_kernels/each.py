"""Maps a function over elements in a loop: their number changes no bit of a result."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

Out = TypeVar("Out")


def map_each(function: Callable[..., Out], xs: PyTree) -> Out:
    """`lax.map(function, xs)`; a single element is duplicated.

    XLA unrolls a loop of one iteration and fuses its body with the operations around it, which rounds in other places.
    """
    if len(jax.tree.leaves(xs)[0]) > 1:
        return lax.map(function, xs)
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), xs)
    return jax.tree.map(lambda out: out[:1], lax.map(function, twice))
