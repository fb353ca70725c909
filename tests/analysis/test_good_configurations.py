"""`jspec.verify` finds nothing in configurations that are right: drafters, targets, caches, rules and weights.

Each runs the cases that share its programs, and the first case of one more check, in turn.
"""

import dataclasses
import functools
import itertools

import gemma
import loops
import oss
import pytest
import toy

import jspec
from jspec.analysis import verify
from jspec.analysis.verify_subject import Subject, default_prompts
from jspec.core.types import Params
from jspec.drafters import Eagle, Standalone

PROMPTS = [ids[:length].tolist() for ids, length in zip(toy.IDS, toy.LENGTHS, strict=True)]
ALWAYS = ("chains", "ends of texts", "rounds")
IN_TURN = ("pages", "batches", "chunks", "log-probabilities", "proposals", "trees", "sampling", "engine", "forwards")


def of_loop(name):
    """A subject with the target, the drafter and the rule of a loop."""
    loop = loops.LOOPS[name]
    model = jspec.Model(name, loop.target, loop.weights(), None, (60,), getattr(loop.drafter, "model", None))
    sampling = None if loop.sampling is None else [loop.sampling] * len(PROMPTS)
    rule = None if loop.rule is loops.accept.greedy else loop.rule
    return Subject(model, loop.drafter, PROMPTS, rule, 24, 0, sampling)


def of_toy(drafter=None, weights=None, draft=toy.NEAR, target=toy.TARGET):
    """A subject of the toy target, changed."""
    model = jspec.Model("toy", target, weights or toy.params(), None, (60,), draft)
    return Subject(model, drafter or Standalone(depth=3), PROMPTS, None, 24, 0)


def named(config, params, **options):
    """A subject whose weights are loaded by name, with options."""
    from jspec.checkpoints import language_model

    family = language_model._family_by_config(config)
    model = jspec.from_named(config, dict(family.named_tensors(config, params)), **options)
    model = dataclasses.replace(model, eos=(60,))
    return Subject(model, "ngram", PROMPTS, None, 24, 0)


def bundled(name, draft=None, drafter="auto", **options):
    """A subject of a bundled model."""
    model = jspec.load(f"bundled:python-{name}", draft=draft and f"bundled:python-{draft}", **options)
    prompts = [ids for ids in default_prompts(model, 24) if len(ids) in (3, 16, 40)]
    return Subject(model, drafter, prompts, None, 24, 0)


CONFIGURATIONS = {name: functools.partial(of_loop, name) for name in loops.LOOPS if name != "rejection"} | {
    "window": functools.partial(of_toy, Standalone(depth=3, window=5, keep_first=1)),
    "eagle-window": functools.partial(of_toy, Eagle(depth=3, window=5), toy.head_params(), toy.HEAD),
    "itself": functools.partial(of_toy, weights=Params(toy.params().target, toy.params().target), draft=toy.TARGET),
    "fp8-cache": functools.partial(of_toy, target=dataclasses.replace(toy.TARGET, kv="fp8")),
    "fp8-cache-sliding": functools.partial(named, gemma.KINDS["dense"], gemma.params("dense"), kv="fp8"),
    "fp8-cache-latent": functools.partial(named, loops.deepseek.KINDS["mla"], loops.deepseek.params("mla"), kv="fp8"),
    "fp8-weights": functools.partial(named, toy.TARGET, toy.params().target, weights="fp8"),
    "int8-weights": functools.partial(named, toy.TARGET, toy.params().target, weights="int8"),
    "int4-weights-and-fp8-cache": functools.partial(named, toy.TARGET, toy.params().target, weights="int4", kv="fp8"),
    "exact": functools.partial(named, toy.TARGET, toy.params().target, exact=True),
    "exact-bfloat16": functools.partial(named, toy.TARGET, toy.params().target, exact=True, dtype="bfloat16"),
    "exact-sinks": functools.partial(named, oss.KINDS["tied"], oss.params("tied"), exact=True),
    "bundled-ngram": functools.partial(bundled, "small", drafter="ngram"),
    "bundled-auto": functools.partial(bundled, "small"),
    "bundled-standalone": functools.partial(bundled, "small", "tiny"),
    "bundled-eagle3": functools.partial(bundled, "small", "eagle3"),
    "bundled-block": functools.partial(bundled, "small", "block"),
    "bundled-assistant": functools.partial(bundled, "small", "assistant"),
    "bundled-fp8": functools.partial(bundled, "small", "eagle3", weights="fp8", kv="fp8"),
}
NOT_RUN: dict[tuple[str, str], str] = {}
"""What a configuration does not allow: its message."""


@pytest.mark.slow(unless=("ngram", "eagle_tree", "recurrent_standalone_tree"))
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_nothing_is_found_in_what_is_right(name):
    subject = CONFIGURATIONS[name]()
    turn = IN_TURN[list(CONFIGURATIONS).index(name) % len(IN_TURN)]
    checks = {check: verify.CHECKS[check](subject) for check in ALWAYS}
    checks = {check: itertools.islice(cases, 1 if check == "chains" else 3) for check, cases in checks.items()}
    checks[turn] = itertools.islice(verify.CHECKS[turn](subject), None if turn == "forwards" else 1)
    out = verify.certify({}, checks, minutes=30, progress=False)
    found = [finding for finding in out.findings if finding.verdict != "passed"]
    assert out.passed and all(NOT_RUN.get((name, one.check)) == one.message for one in found), found


def test_there_are_enough_configurations():
    assert len(CONFIGURATIONS) >= 40
