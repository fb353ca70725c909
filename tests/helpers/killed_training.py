"""Trains a draft in a directory, and kills this process at one of the file operations there.

Usage: killed_training.py DIRECTORY POINT [--resume [LIMIT]]. POINT counts the operations; with -1 the run ends by
itself. Prints the number of these operations if it gets to the end. With --resume it continues a run.
"""

import os
import pathlib
import resource
import signal
import sys

import numpy as np
import toy
from train_models import TINY as TARGET

from jspec.train import batches, trainer
from jspec.train.distill import Distillation
from jspec.train.head import HeadLearner
from jspec.train.recipe import DraftRecipe, HeadShape, Intervals

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir"}
STEPS = 9


def train(directory, resume=False):
    """A run whose first checkpoint comes before its first line of metrics. Returns its last state."""
    shape = HeadShape(capture_layers=(1,), draft_vocab_size=40)
    recipe = DraftRecipe(steps=STEPS, batch_tokens=64, length=16, warmup=2, ttt_steps=1)
    learner, text = HeadLearner.make(TARGET, shape, recipe, "float32"), (np.arange(2000) * 7 % 61).astype(np.uint16)
    sources, heldout = (batches.Source(text),), batches.Source(text[:200])
    task = Distillation(learner, toy.random_params(TARGET, seed=1), sources, heldout)
    return trainer.run(
        task, directory, resume=resume, intervals=Intervals(log_every=4, eval_every=6, checkpoint_every=3)
    )


def main(directory, point, resume, limit=None):
    """limit: the size in bytes beyond which no file can grow."""
    count = 0

    def killing(event, args):
        nonlocal count
        if event in EVENTS and args and str(args[0]).startswith(str(directory)):
            if count == point:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.addaudithook(killing)
    train(directory, resume)
    print(count)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), "--resume" in sys.argv, *map(int, sys.argv[4:]))
