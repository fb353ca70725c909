"""The exact forward of a model: a token's hidden states, logits and rows have the same bits in every forward."""

import dataclasses
from functools import partial

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.core import tree
from jspec.core.pieces import Pieces
from jspec.core.types import DraftTree, Params
from jspec.models import Deepseek, Gemma4, GptOss, Llama, Qwen3Next
from jspec.models.deepseek import Indexer, Latent
from jspec.models.gemma4 import Attention
from jspec.models.moe import Routed, Router
from jspec.models.rope import ProportionalRope, Rope, YarnRope

LENGTH = 132
"""Tokens of the text: more than a segment of attention. Chunks divide it, so that few programs are compiled."""
SHAPE = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_layers": 2, "max_length": 512}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
EXPERTS = Routed(Router(count=6, chosen=2, normalize=True), width=24)
YARN = YarnRope(factor=4.0, original_length=64, truncate=False)
SLIDING = Attention(kv_heads=2, head_dim=8, window=70, rope=Rope())
FULL = Attention(kv_heads=1, head_dim=16, window=None, rope=Rope(1e6, ProportionalRope(0.25)), values_are_keys=True)
TARGETS = {
    "llama": Llama(**SHAPE, **HEADS),
    "qwen3": Llama(**SHAPE, **HEADS, qk_norm=True, tie_embeddings=True),
    "experts": Llama(**SHAPE, **HEADS, experts=EXPERTS),
    "sinks": GptOss(
        61, 48, **HEADS, windows=(24, None), max_length=512, experts=EXPERTS, rope=Rope(scaling=YARN), gate_limit=1.5
    ),
    "norms after": dataclasses.replace(families.KINDS["olmo3"], windows=(70, None, 70)),
    "factors": families.KINDS["granite"],
    "sandwich": dataclasses.replace(families.KINDS["gemma3"], intermediate_size=80),
    "shared keys": Gemma4(
        *(61, 48, 80, 4),
        attention=(SLIDING, FULL, SLIDING),
        max_length=512,
        shared_layers=1,
        double_wide_mlp=True,
        per_layer_size=8,
        experts=EXPERTS,
        soft_cap=30.0,
    ),
    "latents": Deepseek(
        **SHAPE,
        num_heads=4,
        latent=Latent(q_rank=None, kv_rank=20, nope_dim=12, rope_dim=8, value_dim=16),
        experts=Routed(Router(count=6, chosen=2, scale=1.5), width=24, shared_width=40),
        dense_layers=1,
        rope=Rope(scaling=YARN),
    ),
    "latent queries": Deepseek(
        **SHAPE,
        num_heads=4,
        latent=Latent(q_rank=24, kv_rank=20, nope_dim=12, rope_dim=8, value_dim=16),
        experts=Routed(Router(count=6, chosen=2, sigmoid=True, normalize=True, groups=3, kept_groups=2), width=24),
        dense_layers=1,
    ),
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
        every = tuple(range(target.num_layers + 1))
        self.forward = jax.jit(
            lambda params, *args, **options: target.forward(params, *args, capture_layers=every, **options)
        )
        self.commit = jax.jit(lambda cache, *args: cache.commit(*args))

    def read(self, draft_tree, cache, start, select=None):
        return self.forward(self.params, draft_tree, cache, start, select=select)

    def committed(self, tokens, chunk, batch, page_size, capacity, lengths=None):
        """The cache after the text is read in chunks, the logits after each token, and the hidden states.

        lengths: tokens of each sequence that are committed; None: all.
        """
        lengths = jnp.full(batch, len(tokens)) if lengths is None else jnp.asarray(lengths)
        cache = self.target.init_cache(self.params, batch, capacity, page_size)
        logits, hidden = [], []
        for begin in range(0, len(tokens), chunk):
            part = tokens[begin : begin + chunk]
            ids = jnp.broadcast_to(jnp.asarray(part), (batch, len(part)))
            start = jnp.full(batch, begin, jnp.int32)
            out = self.read(tree.chain(ids), cache, start)
            count = jnp.clip(lengths - begin, 0, len(part)).astype(jnp.int32)
            cache = self.commit(cache, out.rows, start, None, count)
            logits.append(out.logits)
            hidden.append(out.hidden)
        return cache, jnp.concatenate(logits, 1), jnp.concatenate(hidden, 1)


def rows(cache, sequence=0, length=LENGTH):
    """What each group of the cache has of a sequence, by position; with a window, its end."""
    for group in getattr(cache, "groups", (cache,)):
        position = np.arange(length)[-getattr(group, "window", length) :]
        page_size = group.pool.shape[3]
        yield group.pool[:, :, group.page_table[sequence, position // page_size], position % page_size]


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
        ("experts", "float32"),
        ("sinks", "bfloat16"),
        ("sinks", "float32"),
        ("norms after", "bfloat16"),
        ("factors", "bfloat16"),
        ("sandwich", "bfloat16"),
        ("shared keys", "bfloat16"),
        ("shared keys", "float32"),
        ("latents", "bfloat16"),
        ("latent queries", "float32"),
    ],
)
def test_a_token_has_the_same_bits_in_every_forward(name, dtype):
    target = TARGETS[name].exactly()
    reader, rng = Reader(target, weights(target, dtype)), np.random.default_rng(1)
    tokens = rng.integers(0, target.vocab_size, LENGTH).astype(np.int32)
    cache, logits, hidden = reader.committed(tokens, 1, 1, 16, 160)

    # Prompts in chunks, in other batches, pages and capacities.
    for chunk, batch, page_size, capacity in ((6, 3, 64, 192), (LENGTH, 2, 1, 133)):
        other, again, states = reader.committed(tokens, chunk, batch, page_size, capacity)
        for b in range(batch):
            np.testing.assert_array_equal(bits(again[b]), bits(logits[0]))
            np.testing.assert_array_equal(bits(states[b]), bits(hidden[0]))
        for ours, theirs in zip(rows(other), rows(cache), strict=True):
            np.testing.assert_array_equal(bits(ours), bits(theirs))

    # With few positions, attention has one block.
    again = reader.committed(tokens[:36], 2, 1, 16, 48)[1]
    np.testing.assert_array_equal(bits(again[0]), bits(logits[0, :36]))

    # The last token of a prompt alone goes to the LM head.
    ids = jnp.asarray(tokens)[None]
    empty = target.init_cache(reader.params, 1, 160, 16)
    out = jax.jit(target.forward)(reader.params, tree.chain(ids), empty, None, select=jnp.array([LENGTH - 3]))
    np.testing.assert_array_equal(bits(out.logits[0, 0]), bits(logits[0, LENGTH - 3]))

    # Trees after prefixes of several lengths, in a batch.
    for nodes, starts in ((17, (3, 122, 21)), (33, (0, 58, 98))):
        batch = len(starts)
        made = [random_tree(rng, tokens, start, nodes, target.vocab_size) for start in starts]
        ids, parent = (jnp.asarray(np.stack(part)) for part in list(zip(*made, strict=True))[:2])
        prefix = reader.committed(tokens, 6, batch, 64, 192, starts)[0]
        out = reader.read(DraftTree(ids, parent), prefix, jnp.array(starts, jnp.int32))
        for b, (_, _, path) in enumerate(made):
            for depth, node in enumerate(path):
                np.testing.assert_array_equal(bits(out.logits[b, node]), bits(logits[0, starts[b] + depth]))
                np.testing.assert_array_equal(bits(out.hidden[b, node]), bits(hidden[0, starts[b] + depth]))


PROMPTS = (21, 40), (0, 9), (58, 33)
"""Committed tokens of each sequence, and tokens to read."""
PROMPT_OF = np.repeat([0, 1, 2, 0], [3, 1, 3, 1])
"""The sequence of each piece of 16 tokens; the last piece is padding."""
PIECES = Pieces(jnp.array([0, 0, 0, 3, 4, 4, 4, 7]), jnp.array([False, False, True, True, False, False, True, False]))


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.packs])
def test_prompts_may_be_read_in_pieces(name, exact):
    target = TARGETS[name].exactly() if exact else TARGETS[name]
    reader, rng = Reader(target, weights(target, "float32")), np.random.default_rng(1)
    texts = rng.integers(0, target.vocab_size, (3, 96)).astype(np.int32)
    same = np.testing.assert_array_equal if exact else partial(np.testing.assert_allclose, rtol=0, atol=1e-4)
    empty, zero = target.init_cache(reader.params, 3, 128, 16), jnp.zeros(3, jnp.int32)
    whole = reader.read(tree.chain(jnp.asarray(texts)), empty, zero)
    prefix, count = np.array(PROMPTS, np.int32).T
    cache = reader.commit(empty, whole.rows, zero, None, jnp.asarray(prefix))

    # The pieces of all prompts in one forward.
    offset = (np.arange(8) - np.asarray(PIECES.first)) * 16
    start = prefix[PROMPT_OF] + offset
    length = np.clip(count[PROMPT_OF] - offset, 0, 16) * (np.arange(8) < 7)
    column = np.arange(16)
    ids = texts[PROMPT_OF[:, None], np.minimum(start[:, None] + column, 95)]
    view, last = cache.take(jnp.asarray(PROMPT_OF)), jnp.asarray(np.maximum(length - 1, 0))
    read = partial(reader.forward, reader.params, tree.chain(jnp.asarray(ids)), view, jnp.asarray(start), pieces=PIECES)
    out, selected = read(), read(select=last)
    for piece, number in enumerate(length):
        place = PROMPT_OF[piece], slice(start[piece], start[piece] + number)
        same(out.logits[piece, :number], whole.logits[place])
        same(out.hidden[piece, :number], whole.hidden[place])
        if number:
            same(selected.logits[piece, 0], whole.logits[place][-1])

    # Their rows in the cache.
    commit = jax.jit(lambda cache, *args: cache.commit(*args, pieces=PIECES))
    written = commit(view, out.rows, jnp.asarray(start), None, jnp.asarray(length))
    cache = cache.put(jnp.arange(3), written)
    expected = reader.commit(empty, whole.rows, zero, None, jnp.asarray(prefix + count))
    for end, sequence in zip(prefix + count, range(3), strict=True):
        for ours, theirs in zip(rows(cache, sequence, end), rows(expected, sequence, end), strict=True):
            same(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "sinks", "shared keys", "latents"])
def test_the_exact_forward_is_the_forward(name):
    target = TARGETS[name]
    params = weights(target, "float32")
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 90)), jnp.int32)
    cache = target.init_cache(params, 2, 96, 16)
    plain, exact = (
        jax.jit(each.forward)(params, tree.chain(ids), cache, None).logits for each in (target, target.exactly())
    )
    np.testing.assert_allclose(plain, exact, rtol=0, atol=1e-4)
    # The mean of squares and the products of the plain one depend on the shape, on some machines.
    assert target.exactly() != target and hash(target.exactly()) != hash(target)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["factors", "shared keys"])
def test_log_probabilities_of_drafted_texts(name):
    """The last operation on logits, here a quotient or a product, is not merged with the sum that follows it."""
    target = TARGETS[name].exactly()
    model = jspec.Model(name, target, Params(weights(target, "bfloat16")), None, ())
    prompts, seeds = [[3, 5, 3, 5, 3], [7, 8], [9, 2, 9, 2]], [1, 2, 3]
    options = {"max_new_tokens": 40, "logprobs": True, "sampling": jspec.Sampling(temperature=0.8, top_p=0.9)}
    drafter = jspec.Suffix(n=3, depth=3, width=3, num_nodes=8)
    drafted = jspec.generate(model, prompts, drafter=drafter, seed=seeds, **options)
    for prompt, seed, text in zip(prompts, seeds, drafted, strict=True):
        alone = jspec.generate(model, prompt, drafter=None, seed=seed, **options)
        assert text.tokens == alone.tokens
        np.testing.assert_array_equal(text.logprobs, alone.logprobs)


def test_models_without_an_exact_forward_are_refused():
    for target, message in (
        (dataclasses.replace(TARGETS["latent queries"], indexer=Indexer(2, 12, 8)), "an indexer selects has no exact"),
        (
            object.__new__(Qwen3Next),
            "models of type Qwen3Next have no exact forward yet; .*Deepseek, Gemma3, Gemma4, GptOss, Llama, ",
        ),
    ):
        with pytest.raises(ValueError, match=f"exact=True: .*{message}"):
            target.exactly()
    with pytest.raises(TypeError, match="exact=1"):
        jspec.load("bundled:python-tiny", exact=1)
