"""The exact forward of a model: a token's hidden states, logits and rows have the same bits in every forward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.cache import MhaCache
from jspec.core import tree
from jspec.core.types import DraftTree
from jspec.models import Gemma4, Llama
from jspec.models.moe import Routed
from jspec.models.router import Router

LENGTH = 80
SHAPE = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_layers": 2, "max_length": 512}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
TARGETS = {
    "llama": Llama(**SHAPE, **HEADS),
    "qwen3": Llama(**SHAPE, **HEADS, qk_norm=True, tie_embeddings=True),
    "experts": Llama(**SHAPE, **HEADS, experts=Routed(Router(count=6, chosen=2, normalize=True), width=24)),
    "biases": Llama(**SHAPE, **HEADS, attention_bias=True),
}


def weights(target, dtype):
    shapes = target.param_shapes(jnp.dtype(dtype))
    leaves, structure = jax.tree.flatten(shapes)
    rng = np.random.default_rng(0)
    made = [jnp.asarray(rng.normal(size=x.shape) / (x.shape[0] ** 0.5 if x.ndim > 1 else 1), x.dtype) for x in leaves]
    return jax.tree.unflatten(structure, made)


class Reader:
    """Forwards of one target over a text whose first tokens are committed."""

    def __init__(self, target, params):
        self.target, self.params = target, params
        self.forward = jax.jit(
            lambda params, *args, **options: target.forward(params, *args, capture_layers=(0, 1, 2), **options)
        )

    def read(self, draft_tree, cache, start, select=None):
        return self.forward(self.params, draft_tree, cache, start, select=select)

    def committed(self, tokens, chunk, batch, page_size, capacity):
        """The cache after the text is read in chunks, the logits after each token, and the hidden states."""
        cache = self.target.init_cache(self.params, batch, capacity, page_size)
        logits, hidden = [], []
        for begin in range(0, len(tokens), chunk):
            part = tokens[begin : begin + chunk]
            ids = jnp.broadcast_to(jnp.asarray(part), (batch, len(part)))
            start = jnp.full(batch, begin, jnp.int32)
            out = self.read(tree.chain(ids), cache, start)
            cache = jax.jit(MhaCache.commit)(cache, out.rows, start, None, jnp.full(batch, len(part), jnp.int32))
            logits.append(out.logits)
            hidden.append(out.hidden)
        return cache, jnp.concatenate(logits, 1), jnp.concatenate(hidden, 1)


def bits(x):
    return np.asarray(x).view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


def random_tree(rng, tokens, start, nodes, vocabulary):
    """A tree whose nodes are random but for a path with the text, the parents, and the path's nodes."""
    parent, ids, path = np.zeros(nodes, np.int32), rng.integers(0, vocabulary, nodes), [0]
    ids[0] = tokens[start]
    for node in range(1, nodes):
        if rng.integers(3) and start + len(path) < len(tokens):
            parent[node], ids[node] = path[-1], tokens[start + len(path)]
            path.append(node)
        else:
            parent[node] = rng.integers(node)
    return ids.astype(np.int32), parent, path


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype",
    [
        ("qwen3", "bfloat16"),
        ("qwen3", "float32"),
        ("llama", "bfloat16"),
        ("biases", "float32"),
        ("experts", "bfloat16"),
        ("experts", "float32"),
    ],
)
def test_a_token_has_the_same_bits_in_every_forward(name, dtype):
    target = TARGETS[name].exactly()
    reader, rng = Reader(target, weights(target, dtype)), np.random.default_rng(1)
    tokens = rng.integers(0, target.vocab_size, LENGTH).astype(np.int32)
    cache, logits, hidden = reader.committed(tokens, 1, 1, 16, 96)

    # Prompts in chunks, in other batches, pages and capacities.
    for chunk, batch, page_size, capacity in ((7, 3, 16, 96), (LENGTH, 2, 64, 128), (33, 1, 1, 81)):
        other, again, states = reader.committed(tokens, chunk, batch, page_size, capacity)
        for b in range(batch):
            np.testing.assert_array_equal(bits(again[b]), bits(logits[0]))
            np.testing.assert_array_equal(bits(states[b]), bits(hidden[0]))
        if page_size == 16:
            np.testing.assert_array_equal(
                bits(other.pool[:, :, : LENGTH // 16]), bits(cache.pool[:, :, : LENGTH // 16])
            )

    # The last token of a prompt alone goes to the LM head.
    ids = jnp.asarray(tokens)[None]
    empty = target.init_cache(reader.params, 1, 96, 16)
    for start in (None, jnp.zeros(1, jnp.int32)):
        out = jax.jit(target.forward)(reader.params, tree.chain(ids), empty, start, select=jnp.array([LENGTH - 3]))
        np.testing.assert_array_equal(bits(out.logits[0, 0]), bits(logits[0, LENGTH - 3]))

    # Trees after prefixes of several lengths, in a batch.
    for nodes, starts in ((6, (62,)), (17, (3, 60, 30)), (33, (0, 58))):
        batch = len(starts)
        made = [random_tree(rng, tokens, start, nodes, target.vocab_size) for start in starts]
        ids, parent = (jnp.asarray(np.stack(part)) for part in list(zip(*made, strict=True))[:2])
        long = reader.committed(tokens, 20, batch, 16, 112)[0]
        out = reader.read(DraftTree(ids, parent), long, jnp.array(starts, jnp.int32))
        for b, (_, _, path) in enumerate(made):
            for depth, node in enumerate(path):
                np.testing.assert_array_equal(bits(out.logits[b, node]), bits(logits[0, starts[b] + depth]))
                np.testing.assert_array_equal(bits(out.hidden[b, node]), bits(hidden[0, starts[b] + depth]))


@pytest.mark.slow
def test_the_exact_forward_is_the_forward():
    target = TARGETS["qwen3"]
    params = weights(target, "float32")
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 30)), jnp.int32)
    cache = target.init_cache(params, 2, 32, 16)
    plain, exact = (each.forward(params, tree.chain(ids), cache, None).logits for each in (target, target.exactly()))
    np.testing.assert_allclose(plain, exact, rtol=0, atol=2e-5)
    # The mean of squares and the products of the plain one depend on the shape, on some machines.
    assert target.exactly() != target and hash(target.exactly()) != hash(target)


def test_models_without_an_exact_forward_are_refused():
    for target, message in (
        (dataclasses.replace(TARGETS["llama"], tensor=2), "split over devices has no exact forward"),
        (object.__new__(Gemma4), "models of type Gemma4 have no exact forward"),
    ):
        with pytest.raises(ValueError, match=f"exact=True: .*{message}"):
            target.exactly()
    with pytest.raises(ValueError, match=r"exact=True: .*omit tensor and mesh"):
        jspec.load("bundled:python-tiny", exact=True, tensor=2)
    with pytest.raises(TypeError, match="exact=1"):
        jspec.load("bundled:python-tiny", exact=1)
