"""Several requests at once: all of them enter the queue, or none."""

import pytest
from test_engine import OPTIONS, model

from jspec.engine.engine import Engine
from jspec.generation.options import RequestOptions
from jspec.runner.request import QueueFull


@pytest.mark.slow
def test_all_requests_are_queued_or_none():
    with Engine(model(), drafter="ngram", **{**OPTIONS, "slots": 1}, max_queue=2) as engine:
        with pytest.raises(QueueFull, match="max_queue=2"):
            engine.enqueue(engine.make([[1]] * 3, RequestOptions(max_new_tokens=4)), engine.max_queue)
        assert not engine.metrics().waiting and not engine.metrics().running
        options = RequestOptions(max_new_tokens=[4, 5], ignore_eos=True)
        handles = engine.enqueue(engine.make([[1], [2]], options), engine.max_queue)
        assert [len(handle.result().tokens) for handle in handles] == [4, 5]
