"""One of several processes of an engine, each with two CPU devices.

    python engine_process.py ADDRESS COUNT INDEX OUTPUT

OUTPUT gets what this process has found, as JSON. In the end process 1 dies while process 0 waits for it.
"""

import json
import os
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np

DIED = 3
"""The exit status of the process that dies."""
address, count, index, output = sys.argv[1], *map(int, sys.argv[2:4]), pathlib.Path(sys.argv[4])
jax.config.update("jax_disable_most_optimizations", True)  # which takes less time, as in other tests
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=20)

import jspec  # noqa: E402, after the processes have met
from jspec.drafters import Standalone  # noqa: E402

MODEL = "bundled:python-tiny"
OPTIONS: dict[str, Any] = {"slots": 2, "context": 64, "page_size": 8, "prefill_tokens": 16, "burst_ms": 1.0}
SAMPLED = jspec.Sampling(temperature=0.8, top_p=0.9)
CALLS: list[tuple[list[str], dict[str, Any]]] = [
    (["def f(x):\n", "import numpy", "class A"], {"max_new_tokens": 12}),
    (["for i in", "    return"], {"max_new_tokens": 9, "sampling": [SAMPLED, None], "seed": 5, "logprobs": True}),
    (["def f(x):\n    "], {"max_new_tokens": 20, "stop": ["return", "\n\n"]}),
]


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
    """What this process gets from an engine."""
    if not engine.leads:
        return {"refused": [error_of(engine.generate, "a"), error_of(engine.metrics)], "name": repr(engine)}
    pieces = list(engine.submit(*CALLS[0][0][:1], **CALLS[0][1]))
    cancelled = engine.submit("class B", max_new_tokens=50, ignore_eos=True)
    next(iter(cancelled))
    cancelled.cancel()
    return {
        "calls": [described(engine.generate(prompts, **options)) for prompts, options in CALLS],
        "streamed": [token for piece in pieces for token in piece.tokens],
        "cancelled": [cancelled.result(60).finish_reason, cancelled.result().tokens],
    }


def error_of(function: Any, *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except (ValueError, jspec.EngineError) as error:
        return str(error)
    return ""


def mesh() -> jax.sharding.Mesh:
    """A device of each process."""
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(count, 2)[:, 0], ("tensor",))


def main() -> None:
    # A group of devices in each process.
    model = jspec.load(MODEL, data=2, tensor=2)
    with jspec.Engine(model, **OPTIONS) as engine:
        prompts, options = CALLS[0]
        apart = described(engine.generate(prompts, **options)) if engine.leads else {}
        given = [group.given for group in engine.groups]
    # A group over both.
    model = jspec.load(MODEL, draft=MODEL, mesh=mesh())
    own = {**OPTIONS, "drafter": Standalone(depth=2)}
    with jspec.Engine(model, **own) as engine:
        together = use(engine)
        engine.update(jax.tree.map(lambda x: 2 * x, model.params))
        updated = described(engine.generate(*CALLS[0][:1], max_new_tokens=12)) if engine.leads else {}
    found = {
        "apart": apart,
        "given": given,
        "together": together,
        "updated": updated,
        "alive": engine.alive,
        "differs": error_of(jspec.Engine, model, **{**own, "slots": 2 + index}),
        "one fails": error_of(jspec.Engine, model, **{**own, "slots": 1 - index}),
    }
    output.write_text(json.dumps(found))
    try:
        with jspec.Engine(model, **own) as engine:
            if not engine.leads:
                while engine.alive and not output.with_suffix(".begun").exists():
                    time.sleep(0.01)
                os._exit(DIED)
            handles = [engine.submit("class C", max_new_tokens=50, ignore_eos=True) for _ in range(8)]
            next(iter(handles[0]))
            output.with_name("1.begun").touch()
            for handle in handles:
                handle.result()
    except jspec.EngineError as error:
        output.write_text(json.dumps({**found, "lost": str(error)}))


if __name__ == "__main__":
    main()
