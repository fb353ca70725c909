"""The model that the tests of `verify` share."""

import dataclasses

import jax
import numpy as np
import pytest

import jspec
from jspec.core.types import Params

TINY = "bundled:python-tiny"


def noisy():
    """The target with noise is the draft, so about half of its tokens are right: others would hide faults."""
    target = jspec.load(TINY, draft=TINY)
    draw = np.random.default_rng(0)

    def changed(leaf):
        return leaf * (1 + 0.1 * draw.standard_normal(leaf.shape, np.float32))

    params = Params(target.params.target, jax.tree.map(changed, target.params.draft))
    return dataclasses.replace(target, params=params)


@pytest.fixture(scope="module")
def model():
    """See `noisy`."""
    return noisy()
