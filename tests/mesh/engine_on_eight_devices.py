"""The engine over several devices: any schedule gives each request what one device gives it alone.

test_mesh.py runs these tests in a process with eight CPU devices.
"""

import dataclasses
import functools

import engine_storm
import jax
import numpy as np
import on_eight_devices as split
import pytest
import tiny_targets as tiny
from engine_storm import Setup, Storm
from random_models import arrays_of

import jspec
from jspec.core import accept
from jspec.core.method import Method
from jspec.drafters import Eagle, Mtp, Ngram, Plain, Standalone
from jspec.engine.generate import generate_all
from jspec.generation.method import bind_drafter
from jspec.loading import memory
from jspec.models.sizes import tree_bytes
from jspec.runner import programs, sizing, slot_state
from jspec.runner.sizing import read_shapes, slot_buckets
from jspec.runner.slot_state import Sizes

directories, load = split.directories, split.load
slow = pytest.mark.slow
TREE = tiny.TREE
CASES = {
    "ngram": ("tied", None, 2, None, Ngram()),
    "experts and copies of heads": ("experts", None, 4, None, Ngram()),
    "latents": ("latents", None, 4, None, Mtp(depth=2)),
    "snapshots of windows": ("windows", None, 4, None, Ngram(n=2, depth=3)),
    "states": ("states", None, 2, None, Mtp(depth=2)),
    "eagle tree, split": ("odd vocabulary", "head", 2, True, Eagle(**TREE)),
    "standalone chain, whole": ("tied", "draft of tied", 4, False, Standalone(depth=3, sampled=True)),
}
"""Name -> target, draft, devices, whether the draft is split, and drafter."""
TIGHT = dict(count=14, pages=13)
STORMS = {
    "ngram": ("greedy", Storm(count=8, seed=1, eos=(7,))),
    "experts and copies of heads": ("sampled", Storm(seed=2, cancels=0.1, **TIGHT)),
    "latents": ("greedy", Storm(seed=3, max_in_flight=1, **TIGHT)),
    "snapshots of windows": ("sampled", Storm(snapshots=2)),
    "states": ("greedy", Storm(seed=3, max_in_flight=1, count=10)),
    "eagle tree, split": ("sampled", Storm(seed=5, max_in_flight=1, cancels=0.1, **TIGHT)),
    "standalone chain, whole": ("rejection", Storm(seed=9, cancels=0.1, **TIGHT)),
}
"""Name -> how tokens are chosen, and a schedule."""
RETRACTS = {"eagle tree, split", "standalone chain, whole"}
FAST = {"ngram"}
SIZES = dict(slots=3, context=48, page_size=4, prefill_tokens=16)


def setups(load, name, kind):
    """What generates over several devices, and on one."""
    target, draft, tensor, draft_tensor, drafter = CASES[name]
    chosen = {} if kind == "greedy" else {"sampling": tiny.SAMPLED}
    if kind == "rejection":
        chosen["lossless"] = accept.rejection
    made = []
    for model in (load(target, draft, tensor, draft_tensor), load(target, draft, None)):
        bound = bind_drafter(drafter, model.target, model.draft)
        weights = functools.partial(getattr, model, "params")
        made.append(Setup(model.target, bound, weights, placement=model.placement, **chosen))
    return made


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FAST else slow) for name in CASES])
def test_a_storm_gives_each_request_what_one_device_gives_it(name, load):
    """Arrivals, cancels, prefix hits, pools that force preemptions; rows of the drafter with one program in flight."""
    kind, storm = STORMS[name]
    over, one = setups(load, name, kind)
    counts = engine_storm.run(over, storm, one)
    assert counts["shared"]
    assert counts["preemptions"] or name not in RETRACTS
    assert counts["restored"] or name != "states"
    assert counts["rows"] or storm.max_in_flight > 1
    assert counts["restored"] or "snapshots" not in name


@pytest.fixture
def traced(monkeypatch):
    """How often each program has been traced, and so compiled; by a function that it calls once."""
    counts = dict.fromkeys(("run_while", "read_columns", "seeds_to_keys"), 0)

    def count(name, function):
        def counted(*args, **static):
            counts[name] += 1
            return function(*args, **static)

        return counted

    for name in counts:
        monkeypatch.setattr(programs, name, count(name, getattr(programs, name)))
    return counts


@slow
def test_an_engine_over_devices_generates_and_takes_new_weights(load, traced):
    """In few programs, which new weights do not compile again."""
    config = tiny.TIED
    model, one = (load("tied", "draft of tied", *over) for over in ((4, True), (None,)))
    options = dict(max_new_tokens=12, seed=3, logprobs=3)
    drafter = Standalone(**TREE)
    rows = SIZES["slots"], SIZES["context"], SIZES["prefill_tokens"], 3
    with jspec.Engine(model, drafter=drafter, **SIZES) as engine:
        assert len(engine.groups[0].device.runner.state.tokens.sharding.device_set) == 4
        engine.warm_up(logprobs=3)  # No program is left for the thread to compile.
        expected = jspec.generate(one, tiny.PROMPTS, drafter=drafter, **options)
        got = engine.generate(tiny.PROMPTS, **options)
        split.assert_same(got, expected)
        counts = dict(traced)
        assert 0 < counts["run_while"] <= len(slot_buckets(3, fine=True))
        assert 0 < counts["read_columns"] <= len(read_shapes(*rows))

        arrays = arrays_of(config, tiny.weights(config, 5))
        target = jspec.from_named(config, arrays, tensor=4).params.target
        engine.update(dataclasses.replace(model.params, target=target))
        new = one.with_params(jspec.from_named(config, arrays).params.target)
        split.assert_same(
            engine.generate(tiny.PROMPTS, **options), jspec.generate(new, tiny.PROMPTS, drafter=drafter, **options)
        )
        assert counts == traced
        with pytest.raises(ValueError, match="params.target.*: has the sharding .*; must have that of the model"):
            engine.update(one.params)
        split.assert_same_scores([engine.score(tiny.PROMPTS[0], 2)], jspec.score(new, tiny.PROMPTS[:1], top_k=2))


@pytest.mark.slow
def test_an_error_of_a_score_is_its_callers_alone(load, monkeypatch):
    """Also if the devices of a group take all calls from one thread."""

    def out_of_memory(chunk):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted")

    model = load("tied", None, 2)
    with jspec.Engine(model, drafter=None, **SIZES) as engine:
        running = engine.submit(tiny.PROMPTS[1], max_new_tokens=12)
        with monkeypatch.context() as patch:
            patch.setattr(engine.groups[0].device, "score", out_of_memory)
            with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
                engine.score([5, 6, 7])
        assert engine.alive and running.result(timeout=300).tokens
        split.assert_same_scores([engine.score(tiny.PROMPTS[0], 2)], jspec.score(model, tiny.PROMPTS[:1], top_k=2))


def test_the_state_of_an_engine_counts_per_device(load, monkeypatch):
    model = load("tied", None, 4)
    method = Method(model.target, Plain(), accept.greedy, model.placement)
    sizes = Sizes(slots=3, context=48, page_size=4)
    own = sizing._state(model.params, method, sizes)
    whole = jax.eval_shape(functools.partial(slot_state.empty_state, method=method, sizes=sizes), model.params)
    assert own.cache.pool.size * 4 == whole.cache.pool.size and own.tokens.shape == whole.tokens.shape
    needed = tree_bytes(own)
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: (4 * (needed - 1), 10**9))
    with pytest.raises(ValueError, match="the state takes .* on each of 4 devices"):
        jspec.Engine(model, drafter=None, pages=14, **SIZES)


def test_snapshots_of_windows_are_split_by_heads(load):
    model = load("windows", None, 4)
    method = Method(model.target, Plain(), accept.greedy, model.placement)
    sizes = Sizes(slots=3, context=48, page_size=4, pages=5)
    empty = functools.partial(slot_state.empty_state, method=method, sizes=sizes)
    cache = jax.eval_shape(empty, model.params).cache
    made = functools.partial(slot_state.empty_snapshots, count=3, placement=model.placement)
    whole = jax.tree.leaves(jax.eval_shape(made, cache))
    own = jax.tree.leaves(model.placement.local(jax.eval_shape(made, cache)))
    kept = jax.tree.leaves(slot_state.slot_states(model.placement.local(cache)))
    assert kept and [x.shape for x in own] == [(3, *x.shape) for x in kept]
    assert [x.size for x in whole] == [4 * x.size for x in own]


@slow
def test_more_prompts_than_run_at_once_take_turns(load):
    model, one = load("tied", None, 4), load("tied", None, None)
    prompts = [[int(x) for x in ids] for ids in np.random.default_rng(0).integers(0, 60, (66, 5))]
    options = jspec.GenerateOptions(drafter=Ngram(), max_new_tokens=4)
    got = generate_all(model, prompts, options)
    split.assert_same(got, generate_all(one, prompts, options))
