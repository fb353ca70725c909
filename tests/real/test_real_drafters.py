"""With real models every drafter, batch, engine and server gives what plain decoding gives."""

import http_server
import pytest

import jspec

AS_SHIPPED = True
NEW_TOKENS = 48
DRAFTERS = {
    "ngram": jspec.Ngram(depth=4),
    "suffix": jspec.Suffix(depth=6),
    "suffix-tree": jspec.Suffix(depth=4, width=3, num_nodes=12),
    "default": "auto",
    "adaptive": jspec.Adaptive(),
    "standalone": jspec.Standalone(depth=4),
    "standalone-tree": jspec.Standalone(depth=3, width=2, num_nodes=8),
}
HEADS = {
    "eagle": ("smollm2-eagle", jspec.Eagle(depth=5)),
    "eagle-tree": ("smollm2-eagle", jspec.Eagle(depth=4, width=4, num_nodes=16)),
    "block": ("smollm2-block", jspec.Block()),
}
"""Trained drafts of SmolLM2, from directories beside its file if they are there, such as of
`examples/train_a_draft.py`."""
SEEDS = [11, 12, 13, 14]
"""One per prompt. With some others, such as 3, Gemma's two best tokens are 1e-5 apart, noise included: a near-tie."""
MODES = {
    "greedy": None,
    "sampled": jspec.Sampling(temperature=0.8, top_p=0.95),
    "penalties": jspec.Sampling(temperature=1.0, top_k=50, repetition_penalty=1.1),
}


@pytest.fixture(scope="module")
def plain(real):
    """Plain decoding in each mode, with text to the limit of each prompt."""
    results = {}

    def run(mode, model=real.model):
        if (mode, model) not in results:
            results[mode, model] = generate(real, "plain", mode, model)
        return results[mode, model]

    return run


def generate(real, drafter, mode, model=None):
    options = {"max_new_tokens": NEW_TOKENS, "sampling": MODES[mode], "seed": SEEDS}
    return jspec.generate(model or real.model, real.ids, drafter=drafter, **options)


@pytest.mark.slow(unless=("greedy-ngram", "sampled-ngram", "greedy-standalone"))
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("mode", MODES)
def test_drafted_equals_plain(real, plain, mode, drafter):
    model = real.model.with_draft(real.model) if drafter.startswith("standalone") else real.model
    out = generate(real, DRAFTERS[drafter], mode, model)
    assert out.tokens == plain(mode).tokens
    assert out.finish_reason == plain(mode).finish_reason
    if model.draft is not None:
        # The model is its own draft: all proposals are accepted, unless a tree has other ones beside them.
        depth = DRAFTERS[drafter].depth
        assert out.stats.accept_length > (depth if mode == "greedy" else 1.5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head", HEADS)
def test_trained_drafts(chat_model, mode, head):
    folder, drafter = HEADS[head]
    path = chat_model.path.parent / folder
    if not path.is_dir():
        pytest.skip(f"no trained draft in {path}")
    model = jspec.load(chat_model.path, draft=path, dtype="float32")
    out = generate(chat_model, drafter, mode, model)
    assert out.tokens == generate(chat_model, "plain", mode, chat_model.model).tokens
    assert out.stats.accept_length > (1.8 if mode == "greedy" else 1.2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", (1, 3, 8))
def test_a_batch_is_its_prompts(real, plain, mode, batch):
    drafter, order = jspec.Ngram(depth=4), [*range(len(real.ids))] * 2
    for start in range(0, len(order) if batch > 1 else len(real.ids), batch):
        part = order[start : start + batch]
        ids, seeds = ([values[index] for index in part] for values in (real.ids, SEEDS))
        options = {"max_new_tokens": NEW_TOKENS, "sampling": MODES[mode], "drafter": drafter, "seed": seeds}
        assert jspec.generate(real.model, ids, **options).tokens == [plain(mode).tokens[index] for index in part]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp8", "int8", "int4"])
def test_weights_of_fewer_bits(real, weights):
    model = jspec.load(real.path, dtype="float32", weights=weights)
    out = generate(real, DRAFTERS["ngram"], "greedy", model)
    assert out.tokens == generate(real, "plain", "greedy", model).tokens
    assert out.stats.accept_length > 1


@pytest.mark.slow
def test_caches_of_8_bits(real):
    model = jspec.load(real.path, dtype="float32", kv="fp8")
    drafted, plain = (generate(real, drafter, "greedy", model) for drafter in (DRAFTERS["ngram"], "plain"))
    for ids, ours, theirs in zip(real.ids, drafted.tokens, plain.tokens, strict=True):
        if ours != theirs:
            # An ulp before a key is rounded can become a step of 8 bits, so that near-ties are wider.
            at = next(i for i, pair in enumerate(zip(ours, theirs, strict=False)) if len(set(pair)) > 1)
            best = dict(jspec.score(model, [*ids, *theirs[: at + 1]], top_k=5).top[-1])
            assert abs(best[ours[at]] - best[theirs[at]]) < 0.1


@pytest.mark.slow
def test_an_engine(real, plain):
    with jspec.Engine(real.model, drafter=jspec.Ngram(depth=4), slots=3, context=512, prefill_tokens=32) as engine:
        for mode in ("greedy", "sampled"):
            out = engine.generate(real.ids, max_new_tokens=NEW_TOKENS, sampling=MODES[mode], seed=SEEDS)
            assert out.tokens == plain(mode).tokens


@pytest.fixture(scope="module")
def server(chat_model):
    with jspec.Engine(chat_model.model, drafter=jspec.Ngram(depth=4), slots=4, context=512) as engine:
        running = http_server.Running(engine)
        yield running
        running.end()
        running.join()


@pytest.mark.slow(unless=("0",))
@pytest.mark.parametrize("temperature", (0, 0.8))
def test_chats_over_http(server, chat_model, temperature):
    sampling = jspec.Sampling(temperature=temperature)
    for prompt, ids in zip(chat_model.prompts[:2], chat_model.ids, strict=False):
        messages = [{"role": "user", "content": prompt}]
        body = {"model": "fake", "messages": messages, "temperature": temperature, "seed": 5, "max_tokens": 40}
        answer = server.post("/v1/chat/completions", body, timeout=300).json()
        expected = jspec.generate(chat_model.model, ids, max_new_tokens=40, sampling=sampling, seed=5)
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == expected.text
        assert choice["finish_reason"] == ("stop" if expected.finish_reason == "eos" else "length")
        assert answer["usage"]["prompt_tokens"] == len(ids)
