"""Top-k and top-p keep the tokens that a search over the sorted vocabulary keeps, and compute no more than needed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import truncation
from jspec.core.sampling import Sampling, per_row, temper

WORDS = 300
CASES = (
    *({"top_k": k} for k in (1, 2, 63, 64, 65, 200, WORDS)),
    *({"top_p": p} for p in (1e-3, 0.3, 0.9, 0.99, 0.9999)),
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 100, "top_p": 0.95},
)
truncate, best_of = jax.jit(truncation.truncate), jax.jit(truncation.best_of)


def options_of(cases):
    return per_row([Sampling(**case) for case in cases], len(cases), WORDS, always=("top_k", "top_p"))


def random_logits(batch, nodes, scale, seed=0):
    """Flat or peaked distributions, with ties."""
    draw = np.random.default_rng(seed)
    return (draw.standard_normal((batch, nodes, WORDS)) * scale).round(1).astype(np.float32)


def searched(logits, top_k=WORDS, top_p=1.0):
    """The tokens of one node that stay, and the smallest distance of a sum from its bound."""
    higher = logits[None, :] > logits[:, None]
    keep = higher.sum(1) < top_k
    weights = np.exp(logits.astype(np.float64) - logits.max()) * keep
    mass = (higher & keep[None]).astype(np.float64) @ weights / weights.sum()
    return (keep & (mass < top_p), np.abs(mass - top_p).min()) if top_p < 1 else (keep, 1.0)


@pytest.mark.parametrize("scale", (0.3, 2.0, 8.0))
def test_the_same_tokens_as_by_a_search_stay(scale):
    logits = random_logits(len(CASES), 3, scale)
    out = truncate(options_of(CASES), logits, best_of(logits))
    for case, ours, rows in zip(CASES, out, logits, strict=True):
        for node, row in zip(ours, rows, strict=True):
            keep, margin = searched(row, **case)
            assert margin > 1e-6, "the case is no test"
            np.testing.assert_array_equal(np.isfinite(node), keep, err_msg=str(case))


def test_a_node_has_the_same_tokens_alone():
    """Whether others need the bisection does not matter, to the bit."""
    cases = ({"top_p": 0.9}, {"top_k": 40, "top_p": 0.8}, {}, {"top_p": 0.999})
    logits = random_logits(len(cases), 4, 2.0) / 7
    together = truncate(options_of(cases), logits, best_of(logits))
    for i, case in enumerate(cases):
        for node in range(4):
            one = logits[i : i + 1, node : node + 1]
            alone = truncate(options_of([case]), one, best_of(one))
            np.testing.assert_array_equal(alone[0, 0], together[i, node])


@pytest.mark.parametrize(
    ("cases", "scale", "first", "bisections"),
    (
        ([{}, {}], 2.0, 0, 0),
        ([{}, {"top_k": 40}], 2.0, 1, 0),
        ([{}, {"top_k": 99}], 2.0, 1, 1),
        ([{"top_p": 0.9}, {}], 8.0, 1, 0),
        ([{"top_p": 0.9}, {}], 0.3, 1, 1),
        ([{"top_k": 20, "top_p": 0.9}, {}], 0.3, 2, 0),
    ),
)
def test_nothing_is_computed_that_no_sequence_needs(cases, scale, first, bisections, monkeypatch):
    """Programs of an engine have arrays of options that no sequence uses."""
    calls = []
    for name in ("_among_first", "_bisect"):
        original = getattr(truncation, name)
        monkeypatch.setattr(truncation, name, lambda *a, name=name, call=original: calls.append(name) or call(*a))
    logits = jnp.asarray(random_logits(len(cases), 2, scale))
    with jax.disable_jit():
        out = truncation.truncate(options_of(cases), logits, truncation.best_of(logits))
    assert (calls.count("_among_first"), calls.count("_bisect")) == (first, bisections)
    for case, row in zip(cases, out, strict=True):
        assert np.isfinite(row).all() == (not case)


def test_no_option_needs_a_sort():
    """The largest logits are found, at most `truncation.FIRST` of them."""
    rows, logits = per_row(Sampling(0.5, top_k=3, top_p=0.5, min_p=0.1), 2, WORDS), jnp.zeros((2, 3, WORDS))

    def compiled(function, *args):
        return jax.jit(function).lower(*args).compile().as_text()

    sorts = re.compile(r" sort\(")
    assert not sorts.search(compiled(temper, rows, logits))
    assert sorts.search(compiled(jnp.sort, logits)), "the program text was not parsed"

    def sizes(function, *args):
        return {int(size) for size in re.findall(r"\bk=(\d+)", str(jax.make_jaxpr(function)(*args)))}

    assert sizes(temper, rows, logits) == {truncation.FIRST}
    assert sizes(lambda x: jax.lax.top_k(x, 2), logits) == {2}, "the program text was not parsed"
