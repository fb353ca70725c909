"""Times the start of a process: import, loading a checkpoint, the first token, and a text.

    python benchmarks/startup.py --preset llama-3.1-8b --directory /tmp/8b --json startup.jsonl

The directory is filled with random weights in the preset's shapes unless it holds a checkpoint. Each process is a new
one; the first has an empty compilation cache, the others have what it left. Files that have just been written are read
from the page cache: a disk adds its own time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

PROMPT, NEW = 512, 64
STEPS = ("import", "load", "first token", "text")
CHILD = """
import json, sys, time
started = float(sys.argv[2])
now = lambda: time.time() - started
import jspec
times = [now()]
model = jspec.load(sys.argv[1], exact=False)
import jax
jax.block_until_ready(model.params)
times.append(now())
prompt = [7 * i % 100 for i in range(int(sys.argv[3]))]
for new in (1, int(sys.argv[4])):
    jspec.generate(model, prompt, max_new_tokens=new, drafter="plain", ignore_eos=True)
    times.append(now())
print(json.dumps(times))
"""


def make(directory: Path, name: str) -> None:
    """Writes a checkpoint of random weights: slices of one block of random values."""
    import jax
    import ml_dtypes

    from jspec.bench.presets import PRESETS
    from jspec.checkpoints import language_model

    target = PRESETS[name].target
    block = (np.random.default_rng(0).normal(size=1 << 22) * 0.02).astype(ml_dtypes.bfloat16)

    def fill(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        return np.ones(leaf.shape, leaf.dtype) if len(leaf.shape) == 1 else np.resize(block, leaf.shape)

    params = jax.tree.map(fill, target.param_shapes(ml_dtypes.bfloat16))
    language_model.save(directory, target, params, max_shard_bytes=4 << 30)


def start(directory: Path, cache: Path) -> list[float]:
    """Seconds from the start of a process to the end of each of `STEPS`."""
    caching = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    args = [str(directory), str(time.time()), str(PROMPT), str(NEW)]
    out = subprocess.run(
        [sys.executable, "-c", CHILD, *args], env=os.environ | caching, capture_output=True, text=True, check=False
    )
    if out.returncode:
        raise SystemExit(out.stderr)
    return json.loads(out.stdout.splitlines()[-1])


def main() -> None:
    """Starts several processes and prints a table; with --json, writes measurements."""
    parser = argparse.ArgumentParser(description="Times the start of a process.")
    parser.add_argument("--preset", required=True, help="shapes of the target")
    parser.add_argument("--directory", type=Path, required=True, help="where the checkpoint is, or is written")
    parser.add_argument("--repeats", type=int, default=3, help="processes with a warm cache (default: 3)")
    parser.add_argument("--json", type=Path, help="file for the measurements")
    options = parser.parse_args()
    if not (options.directory / "config.json").exists():
        make(options.directory, options.preset)
    found: dict[str, list[list[float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as cache:
        for cached in ("cold", *["warm"] * options.repeats):
            found[cached].append(start(options.directory, Path(cache)))
            seconds = ", ".join(f"{step} {at:.1f} s" for step, at in zip(STEPS, found[cached][-1], strict=True))
            print(f"{cached}: {seconds}", flush=True)
    if options.json is not None:
        write(options.json, found, options.preset)


def write(path: Path, found: dict[str, list[list[float]]], preset: str) -> None:
    """One measurement for each step, cold and warm."""
    from jspec.bench import measurement, report
    from jspec.bench.machine import environment

    here = environment()
    command = report.command("python benchmarks/startup.py", sys.argv[1:], {"--directory": "DIR"})
    lines = [
        report.measurement(
            here,
            *(preset, "startup", cached),
            metric=f"{step} after the start of the process",
            unit="s",
            values=[times[i] for times in each],
            command=command,
            subject=preset,
            mode="plain",
            batch=1,
            context=PROMPT,
            settings={"compilation cache": cached, "new tokens": NEW},
        )
        for cached, each in found.items()
        for i, step in enumerate(STEPS)
        if each
    ]
    measurement.write(path, lines)


if __name__ == "__main__":
    main()
