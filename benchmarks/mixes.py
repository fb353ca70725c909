"""What requests with new mixes of options cost others, and how many programs many mixes need.

python benchmarks/mixes.py gap                # the longest gap of a stream while the program of a new mix compiles
python benchmarks/mixes.py gap --beside no    # the same where the engine's own thread compiles
python benchmarks/mixes.py programs           # compiled programs and memory over 1,000 requests with random mixes
"""

import argparse
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import recorded

import jspec
from jspec.bench import report
from jspec.bench.machine import environment
from jspec.engine.handle import Handle
from jspec.runner.device import Device

SLOTS, CONTEXT, NEW_TOKENS = 4, 512, 200
REQUESTS, BATCH = 1000, 50
"""Requests with random mixes; how many wait or run at a time."""
PROMPT = "def mean(values):\n    "


def mix(rng: random.Random) -> dict[str, Any]:
    """Random options of a request."""
    sampling: dict[str, Any] = {"temperature": rng.choice([0.0, 0.8])}
    for name, value in {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "presence_penalty": 0.5}.items():
        if rng.random() < 0.3:
            sampling[name] = value
    if rng.random() < 0.2:
        sampling["logit_bias"] = {rng.randrange(100): -1.0}
    if rng.random() < 0.3:
        sampling["grammar"] = jspec.Grammar.regex(f"[a-{rng.choice('bcdefghij')}]{{{rng.randint(2, 40)}}}")
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 12))) for _ in range(rng.choice([0, 0, 1, 4]))]
    return {
        "sampling": jspec.Sampling(**sampling),
        "stop": words,
        "logprobs": rng.choice([False, False, True, 5, 20]),
        "max_new_tokens": rng.randint(1, 16),
    }


class Streams:
    """Greedy requests, one after another, until `end`."""

    def __init__(self, engine: jspec.Engine):
        self.handles = [self._submit(engine)]
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(engine,))
        self._thread.start()

    def _submit(self, engine: jspec.Engine) -> Handle:
        return engine.submit(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)

    def _run(self, engine: jspec.Engine) -> None:
        while not self._ended:
            self.handles[-1].result()
            self.handles.append(self._submit(engine))
        self.handles[-1].cancel()

    def end(self) -> None:
        """Ends the last request."""
        self._ended = True
        self._thread.join()

    def longest_gap(self, begin: float) -> float:
        """Seconds between two arrivals after a time, at most."""
        times = [at for handle in self.handles for at, _ in handle.times.arrivals if at >= begin]
        times = [begin, *times, time.monotonic()]
        return max(after - before for before, after in itertools.pairwise(times))


def wait_for(condition: Callable[[], bool]) -> float:
    """Seconds until a condition holds."""
    began = time.monotonic()
    while not condition():
        time.sleep(0.001)
    return time.monotonic() - began


def gap(engine: jspec.Engine) -> dict[str, float]:
    """Seconds of a stream with others and without, and of cancels."""
    engine.generate([PROMPT] * SLOTS, max_new_tokens=NEW_TOKENS)  # compiles
    sampling = jspec.Sampling(temperature=0.8, presence_penalty=0.5, grammar=jspec.Grammar.regex("[a-z]{5}"))
    result = {}
    for name in ("usual longest gap", "longest gap"):
        streams, began = Streams(engine), time.monotonic()
        wait_for(lambda streams=streams: len(streams.handles) > 1)
        if name == "longest gap":
            # A request that waits for its program, and one with a slot, are cancelled meanwhile.
            began, other = time.monotonic(), engine.submit(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            new, late = (engine.submit(PROMPT, max_new_tokens=3, sampling=sampling, logprobs=5) for _ in range(2))
            wait_for(lambda other=other: len(other.times.arrivals) > 1)
            for kind, handle in {"a stream": other, "a request that waits": late}.items():
                handle.cancel()
                result[f"cancel of {kind}"] = wait_for(lambda handle=handle: handle.done)
            new.result()
            result["answer of the new mix"] = time.monotonic() - began
        result[name] = streams.longest_gap(began)
        streams.end()
    return result


def programs(engine: jspec.Engine) -> dict[str, list[float]]:
    """Programs and resident megabytes after each quarter of many requests."""
    rng = random.Random(0)
    compiled, megabytes, handles = [], [], list[Handle]()
    for index in range(REQUESTS):
        handles.append(engine.submit(PROMPT, seed=index, **mix(rng)))
        if len(handles) == BATCH:
            handles.pop(0).result()
        if (index + 1) % (REQUESTS // 4) == 0:
            for handle in handles:
                handle.result()
            handles.clear()
            compiled.append(engine.groups[0].device.ready.count)
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            megabytes.append(round(pages * 4096 / 1e6))
            print(f"{index + 1} requests: {compiled[-1]} programs, {megabytes[-1]} MB", flush=True)
    return {"programs": compiled, "memory": megabytes}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(description="Measures what new mixes of options cost.")
    parser.add_argument("question", choices=["gap", "programs"])
    parser.add_argument("--model", default="bundled:python-small")
    parser.add_argument("--beside", choices=["yes", "no"], default="yes", help="no: compile in the engine's thread")
    parser.add_argument("--json", type=Path, help="file of measurements to which those of this run are added")
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_compilation_cache", False)
    if options.beside == "no":
        Device.compile_ahead = lambda self, notify: None
    here, lines = environment(), []
    with jspec.Engine(jspec.load(options.model, exact=False), slots=SLOTS, context=CONTEXT) as engine:
        if options.question == "gap":
            measured = {name: ("s", [round(seconds, 4)]) for name, seconds in gap(engine).items()}
        else:
            results = programs(engine)
            measured = {name: ("MB" if name == "memory" else "", values) for name, values in results.items()}
    subject, mode = options.model.removeprefix("bundled:"), f"compiled beside bursts: {options.beside}"
    for metric, (unit, values) in measured.items():
        print(f"{metric}: {values} {unit}")
        fields = {
            "command": report.command("python benchmarks/mixes.py", sys.argv[1:]),
            "subject": subject,
            "mode": mode,
        }
        lines.append(report.measurement(here, "mixes", mode, metric=metric, unit=unit, values=values, **fields))
    if options.json is not None:
        recorded.add(options.json, lines)


if __name__ == "__main__":
    main()
