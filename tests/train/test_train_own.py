"""Own text of each kind through the commands that train, on small checkpoints."""

import json
import shutil
import types
from functools import partial
from pathlib import Path

import chat_files
import extras  # noqa: F401
import jax
import numpy as np
import pytest
from train_files import Reached, lines, pretrain, reach, run

import jspec
from jspec.cli import train as cli
from jspec.train import draft, prepare, replies, trainer

ROOT = Path(__file__).parents[2]

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1}
RUN = {"steps": 2, "batch_tokens": 64, "length": 24}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "target"
    chat_files.write_model(directory, **TINY)
    return directory


@pytest.fixture(scope="module")
def made(target, tmp_path_factory):
    """Data of each kind."""
    directory = tmp_path_factory.mktemp("own")
    chat_files.write_lines(directory / "chats.jsonl", chat_files.questions(24))
    texts = [value["messages"][1]["content"] * 6 for value in chat_files.questions(24)]
    chat_files.write_lines(directory / "texts.jsonl", [{"text": text} for text in texts])
    (directory / "text.txt").write_text("\n".join(texts))
    run("data", out=directory / "chats", tokenizer=target, chats=directory / "chats.jsonl", heldout_share=0.2)
    run("data", out=directory / "jsonl", tokenizer=target, jsonl=directory / "texts.jsonl", field="text")
    run("data", out=directory / "text", tokenizer=target, text=directory / "text.txt")
    return directory


@pytest.mark.parametrize("kind", ["chats", "jsonl", "text"])
def test_all_commands_read_all_kinds(made, target, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(trainer, "run", reach)
    common = {"data": made / kind, "work": tmp_path / "w", "out": tmp_path / "o", **RUN}
    for command, options in {
        "eagle3": {"target": target, "capture_layers": 1},
        "dspark": {"target": target, "capture_layers": 1},
        "frozen-kv-mtp": {"target": target, "num_layers": 1},
        "lm": {"config": target},
    }.items():
        with pytest.raises(Reached) as reached:
            (pretrain if command == "lm" else run)(command, **common, **options)
        record = reached.value.args[0]
        assert ("heldout_mask" in record) == ("train.npy: mask" in record) == (kind == "chats")


def test_masks_that_are_damaged_are_named(made, target, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "run", None)
    directory = shutil.copytree(made / "chats", tmp_path / "data")
    common = {"data": directory, "work": tmp_path / "w", "out": tmp_path / "o", "target": target, **RUN}
    for name in ("train_mask.npy", "heldout_mask.npy"):
        kept = (directory / name).read_bytes()
        shape = np.load(directory / name).shape
        arrays = np.ones(shape, np.float32), np.ones((3, 3), np.uint8), np.full(shape, 7, np.uint8)
        for damage in (b"x", kept[:90], *arrays):
            if isinstance(damage, bytes):
                (directory / name).write_bytes(damage)
            else:
                np.save(directory / name, damage)
            with pytest.raises(ValueError, match=name):
                run("eagle3", **common, capture_layers=1)
        (directory / name).write_bytes(kept)


def commands(text):
    """The commands of `jspec train` in a text, as lists of words."""
    return [line.split()[2:] for line in text.splitlines() if line.strip().startswith("jspec train ")]


def recipes():
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").split("## Your own text")[1].split("\n## ")[0]
    return {
        "docs": commands(page),
        "help of data": commands(prepare.__doc__),
        "help of replies": commands(replies.__doc__),
    }


@pytest.mark.slow(unless=("docs", "help of data"))
@pytest.mark.parametrize("name", ["docs", "help of data", "help of replies"])
def test_the_recipes_work_as_printed(tmp_path, monkeypatch, name):
    """Every command, in order, in one directory; only the training and the replies themselves are left out."""
    chat_files.write_model(tmp_path / "TARGET", **TINY | {"num_layers": 7})
    chat_files.write_lines(tmp_path / "chats.jsonl", chat_files.questions(24))
    text = [value["messages"][1]["content"] * 9 for value in chat_files.questions(24)]
    chat_files.write_lines(tmp_path / "articles.jsonl", [{"text": each} for each in text])
    (tmp_path / "book.txt").write_text("\n".join(text))
    (tmp_path / "notes.md").write_text("\n".join(reversed(text)))
    monkeypatch.chdir(tmp_path)
    reached = []
    monkeypatch.setattr(trainer, "run", lambda *_, **__: reached.append("train") or done())
    answer = types.SimpleNamespace(text="a hat", finish_reason="eos")
    monkeypatch.setattr(replies, "_generate", lambda model, prompts, *_, **__: [answer] * len(prompts))
    found = recipes()[name]
    assert len(found) >= 3
    for words in found:
        # The context of the target is small.
        small = ["--max-new-tokens", "100"] if words[0] == "replies" else []
        try:
            assert cli.main([*words, *small]) == 0
        except Reached:
            reached.append(words[0])
    assert reached == ["train", "eagle3"] * sum(words[0] == "eagle3" for words in found)


def done():
    raise Reached


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "frozen-kv-mtp"])
def test_padding_in_memory_changes_nothing(target, kind):
    """A draft that is trained in memory with a mask is the same for any tokens where the mask ends."""
    model, rng = jspec.load(target), np.random.default_rng(0)
    sequences, mask = rng.integers(0, 300, (8, 12)), rng.integers(0, 2, (8, 12))
    mask[:, 6], mask[:, 7:] = 1, 0
    other = np.where(np.arange(12) > 6, (sequences + 5) % 300, sequences)
    common = {"mask": mask, "steps": 2, "batch_tokens": 48, "ttt_steps": 2, "progress": False}
    train = partial(draft.train_draft, kind)
    shape = {"capture_layers": (1,)} if kind == "eagle3" else {"num_layers": 1}
    one, two = (train(model, tokens, **common, **shape).params.draft for tokens in (sequences, other))
    assert jax.tree.all(jax.tree.map(np.array_equal, one, two))
    whole = train(model, sequences, **common | {"mask": None}, **shape).params.draft
    assert not jax.tree.all(jax.tree.map(np.array_equal, one, whole))
    with pytest.raises(ValueError, match=r"the mask of sequences: is int64\[8, 12\]; must be \[7, 12\]"):
        train(model, sequences[:7], **common, **shape)


@pytest.mark.slow
def test_a_chat_model_and_its_head_end_to_end(made, target, tmp_path):
    """A language model learns chats and keeps their template; a head for it is trained on them."""
    common = {"data": made / "chats", **RUN}
    pretrain("lm", **common, config=target, work=tmp_path / "w1", out=tmp_path / "lm")
    card = (tmp_path / "lm" / "README.md").read_text()
    assert "license" not in card and "own chats" in card and "--chats chats.jsonl" in card
    model = jspec.load(tmp_path / "lm")
    messages = [{"role": "user", "content": "red hat 0?"}]
    assert model.tokenizer.chat(messages) == jspec.load(target).tokenizer.chat(messages)
    assert model.eos == jspec.load(target).eos
    draft = {"target": tmp_path / "lm", "capture_layers": 1, "prompts": 2, "ttt_steps": 2, "depth": 2}
    run("eagle3", **common, **draft, work=tmp_path / "w2", out=tmp_path / "head")
    last = lines(tmp_path / "w2")[-1]
    assert last["accept_length"] >= 1 and len(last["heldout_loss"]) == 2
    assert "own chats" in (tmp_path / "head" / "README.md").read_text()
    drafted = jspec.load(tmp_path / "lm", draft=tmp_path / "head")
    prompt = model.tokenizer.chat(messages)
    one, other = (
        jspec.generate(x, prompt, max_new_tokens=8, drafter=d) for x, d in ((drafted, "eagle"), (model, None))
    )
    assert one.tokens == other.tokens
    record = json.loads((tmp_path / "w2" / "recipe.json").read_text())
    assert "train.npy: mask" in record
