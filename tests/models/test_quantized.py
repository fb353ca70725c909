"""Weights of fewer bits: what is quantized and how, equal outputs of drafted and plain decoding, what is compiled."""

import dataclasses
import functools

import families
import hlo
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import toy
from random_models import arrays_of

import jspec
from jspec.checkpoints import language_model
from jspec.core import accept
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.core.prefill import prefill
from jspec.core.types import Params, Prompts
from jspec.drafters import Ngram, Plain
from jspec.loading import memory
from jspec.models import layers, quantized
from jspec.models.layers import ForwardBatch
from jspec.models.moe import Routed, RoutedParams, Router
from jspec.models.quantized import FORMATS, Quantized, dtype_names, is_matrix, quantize, quantize_shapes, widen
from jspec.models.sizes import count_parameters, tree_bytes

TEXT_AS_SHIPPED = True

EXPERTS = dataclasses.replace(toy.TARGET, experts=Routed(Router(count=4, chosen=2, normalize=True), width=16))
CHAIN, TREE = jspec.Standalone(depth=3), jspec.Standalone(depth=3, width=2, num_nodes=6)
PROMPTS = toy.PROMPTS


WIDE = {
    "llama": {"embed"},
    "gemma4 shared": {"embed"},
    "gemma4 experts": {"embed", "router"},
    "deepseek mla": {"embed", "router", "keys", "values"},
    "deepseek dsa": {"embed", "router", "keys", "values", "query", "key", "weights"},
    "qwen3_next dense": {"embed", "conv"},
    "qwen3_next experts": {"embed", "conv", "router", "shared_gate"},
}
"""Fields of arrays with more than one axis that keep their precision; "query" is that of an indexer."""


def named(config, params, **options):
    return jspec.from_named(config, arrays_of(config, params), **options).params.target


def fields(params, quantized):
    """Names of the fields that are quantized, or those of all other arrays of more than one axis."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_matrix)
    return {path[-1].name for path, leaf in leaves if is_matrix(leaf) == quantized and len(leaf.shape) > 1}


@pytest.fixture(params=["fp8", "int8", "int4"])
def weights(request):
    return request.param


@pytest.mark.parametrize("weights", ("fp8", "int8"))
def test_the_largest_value_of_a_column_is_that_of_the_format(weights):
    rng = np.random.default_rng(0)
    wide = (rng.normal(size=(2, 40, 7)) * np.exp(rng.normal(size=7))).astype(np.float32)
    wide[1, :, 3] = 0
    got = jax.jit(quantize, static_argnames="weights")(wide, weights=weights)
    largest = {"fp8": 448, "int8": 127}[weights]
    columns = np.abs(wide).max(axis=1, keepdims=True)
    scale = np.where(columns == 0, 1, columns / np.float32(largest))
    np.testing.assert_allclose(got.scale, scale, rtol=1e-6)
    narrow = np.asarray(got.narrow)
    assert narrow.dtype == {"fp8": ml_dtypes.float8_e4m3fn, "int8": np.int8}[weights]
    assert got.shape == wide.shape and got.size == wide.size and got.dtype == np.float32
    values = np.abs(narrow.astype(np.float64))
    np.testing.assert_array_equal(values.max(axis=1, keepdims=True), np.where(columns == 0, 0, largest))
    # Rounded to the nearest: of fp8, 4 significant bits down to 2^-9.
    step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(wide / scale), 1e-30))), -6) - 3)
    error = np.abs(np.asarray(widen(got), np.float64) - wide) / scale
    assert (error <= (0.5 if weights == "int8" else step / 2) * (1 + 1e-4)).all()


@pytest.mark.slow
def test_4_bits_have_groups_of_128_rows():
    """Eight values in a word, scaled by group; of stacks, each matrix for itself."""
    rng = np.random.default_rng(0)
    wide = (rng.normal(size=(300, 7)) * np.exp(rng.normal(size=7))).astype(np.float32)
    wide[128:256, 3] = 0
    make = jax.jit(quantize, static_argnames="weights")
    got = make(wide, weights="int4")
    assert (got.narrow.dtype, got.narrow.shape, got.zero) == (np.int32, (48, 7), None)
    assert got.shape == wide.shape and got.size == wide.size and got.group == 128 and got.dtype == np.float32
    clipped = 0
    for group, first in enumerate(range(0, 300, 128)):
        rows = slice(first, first + 128)
        scale = np.asarray(got.scale[group], np.float64)
        values = np.asarray(widen(got), np.float64)[rows] / scale
        np.testing.assert_allclose(values, np.round(values), atol=1e-5)
        assert values.min() > -8.001 and values.max() < 7.001
        # Of the bounds that are tried, the one with the least error.
        part = wide[rows].astype(np.float64)
        outermost = np.take_along_axis(part, np.abs(part).argmax(axis=0)[None], axis=0)[0]
        unit = np.where(outermost == 0, 1, outermost / -8)
        tried = [unit * (1 - 0.05 * step) for step in range(9)]
        errors = [((np.clip(np.round(part / each), -8, 7) * each - part) ** 2).sum(axis=0) for each in tried]
        np.testing.assert_allclose(((values * scale - part) ** 2).sum(axis=0), np.min(errors, axis=0), rtol=1e-4)
        clipped += (np.min(errors, axis=0) < errors[0]).sum()
    assert clipped > 3
    short = make(wide[:100], weights="int4")
    assert short.group is None and short.scale.shape == (1, 7) and short.narrow.shape == (16, 7)
    stack = make(np.stack([wide[::-1], wide]), weights="int4")
    assert stack.shape == (2, 300, 7) and (stack.narrow.dtype, stack.filling, stack.group) == (np.int32, 84, 128)
    for part in ("narrow", "scale"):
        np.testing.assert_array_equal(getattr(stack, part)[1], getattr(got, part))
    np.testing.assert_array_equal(widen(stack)[1], widen(got))


@pytest.mark.parametrize("weights", ["int4", "fp8-blocks"])
def test_many_rows_multiply_a_wide_copy(weights, monkeypatch):
    rng = np.random.default_rng(0)
    matrix = quantized.quantize(jnp.asarray(rng.normal(size=(300, 7)), jnp.float32), weights)
    x = jnp.asarray(rng.normal(size=(6, 300)), jnp.float32)
    monkeypatch.setattr(quantized, "WIDEN_ROWS", {})
    expected = quantized.quantized_product(x, matrix)
    monkeypatch.setattr(quantized, "WIDEN_ROWS", {quantized.platform(): 6})
    widened = []
    monkeypatch.setattr(quantized, "widen", lambda weight, widen=quantized.widen: widened.append(1) or widen(weight))
    np.testing.assert_allclose(quantized.quantized_product(x, matrix), expected, rtol=1e-5, atol=1e-4)
    quantized.quantized_product(x[:5], matrix)
    assert len(widened) == 1


@pytest.mark.slow(unless=("fp8-llama", "int4-llama"))
@pytest.mark.parametrize(
    ("weights", "family"),
    [
        *(("fp8", family) for family in WIDE),
        *(("int8", family) for family in [*WIDE][::2]),
        *(("int4", family) for family in ("llama", "deepseek dsa", "qwen3_next experts")),
    ],
)
def test_logits_are_those_of_the_widened_weights(family, weights):
    config, make = families.MODELS[family]
    narrow = named(config, make(), weights=weights)
    assert fields(narrow, quantized=False) == WIDE[family]
    assert jax.tree.structure(narrow) == jax.tree.structure(quantize_shapes(config.param_shapes(np.float32), weights))
    wide = jax.tree.map(widen, narrow, is_leaf=is_matrix)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, (2, 9)), jnp.int32)

    @jax.jit
    def logits(params):
        cache = config.init_cache(params, 2, 16, 4)
        positions = jnp.arange(9, dtype=jnp.int32)[None]
        return config.apply(params, ForwardBatch(tokens, positions, cache, None)).logits

    got, expected = np.asarray(logits(narrow)), np.asarray(logits(wide))
    np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max())
    assert not np.allclose(got, logits(make()), atol=2e-3), "nothing was quantized"


def test_columns_can_be_taken(weights):
    x, w = np.ones((3, 8), np.float32), np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    whole = jax.jit(quantize, static_argnames="weights")(w, weights=weights)
    part = whole[:, 2:]
    assert part.shape == (8, 4) and part.dtype == whole.dtype
    np.testing.assert_allclose(layers.linear(jnp.array(x), part), layers.linear(jnp.array(x), whole)[:, 2:], rtol=1e-6)


def small_model(weights, dtype="float32", widened=False):
    """A target and a draft that is often right. widened: the same values in float32."""
    target = toy.params().target
    near = toy.near(target, toy.random_params(toy.TARGET, 1))
    models = [
        jspec.from_named(toy.TARGET, arrays_of(toy.TARGET, each), weights=weights, dtype=dtype)
        for each in (target, near)
    ]
    params = Params(*(each.params.target for each in models))
    if widened:
        params = jax.tree.map(widen, params, is_leaf=is_matrix)
    return jspec.Model("toy", toy.TARGET, params, None, (), toy.TARGET)


@pytest.mark.parametrize(("weights", "drafter"), [("fp8", CHAIN), ("int8", TREE), ("int4", TREE)])
@pytest.mark.slow
def test_drafted_tokens_are_those_of_plain_decoding_and_rounds_those_of_the_widened_weights(weights, drafter):
    options = {"max_new_tokens": 20, "page_size": 16}
    model, wide = small_model(weights), small_model(weights, widened=True)
    plain = jspec.generate(model, PROMPTS, drafter=None, **options)
    drafted = jspec.generate(model, PROMPTS, drafter=drafter, **options)
    assert drafted.tokens == plain.tokens
    expected = jspec.generate(wide, PROMPTS, drafter=drafter, **options)
    assert drafted.tokens == expected.tokens
    np.testing.assert_array_equal(drafted.stats.rounds, expected.stats.rounds)
    assert drafted.stats.accept_length > 1.2


@pytest.mark.slow
def test_drafted_tokens_are_those_of_plain_decoding_in_half_precision(weights):
    model = small_model(weights, "bfloat16")
    assert dtype_names(model.params) == sorted(["bfloat16", "float32", FORMATS[weights].name])
    plain = jspec.generate(model, PROMPTS, drafter=None, max_new_tokens=20)
    assert jspec.generate(model, PROMPTS, drafter=jspec.Standalone(depth=3), max_new_tokens=20).tokens == plain.tokens


@pytest.mark.slow
def test_the_loop_holds_no_widened_weights(weights):
    """On a CPU a product widens its own matrix, inside the loop; none is widened in front of it, for the whole loop."""
    params = Params(named(EXPERTS, toy_experts(), weights=weights))
    method = Method(EXPERTS, Ngram(depth=2).bind(EXPERTS, None), accept.greedy)
    plain = toy.start(Plain(), toy.params())
    read = functools.partial(prefill, method=method, capacity=toy.CAPACITY, page_size=4)
    s = jax.eval_shape(read, params, Prompts(toy.IDS, plain.length, plain.limit, plain.key, plain.stop))
    lowered = decode.lower(params, s, np.int32(8), method=method)
    text = lowered.compile().as_text()
    wide = {
        f"f32[{','.join(map(str, leaf.shape))}]"
        for leaf in jax.tree.leaves(params, is_leaf=is_matrix)
        if is_matrix(leaf)
    }
    assert len(wide) > 3
    entry = "\n".join(hlo.computations(text)["ENTRY"])
    assert not [shape for shape in wide if shape in entry]
    body = hlo.loop_body(text)
    assert any(hlo.made(body, shape) for shape in wide), "the products are in the loop"


def toy_experts():
    rng, made = np.random.default_rng(3), toy.random_params(EXPERTS)

    def matrix(*shape):
        return (rng.normal(size=shape) * shape[-2] ** -0.5).astype(np.float32)

    experts = RoutedParams(matrix(4, 32), None, matrix(4, 32, 32), matrix(4, 16, 32))
    changes = {"experts": experts, "gate_up": None, "down": None}
    return dataclasses.replace(made, layers=tuple(dataclasses.replace(layer, **changes) for layer in made.layers))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    language_model.save(path, toy.TARGET, toy.random_params(toy.TARGET), dtype="float32")
    return path


@pytest.mark.slow(unless=("int8", "fp8"))
def test_a_checkpoint_is_quantized_as_it_is_read(directory, weights):
    loaded = jspec.load(directory, draft=directory, weights=weights)
    expected = named(toy.TARGET, toy.random_params(toy.TARGET), weights=weights)
    for got in loaded.params.target, loaded.params.draft:
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32), str(path))
    assert FORMATS[weights].name in repr(loaded)
    # 2 layers of 4 heads and 2 of keys and values of 16 features, MLPs of 64, 61 tokens, a width of 32.
    # Values of 4 bits are in one block of 128 rows, half a byte each.
    rows = [128 // 2] * 2 if weights == "int4" else [32, 64]
    layer = rows[0] * 128 + rows[1] * 32 + rows[0] * 128 + rows[1] * 32
    scales = 128 + 32 + 128 + 32
    norms = 32 + 32 + 16 + 16
    assert tree_bytes(loaded.params.target) == (
        2 * (layer + 4 * (scales + norms)) + 61 * rows[0] + 4 * 61 + 4 * (61 * 32 + 32)
    )
    assert count_parameters(loaded.params.target) == count_parameters(toy.random_params(toy.TARGET))
    assert toy.TARGET.forward_bytes(loaded.params.target) == tree_bytes(loaded.params.target) - 4 * 61 * 32


def test_memory_counts_narrow_weights_and_one_matrix_that_is_being_quantized(directory, weights, monkeypatch):
    size = tree_bytes(quantize_shapes(toy.TARGET.param_shapes(np.float32), weights)) + 4 * 32 * 128
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: (size, 10**9))
    jspec.load(directory, weights=weights)
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: (size - 1, 10**9))
    with pytest.raises(ValueError, match=rf"0.00 GB of weights \(.*{FORMATS[weights].name}.*\) do not fit"):
        jspec.load(directory, weights=weights)


def test_wrong_arguments(directory):
    for wrong in ("int2", "FP8", 8, ""):
        with pytest.raises(ValueError, match=rf"weights={wrong!r}: must be one of fp8, int8, int4, wide, or None"):
            jspec.load(directory, weights=wrong)
    with pytest.raises(ValueError, match=r"exact=True: no exact forward with weights='fp8' yet; omit one of them"):
        jspec.load(directory, weights="fp8", exact=True)
    arrays = arrays_of(toy.TARGET, toy.random_params(toy.TARGET))
    for config in (toy.TARGET, toy.TARGET.exactly()):
        with pytest.raises(ValueError, match=r"exact=True: no exact forward with weights='int8' yet"):
            jspec.from_named(config, arrays, weights="int8", exact=True)
    model = jspec.from_named(toy.TARGET.exactly(), arrays, weights="int8")
    assert not model.target.exact
    with pytest.raises(ValueError, match=r"the weights are quantized, which writing a checkpoint does not support"):
        language_model.save(directory / "again", toy.TARGET, model.params.target)
    with pytest.raises(ValueError, match=r"params: their structure is not that of the model"):
        model.with_params(jspec.from_named(toy.TARGET, arrays).params.target)
    with pytest.raises(ValueError, match=r"exact=True: no exact products of quantized weights yet"):
        tokens = jnp.zeros((1, 1), jnp.int32)
        exactly = toy.TARGET.exactly()
        cache = exactly.init_cache(model.params.target, 1, 16, 4)
        exactly.apply(model.params.target, ForwardBatch(tokens, tokens, cache, None))


def test_new_weights_compile_nothing(weights):
    config, make = families.MODELS["llama"]
    model = jspec.from_named(config, arrays_of(config, make()), weights=weights)
    other = jspec.from_named(config, arrays_of(config, toy.random_params(config, 5)), weights=weights)
    assert isinstance(other.params.target.lm_head, Quantized)
    assert model.with_params(other.params.target).params.target is other.params.target
