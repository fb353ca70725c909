"""Chains of different lengths in one forward: the nodes of each equal those of a padded forward."""

import dataclasses

import deepseek
import gemma
import jax
import jax.numpy as jnp
import loops
import numpy as np
import oss
import pytest
import toy

from jspec.core import ragged, round, tree
from jspec.core.returned import check_draft
from jspec.core.types import DraftTree, Params
from jspec.drafters import Plain
from jspec.models.adapted import Adapted, choose

COUNTS = [[1, 4, 2], [0, 1, 4], [4, 0, 0], [2, 2, 2], [4, 4, 4]]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("more", [0, 3])
def test_each_node_has_its_sequence_and_its_place(counts, more):
    """Padding, `more` nodes, belongs to no chain."""
    total = sum(counts) + more
    packing = ragged.pack(jnp.array(counts, jnp.int32), total, 4)
    nodes = [(b, i) for b, count in enumerate(counts) for i in range(count)]
    assert list(zip(packing.sequence.tolist(), packing.column.tolist(), strict=True))[: len(nodes)] == nodes
    assert (packing.column[len(nodes) :] < 0).all() and (packing.sequence < len(counts)).all()
    for b, count in enumerate(counts):
        for i in range(4 if count else 0):
            assert nodes[packing.place[b, i]] == (b, min(i, count - 1))
    assert (packing.place < total).all()


@dataclasses.dataclass(frozen=True)
class Watching(Plain):
    """Plain decoding that asks for hidden states."""

    capture_layers: tuple[int, ...] = ()


def adapted(weights):
    """The weights with two random changes of each matrix of the layers, and another one for each sequence."""
    random = np.random.default_rng(0)

    def change(path, leaf):
        if "layers" not in jax.tree_util.keystr(path) or leaf.ndim != 2:
            return leaf
        down, up = (
            jnp.asarray(random.normal(size=shape) * 0.2, leaf.dtype) for shape in ((len(leaf), 4), (4, leaf.shape[1]))
        )
        return Adapted(leaf, down, up, 2)

    return choose(jax.tree_util.tree_map_with_path(change, weights), jnp.array([1, -1, 0], jnp.int32))


TARGETS = {
    "llama": lambda: (toy.TARGET, toy.params().target),
    "exact": lambda: (dataclasses.replace(toy.TARGET, exact=True), toy.params().target),
    "fp8 cache": lambda: (dataclasses.replace(toy.TARGET, kv="fp8"), toy.params().target),
    "adapters": lambda: (toy.TARGET, adapted(toy.params().target)),
    "sliding": lambda: (gemma.KINDS["dense"], gemma.params("dense")),
    "shared keys": lambda: (gemma.KINDS["shared"], gemma.params("shared")),
    "latents": lambda: (deepseek.KINDS["mla"], deepseek.params("mla")),
    "exact latents": lambda: (dataclasses.replace(deepseek.KINDS["mla"], exact=True), deepseek.params("mla")),
    "sinks": lambda: (oss.KINDS["sinks"], oss.params("sinks")),
}


@pytest.mark.slow(unless=("llama", "exact"))
@pytest.mark.parametrize("name", TARGETS)
def test_a_forward_equals_the_padded_one(name):
    """Logits, rows and hidden states of each node; with exact products bit for bit, whatever the other chains."""
    target, weights = TARGETS[name]()
    params = Params(weights)
    loop = loops.Loop(target, Watching(capture_layers=(1, target.num_layers)), lambda: params, lambda: params)
    s = loop.start(params)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 50, (3, 4)), jnp.int32).at[:, :1].set(s.root)
    verify = jax.jit(lambda s, drafted: round.verify(params, s, drafted, method=loop.method))
    padded = verify(s, tree.chain(tokens))
    for counts in COUNTS:
        limit = jnp.array(counts, jnp.int32) - 1
        out = verify(s, DraftTree(tokens, None, limit=limit, packed=max(9, sum(counts))))
        for ours, theirs in zip(jax.tree.leaves(out), jax.tree.leaves(padded), strict=True):
            assert ours.shape == theirs.shape
            for b, count in enumerate(counts):
                if name.startswith("exact"):
                    np.testing.assert_array_equal(ours[b, :count], theirs[b, :count])
                else:
                    np.testing.assert_allclose(ours[b, :count], theirs[b, :count], rtol=2e-5, atol=2e-5)
                for i in range(count, 4 if count else 0):
                    np.testing.assert_array_equal(ours[b, i], ours[b, count - 1])


def test_a_packed_tree_is_refused():
    tokens = jnp.zeros((2, 3), jnp.int32)
    for drafted in (DraftTree(tokens, tokens, 2, limit=tokens[:, 0], packed=4), DraftTree(tokens, None, packed=4)):
        with pytest.raises(ValueError, match="packed=4; must be None but for a chain with a limit"):
            check_draft(Plain(), (drafted, None), 2, 2)
