"""One of several processes that run points of the product together, each with two CPU devices.

    python product_process.py ADDRESS COUNT INDEX DIRECTORY OUTPUT

DIRECTORY has the checkpoints, and `points.json`: family, drafter, placement and entry point of each. OUTPUT gets what
this process has found, as JSON.
"""

import json
import pathlib
import sys

import jax

address, count, index, directory, output = sys.argv[1], *map(int, sys.argv[2:4]), *map(pathlib.Path, sys.argv[4:6])
jax.config.update("jax_disable_most_optimizations", True)  # which takes less time, as in other tests
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=20)

import product  # noqa: E402, after the processes have met

checkpoints, found = product.Checkpoints(directory), []
for names in json.loads((directory / "points.json").read_text()):
    point = product.make_point(*names)
    print(point, flush=True)
    found.append(product.ENTRIES[point.entry](checkpoints.load(point), point))
    output.write_text(json.dumps(found))
    jax.clear_caches()
