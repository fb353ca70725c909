"""The automata of many stop sets, or grammars, in one table: each works as if it were alone, and a full table refuses
more."""

import random
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jspec.core import stopping
from jspec.core.automaton import TokenTable, following
from jspec.core.grammar import FREE
from jspec.runner import automaton_pool
from jspec.runner.automaton_pool import GrammarPool, StopPool
from jspec.runner.request import QueueFull
from jspec.text.grammar import Grammar

VOCAB, EOS = 16, 3
LETTERS = [bytes([97 + i]) for i in range(VOCAB)]
MODEL = SimpleNamespace(
    tokenizer=SimpleNamespace(token_bytes=lambda: LETTERS),
    placement=None,
    target=SimpleNamespace(vocab_size=VOCAB),
    eos=(EOS,),
)


class Tokenizer:
    """Each letter is a token."""

    def token_bytes(self, shown=()):
        return LETTERS


MODEL.tokenizer = Tokenizer()


def automaton(strings, eos=(EOS,)):
    return stopping.build_table(VOCAB, eos, [text.encode() for text in strings], LETTERS)


@pytest.fixture(autouse=True)
def letters_are_tokens(monkeypatch):
    monkeypatch.setattr(automaton_pool, "compile_stops", lambda tokenizer, vocab, eos, strings: automaton(strings, eos))
    monkeypatch.setattr(automaton_pool, "MAX_STATES", 64)
    monkeypatch.setattr(automaton_pool, "_GRAMMAR_SIZES", (16, 1))
    monkeypatch.setattr(automaton_pool, "_STOP_SIZES", (1, 1))


FOLLOWING = jax.jit(following)


def transitions(found):
    """[states, V]: of each token in each state, as the device finds them."""
    states = len(found.map_of_state)
    state, token = np.arange(states, dtype=np.int16)[:, None], np.arange(VOCAB, dtype=np.int32)[None]
    return np.asarray(FOLLOWING(found, *(np.broadcast_to(x, (states, VOCAB)) for x in (state, token))))


def check_works(table, start, own, rng):
    """From its start state, the pool's transitions lead where the automaton alone leads."""
    for _ in range(20):
        here, there = start, 0
        for token in rng.choices(range(VOCAB), k=30):
            here, there = int(table[here, token]), int(own[there, token])
            assert (here if here < 0 else here - start) == there
            if there < 0:
                break


def check_set(table, start, strings, ignore_eos, rng):
    made = automaton(strings, () if ignore_eos else (EOS,))
    check_works(table, start, np.zeros((1, VOCAB), np.int16) if made is None else made.dense(), rng)


@pytest.mark.slow(unless=(*map(str, range(6)),))
@pytest.mark.parametrize("seed", range(20))
def test_sets_come_and_go(seed):
    rng, used = random.Random(seed), []
    pool = StopPool(MODEL)
    refused, sizes = 0, set()
    for _ in range(60):
        if used and rng.random() < 0.45:
            pool.free(used.pop(rng.randrange(len(used)))[:2])
            continue
        strings = tuple("".join(rng.choices("abcd", k=rng.randint(1, 6))) for _ in range(rng.randint(0, 3)))
        ignore_eos = rng.random() < 0.3
        try:
            used.append((strings, ignore_eos, pool.insert((strings, ignore_eos))))
        except QueueFull as error:
            refused += 1
            assert "try again later" in str(error)
        table = transitions(pool.at(-1))
        for strings, ignore_eos, start in used:
            check_set(table, start, strings, ignore_eos, rng)
        sizes.add((len(pool.at(-1).table), len(pool.at(-1).token_class)))
    assert refused < 60 and all(states <= 64 and states.bit_count() == maps.bit_count() == 1 for states, maps in sizes)
    for strings, ignore_eos, _ in used:
        pool.free((strings, ignore_eos))
    pool.insert((("a" * 63,), False))


def test_what_nobody_uses_goes_before_the_table_grows():
    pool = StopPool(MODEL)
    pool.insert((("a" * 15,), False))
    shape = pool.at(-1).table.shape
    for letter in "bcdefgh":
        start = pool.insert(((letter * 10,), False))
        assert pool.insert(((letter * 10,), False)) == start
        pool.free(((letter * 10,), False))
        pool.free(((letter * 10,), False))
    assert pool.at(-1).table.shape[0] == 4 * shape[0] == 64


def test_a_full_table_has_space_again_when_a_request_has_ended():
    pool = StopPool(MODEL)
    first = pool.insert((("a" * 40,), False))
    assert pool.insert((("a" * 40,), False)) == first
    with pytest.raises(QueueFull, match="41 states beside those of other requests are more than 64"):
        pool.insert((("b" * 40,), False))
    pool.free((("a" * 40,), False))
    with pytest.raises(QueueFull):
        pool.insert((("b" * 40,), False))
    pool.free((("a" * 40,), False))
    pool.insert((("b" * 40,), False))


def test_a_set_that_never_fits_is_refused_for_good():
    with pytest.raises(ValueError, match="has 66 states; must be at most 64"):
        StopPool(MODEL).insert((("a" * 65,), False))


def test_a_set_that_fits_no_longer_beside_the_size_of_the_table_is_refused_for_good(monkeypatch):
    """The table has rows for the states that it once held, and never gives them back."""
    monkeypatch.setattr(automaton_pool, "MAX_CELLS", 64 * 64)
    monkeypatch.setattr(StopPool, "compile", lambda pool, key: TokenTable(np.zeros(key, np.int16), np.zeros(VOCAB)))
    pool = StopPool(MODEL)
    pool.insert((60, 3))
    pool.free((60, 3))
    with pytest.raises(ValueError, match="has 2 states; must be at most 64, and fewer for 65 classes of tokens"):
        pool.insert((2, 65))


def test_grammars_leave_the_free_state_alone():
    pool, rng = GrammarPool(MODEL), random.Random(0)
    grammars = [Grammar.regex("[a-c]{3}e*"), Grammar.choice(["abba", "ha"]), Grammar.regex("(ef|g)*h")]
    starts = [pool.insert(one) for one in grammars]
    assert pool.insert(None) == FREE and FREE not in starts
    for one, start in zip(grammars, starts, strict=True):
        check_works(transitions(pool.at(-1)), start, pool.compile(one).dense(), rng)
        state = start
        for token in b"ab":
            state = pool.state_after(state, [token - 97]) if state >= 0 else state
        assert pool.state_after(start, [0, 1][: 2 * (one is grammars[0])]) >= 0
    found = pool.at(-1)
    assert (transitions(found)[FREE] == FREE).all() and int(np.asarray(found.likely)[FREE]) == -1
    for one in (*grammars, None):
        pool.free(one)
    assert pool.insert(Grammar.choice(["abba", "ha"])) == starts[1]
    pool.free(grammars[1])
    more = Grammar.regex("[a-h]{40}")
    start = pool.insert(more)
    check_works(transitions(pool.at(-1)), start, pool.compile(more).dense(), rng)
    assert (transitions(pool.at(-1))[FREE] == FREE).all(), "the table has grown, and others have gone"
    with pytest.raises(ValueError, match="grammar: the automaton has 64 states; must be at most 63"):
        pool.insert(Grammar.regex("a{63}"))
