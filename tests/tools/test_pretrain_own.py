"""The user's own text in the training of language models, on small models."""

import json

import chat_files
import extras  # noqa: F401
import pytest
from train_files import lines, pretrain, run

import jspec
from jspec.train import trainer

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1}
RUN = {"steps": 2, "batch_tokens": 64, "length": 24}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "target"
    chat_files.write_model(directory, **TINY)
    return directory


@pytest.fixture(scope="module")
def made(target, tmp_path_factory):
    """Data of each kind; only chats have masks."""
    directory = tmp_path_factory.mktemp("own")
    chat_files.write_lines(directory / "chats.jsonl", chat_files.questions(24))
    texts = [value["messages"][1]["content"] * 6 for value in chat_files.questions(24)]
    (directory / "text.txt").write_text("\n".join(texts))
    run("data", out=directory / "chats", tokenizer=target, chats=directory / "chats.jsonl", heldout_share=0.2)
    run("data", out=directory / "text", tokenizer=target, text=directory / "text.txt")
    chat_files.write_lines(directory / "texts.jsonl", texts)
    run("data", out=directory / "jsonl", tokenizer=target, jsonl=directory / "texts.jsonl")
    return directory


class Reached(Exception):
    """The training would begin."""


@pytest.mark.parametrize("kind", ["chats", "jsonl", "text"])
def test_a_language_model_reads_all_kinds(made, target, tmp_path, monkeypatch, kind):
    def reach(task, *_, **__):
        raise Reached(task.record)

    monkeypatch.setattr(trainer, "run", reach)
    with pytest.raises(Reached) as reached:
        pretrain("lm", data=made / kind, work=tmp_path / "w", out=tmp_path / "o", **RUN, config=target)
    record = reached.value.args[0]
    assert ("heldout_mask" in record) == ("train.npy: mask" in record) == (kind == "chats")


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
