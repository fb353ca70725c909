"""The loop of a model with recurrent layers as a program: no state in it is copied, and on a GPU it is one graph."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen
from crosslower import cross_lower
from hlo import loop_body, made

from jspec import accept, decode, stopping
from jspec.drafters import Ngram, Plain, Standalone
from jspec.types import Params
from pallas_kernels import platform

AS_SHIPPED = True

IDS = np.random.default_rng(0).integers(0, 61, (2, 30)).astype(np.int32)
CASES = pytest.mark.parametrize(
    ("kind", "drafter"),
    [
        ("dense", Ngram(depth=3)),
        ("dense", Standalone(depth=3, width=2)),
        pytest.param("experts", Plain(), marks=pytest.mark.slow),
        pytest.param("experts", Standalone(depth=3), marks=pytest.mark.slow),
    ],
    ids=["chain", "tree", "plain", "experts"],
)


def parts(kind, drafter):
    target = qwen.KINDS[kind]
    return Params(qwen.params(kind), qwen.params(kind, 1)), dict(target=target, drafter=drafter.bind(target, target))


def prefill(kind, drafter, chunk=None):
    """`decode.prefill` with its static arguments, and the others. Pages of 5 rows: only a pool has a pool's shape."""
    weights, static = parts(kind, drafter)
    length = jnp.array([30, 17], jnp.int32)
    keys = jax.vmap(jax.random.key)(jnp.arange(2, dtype=jnp.uint32))
    given = weights, jnp.asarray(IDS), length, length + 20, keys, stopping.init(None, 2)
    return partial(decode.prefill, **static, accept=accept.greedy, capacity=64, page_size=5, chunk=chunk), given


def check_states(text, s):
    """Nothing in the loop makes an array of a state's shape but the sum of a commit, in place; pools are as ever."""
    body = loop_body(text)
    caches = [s.cache, *([s.draft.cache] if hasattr(s.draft, "cache") else [])]
    groups = [group for cache in caches for group in cache.groups]
    states = [state for group in groups for state in getattr(group, "states", ())]
    makers = made(body, f"f32[{','.join(map(str, states[0].shape))}]")
    assert makers.count("fusion") == len(states)
    assert not {"copy", "copy-start", "scatter", "dynamic-slice", "concatenate"} & set(makers), makers
    pools = [f"f32[{','.join(map(str, group.pool.shape))}]" for group in groups if hasattr(group, "pool")]
    for shape in set(pools):
        makers = made(body, shape)
        assert makers.count("scatter") == pools.count(shape)
        assert set(makers) <= {"scatter", "fusion", "parameter", "get-tuple-element", "bitcast"}, makers


@CASES
def test_no_state_is_copied_in_a_round(kind, drafter):
    function, given = prefill(kind, drafter)
    s = jax.eval_shape(function, *given)
    weights, static = parts(kind, drafter)
    lowered = decode.decode.lower(weights, s, jnp.int32(9), **static, accept=accept.greedy)
    check_states(lowered.compile().as_text(), s)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("kind", "drafter"), [("experts", Plain()), ("dense", Standalone(depth=3, width=2))])
def test_on_a_gpu_the_loop_needs_no_sort_and_no_loop_within(kind, drafter, monkeypatch):
    function, given = prefill(kind, drafter)
    s = jax.eval_shape(function, *given)
    weights, static = parts(kind, drafter)
    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    rounds = partial(decode.run_rounds, **static, accept=accept.greedy)
    text = cross_lower(rounds, "cuda", weights, s, jnp.int32(9))
    assert not re.search(r"\bsort\b|top_k|TopK|triangular_solve|cusolver|callback", text)
    assert len(re.findall(r"stablehlo.while\b", text)) == 1
