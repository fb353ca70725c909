"""Fixtures of the tests against `transformers`."""

import sys

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Such small models are slower with two threads."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """`parity.pairs` of this module."""
    import parity

    return parity.pairs(tmp_path_factory)
