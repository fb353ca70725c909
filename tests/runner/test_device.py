"""What the device holds of a sequence that comes back to a slot."""

import jax
import numpy as np
import pytest
import qwen
import toy

import jspec
from jspec.core.types import Params
from jspec.engine.engine import Engine
from jspec.runner import runner
from jspec.runner.ready import Program
from jspec.runner.request import Request
from jspec.runner.sizing import slot_buckets


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


def test_views_are_finer_where_rounds_depend_on_their_rows():
    assert slot_buckets(64, fine=True) == [1, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert slot_buckets(128, fine=True)[9:] == [64, 80, 96, 112, 128]
    assert slot_buckets(64, fine=False) == [1, 4, 16, 32, 64]
    assert [slot_buckets(3, fine=fine) for fine in (True, False)] == [[1, 3]] * 2
    assert slot_buckets(50, fine=True)[-2:] == [48, 50] and slot_buckets(50, fine=False)[-2:] == [32, 50]


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", (False, True))
def test_models_with_recurrent_states_have_few_views(recurrent):
    """Admissions have few sizes anyway."""
    model = jspec.Model("toy", toy.TARGET, Params(toy.params().target), None, (), None)
    if recurrent:
        model = jspec.Model("hybrid", qwen.KINDS["dense"], Params(qwen.params("dense")), None, (), None)
    with Engine(model, drafter=None, slots=20, context=32, page_size=8) as engine:
        ready = engine.groups[0].device.ready
        padded = {kind: [ready._padded(Program(kind, rows=n)).rows for n in (3, 7, 19)] for kind in ("burst", "admit")}
    assert padded == {"burst": [4, 16 if recurrent else 8, 20], "admit": [4, 16, 20]}


@pytest.mark.parametrize("message", ("RESOURCE_EXHAUSTED: out of memory", "INTERNAL: another one"))
def test_pages_need_one_free_block_of_the_memory(monkeypatch, message):
    """Free bytes in several blocks may suffice for `fit` and not for a pool."""

    def refuse(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(runner, "_empty_state", refuse)
    error = ValueError if message.startswith("RESOURCE") else jax.errors.JaxRuntimeError
    with pytest.raises(error, match="slots=2, pages=9: no free block" if error is ValueError else "another one"):
        Engine(jspec.load("bundled:python-tiny"), drafter=None, slots=2, context=32, pages=9, page_size=8)
