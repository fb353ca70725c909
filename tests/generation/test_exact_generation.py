"""With exact=True, a batch equals its sequences alone in half precision; test_good_configurations.py has drafts."""

import dataclasses
from types import SimpleNamespace

import deepseek
import gemma
import numpy as np
import oss
import pytest
import qwen
import toy
from random_models import arrays_of

import jspec
from jspec.checkpoints.language_model import family_by_config
from pallas_kernels import dispatch
from pallas_kernels import platform as platforms
from pallas_kernels.dispatch import Operation


def test_the_target_knows_that_it_is_exact():
    exact = jspec.load("bundled:python-tiny", dtype="bfloat16", exact=True).target
    other = jspec.load("bundled:python-tiny", exact=False).target
    assert exact.exact and not other.exact and exact == other.exactly()


def pretend(monkeypatch, platform, kind="NVIDIA H200"):
    """Loads as on this device."""
    tuned = Operation.tuned

    def there(operation):
        with monkeypatch.context() as patch:
            patch.setattr(platforms, "platform", lambda: platform)
            patch.setattr(platforms, "device", lambda: SimpleNamespace(device_kind=kind))
            return tuned(operation)

    monkeypatch.setattr(Operation, "tuned", there)


DEFAULTS = [
    ("gpu", {"dtype": "bfloat16"}, True),
    ("gpu", {"dtype": "float16"}, True),
    ("gpu", {"dtype": "bfloat16", "exact": False}, False),
    ("gpu", {"dtype": "float32"}, False),
    ("gpu", {"dtype": "bfloat16", "weights": "int8"}, False),
    ("gpu", {"dtype": "bfloat16", "kv": "fp8"}, False),
    ("cpu", {"dtype": "bfloat16"}, False),
    ("tpu", {"dtype": "bfloat16"}, False),
]


@pytest.mark.parametrize(("platform", "options", "exact"), DEFAULTS)
def test_exact_is_the_default_of_gpus_in_half_precision(monkeypatch, platform, options, exact):
    pretend(monkeypatch, platform)
    assert jspec.load("bundled:python-tiny", **options).target.exact is exact


@pytest.mark.parametrize("kind", ("NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB", "Tesla T4"))
def test_exact_is_no_default_of_gpus_for_which_its_kernels_have_no_tiles(monkeypatch, kind):
    pretend(monkeypatch, "gpu", kind)
    assert not jspec.load("bundled:python-tiny", dtype="bfloat16").target.exact


def test_exact_is_no_default_without_its_kernels(monkeypatch):
    """In a version of JAX without Triton, exact attention on a GPU is a slow loop."""
    pretend(monkeypatch, "gpu")
    monkeypatch.setattr(dispatch, "unavailable", lambda operation, kernel: "not in this version")
    assert not jspec.load("bundled:python-tiny", dtype="bfloat16").target.exact


def test_a_draft_is_never_exact():
    """Its bits do not matter, and exact attention has no windows of drafts."""
    small = jspec.load("bundled:python-tiny", dtype="bfloat16", exact=True)
    model = small.with_draft(small)
    assert model.target.exact and model.draft == dataclasses.replace(small.target, exact=False)


def test_the_default_of_live_arrays(monkeypatch):
    pretend(monkeypatch, "gpu")

    def target_of(config, params, **options):
        return jspec.from_named(config, arrays_of(config, params), dtype="bfloat16", **options).target

    # A configuration decides; a target stays as it is.
    params = toy.random_params(toy.TARGET, 0)
    assert target_of(toy.TARGET, params).exact is False
    assert target_of(toy.TARGET.exactly(), params).exact is True
    assert target_of(toy.TARGET.exactly(), params, exact=False).exact is False
    # Other options rule it out, unless it is asked for by name.
    narrow = target_of(toy.TARGET.exactly(), params, kv="fp8")
    assert (narrow.exact, narrow.kv) == (False, "fp8")
    assert target_of(toy.TARGET.exactly(), params, weights="int8").exact is False
    with pytest.raises(ValueError, match="exact=True: no exact forward with kv='fp8' yet"):
        target_of(toy.TARGET.exactly(), params, kv="fp8", exact=True)
    # Without an exact forward, or without kernels for it, the default is a rounded one.
    for module, kind in ((oss, "sinks"), (qwen, "dense"), (deepseek, "mla")):
        config, arrays = module.KINDS[kind], arrays_of(module.KINDS[kind], module.params(kind))
        described = family_by_config(config).describe(config)
        assert jspec.from_named(described, arrays, dtype="bfloat16").target.exact is (module is oss)


@pytest.mark.slow
def test_live_arrays_make_an_exact_model():
    """A training loop gets exact logits of its own weights."""
    arrays = arrays_of(toy.TARGET, toy.random_params(toy.TARGET, 0))
    model = jspec.from_named(toy.TARGET, arrays, exact=True, dtype="bfloat16")
    assert model.target == toy.TARGET.exactly() == jspec.from_named(model.target, arrays).target
    prompts, options = [[3, 1, 4, 1, 5], [2]], {"max_new_tokens": 6, "drafter": "plain"}
    together = jspec.generate(model, prompts, **options).tokens
    assert together == [jspec.generate(model, prompt, **options).tokens for prompt in prompts]
    with pytest.raises(TypeError, match="exact=1"):
        jspec.from_named(toy.TARGET, arrays, exact=1)
    with pytest.raises(ValueError, match="models of type Qwen3Next have no exact forward"):
        jspec.from_named(qwen.KINDS["dense"], arrays, exact=True)


FAMILIES = {
    "windows and sinks": (oss, "sinks"),
    "windows and shared keys": (gemma, "shared"),
    "latents": (deepseek, "mla"),
}
"""Tiny random models whose windows are 8 tokens."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_drafted_text_of_other_families_is_plain_text(family):
    module, kind = FAMILIES[family]
    arrays = arrays_of(module.KINDS[kind], module.params(kind))
    model = jspec.from_named(module.KINDS[kind], arrays, exact=True, dtype="bfloat16")
    # Repetitions, so that drafts are accepted.
    given, seeds = [[3, 1, 4, 1, 5] * 9, [2, 7, 1, 8] * 9], [5, 6]
    sampling = [None, jspec.Sampling(temperature=1.0, min_p=0.01, repetition_penalty=1.1)]
    plain = [
        jspec.generate(model, [one], drafter="plain", sampling=[how], seed=[seed], page_size=64, max_new_tokens=24)
        for one, how, seed in zip(given, sampling, seeds, strict=True)
    ]
    alone = [list(np.ravel(one.tokens)) for one in plain]
    drafter, options = jspec.Suffix(depth=4, width=2, num_nodes=9), {"max_new_tokens": 24}
    drafted = jspec.generate(model, given, drafter=drafter, sampling=sampling, seed=seeds, page_size=16, **options)
    assert [list(each) for each in drafted.tokens] == alone
    assert drafted.stats.rounds.sum() < sum(one.stats.rounds.sum() for one in plain)
    with jspec.Engine(model, drafter=drafter, slots=2, context=128, page_size=16, prefill_tokens=16) as engine:
        # The beginning of the first prompt is in the prefix cache when it comes again.
        for index in (0, 1, 0):
            handle = engine.submit(given[index], sampling=sampling[index], seed=seeds[index], **options)
            assert list(handle.result().tokens) == alone[index], index
        assert engine.metrics().prefix_hits > 0
