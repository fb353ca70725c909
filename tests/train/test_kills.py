"""A training that is killed and resumed ends with the weights of one that is not killed, byte for byte."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys

import extras  # noqa: F401
import jax
import killed_training
import numpy as np
import pytest

from jspec.train import run_directory

pytestmark = [
    pytest.mark.slow,
    # A GPU adds the gradients of an embedding row in varying order.
    pytest.mark.skipif(jax.default_backend() == "gpu", reason="bit for bit on CPUs only"),
]
AS_SHIPPED = True  # as the processes that are started here
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The last state of an uninterrupted run, and its metrics."""
    directory = tmp_path_factory.mktemp("whole")
    return killed_training.train(directory), metrics(directory)


def metrics(directory):
    """The lines of metrics without their times."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def finish(directory):
    """Continues a run, or starts it where it has no checkpoint."""
    try:
        return killed_training.train(directory, resume=True)
    except FileNotFoundError as error:
        assert "no checkpoint to resume from; train without resume" in str(error)
        return killed_training.train(directory)


def assert_whole(directory, whole):
    state, lines = whole
    finished = finish(directory)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), state, finished))
    assert metrics(directory) == lines


def test_every_moment_of_a_run_can_be_continued(whole, tmp_path, monkeypatch):
    """The directory as it is before each operation that changes it, and in the middle of each line of metrics."""
    directory, moments = tmp_path / "run", []

    def keep(cut=0):
        moment = shutil.copytree(directory, tmp_path / f"moment-{len(moments)}")
        path = moment / "metrics.jsonl"
        if cut and path.exists():
            path.write_bytes(path.read_bytes()[:-cut])
        moments.append(moment)

    def kept_before(function, cut=0):
        def call(*args, **kwargs):
            if directory.exists():
                keep()
            result = function(*args, **kwargs)
            if cut:
                keep(cut)
            return result

        return call

    with monkeypatch.context() as patch:
        for name in ("replace", "rename", "fsync"):
            patch.setattr(os, name, kept_before(getattr(os, name)))
        patch.setattr(run_directory.RunDirectory, "log", kept_before(run_directory.RunDirectory.log, cut=7))
        killed_training.train(directory)
    assert len(moments) > 60
    for moment in random.Random(0).sample(moments, 40):
        assert_whole(moment, whole)


@pytest.fixture(scope="module")
def num_operations(tmp_path_factory):
    out = child(tmp_path_factory.mktemp("counted") / "run", -1)
    assert out.returncode == 0, out.stderr
    return int(out.stdout.split()[-1])


def child(directory, point, *options):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, killed_training.__file__, str(directory), str(point), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.parametrize("seed", range(4))
def test_killed_processes(seed, num_operations, whole, tmp_path):
    """The process itself is killed, twice: in a new run and in one that was resumed."""
    rng, directory = random.Random(seed), tmp_path / "run"
    killed = child(directory, rng.randrange(num_operations))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    if any(path.name.isdecimal() for path in directory.glob("checkpoints/*")):
        child(directory, rng.randrange(num_operations), "--resume")
    assert_whole(directory, whole)


def test_files_that_cannot_grow(num_operations, whole, tmp_path):
    """As on a full disk: the system refuses the last bytes of a checkpoint, in Python and in what orbax calls."""
    directory = tmp_path / "run"
    child(directory, 3 * num_operations // 4)
    before = {path: path.read_bytes() for path in directory.glob("checkpoints/[0-9]*/**/*") if path.is_file()}
    assert before
    out = child(directory, -1, "--resume", "2500")
    assert out.returncode == 1 and "could not be written" in out.stderr and "can be resumed from step" in out.stderr
    assert {path: path.read_bytes() for path in before} == before
    assert_whole(directory, whole)
