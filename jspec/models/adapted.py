"""Matrices with low-rank changes beside them, of which each sequence of a batch has one or none (LoRA adapters)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from jspec.core.struct import struct
from jspec.models.quantized import Quantized
from pallas_kernels.platform import unmerged

Product = Callable[[Float[Array, "*batch in"], Float[Array, "in out"]], Float[Array, "*batch out"]]


@struct
class Adapted:
    """A matrix W, [in, out], and the factors of N changes of it, each with C / N columns.

    One product with the columns of all changes reads them once, whatever the batch; those of other changes than the
    sequence's are then set to zero, so that its output does not depend on them.

    down, up: factors beside each other: change n of W is the product of the n-th columns of down and rows of up.
    index: the change of each sequence; -1, or None for all: none.
    """

    weight: Float[Array, "in out"] | Quantized
    down: Float[Array, "in C"]
    up: Float[Array, "C out"]
    changes: int = dataclasses.field(metadata={"static": True})
    index: Int[Array, " B"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.weight.shape

    def of_sequences(self, sequence: Int[Array, " T"]) -> "Adapted":
        """The matrix for tokens of these sequences, one each."""
        return self if self.index is None else dataclasses.replace(self, index=self.index[sequence])

    def product(
        self, x: Float[Array, "*batch in"], out: Float[Array, "*batch out"], multiply: Product
    ) -> Float[Array, "*batch out"]:
        """`out`, the product x W, with the changes. x: the tokens of all sequences, in their order."""
        if self.index is None:
            return out
        # Columns of other changes than the sequence's are zeros.
        columns, count = self.down.shape[1], self.index.shape[0]
        (rows,) = unmerged(x)
        hidden = multiply(rows, self.down).reshape(count, -1, columns)
        owner = jnp.arange(columns, dtype=jnp.int32) // (columns // self.changes)
        hidden = jnp.where(self.index[:, None, None] == owner[None, None], hidden, jnp.zeros((), hidden.dtype))
        # On a GPU both products run side by side.
        out, change = unmerged(out, multiply(hidden, self.up).reshape(out.shape))
        return out + change


def is_adapted(params: PyTree) -> bool:
    """Whether some matrix has changes."""
    return any(isinstance(node, Adapted) for node in jax.tree.leaves(params, is_leaf=_is_adapted))


def choose(params: PyTree, index: Int[Array, " B"] | None) -> PyTree:
    """The weights for a batch whose sequences have these changes, as of `Adapted.index`."""

    def bind(node: Any) -> Any:
        return dataclasses.replace(node, index=index) if isinstance(node, Adapted) else node

    return params if index is None else jax.tree.map(bind, params, is_leaf=_is_adapted)


def _is_adapted(node: Any) -> bool:
    return isinstance(node, Adapted)
