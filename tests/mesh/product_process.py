"""One of several processes that run points of the product together, each with two CPU devices or one GPU.

    python product_process.py ADDRESS COUNT INDEX DIRECTORY OUTPUT

DIRECTORY has the checkpoints, and `points.json`: the fields of each. OUTPUT gets what
this process has found, as JSON.
"""

import json
import pathlib
import sys

import jax

address, count, index, directory, output = sys.argv[1], *map(int, sys.argv[2:4]), *map(pathlib.Path, sys.argv[4:6])
jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=20)

import product  # noqa: E402, after the processes have met

checkpoints, found = product.Checkpoints(directory), []
for names in json.loads((directory / "points.json").read_text()):
    point = product.Point(**names)
    print(point, flush=True)
    found.append(product.ENTRIES[point.entry](checkpoints.load(point), point))
    output.write_text(json.dumps(found))
    jax.clear_caches()
