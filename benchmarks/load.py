"""Time of a load of requests through the engine, with random weights and imposed acceptance.

The load: 256 requests at once; prompt lengths are lognormal (median 256, sigma 0.8, from 32 to 1536), output lengths
too (median 160, sigma 0.7, from 16 to 512), from `random.Random(11)`, and the ids are random. The first run of each
number of slots compiles; the others are measured.

    python benchmarks/load.py --preset llama-3.1-8b --slots 64 32
"""

import argparse
import json
import math
import random
import statistics
import time

import jax
import numpy as np

from jspec.bench.presets import PRESETS
from jspec.bench.weights import random_weights
from jspec.checkpoints.files import resolve_dtype
from jspec.core import accept
from jspec.core.types import Params
from jspec.drafters import Eagle, Plain
from jspec.engine.engine import Engine
from jspec.engine.model import Model


def load(vocab_size: int, count: int = 256) -> list[tuple[list[int], int]]:
    """The prompt of each request, and its number of new tokens."""
    lengths, ids = random.Random(11), np.random.default_rng(0)

    def length(median: float, sigma: float, least: int, most: int) -> int:
        return min(most, max(least, round(lengths.lognormvariate(math.log(median), sigma))))

    sizes = [(length(256, 0.8, 32, 1536), length(160, 0.7, 16, 512)) for _ in range(count)]
    return [(ids.integers(0, vocab_size, prompt).tolist(), new) for prompt, new in sizes]


def run(engine: Engine, requests: list[tuple[list[int], int]]) -> dict[str, float]:
    """Runs all requests at once. Returns seconds, tokens per second and the median time to the first token."""
    began = time.monotonic()
    handles = [engine.submit(prompt, max_new_tokens=new) for prompt, new in requests]
    tokens = sum(len(handle.result().tokens) for handle in handles)
    seconds = time.monotonic() - began
    firsts = [(handle.times.first_token or math.nan) - handle.times.submitted for handle in handles]
    rounds = sum(handle.request.rounds for handle in handles)
    return {
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "tokens_per_round": round((tokens - len(handles)) / max(rounds, 1), 3),
        "first_token_seconds": round(statistics.median(firsts), 3),
    }


def main() -> None:
    """Parses the options, makes the weights, and prints a line per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-3.1-8b", choices=[x for x in PRESETS if PRESETS[x].head])
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 32])
    parser.add_argument("--depth", type=int, default=5, help="of the chain; 0: plain decoding")
    parser.add_argument("--accept", type=float, default=3.0, help="imposed tokens per round")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    preset, dtype = PRESETS[options.preset], resolve_dtype(None)
    assert preset.head is not None, "such presets are no choice"
    shapes = Params(preset.target.param_shapes(dtype), preset.head.param_shapes(dtype))
    params = jax.block_until_ready(random_weights(shapes, preset.target.vocab_size))
    model = Model(options.preset, preset.target, params, None, (), preset.head)
    requests = load(preset.target.vocab_size)
    drafter = Eagle(depth=options.depth) if options.depth else Plain()
    rule = accept.Imposed(options.accept) if options.depth else None
    for slots in options.slots:
        context = min(preset.target.max_length, 2112)
        with Engine(model, drafter=drafter, accept=rule, slots=slots, context=context, prefix_cache=False) as engine:
            run(engine, requests)
            for _ in range(options.repeats):
                print(json.dumps({"slots": slots, **run(engine, requests)}), flush=True)


if __name__ == "__main__":
    main()
