"""`jspec.generate` with more prompts than run at once gives what the same prompts give in one batch."""

import dataclasses
import gc
import itertools
import types
import weakref

import jax
import numpy as np
import pytest
import toy

import jspec
from jspec.core.struct import struct
from jspec.core.types import Params
from jspec.drafters import Ngram, Plain, Standalone
from jspec.engine import engine as engine_module
from jspec.engine import generate
from jspec.engine.engine import Engine
from jspec.engine.handle import Handle
from jspec.generation import run
from jspec.generation.options import GenerateOptions
from jspec.generation.run import Run
from jspec.loading.model import Model
from jspec.runner import runner
from jspec.runner.device import Device
from jspec.runner.plan import Output
from jspec.runner.request import Request
from jspec.runner.runner import Runner

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, 61, size).tolist() for size in (5, 1, 12, 9, 3, 17, 8)]
SAMPLED = jspec.Sampling(temperature=0.9, top_p=0.95)
MIXED = [SAMPLED if i % 2 else None for i in range(len(PROMPTS))]


def model() -> Model:
    return Model("toy", toy.TARGET, toy.params(), None, (7,), toy.NEAR)


@pytest.fixture(autouse=True)
def few_slots(monkeypatch):
    monkeypatch.setattr(generate, "MAX_BATCH", 3)


def check_same(got, wanted):
    assert got.tokens == wanted.tokens and got.prompt == wanted.prompt
    assert got.finish_reason == wanted.finish_reason and got.origin == wanted.origin
    for name in ("rounds", "accept_counts", "dropped"):
        np.testing.assert_array_equal(getattr(got.stats, name), getattr(wanted.stats, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    (
        dict(drafter=Ngram(n=2, depth=3)),
        dict(drafter=Standalone(depth=3), sampling=SAMPLED, seed=11, logprobs=True),
        dict(drafter=Standalone(depth=2, width=2, num_nodes=5), sampling=MIXED, seed=list(range(7, 0, -1))),
        dict(drafter=Standalone(depth=3), sampling=MIXED, accept="block"),
        dict(drafter=Standalone(depth=3), accept="rejection"),
        dict(drafter=None, page_size=5),
    ),
    ids=("greedy", "sampled", "mixed_tree", "block", "greedy_by_another_rule", "plain"),
)
def test_prompts_that_take_turns_give_what_one_batch_gives(options):
    got = jspec.generate(model(), PROMPTS, max_new_tokens=13, **options)
    wanted = Run(model(), PROMPTS, GenerateOptions(max_new_tokens=13, **options)).finish()
    check_same(got, wanted)
    assert (got.logprobs is None) == (wanted.logprobs is None)
    for ours, theirs in zip(got.logprobs or [], wanted.logprobs or [], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
def test_the_longest_start_first_where_all_are_known(monkeypatch):
    """Equal ones in the order of the prompts, and before what comes later; results have the order of the prompts."""
    limits, admitted, admit = [3, 9, 5, 9, 1, 12, 5], [], Device.admit

    def record(device, requests):
        admitted.extend(request.max_new_tokens for request in requests)
        admit(device, requests)

    monkeypatch.setattr(Device, "admit", record)
    alone = Run(model(), PROMPTS, GenerateOptions(max_new_tokens=limits, drafter=None)).finish()
    check_same(jspec.generate(model(), PROMPTS, max_new_tokens=limits, drafter=None), alone)
    assert admitted == sorted(limits, reverse=True)
    with Engine(model(), drafter=None, slots=1, context=32) as engine:
        admitted.clear()
        handles = [engine.submit(prompt, max_new_tokens=new) for prompt, new in zip(PROMPTS, limits, strict=True)]
        later = engine.generate(PROMPTS[:3], max_new_tokens=[2, 14, 7])
        assert [handle.result().tokens for handle in handles] == alone.tokens
    assert admitted == [*limits, 14, 7, 2]
    assert [len(tokens) for tokens in later.tokens] == [2, 14, 7]


@pytest.mark.parametrize(("count", "debug", "shapes"), ((3, False, [3]), (7, True, [3, 3, 3])), ids=("few", "debug"))
def test_few_prompts_and_checked_rounds_are_no_engines_work(monkeypatch, count, debug, shapes):
    monkeypatch.setattr(engine_module, "assemble", None)
    sizes, prefill = [], run.jitted_prefill
    monkeypatch.setattr(
        run, "jitted_prefill", lambda params, x, **static: sizes.append(len(x.ids)) or prefill(params, x, **static)
    )
    out = jspec.generate(model(), PROMPTS[:count], drafter=None, max_new_tokens=3, debug=debug)
    assert len(out) == count and out.stats.new_tokens == 3 * count and sizes == shapes


def test_the_state_of_an_engine_ends_with_the_call(monkeypatch):
    """A second call has the memory of the first one, without a collection of cycles."""
    devices, assemble = [], engine_module.assemble

    def record(*arguments, **keywords):
        parts = assemble(*arguments, **keywords)
        devices.append(weakref.ref(parts[0]))
        return parts

    monkeypatch.setattr(engine_module, "assemble", record)
    gc.collect()
    gc.disable()
    try:
        jspec.generate(model(), PROMPTS, drafter=None, max_new_tokens=3)
        assert [device() for device in devices] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (dict(max_new_tokens=10**6), "max_new_tokens=1000000"),
        (dict(seed=2**32), "seed=4294967296"),
        (dict(seed=[1, 2]), "seed: 2 for 7"),
        (dict(sampling=[None] * 3), "sampling: 3 for 7"),
        (dict(accept="greedy", sampling=SAMPLED), "accept='greedy'"),
        (dict(page_size=0), "page_size=0"),
        (dict(drafter="eagle"), "Eagle"),
    ),
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_options_are_refused_before_there_is_an_engine(monkeypatch, options, message):
    monkeypatch.setattr(engine_module, "assemble", None)
    with pytest.raises((ValueError, TypeError), match=message):
        jspec.generate(model(), PROMPTS, **options)


@struct
class Unslotted:
    """A cache that only `generate` can use."""

    inner: object

    def commit(self, *given):
        return Unslotted(self.inner.commit(*given))

    def attend(self, *given, **options):
        return self.inner.attend(*given, **options)


@dataclasses.dataclass(frozen=True)
class UnslottedTarget(type(toy.TARGET)):
    def init_cache(self, *given):
        return Unslotted(super().init_cache(*given))


@pytest.mark.slow
def test_a_cache_without_slots_runs_in_one_batch_and_an_engine_refuses_it():
    target = UnslottedTarget(
        **{field.name: getattr(toy.TARGET, field.name) for field in dataclasses.fields(toy.TARGET)}
    )
    unslotted = Model("mine", target, Params(toy.params().target), None, (7,))
    wanted = Run(model(), PROMPTS, GenerateOptions(drafter=None, max_new_tokens=5)).finish()
    assert jspec.generate(unslotted, PROMPTS, drafter=None, max_new_tokens=5).tokens == wanted.tokens
    with pytest.raises(ValueError, match="its cache Unslotted must have the methods of"):
        Engine(unslotted, drafter=None)


@pytest.mark.slow
@pytest.mark.parametrize("engine", (False, True), ids=("generate", "engine"))
def test_seconds_leave_out_compilation(monkeypatch, engine):
    """Each compiling call takes 1,000 seconds of a clock of its own, so that less than no time remains."""
    clock, fill = itertools.count(0, 1000), Runner._fill

    def compile(self, *arguments):
        if not self.compile_seconds:
            jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 1.0)
        return fill(self, *arguments)

    monkeypatch.setattr(runner, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(Runner, "_fill", compile)
    if not engine:
        out = jspec.generate(model(), PROMPTS, drafter=None, max_new_tokens=5)
        assert out.stats.seconds < -500
        return
    with Engine(model(), drafter=None, slots=4) as running:
        assert running.generate(PROMPTS, max_new_tokens=5).stats.seconds < -500
    # A single request whose second program is compiled after its first token.
    handle = Handle(Request([1], 4), None, lambda _: None, Plain())
    for now, compiled in ((1.0, 5.0), (9.0, 11.0)):
        handle.deliver(Output(2, [1], 0, 1, [1]), now, compiled)
    assert handle.generation().stats.seconds == 2.0
