import jaxtyping
import pytest


@pytest.fixture
def without_jaxtyping():
    """Turns off the shape checks that only tests have (tests/conftest.py), so that an operation's own checks run."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
