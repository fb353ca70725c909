"""Training of EAGLE-3 heads: losses equal SafeAILab's, training equals serving, and runs resume exactly."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason='needs flax: pip install -e ".[train]"')
pytest.importorskip("optax", reason='needs optax: pip install -e ".[train]"')
pytest.importorskip("orbax.checkpoint", reason='needs orbax-checkpoint: pip install -e ".[train]"')

import toy  # noqa: E402
import train_files  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402
from train_files import lines, run  # noqa: E402

import jspec  # noqa: E402
from jspec.checkpoints import drafts, language_model, source  # noqa: E402
from jspec.core.types import Params  # noqa: E402
from jspec.models import EagleHead, EagleParams, Llama, LlamaParams  # noqa: E402
from jspec.models.stack import LayerParams  # noqa: E402
from jspec.train import batches, distill, draft, head, text, tokenizer, trainer, ttt  # noqa: E402
from jspec.train.distill import DraftSetup  # noqa: E402
from jspec.train.head import HeadLearner  # noqa: E402
from jspec.train.recipe import DraftRecipe, HeadShape, Intervals  # noqa: E402
from tools.pretrain import model  # noqa: E402

STEPS = 7
TARGET = dataclasses.replace(
    toy.TARGET, intermediate_size=48, num_layers=4, head_dim=8, max_length=64, tie_embeddings=True
)
RECIPE = DraftRecipe(steps=30, batch_tokens=96, length=24, learning_rate=1e-2, warmup=2, ttt_steps=3)
CONFIG = head.configure(TARGET, HeadShape(capture_layers=(1, 2, 4), draft_vocab_size=40))
LEARNER = HeadLearner(CONFIG, TARGET)
SETUP = DraftSetup(LEARNER, RECIPE, "float32")
OBSERVE = jax.jit(
    lambda setup, target, tokens: setup.learner.observe(distill.run_target(setup, target, tokens)), static_argnums=0
)
MAKE_TARGETS = jax.jit(ttt.make_targets)
UNROLL = jax.jit(ttt.unroll, static_argnums=(0, 6))
INTERVALS = Intervals(log=1, evaluate=10, checkpoint=10)


@pytest.fixture(scope="module")
def reference():
    """Random weights and inputs of a head, and the results of SafeAILab's torch layer for them: the losses of its
    training-time test (without attention mask) and the gradients of their sum weighted by 0.8^k.
    """
    with np.load(Path(__file__).parent / "ttt_ref.npz") as stored:
        return dict(stored)


def read_head(reference, prefix):
    """Arrays with the tensor names of a checkpoint, as the weights of a head."""
    named = {name.removeprefix(prefix): reference[name] for name in reference if name.startswith(prefix)}
    attention, mlp = "midlayer.self_attn.{}_proj.weight", "midlayer.mlp.{}_proj.weight"
    layer = LayerParams(
        attention_norm=named["midlayer.input_layernorm.weight"],
        qkv=np.concatenate([named[attention.format(name)] for name in "qkv"]).T,
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        o=named[attention.format("o")].T,
        o_bias=None,
        mlp_norm=named["midlayer.post_attention_layernorm.weight"],
        gate_up=np.concatenate([named[mlp.format(name)] for name in ("gate", "up")]).T,
        down=named[mlp.format("down")].T,
    )
    return EagleParams(
        embed=None,
        fc=named["fc.weight"].T,
        fc_bias=None,
        fc_norms=None,
        input_norm=None,
        hidden_norm=named["midlayer.hidden_norm.weight"],
        layers=(layer,),
        norm=named["norm.weight"],
        lm_head=named["lm_head.weight"].T,
        ids=None,
    )


@pytest.mark.slow
def test_losses_and_gradients_equal_the_authors(reference):
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2}
    target = Llama(num_layers=7, head_dim=8, max_length=64, **shape)
    config = head.configure(target, HeadShape(draft_vocab_size=24))
    assert config.capture_layers == (2, 3, 4) and config.rms_norm_eps == 1e-5 and config.rope.theta == 10000
    frozen = LlamaParams(jnp.asarray(reference["emb"]), (), np.ones(32, np.float32), None)
    tokens = jnp.asarray(reference["ids"], jnp.int32)
    targets = MAKE_TARGETS(reference["tlogits"], np.flatnonzero(reference["t2d"]).astype(np.int32))

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def run(params):
        inputs = (tokens, jnp.asarray(reference["aux"]), targets, jnp.asarray(reference["lm"]))
        found = ttt.unroll(HeadLearner(config, target), Params(frozen, params), *inputs, STEPS)
        return ttt.total(found.loss, 0.8), found.loss

    gradient, losses = run(read_head(reference, "w:"))
    np.testing.assert_allclose(losses, reference["losses"], rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(read_head(reference, "g:")), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6 * float(abs(theirs).max()))


@pytest.fixture(scope="module")
def target():
    """Random weights with a large embedding, so that the target has sharp distributions."""
    params = model.init_params(TARGET, jax.random.key(3))
    return dataclasses.replace(params, embed=jax.device_put(20 * np.array(params.embed)))


@pytest.fixture(scope="module")
def rows(target):
    """Text that the target wrote."""
    prompts = np.random.default_rng(0).integers(0, 61, (32, 4)).tolist()
    return text.complete(TARGET, target, prompts, width=24, batch=32)


@pytest.fixture(scope="module")
def sources(rows):
    return (batches.Source(rows, 0.75), batches.Source((np.arange(2000) * 7 % 61).astype(np.uint16), 0.25))


@pytest.fixture(scope="module")
def heldout(rows):
    return batches.Source(rows[:8].reshape(-1))


def random_head(target):
    """Random weights, norms included."""
    ids = np.arange(0, 60, 60 / CONFIG.draft_vocab_size).astype(np.int32)
    begun = jax.device_get(distill.init(SETUP, target, ids).params)
    random = np.random.default_rng(6)
    params = jax.tree.map(lambda leaf: leaf + random.normal(0, 0.2, leaf.shape).astype(np.float32), begun)
    return dataclasses.replace(params, ids=ids)


def random_tokens(batch, length):
    return np.random.default_rng(2).integers(0, 61, (batch, length), np.int32)


def test_training_equals_serving(target):
    """Step k of row p is the k-th draft of a decoder whose cache holds rows 0 to p."""
    params, tokens = Params(target, random_head(target)), random_tokens(2, 12)
    hidden = OBSERVE(SETUP, target, tokens)
    fused = np.array(jax.jit(CONFIG.fuse)(params.draft, hidden))
    carry, trained = jax.jit(LEARNER.begin)(params, hidden), []
    forward, apply = jax.jit(LEARNER.forward, static_argnums=4), jax.jit(CONFIG.apply, static_argnums=1)
    commit = jax.jit(lambda cache, *rows: cache.commit(*rows))
    for step in range(3):
        logits, carry = forward(params, tokens, hidden, carry, step)
        trained.append(jax.device_get((logits, carry[0])))
    for p in (0, 7):
        cache = CONFIG.init_cache(params.draft, 2, 12, 4)
        positions = np.arange(p + 1, dtype=np.int32)[None]
        last, count = np.full(2, p, np.int32), np.full(2, p + 1, np.int32)
        out = apply(params, TARGET, tokens[:, 1 : p + 2], fused[:, : p + 1], positions, cache, None, select=last)
        cache, rows = commit(cache, out.rows, np.zeros(2, np.int32), None, count), None
        for step, wanted in enumerate(trained):
            if step:
                token, at = tokens[:, p + step + 1, None], np.full((1, 1), p + step, np.int32)
                out = apply(params, TARGET, token, out.feature, at, cache, count, earlier=rows)
                rows = out.rows
            np.testing.assert_allclose(np.array(out.logits)[:, 0], wanted[0][:, p], atol=2e-5)
            np.testing.assert_allclose(np.array(out.feature)[:, 0], wanted[1][:, p], atol=2e-5)


@pytest.mark.slow
def test_masked_text_changes_nothing(target):
    params, tokens = dataclasses.replace(random_head(target), ids=None), random_tokens(2, 12)
    ids = np.arange(0, 60, 1.5).astype(np.int32)
    hidden = np.array(OBSERVE(SETUP, target, tokens))
    logits = np.random.default_rng(1).normal(size=(2, 12, 61)).astype(np.float32)
    mask = np.random.default_rng(4).integers(0, 2, (2, 12)).astype(np.float32)
    mask[:, 7:] = 0.0
    assert mask[:, :7].min() == 0

    @jax.jit
    def run(params, tokens, hidden, logits):
        def total(params):
            both = Params(target, params)
            found = ttt.unroll(LEARNER, both, tokens, hidden, ttt.make_targets(logits, ids), mask, 3)
            return ttt.total(found.loss, 0.8), found

        return jax.grad(total, has_aux=True)(params)

    gradient, found = run(params, tokens, hidden, logits)
    assert found.counted.tolist() == [int(mask[:, step:].sum()) for step in range(3)]
    # A masked token predicts nothing, and nothing reads the text after the last unmasked token.
    unread = np.pad(mask, ((0, 0), (1, 0)))[:, :12, None] == 0
    column = np.arange(12)[None]
    others = np.where(column < 8, tokens, 1), np.where(column[..., None] < 7, hidden, np.float32(3))
    other = run(params, *others, np.where(unread, logits[:, ::-1], logits))
    same = jax.tree.map(np.array_equal, (gradient, found), other)
    assert jax.tree.all(same)
    changed = run(params, np.where(column == 7, 1, tokens), hidden, logits)[1]
    assert not np.array_equal(changed.loss, found.loss)


def test_metrics_count_agreement(target):
    """With targets made of the head's own choices, some of which are then changed."""
    params, tokens = Params(target, random_head(target)), random_tokens(1, 10)
    hidden = np.random.default_rng(0).normal(size=(1, 10, 96)).astype(np.float32)
    forward = jax.jit(LEARNER.forward, static_argnums=4)
    first, carry = forward(params, tokens, hidden, jax.jit(LEARNER.begin)(params, hidden), 0)
    second, _ = forward(params, tokens, hidden, carry, 1)
    choices = [np.asarray(logits)[0].argmax(-1) for logits in (first, second)]
    wanted = np.concatenate([[0], choices[0][:-1]])
    wanted[4] = choices[1][2]
    wanted[[6, 7]] = (wanted[[6, 7]] + 1) % 40
    known = np.arange(10) != 3
    targets = ttt.Targets(np.eye(40, dtype=np.float32)[wanted][None], known[None], np.array(False))
    agreed = [[choices[k][p] == wanted[p + k + 1] and known[p + k + 1] for p in range(9 - k)] for k in range(2)]
    both = sum(a and b for a, b in zip(*agreed, strict=False))
    found = UNROLL(LEARNER, params, tokens, hidden, targets, ttt.text_mask(tokens), 2)
    assert found.agreed.tolist() == [sum(agreed[0]), sum(agreed[1])]
    assert found.chained.tolist() == [sum(agreed[0]), both] and both < sum(agreed[1])
    assert found.counted.tolist() == [9, 8]
    assert 4 <= sum(agreed[0]) <= 6


def test_a_choice_outside_the_drafts_vocabulary_does_not_count():
    logits = np.log(np.array([[[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]], np.float32))
    targets = MAKE_TARGETS(logits, np.array([0, 2]))
    np.testing.assert_allclose(targets.probs, [[[0.25, 0.75], [2 / 3, 1 / 3]]], rtol=1e-6)
    assert targets.known.tolist() == [[False, True]] and bool(targets.beyond)
    assert not bool(MAKE_TARGETS(logits, np.array([1, 2])).beyond)
    assert np.array(MAKE_TARGETS(logits, None).known).all()


@pytest.mark.parametrize("first", [0, 1])
def test_after_the_end_the_target_is_uniform(target, first):
    """If the mask includes the last token, its logits are zeros: a uniform distribution with token 0 as the choice."""
    tokens, ids = random_tokens(1, 6), np.arange(first, 40 + first, dtype=np.int32)
    random = np.random.default_rng(0)
    hidden, logits = (random.normal(size=(1, 6, width)).astype(np.float32) for width in (96, 61))
    params = Params(target, random_head(target))
    both_targets = [MAKE_TARGETS(logits, ids), MAKE_TARGETS(np.pad(logits, ((0, 0), (0, 2), (0, 0))), ids)]
    ours = UNROLL(LEARNER, params, tokens, hidden, both_targets[0], np.ones((1, 6), np.float32), 2)
    longer = np.pad(tokens, ((0, 0), (0, 2))), np.pad(hidden, ((0, 0), (0, 2), (0, 0)))
    mask = np.array([[1, 1, 1, 1, 1, 1, 0, 0]], np.float32)
    wanted = UNROLL(LEARNER, params, *longer, both_targets[1], mask, 2)
    np.testing.assert_allclose(np.array(ours.loss) * 6, np.array(wanted.loss) * 8, rtol=1e-5)
    assert ours.counted.tolist() == wanted.counted.tolist() == [6, 5]


def test_the_vocabulary_is_the_most_common_tokens():
    assert head.most_common(np.array([3, 0, 5, 5, 1, 0]), 3).tolist() == [0, 2, 3]
    assert head.most_common(np.array([3, 0, 5, 5, 1, 0]), 5).tolist() == [0, 1, 2, 3, 4]
    assert head.most_common(np.array([1, 2, 2, 2]), 2).tolist() == [1, 2]
    tokens, mask = np.array([[1, 2, 2], [5, 5, 5]], np.uint16), np.array([[1, 1, 0], [0, 0, 1]])
    assert head.count_tokens(tokens, 6).tolist() == [0, 1, 2, 0, 0, 3]
    assert head.count_tokens(tokens, 6, mask).tolist() == [0, 1, 1, 0, 0, 1]
    long = np.arange(200_000, dtype=np.int64) % 3
    assert head.count_tokens(long, 4).tolist() == [66667, 66667, 66666, 0]
    small = (batches.Source(np.array([9, 9, 8], np.uint16), 0.8), batches.Source(np.full(100, 7, np.uint16), 0.2))
    assert head.vocabulary(dataclasses.replace(CONFIG, draft_vocab_size=2), small).tolist() == [8, 9]
    assert head.vocabulary(head.configure(TARGET, HeadShape(capture_layers=(1,))), small) is None


@pytest.mark.slow
def test_training_lowers_the_loss_and_keeps_the_vocabulary(target, sources, heldout, tmp_path):
    measured = []

    def measure(params):
        measured.append(params)
        return {"accept_length": 1.5}

    state = distill.train(
        SETUP, target, sources, heldout, directory=tmp_path, intervals=INTERVALS, measure_draft=measure
    )
    losses = [line["loss"] for line in lines(tmp_path) if "loss" in line]
    assert int(state.step) == len(losses) == RECIPE.steps
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:3])
    found = [line for line in lines(tmp_path) if "heldout_agreement" in line]
    assert found[-1]["heldout_chain"] > found[0]["heldout_chain"] and len(found[-1]["heldout_loss"]) == 3
    assert found[-1]["accept_length"] == 1.5 and len(measured) == len(found)
    # Weights that were served early are still there, though the state of that step was donated.
    assert float(abs(measured[0].fc - measured[-1].fc).max()) > 0
    share = found[-1]["heldout_agreement"]
    assert found[-1]["heldout_estimate"] == pytest.approx(1 + sum(np.cumprod(share)))

    ids = LEARNER.vocabulary(sources)
    assert state.ids.dtype == jnp.int32 and state.ids.tolist() == ids.tolist() == measured[-1].ids.tolist()
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
    assert state.params.ids is None and state.params.embed is None
    first = distill.init(SETUP, target, ids)
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, first.params, state.params)))


def test_the_state_is_flaxs_train_state(target):
    state = distill.init(SETUP, target, np.arange(40))
    assert isinstance(state, TrainState) and state.apply_fn == LEARNER.forward
    equal = DraftSetup(HeadLearner(CONFIG, TARGET), dataclasses.replace(RECIPE), "float32")
    again = trainer.begin(distill.DraftState, equal, state.params, ids=state.ids)
    assert jax.tree.structure(again) == jax.tree.structure(state)


@pytest.mark.slow
def test_resuming_continues_exactly(target, sources, heldout, tmp_path):
    def train(name, **options):
        return distill.train(SETUP, target, sources, heldout, directory=tmp_path / name, intervals=INTERVALS, **options)

    uninterrupted = train("whole", stop_after=12)
    train("parts", stop_after=7)
    resumed = train("parts", resume=True, stop_after=12)
    assert jax.tree.all(jax.tree.map(np.array_equal, uninterrupted, resumed))
    losses = [[line["loss"] for line in lines(tmp_path / name) if "loss" in line] for name in ("whole", "parts")]
    assert losses[0] == losses[1]
    other = HeadLearner(dataclasses.replace(CONFIG, capture_layers=(0, 2, 4)), TARGET)
    with pytest.raises(ValueError, match=r"another recipe: capture_layers=\[0, 2, 4\] \(was \[1, 2, 4\]\)"):
        distill.train(
            DraftSetup(other, RECIPE, "float32"), target, sources, heldout, directory=tmp_path / "parts", resume=True
        )


@pytest.mark.slow
def test_a_head_trained_in_memory_drafts_losslessly(target, rows):
    plain = jspec.Model("tiny", TARGET, Params(target), None, ())
    options = {"capture_layers": (1, 2, 4), "ttt_steps": 2, "learning_rate": 1e-2, "warmup": 5, "draft_vocab_size": 50}
    drafted = draft.train_draft("eagle3", plain, rows, steps=60, batch_tokens=256, progress=False, **options)
    assert isinstance(drafted.draft, EagleHead) and drafted.params.target is target
    prompts = rows[:4, :6].astype(int).tolist()
    wanted = jspec.generate(plain, prompts, drafter=None, max_new_tokens=24)
    out = jspec.generate(drafted, prompts, drafter=jspec.Eagle(depth=3), max_new_tokens=24)
    assert out.tokens == wanted.tokens
    assert out.stats.accept_length > 2


@pytest.fixture(scope="module")
def data_directory(tmp_path_factory):
    """A directory as `jspec train data` writes it, for a made-up text, with a target and its tokenizer."""
    directory = tmp_path_factory.mktemp("data")
    bpe = train_files.write(directory)
    small = dataclasses.replace(TARGET, vocab_size=280, max_length=256)
    language_model.save(
        directory / "small", small, model.init_params(small, jax.random.key(0)), dtype="float32", eos=(0,)
    )
    tokenizer.save(bpe, directory / "small", 256)
    return directory


@pytest.mark.slow
def test_the_command_writes_a_head_that_loads(data_directory, tmp_path):
    common = {"data": data_directory, "target": data_directory / "small", "capture_layers": (1, 2, 4), "ttt_steps": 2}
    common |= {"steps": 4, "batch_tokens": 64, "length": 16, "draft_vocab_size": 200, "depth": 2, "prompts": 2}
    common |= {"work": tmp_path / "work", "rows": data_directory / "rows.npy", "rows_share": 0.5}
    common |= {"intermediate_size": 40, "num_kv_heads": 1}
    out = tmp_path / "head"
    run("eagle3", **common, out=out, stop_after=2)
    run("eagle3", **common, out=out, resume=True, layout="speculators")
    loaded = jspec.load(data_directory / "small", draft=out, dtype="float32")
    assert isinstance(loaded.draft, EagleHead)
    assert loaded.draft.draft_vocab_size == 200 and loaded.draft.capture_layers == (1, 2, 4)
    assert loaded.draft.intermediate_size == 40 and loaded.draft.num_kv_heads == 1
    assert json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]["name_or_path"] == "small"
    assert loaded.params.draft.ids.tolist() == np.unique(loaded.params.draft.ids).tolist()

    final = lines(tmp_path / "work")[-1]
    assert final["step"] == 4 and len(final["acceptance_by_position"]) == 2
    prompts = ["def f0(a, b):", "def f1(a, b):"]
    served = distill.accept_length(loaded, loaded.draft, loaded.params.draft, prompts, depth=2)
    assert final["accept_length"] == pytest.approx(served["accept_length"], abs=0.1)
    card = (out / "README.md").read_text()
    assert "An EAGLE-3 head (arXiv 2503.01840) for small" in card and "200 of the target's 280 tokens" in card
    assert "jspec train data --out data --tokenizer small" in card and "| free | 1 | MIT |" in card
    assert "--capture-layers 1 2 4 --intermediate-size 40 --num-kv-heads 1 --draft-vocab-size 200 --steps 4" in card
    assert str(tmp_path) not in card and str(data_directory) not in card


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_a_head_of_another_width_has_its_own_embedding(target, layout, tmp_path):
    config = head.configure(TARGET, HeadShape(capture_layers=(1, 2, 4), hidden_size=16, draft_vocab_size=40))
    setup = DraftSetup(HeadLearner(config, TARGET), dataclasses.replace(RECIPE, ttt_steps=1), "float32")
    ids = np.arange(10, 50)
    state = distill.init(setup, target, ids)
    assert state.params.embed.shape == (61, 16)
    tokens = random_tokens(2, 8)
    state, loss, _ = trainer.train_step(state, target, distill.make_batch(setup, tokens, None), 1, setup=setup)
    assert np.isfinite(float(loss))
    drafts.save(tmp_path, config, state.serve("float32"), layout=layout, dtype="float32", verifier="tiny")
    read = drafts.plan(source.Source(tmp_path), TARGET, "float32").read()
    assert read.config == config
    assert jax.tree.all(jax.tree.map(np.array_equal, read.params, state.serve("float32")))


def test_mismatched_arguments_raise(target, sources, heldout, data_directory, tmp_path):
    def train(**changes):
        setup = DraftSetup(LEARNER, dataclasses.replace(RECIPE, **changes), "float32")
        distill.train(setup, target, sources, heldout, directory=tmp_path / "w")

    with pytest.raises(ValueError, match="length=65: must be between 3 and 64, the target's context"):
        train(length=65)
    with pytest.raises(ValueError, match="steps=1: must be from 2 to"):
        train(steps=1)
    with pytest.raises(ValueError, match="ttt_steps=0: must be from 1 to 64"):
        train(ttt_steps=0)
    with pytest.raises(ValueError, match="capture_layers=None: a target of 4 layers has no default"):
        head.configure(TARGET, HeadShape())
    with pytest.raises(ValueError, match=r"capture_layers=\(2, 1\): must be ascending, each between 0 and 4"):
        head.configure(TARGET, HeadShape(capture_layers=(2, 1)))
    with pytest.raises(ValueError, match=r"capture_layers=\(2, 5\)"):
        head.configure(TARGET, HeadShape(capture_layers=(2, 5)))
    with pytest.raises(ValueError, match="draft_vocab_size=62: must be from 1 to 61"):
        head.configure(TARGET, HeadShape(capture_layers=(2,), draft_vocab_size=62))
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        head.configure(TARGET, HeadShape(capture_layers=(2,), num_kv_heads=3))
    with pytest.raises(
        ValueError, match=r"length=16777216: the logits of a sequence and what .* take .* GB.* are free; must be"
    ):
        big = dataclasses.replace(TARGET, vocab_size=2**20)
        distill.set_up(HeadLearner(CONFIG, big), dataclasses.replace(RECIPE, length=2**24), "float32")
    common = {"data": data_directory, "steps": 4, "work": tmp_path / "w", "out": tmp_path / "o"}
    with pytest.raises(ValueError, match="the tokenizer is not that of bundled:python-tiny"):
        run("eagle3", **common, target="bundled:python-tiny")


def test_prompts_that_cannot_be_evaluated_are_refused(data_directory):
    plain = jspec.load(data_directory / "small", dtype="float32")
    config = head.configure(plain.target, HeadShape(capture_layers=(1, 2, 4), draft_vocab_size=40))
    distill.check_evaluation(plain, config, train_files.PROMPTS, 5)
    for prompts in (["", "x"], ["x", "def f(a):" * 200]):
        with pytest.raises(
            ValueError, match=r"held-out prompt [01] has \d+ tokens: must be from 1 to 128, so that 128"
        ):
            distill.check_evaluation(plain, config, prompts, 5)


INVALID = [
    ({"kind": "eagle"}, ValueError, "kind='eagle': must be one of eagle3, dspark, frozen-kv-mtp"),
    ({"model": "small"}, TypeError, "model is of type str: must be a jspec.Model"),
    ({"sequences": [[1, 2, 3], [4]]}, ValueError, "sequences: is ragged"),
    ({"sequences": np.zeros((3, 9))}, TypeError, r"sequences: is float64\[3, 9\]; must be token ids"),
    ({"sequences": np.zeros(9, int)}, ValueError, "sequences: .* must have tokens along 2 axes"),
    ({"sequences": np.zeros((0, 9), int)}, ValueError, "sequences: "),
    ({"sequences": np.zeros((3, 1), int)}, ValueError, "a sequence must have at least 2 tokens"),
    ({"sequences": np.full((3, 9), 61)}, ValueError, "sequences: holds token 61, but the model has vocab_size=61"),
    ({"sequences": np.full((3, 9), -1)}, ValueError, "sequences: holds token -1"),
    ({"sequences": np.zeros((3, 65), int)}, ValueError, "65: must be between 3 and 64, the target's context"),
    ({"steps": 1}, ValueError, "steps=1: must be from 2"),
    ({"steps": 2.0}, TypeError, "steps=2.0: must be an int"),
    ({"steps": True}, TypeError, "steps=True: must be an int"),
    ({"batch_tokens": 0}, ValueError, "batch_tokens=0"),
    ({"batch_tokens": "8"}, TypeError, "batch_tokens='8'"),
    ({"capture_layers": 2}, TypeError, "capture_layers=2: must be a list of int"),
    ({"capture_layers": (1.0,)}, TypeError, r"capture_layers\[0\]=1.0: must be an int"),
    ({"capture_layers": ()}, ValueError, r"capture_layers=\(\)"),
    ({"draft_vocab_size": 0}, ValueError, "draft_vocab_size=0: must be at least 1"),
    ({"draft_vocab_size": 2.5}, TypeError, "draft_vocab_size=2.5"),
    ({"progress": "no"}, TypeError, "progress='no': must be True or False"),
    (
        {"learning_rte": 1e-3},
        TypeError,
        "learning_rte=0.001: no such argument; recipe options are clip, decay, learning",
    ),
    ({"length": 9}, TypeError, "length=9: no such argument"),
    ({"learning_rate": float("nan")}, ValueError, "learning_rate=nan: must be above 0"),
    ({"learning_rate": None}, TypeError, "learning_rate=None: must be a number"),
    ({"clip": 0.0}, ValueError, "clip=0.0"),
    ({"seed": -1}, ValueError, "seed=-1: must be from 0"),
    ({"seed": 2**32}, ValueError, "seed=4294967296"),
    ({"decay": 1.5}, ValueError, "decay=1.5: must be from 0 to 1"),
    ({"ttt_steps": 0}, ValueError, "ttt_steps=0"),
    ({"ttt_steps": 65}, ValueError, "ttt_steps=65"),
    ({"warmup": -1}, ValueError, "warmup=-1"),
    ({"weight_decay": float("inf")}, ValueError, "weight_decay=inf"),
]


def test_invalid_arguments_of_the_training_in_memory(target):
    """Each is refused before anything is compiled."""
    plain = jspec.Model("tiny", TARGET, Params(target), None, ())
    good = {
        "kind": "eagle3",
        "model": plain,
        "sequences": np.zeros((3, 9), np.int64),
        "steps": 2,
        "capture_layers": (1,),
        "progress": False,
    }
    for changes, error, message in INVALID:
        with pytest.raises(error, match=message):
            draft.train_draft(**good | changes)
