"""The engine as its users see it: from any thread, with text or ids, one request or many."""

import asyncio
import dataclasses
import functools

import jax
import numpy as np
import pytest
import qwen
import toy
from waiting import in_threads

import jspec
from jspec.core import accept
from jspec.core.method import Method
from jspec.core.sampling import Sampling
from jspec.core.types import Params
from jspec.drafters import Ngram, Standalone
from jspec.engine.engine import Engine
from jspec.generation.options import EngineOptions
from jspec.loading import startup
from jspec.loading.model import Model
from jspec.models.sizes import tree_bytes
from jspec.runner import programs, sizing, slot_state
from jspec.runner.request import EngineError, QueueFull
from jspec.runner.slot_state import Sizes

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 61, size).tolist() for size in (5, 1, 12, 9, 3, 17, 8)]
OPTIONS = dict(slots=4, context=64, page_size=4, prefill_tokens=4, burst_ms=2.0)


def model(params: Params | None = None) -> Model:
    return Model("toy", toy.TARGET, toy.params() if params is None else params, None, (7,), toy.NEAR)


@pytest.fixture(scope="module")
def engine():
    with Engine(model(), drafter=Standalone(depth=3), **OPTIONS) as made:
        yield made


def same(got, wanted):
    assert got.tokens == wanted.tokens
    assert got.finish_reason == wanted.finish_reason
    assert got.origin == wanted.origin
    np.testing.assert_array_equal(got.stats.rounds, wanted.stats.rounds)
    np.testing.assert_array_equal(got.stats.accept_counts, wanted.stats.accept_counts)


def check_top(generation, k, model):
    """The recorded log-probabilities are those that `score` finds for the whole text."""
    text = [*generation.prompt, *generation.tokens]
    every = jspec.score(model, text, top_k=model.target.vocab_size)
    assert len(generation.top_logprobs) == len(generation.tokens)
    for at, (top, logprob) in enumerate(zip(generation.top_logprobs, generation.logprobs, strict=True)):
        wanted = every.top[len(generation.prompt) + at]
        assert len(top) == k and len({token for token, _ in top}) == k
        np.testing.assert_allclose([x for _, x in top], [x for _, x in wanted[:k]], atol=2e-5)
        np.testing.assert_allclose([dict(wanted)[token] for token, _ in top], [x for _, x in top], atol=2e-5)
        assert abs(logprob - dict(wanted)[text[len(generation.prompt) + at]]) < 2e-5


@pytest.mark.slow
def test_more_prompts_than_slots(engine):
    sampling = [None, Sampling(temperature=0.8), None, Sampling(top_p=0.9), None, None, Sampling(temperature=1.2)]
    options = dict(max_new_tokens=14, sampling=sampling, seed=5, logprobs=3)
    got = engine.generate(PROMPTS, **options)
    wanted = jspec.generate(model(), PROMPTS, drafter=Standalone(depth=3), **options)
    same(got, wanted)
    for ours, theirs in zip(got.sampled_logprobs, wanted.sampled_logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    for ours, theirs in zip(got.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    for generation in (*got, wanted[0]):
        check_top(generation, 3, engine.model)
    single = engine.generate(PROMPTS[2], max_new_tokens=14)
    assert isinstance(single, jspec.Generation) and single.tokens == got[2].tokens


@pytest.mark.slow
def test_top_logprobs_of_a_mixed_load(engine):
    """Requests that record different numbers of tokens run together; each token has those of its own node."""
    wanted = [3, False, True, 7, 1, 20, False]
    options = dict(max_new_tokens=14, sampling=Sampling(temperature=0.8))
    handles = [
        engine.submit(prompt, logprobs=each, seed=i, **options)
        for i, (prompt, each) in enumerate(zip(PROMPTS, wanted, strict=True))
    ]
    for i, (handle, each) in enumerate(zip(handles, wanted, strict=True)):
        result = handle.result()
        assert result.tokens == engine.generate(PROMPTS[i], seed=i, **options).tokens
        assert (result.logprobs is None) == (each is False)
        pieces = [piece.top_logprobs for piece in handle]
        if each is False or each is True:
            assert result.top_logprobs is None and set(map(type, pieces)) == {type(None)}
        else:
            check_top(result, each, engine.model)
            assert sum(pieces, []) == result.top_logprobs


@pytest.mark.slow
def test_samples_of_a_prompt_are_items_of_their_own(engine):
    options = dict(max_new_tokens=6, sampling=Sampling(temperature=0.8))
    got = engine.generate(PROMPTS[:2], n=3, seed=20, **options)
    assert got.prompt == [PROMPTS[i // 3] for i in range(6)]
    for i, item in enumerate(got):
        assert item.tokens == engine.generate(PROMPTS[i // 3], seed=[(20, i)], **options).tokens
    assert len(engine.generate(PROMPTS[0], n=1, max_new_tokens=2)) == 1
    with pytest.raises(ValueError, match="n=0: must be at least 1"):
        engine.generate(PROMPTS[0], n=0)
    with pytest.raises(ValueError, match="seed: 2 for 6 sequences"):
        engine.generate(PROMPTS[:2], n=3, seed=[1, 2])


def test_an_engine_needs_a_model():
    with pytest.raises(TypeError, match="model='toy': must be a jspec.Model"):
        Engine("toy")


def test_a_request_has_a_single_prompt(engine):
    with pytest.raises(ValueError, match="prompt: is a list of 2 prompts; must be a single one"):
        engine.submit(PROMPTS[:2])


def test_pieces_are_the_result(engine):
    handle = engine.submit(PROMPTS[2], max_new_tokens=14)
    pieces, result = list(handle), handle.result()
    for attribute in ("tokens", "origin"):
        assert [x for piece in pieces for x in getattr(piece, attribute)] == getattr(result, attribute)
    assert [piece.finish_reason for piece in pieces][:-1] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == result.finish_reason == "length"
    assert list(handle) == pieces and handle.done


@pytest.mark.slow
def test_a_text_goes_on_after_its_end_where_that_is_asked_for(engine):
    """In the engine, in `generate` and in `stream`, with drafts and without; beside requests that end."""
    ended = engine.generate(PROMPTS, max_new_tokens=30)
    assert "eos" in ended.finish_reason
    out = engine.generate(PROMPTS, max_new_tokens=30, ignore_eos=True)
    assert {len(tokens) for tokens in out.tokens} == {30} and set(out.finish_reason) == {"length"}
    assert [long[: len(short)] for long, short in zip(out.tokens, ended.tokens, strict=True)] == ended.tokens
    for drafter in (None, Standalone(depth=3)):
        options = {"drafter": drafter, "max_new_tokens": 30, "page_size": 4, "ignore_eos": True}
        assert jspec.generate(model(), PROMPTS, **options).tokens == out.tokens
    pieces = jspec.stream(model(), PROMPTS[0], **options)
    assert [token for piece in pieces for token in piece.tokens] == out.tokens[0]
    handles = [engine.submit(PROMPTS[0], max_new_tokens=30, ignore_eos=flag) for flag in (True, False)]
    assert [handle.result().tokens for handle in handles] == [out.tokens[0], ended.tokens[0]]


def own_rule(key, draft_tree, logits, position):
    """Coupled acceptance as a rule of the user's own."""
    return accept.coupled(key, draft_tree, logits, position)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [own_rule, accept.LossyThresholds(1.0, 0.9)], ids=["own", "thresholds"])
def test_a_greedy_sequence_stays_greedy_under_any_rule(rule):
    """A rule that knows distributions only gets point masses, beside sequences that sample and without them."""
    wanted = jspec.generate(model(), PROMPTS, drafter=None, max_new_tokens=12).tokens
    drafter, options = Standalone(depth=3), {"max_new_tokens": 12}
    with Engine(model(), drafter=drafter, accept=rule, **OPTIONS) as made:
        assert made.generate(PROMPTS, **options).tokens == wanted
        mixed = [None, Sampling(temperature=1.0)] * 3 + [None]
        assert made.generate(PROMPTS, sampling=mixed, **options).tokens[::2] == wanted[::2]
    if rule is own_rule:
        for prompts in (PROMPTS, PROMPTS * 10):
            out = jspec.generate(model(), prompts, drafter=drafter, accept=rule, page_size=4, **options)
            assert out.tokens == wanted * (len(prompts) // len(PROMPTS))
        ids, lengths = np.array([PROMPTS[0]]), np.array([len(PROMPTS[0])])
        parts = {"target": toy.TARGET, "draft": toy.NEAR, "drafter": drafter, "accept": rule, "eos": (7,)}
        key = jax.random.key(0)
        out = jspec.generate_ids(toy.params(), ids, lengths, key, page_size=4, **parts, **options)
        new = out.tokens[0, len(PROMPTS[0]) :]
        assert new[: len(wanted[0])].tolist() == wanted[0]


def test_tasks_that_stream_get_their_own_tokens(engine):
    async def read(prompt):
        return [token async for piece in engine.stream(prompt, max_new_tokens=9) for token in piece.tokens]

    async def main():
        return await asyncio.gather(*map(read, PROMPTS))

    assert asyncio.run(main()) == engine.generate(PROMPTS, max_new_tokens=9).tokens


def test_leaving_a_stream_cancels_it(engine):
    async def main():
        stream = engine.stream(PROMPTS[1], max_new_tokens=40)
        async for _ in stream:
            break
        await stream.aclose()

    def cancelled():
        return engine.metrics().requests_finished.get("cancelled", 0)

    before = cancelled()
    for _ in range(20):  # On a busy machine the request may have all its tokens before its reader leaves.
        asyncio.run(main())
        engine.generate(PROMPTS[0], max_new_tokens=2)
        if cancelled() > before:
            break
    metrics = engine.metrics()
    assert metrics.requests_finished["cancelled"] == before + 1
    assert (metrics.running, metrics.waiting, metrics.pages_used) == (0, 0, 0)
    assert [group.load for group in engine.groups] == [0]


def test_a_cancelled_request_has_what_there_was(engine):
    wanted = engine.generate(PROMPTS[0], max_new_tokens=50)
    handle = engine.submit(PROMPTS[0], max_new_tokens=50)
    next(iter(handle))
    handle.cancel()
    result = handle.result(timeout=60)
    assert result.tokens == wanted.tokens[: len(result.tokens)]
    assert result.finish_reason in ("cancelled", wanted.finish_reason)
    handle.cancel()


def test_threads_that_submit_get_their_own_tokens(engine):
    results = {}

    def ask(index):
        results[index] = engine.submit(PROMPTS[index], max_new_tokens=8, seed=index).result().tokens

    in_threads(ask, len(PROMPTS))
    assert [results[index] for index in range(len(PROMPTS))] == engine.generate(PROMPTS, max_new_tokens=8).tokens


def test_scores_while_others_generate(engine):
    """From several threads, with the tokens of the others unchanged; with the weights that an update brought."""
    prompts = PROMPTS[:3]
    wanted = engine.generate(prompts, max_new_tokens=9)
    scores = {}

    def ask(index):
        scores[index] = engine.score(prompts[index], top_k=2)

    handles = [engine.submit(prompt, max_new_tokens=9) for prompt in prompts]
    in_threads(ask, len(prompts))
    assert [handle.result().tokens for handle in handles] == wanted.tokens
    for index, prompt in enumerate(prompts):
        expected = jspec.score(engine.model, prompt, top_k=2)
        assert (scores[index].tokens, scores[index].logprobs) == (prompt, expected.logprobs)
        assert scores[index].top == expected.top
    other = Params(toy.random_params(toy.TARGET, seed=9), engine.model.params.draft)
    engine.update(other)
    assert engine.score(prompts[2], 2).logprobs == jspec.score(model(other), prompts[2], top_k=2).logprobs
    engine.update(engine.model.params)
    for wrong, message in (
        ([[1], [2]], "list of 2 prompts"),
        ([61], "id 61"),
        ("a", "tokenizer"),
        ([], "at least one"),
    ):
        with pytest.raises(ValueError, match=f"prompt.*{message}"):
            engine.score(wrong)
    with pytest.raises(ValueError, match="top_k=62: must be from 0 to 61"):
        engine.score([1, 2], top_k=62)


def test_new_weights_compile_nothing_and_forget_prefixes(engine):
    engine.warm_up()
    prompt = PROMPTS[5]
    engine.update(engine.model.params)  # so that nothing is shared, now and later
    before = engine.generate(prompt, max_new_tokens=8)
    other = Params(toy.random_params(toy.TARGET, seed=9), engine.model.params.draft)
    bursts = programs.burst, programs.burst.variant(many=True)
    traced, read = [program.jitted._cache_size() for program in bursts], programs.read._cache_size()
    engine.update(other)
    changed = jspec.generate(model(other), prompt, drafter=None, max_new_tokens=8)
    assert before.tokens != engine.generate(prompt, max_new_tokens=8).tokens == changed.tokens
    engine.update(engine.model.params)
    assert engine.generate(prompt, max_new_tokens=8).tokens == before.tokens
    assert [program.jitted._cache_size() for program in bursts] == traced
    assert programs.read._cache_size() == read


@pytest.mark.slow
def test_a_hybrid_model_shares_states_and_forgets_them_with_the_weights():
    model = Model("hybrid", qwen.KINDS["dense"], Params(qwen.params("dense")), None, (), None)
    traced = programs.save, programs.restore
    before = [program._cache_size() for program in traced]
    with Engine(model, drafter="ngram", **OPTIONS) as engine:
        wanted = jspec.generate(model, PROMPTS[5], drafter="ngram", max_new_tokens=8)
        for _ in range(3):  # the first one saves its state before its last chunk, and the others begin with it
            same(engine.generate(PROMPTS[5], max_new_tokens=8), wanted)
        metrics = engine.metrics()
        assert metrics.prefix_hits == 32 and 0 < metrics.snapshots_used <= metrics.snapshots == OPTIONS["slots"]
        other = dataclasses.replace(model, params=Params(qwen.params("dense", 1)))
        engine.update(other.params)
        assert engine.metrics().snapshots_used == 0
        wanted = jspec.generate(other, PROMPTS[5], drafter="ngram", max_new_tokens=8)
        same(engine.generate(PROMPTS[5], max_new_tokens=8), wanted)
        assert engine.metrics().prefix_hits == 32
    assert [program._cache_size() - number for program, number in zip(traced, before, strict=True)] == [1, 1]


@pytest.mark.slow
def test_pages_and_snapshots_fit_into_the_memory(monkeypatch):
    """Where there is no memory for a snapshot nothing is shared; where there is little, pages come first."""
    method = Method(qwen.KINDS["dense"], Ngram(), accept.greedy)
    params, sizes = Params(qwen.params("dense")), Sizes(slots=3, context=64, page_size=4)
    made = sizing._state(params, method, sizes)
    monkeypatch.setattr(sizing, "_state", lambda *given, **options: made)
    fixed, snapshot = tree_bytes(made), tree_bytes(slot_state.slot_states(made.cache))
    page = tree_bytes(jax.eval_shape(functools.partial(sizing._pooled, pages=2), made)) - fixed

    def fit(budget, share, pages=None):
        options = EngineOptions(pages=pages, memory_fraction=1.0, prefix_cache=share)
        return sizing.fit(params, method, sizes, options, (budget, budget))

    with pytest.raises(ValueError, match="slots=3, context=64: the state takes .* with pages for one"):
        fit(fixed + 17 * page - 1, True)
    numbers = set()
    for left in range(0, 32 * snapshot, snapshot // 2):
        budget = fixed + 17 * page + left
        (room, shares), (alone, alone_shares) = fit(budget, True), fit(budget, False)
        assert (alone.snapshots, alone_shares, shares) == (0, False, room.snapshots > 0)
        assert alone.pages == min(49, 18 + left // page)
        assert room.pages == min(49, 18 + (left - room.snapshots * snapshot) // page)
        assert room.snapshots == min(3, left // 10 // snapshot)
        given = min(3, (left + 9 * page) // 10 // snapshot)
        assert fit(budget, True, 9) == (dataclasses.replace(sizes, pages=9, snapshots=given), given > 0)
        numbers.add(room.snapshots)
    assert numbers == {0, 1, 2, 3}


def test_weights_of_another_shape_are_refused(engine):
    params = engine.model.params
    wrong = dataclasses.replace(params.target, embed=params.target.embed[:-1])
    with pytest.raises(ValueError, match=r"params\.target\.embed: is float32\[60, 32\]; must be float32\[61, 32\]"):
        engine.update(Params(wrong, params.draft))
    with pytest.raises(ValueError, match="structure"):
        engine.update(Params(params.target, None))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_new_tokens=0), "max_new_tokens=0"),
        (dict(max_new_tokens=64), "context is 64"),
        (dict(prompt=[]), "at least one"),
        (dict(prompt=[61]), "id 61"),
        (dict(prompt="text"), "tokenizer"),
        (dict(seed=-1), "seed=-1"),
        (dict(logprobs=21), "logprobs=21: must be True, False, or a number of most probable tokens from 1 to 20"),
        (dict(salt=5), "salt=5"),
        (dict(priority="high"), "priority='high'"),
        (dict(sampling=Sampling(logit_bias={61: 1.0})), "61"),
    ],
)
def test_bad_requests_are_refused_at_once(engine, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        engine.submit(**{"prompt": PROMPTS[0], "max_new_tokens": 4, **options})
    assert engine.metrics().waiting == 0


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(pages=10**9), r"pages=1000000000, slots=\d+: the state takes .* are free; use fewer pages"),
        (dict(drafter="eagle"), "Eagle needs an EAGLE head"),
        (dict(accept="greedy"), "accept='greedy'"),
    ],
)
def test_bad_engines_are_refused(options, message):
    """test_inputs.py has options of another type or out of bounds."""
    with pytest.raises((ValueError, TypeError), match=message):
        Engine(model(), **{**OPTIONS, **options})


def test_an_engine_traces_a_prompt_twice_and_the_next_one_not_at_all(monkeypatch):
    """With a temperature and without: the state of all slots has the same shapes wherever they are needed."""
    real, traced = slot_state._prefilled, []
    monkeypatch.setattr(slot_state, "_prefilled", lambda *args, **static: traced.append(1) or real(*args, **static))
    slot_state._shapes_once.cache_clear()
    for _ in range(2):
        with Engine(model(), drafter=Standalone(depth=3), **OPTIONS):
            assert len(traced) == 2
    with Engine(model(), drafter=Standalone(depth=2), **OPTIONS):
        assert len(traced) == 4


def test_a_full_queue_refuses(engine):
    with Engine(model(), drafter=Standalone(depth=3), **{**OPTIONS, "slots": 1}, max_queue=0) as full:
        with pytest.raises(QueueFull, match="max_queue=0"):
            full.submit(PROMPTS[0], max_new_tokens=4)
        assert (
            full.generate(PROMPTS[:2], max_new_tokens=3).tokens == engine.generate(PROMPTS[:2], max_new_tokens=3).tokens
        )


def test_an_error_of_the_device_ends_all_requests():
    engine = Engine(model(), drafter=Standalone(depth=3), **OPTIONS)

    def fail(plan):
        raise RuntimeError("out of luck")

    engine.groups[0].device.read = fail
    handle = engine.submit(PROMPTS[0], max_new_tokens=4)
    with pytest.raises(EngineError, match="out of luck"):
        handle.result(timeout=60)
    with pytest.raises(EngineError, match="out of luck"):
        engine.submit(PROMPTS[0], max_new_tokens=4)
    engine.close()


def test_closing_cancels(engine):
    other = Engine(model(), drafter=Standalone(depth=3), **OPTIONS)
    handle = other.submit(PROMPTS[0], max_new_tokens=50)
    other.close()
    assert handle.result(timeout=60).finish_reason in ("cancelled", "length", "eos")
    with pytest.raises(EngineError, match="closed"):
        other.submit(PROMPTS[0], max_new_tokens=4)
    with pytest.raises(EngineError, match="closed"):
        other.score(PROMPTS[0])


def test_reads_have_few_shapes():
    assert sizing.read_shapes(64, 2048, 1024, 1) == [
        (1, 256), (1, 512), (1, 1024), (2, 256), (2, 512), (4, 128), (4, 256), (8, 128), (16, 64)
    ]  # fmt: skip
    assert sizing.read_shapes(1, 64, 1024, 2) == [(1, 64)]
    assert all(rows <= 3 and size >= 5 for rows, size in sizing.read_shapes(3, 64, 8, 5))


@pytest.mark.slow
def test_text_of_a_bundled_model():
    loaded = jspec.load("bundled:python-tiny")
    prompts = ["def add(a, b):", "import os\n", "class Foo:\n    def __init__(self", "x = ["]
    options = dict(max_new_tokens=24, stop=["\n\n", "return"])
    with Engine(loaded, drafter="ngram", slots=2, context=128) as engine:
        got, wanted = engine.generate(prompts, **options), jspec.generate(loaded, prompts, drafter="ngram", **options)
        same(got, wanted)
        assert got.text == wanted.text
        assert "".join(piece.text for piece in engine.submit(prompts[0], **options)) == wanted.text[0]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.7, top_p=0.9)], ids=["greedy", "sampled"])
def test_warm_up_leaves_nothing_to_compile(sampling):
    """And changes no output, whatever was generated before."""
    model, prompts = jspec.load("bundled:python-tiny"), [i * "x = 1; " + f"def f{i}(" for i in range(12)]
    options = {"max_new_tokens": 9, "sampling": sampling}
    with Engine(model, slots=5, context=128, page_size=8, prefill_tokens=32) as engine:
        first = engine.generate(prompts[:3], **options).tokens
        engine.warm_up(sampling=sampling)
        before = startup.compilations()
        assert engine.generate(prompts[:3], **options).tokens == first
        tokens = engine.generate(prompts, **options).tokens
        assert startup.compilations() == before
        assert tokens == jspec.generate(model, prompts, **options).tokens
        assert engine.metrics().prefix_hits > 0


@pytest.mark.slow
def test_warm_up_is_refused_while_requests_are_there():
    with Engine(jspec.load("bundled:python-tiny"), slots=2, context=64) as engine:
        handle = engine.submit("x", max_new_tokens=50)
        with pytest.raises(EngineError, match="warm_up: requests are waiting or running"):
            engine.warm_up()
        assert len(handle.result().tokens) > 0
        with pytest.raises(ValueError, match="temperature"):
            engine.warm_up(sampling=Sampling(temperature=-1.0))
