"""Scales of keys and values in checkpoints: what a cache of 8 bits holds, and that drafted output is plain output."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import planted
import pytest
import tiny_targets
import toy
from safetensors.numpy import load_file, save_file

import jspec
from jspec.cache import narrow
from jspec.cache.mha import MhaCache
from jspec.checkpoints import drafts, language_model, scaled
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError
from jspec.drafters import FrozenKvMtp, Ngram, Suffix

PROMPTS = toy.PROMPTS
CONFIG = dataclasses.replace(toy.TARGET, qk_norm=False, attention_bias=True)
SCALES = [(0.25, 2.0), (4.0, 0.125)]
"""For each layer, that of the keys and that of the values. Products with powers of two are exact."""
NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "ModelOpt": ("k_proj.k_scale", "v_proj.v_scale"),
    "older": ("k_proj.output_scale", "v_proj.output_scale"),
}
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
CACHE_ONLY = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": SCHEME}


def save(path, names=NAMES["compressed-tensors"], changes=(), method=CACHE_ONLY):
    """A checkpoint with scales. changes: tensors that are replaced, or removed by None."""
    language_model.save(path, CONFIG, tiny_targets.weights(CONFIG), dtype="float32")
    stored = load_file(path / "model.safetensors")
    for index, pair in enumerate(SCALES):
        for name, scale in zip(names, pair, strict=True):
            stored[f"model.layers.{index}.self_attn.{name}"] = np.array([scale], np.float32)
        stored[f"model.layers.{index}.self_attn.q_scale"] = np.ones(1, np.float32)
    stored |= dict(changes)
    stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "quantization_config": method}))
    return path


def folded(path, source):
    """The same model without scales: they are in the weights that make queries, keys and values, and in `o_proj`."""
    config = dataclasses.replace(CONFIG, attention_bias=False)
    language_model.save(path, config, toy.random_params(config))
    stored = load_file(source / "model.safetensors")
    for index, (key, value) in enumerate(SCALES):
        prefix = f"model.layers.{index}.self_attn."
        for name, factor in (("q", key), ("k", 1 / key), ("v", 1 / value), ("o", value)):
            stored[f"{prefix}{name}_proj.weight"] *= np.float32(factor)
            if name != "o":
                stored[f"{prefix}{name}_proj.bias"] *= np.float32(factor)
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith("_scale")}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != "quantization_config"}))
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    source = save(root / "scaled")
    return source, folded(root / "folded", source)


def test_attention_reads_values_times_their_scales():
    """An oracle in NumPy: fp8(x / scale) * scale, for a prefix in the pool and for the round's own rows."""
    rng, scales = np.random.default_rng(0), np.array([0.037, 1.9], np.float32)
    q, k, v = (3 * rng.normal(size=(1, 6, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    k[0, 2, 0, 3], v[0, 4, 1, 5] = 40.0, -2000.0  # beyond 448 times the scale
    queries, *rows = narrow.divided(*map(jnp.asarray, (q, k, v, scales)), "fp8")
    cache = MhaCache.empty(1, 8, 4, layers=1, kv_heads=2, head_dim=16, dtype=narrow.KV_FORMATS["fp8"])
    first = tuple(row[:, :4] for row in rows)
    start = jnp.array([4], jnp.int32)
    cache = cache.commit((first,), jnp.zeros(1, jnp.int32), None, start)
    mask = jnp.array([[[True, False], [True, True]]])
    last = tuple(row[:, 4:] for row in rows)
    seen = cache.attend(0, queries[:, 4:], *last, start, mask, 0.25)
    got = narrow.multiplied(seen, scales[1])

    def held(x, scale):
        return np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale

    k, v = (np.repeat(held(x, scale), 2, axis=2) for x, scale in ((k, scales[0]), (v, scales[1])))
    logits = np.einsum("bnhd,bthd->bhnt", q, k)[:, :, 4:] * 0.25
    logits = np.where(np.arange(6)[None] <= np.arange(4, 6)[:, None], logits, -np.inf)
    share = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.einsum("bhnt,bthd->bnhd", share / share.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_model_has_the_tokens_of_one_with_the_scales_in_its_weights(paths):
    own, wanted = (jspec.load(path, kv="fp8") for path in paths)
    options = dict(drafter=Suffix(n=3, depth=3, width=3), max_new_tokens=20, logprobs=True, page_size=4)
    got, expected = (jspec.generate(model, PROMPTS, **options) for model in (own, wanted))
    assert got.tokens == expected.tokens and got.stats.rounds.tolist() == expected.stats.rounds.tolist()
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    plain = jspec.generate(own, PROMPTS, **{**options, "drafter": None})
    assert plain.tokens == got.tokens
    # Without them the rounding differs, and a wide cache needs none.
    bare = dataclasses.replace(own.params.target, layers=without(own.params.target.layers))
    other = jspec.generate(with_target(own, bare), PROMPTS, **options)
    assert not np.allclose(other[2].logprobs[:3], got[2].logprobs[:3], atol=1e-4)
    wide = [jspec.generate(jspec.load(path), PROMPTS, **options) for path in paths]
    assert wide[0].tokens == wide[1].tokens


def without(layers):
    return tuple(dataclasses.replace(layer, kv_scales=None) for layer in layers)


def with_target(model, target):
    return dataclasses.replace(model, params=dataclasses.replace(model.params, target=target))


@pytest.mark.slow
def test_an_assistant_reads_keys_and_values_with_their_scales(paths, tmp_path):
    """Its logits are those of one with the scales in its weights, beside such a target."""
    config = dataclasses.replace(toy.ASSISTANT, hidden_size=64)
    made = toy.random_assistant(config)
    layers = [
        dataclasses.replace(layer, q_norm=layer.q_norm * SCALES[read][0], o=layer.o * SCALES[read][1])
        for layer, read in zip(made.layers, config.target_layers, strict=True)
    ]
    drafts.save(tmp_path / "plain", config, made, dtype="float32")
    drafts.save(tmp_path / "folded", config, dataclasses.replace(made, layers=tuple(layers)), dtype="float32")
    found = []
    for path, name in zip(paths, ("plain", "folded"), strict=True):
        model = jspec.load(path, draft=tmp_path / name, kv="fp8")
        _, s = planted.prefilled(model, PROMPTS, FrozenKvMtp(depth=2), 4)
        given = s.root, s.draft, s.cache, s.length - 1, jnp.maximum(s.length - 2, 0)
        found.append(jax.jit(model.draft.apply, static_argnums=1)(model.params, model.target, *given).logits)
        options = dict(max_new_tokens=12, page_size=4)
        drafted = jspec.generate(model, PROMPTS, drafter=FrozenKvMtp(depth=2, width=3, num_nodes=8), **options)
        assert drafted.tokens == jspec.generate(model, PROMPTS, drafter=None, **options).tokens
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_engine_and_arrays_have_them_too(paths):
    model = jspec.load(paths[0], kv="fp8")
    expected = jspec.generate(model, PROMPTS, drafter=Ngram(), max_new_tokens=8).tokens
    with jspec.Engine(model, drafter=Ngram(), slots=1, context=32, prefill_tokens=4) as engine:
        assert engine.generate(PROMPTS, max_new_tokens=8).tokens == expected
    live = jspec.from_named(CONFIG, load_file(paths[0] / "model.safetensors"), kv="fp8")
    assert jspec.generate(live, PROMPTS, drafter=Ngram(), max_new_tokens=8).tokens == expected


@pytest.mark.parametrize("form", NAMES)
def test_each_layout_of_names_is_read_and_written(form, tmp_path):
    loaded = language_model.load(save(tmp_path / "stored", NAMES[form]))
    found = [layer.kv_scales for layer in loaded.params.layers]
    np.testing.assert_array_equal(found, np.array(SCALES, np.float32))
    language_model.save(tmp_path / "copy", loaded.config, loaded.params, dtype="float32")
    copied = language_model.load(tmp_path / "copy")
    np.testing.assert_array_equal([layer.kv_scales for layer in copied.params.layers], found)


K = "model.layers.1.self_attn.k_scale"


@pytest.mark.parametrize(
    "changes, scheme, match",
    [
        ({K: None}, SCHEME, r"self_attn.k_scale.*"),
        ({K: np.ones(2, np.float32)}, SCHEME, r"k_scale has shape \(2,\); must have one value for all heads"),
        ({K: np.zeros(1, np.float32)}, SCHEME, r"k_scale is 0.0; must be above 0"),
        ({K: np.full(1, np.nan, np.float32)}, SCHEME, r"k_scale has values that are NaN"),
        ({}, {**SCHEME, "dynamic": True}, "quantization_config.* is not supported"),
        ({}, {**SCHEME, "num_bits": 4}, "quantization_config.* is not supported"),
        ({}, {**SCHEME, "symmetric": False}, "quantization_config.* is not supported"),
        ({}, {**SCHEME, "strategy": "attn_head"}, "quantization_config.* is not supported"),
    ],
)
def test_other_scales_are_an_error(changes, scheme, match, tmp_path):
    save(tmp_path, changes=changes.items(), method={**CACHE_ONLY, "kv_cache_scheme": scheme})
    with pytest.raises(CheckpointError, match=match):
        jspec.load(tmp_path, kv="fp8")


@pytest.mark.parametrize(
    "form, weights",
    [
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
        ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    ],
)
def test_matrices_are_quantized_as_without_the_scheme(form, weights):
    method = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}
    found = [
        scaled.parse_scheme(Fields({"quantization_config": {**method, "kv_cache_scheme": scheme}}, "config"))
        for scheme in (SCHEME, None)
    ]
    assert found[0] == found[1] is not None
