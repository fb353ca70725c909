"""`score`: log-probabilities of given tokens equal those of NumPy over the logits of one forward."""

import dataclasses

import deepseek
import gemma
import jax
import numpy as np
import pytest
import qwen
import toy

import jspec
from jspec.core import tree
from jspec.core.types import Params
from jspec.generation import score as scoring
from jspec.loading.model import Model

MODELS = {
    "mha": lambda: (toy.TARGET, toy.params().target),
    "sliding": lambda: (gemma.KINDS["shared"], gemma.params("shared")),
    "mla": lambda: (deepseek.KINDS["mla"], deepseek.params("mla")),
    "dsa": lambda: (deepseek.KINDS["dsa"], deepseek.params("dsa")),
    "recurrent": lambda: (qwen.KINDS["dense"], qwen.params("dense")),
}
"""One model per kind of cache."""
TOLERANCE = {"sliding": 1e-4, "recurrent": 1e-3}
"""Where some logits depend by more than 1e-5 on how the prompt is divided; half of all are within that everywhere."""
LENGTHS = (1, 2, 3, 16, 17, 33, 40, 31, 64, 65, 5)


def make(kind):
    target, params = MODELS[kind]()
    return Model(kind, target, Params(params), None, ())


def prompts_of(model, lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [rng.integers(0, model.target.vocab_size, n).tolist() for n in lengths]


def expected(model, prompts):
    """The log-probabilities of all tokens after each token of each prompt, by NumPy in float64."""
    ids = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def read(params, ids):
        cache = model.target.init_cache(params, *ids.shape, 16)
        return model.target.forward(params, tree.chain(ids), cache, None).logits

    logits = np.array(read(model.params.target, ids), np.float64)
    peak = logits.max(-1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))


def check(scores, prompt, log_p, top_k, tolerance=1e-5):
    assert scores.tokens == prompt and len(scores) == len(scores.top) == len(prompt)
    assert scores.logprobs[0] is None and scores.top[0] == []
    for at in range(1, len(prompt)):
        before = log_p[at - 1]
        assert abs(scores.logprobs[at] - before[prompt[at]]) < tolerance
        assert len(scores.top[at]) == top_k
        ids, values = [token for token, _ in scores.top[at]], [x for _, x in scores.top[at]]
        assert len(set(ids)) == top_k and values == sorted(values, reverse=True)
        np.testing.assert_allclose(values, np.sort(before)[::-1][:top_k], atol=tolerance)
        np.testing.assert_allclose(values, before[ids], atol=tolerance)
        assert dict(scores.top[at]).get(prompt[at], scores.logprobs[at]) == scores.logprobs[at]
    assert scores.total == pytest.approx(sum(scores.logprobs[1:]))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", (16, 64, 1024))
@pytest.mark.parametrize("kind", MODELS)
def test_scores_equal_numpy(kind, tokens, monkeypatch):
    """In one chunk, in several, and in batches of several prompts."""
    model = make(kind)
    monkeypatch.setattr(scoring, "LOGITS_BYTES", 4 * model.target.vocab_size * tokens)
    prompts = prompts_of(model)
    log_p = expected(model, prompts)
    got = jspec.score(model, prompts, top_k=5, page_size=8)
    for scores, prompt, row in zip(got, prompts, log_p, strict=True):
        check(scores, prompt, row, 5, TOLERANCE.get(kind, 1e-5))
        places = np.arange(len(prompt) - 1)
        if len(prompt) > 10:
            assert np.median(np.abs(scores.logprobs[1:] - row[places, prompt[1:]])) < 1e-5


def test_other_prompts_run_the_same_programs(monkeypatch):
    model = make("mha")
    monkeypatch.setattr(scoring, "LOGITS_BYTES", 4 * model.target.vocab_size * 32)
    jspec.score(model, prompts_of(model, (5, 30, 50)))
    before = scoring._read._cache_size()
    jspec.score(model, prompts_of(model, (16, 17, 60)))
    jspec.score(model, prompts_of(model, (40, 2, 20, 35)))
    assert scoring._read._cache_size() == before


def test_memory_is_bounded_by_a_chunk_of_logits(monkeypatch):
    model = make("mha")
    monkeypatch.setattr(scoring, "LOGITS_BYTES", 4 * model.target.vocab_size * 16)
    sizes = []
    true_read = scoring._read
    monkeypatch.setattr(
        scoring,
        "_read",
        lambda params, cache, tokens, *rest, **static: (
            sizes.append(tokens.size) or true_read(params, cache, tokens, *rest, **static)
        ),
    )
    prompts = prompts_of(model, (40, 3, 16, 9, 33))
    for scores, prompt, row in zip(jspec.score(model, prompts), prompts, expected(model, prompts), strict=True):
        check(scores, prompt, row, 0)
    assert set(sizes) == {16} and len(sizes) == 3 + 1 + 1 + 1 + 2


def test_one_prompt_gives_one_result_and_text_is_encoded():
    model = jspec.load("bundled:python-tiny")
    text = "def add(a, b):\n    return a + b\n"
    scores = jspec.score(model, text, top_k=2)
    ids = model.tokenizer.encode(text)
    assert scores.tokens == ids
    assert repr(scores) == f"Scores({text!r}, {len(ids)} tokens, log-probability {scores.total:.2f})"
    bare = dataclasses.replace(model, tokenizer=None)
    again = jspec.score(bare, np.array(ids), top_k=2)
    assert again.logprobs == scores.logprobs and again.top == scores.top
    assert repr(again) == f"Scores({len(ids)} tokens, log-probability {scores.total:.2f})"


def test_a_prompt_may_fill_the_context_but_not_exceed_it():
    target = dataclasses.replace(toy.TARGET, max_length=20)
    model = Model("short", target, toy.params(), None, ())
    (prompt,) = prompts_of(model, (20,))
    (log_p,) = expected(model, [prompt])
    check(jspec.score(model, prompt, top_k=3), prompt, log_p, 3)
    with pytest.raises(ValueError, match="longest prompt has 21 tokens: must be at most 20"):
        jspec.score(model, [prompt, [*prompt, 1]])


def test_all_tokens_of_the_vocabulary_can_be_returned():
    model = make("mha")
    scores = jspec.score(model, [1, 2, 3], top_k=model.target.vocab_size)
    assert all(sorted(token for token, _ in entry) == list(range(61)) for entry in scores.top[1:])
