"""Models from arrays under Hugging Face names, on the device and inside `jit`."""

import dataclasses
import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_targets
import toy
from random_models import arrays_of

import jspec
from jspec.checkpoints import language_model
from jspec.checkpoints import named as named_arrays
from jspec.core.loop import decode
from jspec.core.prefill import jitted_prefill
from jspec.core.types import Params
from jspec.runner import programs

PROMPTS = [[3, 1, 4, 1, 5], [2]]
BIASED = dataclasses.replace(toy.TARGET, attention_bias=True)


MODELS = families.MODELS | {"biased": (BIASED, functools.partial(tiny_targets.weights, BIASED))}
CASES = ["llama", "biased", *(name for name in families.MODELS if " " in name)]


@pytest.mark.slow(unless=("llama", "gemma4 shared", "deepseek mla"))
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_a_checkpoint(case):
    config, make = MODELS[case]
    params, described = make(0), language_model.family_by_config(config).describe(config)
    arrays = arrays_of(config, params)
    model = jspec.from_named(described, arrays)
    assert language_model.family_by_config(model.target).describe(model.target) == described
    toy.assert_same(model.params.target, params)
    # Inside a program nothing is known of the values.
    count = named_arrays._fuse._cache_size()
    traced = jax.jit(lambda arrays: jspec.from_named(config, arrays).params.target)(arrays)
    toy.assert_same(traced, params)
    # Other weights of these shapes compile nothing.
    again = jspec.from_named(described, arrays_of(config, make(1)))
    assert named_arrays._fuse._cache_size() == count
    toy.assert_same(again.params.target, make(1))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "gemma4 dense", "deepseek mla"])
def test_weights_of_a_running_loop_compile_nothing(case):
    """The text of each step's weights is that of a model loaded with them."""
    config, make = MODELS[case]
    described = language_model.family_by_config(config).describe(config)
    model = jspec.from_named(described, arrays_of(config, make(0)), eos=[7])
    jspec.generate(model, PROMPTS, drafter="ngram", max_new_tokens=12)
    programs_now = [f._cache_size() for f in (decode, jitted_prefill, named_arrays._fuse)]
    with jspec.Engine(model, drafter="ngram", slots=2, context=64, page_size=4) as engine:
        engine.generate(PROMPTS, max_new_tokens=12)
        counts = [f._cache_size() for f in (programs.burst, programs.read)]
        for seed in (1, 2):
            new = jspec.from_named(described, arrays_of(config, make(seed)), eos=[7])
            changed = model.with_params(new.params.target)
            expected = jspec.Model("loaded", config, Params(make(seed)), None, (7,))
            tokens = jspec.generate(expected, PROMPTS, drafter=None, max_new_tokens=12).tokens
            assert jspec.generate(changed, PROMPTS, drafter="ngram", max_new_tokens=12).tokens == tokens
            engine.update(new.params)
            assert engine.generate(PROMPTS, max_new_tokens=12).tokens == tokens
        assert [f._cache_size() for f in (programs.burst, programs.read)] == counts
    assert [f._cache_size() for f in (jitted_prefill, named_arrays._fuse)][1:] == programs_now[2:]


@pytest.mark.slow
def test_generation_from_names_is_one_program():
    config, make = MODELS["llama"]
    arrays, ids, lengths = arrays_of(config, make(0)), jnp.array([PROMPTS[0]]), jnp.array([5])

    @jax.jit
    def sample(arrays, key):
        model = jspec.from_named(config, arrays)
        return jspec.generate_ids(model.params, ids, lengths, key, target=model.target, max_new_tokens=9).tokens

    expected = jspec.generate(jspec.Model("m", config, Params(make(0)), None, ()), PROMPTS[:1], max_new_tokens=9)
    assert sample(arrays, jax.random.key(0))[0, 5:].tolist() == expected.tokens[0]


def test_arrays_of_other_kinds():
    config, make = MODELS["llama"]
    arrays = arrays_of(config, make(0))
    half = jspec.from_named(config, arrays, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params.target)} == {jnp.dtype(jnp.bfloat16)}
    host = {name: np.array(array) for name, array in arrays.items()}
    toy.assert_same(jspec.from_named(config, host).params.target, make(0))
    with pytest.raises(jspec.checkpoints.files.CheckpointError, match="dtypes bfloat16, float32; dtype must be given"):
        jspec.from_named(config, host | {"model.norm.weight": host["model.norm.weight"].astype(jnp.bfloat16)})


def test_the_end_of_a_text_comes_from_the_configuration():
    config, make = MODELS["llama"]
    described = language_model.family_by_config(config).describe(config) | {"eos_token_id": [5, 7]}
    assert jspec.from_named(described, arrays_of(config, make(0))).eos == (5, 7)
    assert jspec.from_named(described, arrays_of(config, make(0)), eos=[2]).eos == (2,)
    tokenizer = jspec.load("bundled:python-tiny").tokenizer
    stated = jspec.from_named(described, arrays_of(config, make(0)), eos=[2], tokenizer=tokenizer)
    assert stated.eos == (2,), "the tokenizer adds none to a list of the caller"


def without(name):
    return lambda arrays: {key: value for key, value in arrays.items() if key != name}


def changed(name, change):
    return lambda arrays: arrays | {name: change(arrays.get(name))}


Q, EMBED = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"
WRONG = {
    "missing": (without(Q), rf"'{Q}' is missing"),
    "missing norm": (without("model.norm.weight"), "'model.norm.weight' is missing"),
    "another name": (lambda a: {k.replace("model.", ""): v for k, v in a.items()}, f"'{EMBED}' is missing"),
    "spare": (changed("model.layers.9.mlp.up_proj.weight", lambda x: jnp.ones(3)), "model.layers.9.mlp.up_proj.weight"),
    "spare bias": (changed("model.layers.0.self_attn.q_proj.bias", lambda x: jnp.ones(32)), "q_proj.bias"),
    "transposed": (changed("model.layers.0.mlp.up_proj.weight", lambda x: x.T), r"up_proj.weight has shape"),
    "a cut embedding": (changed(EMBED, lambda x: x[:10]), rf"{EMBED} has shape \(10, 32\)"),
    "heads apart": (changed(Q, lambda x: x.reshape(4, -1, 32)), rf"{Q} has shape"),
    "a scalar": (changed("model.norm.weight", lambda x: jnp.ones(())), r"model.norm.weight has shape \(\)"),
    "integers": (changed(Q, lambda x: x.astype(jnp.int8)), rf"{Q} has dtype int8"),
    "bools": (changed(Q, lambda x: x > 0), rf"{Q} has dtype bool"),
    "a list": (changed(Q, lambda x: x.tolist()), rf"{Q} is of type list"),
    "nothing": (changed(Q, lambda x: None), rf"{Q} is of type NoneType"),
    "a key that is no name": (lambda a: a | {5: a[Q]}, "have the key 5"),
    "no mapping": (lambda a: list(a.items()), "arrays is of type list"),
    "no arrays": (lambda a: {}, "is missing"),
}


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG)
def test_wrong_arrays_are_named(change, message):
    config, make = MODELS["llama"]
    options = {"dtype": "float32"}
    with pytest.raises((ValueError, TypeError), match=message):
        jspec.from_named(config, change(arrays_of(config, make(0))), **options)


@pytest.mark.parametrize(
    "config, options, message",
    [
        (5, {}, "config is of type int"),
        (None, {}, "config is of type NoneType"),
        ({}, {}, "architectures"),
        ({"architectures": ["GPT2LMHeadModel"]}, {}, "GPT2LMHeadModel"),
        ("no/such/config.json", {}, "no/such/config.json"),
        (toy.TARGET, {"dtype": "int8"}, "dtype='int8'"),
        (toy.TARGET, {"eos": [61]}, r"eos\[0\]=61"),
        (toy.TARGET, {"tokenizer": 5}, "tokenizer is of type int"),
        (dataclasses.replace(toy.TARGET, num_layers=9), {}, "model.layers.2"),
    ],
)
def test_wrong_arguments_are_named(config, options, message):
    arrays = arrays_of(toy.TARGET, toy.random_params(toy.TARGET))
    with pytest.raises((ValueError, TypeError), match=message):
        jspec.from_named(config, arrays, **options)
