"""Two questions about the engine at a preset's true shape, with random weights.

    python benchmarks/engine.py equal     # plain decoding of equal requests: the engine against generate
    python benchmarks/engine.py idle      # a load of requests with drafts: how long the device waits, from a profile

XLA takes no profile of graphs unless `XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true` is set; without it
the host is slower while it is profiled, and the device waits for it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import recorded
from jax.profiler import ProfileData

import jspec
from jspec.bench import report, traffic
from jspec.bench.machine import environment
from jspec.bench.measurement import Measurement
from jspec.bench.presets import PRESETS
from jspec.bench.weights import random_weights
from jspec.core.accept import Imposed
from jspec.core.types import Params
from jspec.drafters import Eagle, Plain
from jspec.loading.model import Model

ROWS, TOKENS, REPEATS = 64, 256, 4
"""Sequences at a time; tokens of each prompt and of each answer in `equal`."""
TOKENS_PER_ROUND = 3.0
BEFORE, SECONDS = 2.0, 1.5
"""Seconds of the load before the profile begins, and of the profile."""


def make(name: str) -> Model:
    """A preset with an EAGLE-3 head."""
    preset = PRESETS[name]
    assert preset.head is not None
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    shapes = Params(preset.target.param_shapes(dtype), preset.head.param_shapes(dtype))
    return Model(name, preset.target, random_weights(shapes, preset.target.vocab_size), None, (), preset.head)


def equal(model: Model) -> dict[str, list[float]]:
    """Seconds of both ways, alternately."""
    prompts = np.random.default_rng(0).integers(0, model.target.vocab_size, (ROWS, TOKENS)).tolist()
    with jspec.Engine(model, drafter=None, slots=ROWS, context=2 * TOKENS, prefix_cache=False) as engine:
        ways: dict[str, Callable[[], object]] = {
            "engine": lambda: engine.generate(prompts, max_new_tokens=TOKENS),
            "generate": lambda: jspec.generate(model, prompts, drafter=Plain(), max_new_tokens=TOKENS),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(-2, REPEATS):  # The first run compiles, the second one captures graphs.
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                if repeat >= 0:
                    times[name].append(round(time.perf_counter() - began, 4))
    return times


def idle(model: Model) -> float:
    """The share of time in which no kernel runs, from the first kernel of a profile to its last."""
    requests = traffic.requests(256, model.target.vocab_size)
    rule = Imposed(TOKENS_PER_ROUND)
    sizes = {"slots": ROWS, "context": traffic.CONTEXT, "prefix_cache": False}
    with jspec.Engine(model, drafter=Eagle(depth=5), accept=rule, **sizes) as engine:
        engine.warm_up()
        print(f"{traffic.run(engine, requests).tokens_per_second:.0f} tokens/s without a profile")
        handles = [engine.submit(prompt, max_new_tokens=new) for prompt, new in requests]
        time.sleep(BEFORE)
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                time.sleep(SECONDS)
            for handle in handles:
                handle.result()
            (profile,) = Path(directory).glob("**/*.xplane.pb")
            return _idle_share(profile)


def _idle_share(profile: Path) -> float:
    kernels = sorted(
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in ProfileData.from_file(str(profile)).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
        if not event.name.startswith("Memcpy")
    )
    if not kernels:
        raise ValueError("the profile has no kernels of a GPU")
    busy, end = 0.0, kernels[0][0]
    for begin, until in kernels:
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    return 1 - busy / (end - kernels[0][0])


def main() -> None:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(description="Measures what the engine adds to rounds.")
    parser.add_argument("question", choices=["equal", "idle"])
    parser.add_argument("--preset", default="llama-3.1-8b", choices=[name for name in PRESETS if PRESETS[name].head])
    parser.add_argument("--json", type=Path, help="file of measurements to which those of this run are added")
    options = parser.parse_args()
    model, here = make(options.preset), environment()

    def line(metric: str, unit: str, values: list[float], mode: str) -> Measurement:
        return report.measurement(
            here,
            *(options.preset, "engine", options.question, mode),
            metric=metric,
            unit=unit,
            values=values,
            command=report.command("python benchmarks/engine.py", sys.argv[1:]),
            subject=options.preset,
            mode=mode,
            batch=ROWS,
            context=TOKENS if options.question == "equal" else traffic.CONTEXT,
            dtype=str(model.params.target.embed.dtype),
        )

    if options.question == "equal":
        times = equal(model)
        ratio = statistics.median(times["engine"]) / statistics.median(times["generate"])
        print(f"seconds: {times}; the engine takes {ratio:.3f} of generate's time")
        new = [line("seconds of equal requests", "s", values, name) for name, values in times.items()]
    else:
        share = idle(model)
        print(f"idle: {100 * share:.2f}%")
        new = [line("device idle", "%", [round(100 * share, 2)], "chain")]
    if options.json is not None:
        recorded.add(options.json, new)


if __name__ == "__main__":
    main()
