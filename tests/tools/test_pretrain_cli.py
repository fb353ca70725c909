"""Bad input of `tools.pretrain` is refused before anything is read, with the option or the file, and what is valid."""

import dataclasses
import json
import random
import shutil
import subprocess
import sys

import extras  # noqa: F401
import pytest
import train_files
from damages import ANY, DOCUMENTS, make_pipe
from train_files import Reached, pretrain, reach
from train_models import TINY

from jspec.checkpoints import llama
from jspec.train import trainer
from tools.pretrain import __main__ as cli

REQUIRED = {
    "data": {"out": "x"},
    "tokenizer": {"out": "x", "text": "x"},
    "lm": {"data": "x", "work": "x", "out": "x", "shape": "python-tiny", "steps": 4},
}


def test_numbers_out_of_range_are_refused_before_anything_is_read(capsys, monkeypatch):
    parser = cli.build_parser()
    monkeypatch.setattr(cli, "build_parser", lambda: parser)
    kinds = {command: module.OPTIONS for command, module in cli.COMMANDS.items()}
    further = [("lm", "cross_entropy", 1.1), ("lm", "seed", 10**12), ("lm", "warmup", 10**12)]
    assert train_files.check_numbers(capsys, pretrain, REQUIRED, kinds, further) > 150


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("lm", {"rows_share": 0.5}, "--rows-share=0.5: has an effect only with --rows"),
        ("lm", {"cross_entropy": 0.5}, "--cross-entropy=0.5: has an effect only with --teacher"),
        ("lm", {"stop_after": 5}, "--stop-after=5: must be at most 4, the --steps of the run"),
        ("tokenizer", {"jsonl": "x"}, "exactly one of --text, --jsonl and --chats must be given, not 2"),
    ],
)
def test_options_that_do_not_go_together(command, options, message):
    with pytest.raises(ValueError, match=message):
        pretrain(command, **REQUIRED[command] | options)


def test_a_tokenizer_is_trained_on_text():
    with pytest.raises(ValueError, match="--chats: a tokenizer is trained on text; give --text or --jsonl"):
        pretrain("tokenizer", out="x", chats="x")


def test_outputs_do_not_overwrite_inputs(tmp_path):
    (tmp_path / "teacher").mkdir()
    common = {**REQUIRED["lm"], "data": tmp_path, "work": tmp_path / "w"}
    for option, out in (("data", tmp_path / "teacher" / ".."), ("teacher", tmp_path / "teacher")):
        with pytest.raises(ValueError, match=f"--out=.*: is the directory of --{option}, whose files it would"):
            pretrain("lm", **common | {"out": out, "teacher": tmp_path / "teacher"})
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]


CONFIG = dataclasses.replace(TINY, vocab_size=train_files.VOCABULARY, max_length=32)


@pytest.fixture
def good(tmp_path, monkeypatch):
    """Data with the config.json of a model for it, and no training."""
    monkeypatch.setattr(trainer, "run", reach)
    train_files.write(tmp_path)
    write(tmp_path)
    return tmp_path


def write(directory, **shape):
    """Writes a config.json."""
    shutil.rmtree(directory / "config.json", ignore_errors=True)
    (directory / "config.json").write_text(json.dumps(llama.describe(dataclasses.replace(CONFIG, **shape))))


def read(data, length=15):
    """Runs `lm` up to its training."""
    shape = {"steps": 4, "batch_tokens": 64, "length": length, "config": data}
    pretrain("lm", data=data, work=data / "w", out=data / "o", rows=data / "rows.npy", **shape)


def test_a_model_that_does_not_fit_the_data(good):
    with pytest.raises(Reached):
        read(good)
    write(good, max_length=8)
    with pytest.raises(ValueError, match=r"has sequences of 16 tokens, but the model's context holds 8"):
        read(good, length=8)
    write(good, vocab_size=300)
    with pytest.raises(ValueError, match=r"vocab_size=300: must be 280, the tokenizer's vocabulary"):
        read(good)


def test_a_damaged_config_is_named(good):
    """Or what the damage changes has no effect on what is read."""
    for index, damage in enumerate([damage for damage in ANY if damage is not make_pipe] + DOCUMENTS):
        write(good)
        damage(good / "config.json", random.Random(index))
        with pytest.raises((Reached, ValueError, TypeError, OSError), match="^$|config.json|vocab"):
            read(good)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["flax", "optax", "orbax"])
def test_without_the_extra(missing):
    """The error has the command to install it."""
    program = f"import sys; sys.modules[{missing!r}] = None; from tools.pretrain import __main__"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    last = out.stderr.strip().splitlines()[-1]
    assert out.returncode == 1 and f"training needs {missing}" in last and "[train]" in last
