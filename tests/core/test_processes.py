"""How processes agree on a call, with a second one that is made up; tests/mesh/test_several_processes.py has two."""

import numpy as np
import pytest

from jspec.core import processes

NAMES = ("prompts", "seed")


class Rule:
    """Without a text of its own."""


@pytest.fixture
def other(monkeypatch):
    """What process 1 sends, after which this process, 0, has sent its own."""
    sent, replies = [], []

    def gather(own):
        sent.append(np.asarray(own))
        return np.stack([sent[-1], replies.pop(0)])

    monkeypatch.setattr(processes, "_is_shared", lambda placement: True)
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", gather)
    return sent, replies


def digests(**values):
    return np.stack([processes._digest(values[name]) for name in NAMES])


def test_equal_values_agree_wherever_they_are_in_memory(other):
    sent, replies = other
    replies.append(digests(prompts=[[1, 2]], seed=Rule()))
    with processes.agreement(None, NAMES) as compare:
        compare({"seed": Rule(), "prompts": [[1, 2]], "unnamed": 5})
    assert len(sent) == 1 and not replies


@pytest.mark.parametrize(
    "values, name", [(dict(prompts=[[1, 3]], seed=0), "prompts"), (dict(prompts=1, seed=1), "seed")]
)
def test_a_value_that_differs_is_named(other, values, name):
    other[1].append(digests(**values))
    with pytest.raises(ValueError, match=f"^{name}: differs between process 0 and process 1"):
        with processes.agreement(None, NAMES) as compare:
            compare({"prompts": 1 if name == "seed" else [[1, 2]], "seed": 0})


def test_an_error_of_one_process_is_one_of_all(other):
    sent, replies = other
    replies.append(digests(prompts=1, seed=1))
    with pytest.raises(KeyError, match="own"):
        with processes.agreement(None, NAMES) as compare:
            raise KeyError("own")
    replies.append(sent[0])
    with pytest.raises(ValueError, match="process 1 has refused this call"):
        with processes.agreement(None, NAMES) as compare:
            compare({"prompts": 1, "seed": 1})
    # An error after the comparison is the same in all processes, so nobody waits for it.
    replies.append(digests(prompts=1, seed=1))
    with pytest.raises(KeyError, match="later"):
        with processes.agreement(None, NAMES) as compare:
            compare({"prompts": 1, "seed": 1})
            raise KeyError("later")
    assert len(sent) == 3


@pytest.mark.parametrize("value, its", [(7, 5), (7 << 40, 5 << 40), (5, 7 << 40), (-1, 3)])
def test_the_smallest_value_counts(other, value, its):
    """Values have 64 bits, as counts of bytes need."""
    other[1].append(np.frombuffer(np.int64(its).tobytes(), np.uint8))
    assert processes.least(None, value) == min(value, its)


def test_all_processes_learn_the_text_of_the_first(other):
    other[1].append(np.frombuffer("port ü".encode().ljust(4096, b"\0"), np.uint8))
    assert processes.announced("mine") == "mine"
    with pytest.raises(ValueError, match="text: has 4097 bytes; must have at most 4096"):
        processes.announced("x" * 4097)


def test_a_single_process_asks_nobody():
    with processes.agreement(None, NAMES) as compare:
        compare({"prompts": 1, "seed": 1})
    assert processes.least(None, 7) == 7
    found = processes.fetch({"a": np.arange(3), "b": None})
    assert found["b"] is None and found["a"].tolist() == [0, 1, 2]
