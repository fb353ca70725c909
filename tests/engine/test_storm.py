"""Requests get the same tokens, rounds and drafter's rows under every schedule as in a batch that runs alone.

Tokens alone prove nothing about drafts: a drafter whose rows are lost or belong to another text only takes more rounds,
and some of its rows may be wrong without any effect on the rounds of a short text.
"""

import deepseek
import engine_storm
import gemma
import pytest
import qwen
import toy
from engine_storm import EOS, Setup, Storm

from jspec.core.accept import block, rejection
from jspec.core.sampling import Sampling
from jspec.core.types import Params
from jspec.drafters import Eagle, FrozenKvMtp, Mtp, Ngram, Plain, Standalone

T = toy.TARGET
SAMPLED = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.1, min_new_tokens=3)


def family(module, kind: str, drafter) -> Setup:
    return Setup(module.KINDS[kind], drafter, lambda: Params(module.params(kind)))


SETUPS = {
    "plain": Setup(T, Plain(), toy.params),
    "ngram": Setup(T, Ngram(n=2, depth=3), toy.params),
    "ngram_sampled": Setup(T, Ngram(n=2, depth=3), toy.params, SAMPLED),
    "standalone": Setup(T, Standalone(depth=3).bind(T, toy.NEAR), toy.params),
    "standalone_tree_sampled": Setup(T, Standalone(3, 2, 6).bind(T, toy.NEAR), toy.params, SAMPLED),
    "eagle": Setup(T, Eagle(depth=3).bind(T, toy.HEAD), toy.head_params),
    "eagle_sampled": Setup(T, Eagle(depth=3).bind(T, toy.HEAD), toy.head_params, SAMPLED),
    "eagle_tree": Setup(T, Eagle(3, 3, 9).bind(T, toy.HEAD), toy.head_params),
    "standalone_rejection": Setup(T, Standalone(2, 2, 5, True).bind(T, toy.NEAR), toy.params, SAMPLED, rejection),
    "eagle_block": Setup(T, Eagle(depth=3, sampled=True).bind(T, toy.HEAD), toy.head_params, SAMPLED, block),
    "mtp": Setup(T, Mtp(depth=3, heads=3).bind(T, toy.HEADS), toy.mtp_params),
    "frozen_kv_mtp": Setup(T, FrozenKvMtp(depth=3).bind(T, toy.ASSISTANT), toy.assistant_params),
    "mla_ngram": family(deepseek, "mla", Ngram(n=2, depth=3)),
    "dsa_ngram": family(deepseek, "dsa", Ngram(n=2, depth=3)),
    "sliding_ngram": family(gemma, "shared", Ngram(n=2, depth=3)),
    "recurrent_ngram": family(qwen, "dense", Ngram(n=2, depth=3)),
}
STORMS = {
    "wide": Storm(),
    "tiny_pool": Storm(count=14, pages=13, eos=(EOS,), seed=4),
    "cancels": Storm(count=14, pages=13, cancels=0.15, seed=2),
    "rows": Storm(pages=14, flights=1, seed=3),
}


@pytest.mark.fast("standalone-tiny_pool")
@pytest.mark.parametrize("storm", STORMS)
@pytest.mark.parametrize("name", SETUPS)
def test_any_schedule_gives_the_same(name, storm):
    setup, counts = SETUPS[name], engine_storm.run(SETUPS[name], STORMS[storm])
    if storm == "rows" and type(setup.drafter) in (Eagle, Mtp, Standalone):
        assert counts["rows"] > 100
    if storm == "wide" and setup.target in (T, deepseek.MLA):
        assert counts["shared"] > 0
