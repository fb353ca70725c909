"""Adapters beside the weights of an engine: each request has the tokens of the model into which its own is merged."""

import lora_files
import numpy as np
import pytest
import toy
from safetensors.numpy import load_file

import jspec
from jspec.checkpoints import language_model
from jspec.checkpoints.files import CheckpointError
from jspec.core.types import Params

ENGINE = {"slots": 4, "context": 96, "page_size": 8}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [2, 7, 1, 8, 2, 8], [1] * 20]
TARGETS = {"a": lora_files.ATTENTION + lora_files.MLP, "b": ("q_proj", "v_proj", "lm_head"), "c": ("down_proj",)}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    language_model.save(directory, toy.TARGET, toy.random_params(toy.TARGET), dtype="float32")
    return directory


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    written = enumerate(TARGETS.items())
    return {
        name: lora_files.write(base, root / name, seed=seed, targets=targets, r=2 + seed)
        for seed, (name, targets) in written
    }


@pytest.fixture(scope="module")
def expected(base, adapters):
    """The texts of the prompts, for the adapters and for none."""
    models = {name: jspec.load(base, adapter=adapters.get(name), dtype="float32") for name in (*TARGETS, None)}
    return {
        name: jspec.generate(model, PROMPTS, drafter=None, max_new_tokens=16).tokens for name, model in models.items()
    }


@pytest.mark.parametrize("drafter", [pytest.param(None, marks=pytest.mark.slow), "ngram"])
def test_a_batch_of_several_adapters_has_the_tokens_of_merged_weights(base, adapters, expected, drafter):
    model = jspec.load(base, dtype="float32")
    with jspec.Engine(model, adapters=adapters, drafter=drafter, **ENGINE) as engine:
        handles = [
            (name, index, engine.submit(prompt, adapter=name, max_new_tokens=16))
            for _ in range(2)  # the second time from the prefix cache
            for index, prompt in enumerate(PROMPTS)
            for name in (*TARGETS, None)
        ]
        for name, index, handle in handles:
            assert handle.result().tokens == expected[name][index], (name, index)
        assert engine.metrics().prefix_hits > 0
    assert len({tuple(map(tuple, tokens)) for tokens in expected.values()}) == 4


def test_exact_tokens_do_not_depend_on_drafts_or_on_the_batch(base, adapters):
    """In bfloat16, to the bit of every log-probability; each adapter changes the text."""
    model, options = jspec.load(base, dtype="bfloat16", exact=True), {"max_new_tokens": 12, "logprobs": True}
    names = (*TARGETS, None)
    with jspec.Engine(model, adapters=adapters, drafter=None, **ENGINE) as engine:
        alone = [engine.submit(PROMPTS[0], adapter=name, **options).result() for name in names]
    with jspec.Engine(model, adapters=adapters, drafter=jspec.Ngram(depth=3), **ENGINE) as engine:
        handles = [engine.submit(PROMPTS[0], adapter=name, **options) for name in names]
        for handle, one in zip(handles, alone, strict=True):
            assert handle.result().tokens == one.tokens and handle.result().logprobs == one.logprobs
    assert len({tuple(one.logprobs) for one in alone}) == len(names)


@pytest.fixture(scope="module")
def engine(base, adapters):
    with jspec.Engine(jspec.load(base, dtype="float32"), adapters=adapters, drafter=None, **ENGINE) as engine:
        engine.warm_up()
        yield engine


def texts(engine, adapter, prompts=PROMPTS):
    return engine.generate(prompts, adapter=adapter, max_new_tokens=16).tokens


@pytest.mark.slow
def test_the_base_has_its_own_bits_beside_adapters(engine, base):
    plain = jspec.load(base, dtype="float32")
    out = engine.generate(PROMPTS, max_new_tokens=16, logprobs=True)
    with jspec.Engine(plain, drafter=None, **ENGINE) as other:
        expected = other.generate(PROMPTS, max_new_tokens=16, logprobs=True)
    assert [item.logprobs for item in out] == [item.logprobs for item in expected]


@pytest.mark.slow
def test_an_adapter_is_replaced_without_a_compilation(engine, base, adapters, expected, tmp_path):
    other = lora_files.write(base, tmp_path / "other", seed=7, targets=("o_proj", "up_proj"), r=1)
    merged = jspec.load(base, adapter=other, dtype="float32")
    replaced = jspec.generate(merged, PROMPTS, drafter=None, max_new_tokens=16).tokens
    assert texts(engine, "a") == expected["a"]
    before = [group.device.runner.compile_seconds for group in engine.groups]
    engine.update_adapter("a", other)
    assert texts(engine, "a") == replaced != expected["a"]
    assert texts(engine, "b") == expected["b"]
    # The tensors of a trainer, with the options of the directory.
    engine.update_adapter("a", adapters["a"])
    tensors = {name: 2 * array if "lora_B" in name else array for name, array in _tensors(adapters["a"]).items()}
    engine.update_adapter("a", tensors)
    twice = jspec.load(lora_files.merge(base, adapters["a"], tmp_path / "twice", scale=4.0), dtype="float32")
    assert texts(engine, "a") == jspec.generate(twice, PROMPTS, drafter=None, max_new_tokens=16).tokens
    engine.update_adapter("a", adapters["a"])
    assert texts(engine, "a") == expected["a"]
    assert [group.device.runner.compile_seconds for group in engine.groups] == before


def _tensors(directory):
    return load_file(directory / lora_files.WEIGHTS)


def test_new_weights_keep_the_adapters(engine, adapters, expected):
    params = engine.params
    engine.update(Params(toy.random_params(toy.TARGET, seed=3)))
    assert texts(engine, "a") != expected["a"]
    engine.update(params)
    assert texts(engine, "a") == expected["a"]


def test_an_update_that_does_not_fit_changes_nothing(engine, base, adapters, expected, tmp_path):
    for options, problem in (
        ({"r": 9}, "has a change of rank 9: must have at most 4"),
        ({"targets": ("lm_head",), "r": 4}, "has a change of rank 4: must have at most 3"),
    ):
        wrong = lora_files.write(base, tmp_path / str(options["r"]), **options)
        with pytest.raises(CheckpointError, match=problem):
            engine.update_adapter("a", wrong)
    with pytest.raises(CheckpointError, match="lora_A.weight has shape"):
        engine.update_adapter("a", {name: np.zeros((1, 1)) for name in _tensors(adapters["a"])})
    with pytest.raises(ValueError, match="adapter='d': must be one of 'a', 'b', 'c', or None"):
        engine.update_adapter("d", adapters["a"])
    engine.update(engine.params)  # arranges the adapters anew
    assert texts(engine, "a") == expected["a"]


def test_unknown_adapters_and_unsuitable_models_are_refused(engine, base, adapters, tmp_path):
    with pytest.raises(ValueError, match="adapter='d': must be one of 'a', 'b', 'c', or None"):
        engine.submit([1], adapter="d", max_new_tokens=1)
    head = lora_files.write(base, tmp_path / "head", modules_to_save=["lm_head"])
    zeros = np.zeros((61, 32), np.float32)
    lora_files.edit_tensors(head, lambda tensors: tensors.update({"base_model.model.lm_head.weight": zeros}))
    model = jspec.load(base)
    with pytest.raises(CheckpointError, match="lm_head.weight is changed in a way that can only be merged"):
        jspec.Engine(model, adapters={"x": head})
    with jspec.Engine(model, **ENGINE) as plain, pytest.raises(ValueError, match="adapter='a': must be None in an"):
        plain.submit([1], adapter="a", max_new_tokens=1)
