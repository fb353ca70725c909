"""One of several processes that generate together, each with two CPU devices or one GPU.

    python one_process.py ADDRESS COUNT INDEX DIRECTORY OUTPUT

DIRECTORY has the checkpoints `target`, `draft` and `options.json`; OUTPUT gets what this process has found, as JSON.
In the end the last process dies, while the others go on.
"""

import collections
import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

DIED = 3
"""The exit status of the process that dies."""
address, count, index, directory, output = sys.argv[1], *map(int, sys.argv[2:4]), *map(pathlib.Path, sys.argv[4:6])
jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=20)

import jspec  # noqa: E402, after the processes have met
from jspec.checkpoints.safetensors_file import SafetensorFiles  # noqa: E402
from jspec.drafters import Standalone  # noqa: E402


def described(out: jspec.Generations) -> dict[str, Any]:
    return {
        "tokens": out.tokens,
        "rounds": out.stats.rounds.tolist(),
        "counts": out.stats.accept_counts.tolist(),
        "origin": [item.origin for item in out],
        "logprobs": [item.logprobs for item in out],
    }


def error_of(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)
    return ""


read: collections.Counter[str] = collections.Counter()
"""Bytes that have been read of each tensor."""


def counting(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def counted(self: Any, name: str, *part: Any) -> np.ndarray:
        found = function(self, name, *part)
        read[name] += found.nbytes
        return found

    return counted


SafetensorFiles.part, SafetensorFiles.get = counting(SafetensorFiles.part), counting(SafetensorFiles.get)
given = json.loads((directory / "options.json").read_text())
prompts = given.pop("prompts")
options: dict[str, Any] = {**given, "drafter": Standalone(depth=2)}
options["sampling"] = [one and jspec.Sampling(**one) for one in given["sampling"]]
target, draft = directory / "target", directory / "draft"
load = functools.partial(jspec.load, dtype="float32")  # in which sums in another order give the same tokens
EACH = jax.local_device_count()
ALL = jax.device_count()


def in_groups() -> dict[str, Any]:
    """A group of devices in each process."""
    model = load(target, draft=draft, data=count, tensor=EACH)
    pieces = list(jspec.stream(model, prompts, rounds=2, **options))
    return {
        "data": described(jspec.generate(model, prompts, **options)),
        "data bytes": own_bytes(model),
        "stream": [
            [token for piece in pieces if piece.index == i for token in piece.tokens] for i in range(len(prompts))
        ],
    }


def over_processes() -> dict[str, Any]:
    """One group over both processes. An error of one is an error of both, as is another argument; then they go on."""
    read.clear()
    model, own = load(target, tensor=ALL), {**options, "drafter": "ngram"}
    generate, wrong = jspec.generate, prompts if index == 0 else [[10**6]]
    return {
        "tensor": described(generate(model, prompts, **own)),
        "tensor bytes": own_bytes(model),
        "read": dict(read),
        "scores": [scores.logprobs for scores in jspec.score(model, prompts)],
        "one score fails": error_of(jspec.score, model, wrong),
        "another top_k": error_of(jspec.score, model, prompts, top_k=index),
        "one fails": error_of(generate, model, wrong, **own),
        "one option fails": error_of(generate, model, prompts, **{**own, "page_size": index}),
        "another seed": error_of(generate, model, prompts, **{**own, "seed": index}),
        "progress": error_of(generate, model, prompts, progress=index == 0, **own),
        "again": described(generate(model, prompts, **own)),
        "8-bit bytes": own_bytes(load(target, draft=draft, tensor=ALL, weights="int8")),
    }


def wrong_devices() -> dict[str, Any]:
    """A mesh of the devices of one process is for that process alone; otherwise each process must have some."""
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("tensor",))
    assert not load(target, draft=draft, mesh=mesh).placement.spans_processes
    return {
        "one load fails": error_of(load, draft if index == 0 else directory, tensor=ALL),
        # tensor=1 makes a model on one device, whichever process it belongs to.
        "too few": error_of(load, target, draft=draft, tensor=EACH) if EACH > 1 else None,
    }


def own_bytes(model: jspec.Model) -> int:
    """Bytes of the target's weights on the devices of this process."""
    leaves = jax.tree.leaves(model.params.target)
    return sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)


output.write_text(json.dumps({**in_groups(), **over_processes(), **wrong_devices()}))
if index == count - 1:
    os._exit(DIED)
jspec.generate(load(target, draft=draft, tensor=ALL), prompts, **options)
