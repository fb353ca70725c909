"""Requests get the same tokens, rounds and drafter's rows under every schedule as in a batch that runs alone.

Tokens alone prove nothing about drafts: a drafter whose rows are lost or belong to another text only takes more rounds,
and some of its rows may be wrong without any effect on the rounds of a short text.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import deepseek
import engine_storm
import gemma
import hlo
import jax
import masked
import pytest
import qwen
import toy
from engine_storm import EOS, Setup, Storm
from random_models import random_weights

from jspec.core.accept import block, rejection
from jspec.core.sampling import Sampling
from jspec.core.types import Params
from jspec.drafters import Block, Eagle, FrozenKvMtp, Mtp, Ngram, Plain, Standalone, Suffix
from jspec.drafters.suffix import Corpus
from jspec.runner import programs, slot_state

T = toy.TARGET
SAMPLED = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.1, min_new_tokens=3)


def family(module, kind: str, drafter) -> Setup:
    return Setup(module.KINDS[kind], drafter, lambda: Params(module.params(kind)))


HYBRID = qwen.KINDS["dense"]
RECURRENT = dataclasses.replace(HYBRID, is_full_attention=(False, False))


def hybrid(drafter, weights, sampling=None) -> Setup:
    """The hybrid target with the drafter of the toy target."""
    return Setup(HYBRID, drafter, lambda: Params(qwen.params("dense"), weights().draft), sampling)


@functools.cache
def recurrent_params() -> Params:
    return Params(random_weights(RECURRENT))


def suffix_params() -> Params:
    return Params(toy.params().target, Corpus(jax.numpy.asarray([*range(40), -1, *range(60, 0, -1), -1])))


HEAD_PARAMS, MODEL_PARAMS = (functools.partial(masked.params, model) for model in (toy.MASKED_HEAD, toy.MASKED))
SETUPS = {
    "plain": Setup(T, Plain(), toy.params),
    "ngram": Setup(T, Ngram(n=2, depth=3), toy.params),
    "ngram_sampled": Setup(T, Ngram(n=2, depth=3), toy.params, SAMPLED),
    "suffix_sampled": Setup(T, Suffix(depth=3, width=3, num_nodes=7), suffix_params, SAMPLED),
    "standalone": Setup(T, Standalone(depth=3).bind(T, toy.NEAR), toy.params),
    "standalone_tree_sampled": Setup(T, Standalone(3, 2, 6).bind(T, toy.NEAR), toy.params, SAMPLED),
    "eagle": Setup(T, Eagle(depth=3).bind(T, toy.HEAD), toy.head_params),
    "eagle_sampled": Setup(T, Eagle(depth=3).bind(T, toy.HEAD), toy.head_params, SAMPLED),
    "eagle_tree": Setup(T, Eagle(3, 3, 9, window=6, keep_first=2).bind(T, toy.HEAD), toy.head_params),
    "block": Setup(T, Block(depth=3).bind(T, toy.FILL_IN), lambda: toy.block_params(toy.FILL_IN)),
    "ring_block": Setup(T, Block(depth=3).bind(T, toy.BLOCK), lambda: toy.block_params(toy.BLOCK)),
    "standalone_rejection": Setup(T, Standalone(2, 2, 5, True).bind(T, toy.NEAR), toy.params, SAMPLED, rejection),
    "eagle_block": Setup(T, Eagle(depth=3, sampled=True).bind(T, toy.HEAD), toy.head_params, SAMPLED, block),
    "mtp": Setup(T, Mtp(depth=3, heads=3).bind(T, toy.HEADS), toy.mtp_params),
    "frozen_kv_mtp": Setup(T, FrozenKvMtp(depth=3).bind(T, toy.ASSISTANT), toy.assistant_params),
    "mla_ngram": family(deepseek, "mla", Ngram(n=2, depth=3)),
    "dsa_ngram": family(deepseek, "dsa", Ngram(n=2, depth=3)),
    "sliding_ngram": family(gemma, "shared", Ngram(n=2, depth=3)),
    "hybrid_ngram": family(qwen, "dense", Ngram(n=2, depth=3)),
    "hybrid_standalone": hybrid(Standalone(depth=3).bind(HYBRID, toy.NEAR), toy.params),
    "hybrid_eagle_sampled": hybrid(Eagle(depth=3).bind(HYBRID, toy.HEAD), toy.head_params, SAMPLED),
    "hybrid_mtp": hybrid(Mtp(depth=3, heads=3).bind(HYBRID, toy.HEADS), toy.mtp_params),
    "recurrent_ngram": Setup(RECURRENT, Ngram(n=2, depth=3), recurrent_params),
    "eagle_masks": Setup(T, Eagle(depth=3).bind(T, toy.MASKED_HEAD), HEAD_PARAMS),
    "standalone_masks_sampled": Setup(T, Standalone(4, 2, 8).bind(T, toy.MASKED), MODEL_PARAMS, SAMPLED),
    "eagle_masks_rejection": Setup(T, Eagle(2, 2, 5, True).bind(T, toy.MASKED_HEAD), HEAD_PARAMS, SAMPLED, rejection),
    "hybrid_eagle_masks": hybrid(Eagle(depth=3).bind(HYBRID, toy.MASKED_HEAD), HEAD_PARAMS),
}
KEEPS = [name for name in SETUPS if name.startswith(("sliding", "hybrid", "recurrent"))]
"""Those whose target keeps more than pages of a sequence."""
WRITES = {"parameter", "get-tuple-element", "bitcast", "scatter", "dynamic-update-slice", "fusion"}
"""What makes an array of all slots or places."""
STORMS = {
    "wide": Storm(),
    "tiny_pool": Storm(count=14, pages=13, eos=(EOS,), seed=4),
    "cancels": Storm(count=14, pages=13, cancels=0.15, seed=2),
    "rows": Storm(pages=14, max_in_flight=1, seed=3),
    "few_snapshots": Storm(snapshots=1, cancels=0.1, seed=21),
}
OTHERS = "wide", "cancels", "rows"
CASES = [(name, "tiny_pool" if i % 2 else OTHERS[i // 2 % len(OTHERS)]) for i, name in enumerate(SETUPS)]
CASES += [("standalone", "tiny_pool"), ("sliding_ngram", "wide")]
CASES += [(name, "few_snapshots") for name in KEEPS[::2]]
"""Every setup in a storm, half of them with few pages; only sliding_ngram in "wide" restores windows of others."""


@pytest.mark.slow(unless="standalone-tiny_pool")
@pytest.mark.parametrize("name, storm", CASES, ids=map("-".join, CASES))
def test_any_schedule_gives_the_same(name, storm):
    setup, counts = SETUPS[name], engine_storm.run(SETUPS[name], STORMS[storm])
    # A draft with rings of its own keeps sequences from sharing.
    rings = name == "ring_block"
    if storm == "rows" and type(setup.drafter) in (Block, Eagle, Mtp, Standalone) and not rings:
        assert counts["rows"] > 100
    if storm == "wide" and not rings:
        assert counts["shared"] > 0
    if storm in ("wide", "rows", "few_snapshots") and name in KEEPS:
        assert counts["restored"] > 0


def test_a_draft_whose_state_is_further_than_the_targets_shares_nothing():
    """Its state after a prefix has the root as well, and that is another one in another text."""
    weights = {HYBRID: qwen.params("dense"), T: toy.params().target, toy.NEAR: toy.params().draft}
    shared = []
    for target, draft in [(HYBRID, toy.NEAR), (T, HYBRID)]:
        drafter: Any = Standalone(depth=2).bind(target, draft)
        state = jax.eval_shape(lambda p, init=drafter.init: init(p, 2, 16, 4), Params(weights[target], weights[draft]))
        s: Any = SimpleNamespace(draft=state)
        shared.append(slot_state.lookahead(s, drafter))
    assert shared == [0, None]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sliding_ngram", "hybrid_ngram"])
def test_snapshots_are_copied_in_place(name):
    """Saving writes nothing but places, restoring nothing but slots, and no array of all of them is copied."""
    setup = SETUPS[name]
    sizes = slot_state.Sizes(slots=4, context=48, page_size=4, pages=20)
    empty = functools.partial(slot_state.empty_state, method=setup.method, sizes=sizes)
    s = jax.eval_shape(empty, setup.weights())
    snapshots = jax.eval_shape(functools.partial(slot_state.empty_snapshots, count=3), s.cache)
    at = jax.ShapeDtypeStruct((), "int32")
    restore = programs.restore.lower(s, snapshots, at, at, method=setup.method)
    save = programs.save.lower(snapshots, s.cache, at, at, method=setup.method)
    for lowered, written, kept in [(restore, s.cache, snapshots), (save, snapshots, s.cache)]:
        lines = [line for part in hlo.computations(lowered.compile().as_text()).values() for line in part]
        for shapes, allowed in [(kept, {"parameter"}), (written, WRITES)]:
            for x in jax.tree.leaves(shapes):
                assert set(hlo.made(lines, f"f32[{','.join(map(str, x.shape))}]")) <= allowed
