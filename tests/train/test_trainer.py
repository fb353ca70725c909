"""The loop of all trainings."""

import math
import types

import pytest

pytest.importorskip("flax", reason='needs flax: pip install -e ".[train]"')
pytest.importorskip("optax", reason='needs optax: pip install -e ".[train]"')
pytest.importorskip("orbax.checkpoint", reason='needs orbax-checkpoint: pip install -e ".[train]"')

from jspec.train import trainer  # noqa: E402
from jspec.train.recipe import Intervals, Recipe  # noqa: E402


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_a_training_that_diverges_ends(loss, norm, tmp_path):
    """Before it writes a checkpoint."""
    with pytest.raises(
        ValueError, match=r"at step 3: the training diverged; .* lower learning_rate \(no checkpoint was"
    ):
        task = trainer.Task(
            init=lambda: types.SimpleNamespace(step=0),
            advance=lambda state, step: (state, loss, norm) if step == 2 else (state, 1.0, 1.0),
            evaluate=lambda state: {},
            recipe=Recipe(steps=9),
            record={},
        )
        trainer.run(task, directory=tmp_path, intervals=Intervals(log=3, evaluate=9, checkpoint=3))
    assert not (tmp_path / "checkpoints").exists()
