"""Tokenizers and chat templates, compared with `tokenizers` and `transformers`; streams, with a search in bytes."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jspec.checkpoints.language_model import CheckpointError
from jspec.text.stream import TextStream, compile_stops, full_text
from jspec.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, naïve café déjà vu. ",
    "你好，世界！速い茶色の狐。 👋🏽 👩‍👩‍👧 🎉🎉 ",
    "def f(x):\n    return x + 1\n\n",
] * 20
TEXTS = st.text(st.sampled_from("aab bc  é你👋\n.e") | st.characters(exclude_categories=["Cs"]), max_size=12)
CHATML = (
    "{%- for m in messages %}\n    {{- '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}"
)
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "  hello fox é "}]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think>", "日本"])
    return backend


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Like a converted Llama 2 tokenizer: spaces are ▁, unknown characters become bytes, and a space is prepended."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, limit_alphabet=50, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"], "▁▁", "▁▁▁▁"]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    merges = [tuple(merge) for merge in model["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    pieces = [
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("▁▁", -3.0),
        ("▁ab", -3.0),
        ("ab", -3.5),
        *((c, -4.0) for c in "abcde你.\n"),
    ]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return backend


TOKENIZERS = {make.__name__: Tokenizer(make()) for make in (byte_level, sentencepiece_like, metaspace)}
all_tokenizers = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def save(directory, *, backend=None, config=None, template=None):
    (backend or byte_level()).save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


def draw_ids(data, tokenizer) -> list[int]:
    """Ids of valid and invalid text, of special tokens, and some outside the vocabulary."""
    some_id = st.integers(0, tokenizer.vocab_size + 3)
    parts = data.draw(
        st.lists(TEXTS.map(lambda text: tokenizer.encode(text, special=False)) | some_id.map(lambda i: [i]), max_size=8)
    )
    return [i for part in parts for i in part]


def spell(tokenizer, ids) -> bytes:
    spelled = tokenizer.token_bytes()
    return b"".join(spelled[i] for i in ids if i < len(spelled))


def draw_stops(data, tokenizer, ids) -> list[str]:
    """Stop strings, most of which occur in the text."""
    text = spell(tokenizer, ids).decode(errors="ignore")
    cut = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 6)).map(lambda c: text[c[0] : sum(c)])
    return data.draw(st.lists((cut | TEXTS).filter(len), max_size=3))


def stream_in_groups(data, tokenizer, prompt, ids, stop=()) -> tuple[list[str], TextStream]:
    """The pieces of a stream when ids are pushed in groups of random size."""
    stream, pieces, rest = TextStream(tokenizer, prompt, stop), [], ids
    while rest:
        size = data.draw(st.integers(0, 4))
        pieces.append(stream.push(rest[:size]))
        rest = rest[size:]
    return [*pieces, stream.finish()], stream


def naive_stop(raw: bytes, stops: list[bytes]) -> bytes:
    """The bytes before the stop string that ends first; before the longest if several end there."""
    for end in range(len(raw) + 1):
        lengths = [len(stop) for stop in stops if raw[:end].endswith(stop)]
        if lengths:
            return raw[: end - max(lengths)]
    return raw


# Tokens


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_token_bytes_equal_byte_level_decoding(data):
    tokenizer = TOKENIZERS["byte_level"]
    ids = draw_ids(data, tokenizer)
    assert spell(tokenizer, ids).decode(errors="replace") == tokenizer.decode(ids)


@all_tokenizers
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_full_text_is_what_the_ids_add_to_the_decoded_prompt(tokenizer, data):
    prompt, ids = draw_ids(data, tokenizer), draw_ids(data, tokenizer)
    before, both = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    text = full_text(tokenizer, prompt, ids)
    # For invalid UTF-8, the library's byte fallback also replaces neighboring characters.
    if "\ufffd" not in before + both + text:
        assert before + text == both


def test_special_tokens_add_no_bytes_and_other_added_tokens_add_their_content():
    tokenizer = TOKENIZERS["byte_level"]
    spelled, ids = tokenizer.token_bytes(), tokenizer.vocabulary()
    assert len(spelled) == tokenizer.vocab_size == max(ids.values()) + 1
    assert spelled[ids["<|im_end|>"]] == b""
    assert spelled[ids["<think>"]] == b"<think>"
    assert spelled[ids["日本"]] == "日本".encode()
    assert TOKENIZERS["sentencepiece_like"].token_bytes()[3 + 0x0A] == b"\n"


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.Fuse(), decoders.CTC()]), "CTC"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Strip"),
        (decoders.Sequence([decoders.Replace(tokenizers.Regex("▁"), " ")]), "Replace"),
        (None, "null"),
    ],
)
def test_an_unsupported_decoder_is_an_error(decoder, name):
    backend = byte_level()
    backend.decoder = decoder
    with pytest.raises(ValueError, match=rf"unsupported decoder step .*{name}"):
        Tokenizer(backend).token_bytes()


def test_encode_adds_special_tokens_by_default():
    tokenizer = TOKENIZERS["sentencepiece_like"]
    framed, bare = tokenizer.encode("the fox"), tokenizer.encode("the fox", special=False)
    assert framed == [1, *bare]
    assert tokenizer.decode(framed) == "the fox"


def test_truncation_and_padding_of_the_file_are_turned_off(tmp_path):
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.load(save(tmp_path, backend=backend))
    assert tokenizer.decode(tokenizer.encode("a quick brown fox, déjà vu")) == "a quick brown fox, déjà vu"
    assert len(tokenizer.encode("a")) == 1


# Streams


@all_tokenizers
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_stream_gives_the_full_text_for_any_grouping(tokenizer, data):
    prompt, ids = draw_ids(data, tokenizer), draw_ids(data, tokenizer)
    stops = draw_stops(data, tokenizer, ids)
    pieces, stream = stream_in_groups(data, tokenizer, prompt, ids, stops)
    assert "".join(pieces) == full_text(tokenizer, prompt, ids, stops)


@pytest.mark.slow(unless="sentencepiece")
@all_tokenizers
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_stream_ends_before_the_first_stop_string(tokenizer, data):
    prompt = tokenizer.encode("a", special=False)
    ids = draw_ids(data, tokenizer)
    stops = draw_stops(data, tokenizer, ids)
    raw = spell(tokenizer, ids)
    expected = naive_stop(raw, [stop.encode() for stop in stops])
    pieces, stream = stream_in_groups(data, tokenizer, prompt, ids, stops)
    assert "".join(pieces) == expected.decode(errors="replace")
    assert (stream.stopped_by is not None) == any(stop.encode() in raw for stop in stops)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_stream_and_the_automaton_stop_at_the_same_token(data):
    tokenizer = TOKENIZERS["byte_level"]
    ids = draw_ids(data, tokenizer)
    stops = [*draw_stops(data, tokenizer, ids), *data.draw(st.lists(st.just("<|im_end|>"), max_size=1))]
    vocab_size = tokenizer.vocab_size + 4
    table, state, stream = compile_stops(tokenizer, vocab_size, [], stops), 0, TextStream(tokenizer, [], stops)
    for token in ids:
        state = 0 if table is None else table.table[state, table.token_class[token]]
        stream.push([token])
        assert (state < 0) == (stream.stopped_by is not None)
        if state < 0:
            break


@pytest.mark.parametrize("character", ["é", "你", "👋", "👩‍👩‍👧"])
def test_characters_are_emitted_whole(character):
    tokenizer = TOKENIZERS["sentencepiece_like"]
    ids = [3 + byte for byte in character.encode()]
    stream = TextStream(tokenizer, [])
    pieces = [stream.push([i]) for i in ids]
    assert [piece for piece in pieces if piece] == list(character)
    assert stream.finish() == ""


def test_invalid_bytes_are_emitted_once_they_cannot_become_valid():
    tokenizer = TOKENIZERS["sentencepiece_like"]
    stream = TextStream(tokenizer, [])
    begun, letter = [3 + 0xF0, 3 + 0x9F], [3 + ord("x")]
    assert [stream.push(begun), stream.push(letter), stream.push(begun), stream.finish()] == [
        "",
        "\ufffdx",
        "",
        "\ufffd",
    ]
    assert stream.finish() == ""


def test_a_character_that_begins_in_the_prompt_is_completed():
    tokenizer = TOKENIZERS["sentencepiece_like"]
    ids = [3 + byte for byte in "a👋".encode()]
    for cut in range(2, len(ids)):
        assert full_text(tokenizer, ids[:cut], ids[cut:]) == "👋"
        assert full_text(tokenizer, ids[:cut], []) == ""


@pytest.mark.parametrize("name", ["sentencepiece_like", "metaspace"])
def test_a_leading_space_is_kept_only_after_other_text(name):
    tokenizer = TOKENIZERS[name]
    word = tokenizer.encode(" b" if name == "metaspace" else "b", special=False)
    assert full_text(tokenizer, tokenizer.encode("a"), word) == " b"
    assert full_text(tokenizer, [], word) == "b"
    if name == "sentencepiece_like":
        bos, eos = 1, 2
        assert full_text(tokenizer, [bos], word) == "b"
        assert full_text(tokenizer, [bos], [eos, *word, *word]) == "b b"


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["STOP"], ["xS", "TO", "P y"], ["x", "", ""]),  # across tokens
        (["bc"], ["abcd", "e"], ["a", ""]),  # within one
        (["aab", "ab"], ["xa", "a", "b"], ["x", "", ""]),  # the longer of two that end at the same byte
        (["abcd", "bc"], ["ab", "cd"], ["", "a"]),  # the one that ends first
        (["aab"], ["aa", "a", "c"], ["", "a", "aac"]),  # held back, then released
        (["ab", "ac"], ["a", "a", "c"], ["", "a", ""]),
        ("end", ["the e", "n"], ["the ", "", "en"]),  # held back at the end of the tokens
    ],
)
def test_stop_strings_step_by_step(stops, pieces, expected):
    tokenizer = TOKENIZERS["byte_level"]
    stream = TextStream(tokenizer, [], stops)
    got = [stream.push(tokenizer.encode(piece)) for piece in pieces]
    rest = stream.finish()
    assert got + ([rest] if rest else []) == expected


def test_a_stop_string_can_be_a_special_token():
    tokenizer = TOKENIZERS["byte_level"]
    end = tokenizer.special_ids["<|im_end|>"]
    table = compile_stops(tokenizer, 500, [7], "<|im_end|>").dense()
    assert table.shape == (1, 500) and np.flatnonzero(table[0] < 0).tolist() == sorted([7, end])
    stream = TextStream(tokenizer, [], ["<|im_end|>", "fox"])
    assert stream.push([*tokenizer.encode("a fo"), end, *tokenizer.encode("x")]) == "a fo"
    assert stream.stopped_by == "<|im_end|>" and stream.push(tokenizer.encode("more")) == "" == stream.finish()


def test_the_memory_of_a_stream_does_not_grow_with_the_text():
    tokenizer = TOKENIZERS["byte_level"]
    stream = TextStream(tokenizer, [], ["never a match"])
    word = tokenizer.encode(" quick brown n")

    def sizes():
        stream.push(word)
        return {name: len(value) for name, value in vars(stream).items() if hasattr(value, "__len__")}

    first = sizes()
    for _ in range(100):
        stream.push(word)
    assert sizes() == first and first["_pending"] > 0


def test_invalid_stop_strings():
    tokenizer = TOKENIZERS["byte_level"]
    with pytest.raises(ValueError, match=r"stop=\['x'\]: requires a tokenizer"):
        compile_stops(None, 10, [], ["x"])
    for make in (lambda stop: compile_stops(tokenizer, 500, [], stop), lambda stop: TextStream(tokenizer, [], stop)):
        with pytest.raises(ValueError, match=r"stop=\['a', ''\]"):
            make(["a", ""])
        for wrong in (None, 3, ["a", 3.5], b"a"):
            with pytest.raises(TypeError, match="stop=.*a string or a list of strings and token ids"):
                make(wrong)
    with pytest.raises(ValueError, match="token id -1"):
        TextStream(tokenizer, []).push([-1])


def test_no_tokenizer_is_required_without_stop_strings():
    assert compile_stops(None, 10, []) is None
    assert np.flatnonzero(compile_stops(None, 10, [3]).dense()[0]).tolist() == [3]


# Files


def test_directory_without_a_tokenizer(tmp_path):
    assert Tokenizer.load(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, which is required; .*save_pretrained"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_damaged_file_is_named(tmp_path, name):
    (save(tmp_path) / name).write_bytes(b'{"model": \xff')
    with pytest.raises(CheckpointError, match="chat template" if name.endswith("jinja") else name):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (3, "chat_template must be a string or a list"),
        ([3], "chat_template must be a string or a list"),
        ([{"name": "default"}], r"'chat_template\[0\].template' is missing"),
    ],
)
def test_a_chat_template_of_the_wrong_type(tmp_path, template, message):
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(save(tmp_path, config={"chat_template": template}))


# Chat templates


def test_template_files_take_precedence_over_the_configuration(tmp_path):
    directory = save(tmp_path, config={"chat_template": "string"})
    assert Tokenizer.load(directory).apply_chat_template(MESSAGES) == "string"
    named = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "{{ tools | tojson }}é"}]
    tokenizer = Tokenizer.load(save(directory, config={"chat_template": named}))
    assert tokenizer.apply_chat_template(MESSAGES) == "listed"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{"name": "<é>"}]) == '[{"name": "<é>"}]é'
    tokenizer = Tokenizer.load(save(directory, template="file"))
    assert tokenizer.apply_chat_template(MESSAGES, tools=[]) == "file"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("file for tools")
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.apply_chat_template(MESSAGES, tools=[]) == "file for tools"


def test_a_missing_template_is_an_error(tmp_path):
    tokenizer = Tokenizer.load(save(tmp_path))
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizer.chat(MESSAGES)
    with pytest.raises(ValueError, match=r"it has \['rag'\], but not 'default'"):
        Tokenizer(byte_level(), {"rag": ""}).chat(MESSAGES)


def test_chat_adds_no_special_tokens_beyond_those_of_the_template():
    tokenizer = Tokenizer(
        sentencepiece_like(), {"default": "{{ bos_token }}{{ messages[0].content }}"}, {"bos_token": "<s>"}
    )
    assert tokenizer.chat([{"role": "user", "content": "fox"}]).count(1) == 1


def test_special_tokens_of_the_configuration_reach_the_template(tmp_path):
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "add_bos_token": True, "pad_token": None}
    save(tmp_path, config=config, template="{{bos_token}}{{eos_token}}{{pad_token}}{{unk_token}}{{add_bos_token}}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<u>", "eos_token": "older"}))
    with pytest.warns(UserWarning, match="lacks the special token '<u>'"):
        assert Tokenizer.load(tmp_path).apply_chat_template(MESSAGES) == "<s><|im_end|><u>"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{% generation %}{{ m.role }}\n{% endgeneration %}{% endfor %}", "system\nuser\n"),
        ("{% generation %}{% set x = 1 %}{% endgeneration %}{{ x is defined }}", "False"),
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{{ {'b': '<é>', 'a': 1} | tojson(indent=1) }}", '{\n "b": "<é>",\n "a": 1\n}'),
        ("{{ add_generation_prompt }} {{ tools is none }} {{ documents is none }}", "True True True"),
        ("{{ enable_thinking }}", "False"),
        ("{{ 'name' in messages[0] }}", "False"),
    ],
)
def test_features_of_templates(source, expected):
    tokenizer = Tokenizer(byte_level(), {"default": source})
    messages = [{**MESSAGES[0], "name": None}, MESSAGES[1]]
    assert tokenizer.apply_chat_template(messages, enable_thinking=False) == expected


@pytest.mark.parametrize("messages", ["hello", [], {"role": "user", "content": "hello"}, ["hello"]])
def test_messages_of_the_wrong_type(messages):
    with pytest.raises(ValueError, match="messages=.*must be a list"):
        Tokenizer(byte_level(), {"default": ""}).chat(messages)


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_chat_equals_transformers(tmp_path, add_generation_prompt):
    transformers = pytest.importorskip("transformers", reason="needs the extra parity")
    source = "{{ bos_token }}{% generation %}\n" + CHATML + "{% endgeneration %}{{ tools | tojson }}"
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="<|im_end|>", chat_template=source
    )
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    options = {"add_generation_prompt": add_generation_prompt, "tools": [{"name": "é", "type": "function"}]}
    text = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert ours.apply_chat_template(MESSAGES, **options) == text
    assert ours.chat(MESSAGES, **options) == theirs.apply_chat_template(MESSAGES, return_dict=False, **options)
    assert ours.decode(ours.chat(MESSAGES)) == theirs.decode(ours.chat(MESSAGES), skip_special_tokens=True)
