"""Batches of one size: the last one is filled up, and the copies that fill it are not counted."""

import numpy as np
import pytest
import toy

import jspec
from jspec.engine import batches
from jspec.engine.batches import split
from jspec.generation.options import GenerateOptions

PROMPTS = [[1, 2], [3], [4, 5, 6], [7], [8, 9]]


def model():
    return jspec.Model("toy", toy.TARGET, toy.params(), None, ())


@pytest.mark.parametrize("size", (1, 2, 3, 5, 8))
@pytest.mark.parametrize("seed", (7, (3, 1, 4, 1, 5)))
def test_all_batches_have_one_size_and_each_prompt_its_seed(size, seed):
    parts = split(PROMPTS, GenerateOptions(seed=seed), size)
    assert {len(part.prompts) for part in parts} == {min(size, 5)}
    assert [prompt for part in parts for prompt in part.prompts[: part.count]] == PROMPTS
    seeds = [each for part in parts for each in part.options.seed[: part.count]]
    assert seeds == ([(7, i) for i in range(5)] if seed == 7 else [(one, 0) for one in seed])
    for part in parts:
        copies = zip(part.prompts[part.count :], part.options.seed[part.count :], strict=True)
        assert set(map(str, copies)) <= {str((part.prompts[part.count - 1], part.options.seed[part.count - 1]))}


@pytest.mark.slow
def test_a_batch_that_was_filled_up_gives_what_each_prompt_gives_alone(monkeypatch):
    """And runs the program of the others: every run has the same shapes."""
    sampling = jspec.Sampling(temperature=1.0)
    options = GenerateOptions(drafter="ngram", max_new_tokens=9, sampling=sampling, seed=3)
    shapes, make = [], batches.Run

    def record(model, prompts, options, **keywords):
        run = make(model, prompts, options, **keywords)
        shapes.append(run.state.tokens.shape)
        return run

    monkeypatch.setattr(batches, "Run", record)
    outputs = [part.run(model()) for part in split(PROMPTS, options, 3)]
    assert [len(out) for out in outputs] == [3, 2] and len(set(shapes)) == 1
    alone = [part.run(model()) for part in split(PROMPTS, options, 1)]
    assert [out.tokens for batch in outputs for out in batch] == [out[0].tokens for out in alone]
    joined = jspec.GenerationStats.total([out.stats for out in outputs], 1.0)
    assert joined.new_tokens == 45
    for name in ("rounds", "accept_counts"):
        wanted = np.concatenate([getattr(out.stats, name) for out in alone])
        np.testing.assert_array_equal(getattr(joined, name), wanted)
