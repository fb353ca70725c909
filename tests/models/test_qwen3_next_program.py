"""The loop of a model with recurrent layers as a program: it copies no state."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen
from hlo import check_in_place, loop_body, made

from jspec.core import accept, stopping
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.core.prefill import prefill
from jspec.core.round import step
from jspec.core.types import Params, Prompts
from jspec.drafters import Ngram, Plain, Standalone

TEXT_AS_SHIPPED = True

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
    return Params(qwen.params(kind), qwen.params(kind, 1)), Method(target, drafter.bind(target, target), accept.greedy)


def reading(kind, drafter, chunk=None):
    """`prefill` with its static arguments, and the others. With pages of 5 rows, only a pool has its shape."""
    params, method = parts(kind, drafter)
    length = jnp.array([30, 17], jnp.int32)
    keys = jax.vmap(jax.random.key)(jnp.arange(2, dtype=jnp.uint32))
    given = params, Prompts(jnp.asarray(IDS), length, length + 20, keys, stopping.init(None, 2))
    return partial(prefill, method=method, capacity=64, page_size=5, chunk=chunk), given


def check_states(text, s):
    """In the loop, only the sum of a commit produces an array of a state's shape, in place; pools as usual."""
    body = loop_body(text)
    caches = [s.cache, *([s.draft.cache] if hasattr(s.draft, "cache") else [])]
    groups = [group for cache in caches for group in cache.groups]
    states = [state for group in groups for state in getattr(group, "layer_states", ())]
    makers = made(body, f"f32[{','.join(map(str, states[0].shape))}]")
    if jax.default_backend() != "gpu":  # which makes several results in one fusion, a tuple
        assert makers.count("fusion") == len(states)
    assert not {"copy", "copy-start", "scatter", "dynamic-slice", "concatenate"} & set(makers), makers
    pools = [f"f32[{','.join(map(str, group.pool.shape))}]" for group in groups if hasattr(group, "pool")]
    for shape in set(pools):
        check_in_place(body, shape, pools.count(shape))


@pytest.mark.slow
@CASES
def test_no_state_is_copied_in_a_round(kind, drafter):
    function, given = reading(kind, drafter)
    s = jax.eval_shape(function, *given)
    params, method = parts(kind, drafter)
    lowered = decode.lower(params, s, jnp.int32(9), method=method)
    check_states(lowered.compile().as_text(), s)


@pytest.mark.slow
def test_a_model_in_half_precision_keeps_its_states_in_float32():
    """A whole round, by abstract evaluation: under strict promotion rules, accidental widening is an error."""
    target = qwen.KINDS["experts"]
    shapes = target.param_shapes(jnp.bfloat16)
    drafter = Standalone(depth=2, width=2).bind(target, target)
    method = Method(target, drafter, accept.greedy)
    length = jax.ShapeDtypeStruct((2,), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
    prompts = Prompts(jax.ShapeDtypeStruct(IDS.shape, jnp.int32), length, length, keys, stopping.init(None, 2))
    start = partial(prefill, method=method, capacity=64, page_size=5, chunk=12)
    s = jax.eval_shape(start, Params(shapes, shapes), prompts)
    after = jax.eval_shape(partial(step, method=method), Params(shapes, shapes), s)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), s)
    recurrent, paged = after.cache.groups
    assert {state.dtype for state in recurrent.layer_states} == {jnp.dtype(jnp.float32)}
    assert recurrent.windows.dtype == paged.pool.dtype == jnp.bfloat16


def test_layers_with_states_have_no_keys():
    with pytest.raises(ValueError, match="layer 0 keeps a state and has no keys"):
        qwen.KINDS["dense"].layer_keys(0)
