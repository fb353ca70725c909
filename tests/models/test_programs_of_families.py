"""The loops of Gemma 4 and of models with recurrent layers as programs: their memory, and that no pool is copied."""

import types
from functools import partial

import gemma
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen
import toy
from hlo import check_in_place, loop_body, made

from jspec.core import accept, stopping
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.core.prefill import prefill
from jspec.core.round import step
from jspec.core.types import Params, Prompts
from jspec.drafters import FrozenKvMtp, Ngram, Plain, Standalone
from jspec.loading import memory
from jspec.models import Assistant
from jspec.models.assistant import Clusters
from jspec.models.gemma4 import Attention, Gemma4
from jspec.models.rope import ProportionalRope, Rope

TEXT_AS_SHIPPED = True

IDS = np.random.default_rng(0).integers(0, 61, (2, 30)).astype(np.int32)
ASSISTANT = Assistant(61, 24, 32, 48, num_heads=4, target_layers=(2, 3), head_dims=(8, 16), clusters=Clusters(61, 20))
WINDOWS = {
    "shared": (gemma, "shared", Plain()),
    "dense": (gemma, "dense", Standalone(depth=3, width=2)),
    "experts": (gemma, "experts", Ngram(depth=3)),
    "assistant": (gemma, "shared", FrozenKvMtp(depth=3, width=2)),
}
STATES = {
    "states, chain": (qwen, "dense", Ngram(depth=3)),
    "states, tree": (qwen, "dense", Standalone(depth=3, width=2)),
    "states, plain": (qwen, "experts", Plain()),
    "states, experts": (qwen, "experts", Standalone(depth=3)),
}
CASES = {**WINDOWS, **STATES}
"""Each drafter and each kind of model occurs in one of them."""


def parts(case):
    family, kind, drafter = CASES[case]
    target, draft, weights = family.KINDS[kind], family.KINDS[kind], family.params(kind, seed=1)
    if isinstance(drafter, FrozenKvMtp):
        draft, weights = ASSISTANT, toy.in_clusters(ASSISTANT, toy.random_assistant(ASSISTANT))
    return Params(family.params(kind), weights), Method(target, drafter.bind(target, draft), accept.greedy)


def reading(case, chunk=None):
    """`prefill` with its static arguments, and the others. With pages of 5 rows, only a pool has its shape."""
    weights, method = parts(case)
    length = jnp.array([30, 17], jnp.int32)
    keys = jax.vmap(jax.random.key)(jnp.arange(2, dtype=jnp.uint32))
    prompts = Prompts(jnp.asarray(IDS), length, length + 20, keys, stopping.init(None, 2))
    return partial(prefill, method=method, capacity=64, page_size=5, chunk=chunk), (weights, prompts)


def check_loop(text, s):
    """Only a commit produces arrays of the shape of a pool, by a write, or of a state, by a sum, in place."""
    body = loop_body(text)
    caches = [s.cache, *([s.draft.cache] if hasattr(s.draft, "cache") else [])]
    groups = [group for cache in caches for group in cache.groups]
    states = [state for group in groups for state in getattr(group, "layer_states", ())]
    if states:
        makers = made(body, f"f32[{','.join(map(str, states[0].shape))}]")
        if jax.default_backend() != "gpu":  # which makes several results in one fusion, a tuple
            assert makers.count("fusion") == len(states)
        assert not {"copy", "copy-start", "scatter", "dynamic-slice", "concatenate"} & set(makers), makers
    pools = [f"f32[{','.join(map(str, group.pool.shape))}]" for group in groups if hasattr(group, "pool")]
    assert states or len(set(pools)) == 2, "sliding and full layers"
    for shape in pools:
        check_in_place(body, shape, pools.count(shape))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_pools_and_states_are_written_once_per_round_and_never_copied(case):
    function, arguments = reading(case)
    s = jax.eval_shape(function, *arguments)
    weights, method = parts(case)
    check_loop(decode.lower(weights, s, jnp.int32(9), method=method).compile().as_text(), s)


@pytest.mark.slow
@pytest.mark.parametrize("case", WINDOWS)
def test_a_prompt_read_in_chunks_is_written_into_the_pools_in_place(case):
    """The chunks are longer than the ring."""
    function, arguments = reading(case, chunk=12)
    check_loop(jax.jit(function).lower(*arguments).compile().as_text(), jax.eval_shape(function, *arguments))


@pytest.mark.slow
def test_a_long_context_takes_the_windows_and_the_full_layers():
    """The shape of 31B in bfloat16: 50 of 60 layers have windows of 1024."""
    sliding = Attention(16, 256, 1024, Rope())
    full = Attention(4, 512, None, Rope(1e6, ProportionalRope(0.25)), values_are_keys=True)
    kinds = tuple(full if i % 6 == 5 else sliding for i in range(60))
    target = Gemma4(262_144, 5376, 21_504, 32, kinds, max_length=262_144)
    weights = types.SimpleNamespace(embed=jax.ShapeDtypeStruct((262_144, 5376), jnp.bfloat16))

    def taken(capacity, page_size=16):
        cache = jax.eval_shape(partial(target.init_cache, weights, 1, capacity, page_size))
        return [memory.tree_bytes(group.pool) for group in cache.groups]

    windows, token = 50 * 2 * 1024 * 16 * 256 * 2, 10 * 2 * 4 * 512 * 2
    assert taken(32_768) == [windows, 32_768 * token]
    assert taken(65_536) == [windows, 65_536 * token]
    assert taken(262_144) == [windows, 262_144 * token]
    assert taken(32_768, 1) == [windows, 32_768 * token]
    assert windows * 32 == 50 * 2 * 32_768 * 16 * 256 * 2, "without windows it would be 32 times as much"


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


@pytest.mark.slow
def test_layers_with_states_have_no_keys():
    with pytest.raises(ValueError, match="layer 0 keeps a state and has no keys"):
        qwen.KINDS["dense"].layer_keys(0)
