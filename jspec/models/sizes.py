"""Shapes, counts and bytes of weights and keys, computed without allocating anything."""

import dataclasses
import hashlib
import math
import weakref
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jspec.cache import LayerKeys
from jspec.models.quantized import is_matrix

MOST_PADDING = 1024
"""Bound of the tokens by which a draft's vocabulary may differ from the target's: rows of padding, for fast shapes."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Shapes and dtypes of weights, as a value by which results are cached.

    digest: of all of them; equal values have equal digests.
    tree: a `jax.ShapeDtypeStruct` in the place of each array.
    """

    digest: str
    tree: Any = dataclasses.field(compare=False, repr=False)


_shapes: dict[int, tuple[weakref.ref, Shapes]] = {}
"""`Shapes` of live weights by identity, since walking over all arrays takes as long as a short generation's options."""


def shapes_of(params: Any) -> Shapes:
    """The shapes of a `Params`, computed once for each."""
    key = id(params)
    reference, shapes = _shapes.get(key, (None, None))
    if shapes is None or reference is None or reference() is not params:
        tree = jax.eval_shape(lambda params: params, params)
        digest = hashlib.sha256(repr(tree).encode()).hexdigest()[:32]
        shapes = Shapes(digest, tree)
        _shapes[key] = weakref.ref(params, lambda _: _shapes.pop(key, None)), shapes
    return shapes


def is_padded(size: int, count: int) -> bool:
    """Whether vocabularies of `size` tokens, a draft's, and `count`, its target's, differ by no more than padding."""
    return -min(MOST_PADDING, count // 2) <= size - count <= MOST_PADDING


def lm_head(params: PyTree) -> PyTree:
    """The LM head of a model: a weight of its own, or the embedding."""
    return params.embed if params.lm_head is None else params.lm_head


def count_parameters(tree: PyTree) -> int:
    """Elements of all floating-point arrays and quantized matrices, or shapes of them, in a pytree."""
    leaves = jax.tree.leaves(tree, is_leaf=is_matrix)
    return sum(leaf.size for leaf in leaves if is_matrix(leaf) or jnp.issubdtype(leaf.dtype, jnp.floating))


def tree_bytes(tree: PyTree) -> int:
    """Bytes of all arrays, or shapes, in a pytree; random keys do not count."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def keys_bytes(keys: Iterable[LayerKeys], context: int, itemsize: int, devices: int = 1) -> int:
    """Bytes of keys and values that layers with these `keys` read for one sequence of `context` tokens.

    A sliding window bounds what its layer reads.

    devices: over which heads are split; the bytes are those of one of them.
    """
    local = [layer.split(devices) for layer in keys]
    return sum(layer.row_bytes(itemsize) * min(context, layer.window or context) for layer in local)
