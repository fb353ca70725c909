"""The models that ship with the package: ordinary checkpoints, lossless with their draft, and worth their size."""

import json

import numpy as np
import pytest

import jspec
from jspec import tree
from jspec.evaluate import count_repeated, evaluate, heldout_prompts
from jspec.model import BUNDLED, locate

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def model():
    return jspec.load("bundled:python-small", dtype="float32")


@pytest.fixture(scope="module")
def oracle():
    pytest.importorskip("torch", reason='needs torch: pip install -e ".[parity]"')
    transformers = pytest.importorskip("transformers", reason='needs transformers: pip install -e ".[parity]"')
    import torch

    def load(name):
        directory = locate(f"bundled:{name}")
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    return load


def logits_of(name, ids):
    loaded = jspec.load(f"bundled:{name}", dtype="float32")
    cache = loaded.target.init_cache(loaded.params.target, 1, 16, 16)
    return np.asarray(loaded.target.forward(loaded.params.target, tree.chain(ids), cache, None).logits)


@pytest.mark.parametrize("name", BUNDLED)
def test_logits_equal_transformers(model, oracle, name):
    import jax.numpy as jnp
    import torch

    ids = model.tokenizer.encode(heldout_prompts()[0])[:200]
    with torch.no_grad():
        wanted = oracle(name)(torch.tensor([ids])).logits.numpy()
    np.testing.assert_allclose(logits_of(name, jnp.asarray([ids], jnp.int32)), wanted, atol=2e-4, rtol=0)


PROMPTS, NEW_TOKENS = slice(0, 4), 48
PAGE_SIZES = (1, 16, 64)
# Each depth and each page size; all their pairs are in test_parity.py, on smaller models.
SETTINGS = [(None, page_size) for page_size in PAGE_SIZES]
SETTINGS += [(jspec.Ngram(depth=depth), PAGE_SIZES[depth % 3]) for depth in range(1, 7)]
SETTINGS += [(jspec.Standalone(depth=depth), PAGE_SIZES[(depth + 1) % 3]) for depth in range(1, 7)]


@pytest.fixture(scope="module")
def continued(model, oracle):
    """What `transformers` continues some held-out prompts with, and the same with stop strings."""
    import hf
    import transformers

    reference, eos = oracle("python-small"), {"eos_token_id": list(model.eos), "pad_token_id": model.eos[0]}
    stops = ["return", "\n\n", "if "]
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(locate("bundled:python-small"))
    ids = [model.tokenizer.encode(prompt) for prompt in heldout_prompts()[PROMPTS]]
    whole = [hf.greedy(reference, row, NEW_TOKENS, **eos) for row in ids]
    stopped = [hf.greedy(reference, row, NEW_TOKENS, **eos, stop_strings=stops, tokenizer=fast) for row in ids]
    return reference, ids, whole, stops, stopped


@pytest.mark.parametrize("drafter, page_size", SETTINGS, ids=str)
def test_greedy_output_equals_transformers(model, continued, drafter, page_size):
    import hf

    reference, ids, whole, *_ = continued
    out = jspec.generate(model, ids, drafter=drafter, max_new_tokens=NEW_TOKENS, page_size=page_size)
    for prompt, ours, theirs in zip(ids, out.tokens, whole, strict=True):
        assert ours == theirs, hf.margin(reference, prompt, ours, theirs)


@pytest.mark.parametrize("drafter", [None, jspec.Ngram(depth=4), jspec.Standalone(depth=4)], ids=str)
def test_stop_strings_end_where_transformers_ends(model, continued, drafter):
    _, ids, whole, stops, stopped = continued
    out = jspec.generate(model, ids, drafter=drafter, max_new_tokens=NEW_TOKENS, stop=stops)
    assert out.tokens == stopped != whole
    assert "stop" in out.finish_reason


def test_the_draft_is_worth_its_time(model):
    """A floor well under the figure of docs/log.md, on a few prompts: a draft that has come loose falls far below."""
    out = evaluate(model, heldout_prompts()[:6], jspec.Standalone(depth=4), max_new_tokens=48, batch=6)
    assert out.accept_length > 1.9
    assert (np.diff(out.acceptance_by_position) <= 0).all()


def test_heldout_prompts_are_what_the_card_says():
    directory = locate("bundled:python-small").parent
    records = json.loads((directory / "heldout_prompts.json").read_text(encoding="utf-8"))
    assert len(records) >= 64
    assert all(record["package"] and record["licence"] and '"""' in record["prompt"] for record in records)
    card = (directory / "python-small" / "README.md").read_text(encoding="utf-8")
    assert all(record["package"] in card for record in records)


def test_assets_stay_small():
    directory = locate("bundled:python-small").parent
    assert sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) < 32 * MEGABYTE


def test_repeated_text_is_counted():
    run = list(range(16))
    assert count_repeated(run, run) == 1
    assert count_repeated([], run + [99] + run + [5]) == 1
    assert count_repeated([], [7] * 20) == 4
    assert count_repeated(run, list(range(20, 40))) == 0
