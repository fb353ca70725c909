"""One of several processes of an engine, each with two CPU devices or one GPU.

    python engine_process.py ADDRESS COUNT INDEX HEAD OUTPUT

HEAD is an EAGLE head. OUTPUT gets what this process has found, as JSON. In the end process 1 dies while process 0 waits
for it.
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
address, count, index, head, output = sys.argv[1], *map(int, sys.argv[2:4]), *map(pathlib.Path, sys.argv[4:6])
jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=20)

from engine_work import GIVEN, GREEDY, LONG, OPTIONS, PROMPTS, described, load, use  # noqa: E402, after they have met

import jspec  # noqa: E402


def error_of(function: Any, *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except (ValueError, jspec.EngineError) as error:
        return str(error)
    return ""


def mesh() -> jax.sharding.Mesh:
    """A device of each process."""
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(count, -1)[:, 0], ("tensor",))


def main() -> None:
    # A group of devices in each process.
    model = load(data=count, tensor=jax.local_device_count())
    with jspec.Engine(model, drafter="ngram", **OPTIONS) as engine:
        apart = described(engine.generate(PROMPTS, **GIVEN)) if engine.leads else {}
        given = [group.assigned for group in engine.groups]
    found: dict[str, Any] = {
        "apart": apart,
        "given": given,
        "alive": engine.alive,
        "differs": error_of(jspec.Engine, model, **{**OPTIONS, "slots": 2 + index}),
        "one fails": error_of(jspec.Engine, model, **{**OPTIONS, "slots": 1 - index}),
    }
    # A group over both, which share the head, too.
    model = load(draft=head, mesh=mesh(), draft_tensor=True)
    try:
        with jspec.Engine(model, **OPTIONS) as engine:
            found["together"] = use(engine) if engine.leads else {}
            found["refused"] = [error_of(call, PROMPTS[0]) for call in (engine.generate, engine.score)]
            engine.update(jax.tree.map(lambda x: 2 * x, model.params))
            given = {"sampling": GREEDY, **GIVEN}
            found["updated"] = described(engine.generate(PROMPTS[:1], **given)) if engine.leads else {}
            output.write_text(json.dumps(found))
            # One process dies while the other has requests.
            begun = output.with_name("begun")
            if not engine.leads:
                while engine.alive and not begun.exists():
                    time.sleep(0.01)
                os._exit(DIED)
            handles = [engine.submit(PROMPTS[0], **LONG) for _ in range(8)]
            next(iter(handles[0]))
            begun.touch()
            for handle in handles:
                handle.result()
    except jspec.EngineError as error:
        output.write_text(json.dumps({**found, "lost": str(error)}))


if __name__ == "__main__":
    main()
