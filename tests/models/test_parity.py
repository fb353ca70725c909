"""Output equals `transformers`, token for token in float32, for every family, drafter, depth and page size."""

import dataclasses

import hf
import jax
import numpy as np
import pytest
import toy

import jspec
from jspec.checkpoints import language_model
from jspec.core import tree
from jspec.core.types import Params

torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[parity]"')
transformers = pytest.importorskip("transformers", reason='needs transformers: pip install -e ".[parity]"')

NEW_TOKENS = 24
LENGTHS = (1, 5, 12, 16)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Such small models are slower with two threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def pair(request, tmp_path_factory):
    """A target, a draft that has some of the target's weights, and the target's oracle."""
    directory = tmp_path_factory.mktemp(request.param)
    oracle = hf.build(request.param)
    target = language_model.load(hf.save(oracle, directory / "target"), dtype="float32")
    with torch.no_grad():
        noisy = hf.build(request.param)
        for weight in noisy.parameters():
            weight.add_(0.25 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    draft = language_model.load(hf.save(noisy, directory / "draft"), dtype="float32")
    params = Params(target.params, draft.params)
    return jspec.Model(request.param, target.config, params, None, (), draft.config), oracle


@pytest.fixture(scope="module")
def expected(pair):
    """Prompts of several lengths and the oracle's continuations."""
    model, oracle = pair
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.target.vocab_size, n).tolist() for n in LENGTHS]
    return prompts, [hf.greedy(oracle, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def with_head(pair, expected):
    """The same target with an EAGLE head that was fitted to the outputs."""
    model, _ = pair
    texts = np.zeros((len(LENGTHS), max(LENGTHS) + NEW_TOKENS), np.int32)
    for row, prompt, new in zip(texts, *expected, strict=True):
        row[: len(prompt) + len(new)] = prompt + new
    shape = dict(vocab_size=97, draft_vocab_size=80, target_hidden_size=32, capture_layers=(0, 1, 2))
    head = dataclasses.replace(toy.HEAD, **shape)
    params = toy.fit_head(model.target, head, model.params.target, texts)
    return dataclasses.replace(model, params=params, draft=head)


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
@pytest.mark.parametrize(("pair", "drafter", "page_size"), CASES, ids=map(label, CASES), indirect=["pair"])
def test_greedy_output_equals_transformers(pair, with_head, expected, drafter, page_size):
    model, oracle = pair
    prompts, wanted = expected
    model = with_head if isinstance(drafter, jspec.Eagle) else model
    out = jspec.generate(model, prompts, drafter=drafter, max_new_tokens=NEW_TOKENS, page_size=page_size)
    for prompt, ours, theirs in zip(prompts, out.tokens, wanted, strict=True):
        assert ours == theirs, hf.margin(oracle, prompt, ours, theirs)
    if isinstance(drafter, jspec.Standalone | jspec.Eagle):
        least = 1.3 if isinstance(drafter, jspec.Standalone) else 1.05
        assert out.stats.accept_length > least, "the draft is close to its target: something must be accepted"


@pytest.mark.slow(unless="Ngram")
@pytest.mark.parametrize("drafter", [None, jspec.Ngram(depth=4), jspec.Standalone(depth=4, width=3)], ids=str)
def test_eos_cuts_where_transformers_stops(pair, expected, drafter):
    model, oracle = pair
    prompts, plain = expected
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
def test_options_of_a_family(tmp_path, family, changes):
    oracle = hf.build(family, seed=4, **changes)
    check_logits(oracle, hf.save(oracle, tmp_path))


def check_logits(oracle, directory):
    loaded = language_model.load(directory, dtype="float32")
    # 150 positions: the scaled frequencies of llama3 differ beyond the original context of 64.
    ids = np.random.default_rng(1).integers(0, loaded.config.vocab_size, (2, 150))
    with torch.no_grad():
        wanted = oracle(torch.tensor(ids)).logits.numpy()

    @jax.jit
    def read(params, ids):
        cache = loaded.config.init_cache(params, 2, 16, 16)
        return loaded.config.forward(params, tree.chain(ids), cache, None).logits

    np.testing.assert_allclose(read(loaded.params, ids.astype(np.int32)), wanted, atol=5e-5, rtol=0)


def test_our_checkpoint_loads_in_transformers(tmp_path, pair):
    model, oracle = pair
    language_model.save(
        tmp_path, model.target, model.params.target, dtype="float32", eos=(5, 6), max_shard_bytes=30_000
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(loaded) is type(oracle)
    assert loaded.generation_config.eos_token_id == [5, 6]
    ids = torch.tensor(np.random.default_rng(1).integers(0, 97, (1, 40)))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, oracle(ids).logits, atol=1e-6, rtol=0)
