"""Output equals `transformers`, token for token in float32, for every family, drafter, depth and page size."""

import hf
import pytest
from parity import NEW_TOKENS, check_logits, check_output, check_saved

import jspec

PAGES = (1, 16, 64)
MAKERS = (jspec.Standalone, jspec.Eagle)
# Every depth from 1 to 6, each with some drafter and one page size.
CASES = [("llama", None, size) for size in PAGES]
CASES += [
    ("llama", make(depth=depth), PAGES[depth % 3])
    for make, depths in ((jspec.Ngram, (1, 4, 6)), (jspec.Standalone, (1, 2, 4, 6)), (jspec.Eagle, (2, 3, 5)))
    for depth in depths
]
# Trees from narrow to wide and from flat to deep.
CASES += [
    ("llama", make(depth=depth, width=width, num_nodes=min(64, 1 + width + (depth - 1) * width**2)), PAGES[depth % 3])
    for make, shapes in zip(MAKERS, (((1, 2), (4, 5)), ((2, 8), (6, 3))), strict=True)
    for depth, width in shapes
]
# The loop is the same for every family.
CASES += [
    ("qwen3", drafter, PAGES[i % 3])
    for i, drafter in enumerate([None, jspec.Ngram(depth=5), *(make(4, width) for make in MAKERS for width in (1, 3))])
]


def label(case):
    family, drafter, page_size = case
    if drafter is None:
        return f"{family}-plain-{page_size}"
    width = getattr(drafter, "width", 1)
    return f"{family}-{type(drafter).__name__}-{drafter.depth}{f'x{width}' if width > 1 else ''}-{page_size}"


@pytest.mark.slow(unless=("llama-Ngram-4-16", "llama-Eagle-3-1"))
@pytest.mark.parametrize(("family", "drafter", "page_size"), CASES, ids=map(label, CASES))
def test_greedy_output_equals_transformers(pair, family, drafter, page_size, monkeypatch):
    out = check_output(pair(family), drafter, page_size, None, monkeypatch)
    if isinstance(drafter, jspec.Standalone | jspec.Eagle):
        least = 1.3 if isinstance(drafter, jspec.Standalone) else 1.05
        assert out.stats.accept_length > least, "the draft is close to its target: something must be accepted"


@pytest.mark.slow(unless="llama-Ngram")
@pytest.mark.parametrize("drafter", [None, jspec.Ngram(depth=4), jspec.Standalone(depth=4, width=3)], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_eos_cuts_where_transformers_stops(pair, family, drafter):
    model, oracle = pair(family).model, pair(family).oracle
    prompts, plain = pair(family).texts
    # Tokens from the middle of the outputs, so sequences end at different positions, also within accepted runs.
    eos = sorted({plain[1][7], plain[2][11], plain[3][4]})
    wanted = [hf.greedy(oracle, prompt, NEW_TOKENS, eos_token_id=eos, pad_token_id=0) for prompt in prompts]
    ending = jspec.Model(model.name, model.target, model.params, None, tuple(eos), model.draft)
    out = jspec.generate(ending, prompts, drafter=drafter, max_new_tokens=NEW_TOKENS)
    assert out.tokens == wanted
    assert out.finish_reason == ["eos" if row[-1] in eos else "length" for row in wanted]
    assert len({len(row) for row in wanted}) > 1


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("old_config", [False, True], ids=["new config", "old config"])
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_logits_equal_transformers(tmp_path, family, old_config, sharded):
    oracle = hf.build(family, seed=3)
    hf.save(oracle, tmp_path, sharded=sharded, old_config=old_config)
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    check_logits(oracle, tmp_path)


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 8}),
        ("qwen3", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
        ("qwen3", {"attention_bias": True, "head_dim": 64}),
    ],
)
def test_logits_equal_transformers_with_other_options(tmp_path, family, changes):
    oracle = hf.build(family, seed=4, **changes)
    check_logits(oracle, hf.save(oracle, tmp_path))


@pytest.mark.slow(unless="llama")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_our_checkpoint_loads_in_transformers_and_here(tmp_path, pair, family):
    check_saved(tmp_path, pair(family), eos=(5, 6))
