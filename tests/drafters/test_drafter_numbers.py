"""Choices of `Adaptive` by value: probes, defaults, what is offered, whose state is shared, and what rounds cost."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jspec.bench import measure, weights
from jspec.core import optional
from jspec.drafters import DRAFTERS, Adaptive, Block, Eagle, Mtp, Ngram, Standalone, Suffix, policy
from jspec.generation.method import by_sequences, choose_drafter
from jspec.generation.options import EngineOptions
from pallas_kernels import platform

CHOICES = policy.Choices(
    np.array([-1, 0, 0, 0, 1, 1], np.int32), np.array([0, 1, 5, 3, 4, 2], np.int32), np.zeros(2, bool), np.ones(2, int)
)
VALUE = np.array([1.0, 1.2, 1.0, 1.1, 0.9, 0.8], np.float32)
"""By choice; the second kind is last."""
ANY = np.full(6, 9.0, np.float32)


def valued(**changes):
    value = VALUE.copy()
    for name, number in changes.items():
        value[int(name[1:])] = number
    return value


@pytest.mark.parametrize(
    ("value", "most", "previous", "index", "expected"),
    [
        (VALUE, ANY, -1, 0, (1, 1)),
        (VALUE, ANY, -1, 2, (1, 1)),
        (VALUE, ANY, -1, 3, (3, 1)),
        (VALUE, ANY, -1, 11, (3, 1)),
        (valued(_3=1.4), ANY, -1, 3, (2, 3)),
        (valued(_2=1.4), ANY, -1, 3, (2, 2)),
        (valued(_0=1.4), ANY, -1, 3, (1, 0)),
        (VALUE, ANY, -1, 7, (4, 1)),
        (valued(_5=1.4), ANY, -1, 7, (4, 5)),
        (valued(_4=1.4), ANY, -1, 7, (4, 4)),
        (VALUE, np.full(6, 1.25, np.float32), -1, 3, (3, 1)),
        (VALUE, VALUE[1] * np.ones(6, np.float32), -1, 3, (1, 1)),
        (VALUE, ANY, 3, 0, (3, 3)),
        (VALUE, ANY, 0, 0, (1, 1)),
        (VALUE, ANY, 3, 3, (2, 3)),
    ],
    ids=(
        *("best", "before a probe", "next deeper", "two turns later", "deeper than that", "the deepest", "from plain"),
        *("other kind", "deeper of it", "deepest of it", "could be better", "could not", "stays", "leaves", "of it"),
    ),
)
def test_probes(value, most, previous, index, expected):
    """Every fourth round, by turns of the two kinds; the best one so far stays unless another is a tenth better."""
    choose = jax.jit(lambda *args: policy.choose(*args, CHOICES, hysteresis=0.1, probe=4))
    index, best = choose(value, most, np.int32(previous), np.int32(index))
    assert (int(index), int(best)) == expected


DEFAULTS = {
    "adaptive": dict(rate=0.1, prior=0.7, hysteresis=0.03, probe=32, watch=True, depths=None),
    "block": dict(depth=None, width=1, num_nodes=None, sampled=False, window=None, keep_first=0),
    "eagle": dict(depth=5, width=1, sampled=False, exact=True, window=None, keep_first=0),
    "frozen-kv-mtp": dict(depth=5, width=1, sampled=False, position="committed"),
    "mtp": dict(depth=None, width=1, sampled=False, heads=None),
    "ngram": dict(n=3, depth=4),
    "plain": dict(depth=0),
    "standalone": dict(depth=4, width=1, sampled=False, window=None, keep_first=0),
    "suffix": dict(n=16, depth=31, width=32),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_defaults(name):
    drafter = DRAFTERS[name]()
    assert {field: getattr(drafter, field) for field in DEFAULTS[name]} == DEFAULTS[name]


def test_the_default_is_that_of_the_loaded_draft():
    auto = choose_drafter("auto", SimpleNamespace(draft=None))
    assert (auto.drafters, auto.depths) == ((DRAFTERS["plain"](), Ngram(depth=3), Ngram(depth=6)), ((4, 6),))
    assert choose_drafter("auto", SimpleNamespace(draft=SimpleNamespace(drafter="eagle"))) == Eagle()


@pytest.mark.parametrize(("batch", "chain"), [(1, 3), (4, 3), (5, 2), (8, 2), (9, 1), (99, 1)])
def test_depths_offer_one_chain_and_every_tree(batch, chain):
    """The deepest chain within the depth of these sequences; beyond them, the shallowest."""
    drafters = (None, Ngram(depth=2), Ngram(depth=5), Ngram(depth=8), Suffix(width=2, depth=9))
    adaptive = Adaptive(drafters, depths={8: 7, 4: 8}).bind(SimpleNamespace(), None)
    assert adaptive.offered(batch) == [0, chain, 4] and optional.wants_costs(adaptive)
    assert dataclasses.replace(adaptive, depths=None).offered(batch) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("draft", "depth", "others", "depths"),
    [
        ("eagle", 5, (1, 2, 3), {16: 5, 48: 3, 96: 2}),
        ("standalone", 4, (1, 2, 3), {16: 4, 48: 3, 96: 2}),
        ("mtp", 3, (1, 2), {16: 3, 48: 3, 96: 2}),
        ("mtp", 2, (1,), {16: 2, 48: 2, 96: 2}),
        ("block", 15, (1, 2, 3), {16: 15, 48: 3, 96: 2}),
        ("mtp", 1, (), None),
    ],
)
def test_default_chains_of_engines_are_shorter_for_many_sequences(monkeypatch, draft, depth, others, depths):
    drafter = DRAFTERS[draft]()
    bound = dataclasses.replace(drafter, depth=depth)
    monkeypatch.setattr(type(drafter), "bind", lambda self, target, draft: bound)
    model = SimpleNamespace(target=None, draft=None)
    monkeypatch.setattr(platform, "platform", lambda: "cpu")
    assert by_sequences(drafter, model) is drafter
    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    default = by_sequences(drafter, model)
    if depths is None:
        assert default is drafter
    else:
        chains = tuple(dataclasses.replace(drafter, depth=other) for other in others)
        assert default == Adaptive((*chains, drafter), depths=depths)


@pytest.mark.parametrize(("device", "expected"), [("cpu", 100.0), ("gpu", 25.0), ("tpu", 25.0)])
def test_bursts_are_longer_on_a_cpu(monkeypatch, device, expected):
    monkeypatch.setattr(platform, "platform", lambda: device)
    model = SimpleNamespace(target=SimpleNamespace(max_length=64))
    assert EngineOptions().for_model(model).burst_ms == expected
    assert EngineOptions(burst_ms=7.0).for_model(model).burst_ms == 7.0


MODEL = "the target and its weights"


def mtp(depth, **changes):
    return Mtp(**{"depth": depth, "target": MODEL, "model": MODEL, **changes})


@pytest.mark.parametrize(
    ("drafter", "owner", "shared"),
    [
        (mtp(2), mtp(3), True),
        (mtp(3), mtp(3, heads=3), True),
        (mtp(3), mtp(2), False),
        (mtp(2), mtp(3, model=None), False),
        (mtp(2), mtp(3, sampled=True), False),
        (mtp(2), Eagle(depth=3), False),
        (Eagle(depth=4), Eagle(depth=1), True),
        (Eagle(width=3), Eagle(width=2), False),
        (Eagle(width=2), Eagle(width=3), True),
        (Standalone(depth=4), Standalone(depth=1), True),
        (Ngram(depth=2), Ngram(depth=3), True),
        (Ngram(depth=3), Ngram(depth=2), False),
        (Ngram(n=2, depth=2), Ngram(n=3, depth=2), False),
        (Block(depth=4), Block(depth=2, window=8), True),
    ],
    ids=str,
)
def test_a_state_serves_drafters_that_need_no_more_of_it(drafter, owner, shared):
    assert optional.shares(drafter, owner) == shared


@pytest.mark.parametrize("depths", ((2, 3, 4), (4, 3, 2), (3, 4, 2)))
def test_the_deepest_heads_have_the_state_of_all(depths):
    adaptive = Adaptive(tuple(mtp(depth) for depth in depths), target=MODEL)
    ((owner, state),) = adaptive.parts(SimpleNamespace(states=("state",)))
    assert (owner.depth, state) == (4, "state")
    assert adaptive.states(SimpleNamespace(states=("state",))) == ("state",) * 3


class Costed:
    """A target or a draft whose bytes name their kind: 10,000 for each token, 100 for each position, and so on."""

    def __init__(self, at_once, extends=True):
        self.at_once, self.max_length = at_once, 999
        self.forward_bytes = lambda params, tokens: 10_000 * tokens
        self.kv_bytes = lambda context, itemsize, target=None: context * (1 if target else 100)
        self.state_bytes = lambda itemsize: 1_000_000
        self.extend_bytes = lambda params: 10**8 * extends
        self.step_bytes = lambda params: 10**9


@pytest.mark.parametrize(
    ("drafter", "draft", "steps", "tokens", "seen"),
    [
        (DRAFTERS["plain"](), None, 0, 1, 0),
        (Eagle(depth=5), Costed(False), 4.1, 6, 50),
        (Eagle(depth=5), Costed(False, extends=False), 5, 6, 50),
        (Eagle(depth=3, width=4, num_nodes=20), Costed(False), 2.1, 20, 30),
        (Eagle(depth=3, width=4), Costed(False), 2.1, 32, 30),
        (Block(depth=5), Costed(True), 1.1, 6, 10),
        (Block(depth=5, width=2, num_nodes=12, window=4, keep_first=2), Costed(True), 1.1, 12, 6),
        (Eagle(depth=5, window=4), Costed(False), 4.1, 6, 20),
    ],
    ids=("plain", "chain", "no extension", "tree", "tree of 32", "block", "tree of a block, window", "window"),
)
def test_bytes_of_a_round(drafter, draft, steps, tokens, seen):
    """Two sequences of 10 tokens: forwards of the draft, nodes of the tree, positions read by all of its steps."""
    params = SimpleNamespace(target=SimpleNamespace(embed=np.zeros(1)))
    target, sizes = Costed(False), {"depth": drafter.depth, "batch": 2, "context": 10}
    expected = round(steps * 10**9) + 2 * tokens * 10_000 + 2 * 10 * 100 + 2 * 2 * 1_000_000 + 2 * seen
    setup = SimpleNamespace(params=params, target=target, draft=draft, placement=None)
    assert measure.case_bytes(setup, drafter, 2, 10) == expected
    if drafter.depth and getattr(drafter, "width", 1) == 1 and drafter.window is None:
        assert weights.round_bytes(params, target, draft, **sizes) == expected, "nodes of a chain"
