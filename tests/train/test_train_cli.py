"""Bad input of `jspec train` is refused before anything is read, with the option or the file, and what is valid."""

import dataclasses
import itertools
import json
import os
import pickle
import random
import shutil
import subprocess
import sys

import extras  # noqa: F401
import jax
import numpy as np
import pytest
import train_files
from damages import ANY, DOCUMENTS, make_pipe
from train_files import Reached, reach, run
from train_models import TINY

from jspec.checkpoints import language_model
from jspec.cli import train as cli
from jspec.core.options import kind_of, options_of
from jspec.train import data, draft, records, replies, text, trainer
from jspec.train import tokenizer as files
from jspec.train.card import EXAMPLE
from jspec.train.kinds import KINDS
from jspec.train.options import DraftRun
from jspec.train.text import Sampled
from tools.pretrain import model

REQUIRED = {
    "data": {"out": "x", "tokenizer": "x", "text": "x"},
    "dspark": {"data": "x", "work": "x", "out": "x", "target": "x", "steps": 4},
    "eagle3": {"data": "x", "work": "x", "out": "x", "target": "x", "steps": 4},
    "frozen-kv-mtp": {"data": "x", "work": "x", "out": "x", "target": "x", "steps": 4},
    "replies": {"model": "x", "prompts": "x", "out": "x"},
    "text": {"model": "x", "prompts": "x", "out": "x"},
}
KINDS_OF_OPTIONS = {
    "data": [records.DataOptions],
    **{name: [DraftRun, kind.recipe, kind.shape, *kind.output] for name, kind in KINDS.items()},
    "replies": [replies.ReplyOptions],
    "text": [text.TextOptions],
}
FURTHER = [
    *((command, name, 10**12) for command in KINDS for name in ("seed", "warmup")),
    *((command, "length", 2) for command in KINDS),
    *(("text", "width", 1), ("text", "batch", 10**9)),
]
"""Values out of bounds of some commands."""


def test_numbers_out_of_range_are_refused_before_anything_is_read(capsys, monkeypatch):
    parser = cli.build_parser()
    monkeypatch.setattr(cli, "build_parser", lambda: parser)
    assert train_files.check_numbers(capsys, run, REQUIRED, KINDS_OF_OPTIONS, FURTHER) > 700


def test_every_number_has_bounds():
    """So that a new option cannot do without."""
    for kind in itertools.chain(*KINDS_OF_OPTIONS.values()):
        for name, (field, spec) in options_of(kind).items():
            assert kind_of(field).type not in (int, float) or {"least", "above"} & spec.bounds.keys(), (kind, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows-share": 0.5}, "--rows-share=0.5: has an effect only with --rows"),
        ({"stop-after": 5}, "--stop-after=5: must be at most 4, the --steps of the run"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        run("eagle3", **REQUIRED["eagle3"] | {"target": "bundled:python-tiny"} | options)


def test_outputs_do_not_overwrite_inputs(tmp_path):
    (tmp_path / "file").write_text("")
    common = {"data": tmp_path, "target": "bundled:python-tiny", "steps": 4}
    with pytest.raises(ValueError, match="--out=.*: is the directory of --data, whose files it would overwrite"):
        run("eagle3", **common, work=tmp_path / "w", out=tmp_path / ".." / tmp_path.name)
    (tmp_path / "t").mkdir()
    with pytest.raises(ValueError, match="is the directory of --target"):
        run("eagle3", **common | {"target": tmp_path / "t"}, work=tmp_path / "w", out=tmp_path / "t")
    for name in ("work", "out"):
        with pytest.raises(NotADirectoryError, match="file: must be a directory, but is a file"):
            run("eagle3", **{**common, "work": tmp_path / "w", "out": tmp_path / "o", name: tmp_path / "file"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "t"]


CONFIG = dataclasses.replace(TINY, vocab_size=train_files.VOCABULARY, max_length=256)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data") / "data"
    directory.mkdir()
    train_files.write(directory)
    bpe = files.load(directory)
    language_model.save(directory / "target", CONFIG, model.init_params(CONFIG, jax.random.key(0)), eos=(0,))
    files.save(bpe, directory / "target", 256)
    return directory


@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr(trainer, "run", reach)


def read(data, **options):
    """Runs `jspec train eagle3` up to its training."""
    shape = {"steps": 4, "batch_tokens": 64, "length": 15, "target": data / "target", "capture_layers": 1}
    shape |= {"work": data / "w", "out": data / "o", "rows": data / "rows.npy"}
    run("eagle3", data=data, **shape | options)


def test_rows_of_several_files(good, tmp_path, monkeypatch):
    """Their widths may differ, and the card has a command for each."""
    texts = np.load(good / "rows.npy")
    np.save(tmp_path / "longer.npy", np.concatenate([texts, texts[:, :1]], axis=1)[:5])
    Sampled(sampled_share=0.5, seed=3).write(tmp_path / "longer.npy")
    tasks, cards = [], []
    monkeypatch.setattr(trainer, "run", lambda task, *_, **__: tasks.append(task) or task.init())
    monkeypatch.setattr(draft, "final_metrics", lambda *_: EXAMPLE)
    monkeypatch.setattr(draft.drafts, "save", lambda stage, *_, **__: cards.append(stage))
    out = tmp_path / "o"
    read(good, rows=(good / "rows.npy", tmp_path / "longer.npy"), prompts=2, work=tmp_path / "w", out=out)
    assert tasks[0].sources[1].tokens.shape == (30, 17) and tasks[0].sources[1].mask[:, -1].sum() == 5
    card = (out / "README.md").read_text()
    assert "--out rows-1.npy --rows 25 --width 16\n" in card
    assert "--out rows-2.npy --rows 5 --width 17 --sampled-share 0.5 --seed 3\n" in card
    assert "--rows rows-1.npy rows-2.npy --rows-share 0.5" in card and "itself, 8% of it sampled" in card


@pytest.mark.slow
def test_a_run_of_some_minutes(good, tmp_path, capsys):
    """Its steps are those that fit, at least two; a run that is resumed keeps them."""
    options = {"steps": 40, "ttt_steps": 2, "prompts": 2, "rows_share": 0.5, "work": tmp_path / "w"}
    read(good, **options, minutes=1e-3, stop_after=1)
    read(good, **options, minutes=9, resume=True)
    assert capsys.readouterr().out.count("jspec: 2 steps of 64 tokens, 64 at a time") == 2
    read(good, **options | {"work": tmp_path / "longer"}, minutes=9)
    assert "jspec: 40 steps of 64 tokens" in capsys.readouterr().out


def save(array):
    return lambda path, rng: np.save(path, array, allow_pickle=True)


def save_several(path, rng):
    np.savez(path.with_suffix(".npz"), a=np.zeros(3), b=np.zeros(3))
    os.replace(path.with_suffix(".npz"), path)


ARRAYS = [
    *(save(np.zeros(shape, np.uint16)) for shape in ((), (0,), (3, 0), (2, 3, 4), (10,), (5, 1), (5, 2000))),
    *(save(np.zeros(300, dtype)) for dtype in (np.int64, np.float32, bool, ">u2", "U3", np.complex64)),
    save(np.full(300, 280, np.uint16)), save(np.array([{}, []], object)), save_several,
    lambda path, rng: path.write_bytes(pickle.dumps(list(range(300)))),
]  # fmt: skip


def change_manifest(path, rng):
    """One value of the manifest becomes something else."""
    manifest = json.loads(path.read_text())
    holder = rng.choice([manifest, manifest["train"], manifest["heldout"], manifest["card"]])
    holder[rng.choice(sorted(holder))] = rng.choice([None, "x", 1.5, [], {}, True, [1], {"a": "b"}])
    path.write_text(json.dumps(manifest))


FILES = {
    "train.npy": ANY + ARRAYS,
    "heldout.npy": ANY + ARRAYS,
    "rows.npy": ANY + ARRAYS,
    "data.json": [*ANY, *DOCUMENTS, *[change_manifest] * 20],
    "tokenizer.json": ANY + DOCUMENTS,
    "target/config.json": [damage for damage in ANY if damage is not make_pipe] + DOCUMENTS,
}
POINTS = [(name, index) for name, damages in FILES.items() for index in range(len(damages))]


def check_point(good, path, name, index, seed):
    """A damaged file is named, or has no effect on what is read."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(good, path)
    FILES[name][index](path / name, random.Random(f"{name} {index} {seed}"))
    try:
        read(path)
    except Reached:
        return "read"
    except (ValueError, TypeError, OSError) as error:
        message = str(error)
        # What a file lacks may show in another one that does not fit.
        assert any(file in message for file in (name, "--rows", "vocab", "held-out")), (name, index, message)
        assert "Errno" not in message or name in message, message
        return "refused"
    raise AssertionError("neither read nor refused")


@pytest.mark.usefixtures("no_training")
def test_damaged_data(good, tmp_path):
    with pytest.raises(Reached):
        read(good)
    for name, index in POINTS[::5]:
        check_point(good, tmp_path / "data", name, index, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("no_training")
def test_much_damaged_data(good, tmp_path):
    found = [check_point(good, tmp_path / "data", *point, seed) for seed in range(3) for point in POINTS]
    assert len(found) > 300 and found.count("refused") > 0.8 * len(found)


@pytest.mark.slow
def test_heldout_prompts_are_not_trained_on(good, tmp_path):
    directory = shutil.copytree(good, tmp_path / "data")
    assert data.read_heldout_prompts(directory, None, 32) == train_files.PROMPTS
    assert data.read_heldout_prompts(directory, 2, 32) == train_files.PROMPTS[:2]
    with pytest.raises(ValueError, match=r"--prompts=5: .*heldout_prompts.json has only 4"):
        data.read_heldout_prompts(directory, 5, 32)
    path = directory / "heldout_prompts.json"
    path.write_text(json.dumps(train_files.PROMPTS + train_files.TRAIN_PROMPTS[:1]))
    with pytest.raises(ValueError, match=r"1 prompts are also in .*train_prompts.json, such as 'def f4\(a, b\):'"):
        data.read_heldout_prompts(directory, None, 32)
    path.write_text(json.dumps(train_files.PROMPTS * 2))
    with pytest.raises(ValueError, match=r"4 prompts are twice in this file"):
        data.read_heldout_prompts(directory, None, 32)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["flax", "optax", "orbax"])
def test_without_the_extra(missing):
    """The help is there, and the error of what cannot run has the command to install it."""
    program = f"""
import sys
sys.modules[{missing!r}] = None
from jspec.cli import train as cli
for command in ({", ".join(map(repr, REQUIRED))}):
    try:
        cli.main([command, "--help"])
    except SystemExit as done:
        assert not done.code
for command in ("dspark", "eagle3", "frozen-kv-mtp"):
    try:
        cli.main([command, "--data", "x", "--work", "x", "--out", "x", "--steps", "4",
                  "--target", "x"])
    except ValueError as error:
        print(error, file=sys.stderr)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    lines = out.stderr.strip().splitlines()
    assert len(lines) == 3 and all(f"training needs {missing}" in line and "[train]" in line for line in lines)
    assert "--checkpoint-every" in out.stdout and "EAGLE-3" in out.stdout
