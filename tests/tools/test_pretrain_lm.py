"""Training of language models in seconds on a CPU: it learns, resumes exactly, distills, and writes checkpoints."""

import dataclasses
import functools
import json
import math

import extras  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_files
from train_files import lines, pretrain, run
from train_models import ONE_LAYER as MODEL

from jspec.checkpoints import language_model, llama
from jspec.core import tree
from jspec.train import batches, trainer
from jspec.train import tokenizer as files
from jspec.train.extra import TrainState, ocp
from jspec.train.recipe import Intervals
from jspec.train.trainer import State
from tools.pretrain import lm, model, objective
from tools.pretrain.lm import Pretraining
from tools.pretrain.objective import LmRecipe, LmSetup

DRAFT = dataclasses.replace(MODEL, hidden_size=16, qk_norm=False, tie_embeddings=False)
RECIPE = LmRecipe(steps=12, batch_tokens=128, length=16, learning_rate=1e-2, warmup=2)
EVERY_FEW_STEPS = Intervals(log_every=1, eval_every=6, checkpoint_every=4)
LOGITS = jax.jit(model.logits, static_argnums=(0, 3))


@pytest.fixture(scope="module")
def sources():
    """A text in which each token determines the next."""
    return (batches.Source((np.arange(2000) * 7 % 61).astype(np.uint16)),)


@pytest.fixture(scope="module")
def heldout():
    return lm.Heldout(batches.Source((np.arange(600) * 7 % 61).astype(np.uint16)), np.full(61, 2, np.int32))


def train(setup, sources, heldout, directory, teacher=None, **options):
    task = Pretraining(setup, sources, heldout, teacher)
    return trainer.run(task, directory, intervals=EVERY_FEW_STEPS, **options)


def setup_for(config=MODEL, recipe=RECIPE, teacher=None):
    return LmSetup(recipe, "float32", config, teacher)


@pytest.mark.slow(unless="1-llama")
@pytest.mark.parametrize("config", [MODEL, DRAFT], ids=["qwen3-tied", "llama-untied"])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_training_forward_equals_the_models(config, layers):
    config, length = dataclasses.replace(config, num_layers=layers), 14 + layers
    params = model.init_params(config, jax.random.key(1))
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, (3, length), np.int32)

    @jax.jit
    def serve(params, tokens):
        return config.forward(params, tree.chain(tokens), config.init_cache(params, 3, length, 4), None).logits

    wanted = serve(params, tokens)
    with jax.default_matmul_precision("highest"):
        logits = LOGITS(config, params, tokens, "float32")
    np.testing.assert_allclose(logits, wanted, atol=1e-5)


@pytest.mark.slow
def test_the_loss_falls_in_the_metrics(sources, heldout, tmp_path):
    recipe = dataclasses.replace(RECIPE, steps=40)
    state = train(setup_for(recipe=recipe), sources, heldout, tmp_path)
    losses = [line["loss"] for line in lines(tmp_path) if "loss" in line]
    assert int(state.step) == len(losses) == 40
    assert losses[0] == pytest.approx(math.log(61), abs=0.5)
    assert losses[-1] < 0.5 * losses[0]
    evaluations = [line["heldout_bits_per_byte"] for line in lines(tmp_path) if "heldout_bits_per_byte" in line]
    assert evaluations[-1] < evaluations[0]
    # The training text repeats itself, so held-out windows look the same.
    assert evaluations[-1] == pytest.approx(losses[-1] / math.log(2) / 2, rel=0.5)


@pytest.mark.slow
def test_resuming_continues_exactly(sources, heldout, tmp_path):
    setup = setup_for()
    uninterrupted = train(setup, sources, heldout, tmp_path / "whole")
    train(setup, sources, heldout, tmp_path / "parts", stop_after=7)
    resumed = train(setup, sources, heldout, tmp_path / "parts", resume=True)
    # A GPU adds the gradients of an embedding row in varying order.
    tolerance = 1e-3 if jax.default_backend() == "gpu" else 0
    close = {"atol": tolerance, "rtol": tolerance, "equal_nan": False}
    jax.tree.map(functools.partial(np.testing.assert_allclose, **close), uninterrupted, resumed)
    whole, parts = ({line["step"]: line.get("loss") for line in lines(tmp_path / name)} for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    losses = [[line["loss"] for line in lines(tmp_path / name) if "loss" in line] for name in ("whole", "parts")]
    np.testing.assert_allclose(losses[0], losses[1], **close)
    seconds = [line["seconds"] for line in lines(tmp_path / "parts")]
    assert seconds == sorted(seconds)


@pytest.mark.slow
def test_distillation_brings_the_draft_closer_to_its_teacher(sources, heldout, tmp_path):
    teacher = model.init_params(MODEL, jax.random.key(5))
    teacher = dataclasses.replace(teacher, embed=20 * teacher.embed)
    recipe = dataclasses.replace(RECIPE, steps=40, cross_entropy=0.01)
    setup = setup_for(DRAFT, recipe, MODEL)
    before = lm.evaluate(objective.init(setup).params, heldout, setup, teacher)
    train(setup, sources, heldout, tmp_path, teacher)
    after = lines(tmp_path)[-1]
    assert after["heldout_divergence"] < 0.5 * before["heldout_divergence"]
    assert after["heldout_agreement"] > 0.5 > before["heldout_agreement"]


@pytest.mark.slow
def test_the_state_is_flaxs_train_state():
    """`apply_fn` is the forward, and states of equal setups have the same structure."""
    state = objective.init(setup_for())
    assert isinstance(state, TrainState)
    tokens = np.arange(8, dtype=np.int32)[None]
    # One is compiled as a whole and the other is not, so they may differ by rounding.
    wanted = LOGITS(MODEL, state.params, tokens, "float32")
    np.testing.assert_allclose(state.apply_fn(state.params, tokens), wanted, rtol=1e-5, atol=1e-6)
    again = trainer.begin(State, setup_for(recipe=dataclasses.replace(RECIPE)), state.params)
    assert jax.tree.structure(again) == jax.tree.structure(state)


def test_divergence_and_cross_entropy():
    p, q = jnp.array([[[0.5, 0.25, 0.25]]]), jnp.array([[[0.25, 0.25, 0.5]]])
    wanted = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert objective.divergence(jnp.log(p), jnp.log(q))[0, 0] == pytest.approx(wanted, abs=1e-6)
    assert objective.divergence(jnp.log(p), jnp.log(p) + 3)[0, 0] == pytest.approx(0, abs=1e-6)
    assert objective.cross_entropy(jnp.log(q), jnp.array([[2]]))[0, 0] == pytest.approx(math.log(2), abs=1e-6)


def test_bits_per_byte_of_a_uniform_model(heldout):
    params = jax.tree.map(np.zeros_like, model.init_params(MODEL, jax.random.key(0)))
    result = lm.evaluate(params, heldout, setup_for())
    assert result["heldout_bits_per_byte"] == pytest.approx(math.log2(61) / 2, rel=1e-5)
    assert "heldout_agreement" not in result


def test_sizes_of_the_bundled_shapes():
    sizes = {
        name: sum(
            leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda c=c: model.init_params(c, jax.random.key(0))))
        )
        for name, c in model.SHAPES.items()
    }
    assert 8e6 < sizes["python-small"] < 12e6
    assert 0.9e6 < sizes["python-tiny"] < 1.3e6
    assert all(config.max_length >= 1024 for config in model.SHAPES.values())


@pytest.fixture(scope="module")
def data_directory(tmp_path_factory):
    """A directory as `jspec train data` writes it, for a made-up text."""
    directory = tmp_path_factory.mktemp("data")
    train_files.write(directory)
    for name, config in (("small", MODEL), ("tiny", DRAFT)):
        (directory / name).mkdir()
        described = llama.describe(dataclasses.replace(config, vocab_size=280))
        (directory / name / "config.json").write_text(json.dumps(described))
    return directory


@pytest.mark.slow
def test_commands_write_models_that_load(data_directory, tmp_path):
    common = {"data": data_directory, "steps": 4, "batch_tokens": 64, "length": 16}
    small, tiny, written = tmp_path / "small", tmp_path / "tiny", tmp_path / "rows.npy"
    pretrain("lm", **common, work=tmp_path / "w1", out=small, config=data_directory / "small", stop_after=2)
    pretrain("lm", **common, work=tmp_path / "w1", out=small, config=data_directory / "small", resume=True)
    run("text", model=small, prompts=data_directory / "train_prompts.json", out=written, width=17, rows=3)
    assert np.load(written).shape == (3, 17)
    distilled = {"config": data_directory / "tiny", "teacher": small, "rows": written, "rows_share": 0.25}
    pretrain("lm", **common, work=tmp_path / "w2", out=tiny, **distilled)

    # Rows of unknown origin, without a teacher.
    unknown = {"config": data_directory / "small", "rows": written, "rows_share": 0.25}
    pretrain("lm", **common, work=tmp_path / "w3", out=tmp_path / "o3", **unknown)
    card = (tmp_path / "o3" / "README.md").read_text()
    assert "25% of the batches are from rows.npy, 3 texts of 17 tokens" in card and "jspec train text" not in card

    loaded = language_model.load(tiny, dtype="float32")
    assert loaded.config == dataclasses.replace(DRAFT, vocab_size=280) and loaded.eos == (0,)
    recipe = LmRecipe(steps=4, batch_tokens=64, length=16)
    with ocp.CheckpointManager((tmp_path / "w2" / "checkpoints").resolve()) as manager:
        like = jax.eval_shape(lambda: objective.init(setup_for(loaded.config, recipe)))
        trained = manager.restore(4, args=ocp.args.StandardRestore(like)).params
    tokens = np.arange(16, dtype=np.int32)[None]
    rounded = jax.tree.map(lambda leaf: np.array(leaf).astype(jnp.bfloat16).astype(np.float32), trained)
    wanted = LOGITS(loaded.config, rounded, tokens, "float32")
    np.testing.assert_allclose(LOGITS(loaded.config, loaded.params, tokens, "float32"), wanted, atol=1e-5)

    card = (tiny / "README.md").read_text()
    assert "bits per byte" in card and "| apart | 1 | MIT |" in card and "KL divergence to small" in card
    assert "jspec train text --model small" in card and "--rows 3 --width 17" in card and "--steps 4" in card
    assert "text that the target wrote greedily itself" in card
    assert str(tmp_path) not in card
    assert files.load(tiny).get_vocab() == files.load(data_directory).get_vocab()


def test_mismatched_arguments_raise(sources, heldout, tmp_path):
    def check(**changes):
        Pretraining(setup_for(**changes), sources, heldout)

    with pytest.raises(ValueError, match="length=33: exceeds the model's context of 32 tokens"):
        check(recipe=dataclasses.replace(RECIPE, length=33))
    with pytest.raises(ValueError, match="the teacher's vocabulary has 60 tokens and the model's 61"):
        check(teacher=dataclasses.replace(MODEL, vocab_size=60))
    with pytest.raises(ValueError, match="exceeds the teacher's context of 8 tokens"):
        check(teacher=dataclasses.replace(MODEL, max_length=8))
    with pytest.raises(ValueError, match="vocab_size=64: must be 61, the tokenizer's vocabulary"):
        check(config=dataclasses.replace(MODEL, vocab_size=64))
    with pytest.raises(ValueError, match="steps=1: must be from 2 to"):
        check(recipe=dataclasses.replace(RECIPE, steps=1))


@pytest.mark.slow
def test_resume_errors(sources, heldout, tmp_path):
    def run_lm(recipe=RECIPE, **options):
        train(setup_for(recipe=recipe), sources, heldout, tmp_path, **options)

    with pytest.raises(FileNotFoundError, match="no checkpoint to resume from"):
        run_lm(resume=True)
    run_lm(stop_after=2)
    with pytest.raises(FileExistsError, match="has a checkpoint of step 2; resume"):
        run_lm()
    with pytest.raises(ValueError, match=r"another recipe: seed=1 \(was 0\)"):
        run_lm(recipe=dataclasses.replace(RECIPE, seed=1), resume=True)
    with pytest.raises(ValueError, match="stop_after=1: must be at least 2, the step of the checkpoint"):
        run_lm(resume=True, stop_after=1)
    (text,), before = sources, (tmp_path / "metrics.jsonl").read_text()
    for others, message in (
        ((batches.Source(text.tokens[::-1]),), r"another recipe: sources\[0\]: sha256=\w+ \(was \w+\)$"),
        ((text, batches.Source(text.tokens, 0.5, name="--rows")), r"--rows: share=0.5 \(was None\), --rows: shape="),
    ):
        with pytest.raises(ValueError, match=message):
            train(setup_for(), others, heldout, tmp_path, resume=True)
    other = lm.Heldout(batches.Source(heldout.source.tokens[:300]), heldout.byte_counts)
    with pytest.raises(ValueError, match=r"another recipe: heldout=\w+ \(was \w+\)$"):
        train(setup_for(), sources, other, tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_command_errors_name_what_is_missing(data_directory, tmp_path):
    common = {"steps": 4, "work": tmp_path / "w", "out": tmp_path / "o"}
    with pytest.raises(FileNotFoundError, match="absent"):
        pretrain("lm", data=tmp_path / "absent", shape="python-tiny", **common)
    with pytest.raises(ValueError, match="exactly one of --shape and --config"):
        pretrain("lm", data=data_directory, **common)
    with pytest.raises(ValueError, match="absent: no such directory"):
        pretrain("lm", data=data_directory, config=data_directory / "tiny", teacher=tmp_path / "absent", **common)
