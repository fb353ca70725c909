"""How many programs an engine compiles in a long mixed run."""

import logging
import re

import numpy as np
import pytest

import jspec
from jspec.core.sampling import Sampling
from jspec.engine.engine import Engine
from jspec.runner.device import OPTION_SETS, TOP_SIZES
from jspec.runner.sizing import read_shapes, slot_buckets

SAMPLINGS = (
    (None, Sampling(temperature=0.0)),
    (Sampling(), Sampling(temperature=1.0, top_p=0.9), Sampling(temperature=1.0, top_k=5, min_p=0.1)),
    (Sampling(repetition_penalty=1.2), Sampling(temperature=0.7, frequency_penalty=0.4), Sampling(min_new_tokens=4)),
    (Sampling(logit_bias={5: -3.0}), Sampling(temperature=0.9, logit_bias={65: 2.0}, presence_penalty=0.3)),
)
"""For each tier options that need it."""
STOPS = ((), ("\n",), ("x", "return"), ("def f", "import", "class A", "print"), ("=",))


@pytest.fixture
def compiled(caplog):
    """A function that counts the programs compiled so far, by the name of their function."""
    caplog.set_level(logging.DEBUG, logger="jax._src.interpreters.pxla")

    def count(name):
        pattern = rf"Compiling (?:jit\()?{name}\b"
        return sum(re.match(pattern, record.getMessage()) is not None for record in caplog.records)

    return count


def mixed_run(engine, rng, count, tiers, stops):
    """Sends requests of all lengths; a tenth is cancelled."""
    handles = []
    for index in range(count):
        options = SAMPLINGS[rng.choice(tiers)]
        sampling, stop = options[rng.integers(len(options))], STOPS[rng.choice(stops)]
        prompt, new = rng.integers(0, 255, rng.integers(1, 40)).tolist(), int(rng.integers(1, 24))
        logprobs = (False, False, True, 3, 20)[rng.integers(5)] if len(tiers) > 1 else False
        choices = dict(max_new_tokens=new, sampling=sampling, stop=stop, seed=index, logprobs=logprobs)
        handles.append(engine.submit(prompt, **choices))
        if rng.random() < 0.1:
            handles[rng.integers(len(handles))].cancel()
        if rng.random() < 0.3:
            handles[rng.integers(len(handles))].result()
    for handle in handles:
        handle.result()


CASES = {"greedy": ([0], [0], 12), "all": ([0, 1, 2, 3], [0, 1, 2, 3, 4], 40)}
SIZES = {"slots": 3, "context": 64, "prefill_tokens": 16}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_number_of_programs_follows_from_the_sizes(case, compiled):
    tiers, stops, count = CASES[case]
    with Engine(jspec.load("bundled:python-tiny"), drafter=None, page_size=8, burst_ms=1.0, **SIZES) as engine:
        mixed_run(engine, np.random.default_rng(0), count, tiers, stops)
        stop = engine.groups[0].device.stops.at(-1)
        tables = len(stop.table).bit_length() + len(stop.token_class).bit_length() - 1
    shapes = read_shapes(SIZES["slots"], SIZES["context"], SIZES["prefill_tokens"], 1)
    options = len(OPTION_SETS) * (1 + len(TOP_SIZES)) * tables if case == "all" else 1
    sizes = slot_buckets(SIZES["slots"], fine=True)
    got = {name: compiled(name) for name in ("burst", "read", "admit", "release")}
    assert 0 < got["burst"] <= len(sizes) * options
    assert 0 < got["read"] <= len(shapes) * options
    assert got["admit"] <= len(sizes) and got["release"] <= 1
