"""`jspec.verify` finds nothing in configurations that are right: drafters, targets, caches, rules and weights.

Each compares greedy tokens, and runs first cases of one more check, in turn.
"""

import dataclasses
import functools
import itertools

import gemma
import loops
import oss
import pytest
import toy
from random_models import arrays_of

import jspec
from jspec.analysis import verify
from jspec.analysis.verify_subject import Subject, default_prompts
from jspec.core.types import Params
from jspec.drafters import Eagle, Ngram, Pruned, Standalone, Suffix

SHARES_NOTHING = True
PROMPTS = toy.PROMPTS
ONCE = ("pages", "batches", "chunks", "log-probabilities", "proposals", "trees", "sampling", "engine", "forwards")
IN_TURN = {"ends of texts": 3, "rounds": 2, **dict.fromkeys(ONCE, 1)}
"""Checks, and how many of their cases."""
MORE = {
    "exact-bundled": {"engine": 1},
    "exact-bundled-tree": {"sampling": 1},
    "exact-bundled-eagle": {"draft": 1},
    "exact-bundled-eagle-tree": {"draft": 1},
    "sinks_plain": {"forwards": 99},
    "recurrent_plain": {"batches": 1, "forwards": 99},
    "bundled-rejection": {"distributions": 1},
    "bundled-block-rule": {"distributions": 1},
}
"""The same for a configuration, in place of the one in turn."""
PRUNED = (
    *("eagle", "block", "frozen_kv_mtp", "mtp", "eagle_tree", "frozen_kv_mtp_tree", "mtp_reused_tree"),
    *("mla_standalone_tree", "sliding_standalone_tree", "recurrent_standalone_tree"),
)
"""Loops whose chains and trees are pruned as well."""
HALF = {"dtype": "bfloat16", "exact": True}


def of_loop(name):
    """A subject with the target, the drafter and the rule of a loop."""
    loop = loops.LOOPS[name]
    model = jspec.Model(name, loop.target, loop.weights(), None, (60,), getattr(loop.drafter, "model", None))
    sampling = None if loop.sampling is None else [loop.sampling] * len(PROMPTS)
    return Subject(model, loop.drafter, PROMPTS, None, 24, 0, sampling)


def of_pruned_loop(name):
    """The same with a few sizes."""
    subject = of_loop(name)
    sizes = (1, 3, 6) if name.endswith("tree") else (1, 1.5, 2.5)
    return dataclasses.replace(subject, drafter=Pruned(subject.drafter, sizes, (1, 1.02, 1.06)))


def of_toy(drafter=None, weights=None, draft=toy.NEAR, target=toy.TARGET):
    """A subject of the toy target, changed."""
    model = jspec.Model("toy", target, weights or toy.params(), None, (60,), draft)
    return Subject(model, drafter or Standalone(depth=3), PROMPTS, None, 24, 0)


def named(config, params, **options):
    """A subject whose weights are loaded by name, with options."""
    model = dataclasses.replace(jspec.from_named(config, arrays_of(config, params), **options), eos=(60,))
    return Subject(model, "ngram", PROMPTS, None, 24, 0)


def bundled(name, draft=None, drafter="auto", accept=None, **options):
    """A subject of a bundled model."""
    model = jspec.load(f"bundled:python-{name}", draft=draft and f"bundled:python-{draft}", **options)
    prompts = [ids for ids in default_prompts(model, 24) if len(ids) in (3, 16, 40)]
    return Subject(model, drafter, prompts, accept, 24, 0)


CONFIGURATIONS = {name: functools.partial(of_loop, name) for name in loops.LOOPS if name != "rejection"} | {
    **{f"pruned-{name}": functools.partial(of_pruned_loop, name) for name in PRUNED},
    "window": lambda: of_toy(Standalone(depth=3, window=5, keep_first=1)),
    "eagle-window": lambda: of_toy(Eagle(depth=3, window=5), toy.head_params(), toy.HEAD),
    "itself": lambda: of_toy(weights=Params(toy.params().target, toy.params().target), draft=toy.TARGET),
    "fp8-cache": lambda: of_toy(target=dataclasses.replace(toy.TARGET, kv="fp8")),
    "fp8-cache-sliding": lambda: named(gemma.KINDS["dense"], gemma.params("dense"), kv="fp8"),
    "fp8-cache-latent": lambda: named(loops.deepseek.KINDS["mla"], loops.deepseek.params("mla"), kv="fp8"),
    "fp8-weights": lambda: named(toy.TARGET, toy.params().target, weights="fp8"),
    "int8-weights": lambda: named(toy.TARGET, toy.params().target, weights="int8"),
    "int4-weights-and-fp8-cache": lambda: named(toy.TARGET, toy.params().target, weights="int4", kv="fp8"),
    "exact": lambda: named(toy.TARGET, toy.params().target, exact=True),
    "exact-bfloat16": lambda: named(toy.TARGET, toy.params().target, exact=True, dtype="bfloat16"),
    "exact-sinks": lambda: named(oss.KINDS["tied"], oss.params("tied"), exact=True),
    "exact-bundled": lambda: bundled("tiny", drafter=Ngram(depth=5), **HALF),
    "exact-bundled-tree": lambda: bundled("tiny", drafter=Suffix(depth=4, width=2, num_nodes=9), **HALF),
    "exact-bundled-eagle": lambda: bundled("small", drafter=Eagle(depth=4), **HALF),
    "exact-bundled-eagle-tree": lambda: bundled("small", drafter=Eagle(depth=3, width=3, num_nodes=8), **HALF),
    "exact-bundled-pruned": lambda: bundled(
        "small", "eagle3", Pruned(Eagle(depth=4, width=3, num_nodes=16), costs=(1, 1.1, 1.3, 1.7)), **HALF
    ),
    "exact-bundled-pruned-chain": lambda: bundled(
        "small", "eagle3", Pruned(Eagle(depth=5), costs=(1, 1.02, 1.04, 1.1, 1.2, 1.4, 1.7)), **HALF
    ),
    "bundled-lookup": lambda: bundled("small", drafter="ngram"),
    "bundled-auto": lambda: bundled("small"),
    "bundled-standalone": lambda: bundled("small", "tiny"),
    "bundled-eagle3": lambda: bundled("small", "eagle3"),
    "bundled-block": lambda: bundled("small", "block"),
    "bundled-assistant": lambda: bundled("small", "assistant"),
    "bundled-rejection": lambda: bundled("small", "tiny", accept="rejection"),
    "bundled-block-rule": lambda: bundled("small", "tiny", accept="block"),
    "bundled-fp8": lambda: bundled("small", "eagle3", weights="fp8", kv="fp8"),
}


@pytest.mark.slow(unless="ngram")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_nothing_is_found_in_what_is_right(name):
    subject = CONFIGURATIONS[name]()
    turn = list(IN_TURN)[list(CONFIGURATIONS).index(name) % len(IN_TURN)]
    counts = {"chains": 1, **MORE.get(name, {turn: IN_TURN[turn]})}
    checks = {check: itertools.islice(verify.CHECKS[check](subject), count) for check, count in counts.items()}
    out = verify.certify({}, checks, minutes=30, progress=False)
    assert {finding.verdict for finding in out.findings} == {"passed"}, out.findings


def test_there_are_enough_configurations():
    assert len(CONFIGURATIONS) >= 40
