"""A run continues from checkpoints that are whole, byte for byte, or the error names what is damaged."""

import errno
import json
import os
import random
import shutil

import extras  # noqa: F401
import jax
import numpy as np
import pytest
from damages import cut, make_directory, make_pipe

from jspec.checkpoints.files import CheckpointError
from jspec.train import run_directory
from jspec.train.run_directory import RunDirectory

RECORD = {"seed": 0, "rate": 0.5, "train.npy: sha256": "ab"}


def state_of(step):
    """What stands for the state of a training at a step."""
    return {
        "step": np.array(step, np.int32),
        "weights": np.random.default_rng(step).normal(size=(9, 5)).astype(np.float32),
    }


def init():
    return jax.tree.map(jax.numpy.asarray, state_of(0))


def write(path, steps=(4, 8)):
    """A run that was killed some steps after its last checkpoint."""
    run = RunDirectory(path)
    run.begin(RECORD)
    for step in steps:
        run.log(step=step, loss=1.0 / step)
        run.save(step, jax.tree.map(jax.device_put, state_of(step)))
    run.log(step=steps[-1] + 1, loss=0.0)
    return path


def resume(path, record=RECORD):
    run = RunDirectory(path)
    return run, run.resume(record, init)


def assert_same(state, step):
    wanted = state_of(step)
    assert int(state["step"]) == step
    assert np.asarray(state["weights"]).tobytes() == wanted["weights"].tobytes()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write(tmp_path_factory.mktemp("run") / "run")


def test_a_run_continues_from_its_last_checkpoint(written, tmp_path, capsys):
    path = shutil.copytree(written, tmp_path / "run")
    run, state = resume(path)
    assert_same(state, 8)
    assert capsys.readouterr().err == ""
    # Lines after the checkpoint are written again.
    assert [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()] == [4, 8]
    run.save(12, state_of(12))
    assert sorted(entry.name for entry in (path / "checkpoints").iterdir()) == ["12", "8"]
    assert_same(resume(path)[1], 12)


def test_other_tools_read_the_checkpoints(written):
    ocp = run_directory.ocp
    with ocp.CheckpointManager((written / "checkpoints").resolve()) as manager:
        assert manager.all_steps() == [4, 8]
        assert_same(manager.restore(8, args=ocp.args.StandardRestore(init())), 8)


def test_a_new_run_does_not_touch_an_old_one(written, tmp_path):
    before = contents(written)
    with pytest.raises(FileExistsError, match="has a checkpoint of step 8; resume from it, or use another directory"):
        RunDirectory(written).begin(RECORD)
    assert contents(written) == before
    with pytest.raises(FileNotFoundError, match=r"none: no checkpoint to resume from; train without resume"):
        resume(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, r"another recipe: seed=1 \(was 0\)$"),
        ({"rate": 1, "seed": None}, r"seed=None \(was 0\), rate=1 \(was 0.5\)$"),
        ({"train.npy: sha256": "cd"}, r"train.npy: sha256=cd \(was ab\)$"),
        ({"--rows: share": 0.5}, r"--rows: share=0.5 \(was None\)$"),
    ],
)
def test_another_record_is_refused(changes, message, written):
    before = contents(written)
    with pytest.raises(ValueError, match=message):
        resume(written, RECORD | changes)
    assert contents(written) == before


def test_two_damaged_checkpoints_are_named(written, tmp_path):
    path = shutil.copytree(written, tmp_path / "run")
    for step in (4, 8):
        (path / "checkpoints" / str(step) / "progress.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint is whole \(step 8: .*8/progress.json: .*; step 4: .*4/pro"
    ):
        resume(path)


def test_the_run_goes_on_from_the_checkpoint_before_a_damaged_one(written, tmp_path, capsys):
    path = shutil.copytree(written, tmp_path / "run")
    (path / "checkpoints" / "8" / "default" / "manifest.ocdbt").unlink()
    run, state = resume(path)
    assert_same(state, 4)
    said = capsys.readouterr().err
    assert "the checkpoint of step 8 is damaged" in said and "manifest.ocdbt: no such file" in said
    assert "continuing from step 4" in said
    run.save(8, state_of(8))
    assert sorted(entry.name for entry in (path / "checkpoints").iterdir()) == ["4", "8", "damaged-8"]
    assert_same(resume(path)[1], 8)


def contents(directory):
    """The files below a directory; a damaged one may be something other than a file."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def flip(path, rng):
    data = bytearray(path.read_bytes())
    if not data:
        return path.write_bytes(b"x")
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def extend(path, rng):
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 40)))


def scramble(path, rng):
    path.write_bytes(rng.randbytes(path.stat().st_size))


def make_dangling(path, rng):
    path.unlink()
    path.symlink_to("nothing")


def swap(path, rng):
    other = rng.choice([file for file in path.parent.iterdir() if file.is_file()])
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def remove_folder(path, rng):
    shutil.rmtree(path.parent)


def json_of_another_kind(path, rng):
    path.write_text(rng.choice(["[]", "{}", "null", "3", '"x"', "[" * 5000, '{"a": NaN}', '{"step": "8"}', ""]))


DAMAGES = [
    flip, cut, extend, scramble, make_directory, make_pipe, make_dangling, swap, remove_folder,
    json_of_another_kind, lambda path, rng: path.unlink(),
]  # fmt: skip


def check_damage(written, path, seed):
    """Damages a copy of a run in one to three places, and continues it."""
    rng = random.Random(seed)
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(written, path)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        files = sorted(file for file in path.rglob("*") if file.is_file())
        if not files:
            break
        # A file in the middle of a checkpoint as often as one of those at its top.
        folder = rng.choice(sorted({file.parent for file in files}))
        rng.choice(DAMAGES)(rng.choice([file for file in files if file.parent == folder]), rng)
    try:
        run, state = resume(path)
    except (CheckpointError, FileNotFoundError, NotADirectoryError) as error:
        assert str(path) in str(error), error
        return "refused"
    step = int(state["step"])
    assert step in (4, 8)
    assert_same(state, step)
    metrics = [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert metrics == [4, 8][: step // 4]
    assert json.loads((path / "recipe.json").read_text()) == RECORD
    run.log(step=12, loss=0.0)
    run.save(12, state_of(12))
    assert_same(resume(path)[1], 12)
    return step


def count_outcomes(written, tmp_path, seeds):
    found = [check_damage(written, tmp_path / "run", seed) for seed in seeds]
    return {outcome: found.count(outcome) for outcome in (8, 4, "refused")}


@pytest.mark.slow
def test_damaged_runs(written, tmp_path):
    assert count_outcomes(written, tmp_path, range(6))[4] > 0


@pytest.mark.slow
def test_many_damaged_runs(written, tmp_path):
    outcomes = count_outcomes(written, tmp_path, range(6, 326))
    assert min(outcomes.values()) > 10, outcomes


def test_every_changed_byte_of_a_checkpoint_is_found(written, tmp_path):
    path = shutil.copytree(written / "checkpoints" / "8", tmp_path / "8")
    rng = random.Random(0)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != "sha256.json")
    for _ in range(100):
        victim = rng.choice(files)
        before = victim.read_bytes()
        rng.choice([flip, cut, extend])(victim, rng)
        assert str(victim) in run_directory.find_damage(path)
        victim.write_bytes(before)
    assert run_directory.find_damage(path) is None


def test_a_full_disk_loses_nothing(written, tmp_path, monkeypatch):
    """Each call of the system that a save makes fails once."""
    path = shutil.copytree(written, tmp_path / "run")
    run, _ = resume(path)
    before = contents(path)
    for name, points in (("fsync", (0, 4)), ("replace", (0,))):
        for point in points:
            with monkeypatch.context() as patch:
                patch.setattr(os, name, failing(getattr(os, name), point))
                with pytest.raises(
                    OSError,
                    match=r"checkpoint of step 12 could not be written \(.*No space left.*\); .* resumed from step 8",
                ):
                    run.save(12, state_of(12))
            assert contents(path) == before
    with monkeypatch.context() as patch:
        patch.setattr(run_directory.ocp.Checkpointer, "save", failing(None, 0))
        with pytest.raises(OSError, match="the checkpoint of step 12 could not be written"):
            run.save(12, state_of(12))
    assert contents(path) == before
    run.save(12, state_of(12))
    assert_same(resume(path)[1], 12)


def failing(function, point):
    """The function, out of space at its call number `point`."""
    left = [point]

    def call(*args, **kwargs):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        return function(*args, **kwargs)

    return call


def test_what_is_not_a_run_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"file: must be a directory, but is a file"):
        RunDirectory(tmp_path / "file")
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(CheckpointError, match=r"metrics.jsonl: must be a file"):
        RunDirectory(tmp_path / "run")
