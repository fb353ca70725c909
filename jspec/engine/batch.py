"""Requests that are known in advance, run together."""

from collections.abc import Callable, Sequence

from tqdm import tqdm

from jspec.engine.group import Group, clock
from jspec.engine.handle import Handle
from jspec.generation.result import Generations, GenerationStats
from jspec.runner.request import Request


def run(
    groups: Sequence[Group],
    enqueue: Callable[[Sequence[Request]], list[Handle]],
    requests: Sequence[Request],
    *,
    progress: bool = False,
) -> Generations:
    """Runs all requests on groups of an engine, whose queues take them by `enqueue`, and waits for them.

    Those with the most new tokens start first, since the last one to start decides when a batch ends.
    """
    began, order = clock(groups), sorted(range(len(requests)), key=lambda index: -requests[index].max_new_tokens)
    started = dict(zip(order, enqueue([requests[index] for index in order]), strict=True))
    handles = [started[index] for index in range(len(requests))]
    try:
        with tqdm(total=len(handles), unit="prompt", disable=not progress) as bar:
            for handle in handles:
                handle.result()
                bar.update()
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise
    items = [handle.generation() for handle in handles]
    return Generations(items, GenerationStats.total([x.stats for x in items], clock(groups) - began))
