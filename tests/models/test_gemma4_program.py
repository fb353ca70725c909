"""Gemma 4's loop as a program: the memory it needs, and that it copies no pool."""

import types
from functools import partial

import gemma
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from hlo import check_in_place, loop_body

from jspec.core import accept, stopping
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.core.prefill import prefill
from jspec.core.types import Params, Prompts
from jspec.drafters import FrozenKvMtp, Ngram, Plain, Standalone
from jspec.engine import memory
from jspec.models import Assistant
from jspec.models.assistant import Clusters
from jspec.models.gemma4 import Attention, Gemma4

TEXT_AS_SHIPPED = True

IDS = np.random.default_rng(0).integers(0, 61, (2, 30)).astype(np.int32)
# Each drafter and each kind of model occurs in one of them.
CASES = pytest.mark.parametrize(
    ("kind", "drafter"),
    [
        ("shared", Plain()),
        pytest.param("dense", Standalone(depth=3, width=2), marks=pytest.mark.slow),
        pytest.param("experts", Ngram(depth=3), marks=pytest.mark.slow),
        ("shared", FrozenKvMtp(depth=3, width=2)),
    ],
    ids=["shared", "dense", "experts", "assistant"],
)
ASSISTANT = Assistant(61, 24, 32, 48, num_heads=4, target_layers=(2, 3), head_dims=(8, 16), clusters=Clusters(61, 20))


def parts(kind, drafter):
    target, draft, own = gemma.KINDS[kind], gemma.KINDS[kind], gemma.params(kind, seed=1)
    if isinstance(drafter, FrozenKvMtp):
        draft, own = ASSISTANT, toy.in_clusters(ASSISTANT, toy.random_assistant(ASSISTANT))
    return Params(gemma.params(kind), own), Method(target, drafter.bind(target, draft), accept.greedy)


def reading(kind, drafter, chunk=None):
    """`prefill` with its static arguments, and the others. With pages of 5 rows, only a pool has its shape."""
    weights, method = parts(kind, drafter)
    length = jnp.array([30, 17], jnp.int32)
    keys = jax.vmap(jax.random.key)(jnp.arange(2, dtype=jnp.uint32))
    given = weights, Prompts(jnp.asarray(IDS), length, length + 20, keys, stopping.init(None, 2))
    return partial(prefill, method=method, capacity=64, page_size=5, chunk=chunk), given


def check_pools(text, s):
    """In the loop, only the write of a commit produces an array of a pool's shape."""
    body = loop_body(text)
    caches = [s.cache, *([s.draft.cache] if hasattr(s.draft, "cache") else [])]
    shapes = [f"f32[{','.join(map(str, group.pool.shape))}]" for cache in caches for group in cache.groups]
    assert len(set(shapes)) == 2, "sliding and full layers"
    for shape in shapes:
        check_in_place(body, shape, shapes.count(shape))


@pytest.mark.slow
@CASES
def test_each_pool_is_written_once_a_round_and_never_copied(kind, drafter):
    function, given = reading(kind, drafter)
    s = jax.eval_shape(function, *given)
    weights, method = parts(kind, drafter)
    lowered = decode.lower(weights, s, jnp.int32(9), method=method)
    check_pools(lowered.compile().as_text(), s)


@pytest.mark.slow
@CASES
def test_a_prompt_read_in_chunks_is_written_into_the_pools_in_place(kind, drafter):
    """The chunks are longer than the ring."""
    function, given = reading(kind, drafter, chunk=12)
    check_pools(jax.jit(function).lower(*given).compile().as_text(), jax.eval_shape(function, *given))


@pytest.mark.slow
def test_a_context_of_32k_tokens_takes_the_windows_and_the_full_layers():
    """The shape of 31B in bfloat16: 50 of 60 layers have windows of 1024."""
    sliding, full = Attention(16, 256, 1024, 1e4), Attention(4, 512, None, 1e6, 0.25, values_are_keys=True)
    kinds = tuple(full if i % 6 == 5 else sliding for i in range(60))
    target = Gemma4(262_144, 5376, 21_504, 32, kinds, max_length=262_144)
    weights = types.SimpleNamespace(embed=jax.ShapeDtypeStruct((262_144, 5376), jnp.bfloat16))

    def taken(capacity):
        cache = jax.eval_shape(partial(target.init_cache, weights, 1, capacity, 16))
        return [memory.tree_bytes(group.pool) for group in cache.groups]

    windows, token = 50 * 2 * 1024 * 16 * 256 * 2, 10 * 2 * 4 * 512 * 2
    assert taken(32_768) == [windows, 32_768 * token]
    assert taken(65_536) == [windows, 65_536 * token]
    assert windows * 32 == 50 * 2 * 32_768 * 16 * 256 * 2, "without windows it would be 32 times as much"
