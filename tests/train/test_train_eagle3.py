"""Training of EAGLE-3 heads: losses equal SafeAILab's, and training equals serving."""

import dataclasses
from functools import partial
from pathlib import Path

import extras  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import planted
import pytest
from batches import read_by
from train_files import lines
from train_models import TARGET, sharp_params

import jspec
from jspec.checkpoints import drafts, source
from jspec.core.types import Params
from jspec.models import EagleHead, EagleParams, Llama, ModelParams
from jspec.models.stack import LayerParams
from jspec.train import batches, distill, draft, head, text, trainer, ttt
from jspec.train.distill import Distillation
from jspec.train.extra import TrainState
from jspec.train.head import HeadLearner
from jspec.train.recipe import DraftRecipe, HeadShape, Intervals

STEPS = 7

RECIPE = DraftRecipe(steps=30, batch_tokens=96, length=24, learning_rate=1e-2, warmup=2, ttt_steps=3)
CONFIG = HeadLearner.configure(TARGET, HeadShape(capture_layers=(1, 2, 4), draft_vocab_size=40))
LEARNER = HeadLearner(RECIPE, "float32", CONFIG, TARGET)
TWO_STEPS = dataclasses.replace(LEARNER, recipe=dataclasses.replace(RECIPE, ttt_steps=2))
OBSERVE = jax.jit(lambda target, tokens: LEARNER.observe(LEARNER.run_target(target, tokens)))
MAKE_TARGETS = jax.jit(ttt.make_targets)
INTERVALS = Intervals(log_every=1, eval_every=10, checkpoint_every=10)


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
        o=named[attention.format("o")].T,
        mlp_norm=named["midlayer.post_attention_layernorm.weight"],
        gate_up=np.concatenate([named[mlp.format(name)] for name in ("gate", "up")]).T,
        down=named[mlp.format("down")].T,
    )
    return EagleParams(
        **dict.fromkeys(("embed", "fc_bias", "fc_norms", "input_norm", "ids")),
        fc=named["fc.weight"].T,
        hidden_norm=named["midlayer.hidden_norm.weight"],
        layers=(layer,),
        norm=named["norm.weight"],
        lm_head=named["lm_head.weight"].T,
    )


@pytest.mark.slow
def test_losses_and_gradients_equal_the_authors(reference):
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2}
    target = Llama(num_layers=7, head_dim=8, max_length=64, **shape)
    config = HeadLearner.configure(target, HeadShape(draft_vocab_size=24))
    learner = HeadLearner(DraftRecipe(ttt_steps=STEPS), "float32", config, target)
    assert config.capture_layers == (2, 3, 4) and config.rms_norm_eps == 1e-5 and config.rope.theta == 10000
    frozen = ModelParams(jnp.asarray(reference["emb"]), (), np.ones(32, np.float32), None)
    tokens = jnp.asarray(reference["ids"], jnp.int32)
    targets = MAKE_TARGETS(reference["tlogits"], np.flatnonzero(reference["t2d"]).astype(np.int32))

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def run(params):
        inputs = (tokens, jnp.asarray(reference["aux"]), targets, jnp.asarray(reference["lm"]))
        found = learner.unroll(Params(frozen, params), *inputs)
        return learner.total(found.loss), found.loss

    gradient, losses = run(read_head(reference, "w:"))
    np.testing.assert_allclose(losses, reference["losses"], rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(read_head(reference, "g:")), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6 * float(abs(theirs).max()))


@pytest.fixture(scope="module")
def target():
    return sharp_params(TARGET)


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


def random_head(target, learner=LEARNER):
    """Random weights, norms included."""
    ids = np.arange(0, 60, 60 / CONFIG.draft_vocab_size).astype(np.int32)
    begun = jax.device_get(distill.init(learner, target, ids).params)
    random = np.random.default_rng(6)
    params = jax.tree.map(lambda leaf: leaf + random.normal(0, 0.2, leaf.shape).astype(np.float32), begun)
    return dataclasses.replace(params, ids=ids)


def random_tokens(batch, length):
    return np.random.default_rng(2).integers(0, 61, (batch, length), np.int32)


@pytest.mark.parametrize("changes", ({}, {"norm_output": True, "windows": (5,)}), ids=("eagle3", "eagle4"))
def test_training_equals_serving(target, changes):
    """Step k of row p is the k-th draft of a decoder whose cache holds rows 0 to p."""
    config = dataclasses.replace(CONFIG, **changes)
    learner = dataclasses.replace(LEARNER, config=config)
    params, tokens = Params(target, random_head(target, learner)), random_tokens(2, 12)
    assert (params.draft.fc_norms is not None) == config.norm_output
    hidden = OBSERVE(target, tokens)
    fused = np.array(jax.jit(config.fuse)(params.draft, hidden))
    carry, trained = jax.jit(learner.begin)(params, hidden), []
    forward, apply = jax.jit(learner.forward, static_argnums=4), jax.jit(config.apply, static_argnums=1)
    commit = jax.jit(lambda cache, *rows: cache.commit(*rows))
    for step in range(3):
        logits, carry = forward(params, tokens, hidden, carry, step)
        trained.append(jax.device_get((logits, carry[0])))
    for p in (0, 7):
        cache = config.init_cache(params.draft, 2, 12, 4)
        positions = np.arange(p + 1, dtype=np.int32)[None]
        last, count = np.full(2, p, np.int32), np.full(2, p + 1, np.int32)
        batch = read_by(tokens[:, 1 : p + 2], positions, cache, select=last)
        out = apply(params, TARGET, batch, fused[:, : p + 1])
        cache, rows = commit(cache, out.rows, np.zeros(2, np.int32), None, count), None
        for step, wanted in enumerate(trained):
            if step:
                token, at = tokens[:, p + step + 1, None], np.full((1, 1), p + step, np.int32)
                out = apply(params, TARGET, read_by(token, at, cache, count, earlier=rows), out.feature)
                rows = out.rows
            np.testing.assert_allclose(np.array(out.logits)[:, 0], wanted[0][:, p], atol=2e-5)
            np.testing.assert_allclose(np.array(out.feature)[:, 0], wanted[1][:, p], atol=2e-5)


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
    found = jax.jit(TWO_STEPS.unroll)(params, tokens, hidden, targets, ttt.text_mask(tokens))
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
    unroll = jax.jit(TWO_STEPS.unroll)
    ours = unroll(params, tokens, hidden, both_targets[0], np.ones((1, 6), np.float32))
    longer = np.pad(tokens, ((0, 0), (0, 2))), np.pad(hidden, ((0, 0), (0, 2), (0, 0)))
    mask = np.array([[1, 1, 1, 1, 1, 1, 0, 0]], np.float32)
    wanted = unroll(params, *longer, both_targets[1], mask)
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
    for size, common in ((2, [8, 9]), (61, None)):
        learner = dataclasses.replace(LEARNER, config=dataclasses.replace(CONFIG, draft_vocab_size=size))
        ids = learner.vocabulary(small)
        assert (ids if ids is None else ids.tolist()) == common


@pytest.mark.slow
def test_training_lowers_the_loss_and_keeps_the_vocabulary(target, sources, heldout, tmp_path):
    measured = []

    def measure(params):
        measured.append(params)
        return {"accept_length": 1.5}

    state = trainer.run(Distillation(LEARNER, target, sources, heldout, measure), tmp_path, intervals=INTERVALS)
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
    first = distill.init(LEARNER, target, ids)
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, first.params, state.params)))


def test_the_state_is_flaxs_train_state(target):
    state = distill.init(LEARNER, target, np.arange(40))
    assert isinstance(state, TrainState) and state.apply_fn.__func__ is HeadLearner.forward
    assert state.apply_fn.__self__ == trainer.timeless(LEARNER)
    equal = HeadLearner(dataclasses.replace(RECIPE), "float32", CONFIG, TARGET)
    again = trainer.begin(distill.DraftState, equal, state.params, ids=state.ids)
    assert jax.tree.structure(again) == jax.tree.structure(state)


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


@pytest.mark.slow
def test_an_eagle4_head_from_training_to_drafts(target, rows, tmp_path):
    plain = jspec.Model("tiny", TARGET, Params(target), None, ())
    options = {"capture_layers": (1, 2, 4), "ttt_steps": 2, "learning_rate": 1e-2, "warmup": 5}
    options |= {"norm_output": True, "sliding_window": 64}
    drafted = draft.train_draft("eagle3", plain, rows, steps=60, batch_tokens=256, progress=False, **options)
    assert drafted.draft.windows == (64,) and drafted.params.draft.fc_norms is not None
    small = drafted.with_candidates(16, rank=16)
    drafts.save(tmp_path, small.draft, small.params.draft, dtype="float32")
    read = drafts.plan(source.Source(tmp_path), TARGET, "float32").read()
    assert read.config == small.draft
    read = dataclasses.replace(small, params=Params(target, read.params))
    prompts = rows[:4, :6].astype(int).tolist()
    expected = jspec.generate(plain, prompts, drafter=None, max_new_tokens=24)
    for shape in ({"depth": 3}, {"depth": 3, "width": 4, "num_nodes": 12}):
        out = jspec.generate(read, prompts, drafter=jspec.Eagle(**shape), max_new_tokens=24)
        assert out.tokens == expected.tokens
        assert out.stats.accept_length > 2


@pytest.mark.slow
def test_masks_are_trained_as_they_draft(target, rows, tmp_path):
    """The proposals of the drafter are the choices of the unrolled steps, and the output is that of plain decoding."""
    plain = jspec.Model("tiny", TARGET, Params(target), None, ())
    options = {"capture_layers": (1, 2, 4), "ttt_steps": 3, "learning_rate": 1e-2, "warmup": 5, "draft_vocab_size": 50}
    options |= {"mask_token": 60, "num_layers": 2}
    drafted = draft.train_draft("eagle3", plain, rows, steps=60, batch_tokens=256, progress=False, **options)
    drafts.save(tmp_path, drafted.draft, drafted.params.draft, dtype="float32")
    read = drafts.plan(source.Source(tmp_path), TARGET, "float32").read()
    assert read.config == drafted.draft
    prompts = rows[:4, :6].astype(int).tolist()
    out = jspec.generate(drafted, prompts, drafter=jspec.Eagle(depth=3), max_new_tokens=16)
    assert out.tokens == jspec.generate(plain, prompts, drafter=None, max_new_tokens=16).tokens
    assert out.stats.accept_length > 1.7
    # Each step of a text, and a round after each of its beginnings.
    learner = HeadLearner(dataclasses.replace(RECIPE, ttt_steps=3), "float32", read.config, TARGET)
    text, params = jnp.asarray(rows[:1, :12], jnp.int32), Params(target, read.params)
    observed = learner.observe(learner.run_target(target, text))
    carry, steps = learner.begin(params, observed), []
    for step in range(3):
        logits, carry = learner.forward(params, text, observed, carry, step)
        steps.append(np.array(read.params.ids)[np.argmax(logits[0], axis=-1)])
    lengths = range(5, 11)
    bound, s = planted.prefilled(drafted, [rows[0, :length].tolist() for length in lengths], jspec.Eagle(depth=3), 8)
    np.testing.assert_array_equal(s.root[:, 0], rows[0, lengths])  # the target wrote them
    proposed = np.array(jax.jit(bound.draft)(params, s)[0].tokens)[:, 1:]
    np.testing.assert_array_equal(proposed, np.array(steps)[:, [length - 1 for length in lengths]].T)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_a_head_of_another_width_has_its_own_embedding(target, layout, tmp_path):
    config = HeadLearner.configure(TARGET, HeadShape(capture_layers=(1, 2, 4), hidden_size=16, draft_vocab_size=40))
    learner = HeadLearner(dataclasses.replace(RECIPE, ttt_steps=1), "float32", config, TARGET)
    ids = np.arange(10, 50)
    state = distill.init(learner, target, ids)
    assert state.params.embed.shape == (61, 16)
    tokens = random_tokens(2, 8)
    state, loss, _ = trainer.train_step(state, target, distill.make_batch(learner, tokens, None), 1, setup=learner)
    assert np.isfinite(float(loss))
    drafts.save(tmp_path, config, state.serve("float32"), layout=layout, dtype="float32", verifier="tiny")
    read = drafts.plan(source.Source(tmp_path), TARGET, "float32").read()
    assert read.config == config
    assert jax.tree.all(jax.tree.map(np.array_equal, read.params, state.serve("float32")))


def test_mismatched_arguments_raise():
    with pytest.raises(ValueError, match="capture_layers=None: a target of 4 layers has no default"):
        HeadLearner.configure(TARGET, HeadShape())
    with pytest.raises(ValueError, match=r"capture_layers=\(2, 1\): must be ascending, each between 0 and 4"):
        HeadLearner.configure(TARGET, HeadShape(capture_layers=(2, 1)))
    with pytest.raises(ValueError, match=r"capture_layers=\(2, 5\)"):
        HeadLearner.configure(TARGET, HeadShape(capture_layers=(2, 5)))
    with pytest.raises(ValueError, match="draft_vocab_size=62: must be from 1 to 61"):
        HeadLearner.configure(TARGET, HeadShape(capture_layers=(2,), draft_vocab_size=62))
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        HeadLearner.configure(TARGET, HeadShape(capture_layers=(2,), num_kv_heads=3))
    with pytest.raises(
        ValueError, match=r"length=16777216: the logits of a sequence and what .* take .* GB.* are free; must be"
    ):
        big = dataclasses.replace(TARGET, vocab_size=2**20)
        HeadLearner.make(big, HeadShape(capture_layers=(1,)), dataclasses.replace(RECIPE, length=2**24), "float32")
