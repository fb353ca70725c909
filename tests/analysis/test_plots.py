"""`inspect_round`, and plots."""

import dataclasses
import sys

import numpy as np
import pytest
import toy

import jspec
from jspec.analysis import plots
from jspec.analysis.evaluate import Evaluation
from jspec.drafters import Ngram

PROMPT = [5, 6, 7, 5, 6]
TREE = jspec.Standalone(depth=4, width=3, num_nodes=12)


@pytest.fixture(scope="module")
def model():
    return jspec.Model("toy", toy.TARGET, toy.params(), None, (), toy.NEAR)


@pytest.fixture
def axes(needs):
    needs("matplotlib")
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    yield plt
    plt.close("all")


# inspect_round


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "sampling"),
    (
        (Ngram(depth=3), None),
        (Ngram(depth=3), jspec.Sampling(temperature=0.7)),
        (TREE, None),
        (TREE, jspec.Sampling(temperature=0.7)),
    ),
    ids=("greedy chain", "sampled chain", "greedy tree", "sampled tree"),
)
def test_a_round_is_the_one_that_generate_runs(model, drafter, sampling):
    options = {"drafter": drafter, "sampling": sampling, "seed": 2}
    out = jspec.generate(model, PROMPT, max_new_tokens=24, **options)
    rounds = out.tokens_per_round
    for number in (0, 2, 3):
        start = 1 + sum(rounds[:number])
        seen = jspec.inspect_round(model, PROMPT, round_index=number, **options)
        assert seen.round_index == number
        assert seen.before == PROMPT + out.tokens[:start] and seen.tokens[0] == seen.before[-1]
        assert seen.appended == out.tokens[start : start + rounds[number]]
        assert seen.tokens[seen.accepted[1:]].tolist() == seen.appended[:-1]
        # What was accepted is what the target wanted there, and no child of the last node is.
        assert seen.choices[seen.accepted].tolist() == seen.appended
        children = np.flatnonzero(seen.parents[1:] == seen.accepted[-1]) + 1
        assert seen.appended[-1] not in seen.tokens[children]
        assert [seen.depths[node] for node in seen.accepted] == list(range(len(seen.accepted)))
        assert (seen.depths[1:] == seen.depths[seen.parents[1:]] + 1).all() and seen.depths[0] == 0


@pytest.mark.slow
def test_a_round_that_the_end_of_the_text_cuts(model):
    prompt = [4, 3, 2, 1]
    whole = jspec.inspect_round(model, prompt, drafter=TREE, round_index=0)
    first, second, *_ = new = [whole.before[-1], *whole.appended]
    assert first != second and len(whole.accepted) > 2, (
        "this test needs a round with two accepted drafts, the first new"
    )
    ending = dataclasses.replace(model, eos=(second,))
    cut = jspec.inspect_round(ending, prompt, drafter=TREE, round_index=0)
    assert cut.appended == new[1:2] and cut.accepted == whole.accepted[:2]
    with pytest.raises(ValueError, match="round_index=1: the text ends in round 0; pass a smaller index"):
        jspec.inspect_round(ending, prompt, drafter=TREE, round_index=1)
    ending = dataclasses.replace(model, eos=(first,))
    with pytest.raises(ValueError, match="round_index=0: the text ends with its first token, before any round"):
        jspec.inspect_round(ending, prompt, drafter=TREE, round_index=0)


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        (PROMPT, {"round_index": -1}, "round_index=-1"),
        (PROMPT, {"round_index": True}, "round_index=True"),
        ([PROMPT, PROMPT], {}, "prompt is a list of prompts: give one of them"),
        ([], {}, "at least one prompt"),
        (PROMPT, {"drafter": "medusa"}, "'medusa' is unknown"),
    ],
)
def test_what_cannot_be_looked_at_is_named(model, prompt, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        jspec.inspect_round(model, prompt, **options)


# Plots


def bars(ax):
    """Center and top of each bar, in drawing order."""
    return [(round(bar.get_x() + bar.get_width() / 2, 3), bar.get_y() + bar.get_height()) for bar in ax.patches]


def stats(*counts):
    return jspec.GenerationStats(np.array([sum(counts)]), np.array([counts]), 1.0, np.zeros(1, int))


def test_bars_of_acceptance_have_its_values(axes):
    ax = plots.acceptance_by_position(stats(1, 1, 2))
    assert bars(ax) == [(1, 0.75), (2, 0.5)] and ax.get_legend() is None
    ax = plots.acceptance_by_position({"a": stats(1, 1, 2), "b": stats(0, 1), "none": stats(4)})
    assert [high for _, high in bars(ax)] == [0.75, 0.5, 1]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "a: accept length 2.25",
        "b: accept length 2.00",
    ]
    with pytest.raises(ValueError, match="nothing was drafted"):
        plots.acceptance_by_position(stats(4))


def test_conditional_acceptance_is_that_of_rounds_that_came_so_far():
    """6 of 8 rounds accept the first draft, and 1 of these the second; none comes to the fourth."""
    np.testing.assert_allclose(stats(2, 5, 1, 0, 0).conditional_acceptance, [6 / 8, 1 / 6, 0, np.nan])
    assert stats(4).conditional_acceptance.shape == (0,)


def test_bars_of_evaluations_have_their_accept_lengths(axes):
    def part(*counts):
        made = jspec.Generations([], stats(*counts))
        return Evaluation.of("x", [made])

    found = {"plain": {"a": part(3), "b": part(2)}, "x": {"a": part(1, 1, 2), "b": part(0, 4, 0)}}
    ax = plots.evaluations(found)
    assert [high for _, high in bars(ax)] == [2.25, 2.0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b"]
    _, right = ax.figure.axes
    (line,) = right.lines
    np.testing.assert_allclose(line.get_xydata(), [[1, 7 / 8], [2, 2 / 7]])
    (legend,) = ax.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["x"]
    with pytest.raises(ValueError, match="nothing was drafted"):
        plots.evaluations({"plain": found["plain"]})


def test_tokens_per_round_of_a_list_is_an_error(axes):
    with pytest.raises(TypeError, match="generation is of type Generations: must be one Generation"):
        plots.tokens_per_round(jspec.Generations([], stats(1)))  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_tokens_per_round(axes, model):
    out = jspec.generate(model, [PROMPT, PROMPT[:2]], drafter=Ngram(depth=3), max_new_tokens=24)
    own = axes.figure().add_subplot()
    for i, generation in enumerate(out):
        ax = plots.tokens_per_round(generation, ax=own if i else None)
        rounds = generation.tokens_per_round
        highest = [max(high for at, high in bars(ax) if at == n) for n in range(len(rounds))]
        assert highest == rounds
    assert ax is own


@pytest.mark.slow(unless="chain")
@pytest.mark.parametrize(
    "drafter",
    (
        None,
        Ngram(depth=3),
        TREE,
        jspec.Standalone(depth=3, width=8, num_nodes=64),
    ),
    ids=("plain", "chain", "tree", "large"),
)
def test_a_plotted_tree_has_the_tokens_of_the_round(axes, model, drafter):
    seen = jspec.inspect_round(model, PROMPT, drafter=drafter)
    ax = plots.draft_tree(seen)
    labels = [text.get_text() for text in ax.texts]
    assert labels == [f"{token} " for token in [*seen.tokens, seen.appended[-1]]]
    places = [text.get_position() for text in ax.texts]
    assert len(set(places)) == len(places), "two nodes at the same place"
    assert [x for x, _ in places[:-1]] == seen.depths.tolist() and places[-1][0] == len(seen.accepted)
    bold = [line for line in ax.lines if line.get_linewidth() > 2]
    assert len(ax.lines) == len(seen.tokens) and len(bold) == len(seen.accepted)
    ax.figure.canvas.draw()


def test_a_label_is_a_single_short_line():
    tokenizer = jspec.load("bundled:python-tiny").tokenizer
    assert tokenizer is not None
    for text in ("\n    ", " documentation", "\t$x$"):
        labels = [plots._label(tokenizer, [1], token) for token in tokenizer.encode(text)]
        assert not set("".join(labels)) & set(" \n\t") and max(map(len, labels)) <= 12
    assert plots._label(tokenizer, [1], tokenizer.encode("\n    ")[0])[0] == "↵"


def test_a_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r'jspec.analysis.plots requires matplotlib.*pip install "jspec-decoding\[notebooks\]"',
    ):
        plots.acceptance_by_position(stats(1, 1))
