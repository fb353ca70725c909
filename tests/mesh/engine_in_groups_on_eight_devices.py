"""The engine over groups of devices: each request gets what one device gives it, whichever group serves it.

test_mesh.py runs these tests in a process with eight CPU devices.
"""

import dataclasses
import threading
from types import SimpleNamespace

import gemma
import jax
import numpy as np
import on_eight_devices as split
import pytest
import tiny_targets as tiny
from random_models import arrays_of

import jspec
from jspec.checkpoints import language_model
from jspec.cli import main
from jspec.drafters import Mtp, Ngram, Standalone, Suffix
from jspec.engine import engine as engine_module
from jspec.loading import memory, startup
from jspec.runner.request import EngineError, QueueFull

directories = split.directories
slow = pytest.mark.slow
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, 60, size).tolist() for size in (5, 1, 12, 9, 3, 14, 8, 2, 10)]
LIMITS = [9, 3, 14, 6, 11, 4, 8, 16, 2]
SMALL = dict(slots=1, context=48, page_size=4, prefill_tokens=1, burst_ms=1.0)
"""Few programs: one that reads and one that runs rounds."""


@pytest.fixture(scope="module")
def load(directories, tmp_path_factory):
    def loaded(name, draft, **devices):
        if name != "windows":
            return jspec.load(directories(name), draft=draft and directories(draft), **devices)
        path = tmp_path_factory.mktemp("gemma") / "model"
        language_model.save(path, gemma.KINDS["dense"], gemma.params("dense"), dtype="float32")
        return jspec.load(path, **devices)

    return loaded


@pytest.fixture(scope="module")
def engine(load):
    with jspec.Engine(load("tied", None, data=2), drafter=Ngram(), **SMALL) as made:
        yield made


@pytest.fixture
def standing(engine, monkeypatch):
    """Lets groups stand still before their next read; returns a function that lets them go on."""
    resumed = threading.Event()

    def stand(*groups):
        for group in groups:
            read = group.device.read
            monkeypatch.setattr(group.device, "read", lambda plan, read=read: resumed.wait(60) and read(plan))
        return resumed.set

    yield stand
    resumed.set()


def given(engine):
    return [group.assigned for group in engine.groups]


def forget(engine):
    """Drops what the groups have read."""
    for group in engine.groups:
        group.ask(group.scheduler.forget).result(timeout=60)


def test_groups_generate_what_one_device_does(engine, load):
    expected = jspec.generate(load("tied", None), PROMPTS, drafter=Ngram(), page_size=4, max_new_tokens=LIMITS)
    before = given(engine)
    split.assert_same(engine.generate(PROMPTS, max_new_tokens=LIMITS), expected)
    assert repr(engine).endswith("Ngram, 2 groups of 1 slots, context 48)")
    assert sorted(after - b for after, b in zip(given(engine), before, strict=True)) == [4, 5]
    # Each group has a device of its own, and the weights that the model has there.
    for group, device in zip(engine.groups, jax.devices(), strict=False):
        assert {x.sharding.device_set == {device} for x in jax.tree.leaves(group.device.runner.state)} == {True}
        for own, leaf in zip(
            jax.tree.leaves(group.device.runner.params), jax.tree.leaves(engine.model.params), strict=True
        ):
            (shard,) = (shard for shard in leaf.addressable_shards if shard.device == device)
            assert own.addressable_shards[0].data.unsafe_buffer_pointer() == shard.data.unsafe_buffer_pointer()


def test_a_prompt_goes_to_the_group_that_has_read_its_beginning(engine):
    forget(engine)
    before, hits = given(engine), engine.metrics().prefix_hits
    for i in range(4):
        engine.generate([*PROMPTS[2], i], max_new_tokens=2)
    assert sorted(after - b for after, b in zip(given(engine), before, strict=True)) == [0, 4]
    assert engine.metrics().prefix_hits == hits + 3 * 12
    # One that no group knows goes to the one that has had fewer requests.
    before = given(engine)
    least = before.index(min(before))
    engine.generate(PROMPTS[5], max_new_tokens=2)
    assert given(engine)[least] == before[least] + 1


def test_a_group_waits_for_no_other(engine, standing):
    expected = engine.generate(PROMPTS[:2], max_new_tokens=6).tokens
    resume = standing(engine.groups[0])
    handles = [engine.submit(prompt, max_new_tokens=6) for prompt in PROMPTS[:2]]
    assert [group.load for group in engine.groups] == [1, 1]
    still, served = (next(x for x in handles if x.request is group._last) for group in engine.groups)
    assert served.result(timeout=60).tokens == expected[handles.index(served)]
    # A later request does not wait for the group that has stopped.
    assert engine.submit(PROMPTS[3], max_new_tokens=2).result(timeout=60).finish_reason == "length"
    assert not still.done
    resume()
    assert still.result(timeout=60).tokens == expected[handles.index(still)]


def test_requests_are_cancelled_and_counted_in_all_groups(engine, standing, monkeypatch):
    expected, before = engine.generate(PROMPTS[:4], max_new_tokens=9).tokens, engine.metrics()
    forget(engine)
    resume = standing(*engine.groups)
    handles = [engine.submit(prompt, max_new_tokens=9) for prompt in PROMPTS[:4]]
    assert [group.load for group in engine.groups] == [2, 2]
    # Both of one group, and none of the other.
    cancelled = [x for x in handles if x._cancel == engine.groups[1]._cancel]
    assert len(cancelled) == 2
    # Two of them wait whatever happens.
    monkeypatch.setattr(engine, "max_queue", 2)
    with pytest.raises(QueueFull, match="max_queue=2"):
        engine.submit(PROMPTS[4], max_new_tokens=2)
    for handle in cancelled:
        handle.cancel()
    resume()
    for handle, tokens in zip(handles, expected, strict=True):
        result = handle.result(timeout=60)
        assert result.tokens == tokens or (handle in cancelled and result.finish_reason == "cancelled")
    metrics = engine.metrics()
    assert (metrics.running, metrics.waiting, metrics.slots) == (0, 0, 2)
    assert metrics.requests_finished["cancelled"] == before.requests_finished.get("cancelled", 0) + 2
    assert [group.load for group in engine.groups] == [0, 0]
    parts = [group.metrics() for group in engine.groups]
    for name in ("new_tokens", "rounds", "device_rounds", "pages", "drafted", "accepted"):
        assert getattr(metrics, name) == sum(getattr(part, name) for part in parts) > 0
    assert metrics.end_to_end.count == sum(metrics.requests_finished.values())
    assert len(metrics.accepted_by_position) == Ngram().depth


def test_groups_get_equal_shares_of_the_memory(load, monkeypatch):
    found, model = [], load("tied", None, data=2, tensor=2)

    def record(model, options, *, free, only):
        found.append(free)
        if len(found) == 2:
            raise ZeroDivisionError

    monkeypatch.setattr(engine_module, "assemble", record)
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: (4000 // (1 + len(found)), 8000))
    with pytest.raises(ZeroDivisionError):
        jspec.Engine(model)
    assert found == [(1000, 2000)] * 2


@pytest.mark.slow
def test_an_error_of_one_group_ends_all_requests(load):
    engine, failed = jspec.Engine(load("tied", None, data=2), drafter=None, **SMALL), threading.Event()

    def fail(plan):
        raise RuntimeError("out of luck")

    def stand_still(plan):
        failed.wait(60)
        raise RuntimeError("later")

    for group, read in zip(engine.groups, (stand_still, fail), strict=True):
        group.device.read = read
    handles = [engine.submit(prompt, max_new_tokens=4) for prompt in PROMPTS[:4]]
    assert given(engine) == [2, 2]
    engine.groups[1].join()
    assert not engine.alive
    failed.set()
    for handle in handles:
        with pytest.raises(EngineError, match="out of luck"):
            handle.result(timeout=60)
    for call in (lambda: engine.submit(PROMPTS[0]), engine.warm_up, lambda: engine.update(engine.model.params)):
        with pytest.raises(EngineError, match="out of luck"):
            call()
    engine.close()
    assert not any(group._thread.is_alive() for group in engine.groups)


CASES = {
    "standalone tree, split": (
        ("tied", "draft of tied", dict(data=2, tensor=2, draft_tensor=True)),
        Standalone(**tiny.TREE),
        tiny.SAMPLED,
    ),
    "latents": (("latents", None, dict(data=2, tensor=2)), Mtp(depth=2), None),
    "windows and a corpus": (("windows", None, dict(data=2)), Suffix(n=4, depth=3, width=3), tiny.SAMPLED),
}
"""Name -> target, draft and devices, drafter, and how tokens are chosen."""


@slow
@pytest.mark.parametrize("name", CASES)
def test_other_families_and_drafters_in_groups(name, load):
    """More requests than slots; a prompt that comes again goes to the group that has read it, which shares that."""
    (target, draft, devices), drafter, sampling = CASES[name]
    model, one = load(target, draft, **devices), load(target, draft)
    if isinstance(drafter, Suffix):
        model, one = (jspec.with_corpus(each, [list(range(40))]) for each in (model, one))
    options = dict(max_new_tokens=LIMITS, seed=3, sampling=sampling, logprobs=True)
    expected = jspec.generate(one, PROMPTS, drafter=drafter, page_size=4, **options)
    with jspec.Engine(model, drafter=drafter, **SMALL, pages=60) as engine:
        split.assert_same(engine.generate(PROMPTS, **options), expected)
        assert min(given(engine)) >= 4
        before, hits = given(engine), engine.metrics().prefix_hits
        for _ in range(3):
            again = engine.generate(PROMPTS[3], **{**options, "max_new_tokens": LIMITS[3], "seed": [(3, 3)]})
            assert again.tokens == expected[3].tokens
            np.testing.assert_array_equal(again.stats.accept_counts, expected[3].stats.accept_counts)
        assert 0 in [after - b for after, b in zip(given(engine), before, strict=True)]
        assert engine.metrics().prefix_hits - hits >= 2 * 4
        if name == "standalone tree, split":
            check_new_weights(engine, one, options)


def check_new_weights(engine, one, options):
    """Every group gets them, and compiles nothing."""
    config = tiny.TIED
    arrays = arrays_of(config, tiny.weights(config, 5))
    target = jspec.from_named(config, arrays, data=2, tensor=2).params.target
    new = one.with_params(jspec.from_named(config, arrays).params.target)
    expected = jspec.generate(new, PROMPTS, drafter=Standalone(**tiny.TREE), page_size=4, **options)
    before = startup.compilations()
    engine.update(dataclasses.replace(engine.params, target=target))
    split.assert_same(engine.generate(PROMPTS, **options), expected)
    assert startup.compilations() == before
    assert engine.params.target is target
    with pytest.raises(ValueError, match="params.target.*: has the sharding .*; must have that of the model"):
        engine.update(one.params)
    # Between the bursts of a group that has requests.
    scores = jspec.score(new, PROMPTS[:1], top_k=2)
    handles = [engine.submit(prompt, max_new_tokens=20) for prompt in PROMPTS]
    split.assert_same_scores([engine.score(PROMPTS[0], 2)], scores)
    for handle in handles:
        handle.result()


@slow
def test_a_server_over_groups(monkeypatch):
    """Every group is warm before the first request, and each answers as one device does."""
    testclient = pytest.importorskip("starlette.testclient", reason="starlette is not installed")
    server = pytest.importorskip("jspec.serve.server", reason="uvicorn is not installed")
    answers = {}

    def make_server(service, bound, grace, surface):
        engine, client = service._engine, testclient.TestClient(service.app())
        assert [group.assigned for group in engine.groups] == [2, 2]
        before = startup.compilations()

        def ask(index):
            body = {"prompt": prompts[index], "max_tokens": 5 + index, "temperature": 0}
            answers[index] = client.post("/v1/completions", json=body).json()["choices"][0]["text"]

        def run(sockets):
            threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(given(engine)) == [4, 4] and startup.compilations() == before
            assert 'vllm:generation_tokens_total{model_name="tiny"}' in client.get("/metrics").text

        return SimpleNamespace(run=run, handle_exit=lambda *_: None, interrupted=False)

    monkeypatch.setattr(server, "make_server", make_server)
    prompts = ["def f(", "import os", "x = [", "class A"]
    options = ["--slots", "1", "--context", "64", "--prefill-tokens", "1", "--drafter", "plain", "--name", "tiny"]
    assert main(["serve", "bundled:python-tiny", "--port", "0", "--data", "2", *options]) == 0
    limits = [5, 6, 7, 8]
    one = jspec.generate(jspec.load("bundled:python-tiny"), prompts, drafter="plain", max_new_tokens=limits)
    assert [answers[index] for index in range(4)] == one.text


def test_the_server_takes_groups(capsys):
    assert main(["serve", "bundled:python-tiny", "--port", "0", "--data", "9"]) == 2
    assert "--data 9: must be at most 8, the number of devices" in capsys.readouterr().err
