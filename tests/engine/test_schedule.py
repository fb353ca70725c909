"""The scheduler over random schedules, against a model of the device that checks every row it reads or writes."""

import pytest
from storm import storms


def test_storms():
    happened = storms(range(60), 200)
    wanted = ["retracts", "resumed", "holds", "hits", "refused", "cancelled waiting", "cancelled reading"]
    for event in [*wanted, "cancelled running", "cancelled done"]:
        assert happened[event] > 0, event


@pytest.mark.slow
def test_million_turns():
    """About two minutes on one core: most of it is the model, which reads back every row before each program."""
    happened = storms(range(1000, 5300), 200)
    assert happened["turns"] > 900_000
