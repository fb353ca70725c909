"""Splits a model over two devices, and compares tokens and speed with one.

python examples/two_gpus.py --model meta-llama/Llama-3.1-8B --weights fp8
XLA_FLAGS=--xla_force_host_platform_device_count=2 JAX_PLATFORMS=cpu python examples/two_gpus.py
"""

import argparse
import time

import jax

import jspec

PROMPTS = ["def fibonacci(n):", "class Stack:", "def read_lines(path):", "import os\nimport "]


def main() -> None:
    """Generates with one device, with a split model, and with a copy of the model on each device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:python-tiny")
    parser.add_argument("--draft", help="default: the draft that comes with the model, or n-grams")
    parser.add_argument("--weights", choices=("fp8", "int8", "int4"), help="quantize on load")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    if jax.device_count() < 2:
        raise SystemExit(f"needs two devices, and there is {jax.device_count()}: {jax.devices()}")

    expected = None
    for placement in ({}, {"tensor": 2}, {"data": 2}):
        model = jspec.load(options.model, draft=options.draft, weights=options.weights, **placement)
        for _ in range(2):  # the first call compiles
            start = time.perf_counter()
            out = jspec.generate(model, PROMPTS, max_new_tokens=options.max_new_tokens)
            seconds = time.perf_counter() - start
        # Sums over devices round differently; in bfloat16 that may change a token where two are nearly equal.
        expected = out.tokens if expected is None else expected
        equal = sum(a == b for a, b in zip(out.tokens, expected, strict=True))
        speed = out.stats.new_tokens / seconds
        print(f"{placement or 'one device'}: {speed:.0f} tokens/s, {equal} of {len(PROMPTS)} equal")


if __name__ == "__main__":
    main()
