"""Training of assistants: training equals serving, drafts improve, and checkpoints load."""

import dataclasses
import json

import extras  # noqa: F401
import gemma
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from train_files import lines

import jspec
from jspec.checkpoints import drafts
from jspec.checkpoints.source import Source
from jspec.core import accept, stopping
from jspec.core.method import Method
from jspec.core.prefill import jitted_prefill
from jspec.core.types import Params, Prompts
from jspec.drafters import FrozenKvMtp
from jspec.models import Assistant
from jspec.models.assistant import Clusters
from jspec.train import batches, distill, draft, text, trainer
from jspec.train.assistant import AssistantLearner
from jspec.train.distill import Distillation
from jspec.train.recipe import AssistantShape, DraftRecipe, Intervals

STEPS = 3
TEXTS = np.random.default_rng(2).integers(0, 61, (3, 20)).astype(np.int32)
TARGETS = {
    "llama": dataclasses.replace(toy.TARGET, qk_norm=False),
    "qwen3": dataclasses.replace(toy.TARGET, tie_embeddings=True),
    "dense": gemma.KINDS["dense"],
    # Layers 2 and 3 share the keys of layers 0 and 1.
    "shared": gemma.KINDS["shared"],
}
SLOW = pytest.mark.slow


def target_params(name):
    return gemma.params(name) if name in gemma.KINDS else toy.random_params(TARGETS[name], seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target_head"),
    [("llama", False), ("qwen3", True), ("shared", False), pytest.param("dense", True, marks=SLOW)],
)
def test_training_equals_serving(name, target_head):
    """Step k of row p is the k-th forward, on the same text, of a round whose cache holds rows 0 to p."""
    target = TARGETS[name]
    config = AssistantLearner.configure(target, AssistantShape(hidden_size=48, target_head=target_head))
    own = dataclasses.replace(toy.random_assistant(config), **({"head": None} if target_head else {}))
    params, tokens = Params(target_params(name), own), jnp.asarray(TEXTS)
    draft = AssistantLearner(DraftRecipe(steps=2), "float32", config, target)

    @jax.jit
    def unroll(params, tokens):
        observed = draft.observe(draft.run_target(params.target, tokens))
        carry, found = draft.begin(params, observed), []
        for step in range(STEPS):
            logits, carry = draft.forward(params, tokens, observed, carry, step)
            found.append((logits, carry))
        return found

    with jax.default_matmul_precision("highest"):
        trained = unroll(params, tokens)
    # Prompts that end at x[p + 1], which is in no cache yet: after 2 rows, and after more than two windows.
    length = jnp.array([3, 12, 18], jnp.int32) - 1
    bound = FrozenKvMtp(depth=STEPS).bind(target, config)
    keys = jax.vmap(jax.random.key)(jnp.arange(3, dtype=jnp.uint32))
    prompts = Prompts(tokens, length, length + 4, keys, stopping.init(None, 3))
    method = Method(target, bound, accept.greedy)
    s = jitted_prefill(params, prompts, method=method, capacity=32, page_size=4)
    # Rounds and the unrolled forward add up in different orders, and every step amplifies what differs:
    # changing the weights by half a unit in the last place changes logits of the last step by 2e-4.
    atol = 5e-4
    apply, hidden = jax.jit(config.apply, static_argnums=1), s.draft
    for step in range(STEPS):
        token = jnp.take_along_axis(tokens, length[:, None] + step, axis=1, mode="clip")
        out = apply(params, target, token, hidden, s.cache, s.length - 1, s.length - 2)
        hidden = out.hidden
        for row, p in enumerate(np.asarray(length) - 1):
            if p + step + 1 < TEXTS.shape[1]:
                np.testing.assert_allclose(out.logits[row, 0], trained[step][0][row, p], atol=atol)
                np.testing.assert_allclose(out.hidden[row, 0], trained[step][1][row, p], atol=atol)


@pytest.mark.parametrize("target_head", [False, True], ids=["own head", "target's head"])
@pytest.mark.parametrize("name", TARGETS)
def test_checkpoints_round_trip(name, target_head, tmp_path):
    """An assistant of any shape for a target of any family."""
    target = TARGETS[name]
    config = AssistantLearner.configure(
        target, AssistantShape(hidden_size=40, intermediate_size=24, target_head=target_head)
    )
    own = toy.random_assistant(config)
    own = dataclasses.replace(own, head=None) if target_head else own
    drafts.save(tmp_path, config, own, dtype="float32")
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dtype"] == "float32" and "torch_dtype" not in written
    loaded = drafts.plan(Source(tmp_path), target, "float32").read()
    assert loaded.config == config
    toy.assert_same(loaded.params, own)


def fit(learner, model, rows, directory, *measure, **options):
    """Trains on the rows."""
    sources, heldout = (batches.Source(rows),), batches.Source(rows[:8].reshape(-1))
    task = Distillation(learner, model.params.target, sources, heldout, *measure)
    return trainer.run(task, directory, intervals=Intervals(log_every=1, eval_every=15, checkpoint_every=15), **options)


@pytest.fixture(scope="module")
def task():
    """An assistant, a tiny target, and text that it wrote."""
    target, weights = TARGETS["qwen3"], target_params("qwen3")
    # Sharp distributions, so that there is something to learn.
    weights = dataclasses.replace(weights, embed=jax.device_put(4 * np.array(weights.embed)))
    starts = np.random.default_rng(0).integers(0, 61, (32, 4)).tolist()
    rows = text.complete(target, weights, starts, width=32, batch=32)
    recipe = DraftRecipe(steps=30, batch_tokens=256, length=32, learning_rate=1e-2, warmup=2, ttt_steps=2)
    learner = AssistantLearner.make(target, AssistantShape(), recipe, "float32")
    return learner, jspec.Model("tiny", target, Params(weights), None, ()), rows


def prompts(rows):
    return rows[:6, :5].astype(int).tolist()


@pytest.fixture(scope="module")
def trained(task, tmp_path_factory):
    """The directory and the last state of a run that is evaluated halfway and at its end."""
    learner, model, rows = task
    directory = tmp_path_factory.mktemp("whole")

    def measure(params):
        return distill.accept_length(model, learner.config, params, prompts(rows), depth=2, max_new_tokens=24)

    return directory, fit(*task, directory, measure)


@pytest.mark.slow
def test_training_lowers_the_loss_and_lengthens_drafts(task, trained):
    directory, state = trained
    losses = [line["loss"] for line in lines(directory) if "loss" in line]
    assert len(losses) == int(state.step) == 30
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])
    first, last = (line for line in lines(directory) if "accept_length" in line)
    assert last["accept_length"] > first["accept_length"] > 1
    assert last["heldout_chain"] > first["heldout_chain"]
    learner, model, _ = task
    first = distill.init(learner, model.params.target, None)
    kept = jax.tree.map(np.array_equal, first.params, state.params)
    assert not any(jax.tree.leaves(kept)), "every weight is trained"


@pytest.mark.slow
def test_resuming_continues_exactly(task, trained, tmp_path):
    directory, uninterrupted = trained
    fit(*task, tmp_path, stop_after=7)
    resumed = fit(*task, tmp_path, resume=True)
    toy.assert_same(resumed, uninterrupted)
    losses = [[line["loss"] for line in lines(path) if "loss" in line] for path in (directory, tmp_path)]
    assert losses[0] == losses[1]
    learner, model, rows = task
    other = AssistantLearner.make(model.target, AssistantShape(reads=(1, 1)), learner.recipe, "float32")
    with pytest.raises(ValueError, match=r"another recipe: target_layers=\[1, 1\] \(was \[0, 1\]\)"):
        fit(other, model, rows, tmp_path, resume=True)


@pytest.mark.slow
def test_a_trained_assistant_drafts_losslessly(task, trained):
    learner, model, rows = task
    params = Params(model.params.target, trained[1].serve("float32"))
    drafted = dataclasses.replace(model, params=params, draft=learner.config)
    out = jspec.generate(drafted, prompts(rows), drafter=FrozenKvMtp(depth=2), max_new_tokens=24)
    assert out.tokens == jspec.generate(drafted, prompts(rows), drafter=None, max_new_tokens=24).tokens
    assert out.stats.accept_length > 1.5


@pytest.mark.slow
def test_training_in_memory():
    """For a Gemma 4 model in which some layers share keys."""
    target = TARGETS["shared"]
    plain = jspec.Model("tiny", target, Params(target_params("shared")), None, ())
    options = {"num_layers": 3, "target_head": True, "batch_tokens": 60, "ttt_steps": 1, "progress": False}
    drafted = draft.train_draft("frozen-kv-mtp", plain, TEXTS, steps=2, **options)
    assert isinstance(drafted.draft, Assistant) and drafted.draft.target_layers == (2, 2, 3)
    assert drafted.params.target is plain.params.target and drafted.params.draft.head is None
    assert all(np.isfinite(leaf).all() for leaf in toy.arrays(drafted.params.draft))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("llama", {"reads": (2,)}, r"reads=\(2,\): each must be between 0 and 1"),
        ("llama", {"reads": (0,), "num_layers": 2}, r"num_layers=2: must be 1, the length of reads=\(0,\)"),
        ("llama", {"num_layers": 3}, "num_layers=3: must be between 1 and 2"),
        ("llama", {"num_heads": 3}, "reads layer 0 with 3 heads of dimension 16, but this target has 2 key heads"),
        ("shared", {"num_layers": 1}, "num_layers=1: must be between 2 and 4; or name the layers in reads"),
    ],
)
def test_invalid_shapes_raise(name, shape, message):
    with pytest.raises(ValueError, match=message):
        AssistantLearner.configure(TARGETS[name], AssistantShape(**shape))


def test_a_head_of_clusters_cannot_be_trained():
    config = dataclasses.replace(
        AssistantLearner.configure(TARGETS["llama"], AssistantShape()), clusters=Clusters(61, 5)
    )
    with pytest.raises(ValueError, match=r"clusters=Clusters\(count=61, chosen=5\): .* cannot be trained"):
        AssistantLearner(DraftRecipe(), "float32", config, TARGETS["llama"])
