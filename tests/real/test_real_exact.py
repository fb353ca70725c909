"""In bfloat16 with `exact=True`, a real model gives the tokens of plain decoding, whatever the draft and the batch."""

import concurrent.futures

import jax
import numpy as np
import pytest
from real_model import PROMPTS

import jspec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU: 24 chats with 256 new tokens each"),
]
NEW_TOKENS = 256
CHATS = PROMPTS[:24]
DRAFTERS = {
    "plain": None,
    "ngram": jspec.Ngram(depth=4),
    "suffix": jspec.Suffix(depth=6),
    "suffix-tree": jspec.Suffix(depth=4, width=3, num_nodes=12),
    "default": "auto",
}
HEADS = {
    "eagle": ("smollm2-eagle", jspec.Eagle(depth=5)),
    "eagle-tree": ("smollm2-eagle", jspec.Eagle(depth=5, width=8, num_nodes=32)),
    "pruned": ("smollm2-eagle", jspec.Pruned()),
    "block": ("smollm2-block", jspec.Block()),
}
TEMPERATURES = (0.0, 1.0)
SEEDS = [*range(100, 100 + len(CHATS))]


@pytest.fixture(scope="module")
def exact(chat_model):
    """The model in bfloat16, without a draft."""
    return jspec.load(chat_model.path, dtype="bfloat16", exact=True)


@pytest.fixture(scope="module")
def chats(exact):
    return [exact.tokenizer.chat([{"role": "user", "content": text}]) for text in CHATS]


@pytest.fixture(scope="module")
def plain(exact, chats):
    """Plain decoding of one chat after another, by temperature."""
    return {
        temperature: [
            jspec.generate(exact, [chat], seed=[seed], **options(temperature, None)).tokens[0]
            for chat, seed in zip(chats, SEEDS, strict=True)
        ]
        for temperature in TEMPERATURES
    }


def options(temperature, drafter):
    sampling = jspec.Sampling(temperature=temperature)
    return {"max_new_tokens": NEW_TOKENS, "sampling": sampling, "drafter": drafter}


@pytest.fixture(params=DRAFTERS | HEADS)
def drafted(request, chat_model, exact):
    """A model with a drafter of it."""
    if request.param in DRAFTERS:
        return exact, DRAFTERS[request.param]
    folder, drafter = HEADS[request.param]
    path = chat_model.path.parent / folder
    if not path.is_dir():
        pytest.skip(f"needs a trained draft in {path}")
    return jspec.load(chat_model.path, draft=path, dtype="bfloat16", exact=True), drafter


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("batch", (3, 24))
def test_batches(plain, chats, drafted, batch, temperature):
    model, drafter = drafted
    tokens = []
    for start in range(0, len(chats), batch):
        part = slice(start, start + batch)
        tokens += jspec.generate(model, chats[part], seed=SEEDS[part], **options(temperature, drafter)).tokens
    assert tokens == plain[temperature]


def test_an_engine(plain, chats, drafted):
    """More requests than slots, preempted for lack of pages, in two rounds, so that prefixes are found."""
    model, drafter = drafted
    with jspec.Engine(model, drafter=drafter, slots=8, context=512, pages=80, page_size=16) as engine:
        for temperature in (*TEMPERATURES, *TEMPERATURES):
            sampling = jspec.Sampling(temperature=temperature)
            out = engine.generate(chats, max_new_tokens=NEW_TOKENS, sampling=sampling, seed=SEEDS)
            assert out.tokens == plain[temperature]
        metrics = engine.metrics()
    assert metrics.preemptions
    assert metrics.prefix_hits


def test_a_server(plain, exact, chats):
    """Concurrent requests over HTTP."""
    import http_server

    texts = [exact.tokenizer.decode(strip_eos(exact, tokens)) for tokens in plain[0.0]]
    with jspec.Engine(exact, slots=16, context=512) as engine:
        server = http_server.Running(engine)

        def ask(text):
            messages = [{"role": "user", "content": text}]
            body = {"model": "fake", "messages": messages, "temperature": 0, "max_tokens": NEW_TOKENS}
            return server.post("/v1/chat/completions", body, timeout=300).json()["choices"][0]["message"]["content"]

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, CHATS))
        server.end()
        server.join()
    np.testing.assert_array_equal(answers, texts)


def strip_eos(model, tokens):
    return tokens[:-1] if tokens[-1] in model.eos else tokens
