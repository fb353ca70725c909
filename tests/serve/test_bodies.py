"""Malformed bodies get an error that names the field, and the server goes on."""

import json
import random
import urllib.error
import urllib.request

import pytest

import jspec
from jspec.core.sampling import Sampling
from jspec.drafters import Ngram
from jspec.generation.options import check_grammar_options
from jspec.generation.speculation import draft_limits
from jspec.serve.errors import engine_errors
from jspec.serve.fields import ApiError

COMMON_BAD = {
    "model": ["other", 5, ["fake"], "x" * 500],
    "n": [0, -1, 1.5, "2", True, [1], 257, 10**30],
    "max_tokens": [0, -5, 2.5, "10", True, {}, 10**12, 257],
    "temperature": [-1, "hot", [0.5], True, 1e-9, 1e39],
    "top_p": [-0.1, 1.1, "1", {}],
    "top_k": [-2, 1.5, "3", 2**31, False],
    "min_p": [-0.1, 1.01, "0"],
    "presence_penalty": ["1", 1e39, [], True],
    "frequency_penalty": ["1", -1e39, {}],
    "repetition_penalty": [0, -1, "1"],
    "min_tokens": [-2, 0.5, "1", 10**9, 300],
    "logit_bias": [
        *([], "x", {"a": 1}, {"-1": 1}, {"99999999": 1}, {"5": "1"}, {"5": True}, {"٣": 1}, {"05": 1}),
        {"1" * 50: 0},
    ],
    "stop": [5, [5], "", ["a", ""], ["x"] * 17, ["y" * 300], {"a": 1}],
    "seed": [2**63, -(2**63) - 1, 1.5, "1", True],
    "stop_token_ids": [5, [-1], ["a"], [10**9], [5] * 65],
    "allowed_token_ids": [[], 5, [-1], [1.5]],
    "bad_words": ["x", [""], [5], ["y" * 300]],
    "include_stop_str_in_output": [1, "yes"],
    "skip_special_tokens": [1, "no"],
    "return_token_ids": [1, []],
    "return_token_origins": [1, "yes"],
    "prompt_logprobs": [-1, 21, True],
    "stream": ["yes", 1, 0, []],
    "stream_options": [[], 5, {"include_usage": 1}, {"include": True}],
    "user": [5, ["me"]],
    "metadata": [5, "x", []],
    "prediction": ["x"],
    "store": [1, "yes"],
    "verbosity": [5, {}],
    "priority": [2**31, 0.5, "high"],
    "cache_salt": [5, {}],
    "truncate_prompt_tokens": [0, -2, 1.5, "5"],
    "ignore_eos": [1, 0, "yes", []],
    "speculation": [5, "ngram", [], {"depth": -1}, {"depth": 1.5}, {"depth": "1"}, {"drafter": 5}, {"steps": 1}],
    "response_format": [
        *(
            {"type": "json_schema"},
            "text",
            {},
            {"type": "xml"},
            {"type": "text", "x": 1},
            {"type": "json_object", "a": 1},
        ),
        {"type": "json_schema", "json_schema": {"name": "a", "schema": True}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer", "multipleOf": 2}}},
    ],
    "structured_outputs": [
        *(True, "x", ["x"], {"x": 1}, {}, {"json": {}, "regex": "a"}, {"grammar": "a"}, {"json": True}, {"choice": []}),
        *({"regex": "(?=a)"}, {"choice": [5]}, {"regex": "a", "whitespace_pattern": ""}, {"json": "{"}),
    ],
    "guided_json": [True, "x", ["x"], {"not": {}}, 5],
    "guided_regex": ["(", "a" * 50 + "\\1", 5, {}],
    "guided_choice": ["x", [], [""], {}],
    "guided_whitespace_pattern": [" ", 5],
}
BAD = {
    "/v1/completions": {
        **COMMON_BAD,
        "prompt": [
            *(None, "", [], {}, 5, [[]], [1.5], [1, "a"], ["a", 1], [-1], [10**9], [True], [["a"]], [None]),
            [2**70],
        ],
        "echo": ["yes", 1],
        "logprobs": [-1, 21, True, 0.5, "1"],
        "best_of": [0, 2, True],
        "suffix": ["end", 5],
        "messages": [[{"role": "user", "content": "x"}]],
    },
    "/v1/chat/completions": {
        **COMMON_BAD,
        "messages": [
            *(None, [], "hello", {}, [5], [{}], [{"role": "user"}], [{"content": "x"}]),
            *([{"role": "function", "content": "x"}], [{"role": 5, "content": "x"}], [{"role": "user", "content": 5}]),
            *([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],),
            *([{"role": "user", "content": [5]}], [{"role": "user", "content": [{"type": "text"}]}]),
            *([{"role": "user", "content": "x", "tool_calls": [{}]}], [{"role": "user", "content": "x", "color": 1}]),
            *([{"role": "user", "content": "refuse"}], [{"role": "user", "content": None}]),
        ],
        "max_completion_tokens": [0, "x", 1.5, 10**6],
        "logprobs": [1, 0, "true"],
        "top_logprobs": [21, -1, "2", 1.5],
        "tools": [
            *([{"type": "function"}], {}, "x", [5], [{"type": "custom", "function": {"name": "f"}}]),
            *([{"function": {"name": "f", "parameters": 5}}], [{"function": {"name": "a b"}}]),
            *([{"function": {"name": "f", "color": 1}}], [{"function": {"name": "f"}}] * 2),
        ],
        "tool_choice": ["required", "any", 5, {"type": "function"}, {"type": "function", "function": {"name": "f"}}],
        "parallel_tool_calls": [1, "yes"],
        "include_reasoning": ["yes"],
        "functions": [[{}]],
        "audio": [{}],
        "modalities": [["text", "audio"]],
        "chat_template_kwargs": [[], "x", {"messages": []}, {"tools": []}, {"continue_final_message": True}],
        "add_generation_prompt": [1, "no"],
        "continue_final_message": [1, "yes"],
        "prompt": ["x"],
    },
    "/tokenize": {"prompt": [5, []], "messages": [5, []], "add_special_tokens": [1, "no"], "tools": [5, [5]]},
    "/detokenize": {"tokens": [None, "x", [-1], [10**9], [1.5], {}], "prompt": ["x"]},
}
REFUSED = ["guided_grammar", "use_beam_search", "reasoning_effort"]
for path in ("/v1/completions", "/v1/chat/completions"):
    BAD[path] |= {name: [True, "x", ["x"], {"x": 1}] for name in REFUSED}
    BAD[path] |= {name: [0, "x"] for name in ("max_token", "Temperature", "wild", "", "a.b", "messages[0]")}
BAD["/v1/chat/completions"]["reasoning_effort"] = [True, 5, ["x"], {"x": 1}]
VALID = {
    "/v1/completions": {"prompt": "def f"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
GOOD = {"n": 2, "max_tokens": 4, "temperature": 0.5, "seed": 1, "stop": "\n", "top_p": 0.9, "user": "me", "top_k": None}


def malformed(count, seed):
    """(path, field, body) with one bad field each, and some good ones around it in any order."""
    points = [
        (path, field, value) for path, fields in BAD.items() for field, values in fields.items() for value in values
    ]
    chooser = random.Random(seed)
    chooser.shuffle(points)
    assert len(points) >= count
    for path, field, value in points:
        body = dict(VALID[path])
        if path.startswith("/v1"):
            body |= {name: GOOD[name] for name in chooser.sample(sorted(GOOD), chooser.randrange(4)) if name != field}
        if field == "max_completion_tokens":
            body.pop("max_tokens", None)  # The older name would be the wrong one.
        body[field] = value
        items = list(body.items())
        chooser.shuffle(items)
        yield path, field, dict(items)


def test_malformed_bodies_name_the_field(shared):
    count = 0
    for path, field, body in malformed(200, seed=0):
        answer = shared.post(path, body)
        shown = f"{path} {json.dumps(body)[:300]} -> {answer.status_code} {answer.text}"
        assert 400 <= answer.status_code < 500, shown
        error = answer.json()["error"]
        assert (error["param"] or "").startswith(field), shown
        assert field in error["message"] and len(error["message"]) < 400, shown
        count += 1
        if count % 20 == 0:
            assert shared.post("/v1/completions", {"prompt": "x"}).status_code == 200
    assert count >= 200
    assert not shared.engine.running


RAW = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"5",
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": NaN}',
    b'{"temperature": 1e999, "prompt": "x"}',
    b'{"n": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"prompt":' * 50_000,
    b'{"prompt": "x"} trailing',
    b'{prompt: "x"}',
    b"\xef\xbb\xbf",
    b"prompt=x",
]


@pytest.mark.parametrize("raw", RAW, ids=lambda raw: raw[:24])
def test_what_is_not_json(shared, raw):
    answer = shared.http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("body: "), answer.text


def test_random_bytes(shared):
    chooser = random.Random(0)
    valid = json.dumps({"prompt": "def f", "max_tokens": 3, "stop": ["a"], "logit_bias": {"5": 1.5}}).encode()
    for _ in range(100):
        raw = bytearray(valid)
        for _ in range(chooser.randrange(1, 4)):
            at = chooser.randrange(len(raw))
            raw[at : at + chooser.randrange(3)] = bytes(chooser.randrange(256) for _ in range(chooser.randrange(3)))
        answer = shared.http.post("/v1/completions", content=bytes(raw), headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 404), (raw, answer.text)
        assert answer.status_code == 200 or answer.json()["error"]["message"], raw


HINTS = {
    **{"user": "me", "prompt_cache_key": "a", "prompt_cache_retention": "24h", "safety_identifier": "b"},
    **{"service_tier": "flex", "request_id": "c", "verbosity": "low", "metadata": {"a": "b"}, "store": True},
    **{"prediction": {"type": "content", "content": "x"}},
}
NEUTRAL = {
    **{"best_of": 1, "suffix": "", "length_penalty": 1.0, "early_stopping": False, "logit_bias": {}, "bad_words": []},
    **{"spaces_between_special_tokens": True, "use_beam_search": False, "temperature": 1, "n": 1, "top_k": 0},
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_hints_and_neutral_values_are_taken(shared, path):
    for name, value in {**HINTS, **NEUTRAL}.items():
        shared.options_of(path, **{name: value})


def test_null_means_that_a_field_is_absent(shared):
    for path, body in VALID.items():
        for name in ("seed", "wild", "tools", "reasoning_effort", "best_of"):
            answer = shared.post(path, {**body, name: None})
            assert answer.status_code == 200, (path, name, answer.text)
        assert shared.post(path, dict.fromkeys(body)).status_code == 400


def test_a_seed_has_64_bits(shared):
    def seed_of(value):
        return shared.options_of(seed=value)["seed"]

    assert seed_of(2**32 - 1) == [(2**32 - 1, 0)] and seed_of(0) == [(0, 0)]
    beyond = [2**32, 2**63 - 1, -(2**63), -2]
    assert [seed_of(value) for value in beyond] == [seed_of(value) for value in beyond]
    assert len({str(seed_of(value)) for value in (*beyond, 0)}) == 5
    assert seed_of(-1) != seed_of(-1), "-1 is random"


def test_a_number_may_be_written_as_a_fraction_and_a_mark_may_come_first(shared):
    raw = b'\xef\xbb\xbf{"prompt": "x", "max_tokens": 2.0, "top_k": 3.0, "seed": 5.0}'
    answer = shared.http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert answer.json()["usage"]["completion_tokens"] == 2
    options = shared.engine.handles[-1].options
    assert options["sampling"].top_k == 3 and options["seed"] == [(5, 0)]


def test_prompts_are_truncated_if_asked_for(shared):
    ids = list(range(5, 305))
    for count, fields, expected in (
        (10, {}, ids[-10:]),
        (-1, {"max_tokens": 56}, ids[-200:]),
        (-1, {}, ids[-240:]),
        (400, {"prompt": ids[:20]}, ids[:20]),
        (3, {"prompt": "a b c d e f"}, shared.service.tokenizer.encode("a b c d e f")[-3:]),
    ):
        answer = shared.post("/v1/completions", {"prompt": ids, "truncate_prompt_tokens": count, **fields})
        assert shared.engine.handles[-1].prompt == expected, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == len(expected)
    chat = {"messages": [{"role": "user", "content": "word " * 1000}], "truncate_prompt_tokens": 20, "max_tokens": 1}
    assert shared.post("/v1/chat/completions", chat).json()["usage"]["prompt_tokens"] == 20


def test_no_probability_leaves_the_most_probable_token(shared):
    assert shared.options_of(top_p=0, top_k=5)["sampling"] == Sampling(top_k=1)


def test_the_newer_name_of_the_limit_wins(shared):
    body = {**VALID["/v1/chat/completions"], "max_tokens": 3, "max_completion_tokens": 2}
    assert shared.post("/v1/chat/completions", body).json()["usage"]["completion_tokens"] == 2


def test_unknown_fields_are_ignored_if_asked_for(serve, caplog):
    server = serve(server_options={"ignore_unknown": True})
    assert server.post("/v1/completions", {"prompt": "x", "wild": 1}).status_code == 200
    assert [record.getMessage() for record in caplog.records] == ["jspec: ignored the unknown field 'wild'"]
    assert server.post("/v1/completions", {"prompt": "x", "best_of": 2}).status_code == 400


def test_defaults_of_the_model(serve):
    server = serve(server_options={"defaults": Sampling(temperature=0.6, top_k=20, repetition_penalty=1.1)})

    def sampling_of(**fields):
        return server.options_of(**fields)["sampling"]

    assert sampling_of() == sampling_of(temperature=None) == Sampling(0.6, 20, repetition_penalty=1.1)
    assert sampling_of(temperature=1, top_k=-1, repetition_penalty=1) == Sampling()
    assert sampling_of(top_p=0.9) == Sampling(0.6, 20, 0.9, repetition_penalty=1.1)
    assert sampling_of(temperature=0, repetition_penalty=1) is None


def test_fields_that_ask_for_nothing_are_allowed(shared):
    body = {"messages": [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}], "max_tokens": 1}
    body |= {"tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "store": False, "n": None}
    body |= {"structured_outputs": None, "guided_json": None}
    body |= {"modalities": ["text"], "stop": [], "logprobs": False, "stream_options": None}
    assert shared.post("/v1/chat/completions", body).status_code == 200
    body = {"prompt": "x", "suffix": None, "best_of": None, "echo": False, "logit_bias": {}, "model": None}
    assert shared.post("/v1/completions", body).status_code == 200


def test_a_flag_is_not_a_number(shared):
    for value, status in ((0, 400), (False, 200)):
        assert shared.post("/v1/completions", {"prompt": "x", "use_beam_search": value}).status_code == status


def test_a_misspelled_field_gets_a_suggestion(shared):
    message = shared.post("/v1/completions", {"prompt": "x", "max_token": 5}).json()["error"]["message"]
    assert message == "max_token: unknown field; did you mean max_tokens?"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [5] * 256}, "prompt"),
        ({"prompt": "word " * 1000}, "prompt"),
        ({"prompt": [5] * 200, "max_tokens": 57}, "max_tokens"),
        ({"prompt": "x", "min_tokens": 17}, "min_tokens"),
        ({"prompt": "x", "max_tokens": 0, "logprobs": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"prompt": [5] * 257, "max_tokens": 0, "echo": True}, "prompt"),
        ({"prompt": [5] * 256, "max_tokens": 1, "echo": True}, "prompt"),
        ({"prompt": ["x"] * 200, "n": 2}, "prompt"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "stop": "a", "skip_special_tokens": False}, "skip_special_tokens"),
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "x", "echo": True, "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt": [5] * 300, "truncate_prompt_tokens": 290}, "prompt"),
        ({"prompt": [5] * 9 * 256, "truncate_prompt_tokens": 5}, "prompt"),
        ({"prompt": "word " * 20_000, "truncate_prompt_tokens": 5}, "prompt"),
        ({"prompt": "x", "bad_words": ["a"], "guided_regex": "a"}, "bad_words"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_does_not_fit(shared, body, param):
    answer = shared.post("/v1/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_errors_of_the_engine_name_the_field():
    def refused(check, *arguments, **options):
        with pytest.raises(ApiError) as raised, engine_errors():
            check(*arguments, **options)
        return raised.value.param

    assert refused(check_grammar_options, None, ignore_eos=True) == "ignore_eos"
    assert refused(draft_limits, jspec.Speculation("nothing"), Ngram()) == "speculation.drafter"
    assert refused(draft_limits, jspec.Speculation(depth=99), Ngram()) == "speculation.depth"
    with pytest.raises(ApiError) as raised, engine_errors():
        raise ValueError("page_size=3: is not the client's")
    assert raised.value.param is None


@pytest.mark.parametrize("count", (0, 5, 20))
def test_top_logprobs_of_a_number(shared, count):
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": count}
    (choice,) = shared.post("/v1/chat/completions", body).json()["choices"]
    assert {len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]} == {count}
    answer = shared.post("/v1/completions", {"prompt": "x", "logprobs": count})
    sizes = {len(entry) for entry in answer.json()["choices"][0]["logprobs"]["top_logprobs"]}
    assert {max(count, 1)} <= sizes <= {max(count, 1), count + 1}  # the chosen token may be none of them


def test_what_just_fits(shared):
    assert shared.post("/v1/completions", {"prompt": [5] * 200, "max_tokens": 56}).status_code == 200
    assert shared.post("/v1/completions", {"prompt": [5] * 256, "max_tokens": 0, "echo": True}).status_code == 200
    # The default length gives way to the context.
    assert shared.post("/v1/completions", {"prompt": [5] * 250}).json()["usage"]["completion_tokens"] == 6
    assert shared.post("/v1/completions", {"prompt": "x", "n": 2, "seed": 2**32 - 2}).status_code == 200


def test_limits_of_a_server(serve):
    server = serve(server_options={"prompt": 10, "output": 5, "sequences": 3, "body": 200})
    for body, param in [
        ({"prompt": [5] * 11}, "prompt"),
        ({"prompt": "a b c d e f g h i j k l"}, "prompt"),
        ({"prompt": "x", "max_tokens": 6}, "max_tokens"),
        ({"prompt": "x", "n": 4}, "n"),
        ({"prompt": ["x", "y"], "n": 2}, "prompt"),
    ]:
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert server.post("/v1/completions", {"prompt": [5] * 10}).json()["usage"]["completion_tokens"] == 5
    assert server.post("/v1/completions", {"prompt": "x" * 200}).status_code == 413

    def parts():
        yield b'{"prompt": "'
        yield b"x" * 300

    answer = server.http.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json_is_taken(shared, kind):
    answer = shared.http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind})
    assert answer.status_code == 415


def test_other_paths_and_methods(shared):
    for answer, status in [(shared.http.get("/v1/nothing"), 404), (shared.http.get("/v1/completions"), 405)]:
        assert answer.status_code == status and answer.json()["error"]["message"]
    assert shared.post("/v1/completions/", {"prompt": "x"}).status_code == 404


def test_a_model_without_chat_template(serve):
    server = serve(template=None)
    answer = server.post("/v1/chat/completions", VALID["/v1/chat/completions"])
    assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]


def test_a_client_that_sends_all_before_it_reads_gets_the_status(shared):
    """As urllib does: a server that closes at once would reset the connection."""
    request = urllib.request.Request(
        f"{shared.url}/v1/completions", b"x" * (17 * 2**20), {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    with error.value:
        assert error.value.code == 413
