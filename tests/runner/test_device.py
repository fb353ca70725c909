"""What the device holds of a sequence that comes back to a slot."""

import jax
import numpy as np

import jspec
from jspec.engine.engine import Engine
from jspec.runner.request import Request


def test_a_retracted_sequence_continues_its_stop_string_and_its_noise():
    """Whatever slot it gets."""
    model = jspec.load("bundled:python-tiny")
    encode = model.tokenizer.encode
    with Engine(model, drafter=None, slots=3, context=32, page_size=8) as engine:
        request = Request(encode("def f(x):\n    "), 20)
        request.seed, request.start_state = (41, 0), engine.groups[0].device.stops.insert((("return",), False))
        request.append(encode("retu"))
        request.slot, request.rounds, request.accept_counts = 2, 3, [3]
        engine.groups[0].device.admit([request])
        s, stop = engine.groups[0].device.runner.state, jax.device_get(engine.groups[0].device.stops.at(-1))
    state = int(s.stop.state[2])
    start = request.start_state
    for token in encode("rn"):
        assert state >= 0
        state, start = (int(stop.table[at, stop.token_class[stop.map_of_state[at], token]]) for at in (state, start))
    assert state < 0 <= start, "the end of the stop string was found, and only after its beginning"
    np.testing.assert_array_equal(jax.random.key_data(s.key[2]), jax.random.key_data(jax.random.key(41)))
    assert (int(s.length[2]), int(s.stats.rounds[2])) == (len(request.all_tokens), 3)
