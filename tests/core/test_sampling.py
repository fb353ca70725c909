"""How tokens are chosen, compared with a node-by-node computation in NumPy and with `transformers`."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import path_to, state_without_models

from jspec.core import accept, sampling, stopping, tree
from jspec.core.automaton import Automaton
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import DraftTree

ROWS, NODES, WORDS, COLUMNS = 24, 9, 7, 24
EOS = 6
SPELLED = [b"a", b"b", b"ab", b"c", b"", b"ca"]
STRINGS = [b"abc", b"bb"]
TABLE = stopping.build_table(WORDS, [EOS], STRINGS, SPELLED)
DENSE = TABLE.dense()

process, adjust, temper = jax.jit(sampling.process), jax.jit(sampling.adjust), jax.jit(sampling.temper)

# The reference in NumPy


def ends_text(generated):
    text = b"".join(SPELLED[token] for token in generated if token != EOS)
    return EOS in generated or any(string in text for string in STRINGS)


def plain_adjust(logits, row, prompt, generated):
    """Logits at one position, after all of `prompt` and `generated`."""
    logits = logits.copy()
    for token in range(WORDS):
        if token in prompt + generated:
            penalty = np.float32(row.repetition_penalty)
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        if token in generated:
            logits[token] -= np.float32(row.presence_penalty)
        logits[token] -= generated.count(token) * np.float32(row.frequency_penalty)
        logits[token] += np.float32((row.logit_bias or {}).get(token, 0))
        if len(generated) < row.min_new_tokens and ends_text([*generated, token]):
            logits[token] = -np.inf
    return logits


def plain_temper(logits, row):
    """Logits divided by the temperature, the tokens kept, and those so close to a bound that rounding may decide."""
    logits = logits / np.float32(row.temperature or 1)
    kept = near = logits >= np.sort(logits)[-min(row.top_k or len(logits), len(logits))]
    dist = np.exp(np.where(kept, logits, -np.inf).astype(np.float64) - logits.max())
    dist /= dist.sum()
    if row.top_p is not None and row.top_p < 1:
        above = np.array([dist[logits > x].sum() for x in logits])
        kept, near = kept & (above < row.top_p - 1e-5), near & (above < row.top_p + 1e-5)
    if row.min_p is not None:
        share = dist / dist.max()
        kept, near = kept & (share > row.min_p * (1 + 1e-5)), near & (share > row.min_p * (1 - 1e-5))
    return logits, kept, near & ~kept


def assert_tempered(got, logits, row):
    expected, kept, near = plain_temper(logits, row)
    assert not (kept & np.isneginf(got) & ~np.isneginf(expected)).any(), (got, expected, row)
    assert np.isneginf(got[~kept & ~near]).all(), (got, expected, row)
    finite = ~np.isneginf(got)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=1e-6)


# States, trees and parameters


def random_sampling(rng):
    def maybe(value, off):
        return value if rng.random() < 0.5 else off

    return Sampling(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        top_k=maybe(int(rng.integers(1, WORDS + 3)), None),
        top_p=maybe(float(rng.uniform(0.05, 1)), None),
        min_p=maybe(float(rng.uniform(0, 0.5)), None),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        presence_penalty=maybe(float(rng.normal()), 0.0),
        frequency_penalty=maybe(float(rng.normal()), 0.0),
        logit_bias=maybe({int(rng.integers(WORDS)): float(rng.normal()), int(rng.integers(4)): -np.inf}, None),
        min_new_tokens=maybe(int(rng.integers(0, 8)), 0),
    )


def state_of(rows, prompts, generated, seeds=None):
    """A decode state with these tokens, followed by random tokens that are not committed."""
    batch = len(prompts)
    tokens = np.random.default_rng(9).integers(0, WORDS, (batch, COLUMNS)).astype(np.int32)
    automaton = np.zeros(batch, np.int16)
    for b, (prompt, new) in enumerate(zip(prompts, generated, strict=True)):
        tokens[b, : len(prompt + new)] = prompt + new
        for token in new:
            automaton[b] = DENSE[automaton[b], token]
    assert (automaton >= 0).all()
    length = np.array([len(prompt + new) for prompt, new in zip(prompts, generated, strict=True)], np.int32)
    return state_without_models(
        tokens,
        np.array([len(prompt) for prompt in prompts], np.int32),
        length,
        limit=length + np.int32(9),
        stop=Automaton(TABLE.table, TABLE.token_class, automaton),
        sampling=per_row(rows, batch, WORDS),
        key=toy.row_keys(np.arange(batch) if seeds is None else seeds),
    )


@functools.cache
def random_case(seed):
    """Sequences with different sampling parameters, a token tree for each, and logits with many ties."""
    rng = np.random.default_rng(seed)
    rows = [random_sampling(rng) for _ in range(ROWS)]
    prompts = [rng.integers(0, WORDS, rng.integers(1, 6)).tolist() for _ in rows]
    generated = [[] for _ in rows]
    for new in generated:
        for token in rng.integers(0, WORDS, rng.integers(0, 6)).tolist():
            if not ends_text([*new, token]):
                new.append(token)
    parents = rng.integers(0, np.maximum(np.arange(NODES), 1), (ROWS, NODES)).astype(np.int32)
    tokens = rng.integers(0, WORDS, (ROWS, NODES)).astype(np.int32)
    logits = rng.choice([-3, -1, 0, 0.5, 2], (ROWS, NODES, WORDS)) + rng.normal(size=(ROWS, NODES, WORDS)) * (
        rng.random((ROWS, NODES, 1)) < 0.5
    )
    return rows, prompts, generated, tokens, parents, logits.astype(np.float32)


def places(case):
    """(sequence, node, tokens on its path) of each node up to which the text has not ended."""
    _, _, generated, tokens, parents, _ = case
    for b in range(ROWS):
        for node in range(NODES):
            line = path_to(tokens[b], parents[b], node)
            if not ends_text(generated[b] + line):
                yield b, node, line


SEEDS = range(6)
paths = jax.jit(tree.paths)

# Every node along its own path


@pytest.mark.parametrize("seed", SEEDS)
def test_penalties_and_bias_hold_at_every_node_along_its_own_path(seed):
    rows, prompts, generated, tokens, parents, logits = case = random_case(seed)
    s = state_of(rows, prompts, generated)
    got = np.array(adjust(s, logits, paths(DraftTree(tokens, parents))))
    forbidden = 0
    for b, node, line in places(case):
        expected = plain_adjust(logits[b, node], rows[b], prompts[b], generated[b] + line)
        np.testing.assert_allclose(got[b, node], expected, rtol=1e-5, atol=1e-5, err_msg=f"{rows[b]} {line}")
        forbidden += np.isneginf(expected).sum()
    assert forbidden


@pytest.mark.parametrize("seed", SEEDS)
def test_the_distribution_at_every_node_follows_all_options_together(seed):
    rows, prompts, generated, tokens, parents, logits = case = random_case(seed)
    s = state_of(rows, prompts, generated)
    path = paths(DraftTree(tokens, parents))
    got, adjusted = np.array(process(s, logits, path)), np.array(adjust(s, logits, path))
    greedy = 0
    for b, node, _ in places(case):
        if rows[b].temperature:
            assert_tempered(got[b, node], adjusted[b, node], rows[b])
        else:
            greedy += 1
            expected = np.where(np.arange(WORDS) == np.argmax(adjusted[b, node]), 0, -np.inf)
            np.testing.assert_array_equal(got[b, node], expected)
    assert greedy


def test_the_distribution_at_a_node_is_bitwise_that_after_its_path_is_committed():
    """Otherwise plain decoding might sample a different token there."""
    rows, prompts, generated, tokens, parents, logits = case = random_case(0)
    got = np.array(process(state_of(rows, prompts, generated), logits, paths(DraftTree(tokens, parents))))
    at = list(places(case))
    for node in range(NODES):
        here = {b: line for b, n, line in at if n == node}
        longer = [new + here.get(b, []) for b, new in enumerate(generated)]
        path = np.zeros((ROWS, 1, 0), np.int32)
        alone = np.array(process(state_of(rows, prompts, longer), logits[:, node : node + 1], path))
        for b in here:
            np.testing.assert_array_equal(got[b, node], alone[b, 0])
    assert len({node for _, node, _ in at}) == NODES


def test_a_node_does_not_count_the_tokens_of_its_siblings():
    """Two children of the root and a child of the second: each counts the tokens of its own path only."""
    tokens, parents = np.array([[5, 0, 1, 2]], np.int32), np.array([[0, 0, 0, 2]], np.int32)
    s = state_of([Sampling(frequency_penalty=1.0, presence_penalty=0.25)], [[5, 5]], [[3]])
    got = np.array(adjust(s, np.zeros((1, 4, WORDS), np.float32), paths(DraftTree(tokens, parents))))
    expected = -1.25 * np.eye(WORDS)[[3, 3, 3, 3]]
    for node, line in enumerate(([], [0], [1], [1, 2])):
        expected[node, line] -= 1.25
    np.testing.assert_array_equal(got[0], expected)


def test_no_token_ends_the_text_before_its_time_even_by_completing_a_stop_string():
    s = state_of([Sampling(min_new_tokens=4)], [[1]], [[0]])
    tokens, parents = np.array([[0, 1, 4, 2, 0]], np.int32), np.array([[0, 0, 1, 2, 1]], np.int32)
    got = process(s, np.zeros((1, 5, WORDS), np.float32), paths(DraftTree(tokens, parents)))
    forbidden = [set(map(int, np.flatnonzero(np.isneginf(dist)))) for dist in np.array(got[0])]
    # After "ab", each of "b", "c" and "ca" would end the text, also if a token without bytes comes between.
    assert forbidden == [{EOS}, {EOS, 1, 3, 5}, {EOS, 1, 3, 5}, set(), {EOS}]


# Temperature, top-k, top-p, min-p

NUMBERS = st.one_of(
    st.integers(-6, 6).map(float),
    st.floats(0.25, 30, width=32),
    st.floats(-30, -0.25, width=32),
    st.sampled_from([-0.0, -np.inf]),
)


@st.composite
def logits_and_rows(draw):
    logits = np.array([draw(st.lists(NUMBERS, min_size=WORDS, max_size=WORDS)) for _ in range(3)], np.float32)
    logits[:, draw(st.integers(0, WORDS - 1))] = draw(st.integers(-6, 6))
    rows = [
        Sampling(
            temperature=draw(st.sampled_from([0.1, 0.7, 1.0, 1.5])),
            top_k=draw(st.none() | st.integers(1, WORDS + 2)),
            top_p=draw(st.none() | st.floats(2**-7, 1, width=32)),
            min_p=draw(st.none() | st.just(0.0) | st.floats(2**-20, 1, width=32)),
        )
        for _ in range(3)
    ]
    return logits, rows


def all_columns(rows, words=WORDS):
    """The parameters with arrays for all options of `temper`, used or not, so that all examples share one program."""
    found = per_row(rows, len(rows), words)
    off = {"top_k": jnp.int32(words), "top_p": jnp.float32(1), "min_p": jnp.float32(0)}
    missing = {name: jnp.full(len(rows), value) for name, value in off.items() if getattr(found, name) is None}
    return dataclasses.replace(found, **missing)


@pytest.mark.slow
@given(logits_and_rows())
@settings(max_examples=300, deadline=None)
def test_top_k_top_p_and_min_p_keep_the_same_tokens_as_a_search(case):
    logits, rows = case
    got = np.array(temper(all_columns(rows), logits[:, None]))[:, 0]
    for b, row in enumerate(rows):
        assert_tempered(got[b], logits[b], row)


@pytest.mark.parametrize(
    ("row", "kept"),
    (
        (Sampling(top_k=2), [0, 1, 2]),
        (Sampling(top_k=1), [0]),
        (Sampling(top_k=99), range(6)),
        (Sampling(top_p=0.39), [0]),
        (Sampling(top_p=0.41), [0, 1, 2]),
        (Sampling(top_p=0.79), [0, 1, 2]),
        (Sampling(top_p=0.81), [0, 1, 2, 3]),
        (Sampling(top_p=1.0), range(6)),
        (Sampling(min_p=0.51), [0]),
        (Sampling(min_p=0.49), [0, 1, 2]),
        (Sampling(min_p=0.0), range(6)),
        (Sampling(min_p=1.0), [0]),
        # top-p applies to the renormalized result of top-k: 4/8, 2/8, 2/8.
        (Sampling(top_k=3, top_p=0.49), [0]),
        (Sampling(top_p=0.85, min_p=0.3), [0, 1, 2]),
    ),
    ids=str,
)
def test_the_bounds_are_as_documented(row, kept):
    """kept: the tokens of the distribution 0.4, 0.2, 0.2, 0.1, 0.05, 0.05 that remain."""
    dist = np.array([0.4, 0.2, 0.2, 0.1, 0.05, 0.05], np.float32)
    got = np.array(temper(per_row(row, 1, 6), np.log(dist)[None, None]))[0, 0]
    assert list(np.flatnonzero(~np.isneginf(got))) == list(kept)


def test_zero_and_minus_zero_are_a_tie():
    logits = np.array([0.0, -0.0, -1.0], np.float32)[None, None]
    for row in (Sampling(top_k=1), Sampling(top_p=0.1), Sampling(min_p=1.0)):
        got = np.array(temper(per_row(row, 1, 3), logits))[0, 0]
        assert list(np.isneginf(got)) == [False, False, True], row


def test_the_distribution_is_the_one_of_the_processors_of_transformers(needs):
    """The logits have no ties, which the two libraries treat differently."""
    torch, transformers = needs("torch"), needs("transformers")
    rng = np.random.default_rng(0)
    rows = [
        Sampling(
            temperature=float(rng.uniform(0.3, 2)),
            top_k=int(rng.integers(1, 40)),
            top_p=float(rng.uniform(0.3, 1)),
            min_p=float(rng.uniform(0, 0.3)),
            repetition_penalty=float(rng.uniform(0.5, 2)),
            min_new_tokens=int(rng.integers(0, 6)),
        )
        for _ in range(40)
    ]
    prompts = [rng.integers(0, WORDS, 3).tolist() for _ in rows]
    generated = [rng.integers(0, 2, 3).tolist() for _ in rows]
    generated = [new if not ends_text(new) else [0, 0, 0] for new in generated]
    words = 64
    logits = rng.normal(size=(len(rows), 1, words)).astype(np.float32) * 3
    s = state_of(rows, prompts, generated)
    eos_only = stopping.init(stopping.build_table(words, [EOS]), len(rows))
    s = dataclasses.replace(s, stop=eos_only, sampling=per_row(rows, len(rows), words))
    got = np.array(jax.nn.softmax(process(s, logits, np.zeros((len(rows), 1, 0), np.int32)), axis=-1))[:, 0]
    for b, row in enumerate(rows):
        wanted, ids = torch.tensor(logits[b]), torch.tensor([prompts[b] + generated[b]])
        for processor in (
            transformers.RepetitionPenaltyLogitsProcessor(row.repetition_penalty),
            transformers.MinNewTokensLengthLogitsProcessor(3, row.min_new_tokens, [EOS], device="cpu"),
            transformers.TemperatureLogitsWarper(row.temperature),
            transformers.TopKLogitsWarper(row.top_k),
            transformers.TopPLogitsWarper(row.top_p),
            transformers.MinPLogitsWarper(row.min_p),
        ):
            wanted = processor(ids, wanted)
        np.testing.assert_allclose(got[b], torch.softmax(wanted, -1)[0].numpy(), atol=1e-6, err_msg=str(row))


# Sequences and their parameters


def test_the_distribution_of_a_sequence_is_bitwise_that_alone():
    """Options that only other sequences use have no effect on it."""
    rows, prompts, generated, tokens, parents, logits = random_case(1)
    rows = [*rows[:-2], Sampling(), Sampling(temperature=0.0)]
    path = np.array(paths(DraftTree(tokens, parents)))
    got = np.array(process(state_of(rows, prompts, generated), logits, path))
    for b in (0, 1, 2, ROWS - 2, ROWS - 1):
        one = slice(b, b + 1)
        alone = process(state_of(rows[one], prompts[one], generated[one]), logits[one], path[one])
        alone = np.array(alone)[0]
        if not rows[b].temperature:
            alone = np.where(np.arange(WORDS) == np.argmax(alone, -1)[:, None], 0, -np.inf)
        np.testing.assert_array_equal(got[b], alone)


def test_a_changed_sequence_changes_no_other():
    rows, prompts, generated, tokens, parents, logits = random_case(2)
    path = np.array(paths(DraftTree(tokens, parents)))
    got = np.array(process(state_of(rows, prompts, generated), logits, path))
    changed = [dataclasses.replace(rows[0], temperature=2.0, frequency_penalty=0.7), *rows[1:]]
    other_logits = np.concatenate([logits[:1] + 1, logits[1:]])
    again = np.array(process(state_of(changed, [[6], *prompts[1:]], [[4, 4], *generated[1:]]), other_logits, path))
    np.testing.assert_array_equal(again[1:], got[1:])
    assert not np.array_equal(again[0], got[0])


def test_only_options_that_some_sequence_uses_have_arrays():
    assert per_row(None, 2, WORDS) is None
    assert per_row(Sampling(temperature=0.0), 2, WORDS) is None
    assert per_row([None, Sampling(temperature=0.0, logit_bias={})], 2, WORDS) is None
    mixed = per_row([None, Sampling(top_p=0.5)], 2, WORDS)
    used = {field.name for field in dataclasses.fields(mixed) if getattr(mixed, field.name) is not None}
    assert used == {"temperature", "top_p"}
    np.testing.assert_array_equal(mixed.temperature, [0, 1])
    np.testing.assert_array_equal(mixed.top_p, [1, 0.5])
    assert per_row(Sampling(temperature=0.0, presence_penalty=0.5), 2, WORDS).temperature is None
    assert per_row(Sampling(logit_bias={3: -1.0}), 2, WORDS).logit_bias.shape == (2, WORDS)


def test_without_parameters_logits_stay_unchanged():
    s = state_of(None, [[1]], [[]])
    logits = jnp.zeros((1, 2, WORDS))
    assert sampling.process(s, logits, jnp.zeros((1, 2, 0), jnp.int32)) is logits


# Invalid values


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", value) for value in (-0.1, float("nan"), float("inf"))]
    + [("top_k", value) for value in (0, -1, 2.5)]
    + [("top_p", value) for value in (0, -0.5, 1.1, float("nan"))]
    + [("min_p", value) for value in (-0.1, 1.1, float("nan"))]
    + [("repetition_penalty", value) for value in (0, -1, float("inf"), float("nan"))]
    + [(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (float("inf"), float("nan"))]
    + [("min_new_tokens", value) for value in (-1, 1.5)]
    + [("logit_bias[3]", value) for value in (float("inf"), float("nan"))],
    ids=str,
)
def test_an_invalid_value_is_refused_with_its_name_and_value(name, value):
    given = {"logit_bias": {3: value}} if "bias" in name else {name: value}
    with pytest.raises((ValueError, TypeError), match=re.escape(f"Sampling({name}={value!r}): must be ")):
        Sampling(**given)


def test_a_list_of_another_length_or_of_other_things_is_refused():
    with pytest.raises(ValueError, match="sampling: 3 for 2 sequences; must be one, or one per sequence"):
        per_row([None] * 3, 2, WORDS)
    with pytest.raises(TypeError, match=re.escape("sampling[0]=0.7: must be a jspec.Sampling, or None (greedy)")):
        per_row([0.7], 1, WORDS)


def test_a_bias_for_a_token_outside_the_vocabulary_is_refused():
    with pytest.raises(
        ValueError, match=re.escape(f"logit_bias={{{WORDS}: ...}}: token ids must be from 0 to {WORDS - 1}")
    ):
        per_row(Sampling(logit_bias={WORDS: 1.0}), 1, WORDS)
    with pytest.raises(ValueError, match="token id of logit_bias=-1: must be at least 0"):
        Sampling(logit_bias={-1: 1.0})


# Random numbers


def keys(count):
    return jax.vmap(jax.random.key)(np.arange(count, dtype=np.uint32))


def test_the_noise_of_a_position_does_not_depend_on_the_request():
    position = jnp.array([3, 0, 7], jnp.int32)
    noise = sampling.gumbel(keys(3), sampling.NOISE, position, 4, WORDS)
    for i in range(4):
        again = sampling.gumbel(keys(3), sampling.NOISE, position + i, 1, WORDS)
        np.testing.assert_array_equal(noise[:, i], again[:, 0])
    for b in range(3):
        alone = sampling.gumbel(keys(3)[b : b + 1], sampling.NOISE, position[b : b + 1], 4, WORDS)
        np.testing.assert_array_equal(noise[b], alone[0])


def test_no_two_streams_positions_or_sequences_share_noise():
    names = (sampling.NOISE, sampling.DRAFT, sampling.COINS, sampling.FINAL)
    noise = [np.array(sampling.gumbel(keys(3), name, jnp.arange(3, dtype=jnp.int32), 4, WORDS)) for name in names]
    # noise[b, i] is that of key b at position b + i; no two values are equal.
    assert len(np.unique(np.stack(noise))) == 4 * 3 * 4 * WORDS


# Compiled programs


@pytest.mark.slow
def test_a_program_of_greedy_sequences_has_no_random_bits():
    drafter, weights = toy.bound_drafters()["standalone"], toy.params()

    def text(row, rule):
        rows = per_row(row, len(toy.IDS), toy.TARGET.vocab_size)
        s = jax.eval_shape(functools.partial(toy.start, drafter, weights, rows=rows))
        method = Method(toy.TARGET, drafter, rule)
        return decode.lower(weights, s, jnp.int32(9), method=method).compile().as_text()

    bits = re.compile(r"threefry|\brng|\bxor\b")
    assert not bits.search(text(None, accept.greedy))
    assert not bits.search(text(Sampling(temperature=0.0, repetition_penalty=1.3), accept.greedy))
    assert bits.search(text(Sampling(), accept.coupled)), "the program text was not parsed"
