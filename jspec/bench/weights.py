"""Random weights in the shapes of a configuration, and the bytes read by a round."""

from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core.sharding import Placement
from jspec.core.types import Params
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft
from jspec.models.quantized import BLOCKS, FORMATS, PACKED, Quantized, is_matrix, quantize

SPREAD = 0.02
"""Standard deviation of random matrices: activations stay finite at any depth."""
LOGIT_SPREAD = 6.0
"""Standard deviation of random logits. Flat logits would yield very shallow best-first trees, however deep they may be;
this spread mimics a trained draft."""

P = TypeVar("P")


def random_weights(shapes: P, vocab_size: int, placement: Placement | None = None) -> P:
    """Arrays of these shapes, made on the device one by one: norms are ones, matrices have SPREAD.

    shapes: `param_shapes` of a configuration; existing arrays are kept.
    vocab_size: the target's vocabulary; the draft's vocabulary is spread evenly over it.
    placement: the devices of each array, split as in a model; None: the default device.
    """
    # Leaves, each with its place.
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=is_matrix)
    places = [None] * len(leaves)
    if placement is not None:
        places = jax.tree.flatten(placement.shardings(shapes), is_leaf=is_matrix)[0]
    # One array at a time, by its kind: ids, norms, matrices.
    arrays = []
    for index, ((path, leaf), place) in enumerate(zip(leaves, places, strict=True)):
        if all(isinstance(part, jax.Array) for part in jax.tree.leaves(leaf)):
            arrays.append(leaf)
        elif jnp.issubdtype(leaf.dtype, jnp.integer):
            ids = np.arange(leaf.size) * (vocab_size // leaf.size)
            arrays.append(jnp.asarray(ids.reshape(leaf.shape), leaf.dtype, device=place))
        elif len(leaf.shape) <= 1:
            arrays.append(jnp.ones(leaf.shape, leaf.dtype, device=place))
        else:
            # The dimension logits are summed over.
            width = {"embed": leaf.shape[-1], "head": leaf.shape[-1], "lm_head": leaf.shape[0]}.get(path[-1].name)
            spread = SPREAD if width is None else LOGIT_SPREAD * width**-0.5
            narrow = _format(leaf) if isinstance(leaf, Quantized) else None
            split = None if place is None else tuple(jax.tree.leaves(place))
            options = {"shape": leaf.shape, "dtype": leaf.dtype, "narrow": narrow, "split": split}
            arrays.append(_normal(jax.random.fold_in(jax.random.key(0), index), spread, **options))
    return jax.tree.unflatten(structure, arrays)


@partial(jax.jit, static_argnames=("shape", "dtype", "narrow", "split"))
def _normal(key, spread, *, shape, dtype, narrow, split):
    matrix = jax.random.normal(key, shape, dtype) * spread.astype(dtype)
    matrix = matrix if narrow is None else quantize(matrix, narrow)
    if split is None:
        return matrix
    # Each device makes its own part, so none has all of a matrix.
    parts, structure = jax.tree.flatten(matrix)
    return jax.tree.unflatten(structure, map(lax.with_sharding_constraint, parts, split))


def _format(matrix: Quantized) -> str:
    """The name of the format of a quantized matrix."""
    if matrix.filling is not None:
        return PACKED
    if matrix.group is not None:
        return BLOCKS
    return next(name for name, kind in FORMATS.items() if kind == matrix.narrow.dtype)


def round_bytes(
    params: Params,
    target: Decoder,
    draft: Draft | None,
    *,
    depth: int,
    batch: int,
    context: int,
    nodes: int | None = None,
    seen: int | None = None,
) -> int:
    """The fewest bytes read by a round.

    Each forward reads its weights and the keys and values of its context once; the commit reads the states of recurrent
    layers once more. Of a mixture of experts, the choice of `nodes` tokens per sequence counts.

    draft, depth: the draft model and the number of tokens it drafts; depth 0 is plain decoding. A round has one forward
      of the target and `depth` of the draft (the first is its extension, if it has one); or one, and its
      extension, if the draft proposes all tokens at once.
    nodes: nodes of the verified tree, root included; None: those of a chain.
    seen: tokens of the context the draft sees; None: all.
    """
    itemsize = params.target.embed.dtype.itemsize
    tokens = batch * (nodes or depth + 1)
    # The target's forward and the commit.
    total = target.forward_bytes(params.target, tokens) + batch * target.kv_bytes(context, itemsize)
    total += 2 * batch * target.state_bytes(itemsize)
    if not depth:
        return total
    assert draft is not None
    # The draft's extension and steps.
    extend = draft.extend_bytes(params)
    steps, readers = (1, 1) if draft.at_once else (depth - bool(extend), depth)
    draft_cache = readers * batch * draft.kv_bytes(context if seen is None else min(seen, context), itemsize, target)
    return total + steps * draft.step_bytes(params) + extend + draft_cache
