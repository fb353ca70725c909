"""The likelihood of texts, asked for as lm-eval's local-completions does, equals that of `transformers`."""

from operator import itemgetter

import http_server
import numpy as np
import optional
import pytest

import jspec
from jspec.core.package import ASSETS

torch, transformers = optional.lazy("torch", "transformers")

TEXTS = (
    ("def add(a, b):\n    return", " a + b"),
    ("import numpy as", " np"),
    ("import numpy as", " a lobster"),
    ("for i in range(", "10):\n    print(i)\n" * 12),
)


@pytest.fixture(scope="module")
def server():
    with jspec.Engine(jspec.load("bundled:python-tiny", dtype="float32"), slots=2, context=256) as engine:
        running = http_server.Running(engine)
        yield running
        running.end()
        running.join()


def ask(server, ids):
    """The body that lm-eval 0.4 sends for a batch of texts."""
    fixed = {"model": "fake", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = server.post("/v1/completions", {**fixed, "prompt": ids}, timeout=120)
    assert answer.status_code == 200, answer.text
    return sorted(answer.json()["choices"], key=itemgetter("index"))


def parse(choice, context):
    """The log-likelihood of what follows the first `context` tokens, and whether it is the greedy continuation, as
    lm-eval 0.4 finds them.
    """
    logprobs = choice["logprobs"]
    values, tops = logprobs["token_logprobs"][context:-1], logprobs["top_logprobs"][context:-1]
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


@pytest.mark.slow
def test_log_likelihoods_equal_transformers(server):
    oracle = transformers.AutoModelForCausalLM.from_pretrained(ASSETS / "python-tiny", dtype=torch.float32).eval()
    encode = server.service.tokenizer.encode
    pairs = [(encode(context), encode(context + following)) for context, following in TEXTS]
    # A greedy continuation.
    prompt = encode("class A:\n    def")
    ids = oracle.generate(torch.tensor([prompt]), max_new_tokens=7, do_sample=False)[0].tolist()
    pairs.append((prompt, ids))
    greedy = []
    for (context, ids), choice in zip(pairs, ask(server, [ids for _, ids in pairs]), strict=True):
        with torch.no_grad():
            log_p = torch.log_softmax(oracle(torch.tensor([ids])).logits[0].double(), -1).numpy()
        rows, at = log_p[len(context) - 1 : -1], np.array(ids[len(context) :])
        likelihood, is_greedy = parse(choice, len(context))
        assert likelihood == pytest.approx(rows[np.arange(len(at)), at].sum(), abs=1e-5 * len(at))
        assert is_greedy == (rows.argmax(-1) == at).all()
        greedy.append(is_greedy)
    assert greedy[-1] and not all(greedy)
