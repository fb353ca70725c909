"""Chats become sequences whose counted tokens are those that the model writes when it serves the chat."""

import random
from collections import Counter

import chat_files
import pytest
from chat_files import END, TEMPLATES

from jspec.text.tokenizer import Tokenizer
from jspec.train import chats

SEEDS = 24


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def served(request, tmp_path_factory):
    """A tokenizer with a template, and the id that ends a reply."""
    directory = tmp_path_factory.mktemp(request.param)
    chat_files.write_tokenizer(directory, TEMPLATES[request.param])
    found = Tokenizer.load(directory)
    return request.param, found, found.special_ids[END]


def runs(encoded):
    """Start and end of each run of tokens that count."""
    padded = [0, *encoded.mask.tolist(), 0]
    edges = [i for i in range(len(padded) - 1) if padded[i] != padded[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def encode(value, served, *, most=10**6, where="f, line 1"):
    dropped = Counter()
    _, tokenizer, end = served
    return chats.encode(chats.parse(where, value), tokenizer, ends={end}, most=most, dropped=dropped), dropped


def test_what_counts_is_what_is_served(served):
    """Before each run of counted tokens is the prompt of the reply as it is served, and the run is the reply."""
    name, tokenizer, end = served
    sizes = Counter()
    for seed in range(SEEDS):
        rng = random.Random(f"{name} {seed}")
        messages = chat_files.random_messages(rng, thinking=name == "thinking")
        layout = chat_files.as_sharegpt if seed % 2 else chat_files.as_openai
        sequences, dropped = encode(layout(rng, messages), served)
        assert not dropped
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        found = [(sequence, run) for sequence in sequences for run in runs(sequence)]
        assert len(found) == len(replies)
        for index, (sequence, (start, stop)) in zip(replies, found, strict=True):
            ids = sequence.ids.tolist()
            assert ids[:start] == tokenizer.chat(messages[:index])
            assert ids[stop - 1] == end and end not in ids[start : stop - 1]
            said = messages[index]["content"]
            assert tokenizer.decode(ids[start:stop]).strip() == said.strip()
        for sequence in sequences:
            assert sequence.mask[-1] == 1
            assert tokenizer.encode(sequence.prompt, special=False) == sequence.ids.tolist()[: runs(sequence)[-1][0]]
        sizes[len(sequences)] += 1
    # Only a template that changes earlier turns splits chats.
    assert (max(sizes) > 1) == (name == "thinking")


def test_every_bad_chat_is_named_with_its_place(served):
    """Each error begins with file and line, and names what is valid."""
    ask = {"role": "user", "content": "x"}
    answer = {"role": "assistant", "content": "y"}
    for value, message in [
        ("x", "must be an object with 'messages' or 'conversations'"),
        ([ask, answer], "must be an object with"),
        (None, "must be an object with"),
        ({}, "must have either 'messages' or 'conversations'"),
        ({"text": "x"}, r"has the keys \['text'\]"),
        ({"messages": [ask], "conversations": [ask]}, "has both"),
        ({"messages": []}, r"messages=\[\]: must be a list of at least one message"),
        ({"messages": {"0": ask}}, "must be a list"),
        ({"messages": [ask] * 2001}, "has 2001 messages: must have at most 2000"),
        ({"messages": [ask, answer], "tools": "x"}, "tools='x': must be a list"),
        ({"messages": [ask, answer], "finished": 1}, "finished=1: must be true or false"),
        ({"messages": [ask, "y"]}, r"messages\[1\]='y': must be an object"),
        ({"messages": [ask, {"role": "robot", "content": "y"}]}, r"messages\[1\]: role='robot': must be one of system"),
        ({"messages": [ask, {"role": [], "content": "y"}]}, r"role=\[\]: must be one of"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, r"conversations\[0\]: from='alien': must be one"),
        ({"conversations": [{"value": "x"}]}, "from=None: must be one of"),
        ({"conversations": [{"from": 3, "value": "x"}]}, "from=3: must be one of"),
        ({"messages": [ask, {"role": "assistant"}]}, "content=None: must be text"),
        ({"messages": [ask, {"role": "assistant", "content": 5}]}, "content=5: must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, answer]}, "has a part that is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}, answer]}, "has a part without a text"),
        ({"messages": [ask, {**answer, "weight": 0.5}]}, "weight=0.5: must be 0 or 1"),
        ({"messages": [ask, {**answer, "weight": True}]}, "weight=True: must be 0 or 1"),
        ({"messages": [ask, {**answer, "content": "\ud800"}]}, "lone surrogate"),
        ({"messages": [answer, ask]}, r"messages\[0\]: is of the assistant; a reply needs a message before it"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message) as raised:
            encode(value, served)
        assert str(raised.value).startswith("f, line 1: ")


def test_what_is_dropped_is_counted(served):
    _, tokenizer, _ = served
    ask, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "yes"}
    assert encode({"messages": [ask]}, served) == ([], {"chat without a reply": 1})
    assert encode({"conversations": [{"from": "human", "value": "x"}]}, served)[1] == {"chat without a reply": 1}
    silent = "reply that is empty or has weight 0, which is context only"
    for unlearned in ({**answer, "content": " \n"}, {**answer, "weight": 0}):
        assert encode({"messages": [ask, unlearned]}, served) == ([], {silent: 1})
        (sequence,), dropped = encode({"messages": [ask, unlearned, ask, answer]}, served)
        assert dropped == {silent: 1} and len(runs(sequence)) == 1
        start = runs(sequence)[0][0]
        kept = {key: value for key, value in unlearned.items() if key != "weight"}
        assert sequence.ids.tolist()[:start] == tokenizer.chat([ask, kept, ask])
    (whole,), dropped = encode({"messages": [ask, answer]}, served)
    (longer,), dropped = encode({"messages": [ask, answer, ask, ask]}, served)
    assert dropped == {"message after the last reply": 2} and longer.ids.tolist() == whole.ids.tolist()
    # A reply counts as a whole or not at all.
    size = len(whole.ids)
    (both,), _ = encode({"messages": [ask, answer, ask, answer]}, served)
    for most in (size - 1, size, len(both.ids) - 1, len(both.ids)):
        found, dropped = encode({"messages": [ask, answer, ask, answer]}, served, most=most)
        lost = 2 if most < size else 1 if most < len(both.ids) else 0
        assert dropped == ({f"reply beyond {most} tokens": lost} if lost else {})
        assert [len(sequence.ids) for sequence in found] == [[len(both.ids)], [size], []][lost]


def test_a_reply_that_was_cut_has_no_end(served):
    _, tokenizer, end = served
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yes no"}]
    (whole,), _ = encode({"messages": messages}, served)
    (cut,), _ = encode({"messages": messages, "finished": False}, served)
    assert whole.ids.tolist() == [*cut.ids.tolist(), end]
    assert whole.mask.tolist() == [*cut.mask.tolist(), 1]


def test_a_template_that_renders_replies_in_another_way_is_refused(tmp_path):
    chat_files.write_tokenizer(tmp_path, chat_files.BAD_TEMPLATE)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    wrong = r"f, line 1: messages\[1\]: the chat template renders the reply in another way than its prompt, which ends"
    with pytest.raises(ValueError, match=wrong):
        encode({"messages": messages}, ("bad", Tokenizer.load(tmp_path), 1))
    chat_files.write_tokenizer(tmp_path, "{{ raise_exception('no system prompt') }}")
    with pytest.raises(ValueError, match=r"f, line 1: messages\[1\]: .*rejects these messages: no system prompt"):
        encode({"messages": messages}, ("bad", Tokenizer.load(tmp_path), 1))


def test_tokens_that_merge_across_the_beginning_of_a_reply(tmp_path):
    """The prompt keeps the tokens that it has when it is served."""
    bpe = chat_files.make_tokenizer(400, ["xx yy\n\n"] * 50)
    assert len(bpe.encode("\n\n").ids) == 1
    chat_files.write_tokenizer(tmp_path, TEMPLATES["chatml"], bpe)
    tokenizer = Tokenizer.load(tmp_path)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\nyes"}] * 2
    prompt = tokenizer.encode("assistant\n")
    assert tokenizer.encode("assistant\n\nyes")[: len(prompt)] != prompt
    found, _ = encode({"messages": messages}, ("merged", tokenizer, bpe.token_to_id(END)))
    # Served again, the first reply would have merged tokens, so the second has a sequence of its own.
    assert [len(runs(sequence)) for sequence in found] == [1, 1]
    for index, sequence in zip((1, 3), found, strict=True):
        ((start, stop),) = runs(sequence)
        assert sequence.ids.tolist()[:start] == tokenizer.chat(messages[:index])
        assert tokenizer.decode(sequence.ids.tolist()[start:stop]) == "\nyes"
