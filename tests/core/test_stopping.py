"""The automaton of EOS tokens and stop strings, against a search in the text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.core import stopping
from jspec.core.stopping import EOS, RUNNING, STOP

VOCAB, STATES, ROWS, WIDTH = 12, 32, 3, 6
LETTERS = st.sampled_from([97, 98, 99, 255])

run = jax.jit(stopping.run)


@st.composite
def cases(draw):
    """Stop strings, a vocabulary of short byte strings (some ids without any), EOS ids, and sequences of tokens."""
    strings = draw(st.lists(st.lists(LETTERS, min_size=1, max_size=5).map(bytes), max_size=4))
    token_bytes = draw(st.lists(st.lists(LETTERS, max_size=4).map(bytes), min_size=1, max_size=VOCAB + 2))
    eos = draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))
    row = st.lists(st.integers(0, VOCAB - 1), min_size=WIDTH, max_size=WIDTH)
    calls = draw(st.lists(st.lists(row, min_size=ROWS, max_size=ROWS), min_size=1, max_size=3))
    lengths = [draw(st.lists(st.integers(0, WIDTH), min_size=ROWS, max_size=ROWS)) for _ in calls]
    return strings, token_bytes, eos, calls, lengths


def naive(strings, token_bytes, eos, tokens) -> tuple[int, int]:
    """How many tokens are read, and why the text ends there."""
    text = b""
    for i, token in enumerate(tokens):
        if token in eos:
            return i + 1, EOS
        text += token_bytes[token] if token < len(token_bytes) else b""
        if any(string in text for string in strings):
            return i + 1, STOP
    return len(tokens), RUNNING


def padded(table):
    """Padded to the same number of states, so all examples share a compiled program."""
    states, classes = table.table.shape
    assert states <= STATES and classes <= VOCAB
    return table.padded(STATES, VOCAB)


@pytest.mark.slow
@given(cases())
@settings(max_examples=150, deadline=None)
def test_sequences_end_where_a_search_finds_the_end(case):
    strings, token_bytes, eos, calls, lengths = case
    table = stopping.build_table(VOCAB, eos, strings, token_bytes)
    if not strings and not eos:
        assert table is None
        return
    stop = stopping.init(padded(table), ROWS)
    seen, total = [[] for _ in range(ROWS)], np.zeros(ROWS, int)
    for tokens, length in zip(calls, lengths, strict=True):
        stop, read, finish = run(stop, jnp.asarray(tokens, jnp.int32), jnp.asarray(length, jnp.int32))
        total += np.asarray(read)
        for row in range(ROWS):
            seen[row] += tokens[row][: length[row]]
            assert (total[row], finish[row]) == naive(strings, token_bytes, eos, seen[row])


@pytest.mark.parametrize(
    ("strings", "spelled", "tokens", "expected"),
    [
        ([b"ab"], [b"a", b"b", b"xabx"], [0, 1, 0], (2, STOP)),  # across tokens
        ([b"ab"], [b"a", b"b", b"xabx"], [1, 2, 0], (2, STOP)),  # inside a token that continues after it
        ([b"aab", b"ab"], [b"a", b"b"], [0, 0, 0], (3, RUNNING)),
        ([b"aab"], [b"a", b"b"], [0, 0, 1], (3, STOP)),
        ([b"aab"], [b"aaa", b"b"], [0, 1, 1], (2, STOP)),  # falls back to a shorter beginning
        ([b"abab", b"ba"], [b"a", b"b"], [0, 1, 0], (3, STOP)),  # a string inside the beginning of another
        ([b"ab"], [b"a", b"b", b""], [0, 2, 1], (3, STOP)),  # a token without bytes in between
        ([b"ab"], [b"a", b"b"], [0, 9, 1], (3, STOP)),  # and one beyond `token_bytes`
        ([b"ab"], [b"a", b"b"], [0, 3, 1], (2, EOS)),
    ],
)
def test_texts_end_as_in_the_examples(strings, spelled, tokens, expected):
    stop = stopping.init(padded(stopping.build_table(VOCAB, [3], strings, spelled)), 1)
    _, read, finish = run(stop, jnp.asarray([tokens], jnp.int32), jnp.asarray([3], jnp.int32))
    assert (int(read[0]), int(finish[0])) == expected


def test_eos_takes_precedence_over_a_string_that_the_same_token_completes():
    table = stopping.build_table(4, [1], [b"a"], [b"a", b"a"])
    _, read, finish = run(stopping.init(table, 2), jnp.asarray([[0], [1]], jnp.int32), jnp.ones(2, jnp.int32))
    assert (read.tolist(), finish.tolist()) == ([1, 1], [STOP, EOS])


def test_an_ended_sequence_reads_nothing_more():
    stop = stopping.init(stopping.build_table(4, [1]), 1)
    stop, read, finish = run(stop, jnp.asarray([[0, 1, 0]], jnp.int32), jnp.asarray([3], jnp.int32))
    assert (read.tolist(), finish.tolist()) == ([2], [EOS])
    stop, read, finish = run(stop, jnp.asarray([[0, 0, 0]], jnp.int32), jnp.asarray([3], jnp.int32))
    assert (read.tolist(), finish.tolist()) == ([0], [EOS])


def test_without_stops_all_tokens_are_read():
    assert stopping.build_table(4, []) is None
    stop, read, finish = run(stopping.init(None, 2), jnp.zeros((2, 3), jnp.int32), jnp.asarray([1, 3], jnp.int32))
    assert (stop.table, stop.state) == (None, None)
    assert (read.tolist(), finish.tolist()) == ([1, 3], [RUNNING, RUNNING])


def test_token_bytes_of_another_length_than_the_vocabulary():
    short, long = [b"a"], [b"a", b"", b"", b"", b"a"]
    expected = stopping.build_table(3, [2], [b"aa"], [b"a", b"", b""]).dense()
    np.testing.assert_array_equal(stopping.build_table(3, [2], [b"aa"], short).dense(), expected)
    np.testing.assert_array_equal(stopping.build_table(3, [2], [b"aa"], long).dense(), expected)
    assert stopping.build_table(3, [2], [b"aa"], []).dense().shape == expected.shape


@pytest.mark.slow
def test_a_large_vocabulary_has_few_classes_of_tokens():
    rng = np.random.default_rng(0)
    token_bytes = [rng.bytes(int(n)) for n in rng.geometric(1 / 7, 128_256)]
    table = stopping.build_table(128_256, [0], [rng.bytes(20) for _ in range(3)], token_bytes)
    assert table.dense().shape == (61, 128_256) and table.table.dtype == np.int16
    assert table.table.shape[1] < 1000


def test_thousands_of_strings_are_a_small_table():
    """1,000 strings over a vocabulary of 3,000 tokens; a column per token would have 8 million entries."""
    rng = np.random.default_rng(1)
    letters = np.frombuffer(b"abcdefgh", np.uint8)
    token_bytes = [rng.choice(letters, rng.integers(1, 5)).tobytes() for _ in range(2900)] + [
        b"x%d" % i for i in range(99)
    ]
    strings = [rng.choice(letters, 6).tobytes() for _ in range(1000)]
    table = stopping.build_table(3000, [2999], strings, token_bytes)
    states, classes = table.table.shape
    assert states > 2500 and classes < 2000 and table.dense().shape == (states, 3000)
    for _ in range(40):
        text, state = b"", 0
        for token in rng.integers(0, 2998, 30):
            text += token_bytes[token]
            state = table.table[state, table.token_class[token]]
            assert (state < 0) == any(string in text for string in strings)
            if state < 0:
                break


def test_tokens_without_anything_of_a_string_are_one_class():
    token_bytes = [bytes([byte]) * 3 for byte in range(256)]
    table = stopping.build_table(300, [299], [b"ab"], token_bytes)
    assert table.table.shape == (3, 5), "those of a, those of b, all others, ids without bytes, and the EOS"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, [4]), "eos token 4 is outside the vocabulary of 4"),
        ((4, [-1]), "eos token -1 is outside"),
        ((4, [], [b"a", b""], [b"a"]), "at least one character"),
        ((4, [], [b"ab" * 20_000], [b"a"]), "stop: 1 strings of 40000 bytes in total, must be at most 32767"),
        (
            (65536, [], [bytes([i % 256, i // 256]) * 4 for i in range(4000)], [i.to_bytes(2) for i in range(65536)]),
            "stop: 4000 strings of .* too large for this vocabulary; give fewer or shorter strings",
        ),
    ],
)
def test_errors_name_the_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        stopping.build_table(*arguments)
