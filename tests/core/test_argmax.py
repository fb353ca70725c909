"""The most probable token always stays, and finite logits stay finite, however the program is compiled."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted import state_without_models

from jspec.core import sampling, stopping
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import RowSampling
from jspec.core.xla_options import loop_options

AS_SHIPPED = True

WORDS, ROWS, NODES = 97, 6, 5
MOST = float(np.finfo(np.float32).max)
CUTS = {
    "min_p": {"min_p": 1.0},
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1.2e-38},
    "all": {"top_k": 1, "top_p": 1e-6, "min_p": 1.0},
    "wider": {"top_k": 3, "top_p": 0.1, "min_p": 0.999},
}
TEMPERATURES = (1e-6, 0.3, 0.7, 1.0, 1.3, 1e30)


def state_of(rows, **changes):
    """A state in which each sequence has the tokens 0 to 7, of which the last four were generated."""
    batch = len(rows)
    tokens, eight = np.tile(np.arange(8, dtype=np.int32), (batch, 1)), np.full(batch, 8, np.int32)
    s = state_without_models(tokens, eight - 4, eight, sampling=per_row(rows, batch, WORDS))
    return dataclasses.replace(s, **changes)


PATH = np.zeros((ROWS, NODES, 0), np.int32)


def capped(x):
    """Logits as a model with a soft cap computes them, in the program that samples from them."""
    return 30 * jnp.tanh(x / 30)


def plain(s, x):
    return capped(x), sampling.process(s, capped(x), PATH)


def in_a_loop(s, x):
    """The same in the body of a loop, after other operations that XLA may fuse with it."""

    def body(carry):
        i, x, _, _ = carry
        logits = capped(x * 1.0009765625 - 0.25)
        return i + 1, x, logits, sampling.process(s, logits, PATH)

    empty = jnp.zeros_like(x)
    return jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, x, empty, empty))[2:]


MODES = {
    "eager": lambda f: f,
    "jitted": jax.jit,
    "loop": partial(jax.jit, compiler_options=loop_options(flags="")),
    "loop_many": partial(jax.jit, compiler_options=loop_options(many=True, flags="")),
}


def close(logits):
    """For each node the tokens whose logit is the highest, to a few units in the last place."""
    return logits >= logits.max(-1, keepdims=True) - 8 * np.spacing(np.abs(logits).max(-1, keepdims=True))


@pytest.mark.slow(unless="min_p-in_a_loop-jitted")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("body", (plain, in_a_loop), ids=("straight", "in_a_loop"))
@pytest.mark.parametrize("cut", CUTS)
def test_the_most_probable_token_stays(cut, body, mode):
    run = MODES[mode](body)
    rng = np.random.default_rng(1)
    options = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.1}
    s = state_of([Sampling(t, **CUTS[cut], **options) for t in TEMPERATURES])
    for scale in (1e-3, 1.0, 30.0):
        x = (rng.normal(size=(ROWS, NODES, WORDS)) * scale).astype(np.float32)
        # The two highest are an ulp apart.
        x[:, 1:, 60] = x.max(-1)[:, 1:]
        x[:, 1:, 61] = np.nextafter(x[:, 1:, 60], np.float32(-np.inf))
        logits, got = map(np.array, run(s, x))
        kept = ~np.isneginf(got)
        assert kept.any(-1).all(), "a node has no token left"
        seen = adjusted(s, logits)
        assert (kept & close(seen)).any(-1).all(), "the most probable token was removed"
        assert np.isfinite(got[kept]).all()


adjust, process = jax.jit(sampling.adjust), jax.jit(sampling.process)


def adjusted(s, logits):
    return np.array(adjust(s, logits, PATH))


@pytest.mark.slow(unless="min_p")
@pytest.mark.parametrize("name", ("top_k", "top_p", "min_p"))
def test_the_most_probable_token_stays_where_no_logit_reaches_the_bound(name):
    """As if the logits had been computed anew, an ulp below those that the bound was computed from."""
    above = {"top_k": np.int32(0), "top_p": np.float32(0), "min_p": np.nextafter(np.float32(1), np.float32(2))}[name]
    s = state_of([None] * ROWS, sampling=RowSampling(np.ones(ROWS, np.float32), **{name: np.full(ROWS, above)}))
    x = np.random.default_rng(4).normal(size=(ROWS, NODES, WORDS)).astype(np.float32)
    got = np.array(process(s, x, PATH))
    np.testing.assert_array_equal(np.isneginf(got), np.arange(WORDS) != x.argmax(-1)[..., None])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ("eager", "jitted"))
def test_the_choice_is_a_token_that_was_kept(mode):
    """Also with noise: the argmax of processed logits plus noise."""
    s = state_of([Sampling(t, min_p=1.0, top_p=1.2e-38) for t in TEMPERATURES])
    x = np.random.default_rng(2).normal(size=(ROWS, NODES, WORDS)).astype(np.float32)

    def choose(s, x):
        noise = sampling.gumbel(s.key, sampling.NOISE, s.length, NODES, WORDS)
        return jnp.argmax(sampling.process(s, x, PATH) + noise, axis=-1)

    np.testing.assert_array_equal(MODES[mode](choose)(s, x), x.argmax(-1))


EXTREMES = {
    "temperature": (0.0, 1e-6, 1.0, 3e38),
    "repetition_penalty": (1e-6, 1.0, 1e6),
    "presence_penalty": (-1e6, 0.0, 1e6),
    "frequency_penalty": (-1e6, 0.0, 1e6),
    "logit_bias": ({1: MOST, 2: -MOST, 3: -np.inf}, {5: 1.0}, {1: 1e-37}),
    "top_k": (1, 2, WORDS),
    "top_p": (1.2e-38, 0.5, 1.0),
    "min_p": (0.0, 1.2e-38, 1.0),
}


def extreme_samplings(seed):
    rng = np.random.default_rng(seed)
    for _ in range(ROWS):
        yield Sampling(**{name: values[rng.integers(len(values))] for name, values in EXTREMES.items()})


def all_columns(rows):
    """The parameters with arrays for all options, so that all cases share one program."""
    found = per_row([*rows, Sampling(0.5, 2, 0.5, 0.5, 2.0, 1.0, 1.0, {0: 1.0})], ROWS + 1, WORDS)
    return jax.tree.map(lambda column: column[:ROWS], found)


@pytest.mark.parametrize("seed", range(40))
def test_finite_logits_stay_finite_or_are_forbidden(seed):
    rng = np.random.default_rng(seed)
    rows = list(extreme_samplings(seed))
    s = state_of(rows, sampling=all_columns(rows))
    x = rng.normal(size=(ROWS, NODES, WORDS)).astype(np.float32) * np.float32(rng.choice([1e-38, 1.0, 1e20, 1e37]))
    x = np.where(rng.random(x.shape) < 0.1, np.float32(rng.choice([MOST, -MOST, 0.0])), x)
    got = np.array(process(s, x, PATH))
    assert not np.isnan(got).any() and not np.isposinf(got).any()
    assert (~np.isneginf(got)).any(-1).all()
    for row, of_row in zip(rows, got, strict=True):
        if {**(row.logit_bias or {})}.get(3) == -np.inf:
            assert np.isneginf(of_row[:, 3]).all(), "a forbidden token came back"
    probabilities = np.array(jax.nn.softmax(got, axis=-1))
    np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-5)


# Where everything is forbidden


def test_biases_that_forbid_every_token_are_an_error_where_they_are_known():
    everything = Sampling(logit_bias=dict.fromkeys(range(WORDS), -np.inf))
    with pytest.raises(ValueError, match=f"logit_bias of sequence 1 is -inf for all {WORDS} tokens; it must leave one"):
        per_row([None, everything], 2, WORDS)
    some = Sampling(logit_bias=dict.fromkeys(range(1, WORDS), -np.inf))
    assert per_row(some, 1, WORDS) is not None


def test_biases_in_arrays_that_forbid_every_token_are_not_applied():
    bias = np.full((ROWS, WORDS), -np.inf, np.float32)
    bias[0, 7] = 0
    rows = RowSampling(temperature=np.ones(ROWS, np.float32), logit_bias=bias)
    x = np.random.default_rng(3).normal(size=(ROWS, NODES, WORDS)).astype(np.float32)
    got = np.array(process(state_of([None] * ROWS, sampling=rows), x, PATH))
    np.testing.assert_array_equal(got[1:], x[1:])
    assert np.flatnonzero(~np.isneginf(got[0, 0])).tolist() == [7]


def test_the_text_ends_early_where_every_other_token_is_forbidden():
    eos = stopping.init(stopping.build_table(WORDS, [5]), ROWS)
    bias = np.full((ROWS, WORDS), -np.inf, np.float32)
    bias[:, 5] = 0
    bias[0, 6] = 0
    rows = RowSampling(
        temperature=np.zeros(ROWS, np.float32), logit_bias=bias, min_new_tokens=np.full(ROWS, 99, np.int32)
    )
    x = np.zeros((ROWS, NODES, WORDS), np.float32)
    got = np.array(process(state_of([None] * ROWS, sampling=rows, stop=eos), x, PATH))
    assert (got.argmax(-1) == np.array([6] + [5] * (ROWS - 1))[:, None]).all()
