"""`lax.switch` over functions whose results have the same structure, but not the same shapes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree


def switch(
    index: Int[Array, ""], branches: Sequence[Callable[..., PyTree]], inputs: Sequence[tuple[Any, ...]]
) -> PyTree:
    """The result of `branches[index](*inputs[index])`, each leaf with zeros after its elements up to the widest.

    A branch has to write each of its results to memory of its own. Leaves whose shapes agree in all branches, such as
    the rows of the layers of a model, leave it as one array: a kernel per leaf would take longer than what it moves.
    """
    # Jitted, so that each is traced once, although its shapes have to be known before the others.
    jitted = [jax.jit(branch, inline=True) for branch in branches]
    shapes = [jax.eval_shape(branch, *given) for branch, given in zip(jitted, inputs, strict=True)]
    leaves, structures = zip(*(jax.tree.flatten(shape) for shape in shapes), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise TypeError(f"branches with results of different structures: {structures}")
    # Leaves by their shapes in all branches.
    alike: dict[Any, list[int]] = {}
    for index_of_leaf, each in enumerate(zip(*leaves, strict=True)):
        alike.setdefault(tuple((leaf.shape, leaf.dtype) for leaf in each), []).append(index_of_leaf)

    def packed(branch: Callable[..., PyTree], given: tuple[Any, ...]) -> Callable[[], list[Array]]:
        def run() -> list[Array]:
            found = jax.tree.leaves(branch(*given))
            return [
                _pad(jnp.stack([found[i] for i in members]), (len(members), *_widest(shapes)))
                for shapes, members in alike.items()
            ]

        return run

    results = lax.switch(index, [packed(*each) for each in zip(jitted, inputs, strict=True)])
    unpacked: list[Array | None] = [None] * len(leaves[0])
    for members, stacked in zip(alike.values(), results, strict=True):
        for place, i in enumerate(members):
            unpacked[i] = stacked[place]
    return jax.tree.unflatten(structures[0], unpacked)


def _widest(shapes: tuple[tuple[tuple[int, ...], Any], ...]) -> tuple[int, ...]:
    return tuple(max(sizes) for sizes in zip(*(shape for shape, _ in shapes), strict=True))


def _pad(x: Array, shape: tuple[int, ...]) -> Array:
    return jnp.pad(x, [(0, wanted - size) for size, wanted in zip(x.shape, shape, strict=True)])
