"""What an engine is given to do, by the processes of `engine_process.py` and their test."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

import jspec

MODEL = "bundled:python-tiny"
OPTIONS: dict[str, Any] = {"slots": 1, "context": 64, "page_size": 8, "prefill_tokens": 16, "burst_ms": 1.0}
PROMPTS = ["def f(", "import numpy", "class A"]
GREEDY = jspec.Sampling(temperature=0.0, top_p=0.9)  # runs the programs of requests that sample
GRAMMAR = r"[a-z ]{2,6}=[a-z ]*[0-9]+;"
SAMPLING = [
    jspec.Sampling(temperature=0.8, top_p=0.9),
    GREEDY,
    jspec.Sampling(temperature=0.8, top_p=0.9, grammar=jspec.Grammar.regex(GRAMMAR)),
]
GIVEN: dict[str, Any] = {"max_new_tokens": 12, "stop": ["_mp", "\n\n"], "logprobs": True, "seed": 5}
LONG: dict[str, Any] = {**GIVEN, "sampling": GREEDY, "max_new_tokens": 50, "stop": (), "ignore_eos": True}


def load(**options: Any) -> jspec.Model:
    """The model. In float32, in which sums over devices give the tokens of one."""
    return jspec.load(MODEL, dtype="float32", **options)


def save_head(path: Path) -> None:
    """Writes an EAGLE head that is fitted to the model, for two devices."""
    import toy

    from jspec.checkpoints import drafts

    model = load()
    texts = jspec.generate(model, PROMPTS, drafter=None, max_new_tokens=64, ignore_eos=True).tokens
    width = model.target.hidden_size
    sizes = {"hidden_size": width, "target_hidden_size": width, "num_kv_heads": 2}
    head = dataclasses.replace(toy.HEAD, vocab_size=model.target.vocab_size, **sizes)
    made = toy.fit_head(model.target, head, model.params.target, np.array(texts))
    drafts.save(path, head, made.draft, layout="safeailab", dtype="float32")


def described(out: jspec.Generations) -> dict[str, Any]:
    return {
        "tokens": out.tokens,
        "text": out.text,
        "rounds": out.stats.rounds.tolist(),
        "counts": out.stats.accept_counts.tolist(),
        "origin": [item.origin for item in out],
        "logprobs": [item.logprobs for item in out],
    }


def use(engine: jspec.Engine) -> dict[str, Any]:
    """What the process gets from an engine that has the requests."""
    out = engine.generate(PROMPTS, sampling=SAMPLING, **GIVEN)
    pieces = list(engine.submit(PROMPTS[1], sampling=GREEDY, **GIVEN))
    cancelled = engine.submit(PROMPTS[2], **LONG)
    next(iter(cancelled))
    cancelled.cancel()
    return {
        "out": described(out),
        "streamed": [token for piece in pieces for token in piece.tokens],
        "cancelled": [cancelled.result(60).finish_reason, cancelled.result().tokens],
        "scored": engine.score(PROMPTS[0], 1).logprobs[1:],
        "again": described(engine.generate(PROMPTS[:1], **LONG)),
    }
