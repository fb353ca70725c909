"""What an engine is given to do, by the processes of `engine_process.py` and their test."""

from typing import Any

import jspec

MODEL = "bundled:python-tiny"
OPTIONS: dict[str, Any] = {"slots": 1, "context": 64, "page_size": 8, "prefill_tokens": 16, "burst_ms": 1.0}
PROMPTS = ["def f(", "import numpy", "class A"]
GREEDY = jspec.Sampling(temperature=0.0, top_p=0.9)  # runs the programs of requests that sample
SAMPLING = [jspec.Sampling(temperature=0.8, top_p=0.9), GREEDY, GREEDY]
GIVEN: dict[str, Any] = {"max_new_tokens": 12, "stop": ["_mp", "\n\n"], "logprobs": True, "seed": 5}
LONG: dict[str, Any] = {**GIVEN, "sampling": GREEDY, "max_new_tokens": 50, "stop": (), "ignore_eos": True}


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
        "again": described(engine.generate(PROMPTS[:1], **LONG)),
    }
