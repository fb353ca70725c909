"""Kernels are traced anew in each test, as tests patch what they are built from."""

import pytest

from pallas_kernels import dispatch


@pytest.fixture(autouse=True)
def kernels_are_traced_anew():
    """Forgets the kernels that an earlier test has traced."""
    dispatch._traced_once.cache_clear()
