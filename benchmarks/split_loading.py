"""Loads a checkpoint that is larger than one device's memory over several, and measures the most memory that it takes.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python benchmarks/split_loading.py --preset llama-3.3-70b --tensor 2 \\
        --directory /tmp/70b --json split-loading.jsonl

The directory is filled with a checkpoint in the preset's shapes unless it holds one. Each of its tensors begins with
random values, and the rest are zeros that take no space on the disk: memory does not depend on values, and what was
loaded is checked by counting and adding up those that are not zero. The time is that of files in the page cache.
"""

import argparse
import json
import math
import resource
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jspec
from jspec.bench import measurement, report
from jspec.bench.machine import environment
from jspec.bench.presets import PRESETS
from jspec.checkpoints import llama
from jspec.models import Llama

RANDOM = 2048
"""Random values of each tensor."""
SHARD_BYTES = 4 << 30


def make(directory: Path, target: Llama) -> None:
    """Writes a checkpoint of a model's shapes."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(llama.describe(target) | {"dtype": "bfloat16"}))
    # Arrays of one element, repeated without memory.
    wide = jax.tree.map(
        lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), target.param_shapes(ml_dtypes.bfloat16)
    )
    write(directory, ((name, np.shape(tensor)) for name, tensor in llama.FAMILIES[0].named_tensors(target, wide)))


def write(directory: Path, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Shards of tensors of these shapes, and their index."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in tensors:
        if filled > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += 2 * math.prod(shape)
    rng, weight_map = np.random.default_rng(0), {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        header, end = {}, 0
        for name, shape in shard.items():
            begin, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            start = out.tell()
            out.truncate(start + end)
            for name, shape in shard.items():
                out.seek(start + header[name]["data_offsets"][0])
                count = min(RANDOM, math.prod(shape))
                # No value of these is zero.
                out.write(
                    (rng.choice([-1, 1], count) * rng.integers(1, 128, count)).astype(ml_dtypes.bfloat16).tobytes()
                )
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def stored(directory: Path) -> tuple[int, int, int]:
    """The bytes of all tensors, how many of their values are not zero, and the sum of these."""
    size = count = total = 0
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            for entry in json.loads(file.read(length)).values():
                begin, end = entry["data_offsets"]
                file.seek(8 + length + begin)
                values = np.frombuffer(file.read(min(2 * RANDOM, end - begin)), ml_dtypes.bfloat16).astype(int)
                size += end - begin
                count += int(np.count_nonzero(values))
                total += int(values.sum())
    return size, count, total


def loaded(params: object) -> tuple[int, int]:
    """How many values of all weights are not zero, and their sum."""

    @jax.jit
    def counts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.count_nonzero(x), jnp.sum(x, dtype=jnp.float32)

    found = [counts(leaf) for leaf in jax.tree.leaves(params)]
    return sum(int(count) for count, _ in found), sum(int(total) for _, total in found)


def host_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Loads, prints a table, and with --json writes measurements. The exit status is 1 if a value is wrong."""
    parser = argparse.ArgumentParser(description="Measures the memory of loading over several devices.")
    parser.add_argument("--preset", default="llama-3.3-70b", help="shapes of a Llama (default: llama-3.3-70b)")
    parser.add_argument("--tensor", type=int, required=True, help="devices")
    parser.add_argument("--directory", type=Path, required=True, help="where the checkpoint is, or is written")
    parser.add_argument("--remove", action="store_true", help="remove the checkpoint afterwards")
    parser.add_argument("--json", type=Path, help="file for the measurements")
    options = parser.parse_args()
    target = PRESETS[options.preset].target
    assert isinstance(target, Llama), f"{options.preset} is no Llama"
    if target.num_kv_heads % options.tensor:
        parser.error(f"--tensor {options.tensor}: must divide the {target.num_kv_heads} KV heads; others have copies")
    if not (options.directory / "config.json").exists():
        make(options.directory, target)
    devices = jax.devices()[: options.tensor]
    jax.block_until_ready([jax.device_put(np.zeros(1), device) for device in devices])
    before, started = host_bytes(), time.perf_counter()
    model = jspec.load(options.directory, tensor=options.tensor, dtype="bfloat16")
    jax.block_until_ready(model.params)
    seconds, after = time.perf_counter() - started, host_bytes()

    size, *expected = stored(options.directory)
    stats = [device.memory_stats() or {} for device in devices]
    found = {
        "checkpoint": [size],
        "memory of a device": [each.get("bytes_limit", 0) for each in stats],
        "weights on a device": [
            sum(
                s.data.nbytes for x in jax.tree.leaves(model.params) for s in x.addressable_shards if s.device == device
            )
            for device in devices
        ],
        "most memory in use on a device": [each.get("peak_bytes_in_use", 0) for each in stats],
        "most memory of the process before": [before],
        "most memory of the process": [after],
    }
    right = list(loaded(model.params)) == expected
    for name, values in found.items():
        print(f"{name:<36}{', '.join(f'{value / 1e9:.2f}' for value in values)} GB")
    print(f"{seconds:.1f} s; {expected[0]:,} values that are not zero: {'as stored' if right else 'WRONG'}")
    if options.json is not None:
        here = environment(options.tensor)
        fields = {
            "command": report.command("python benchmarks/split_loading.py", sys.argv[1:], {"--directory": "DIR"}),
            "subject": options.preset,
            "dtype": "bfloat16",
            "settings": {"tensor": options.tensor, "values": "as stored" if right else "wrong"},
        }
        each = [(name, "GB", [value / 1e9 for value in values]) for name, values in found.items()]
        measurement.write(
            options.json,
            [
                report.measurement(here, options.preset, "split", metric=metric, unit=unit, values=values, **fields)
                for metric, unit, values in [*each, ("loading", "s", [seconds])]
            ],
        )
    if options.remove:
        shutil.rmtree(options.directory)
    raise SystemExit(not right)


if __name__ == "__main__":
    main()
