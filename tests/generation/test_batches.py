"""Batches of one size: the last one is filled up, and the copies that fill it are not counted."""

from types import SimpleNamespace

import numpy as np
import pytest
import toy

import jspec
from jspec.generation import run
from jspec.generation.options import GenerateOptions
from jspec.generation.run import in_batches

PROMPTS = [[1, 2], [3], [4, 5, 6], [7], [8, 9]]


def model():
    return jspec.Model("toy", toy.TARGET, toy.params(), None, ())


@pytest.mark.parametrize("size", (1, 2, 3, 5, 8))
@pytest.mark.parametrize("seed", (7, (3, 1, 4, 1, 5)))
def test_all_batches_have_one_size_and_each_prompt_its_seed(monkeypatch, size, seed):
    parts = []

    def record(model, prompts, options, **keywords):
        parts.append((prompts, options.seed))
        stats = SimpleNamespace(of_first=lambda count: count)
        return SimpleNamespace(finish=lambda: jspec.Generations(prompts, stats))

    monkeypatch.setattr(run, "Run", record)
    outputs = list(in_batches(model(), PROMPTS, GenerateOptions(seed=seed), size))
    assert {len(prompts) for prompts, _ in parts} == {min(size, 5)}
    assert [prompt for out in outputs for prompt in out] == PROMPTS
    seeds = [one for (_, seeds), out in zip(parts, outputs, strict=True) for one in seeds[: len(out)]]
    assert seeds == ([(7, i) for i in range(5)] if seed == 7 else [(one, 0) for one in seed])
    for (prompts, seeds), out in zip(parts, outputs, strict=True):
        copies = zip(prompts[len(out) :], seeds[len(out) :], strict=True)
        assert set(map(str, copies)) <= {str((prompts[len(out) - 1], seeds[len(out) - 1]))}


@pytest.mark.slow
def test_a_batch_that_was_filled_up_gives_what_each_prompt_gives_alone(monkeypatch):
    """And runs the program of the others: every run has the same shapes."""
    shapes, make = [], run.Run

    def record(model, prompts, options, **keywords):
        made = make(model, prompts, options, **keywords)
        shapes.append(made.state.tokens.shape)
        return made

    monkeypatch.setattr(run, "Run", record)
    sampling = jspec.Sampling(temperature=1.0)
    options = GenerateOptions(drafter="ngram", max_new_tokens=9, sampling=sampling, seed=3)
    outputs = list(in_batches(model(), PROMPTS, options, 3))
    assert [len(out) for out in outputs] == [3, 2] and len(set(shapes)) == 1
    alone = list(in_batches(model(), PROMPTS, options, 1))
    assert [out.tokens for batch in outputs for out in batch] == [out[0].tokens for out in alone]
    joined = jspec.GenerationStats.total([out.stats for out in outputs], 1.0)
    assert joined.new_tokens == 45
    for name in ("rounds", "accept_counts"):
        wanted = np.concatenate([getattr(out.stats, name) for out in alone])
        np.testing.assert_array_equal(getattr(joined, name), wanted)
