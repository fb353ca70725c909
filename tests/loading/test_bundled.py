"""The bundled models: logits and outputs equal those of transformers, and their drafts are accepted often enough."""

import json

import jax
import numpy as np
import optional
import pytest

import jspec
from jspec.analysis.evaluate import count_repeated, evaluate, heldout_prompts
from jspec.core import tree
from jspec.drafters import DRAFTERS
from jspec.generation.method import choose_drafter
from jspec.loading.hub import BUNDLED, locate


@pytest.fixture(scope="module")
def models():
    """Drafter -> the target with the draft for it."""
    drafts = {name: f"bundled:{draft}" for name, draft in BUNDLED["python-small"].items()}
    return {name: jspec.load("bundled:python-small", draft=draft, dtype="float32") for name, draft in drafts.items()}


def model_for(models, drafter):
    """The model with the draft for a drafter; any of them if it uses no draft."""
    return next((models[name] for name in models if type(drafter) is DRAFTERS[name]), models["standalone"])


@pytest.fixture(scope="module")
def model(models):
    return models["standalone"]


def test_the_eagle_head_is_the_default_draft():
    model = jspec.load("bundled:python-small")
    assert repr(model).endswith("EAGLE-3 head)")
    assert model.draft.draft_vocab_size < model.target.vocab_size
    assert isinstance(choose_drafter("auto", model), jspec.Eagle)


@pytest.fixture(scope="module")
def oracle():
    optional.needed("torch")
    transformers = optional.needed("transformers")
    import torch

    # Models this small are faster with one thread.
    torch.set_num_threads(1)

    def load(name):
        directory = locate(f"bundled:{name}")
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    return load


def logits_of(name, ids):
    loaded = jspec.load(f"bundled:{name}", dtype="float32")

    @jax.jit
    def read(params, ids):
        cache = loaded.target.init_cache(params, 1, 16, 16)
        return loaded.target.forward(params, tree.chain(ids), cache, None).logits

    return np.asarray(read(loaded.params.target, ids))


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLED)
def test_logits_equal_transformers(model, oracle, name):
    import torch

    ids = model.tokenizer.encode(heldout_prompts()[0])[:200]
    with torch.no_grad():
        expected = oracle(name)(torch.tensor([ids])).logits.numpy()
    np.testing.assert_allclose(logits_of(name, np.array([ids], np.int32)), expected, atol=2e-4, rtol=0)


PROMPTS, NEW_TOKENS = slice(0, 6), 48
EAGLE_TREE = jspec.Eagle(depth=5, width=8, num_nodes=32)
BLOCK_TREE = jspec.Block(depth=7, width=8, num_nodes=32)
# test_parity.py has every depth and plain decoding, with smaller models.
SETTINGS = [
    (jspec.Ngram(depth=3), 1),
    (jspec.Standalone(depth=4, width=3), 1),
    (EAGLE_TREE, 64),
    (jspec.FrozenKvMtp(depth=5, width=8, num_nodes=32), 16),
    (jspec.Block(), 64),
]


@pytest.fixture(scope="module")
def continued(model, oracle):
    """Continuations of some held-out prompts by `transformers`, with and without stop strings."""
    import hf
    import transformers

    reference, eos = oracle("python-small"), {"eos_token_id": list(model.eos), "pad_token_id": model.eos[0]}
    stops = ["return", "\n\n", "if "]
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(locate("bundled:python-small"))
    ids = [model.tokenizer.encode(prompt) for prompt in heldout_prompts()[PROMPTS]]
    whole = [hf.greedy(reference, row, NEW_TOKENS, **eos) for row in ids]
    stopped = [hf.greedy(reference, row, NEW_TOKENS, **eos, stop_strings=stops, tokenizer=fast) for row in ids]
    return reference, ids, whole, stops, stopped


@pytest.mark.slow
@pytest.mark.parametrize("drafter, page_size", SETTINGS, ids=str)
def test_greedy_output_equals_transformers(models, continued, drafter, page_size):
    import hf

    reference, ids, whole, *_ = continued
    model = model_for(models, drafter)
    out = jspec.generate(model, ids, drafter=drafter, max_new_tokens=NEW_TOKENS, page_size=page_size)
    for prompt, ours, theirs in zip(ids, out.tokens, whole, strict=True):
        assert ours == theirs, hf.margin(reference, prompt, ours, theirs)


# Stop strings with every drafter are in test_generate.py.
@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, jspec.Standalone(depth=4)], ids=str)
def test_stop_strings_end_the_text_where_transformers_does(model, continued, drafter):
    _, ids, whole, stops, stopped = continued
    out = jspec.generate(model, ids, drafter=drafter, max_new_tokens=NEW_TOKENS, stop=stops)
    assert out.tokens == stopped != whole
    assert "stop" in out.finish_reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "floor"),
    (
        (jspec.Standalone(depth=4), 1.9),
        (jspec.Eagle(depth=5), 2.5),
        (EAGLE_TREE, 3.2),
        (jspec.FrozenKvMtp(depth=4), 2.8),
        (jspec.Block(), 2.5),
        (BLOCK_TREE, 3.2),
    ),
    ids=str,
)
def test_accept_length_is_above_its_floor(models, drafter, floor):
    """The floors are well below the accept lengths in docs/benchmarks.md; a broken draft falls far below them."""
    prompts = heldout_prompts()[PROMPTS]
    out = evaluate(model_for(models, drafter), prompts, drafter, max_new_tokens=NEW_TOKENS, batch=len(prompts))
    assert out.accept_length > floor
    assert (np.diff(out.acceptance_by_position) <= 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [EAGLE_TREE, jspec.FrozenKvMtp(depth=5), BLOCK_TREE], ids=str)
def test_sampling_with_a_draft_equals_plain_sampling(models, drafter):
    options = dict(sampling=jspec.Sampling(temperature=0.9, top_p=0.95), seed=5, max_new_tokens=32)
    model, prompts = model_for(models, drafter), heldout_prompts()[:4]
    plain = jspec.generate(model, prompts, drafter=None, **options)
    assert jspec.generate(model, prompts, drafter=drafter, **options).tokens == plain.tokens


def test_the_card_lists_the_packages_of_the_heldout_prompts():
    directory = locate("bundled:python-small").parent
    records = json.loads((directory / "heldout_prompts.json").read_text(encoding="utf-8"))
    assert len(records) >= 64
    assert all(record["package"] and record["license"] and '"""' in record["prompt"] for record in records)
    card = (directory / "python-small" / "README.md").read_text(encoding="utf-8")
    assert all(record["package"] in card for record in records)


def test_assets_stay_small():
    directory = locate("bundled:python-small").parent
    assert sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) < 40e6


def test_repeated_runs_of_tokens_are_counted():
    run = list(range(16))
    assert count_repeated(run, run) == 1
    assert count_repeated([], run + [99] + run + [5]) == 1
    assert count_repeated([], [7] * 20) == 4
    assert count_repeated(run, list(range(20, 40))) == 0
