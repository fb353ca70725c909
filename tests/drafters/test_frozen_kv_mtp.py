"""Frozen-KV MTP: an assistant against a computation by hand; and drafting does not change the target's cache."""

import dataclasses
import functools
import itertools

import gemma
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from hlo import made, opcode
from planted import best_first_by_hand

from jspec.analysis import poison
from jspec.cache import mha, window
from jspec.core import accept, stopping, tree
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.core.prefill import jitted_prefill
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import Params, Prompts
from jspec.drafters import FrozenKvMtp
from jspec.drafters.frozen_kv_mtp import POSITIONS
from jspec.models import Assistant, Llama
from jspec.models.assistant import Clusters
from jspec.models.rope import Llama3Rope, Rope
from pallas_kernels.paged_attention import paged_attention

IDS = np.random.default_rng(3).integers(0, 61, (4, 30)).astype(np.int32)
LENGTHS = np.array([1, 2, 12, 30], np.int32)
"""Two prompts are longer than the windows, of 8 tokens."""
SCALED = dataclasses.replace(toy.TARGET, rope=Rope(scaling=Llama3Rope(8.0, 1.0, 4.0, 16)))
SHAPE = dict(vocab_size=61, hidden_size=48, target_hidden_size=32, intermediate_size=64, num_heads=4)
CASES = {
    "llama": (SCALED, Assistant(**SHAPE, target_layers=(1, 0, 1), head_dims=(16,) * 3)),
    "dense": (gemma.KINDS["dense"], Assistant(**SHAPE, target_layers=(1, 0, 2), head_dims=(8, 8, 16))),
    # Layers 2 and 3 share the keys of layers 0 and 1.
    "shared": (
        gemma.KINDS["shared"],
        Assistant(**SHAPE, target_layers=(2, 3), head_dims=(8, 16), clusters=Clusters(61, 20)),
    ),
}


def each(argnames, often, *axes):
    """All points of a matrix; those that are not in `often` are slow points."""
    points = list(itertools.product(*axes)) if len(axes) > 1 else list(axes[0])
    assert set(often) <= set(points)
    slow = [pytest.param(*(point if len(axes) > 1 else [point]), marks=pytest.mark.slow) for point in points]
    return pytest.mark.parametrize(argnames, [a if a in often else b for a, b in zip(points, slow, strict=True)])


def parts(name):
    """Target, assistant and their weights."""
    target, config = CASES[name]
    own = toy.random_assistant(config, seed=3)
    weights = toy.random_params(target) if isinstance(target, Llama) else gemma.params(name)
    return target, config, Params(weights, toy.in_clusters(config, own) if config.clusters else own)


@functools.cache
def prefilled(name, page_size=4):
    """A bound drafter of a small chain, weights, and the state after prefill."""
    target, config, weights = parts(name)
    bound = FrozenKvMtp(depth=2).bind(target, config)
    keys = toy.row_keys(np.arange(len(IDS)))
    prompts = Prompts(IDS, LENGTHS, LENGTHS + np.int32(4), keys, stopping.init(None, len(IDS)))
    shape = dict(capacity=64, page_size=page_size)
    return bound, weights, jitted_prefill(weights, prompts, method=Method(target, bound, accept.greedy), **shape)


# By hand


def rms(x, weight, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def frequencies(target, layer):
    """Radians per position of each pair of dimensions, for the keys of a layer of the target."""
    if not isinstance(target, Llama):
        kind = target.attention[layer]
        turning = int(getattr(kind.rope.scaling, "share", 1) * kind.head_dim / 2)
        turns = [kind.rope.theta ** (-2 * i / kind.head_dim) for i in range(kind.head_dim // 2)]
        return [turn if i < turning else 0.0 for i, turn in enumerate(turns)]
    found = []
    for i in range(target.head_dim // 2):
        turn = target.rope.theta ** (-2 * i / target.head_dim)
        low, high = (16 * turn / (2 * np.pi) / factor for factor in (1.0, 4.0))
        smooth = (low * 1.0 - 1.0) / (4.0 - 1.0)
        found.append(turn / 8 if low < 1 else turn if high > 1 else (1 - smooth) * turn / 8 + smooth * turn)
    return found


def attend_by_hand(config, target, layer, read, z, keys, values, position):
    """A layer's attention in float64: all heads, one softmax, no pages, and windows as slices."""
    if not len(keys):
        return np.zeros(np.asarray(layer.o).shape[1])
    dim = keys.shape[-1]
    q = rms((rms(z, layer.attention_norm) @ np.asarray(layer.qkv, np.float64)).reshape(-1, dim), layer.q_norm)
    angle = position * np.array(frequencies(target, read))
    first, second = np.split(q, 2, axis=1)
    cos, sin = np.cos(angle), np.sin(angle)
    q = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
    window = None if isinstance(target, Llama) else target.attention[read].window
    keys, values = (x if window is None else x[-window:] for x in (keys, values))
    share = config.num_heads // keys.shape[1]
    scale = dim**-0.5 if isinstance(target, Llama) else 1.0
    seen = []
    for head in range(config.num_heads):
        scores = scale * keys[:, head // share] @ q[head]
        weight = np.exp(scores - scores.max())
        seen.append(weight / weight.sum() @ values[:, head // share])
    return np.concatenate(seen) @ np.asarray(layer.o, np.float64)


def step_by_hand(config, target, own, embedded, hidden, pairs, position):
    """Logits (-inf if there is none) and hidden state after one token; pairs: keys and values of each layer."""
    z = np.concatenate([embedded, hidden]) @ np.asarray(own.pre_projection, np.float64)
    for layer, read, (keys, values) in zip(own.layers, config.target_layers, pairs, strict=True):
        out = attend_by_hand(config, target, layer, read, z, keys, values, position)
        z = z + rms(out, layer.attention_out_norm) if len(keys) else z
        gate, up = np.split(rms(z, layer.mlp_norm) @ np.asarray(layer.gate_up, np.float64), 2)
        gelu = gate / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        z = (z + rms(gelu * up @ np.asarray(layer.down, np.float64), layer.mlp_out_norm)) * float(layer.scalar)
    y = rms(z, own.norm)
    if own.clusters is None:
        return np.asarray(own.head, np.float64) @ y, y @ np.asarray(own.post_projection, np.float64)
    logits = np.full(config.vocab_size, -np.inf)
    best = np.argsort(-(y @ np.asarray(own.clusters.centroids, np.float64)))[: config.clusters.chosen]
    for cluster in best:
        logits[np.asarray(own.clusters.ids)[cluster]] = np.asarray(own.clusters.head, np.float64)[cluster] @ y
    return logits, y @ np.asarray(own.post_projection, np.float64)


@functools.cache
def seen(name):
    """The target's keys and values of each layer that the assistant reads, and its last hidden states."""
    target, config, weights = parts(name)
    cache = target.init_cache(weights.target, len(IDS), 8, 8)
    forward = jax.jit(functools.partial(target.forward, capture_layers=(target.num_layers + 1,)))
    out = forward(weights.target, tree.chain(jnp.asarray(IDS)), cache, None)
    sources = [read if isinstance(target, Llama) else target.kv_source_layer(read) for read in config.target_layers]
    pairs = [tuple(np.asarray(part, np.float64) for part in out.rows[source]) for source in sources]
    return pairs, np.asarray(out.hidden, np.float64)


def roots(s):
    """The first token of each sequence, which is in no cache yet."""
    return np.asarray(s.tokens)[np.arange(4), LENGTHS]


def chain_by_hand(name, row, tokens, position):
    """Logits and hidden states of consecutive steps that read the given tokens."""
    target, config, weights = parts(name)
    pairs, hiddens = seen(name)
    committed = LENGTHS[row]
    hidden = hiddens[row, committed - 1]
    at = committed if position == "root" else committed - 1
    found = []
    for token in tokens:
        embedded = np.asarray(target.embed(weights.target, jnp.array([[token]])), np.float64)[0, 0]
        own = [(keys[row, :committed], values[row, :committed]) for keys, values in pairs]
        logits, hidden = step_by_hand(config, target, weights.draft, embedded, hidden, own, at)
        found.append((logits, hidden))
    return found


def spread(out, vocab_size):
    """The logits of an output over the whole vocabulary, -inf for tokens without one."""
    if out.ids is None:
        return np.asarray(out.logits)
    found = np.full((*out.logits.shape[:2], vocab_size), -np.inf)
    np.put_along_axis(found, np.asarray(out.ids), np.asarray(out.logits), axis=2)
    return found


@pytest.mark.slow(unless="llama-root")
@each(("name", "position"), [("llama", "root"), ("shared", "committed")], CASES, POSITIONS)
def test_logits_and_hidden_states_equal_those_by_hand(name, position):
    """The seed and two steps after it, in a batch of all lengths."""
    bound, weights, s = prefilled(name)
    committed = s.length - 1
    at = committed if position == "root" else committed - 1
    step = jax.jit(functools.partial(bound.model.apply, target=bound.target))
    hidden, tokens = s.draft, np.concatenate([roots(s)[:, None], IDS[:, :2]], axis=1)
    wanted = [chain_by_hand(name, row, tokens[row], position) for row in range(4)]
    for number in range(3):
        out = step(
            weights, tokens=tokens[:, number : number + 1], hidden=hidden, cache=s.cache, length=committed, positions=at
        )
        for row in range(4):
            logits, state = wanted[row][number]
            np.testing.assert_allclose(spread(out, 61)[row, 0], logits, atol=1e-5, rtol=0)
            np.testing.assert_allclose(out.hidden[row, 0], state, atol=1e-5, rtol=0)
        # Those by hand, so rounding errors do not accumulate over the steps.
        hidden = jnp.asarray(np.array([[steps[number][1]] for steps in wanted]), jnp.float32)


@pytest.mark.slow
@each(("name", "position"), [("shared", "root")], CASES, POSITIONS)
def test_a_chain_is_the_best_token_of_each_step(name, position):
    bound, weights, s = prefilled(name)
    drafter = dataclasses.replace(bound, depth=4, position=position)
    tokens = np.asarray(jax.jit(drafter.draft)(weights, s)[0].tokens)
    for row in range(4):
        steps = chain_by_hand(name, row, tokens[row, :-1], position)
        assert tokens[row, 1:].tolist() == [int(logits.argmax()) for logits, _ in steps]
        assert tokens[row, 0] == roots(s)[row]


@pytest.mark.slow
@each("name", ["dense"], CASES)
def test_a_tree_has_the_best_of_all_proposals(name):
    bound, weights, s = prefilled(name)
    drafter = dataclasses.replace(bound, depth=3, width=3, num_nodes=12)
    draft_tree = jax.jit(drafter.draft)(weights, s)[0]
    for row in range(4):
        root = int(roots(s)[row])

        @functools.cache
        def dist(path, row=row, root=root):
            logits = chain_by_hand(name, row, (root, *path), "committed")[-1][0]
            peak = logits.max()
            return logits - peak - np.log(np.exp(logits - peak).sum())

        tokens, parents = best_first_by_hand(dist, root, 3, 3, 12)
        assert np.asarray(draft_tree.tokens)[row].tolist() == tokens
        assert np.asarray(draft_tree.parents)[row].tolist() == parents


@pytest.mark.parametrize("width", [1, 3])
def test_a_round_has_one_forward_per_generation_and_does_not_repeat_the_seed(width, monkeypatch):
    nodes, real = [], Assistant.apply

    def count(self, params, target, tokens, *rest):
        nodes.append(tokens.shape[1])
        return real(self, params, target, tokens, *rest)

    bound, weights, s = prefilled("shared")
    drafter = dataclasses.replace(bound, depth=4, width=width)
    monkeypatch.setattr(Assistant, "apply", count)
    jax.eval_shape(drafter.draft, weights, s)
    assert nodes == [1, width, width, width]


# State and cache


@pytest.mark.slow
@each("name", ["shared"], CASES)
def test_the_state_is_the_targets_hidden_state_at_the_last_committed_row(name):
    """After prefill and after rounds, also in finished sequences."""
    bound, weights, s = prefilled(name)
    _, hiddens = seen(name)
    assert s.draft.shape == (4, 1, 32)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(s.draft[row, 0], hiddens[row, length - 1], atol=1e-5, rtol=0)
    target = bound.target
    copied = jax.tree.map(jnp.copy, s)
    s = decode(weights, copied, jnp.int32(99), method=Method(target, bound, accept.greedy))
    cache = target.init_cache(weights.target, 4, 8, 8)
    forward = jax.jit(functools.partial(target.forward, capture_layers=(target.num_layers + 1,)))
    hidden = forward(weights.target, tree.chain(s.tokens), cache, None).hidden
    for row, length in enumerate(np.asarray(s.length)):
        np.testing.assert_allclose(s.draft[row, 0], hidden[row, length - 2], atol=2e-5, rtol=0)


SHAPES = {"chain": dict(depth=5), "tree": dict(depth=4, width=3)}


@pytest.mark.slow
@each(("name", "shape"), [("llama", "chain"), ("shared", "tree")], CASES, SHAPES)
def test_drafting_does_not_change_the_cache(name, shape):
    """Bit for bit; and the program creates no array with pages of 5 rows, which only a pool has."""
    bound, weights, s = prefilled(name, page_size=5)
    before = toy.arrays(s)
    compiled = jax.jit(dataclasses.replace(bound, **SHAPES[shape]).draft).lower(weights, s).compile()
    jax.block_until_ready(compiled(weights, s))
    toy.assert_same(toy.arrays(s), before)
    pools = [leaf for leaf in jax.tree.leaves(s.cache) if leaf.ndim == 6]
    assert pools
    lines = compiled.as_text().splitlines()
    for pool in pools:
        shape = f"f32[{','.join(map(str, pool.shape))}]"
        assert set(made(lines, shape)) == {"parameter"}
    assert "dynamic-update-slice" not in {opcode(line) for line in lines}


@each("shape", [], SHAPES)
def test_only_windows_and_full_layers_are_read(shape):
    bound, weights, s = prefilled("dense")
    draft = jax.jit(dataclasses.replace(bound, **SHAPES[shape]).draft)
    forgotten = dataclasses.replace(s, cache=poison.spoil(s.cache, s.length - 1))
    toy.assert_same(draft(weights, forgotten)[0], draft(weights, s)[0])


@pytest.mark.slow
@each("name", ["shared"], ["llama", "shared"])
def test_sampled_drafts_report_their_distribution(name):
    """A distribution over the tokens that have a logit; tokens outside the chosen clusters have none."""
    bound, weights, s = prefilled(name)
    drafter = dataclasses.replace(bound, sampled=True)
    s = dataclasses.replace(s, sampling=per_row(Sampling(temperature=0.7), 4, 61))
    draft_tree = jax.jit(drafter.draft)(weights, s)[0]
    tokens = np.asarray(draft_tree.tokens)
    for row in range(4):
        for number, (logits, _) in enumerate(chain_by_hand(name, row, tokens[row, :-1], "committed")):
            dist = np.exp((logits - logits.max()) / 0.7)
            np.testing.assert_allclose(draft_tree.probs[row, number], dist / dist.sum(), atol=1e-5)
            assert dist[tokens[row, number + 1]] > 0


@pytest.mark.slow
@each("backend", ["triton"], ["triton", "mosaic_tpu"])
def test_kernels_find_the_prefix_alone(backend, monkeypatch):
    """Nodes that see no row of the round, with windows and without."""
    bound, weights, s = prefilled("dense")
    length = np.array(s.length)
    given = IDS[:, :3], np.tile(s.draft, (1, 3, 1)), s.cache, length - 1, np.maximum(length - 2, 0)

    def run():
        return jax.jit(lambda weights, *given: bound.model.apply(weights, bound.target, *given))(weights, *given)

    wanted = run()
    kernel = functools.partial(paged_attention, backend=backend)
    for module in (mha, window):
        monkeypatch.setattr(module, "paged_attention", kernel)
    got = run()
    np.testing.assert_allclose(got.logits, wanted.logits, atol=2e-5, rtol=0)
    assert not np.isnan(got.hidden).any()
