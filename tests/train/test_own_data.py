"""`jspec train data` of the user's own files: what is kept, held out and dropped, and errors with file and line."""

import json
import os
import random
import re
from collections import Counter

import chat_files
import numpy as np
import pytest
from chat_files import TEMPLATES
from train_files import pretrain, run

from jspec.text.tokenizer import Tokenizer
from jspec.train import chat_data, chats, data, prepare, records, text_data, tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("models") / "target"
    chat_files.write_tokenizer(directory, TEMPLATES["chatml"])
    return directory


def read(directory):
    """The manifest and the arrays of a directory of data."""
    found = {path.stem: np.load(path) for path in directory.glob("*.npy")}
    return data.read_manifest(directory), found


def documents(rng):
    """Texts of random lengths, mostly short."""
    sizes = [rng.choice([1, 3, 20, 400]) for _ in range(rng.randint(1, 40))]
    return ["".join(f"{rng.choice(chat_files.COLORS)} {i}\n" for i in range(size)) for size in sizes]


def test_a_part_of_the_text_is_held_out():
    for seed in range(30):
        rng = random.Random(seed)
        given, share = documents(rng), rng.choice([0.02, 0.05, 0.3, 0.5])
        total = sum(map(len, given))
        try:
            train, apart = text_data.split(given, share)
        except ValueError as error:
            assert "must have more, to hold some out" in str(error) and total < 100
            continue
        assert sorted("".join(train + apart)) == sorted("".join(given))
        assert sum(map(len, apart)) <= share * total + 20 and train and apart
        assert sum(map(len, apart)) >= 0.4 * share * total - 1
        # No text is in both, except for one whose end is held out.
        assert len(train) + len(apart) - len(given) in (0, 1)
        assert (train, apart) == text_data.split(given, share)


def test_texts(tmp_path):
    lines = "".join(f"line {i} of a text about a {color}\n" for i in range(99) for color in chat_files.COLORS)
    (tmp_path / "a.txt").write_text(lines)
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfa second text\r\n" + "日本語 🙂\n".encode() * 20)
    (tmp_path / "c.txt").write_text(lines)
    (tmp_path / "empty.txt").write_text(" \n")
    files = tuple(tmp_path / name for name in ("a.txt", "b.txt", "c.txt", "empty.txt"))
    out = tmp_path / "out"
    assert pretrain("tokenizer", out=tmp_path / "bpe", text=files, vocab_size=400) == 0
    assert run("data", out=out, tokenizer=tmp_path / "bpe", text=files) == 0
    manifest, found = read(out)
    assert manifest["skipped"] == {"duplicate text": 1, "empty text": 1} and manifest["kind"] == "text"
    assert found.keys() == {"train", "heldout"} and all(tokens.ndim == 1 for tokens in found.values())
    bpe = tokenizer.load(out)
    text = "".join(bpe.decode(tokens, skip_special_tokens=False) for tokens in found.values())
    text = text.replace("<|endoftext|>", "")
    assert sorted(text) == sorted(lines + "a second text\n" + "日本語 🙂\n" * 20)
    assert manifest["train"]["tokens"] == len(found["train"])
    prompts = [{*(x["prompt"] for x in json.loads((out / name).read_text()))} for name in PROMPTS]
    assert not prompts[0] & prompts[1] and all(prompt and prompt in lines + text for prompt in prompts[0] | prompts[1])
    # With the tokenizer of a model.
    assert run("data", out=tmp_path / "again", text=files[:2], tokenizer=out) == 0
    again = read(tmp_path / "again")[1]
    assert all(np.array_equal(again[name], found[name]) for name in found)


PROMPTS = ("train_prompts.json", "heldout_prompts.json")


def test_a_field_of_json(model, tmp_path, capsys):
    texts = [f"text {i}: {'word ' * (i % 7 + 9)}" for i in range(40)]
    path = chat_files.write_lines(tmp_path / "x.jsonl", [{"id": i, "body": text} for i, text in enumerate(texts)])
    path.write_text(path.read_text() + "\n\n")
    assert run("data", out=tmp_path / "lines", tokenizer=model, jsonl=path, field="body", heldout_share=0.2) == 0
    (tmp_path / "x.json").write_text(json.dumps(texts))
    assert run("data", out=tmp_path / "list", tokenizer=model, jsonl=tmp_path / "x.json", heldout_share=0.2) == 0
    (one, found), (_, other) = read(tmp_path / "lines"), read(tmp_path / "list")
    assert all(np.array_equal(found[name], other[name]) for name in ("train", "heldout"))
    assert one["train"]["files"] + one["heldout"]["files"] == 40 and one["heldout"]["files"] in (7, 8)
    printed = json.loads(capsys.readouterr().out.split("}\n{")[0] + "}")
    assert printed["files"] == ["x.jsonl"] and printed["skipped"] == {}


def write_chats(path, count=30, **changes):
    rng = random.Random(5)
    values = [chat_files.random_messages(rng) for _ in range(count)]
    values = [(chat_files.as_sharegpt if i % 2 else chat_files.as_openai)(rng, x) for i, x in enumerate(values)]
    return chat_files.write_lines(path, [{**value, **changes} for value in values])


def test_chats(model, tmp_path):
    path = write_chats(tmp_path / "chats.jsonl")
    extra = chat_files.write_lines(tmp_path / "more.jsonl", [{"messages": [{"role": "user", "content": "x"}]}] * 3)
    out = tmp_path / "out"
    assert run("data", out=out, tokenizer=model, chats=(path, extra), heldout_share=0.2, width=300) == 0
    manifest, found = read(out)
    kept = manifest["train"]["files"] + manifest["heldout"]["files"]
    assert manifest["skipped"].pop("chat without a reply") == 3 and kept + sum(manifest["skipped"].values()) == 30
    assert manifest["heldout"]["files"] == round(0.2 * kept)
    for side in ("train", "heldout"):
        tokens, mask = found[side], found[f"{side}_mask"]
        assert tokens.shape == mask.shape and tokens.shape[0] == manifest[side]["files"]
        assert int(mask.sum()) == manifest[side]["learned"] < manifest[side]["tokens"]
        assert (mask.any(axis=0)[-1] or tokens.shape[1] == 4) and mask.any(axis=1).all()
    rows = [{*map(bytes, found[side])} for side in ("train", "heldout")]
    assert not rows[0] & rows[1]
    assert manifest["card"]["command"] == (
        "jspec train data --out data --tokenizer target --chats chats.jsonl more.jsonl --heldout-share 0.2 --width 300"
    )
    prompts = json.loads((out / "heldout_prompts.json").read_text())
    assert prompts and all(record["rendered"] and record["prompt"].endswith("assistant\n") for record in prompts)
    assert not (out / "train_prompts.json").exists()
    assert data.read_heldout_prompts(out, None, 32) == [record["prompt"] for record in prompts]
    # The template travels with the data, and the same files give the same data.
    assert run("data", out=tmp_path / "again", tokenizer=out, chats=(path, extra), heldout_share=0.2, width=300) == 0
    again = read(tmp_path / "again")[1]
    assert all(np.array_equal(again[name], found[name]) for name in found)
    # Other data in the same directory leaves no mask.
    (tmp_path / "a.txt").write_text("a line of text\n" * 300)
    assert run("data", out=out, tokenizer=model, text=tmp_path / "a.txt") == 0
    assert not (out / "train_mask.npy").exists() and not (out / "heldout_mask.npy").exists()


GOOD = '{"messages": [{"role": "user", "content": "%d?"}, {"role": "assistant", "content": "%d"}]}\n'
BAD_LINES = [
    (b"{", "not readable as JSON"),
    (b"\xff\n", "not readable as JSON"),
    (b"[" * 100_000, "not readable as JSON"),
    (b'{"messages": [], "messages": [1]}', "the key 'messages' has two values"),
    (b"nan", "not readable as JSON"),
    (b"3", "must be an object"),
    (b'{"messages": [{"role": "user"}]}', r"messages\[0\]: content=None: must be text"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named_or_skipped(model, tmp_path, capsys, line, message):
    path = tmp_path / "chats.jsonl"
    path.write_bytes((GOOD % (1, 1)).encode() + b"\n" + line + b"\n" + (GOOD % (2, 2)).encode())
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}, line 3: .*{message}"):
        run("data", out=tmp_path / "out", tokenizer=model, chats=path)
    assert not (tmp_path / "out").exists()
    assert run("data", out=tmp_path / "out", tokenizer=model, chats=path, skip_bad=True, heldout_share=0.5) == 0
    assert read(tmp_path / "out")[0]["skipped"] == {"bad record": 1}
    assert f"skipped: {path}, line 3" in capsys.readouterr().err


def test_files_that_cannot_be_read(model, tmp_path, monkeypatch):
    (tmp_path / "empty").write_text("")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b"good\ncaf\xe9\n")
    (tmp_path / "list").write_text("[1, 2")
    (tmp_path / "one").write_text(GOOD % (1, 1))
    out = {"out": tmp_path / "out", "tokenizer": model}
    for kind, given, message in [
        ("text", "missing", "missing: no such file"),
        ("text", "folder", "folder: must be a regular file"),
        ("chats", "pipe", "pipe: must be a regular file"),
        ("text", "latin", r"latin, line 2: is not UTF-8 \(byte 8 of the file\)"),
        ("text", "empty", "--text: no text is left; there is nothing to train on"),
        ("jsonl", "empty", "--jsonl: no text is left"),
        ("jsonl", "one", r"one, line 1: .*must be text \(or give --field\)"),
        ("jsonl", "list", "list: not readable as JSON"),
        ("chats", "list", "list: not readable as JSON"),
        ("chats", "empty", "--chats: 0 chats with a reply are left; must be at least 2"),
        ("chats", "one", "--chats: 1 chats with a reply are left; must be at least 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            run("data", **out, **{kind: tmp_path / given})
    with pytest.raises(ValueError, match=r"--text: .*latin is given twice"):
        run("data", **out, text=(tmp_path / "latin", tmp_path / "folder" / ".." / "latin"))
    with pytest.raises(ValueError, match=r"one, line 1: has the keys \['messages'\]; must be .* the key 'body'"):
        run("data", **out, jsonl=tmp_path / "one", field="body")
    monkeypatch.setattr(chat_data, "MOST_TOKENS", 5)
    (tmp_path / "two").write_text(GOOD % (1, 1) + GOOD % (2, 2))
    with pytest.raises(ValueError, match=r"--chats: 1 sequences of .* more than 5 tokens; must be fewer"):
        run("data", **out, chats=tmp_path / "two")
    monkeypatch.setattr(records, "MOST_FILE_BYTES", 3)
    monkeypatch.setattr(records, "MOST_LINE_BYTES", 20)
    with pytest.raises(ValueError, match=r"latin: has 10 bytes: must have at most 3; split it"):
        run("data", **out, text=tmp_path / "latin")
    with pytest.raises(ValueError, match=r"one, line 1: must be one JSON value per line, of at most 20 bytes"):
        run("data", **out, jsonl=tmp_path / "one")
    assert not (tmp_path / "out").exists()


def test_options_of_own_files(model, tmp_path, capsys):
    path = write_chats(tmp_path / "chats.jsonl", 4)
    same = chat_files.write_lines(tmp_path / "same.jsonl", [json.loads(GOOD % (0, i)) for i in range(4)])
    out = {"out": tmp_path / "out"}
    for options, message in [
        ({"chats": path, "field": "x"}, "--field=x: has an effect only with --jsonl"),
        ({"text": path, "width": 9}, "--width=9: has an effect only with --chats"),
        ({"chats": path, "text": path}, "exactly one of --text, --jsonl and --chats must be given, not 2"),
        ({}, "exactly one of --text, --jsonl and --chats must be given, not 0"),
        ({"chats": path, "tokenizer": tmp_path / "absent"}, "absent"),
        ({"chats": path, "tokenizer": "bundled:python-tiny"}, "--tokenizer=bundled:python-tiny: has no chat template"),
        ({"chats": path, "tokenizer": model, "width": 8}, "--chats: 0 chats with a reply are left"),
        ({"chats": same, "tokenizer": model}, r"--chats: no held-out prompt is left \(all are trained on, too\)"),
    ]:
        with pytest.raises((ValueError, OSError), match=message):
            run("data", **out, **{"tokenizer": model, **options})
    for options, message in [
        ({"tokenizer": model, "text": path, "heldout_share": 0.6}, "argument --heldout-share: '0.6': must be above 0"),
        ({"chats": path}, "the following arguments are required: --tokenizer"),
    ]:
        with pytest.raises(SystemExit):
            run("data", **out, **options)
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_help_describes_the_layouts():
    assert '"conversations"' in prepare.__doc__ and '"weight": 0' in prepare.__doc__
    for speaker in ("human", "gpt"):
        assert speaker in chats._SPEAKERS


WORDS = ("messages", "conversations", "role", "content", "from", "value", "user", "assistant", "human", "gpt", "weight")
LEAVES = (*WORDS, None, True, 0, 1, -1.5, 10**30, "", "tools", "tool_calls", "finished", [], {}, "\n", "é")


def random_json(rng, depth=0):
    """Values that look like chats."""
    if depth > 4 or rng.random() < 0.2:
        return rng.choice(LEAVES)
    if rng.random() < 0.4:
        return [random_json(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(WORDS): random_json(rng, depth + 1) for _ in range(rng.randint(0, 4))}


def damaged_chat(rng):
    """A good chat in which one value is another."""
    value = chat_files.as_sharegpt(rng, chat_files.random_messages(rng))
    value = value if rng.random() < 0.5 else chat_files.as_openai(rng, chat_files.random_messages(rng))
    holders, rest = [], [value]
    while rest:
        holder = rest.pop()
        if isinstance(holder, dict | list) and holder:
            holders.append(holder)
            rest.extend(holder.values() if isinstance(holder, dict) else holder)
    holder = rng.choice(holders)
    holder[rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))] = rng.choice(LEAVES)
    return value


def test_any_json_is_a_chat_or_an_error_with_its_place(model):
    tokenizer_of_model, outcomes = Tokenizer.load(model), Counter()
    for seed in range(450):
        rng = random.Random(seed)
        value = random_json(rng) if seed % 3 == 0 else damaged_chat(rng)
        try:
            chat = chats.parse("f, line 7", json.loads(json.dumps(value)))
            found = chats.encode(chat, tokenizer_of_model, ends={1}, most=200, dropped=Counter())
        except ValueError as error:
            assert str(error).startswith("f, line 7: "), (seed, error)
            outcomes["error"] += 1
            continue
        for sequence in found:
            assert sequence.ids.shape == sequence.mask.shape and len(sequence.ids) <= 200 and sequence.mask[-1] == 1
        outcomes["sequences" if found else "nothing"] += 1
    assert min(outcomes[name] for name in ("error", "sequences")) > 50, outcomes


@pytest.mark.slow
def test_damaged_files_are_named(model, tmp_path):
    whole = write_chats(tmp_path / "chats.jsonl", 6).read_bytes()
    whole_list = b"[" + whole.strip().replace(b"\n", b",\n") + b"]"
    refused = 0
    for seed in range(30):
        rng = random.Random(seed)
        content = bytearray(whole if seed % 2 else whole_list)
        if seed % 4 < 2:
            del content[rng.randrange(len(content)) :]
        for _ in range(rng.randint(1, 3)):
            if content:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path = tmp_path / "damaged.jsonl"
        path.write_bytes(content)
        try:
            run("data", out=tmp_path / "out", tokenizer=model, chats=path)
        except ValueError as error:
            refused += 1
            assert "damaged.jsonl" in str(error) or str(error).startswith("--chats"), (seed, error)
    assert refused > 10
