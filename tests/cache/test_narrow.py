"""Keys and values of 8 bits: how they are rounded, that every reader sees the same values, and what can have them."""

import dataclasses

import families
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import toy
from random_models import arrays_of

import jspec
from jspec.cache import DsaCache, LayerKeys
from jspec.cache.narrow import KV_FORMATS, as_stored, narrowed
from jspec.core import tree
from jspec.core.types import Params
from jspec.drafters import Ngram, Plain, Suffix
from jspec.loading import memory

FP8 = KV_FORMATS["fp8"]
NAMES = "llama", "gemma4 shared", "deepseek mla", "deepseek dsa", "qwen3_next dense", "gpt_oss sinks"
FAMILIES = {name: families.MODELS[name] for name in (*NAMES, *families.KINDS)}
PROMPTS = toy.PROMPTS


# Rounding


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_values_are_rounded_to_the_nearest_and_bounded(dtype):
    rng = np.random.default_rng(0)
    x = np.clip(rng.normal(size=4000) * np.exp(4 * rng.normal(size=4000)), -60_000, 60_000).astype(jnp.dtype(dtype))
    got = np.asarray(jax.jit(narrowed, static_argnums=1)(x, FP8)).astype(np.float64)
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    distance = np.abs(got - x.astype(np.float64))
    assert np.abs(got).max() == values.max() == 448, "some of these values are beyond the range"
    np.testing.assert_array_equal(distance, np.abs(values[None] - x.astype(np.float64)[:, None]).min(1))


def test_what_was_stored_is_stored_unchanged():
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    wide = values.astype(np.float32)
    finite, again = np.isfinite(wide), np.asarray(narrowed(wide, FP8))
    np.testing.assert_array_equal(again.view(np.uint8)[finite], values.view(np.uint8)[finite])
    np.testing.assert_array_equal(np.isnan(np.asarray(as_stored(wide, FP8))), np.isnan(wide))
    assert as_stored(wide, jnp.bfloat16) is wide


# Readers


@pytest.mark.slow(unless="llama")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_is_read_alike_in_its_own_round_and_later(name):
    """Logits of a text read at once equal those of its tokens one by one, and are not those of a wide cache."""
    config, make = FAMILIES[name]
    params, text = make(), toy.IDS[:, :6]

    def logits(target):
        cache, steps = target.init_cache(params, len(text), 8, 4), []

        @jax.jit
        def forward(cache, tokens, start):
            out = target.forward(params, tree.chain(tokens), cache, start)
            length = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
            return out.logits, cache.commit(out.rows, start, None, length)

        whole, _ = forward(cache, text, np.zeros(len(text), np.int32))
        for at in range(text.shape[1]):
            step, cache = forward(cache, text[:, at : at + 1], np.full(len(text), at, np.int32))
            steps.append(step[:, 0])
        return np.asarray(whole), np.stack(steps, axis=1)

    # A difference in the last bits would make another value of 8 bits of some keys: GPUs multiply in TF32 by default.
    with jax.default_matmul_precision("highest"):
        whole, steps = logits(config.with_kv("fp8"))
    np.testing.assert_allclose(steps, whole, rtol=1e-4, atol=1e-4)
    assert np.abs(whole - logits(config)[0]).max() > 1e-2, "nothing was rounded"


def model_of(name, **options):
    config, make = FAMILIES[name]
    return jspec.from_named(config, arrays_of(config, make()), **options)


@pytest.mark.slow
def test_drafted_output_is_plain_output():
    """Greedy and sampled, in `generate` and in an engine, for any page size."""
    model = model_of("llama", kv="fp8")
    sampling = [None, jspec.Sampling(temperature=0.9), jspec.Sampling(temperature=0.7, top_k=20)]
    options = {"max_new_tokens": 14, "sampling": sampling, "seed": 5}
    plain = jspec.generate(model, PROMPTS, drafter=Plain(), page_size=4, **options)
    drafter = Suffix(depth=3, width=2, num_nodes=6)
    drafted = jspec.generate(model, PROMPTS, drafter=drafter, page_size=16, **options)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.rounds.sum() < plain.stats.rounds.sum()
    with jspec.Engine(model, drafter=drafter, slots=2, context=64) as engine:
        handles = [
            engine.submit(prompt, max_new_tokens=14, sampling=one, seed=[(5, at)])
            for at, (prompt, one) in enumerate(zip(PROMPTS, sampling, strict=True))
        ]
        assert [list(handle.result().tokens) for handle in handles] == plain.tokens


# Memory


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_and_values_take_a_byte_each(name):
    config, _ = FAMILIES[name]
    params = config.param_shapes(jnp.float32)
    pools = [pool_bytes(target, params) for target in (config, config.with_kv("fp8"))]
    assert pools[0] == 4 * pools[1] > 0
    wide, narrow = (target.kv_bytes(10, 4) for target in (config, config.with_kv("fp8")))
    index = 10 * 4 * config.num_layers * config.indexer.size if name == "deepseek dsa" else 0
    assert wide - index == 4 * (narrow - index)


def pool_bytes(target, params):
    """Bytes of the pools of keys and values; indexer keys and states do not count."""
    cache = jax.eval_shape(lambda p: target.init_cache(p, 2, 32, 4), params)
    groups = getattr(cache, "groups", (cache.latent if isinstance(cache, DsaCache) else cache,))
    pools = [group.pool for group in groups if hasattr(group, "pool")]
    return sum(pool.size * pool.dtype.itemsize for pool in pools)


def test_a_generation_needs_less_memory():
    params = Params(toy.TARGET.param_shapes(jnp.float32))
    wide, narrow = (
        memory.need(params, target, Ngram(), 2, 64, 16).target for target in (toy.TARGET, toy.TARGET.with_kv("fp8"))
    )
    assert narrow < wide / 3
    assert LayerKeys(2, 8, kv="fp8").row_bytes(2) == 32 and LayerKeys(2, 8).row_bytes(2) == 64


# Arguments


def test_the_target_is_loaded_with_its_format():
    model = jspec.load("bundled:python-tiny", kv="fp8")
    assert model.target == jspec.load("bundled:python-tiny", exact=False).target.with_kv("fp8")
    assert model_of("llama", kv="fp8").target.kv == "fp8"
    small = jspec.load("bundled:python-small", kv="fp8")
    assert small.target.kv == "fp8" and small.draft.kv is None, "the draft's cache stays as it is"


@pytest.mark.parametrize("kv", ("int8", "", 8, True, ["fp8"]))
def test_an_unknown_format_is_an_error(kv):
    for load in (lambda: jspec.load("no such model", kv=kv), lambda: model_of("llama", kv=kv)):
        with pytest.raises(ValueError, match="kv=.*: must be 'fp8', or None"):
            load()


def test_models_without_a_narrow_cache_refuse_it():
    function = jspec.from_function(lambda p, t: jnp.zeros((*t.shape, 7)), {}, max_length=32, check=False).target
    with pytest.raises(ValueError, match="kv='fp8': models of type .* have no narrow cache yet"):
        function.with_kv("fp8")
    for message, load in (
        ("exact=True: no exact forward with kv='fp8' yet", lambda: jspec.load("no such", exact=True, kv="fp8")),
        ("exact=True: no exact forward with kv='fp8' yet", lambda: toy.TARGET.with_kv("fp8").exactly()),
        ("kv='fp8': no exact forward with a narrow cache yet", lambda: toy.TARGET.exactly().with_kv("fp8")),
    ):
        with pytest.raises(ValueError, match=message):
            load()


def test_a_cache_of_another_format_is_another_configuration():
    """Configurations are static arguments: programs of one are not those of the other."""
    assert toy.TARGET.with_kv("fp8") != toy.TARGET
    assert dataclasses.replace(toy.TARGET.with_kv("fp8"), kv=None) == toy.TARGET
