"""The text of an engine's rounds: compiled for this machine, and lowered for a GPU and a TPU."""

import functools
import re

import jax
import pytest
from crosslower import PLATFORMS, cross_lower
from hlo import check_in_place, opcode
from loops import LOOPS

from jspec.engine.engine import Engine
from jspec.loading.model import Model
from jspec.runner import programs
from jspec.runner.plan import Burst
from jspec.runner.request import Request
from pallas_kernels import platform

TEXT_AS_SHIPPED = True
SLOTS, PAGES, PAGE = 6, 23, 5
NAMES = (
    "standalone",
    "standalone_tree",
    "sliding_standalone_tree",
    "recurrent_experts_standalone",
    "recurrent_standalone_tree",
)
SHORT = {"cuda": "gpu", "tpu": "tpu"}


class Stopped(Exception):
    """Carries the arguments of a program that was not called."""


@functools.cache
def burst_arguments(name, count):
    """The arguments with which an engine of six slots would run rounds of `count` sequences."""

    def stop(*args, **kwargs):
        raise Stopped(args, kwargs)

    loop = LOOPS[name]
    model = Model("toy", loop.target, loop.weights(), None, (), getattr(loop.drafter, "model", None))
    sizes = {"slots": SLOTS, "context": 40, "page_size": PAGE, "pages": PAGES, "prefill_tokens": 16}
    requests = [Request([1, 2, 3], 9) for _ in range(count)]
    for index, request in enumerate(requests):
        request.slot, request.pages = index, [1 + index]
    plan = Burst(requests, [PAGE] * count, 3, loop.drafter.depth + 1, False)
    with Engine(model, drafter=loop.drafter, **sizes) as engine, pytest.MonkeyPatch.context() as patch:
        engine.groups[0].device.stops.insert(((), False))
        patch.setattr(programs.burst, "variant", lambda **options: stop)
        with pytest.raises(Stopped) as stopped:
            engine.groups[0].device.burst(plan)
    return stopped.value.args


def pools(state):
    """The pools of pages in a state, those of rings included."""
    return [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 6]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [(name, (2, SLOTS)[i % 2]) for i, name in enumerate(NAMES)])
def test_rounds_are_one_loop_that_copies_no_pool(name, count):
    """Rounds of some slots and of all of them. Outputs reuse all arrays of the state but the tables."""
    args, static = burst_arguments(name, count)
    state = args[1]
    text = programs.burst.lower(*args, **static).compile().as_text()
    opcodes = [opcode(line) for line in text.splitlines()]
    assert opcodes.count("while") == 1
    assert opcodes.count("dot") > 4, "the program text was not parsed"
    assert not set(opcodes) & {"infeed", "outfeed", "send", "send-done", "recv", "recv-done", "conditional", "sort"}
    assert "callback" not in text
    types = [f"f32[{','.join(map(str, pool.shape))}]" for pool in pools(state)]
    assert len(types) >= 2
    for shape in set(types):
        check_in_place(text.splitlines(), shape, writes=types.count(shape))
    tables = sum(pool.shape[2] == PAGES for pool in pools(state))
    assert len(re.findall("(?:may|must)-alias", text.splitlines()[0])) == len(jax.tree.leaves(state)) - tables


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "where"), [(name, PLATFORMS[i % 2]) for i, name in enumerate(NAMES)])
def test_rounds_are_lowered_as_one_loop(name, where, monkeypatch):
    """On a GPU without a sort, which would keep them from running as one graph."""
    args, static = burst_arguments(name, 2)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    monkeypatch.setattr(platform, "platform", lambda: SHORT[where])
    text = cross_lower(functools.partial(programs.burst.__wrapped__, **static), where, *shapes)
    assert 'name = "kv_compact"' in text
    assert not re.search("callback|infeed|outfeed|triangular_solve|cusolver", text)
    assert len(re.findall(r"stablehlo.while\b", text)) == 1
    if where == "cuda":
        assert not re.search(r"\bsort\b|top_k|TopK", text.replace("sampling.top_k", ""))
