"""Training of assistants: training equals serving, drafts improve, and checkpoints load."""

import dataclasses
import json

import gemma
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

pytest.importorskip("flax", reason='needs flax: pip install -e ".[train]"')
pytest.importorskip("optax", reason='needs optax: pip install -e ".[train]"')
pytest.importorskip("orbax.checkpoint", reason='needs orbax-checkpoint: pip install -e ".[train]"')

import train_files  # noqa: E402
from train_files import lines, run  # noqa: E402

import jspec  # noqa: E402
from jspec.checkpoints import drafts, language_model  # noqa: E402
from jspec.checkpoints.source import Source
from jspec.core import accept, stopping  # noqa: E402
from jspec.core.method import Method  # noqa: E402
from jspec.core.prefill import jitted_prefill  # noqa: E402
from jspec.core.types import Params, Prompts  # noqa: E402
from jspec.drafters import FrozenKvMtp  # noqa: E402
from jspec.models import Assistant  # noqa: E402
from jspec.models.assistant import Clusters  # noqa: E402
from jspec.train import assistant, batches, distill, draft, text, tokenizer  # noqa: E402
from jspec.train.assistant import AssistantLearner  # noqa: E402
from jspec.train.distill import DraftSetup  # noqa: E402
from jspec.train.recipe import AssistantShape, DraftRecipe, Intervals  # noqa: E402

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


@pytest.mark.slow(unless="llama")
@pytest.mark.parametrize(
    ("name", "target_head"),
    [("llama", False), ("qwen3", True), ("shared", False), pytest.param("dense", True, marks=SLOW)],
)
def test_training_equals_serving(name, target_head):
    """Step k of row p is the k-th forward, on the same text, of a round whose cache holds rows 0 to p."""
    target = TARGETS[name]
    config = assistant.configure(target, AssistantShape(hidden_size=48, target_head=target_head))
    own = dataclasses.replace(toy.random_assistant(config), **({"head": None} if target_head else {}))
    params, tokens = Params(target_params(name), own), jnp.asarray(TEXTS)
    draft = AssistantLearner(config, target)
    setup = DraftSetup(draft, DraftRecipe(steps=2), "float32")

    @jax.jit
    def unroll(params, tokens):
        observed = draft.observe(distill.run_target(setup, params.target, tokens))
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
    prompts, method = (
        Prompts(tokens, length, length + 4, keys, stopping.init(None, 3)),
        Method(target, bound, accept.greedy),
    )
    s = jitted_prefill(params, prompts, method=method, capacity=32, page_size=4)
    # Rounds and the unrolled forward add up in different orders.
    atol = 1e-4
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
    config = assistant.configure(target, AssistantShape(hidden_size=40, intermediate_size=24, target_head=target_head))
    own = toy.random_assistant(config)
    own = dataclasses.replace(own, head=None) if target_head else own
    drafts.save(tmp_path, config, own, dtype="float32")
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dtype"] == "float32" and "torch_dtype" not in written
    loaded = drafts.plan(Source(tmp_path), target, "float32").read()
    assert loaded.config == config
    toy.assert_same(loaded.params, own)


def fit(setup, model, rows, directory, **options):
    """Trains on the rows."""
    sources, heldout = (batches.Source(rows),), batches.Source(rows[:8].reshape(-1))
    often = Intervals(log=1, evaluate=15, checkpoint=15)
    return distill.train(setup, model.params.target, sources, heldout, directory=directory, intervals=often, **options)


@pytest.fixture(scope="module")
def task():
    """A training setup, a tiny target, and text that it wrote."""
    target, weights = TARGETS["qwen3"], target_params("qwen3")
    # Sharp distributions, so that there is something to learn.
    weights = dataclasses.replace(weights, embed=jax.device_put(4 * np.array(weights.embed)))
    starts = np.random.default_rng(0).integers(0, 61, (32, 4)).tolist()
    rows = text.complete(target, weights, starts, width=32, batch=32)
    recipe = DraftRecipe(steps=30, batch_tokens=256, length=32, learning_rate=1e-2, warmup=2, ttt_steps=2)
    setup = DraftSetup(AssistantLearner(assistant.configure(target, AssistantShape()), target), recipe, "float32")
    return setup, jspec.Model("tiny", target, Params(weights), None, ()), rows


def prompts(rows):
    return rows[:6, :5].astype(int).tolist()


@pytest.fixture(scope="module")
def trained(task, tmp_path_factory):
    """The directory and the last state of a run that is evaluated halfway and at its end."""
    setup, model, rows = task
    directory = tmp_path_factory.mktemp("whole")

    def measure(params):
        return distill.accept_length(model, setup.learner.config, params, prompts(rows), depth=2, max_new_tokens=24)

    return directory, fit(*task, directory, measure_draft=measure)


@pytest.mark.slow
def test_training_lowers_the_loss_and_lengthens_drafts(task, trained):
    directory, state = trained
    losses = [line["loss"] for line in lines(directory) if "loss" in line]
    assert len(losses) == int(state.step) == 30
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])
    first, last = (line for line in lines(directory) if "accept_length" in line)
    assert last["accept_length"] > first["accept_length"] > 1
    assert last["heldout_chain"] > first["heldout_chain"]
    setup, model, _ = task
    first = distill.init(setup, model.params.target, None)
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
    setup, model, rows = task
    other = AssistantLearner(assistant.configure(model.target, AssistantShape(reads=(1, 1))), model.target)
    with pytest.raises(ValueError, match=r"another recipe: target_layers=\[1, 1\] \(was \[0, 1\]\)"):
        fit(dataclasses.replace(setup, learner=other), model, rows, tmp_path, resume=True)


@pytest.mark.slow
def test_a_trained_assistant_drafts_losslessly(task, trained):
    setup, model, rows = task
    params = Params(model.params.target, trained[1].serve("float32"))
    drafted = dataclasses.replace(model, params=params, draft=setup.learner.config)
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


@pytest.fixture(scope="module")
def data_directory(tmp_path_factory):
    """A directory as `jspec train data` writes it, for a made-up text, with a target and its tokenizer."""
    directory = tmp_path_factory.mktemp("data")
    bpe = train_files.write(directory)
    small = dataclasses.replace(toy.TARGET, vocab_size=train_files.VOCABULARY)
    language_model.save(directory / "small", small, toy.random_params(small), dtype="float32", eos=(0,))
    tokenizer.save(bpe, directory / "small", 512)
    return directory


@pytest.mark.slow
def test_the_command_writes_an_assistant_that_loads(data_directory, tmp_path):
    common = {"data": data_directory, "target": data_directory / "small", "work": tmp_path / "work", "ttt_steps": 1}
    common |= {"rows": data_directory / "rows.npy", "rows_share": 0.5, "prompts": 2, "depth": 1, "length": 16}
    common |= {"reads": (1, 0, 1), "intermediate_size": 40, "num_heads": 2, "target_head": True}
    out = tmp_path / "assistant"
    run("frozen-kv-mtp", **common, steps=4, batch_tokens=64, out=out)
    loaded = jspec.load(data_directory / "small", draft=out, dtype="float32")
    assert isinstance(loaded.draft, Assistant) and loaded.draft.target_layers == (1, 0, 1) and loaded.draft.target_head
    assert loaded.draft.intermediate_size == 40 and loaded.draft.num_heads == 2

    final = lines(tmp_path / "work")[-1]
    assert final["step"] == 4 and len(final["acceptance_by_position"]) == 1
    served = distill.accept_length(loaded, loaded.draft, loaded.params.draft, train_files.PROMPTS[:2], depth=1)
    assert final["accept_length"] == pytest.approx(served["accept_length"], abs=0.1)
    card = (out / "README.md").read_text()
    assert "An assistant for small (frozen-KV MTP" in card and "of the target's layers 1, 0, 1, the LM head of" in card
    assert "jspec train data --out data --tokenizer small" in card and "| free | 1 | MIT |" in card
    assert "--reads 1 0 1 --intermediate-size 40 --num-heads 2 --target-head --steps 4" in card
    assert 'drafter="frozen-kv-mtp"' in card and str(tmp_path) not in card and str(data_directory) not in card


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
        assistant.configure(TARGETS[name], AssistantShape(**shape))


def test_a_head_of_clusters_cannot_be_trained():
    config = dataclasses.replace(assistant.configure(TARGETS["llama"], AssistantShape()), clusters=Clusters(61, 5))
    with pytest.raises(ValueError, match=r"clusters=Clusters\(count=61, chosen=5\): .* cannot be trained"):
        AssistantLearner(config, TARGETS["llama"])
