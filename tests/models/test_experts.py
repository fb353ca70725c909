"""Routers against a loop over tokens, and Qwen3-MoE against `transformers`: logits, output, checkpoints."""

import json
from functools import partial

import hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jspec
from jspec.checkpoints import language_model
from jspec.checkpoints.files import CheckpointError
from jspec.core import tree
from jspec.models.moe import Routed
from jspec.models.ops import Ops
from jspec.models.router import Router

ROUTERS = {
    "plain": Router(count=12, chosen=3),
    "normalized": Router(count=12, chosen=3, normalize=True, scale=2.5),
    "all": Router(count=6, chosen=6),
    "groups_by_best": Router(count=12, chosen=3, groups=4, kept_groups=2),
    "groups_by_two_best": Router(
        count=12, chosen=4, sigmoid=True, groups=4, kept_groups=2, best_of_group=2, normalize=True
    ),
    "one_group": Router(count=12, chosen=2, sigmoid=True, best_of_group=2),
}


def oracle(router, logits, bias):
    """One token at a time: expert -> weight."""
    found = []
    for token in logits.astype(np.float64):
        scores = 1 / (1 + np.exp(-token)) if router.sigmoid else np.exp(token) / np.exp(token).sum()
        choice = scores if bias is None else scores + bias
        groups = np.split(np.arange(router.count), router.groups)
        kept = sorted(groups, key=lambda group: -np.sort(choice[group])[-router.best_of_group :].sum())
        allowed = np.concatenate(kept[: router.kept_groups])
        chosen = sorted(allowed, key=lambda expert: -choice[expert])[: router.chosen]
        total = sum(scores[expert] for expert in chosen) if router.normalize else 1.0
        found.append({expert: router.scale * scores[expert] / total for expert in chosen})
    return found


@pytest.mark.parametrize("biased", (False, True), ids=("", "biased"))
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_a_router_equals_a_loop_over_tokens(router, biased):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40, router.count)).astype(np.float32)
    bias = rng.normal(size=router.count).astype(np.float32) if biased else None
    ids, weights = router.route(jnp.asarray(logits), None if bias is None else jnp.asarray(bias), Ops())
    assert weights.dtype == jnp.float32
    for wanted, chosen, given in zip(oracle(router, logits, bias), np.asarray(ids), np.asarray(weights), strict=True):
        assert list(wanted) == chosen.tolist()
        np.testing.assert_allclose(given, list(wanted.values()), rtol=1e-5)


def test_of_equal_groups_the_first_is_used():
    router = Router(count=8, chosen=2, groups=4, kept_groups=1)
    ids, _ = router.route(jnp.zeros((1, 8)), None, Ops())
    assert ids.tolist() == [[0, 1]]


def test_a_router_does_not_sort():
    for router in ROUTERS.values():
        program = jax.jit(partial(router.route, bias=None, ops=Ops())).lower(jnp.zeros((4, router.count)))
        assert "sort" not in program.as_text().replace("sorted", "")


def test_a_shared_gate_requires_a_shared_mlp():
    with pytest.raises(ValueError, match="shared_gate=True requires shared_width > 0"):
        Routed(ROUTERS["plain"], width=8, shared_gate=True)


torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[parity]"')
transformers = pytest.importorskip("transformers", reason='needs transformers: pip install -e ".[parity]"')

NEW_TOKENS = 24
LENGTHS = (1, 9, 30)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target with a noisy copy as its draft, and the target's oracle."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("qwen3_moe")
    return hf.noisy_pair(lambda: hf.build("qwen3_moe", mlp_only_layers=[0]), 0.05, directory)


@pytest.fixture(scope="module")
def expected(pair):
    return hf.continuations(pair[1], LENGTHS, NEW_TOKENS)


POINTS = [
    (jspec.Standalone(depth=3, width=2, num_nodes=8), 16),
    (None, 1),
    (jspec.Ngram(depth=5), 16),
    (jspec.Standalone(depth=4), 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "page_size"),
    [pytest.param(*point, marks=[pytest.mark.slow] if number else []) for number, point in enumerate(POINTS)],
)
def test_greedy_output_equals_transformers(pair, expected, drafter, page_size):
    model, exact = pair
    prompts, wanted = expected
    out = jspec.generate(model, prompts, drafter=drafter, max_new_tokens=NEW_TOKENS, page_size=page_size)
    for prompt, ours, theirs in zip(prompts, out.tokens, wanted, strict=True):
        assert ours == theirs, hf.margin(exact, prompt, ours, theirs)
    if isinstance(drafter, jspec.Standalone):
        assert out.stats.accept_length > 1.2


def check_logits(exact, directory):
    loaded = language_model.load(directory, dtype="float32")
    ids = np.random.default_rng(1).integers(0, loaded.config.vocab_size, (2, 50))
    with torch.no_grad():
        wanted = exact(torch.tensor(ids)).logits.numpy()
    cache = loaded.config.init_cache(loaded.params, 2, 16, 16)
    out = jax.jit(loaded.config.forward)(loaded.params, tree.chain(jnp.asarray(ids, jnp.int32)), cache, None)
    np.testing.assert_allclose(np.asarray(out.logits), wanted, atol=5e-5, rtol=0)
    return loaded


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"norm_topk_prob": False, "tie_word_embeddings": True}, ()),
        ({"num_hidden_layers": 3, "decoder_sparse_step": 2}, (0, 2)),
        ({"num_experts": 0}, ()),
    ],
)
def test_logits_equal_transformers_with_other_options(tmp_path, changes, dense):
    exact = hf.build("qwen3_moe", seed=4, **changes)
    loaded = check_logits(exact, hf.save(exact, tmp_path))
    assert loaded.config.dense_layers == dense
    assert (loaded.config.experts is None) == (changes.get("num_experts") == 0)


@pytest.mark.parametrize("name", ("num_experts", "num_local_experts"))
def test_the_number_of_experts_has_two_names(tmp_path, name):
    exact = hf.build("qwen3_moe")
    path = hf.save(exact, tmp_path) / "config.json"
    raw = json.loads(path.read_text())
    count = [raw.pop(key) for key in ("num_experts", "num_local_experts") if key in raw][0]
    path.write_text(json.dumps({**raw, name: count}))
    check_logits(exact, tmp_path)


def test_our_checkpoint_loads_in_transformers_and_here(tmp_path, pair):
    model, exact = pair
    language_model.save(tmp_path, model.target, model.params.target, dtype="float32", max_shard_bytes=30_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(theirs) is type(exact)
    ids = torch.tensor(np.random.default_rng(1).integers(0, 97, (1, 40)))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, exact(ids).logits, atol=1e-6, rtol=0)
    ours = language_model.load(tmp_path, dtype="float32")
    assert ours.config == model.target
    toy.assert_same(ours.params, model.params.target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": None, "num_local_experts": None}, "num_experts=None: must be an int"),
        ({"num_experts_per_tok": 9}, "chosen=9: must be between 1 and 8"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size=None: must be an int"),
    ],
)
def test_unsupported_configs_are_errors(tmp_path, change, message):
    path = hf.save(hf.build("qwen3_moe"), tmp_path) / "config.json"
    raw = json.loads(path.read_text())
    raw.setdefault("num_experts", raw.pop("num_local_experts", None))
    path.write_text(json.dumps({**raw, **change}))
    with pytest.raises(CheckpointError, match=message):
        language_model.load(tmp_path)
