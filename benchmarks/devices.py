"""Rounds of a preset on one device and split over several, one after the other in one process.

    python benchmarks/devices.py --preset llama-3.1-8b --tensor 2 --json benchmarks/results/DATE-MACHINE-devices.jsonl

Weights are random and acceptance is imposed. The time of a round is the difference between two generations of different
lengths, divided by that of their rounds, so it contains neither the prompt nor what a call costs.
"""

import argparse
import dataclasses
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import jspec
from jspec.bench import measurement, report
from jspec.bench.machine import environment
from jspec.bench.presets import PRESETS
from jspec.bench.weights import random_weights
from jspec.core import sharding
from jspec.core.accept import Imposed
from jspec.core.types import Drafter, Params
from jspec.core.xla_options import prepare_collectives
from jspec.drafters import Eagle, Plain
from jspec.engine.model import Model

NEW = (32, 160)
MODES: dict[str, Drafter] = {
    "plain": Plain(),
    "chain": Eagle(depth=5),
    "tree": Eagle(depth=5, width=8, num_nodes=32),
}
TOKENS_PER_ROUND = 3.0


def make(name: str, devices: int) -> Model:
    """A preset with an EAGLE-3 head and random weights, both split over the devices."""
    preset = PRESETS[name]
    assert preset.head is not None
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    shapes = Params(preset.target.param_shapes(dtype), preset.head.param_shapes(dtype))
    params = random_weights(shapes, preset.target.vocab_size)
    placement = sharding.make_placement(devices, None, jax.devices())
    if placement is None:
        return Model(name, preset.target, params, None, (), preset.head)
    prepare_collectives()
    placement = dataclasses.replace(placement, draft=True)
    specs = placement.specs(shapes)
    params = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(placement.mesh, spec)), params, specs)
    return Model(name, preset.target.split(devices), params, None, (), preset.head.split(devices), placement)


def round_times(model: Model, drafter: Drafter, batch: int, context: int, repeats: int) -> list[float]:
    """Milliseconds per round, each from a short and a long generation."""
    rule = Imposed(TOKENS_PER_ROUND) if drafter.depth else None
    prompts = np.random.default_rng(0).integers(0, model.target.vocab_size, (batch, context)).tolist()

    def generate(new: int) -> tuple[float, int]:
        began = time.perf_counter()
        out = jspec.generate(model, prompts, drafter=drafter, accept=rule, max_new_tokens=new)
        return time.perf_counter() - began, int(out.stats.rounds.max())

    for new in NEW * 3:  # The first run compiles, the second one captures graphs.
        generate(new)
    times = []
    for _ in range(repeats):
        (short, few), (long, many) = generate(NEW[0]), generate(NEW[1])
        times.append(round(1e3 * (long - short) / (many - few), 4))
    return times


def main() -> None:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(description="Times rounds on one device and on several.")
    parser.add_argument("--preset", default="llama-3.1-8b", choices=[name for name in PRESETS if PRESETS[name].head])
    parser.add_argument("--tensor", type=int, nargs="+", default=[2], help="numbers of devices beside one")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", type=Path, help="file of measurements to which those of this run are added")
    options = parser.parse_args()
    lines = measurement.read(options.json) if options.json is not None and options.json.exists() else []
    command = f"python benchmarks/devices.py --preset {options.preset} --tensor {' '.join(map(str, options.tensor))}"
    here = environment(max(options.tensor))  # A file has lines of one machine; settings have the devices that are used.
    for devices in (1, *options.tensor):
        model = make(options.preset, devices)
        for batch in options.batch:
            for mode, drafter in MODES.items():
                times = round_times(model, drafter, batch, options.context, options.repeats)
                print(
                    f"{devices} devices, {mode}, batch {batch}: {statistics.median(times):.3f} ms {times}", flush=True
                )
                lines.append(
                    report.measurement(
                        here,
                        *(options.preset, f"{devices}-devices", mode, f"batch-{batch}"),
                        metric="round",
                        unit="ms",
                        values=times,
                        command=command,
                        subject=options.preset,
                        mode=mode,
                        batch=batch,
                        context=options.context,
                        dtype=str(model.params.target.embed.dtype),
                        settings={"tokens_per_round": TOKENS_PER_ROUND, "devices": devices},
                    )
                )
                if options.json is not None:
                    measurement.write(options.json, lines)
        del model


if __name__ == "__main__":
    main()
