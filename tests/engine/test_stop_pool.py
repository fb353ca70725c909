"""The automata of many stop sets in one table: each works as if it were alone, and a full table refuses more."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from jspec.core import stopping
from jspec.engine import stop_pool
from jspec.engine.request import QueueFull
from jspec.engine.stop_pool import StopPool

VOCAB, EOS = 16, 3
MODEL = SimpleNamespace(tokenizer=None, placement=None, target=SimpleNamespace(vocab_size=VOCAB), eos=(EOS,))


def automaton(strings, eos=(EOS,)):
    return stopping.build_table(
        VOCAB, eos, [text.encode() for text in strings], [bytes([97 + i]) for i in range(VOCAB)]
    )


@pytest.fixture(autouse=True)
def letters_are_tokens(monkeypatch):
    monkeypatch.setattr(stop_pool, "compile_stops", lambda tokenizer, vocab, eos, strings: automaton(strings, eos))
    monkeypatch.setattr(stop_pool, "MAX_TRANSITIONS", 70 * VOCAB)


def check_works(pool, start, strings, ignore_eos, rng):
    """From its start state, the pool's table ends texts where the set's own automaton ends them."""
    made, table = automaton(strings, () if ignore_eos else (EOS,)), np.asarray(pool.table)
    own = np.zeros((1, VOCAB), np.int16) if made is None else made.dense()
    for _ in range(20):
        here, there = start, 0
        for token in rng.choices(range(VOCAB), k=30):
            here, there = int(table[here, token]), int(own[there, token])
            assert (here if here < 0 else here - start) == there
            if there < 0:
                break


@pytest.mark.parametrize("seed", range(20))
def test_sets_come_and_go(seed):
    rng, used = random.Random(seed), []
    pool = StopPool(MODEL)
    refused = 0
    for _ in range(60):
        if used and rng.random() < 0.45:
            pool.remove(*used.pop(rng.randrange(len(used)))[:2])
            continue
        strings = tuple("".join(rng.choices("abcd", k=rng.randint(1, 6))) for _ in range(rng.randint(0, 3)))
        ignore_eos = rng.random() < 0.3
        try:
            used.append((strings, ignore_eos, pool.add(strings, ignore_eos)))
        except QueueFull as error:
            refused += 1
            assert "try again later" in str(error)
        for strings, ignore_eos, start in used:
            check_works(pool, start, strings, ignore_eos, rng)
    assert len(pool.table) <= 64 and refused < 60
    for strings, ignore_eos, _ in used:
        pool.remove(strings, ignore_eos)
    pool.add(("a" * 63,))


def test_a_full_table_has_space_again_when_a_request_has_ended():
    pool = StopPool(MODEL)
    first = pool.add(("a" * 40,))
    assert pool.add(("a" * 40,)) == first
    with pytest.raises(QueueFull, match="41 states beside those of other requests are more than 64"):
        pool.add(("b" * 40,))
    pool.remove(("a" * 40,))
    with pytest.raises(QueueFull):
        pool.add(("b" * 40,))
    pool.remove(("a" * 40,))
    pool.add(("b" * 40,))


def test_a_set_that_never_fits_is_refused_for_good():
    with pytest.raises(ValueError, match="has 66 states; must be at most 64"):
        StopPool(MODEL).add(("a" * 65,))
