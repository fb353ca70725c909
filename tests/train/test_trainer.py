"""The loop of all trainings."""

import dataclasses
import math
import types

import extras  # noqa: F401
import jax
import numpy as np
import pytest
from train_models import TARGET

from jspec.train import distill, trainer
from jspec.train.kinds import KINDS
from jspec.train.recipe import Intervals, Recipe
from tools.pretrain import model


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_a_training_that_diverges_ends(loss, norm, tmp_path):
    """Before it writes a checkpoint."""
    with pytest.raises(
        ValueError, match=r"at step 3: the training diverged; .* lower learning_rate \(no checkpoint was"
    ):
        task = types.SimpleNamespace(
            init=lambda: types.SimpleNamespace(step=0),
            advance=lambda state, step: (state, loss, norm) if step == 2 else (state, 1.0, 1.0),
            evaluate=lambda state: {},
            recipe=Recipe(steps=9),
            record={},
        )
        trainer.run(task, tmp_path, intervals=Intervals(log_every=3, eval_every=9, checkpoint_every=3))
    assert not (tmp_path / "checkpoints").exists()


SHAPES = {"eagle3": {"draft_vocab_size": 40}, "dspark": {"block_size": 4, "markov_rank": 6}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("most", [1, 24, 64, 100])
def test_a_step_in_chunks_is_that_of_the_whole_batch(kind, most):
    """Whatever divides the batch of 6 sequences, with sequences that count differently and a sample of anchors."""
    shape = KINDS[kind].shape(capture_layers=(1, 2, 4), **SHAPES[kind])
    recipe = KINDS[kind].recipe(steps=3, batch_tokens=96, length=16, warmup=0)
    learner = KINDS[kind].load().make(TARGET, shape, recipe, "float32")
    rng = np.random.default_rng(0)
    texts, mask = rng.integers(0, 61, (6, 16)).astype(np.int32), rng.integers(0, 2, (6, 16)).astype(np.float32)
    mask[0, 2:] = 0
    params = model.init_params(TARGET, jax.random.key(0))
    results = []
    for chunk in (None, most):
        chunked = dataclasses.replace(learner, chunk_tokens=chunk)
        ids = None if kind == "dspark" else np.arange(10, 50)
        state = distill.init(chunked, params, ids)
        state, loss, norm = trainer.train_step(
            state, params, distill.make_batch(learner, texts, mask), 0, setup=chunked
        )
        results.append(jax.device_get((loss, norm, state.opt_state[1][0].mu)))
    whole, parts = map(jax.tree.leaves, results)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
