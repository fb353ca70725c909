"""Seeds: neighboring ones share no sample, and each sample of a batch can be repeated alone."""

import jax
import numpy as np
import pytest
import toy

import jspec
from jspec.core.sampling import seeds_to_keys


@pytest.mark.slow
def test_neighboring_seeds_share_no_sample_and_one_sample_is_repeated_alone():
    model = jspec.Model("toy", toy.TARGET, toy.params(), None, ())
    options = dict(max_new_tokens=12, sampling=jspec.Sampling(temperature=3.0))
    batches = [jspec.generate(model, [[1, 2]] * 4, seed=seed, drafter="ngram", **options).tokens for seed in range(3)]
    assert len({tuple(tokens) for batch in batches for tokens in batch}) == 12
    for seed, i in ((0, 3), (2, 1), (1, 0)):
        alone = jspec.generate(model, [1, 2], seed=[(seed, i)], drafter=None, **options)
        assert alone.tokens == batches[seed][i]
    assert jspec.generate(model, [1, 2], seed=2, drafter=None, **options).tokens == batches[2][0]
    # An engine has the same noise, for samples and for requests.
    with jspec.Engine(model, drafter=None, slots=2, context=32) as engine:
        samples = engine.generate([[1, 2]] * 2, n=2, seed=1, **options)
        assert samples.tokens == batches[1]
        assert engine.submit([1, 2], seed=[(2, 3)], **options).result().tokens == batches[2][3]


def test_the_noise_of_a_sequence_is_no_key_of_another():
    """Noise of tokens folds small numbers into the key of a sequence, so the indices of sequences must be others."""
    keys = seeds_to_keys(np.array([(5, i) for i in range(6)], np.uint32))
    folded = [jax.random.fold_in(jax.random.key(5), i) for i in range(1000)]
    data = [tuple(jax.random.key_data(key).tolist()) for key in (*keys, *folded)]
    assert len(set(data)) == len(data) and data[0] == tuple(jax.random.key_data(jax.random.key(5)).tolist())


@pytest.mark.parametrize(
    "seed, message",
    [
        (2**32, "seed=4294967296: must be from 0 to 4294967295"),
        (-1, "seed=-1: must be from 0"),
        ([(1, 2), (1, -1)], r"seed\[1\]\[1\]=-1: must be from 0"),
        ([(1, 2, 3), 1], r"seed\[0\]=\(1, 2, 3\): must be an int, or a pair \(seed, index\)"),
    ],
)
def test_seeds_that_are_none_are_refused(seed, message):
    with pytest.raises(ValueError, match=message):
        jspec.GenerateOptions(seed=seed)
