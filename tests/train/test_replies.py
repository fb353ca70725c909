"""`jspec train replies`: the target replies to the right prompts, and exactly its replies count for the loss."""

import json
import random
import types
from collections import Counter

import chat_files
import numpy as np
import pytest
from train_files import run

import jspec
from jspec.train import chats, replies

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "target"
    chat_files.write_model(directory, **TINY)
    return directory


@pytest.fixture
def written(monkeypatch):
    """Replies without a model: the i-th has i letters, and every third is cut. Returns the prompts that were read."""
    seen = []

    def generate(model, prompts, what, batch, **options):
        seen.append((prompts, options))
        reasons = ["length" if i % 3 == 2 else "eos" for i in range(len(prompts))]
        return [types.SimpleNamespace(text="z" * (i + 1), finish_reason=x) for i, x in enumerate(reasons)]

    monkeypatch.setattr(replies, "_generate", generate)
    return seen


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_last_reply_is_replaced(target, tmp_path, written):
    rng = random.Random(1)
    given = []
    while len(given) < 20:
        messages = chat_files.random_messages(rng)
        if messages not in given:
            given.append(messages)
    open_ended = [messages[: len(messages) - (i % 2)] for i, messages in enumerate(given)]
    layouts = (chat_files.as_openai, chat_files.as_sharegpt)
    path = chat_files.write_lines(tmp_path / "x", [layouts[i % 3 == 0](rng, x) for i, x in enumerate(open_ended)])
    out = tmp_path / "replies.jsonl"
    assert run("replies", model=target, chats=path, out=out, max_new_tokens=9, temperature=0.5, seed=3) == 0
    tokenizer, (end,) = jspec.load(target).tokenizer, jspec.load(target).eos
    wanted = {tuple(tokenizer.chat(messages[:-1])): messages[:-1] for messages in given}
    ((prompts, options),) = written
    assert [tuple(ids) for ids in prompts] == list(wanted)
    assert options["max_new_tokens"] == 9 and options["sampling"] == jspec.Sampling(temperature=0.5)
    assert options["seed"] == 3
    for index, (record, ids) in enumerate(zip(read(out), prompts, strict=True)):
        before = [{key: value for key, value in m.items() if key != "weight"} for m in record["messages"][:-1]]
        assert before == wanted[tuple(ids)] and record["messages"][-1]["content"] == "z" * (index + 1)
        assert record.get("finished", True) == (index % 3 != 2)
        (sequence,) = chats.encode(chats.parse("x", record), tokenizer, ends={end}, most=999, dropped=Counter())
        counted = sequence.ids[sequence.mask == 1].tolist()
        assert sequence.ids.tolist()[: len(ids)] == ids and not sequence.mask[: len(ids)].any()
        assert tokenizer.decode(counted) == "z" * (index + 1) and (end in counted) == (index % 3 != 2)


def test_prompts_are_user_messages(target, tmp_path, written, capsys):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(["one", {"prompt": "two"}, "one", "three " * 200, "four", "five"]))
    assert run("replies", model=target, prompts=path, out=tmp_path / "o", max_new_tokens=20, rows=3) == 0
    assert [record["messages"][0] for record in read(tmp_path / "o")] == [
        {"role": "user", "content": text} for text in ("one", "two", "four")
    ]
    said = capsys.readouterr()
    assert "duplicate prompt: 1" in said.err and "prompt beyond the first 3 (--rows): 1" in said.err
    assert "prompt of no token or more than 236 tokens: 1" in said.err
    assert "3 replies, 1 of them cut at 20 tokens" in said.out


def test_bad_input_of_replies(target, tmp_path):
    (tmp_path / "folder").mkdir()
    good = chat_files.write_lines(tmp_path / "good", chat_files.questions(3))
    bad = chat_files.write_lines(tmp_path / "bad", [*chat_files.questions(1), {"messages": [{"role": "x"}]}])
    alone = chat_files.write_lines(tmp_path / "alone", [{"messages": [{"role": "assistant", "content": "x"}]}] * 2)
    rendered = chat_files.write_lines(tmp_path / "rendered", [{"prompt": "x", "rendered": True}])
    with pytest.raises(ValueError, match="rendered: has prompts of chats; use `jspec train replies`"):
        run("text", model=target, prompts=rendered, out=tmp_path / "o")
    common = {"model": target, "out": tmp_path / "o", "max_new_tokens": 9}
    for options, message in [
        ({"chats": bad}, "bad, line 2: messages.0.: role='x': must be one of"),
        ({"chats": alone}, "--chats: no prompt is left to reply to"),
        ({"chats": tmp_path / "absent"}, "absent: no such file"),
        ({"prompts": tmp_path / "absent"}, "absent: cannot be read"),
        ({"prompts": rendered}, "rendered: has prompts that a chat template has rendered; give the chats themselves"),
        ({"chats": good, "max_new_tokens": 256}, "--max-new-tokens=256: must be less than 256, the model's context"),
        ({"chats": good, "out": tmp_path / "folder"}, "--out=.*folder: must be a file, but is a directory"),
        ({"chats": good, "model": "bundled:python-tiny"}, "--model=bundled:python-tiny: has no chat template"),
    ]:
        with pytest.raises((ValueError, OSError), match=message):
            run("replies", **common | options)
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_replies_end_to_end(target, tmp_path):
    """They are the target's greedy text, and become data."""
    path = chat_files.write_lines(tmp_path / "chats", chat_files.questions(8))
    run("replies", model=target, chats=path, out=tmp_path / "replies", max_new_tokens=12)
    model = jspec.load(target)
    for value, record in zip(chat_files.questions(8), read(tmp_path / "replies"), strict=True):
        prompt = model.tokenizer.chat(value["messages"][:1])
        found = jspec.generate(model, prompt, max_new_tokens=12, drafter=None)
        assert record["messages"][-1]["content"] == found.text
    run("data", out=tmp_path / "data", tokenizer=target, chats=tmp_path / "replies", heldout_share=0.3)
    assert np.load(tmp_path / "data" / "train_mask.npy").any()


@pytest.mark.parametrize(
    ("template", "before", "stop"), [("chatml", "<|im_start|>user\n", ()), ("inst", "[INST] ", "[/INST]")]
)
def test_the_target_writes_its_own_prompts(tmp_path, monkeypatch, template, before, stop):
    """From its template up to the user's turn; what is empty, cut or repeated is dropped."""
    target, calls = tmp_path / "target", []
    chat_files.write_model(target, chat_files.TEMPLATES[template], **TINY)
    questions = iter(
        [("one ", "eos"), ("two", "stop"), ("one", "eos"), (" ", "eos"), ("three", "length"), ("four", "eos")]
    )

    def generate(model, prompts, what, batch, **options):
        calls.append((prompts, what, batch, options))
        texts = [next(questions) if what == "prompts" else ("yes", "eos") for _ in prompts]
        return [types.SimpleNamespace(text=text, finish_reason=reason) for text, reason in texts]

    monkeypatch.setattr(replies, "_generate", generate)
    options = {"temperature": 0.7, "sampled_share": 0.67, "max_new_tokens": 9, "batch": 5, "seed": 2}
    assert run("replies", model=target, own_prompts=6, out=tmp_path / "o", **options) == 0
    (asked, what, batch, question_options), (answered, *_, reply_options) = calls
    tokenizer = jspec.load(target).tokenizer
    assert (what, batch) == ("prompts", 5) and asked == [tokenizer.encode(before, special=False)] * 6
    assert question_options["sampling"] == jspec.Sampling(temperature=1.0) and question_options["stop"] == stop
    assert question_options["seed"] > reply_options["seed"] + 2**24 and reply_options["seed"] == 2
    assert sorted(x is None for x in reply_options["sampling"]) == [False, False, True]
    assert {x for x in reply_options["sampling"] if x} == {jspec.Sampling(temperature=0.7)}
    written = [[m["content"] for m in record["messages"]] for record in read(tmp_path / "o")]
    assert written == [["one", "yes"], ["two", "yes"], ["four", "yes"]] and len(answered) == 3
    with pytest.raises(ValueError, match="--sampled-share=0.5: has an effect only with --temperature"):
        run("replies", model=target, own_prompts=6, out=tmp_path / "o", sampled_share=0.5)


@pytest.mark.slow
def test_own_prompts_end_to_end(target, tmp_path):
    """A model of random weights ends about half of its prompts; all that is left is answered greedily."""
    run("replies", model=target, own_prompts=9, out=tmp_path / "new" / "o", max_new_tokens=4, batch=4)
    model, records = jspec.load(target), read(tmp_path / "new" / "o")
    assert 1 <= len(records) <= 9
    for record in records:
        prompt = model.tokenizer.chat(record["messages"][:1])
        expected = jspec.generate(model, prompt, max_new_tokens=4, drafter=None)
        assert record["messages"][1]["content"] == expected.text
