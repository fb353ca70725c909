"""Drafts within a window against dense forwards under a banded mask, with NaN in every row that they must not read.

Output stays right whatever is drafted: only what is proposed shows a window.
"""

import dataclasses

import gemma
import jax
import loops
import numpy as np
import oss
import pytest
import toy
from dense_drafts import DRAFTS, check_tree

from jspec.analysis import poison
from jspec.cache.window import Windowed
from jspec.core.loop import decode
from jspec.core.types import Params
from jspec.drafters import Adaptive, Block, Eagle, Standalone
from jspec.models import BlockHead, EagleHead
from jspec.models.decoder import Decoder

TREE = dict(width=3, num_nodes=10)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Empty caches are NaN."""
    for kind in (Decoder, EagleHead, BlockHead):
        empty = kind.init_cache
        monkeypatch.setattr(kind, "init_cache", lambda *given, empty=empty: poison.fill(empty(*given)))


def spoiled(s, drafter):
    """The state with NaN in all rows of the draft's cache that its next query cannot see."""
    rows = getattr(s.draft, "length", s.length - 1)
    window = dict(window=drafter.window, keep_first=drafter.keep_first)
    cache = poison.spoil(s.draft.cache, np.where(s.done, 0, rows), **window)
    return dataclasses.replace(s, draft=dataclasses.replace(s.draft, cache=cache))


POINTS = (
    # drafter, shape, window, first positions, page size, columns of a chunk of the prompt
    ("eagle", dict(depth=3, **TREE), 5, 2, 4, None),
    ("standalone", dict(depth=3), 2, 1, 1, 4),
    ("block", dict(depth=3, **TREE), 7, 3, 16, None),
    ("eagle", dict(depth=3), 8, 0, 16, 4),
    ("eagle", dict(depth=4, **TREE), 3, 3, 1, 3),
    ("standalone", dict(depth=4, **TREE), 5, 0, 4, None),
    ("standalone", dict(depth=3, **TREE), 9, 3, 16, 5),
    ("eagle_masks", dict(depth=4, **TREE), 5, 2, 4, 4),
    ("standalone_masks", dict(depth=3), 6, 0, 4, 5),
    ("fill_in", dict(depth=3), 9, 0, 1, 4),
    ("fill_in", dict(depth=4, **TREE), 5, 5, 4, 3),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "window", "keep_first", "page_size", "chunk"), POINTS)
def test_drafts_are_those_of_a_banded_forward(name, shape, window, keep_first, page_size, chunk):
    """From prompts shorter than the window to texts of several, where windows begin in the cache, among the rows of a
    chunk, and among those of a round."""
    kind, model, weights_of, by_hand = DRAFTS[name]
    drafter, weights = kind(**shape, window=window, keep_first=keep_first).bind(toy.TARGET, model), weights_of()
    draft = jax.jit(drafter.draft)
    s, compared = spoiled(toy.start(drafter, weights, page_size=page_size, chunk=chunk), drafter), 0
    while not s.done.all():
        if int(s.round_index) in (0, 1, 4, 8):
            found = jax.device_get(draft(weights, s)[0])
            for b, tokens in enumerate(toy.generated(s)):
                if s.done[b]:
                    continue
                check_tree(drafter, by_hand, found, b, tokens)
                compared += len(tokens) > window
        s = spoiled(toy.run(drafter, weights, s, int(s.round_index) + 1), drafter)
    assert compared >= 4
    assert np.array(s.stats.accept_counts)[:, 1:].any()
    assert toy.generated(s) == [list(row[: n + 24]) for row, n in zip(toy.plain_tokens(), toy.LENGTHS, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ("eagle", "standalone", "block"))
def test_a_window_as_long_as_the_text_changes_nothing(name):
    """Not a bit of the drafts' rows, what is proposed, or the rounds."""
    kind, model, weights_of, _ = DRAFTS[name]
    without, weights = kind(depth=3, **TREE).bind(toy.TARGET, model), weights_of()
    states = []
    for drafter in (without, dataclasses.replace(without, window=toy.LENGTHS.max() + 24, keep_first=4)):
        s = toy.run(drafter, weights, toy.start(drafter, weights))
        states.append((s.draft, s.stats, s.tokens))
    toy.assert_same(*states)


FAMILIES = {
    "gemma": (
        gemma.KINDS["shared"],
        gemma.params,
        "shared",
        lambda window: dict(
            attention=tuple(
                dataclasses.replace(each, window=min(window, each.window or window))
                for each in gemma.KINDS["shared"].attention
            )
        ),
    ),
    "gpt_oss": (
        oss.KINDS["sinks"],
        oss.params,
        "sinks",
        lambda window: dict(windows=tuple(min(window, each or window) for each in oss.KINDS["sinks"].windows)),
    ),
}
"""Target, weights, and the fields that give its layers a window of at most that length."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "window"), (("gemma", 5), ("gpt_oss", 11)))
def test_a_window_is_one_of_each_layer_or_the_layers_own_if_that_is_shorter(name, window):
    """The draft whose layers have such windows themselves: same rounds and last drafts. Some have one of 8."""
    target, params, kind, windows = FAMILIES[name]
    exact = params(kind)
    weights = Params(exact, toy.near(exact, params(kind, 1), 0.05))
    narrower = dataclasses.replace(target, **windows(window))
    found = []
    for drafter, draft in ((Standalone(depth=3, window=window), target), (Standalone(depth=3), narrower)):
        bound = drafter.bind(target, draft)
        loop = loops.Loop(target, bound, lambda: weights, lambda: weights)
        s = decode(weights, loop.start(weights), np.int32(5), method=loop.method)
        drafted = jax.jit(bound.draft)(weights, s)[0].tokens
        found.append((drafted, s.stats, s.tokens))
    toy.assert_same(*found)
    assert np.array(found[0][1].accept_counts)[:, 1:].any()


@pytest.mark.slow
def test_adaptive_drafters_share_the_cache_of_one_window():
    chains = [Eagle(depth=depth, window=5, keep_first=1) for depth in (1, 3)]
    # The deeper one is only worth a probe, in every second round.
    adaptive = Adaptive((None, *chains), (1, 1, 3), probe=2).bind(toy.TARGET, toy.HEAD)
    weights = toy.head_params()
    s = toy.start(adaptive, weights)
    assert sum(state is not None for state in s.draft.states) == 1
    s = toy.run(adaptive, weights, s)
    assert toy.generated(s) == [list(row[: n + 24]) for row, n in zip(toy.plain_tokens(), toy.LENGTHS, strict=True)]
    assert (np.array(s.stats.branch_counts).sum((0, 2))[1:] > 0).all()
    other = Adaptive((chains[0], dataclasses.replace(chains[1], window=6)), (1, 1)).bind(toy.TARGET, toy.HEAD)
    assert len(other.parts(jax.eval_shape(lambda: other.init(weights, 1, 8, 4)))) == 2, "their rows differ"
    blocks = Adaptive((Block(depth=1), Block(depth=3, window=7)), (1, 1)).bind(toy.TARGET, toy.BLOCK)
    own = toy.block_params(toy.BLOCK)
    assert len(blocks.parts(jax.eval_shape(lambda: blocks.init(own, 1, 8, 4)))) == 1, "their rows do not"


@pytest.mark.slow
def test_without_a_window_a_draft_reads_the_cache_itself(monkeypatch):
    monkeypatch.setattr(Windowed, "__init__", lambda *given: pytest.fail("a window that nobody asked for"))
    for name in ("eagle", "standalone", "block"):
        kind, model, weights_of, _ = DRAFTS[name]
        drafter = kind(depth=2).bind(toy.TARGET, model)
        weights = weights_of()
        s = jax.eval_shape(lambda weights, drafter=drafter: toy.start(drafter, weights), weights)
        jax.eval_shape(drafter.draft, weights, s)
