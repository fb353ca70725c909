"""Every option of every command with values that are wrong, extreme or odd: the command either starts its work, or ends
with status 2 and one line that names what is wrong.

The work itself is replaced, so that thousands of inputs take seconds. Everything before it runs: parsing, reading
files, loading models, and all checks of a generation up to the first compiled program.
"""

import functools
import io
import itertools
import json
import os
import random
import re
import sys

import pytest

from jspec import cli
from jspec.analysis import records
from jspec.bench import machine, subject
from jspec.bench.options import BenchOptions
from jspec.cli import arguments as shared
from jspec.cli import common, evaluate, generate, serve
from jspec.core.options import kind_of, option_of, options_of
from jspec.generation import run

TINY = "bundled:python-tiny"
OPTIONS = {"generate": generate.Options, "evaluate": evaluate.Options, "bench": BenchOptions, "serve": serve.Options}
BASE = {
    "generate": ["x", "--model", TINY, "--max-new-tokens", "4"],
    "evaluate": ["--model", TINY, "--limit", "2", "--max-new-tokens", "4"],
    "bench": ["--preset", "tiny"],
}
"""Commands with arguments that are valid."""
NO_INT = ("", "x", "True", "None", "1.5", "1e3", "0x10", "1/2", "½", "nan", "a\0b", "a\udcff", "9" * 5000)
NO_FLOAT = ("", "x", "True", "None", "1/2", "nan", "-nan", "inf", "-inf", "1e400", "1e39", "1e-46", "0x10", "a\0b")
ODD = ("0", "1", "2", "7", "1_0", "٣", " 5 ", "+4", "-1", "007", "1.5", "64", str(2**31), str(2**63), "0." + "9" * 400)


class Started(BaseException):
    """The command has checked its input, and begins its work."""


def wrong_values(field, spec):
    """Texts that are no value of an option, by its type and its bounds."""
    kind, bounds = kind_of(field).type, spec.bounds
    if spec.choices:
        return ["", "x", "None"]
    if kind not in (int, float):
        return []
    beyond = [str(bounds[name] - 1) for name in ("least", "above") if name in bounds]
    beyond += [str(bounds["most"] + 1)] if "most" in bounds else []
    return [*(NO_INT if kind is int else NO_FLOAT), *beyond]


def arguments_of(option, value):
    """An option with a value, as a shell passes it."""
    field, name = option[0], option[0].name
    if kind_of(field).type is bool:
        return [option_of(f"no_{name}" if field.default is True else name)]
    return [f"{option_of(name)}={value}"]


def pairs():
    """(command, arguments): pairs of options with values at random, of which some are valid."""
    choose = random.Random(0)
    for command, base in BASE.items():
        options = [option for option in options_of(OPTIONS[command]).values() if not option[1].positional]
        for _ in range(300):
            pair = choose.sample(options, 2)
            yield (
                command,
                [*base, *itertools.chain(*[arguments_of(o, choose.choice(o[1].choices or ODD)) for o in pair])],
            )


@pytest.fixture(autouse=True)
def commands(monkeypatch, tmp_path):
    """Commands that begin no work, in an empty directory."""

    def start(*args, **options):
        raise Started

    monkeypatch.setattr(run, "jitted_prefill", start)
    monkeypatch.setattr(machine, "copy_bandwidth", start)
    monkeypatch.setattr(subject.Subject, "make", start)
    monkeypatch.setattr(common, "load", loaded)
    monkeypatch.chdir(tmp_path)


@functools.cache
def loaded(source, **options):
    return common_load(source, **options)


common_load = common.load


def outcome(capsys, arguments):
    """The status of a command, None if it began its work, and what it wrote to standard error."""
    try:
        status = cli.main(arguments)
    except Started:
        status = None
    except SystemExit as end:
        status = end.code
    return status, capsys.readouterr().err


def check(capsys, arguments, *names):
    """Runs a command; a refusal is one line that has one of `names`."""
    status, err = outcome(capsys, arguments)
    assert status in (None, 0, 2), (arguments, status, err)
    if status != 2:
        return status
    assert err.startswith("jspec") and err.count("\n") == 1 and len(err) < 2500, (arguments, err)
    assert "Traceback" not in err and "jspec.load" not in err, (arguments, err)
    spelled = {name for name in options_of(OPTIONS[arguments[0]]) if "_" in name}
    found = re.findall(r"\w+", err)
    assert not spelled & set(found), (arguments, err)
    assert not names or any(name in err for name in names), (arguments, err)
    return status


@pytest.mark.slow(unless="some-")
@pytest.mark.parametrize("command", OPTIONS)
@pytest.mark.parametrize("every", [4, 1], ids=["some", "all"])
def test_every_option_refuses_what_is_no_value_of_it(capsys, command, every):
    """The values take turns where only some are tried."""
    base = BASE.get(command, [TINY])
    cases = [
        (option, value)
        for option in options_of(OPTIONS[command]).values()
        for value in (() if option[1].positional else wrong_values(*option))
    ]
    for option, value in cases[::every]:
        name = option_of(option[0].name)
        assert check(capsys, [command, *base, *arguments_of(option, value)], name) == 2, (name, value)
    assert len(cases) > 150


@pytest.mark.parametrize("kind", OPTIONS.values(), ids=OPTIONS)
def test_every_option_has_help_and_checks_its_type(kind):
    """As a value of Python, too: it is named if it is of another type."""
    given = {"model": TINY, "prompt": "x", "preset": "tiny"}
    required = {name: given[name] for name in given if name in options_of(kind)}
    for name, (_, spec) in options_of(kind).items():
        assert spec.help, name
        with pytest.raises((TypeError, ValueError), match=name.replace("_", "[-_]")):
            kind(**{**required, name: object()})


@pytest.mark.slow
def test_pairs_of_options_are_refused_in_one_line_or_the_work_begins(capsys):
    for command, arguments in pairs():
        check(capsys, [command, *arguments])


@pytest.mark.parametrize("command", BASE)
def test_valid_input_begins_the_work(capsys, command):
    assert outcome(capsys, [command, *BASE[command]])[0] is None


@pytest.mark.parametrize("command", BASE)
def test_required_arguments_are_named(capsys, command):
    status, err = outcome(capsys, [command])
    needed = {"generate": "PROMPT or --prompts FILE: none is given", "evaluate": None}
    wanted = needed.get(command, "--preset NAME or --checkpoint MODEL: none is given")
    assert status is None if wanted is None else status == 2 and wanted in err and err.count("\n") == 1


RECORDS = [
    *(b"", b" \n\n", b"[]", b"{}", b"null", b"1", b"true", b'"', b"[", b"[[", b"{", b'["a"', b"[1]", b'["a", 2]',
        b"[null]"),
    *(b'["a", ["b"]]', b'{"prompt": null}', b'{"prompt": ["a"]}', b'{"text": "a"}', b'{"prompt": "a"}{"prompt": "b"}'),
    *(b'"a"\n2\n', b'"a"\nb\n', b"\xff\xfe", b'"\xff"', b'"a"\n"\xff"', "\ufeff".encode("utf-16"), b'"\\ud800"',
        b'"\\x"'),
    *(b"[" * 100_000, b'{"prompt": ' * 100_000, b"[1e999]", b"[NaN]", b'{"prompt": "a", "score": NaN}', b'"a\n"',
        b"\0"),
    *(b'""', b'[""]', b'"' + b"a " * 9000 + b'"'),
]  # fmt: skip
GOOD_RECORDS = [
    *(b'["a"]', b'"a"', b'"a"\n"b"', b'{"prompt": "a"}', b'{"prompt": "a", "id": 1}\r\n\r\n"b"\r\n',
        b'\xef\xbb\xbf"a"\n'),
    *('"a\u2028b\x85c"'.encode(), b'[{"prompt": "a", "prompt": "b"}, "c"]', b'"\\ud83d\\ude00"', b'"a\\u0000"'),
]  # fmt: skip


@pytest.mark.slow(unless=("file-evaluate", "standard input-generate"))
@pytest.mark.parametrize("command", ("generate", "evaluate"))
@pytest.mark.parametrize("where", ("file", "standard input"))
def test_a_file_of_prompts_is_read_or_named(capsys, tmp_path, monkeypatch, command, where):
    path = tmp_path / "prompts.jsonl"
    base = [command, *BASE[command][command == "generate" :]]
    for content in [*RECORDS, *GOOD_RECORDS]:
        path.write_bytes(content)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        given = str(path) if where == "file" else "-"
        status = check(capsys, [*base, "--prompts", given], "--prompts ")
        assert status == (2 if content in RECORDS else None), content[:40]


def test_a_missing_or_strange_file_of_prompts_is_named(capsys, tmp_path):
    for command, path in itertools.product(
        ("generate", "evaluate"), ("", ".", "/", "none", "a\0b", "x" * 5000, "/dev/null")
    ):
        base = [command, *BASE[command][command == "generate" :]]
        assert check(capsys, [*base, "--prompts", path], "--prompts ") == 2


def test_lines_of_prompts_are_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"a"\n\n{"prompt": 3}\n')
    with pytest.raises(
        ValueError, match=re.escape(f"{path}, line 3: must be a string, or an object whose key 'prompt'")
    ):
        records.read_prompts(path)
    path.write_text('["a", 5]')
    with pytest.raises(ValueError, match=re.escape(f"{path}, prompt 2: must be")):
        records.read_prompts(path)


@pytest.mark.parametrize(
    "record, message",
    [
        ('{"turns": "a"}', "turns='a': must be a list of at least one string"),
        ('{"turns": []}', "turns=[]: must be a list of at least one string"),
        ('{"turns": ["a", 3]}', "must be a string, or an object whose key 'prompt'"),
        ('{"turns": ["a", "\\ud800"]}', "'\\ud800'"),
        ('{"turns": ["a"], "prompt": "a"}', "must have one of the keys 'prompt' and 'turns', not both"),
        ('{"turns": ["a", "b"]}', "has 2 turns"),
        ('{"prompt": "a", "category": 3}', "category=3: must be a string"),
        ('{"turns": ["a", "b"], "rendered": true}', "has 2 turns"),
    ],
)
def test_conversations_are_checked(capsys, tmp_path, record, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"a"\n{record}\n')
    status, err = outcome(capsys, ["evaluate", *BASE["evaluate"], "--prompts", str(path)])
    assert status == 2 and message in err and f"--prompts {path}" in err and (" 2: " in err), err


def test_a_conversation_of_several_turns_is_only_for_evaluate(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a"]}')
    assert records.read_prompts(path) == ["a"]
    path.write_text('{"turns": ["a", "b"]}')
    with pytest.raises(ValueError, match="line 1: has 2 turns; must have one, except for `jspec evaluate --chat`"):
        records.read_prompts(path)
    (record,) = records.read_records(path, conversations=True)
    assert record == {"turns": ["a", "b"], "prompt": "a"}


@pytest.mark.parametrize("content", (b"\xff", b"", b"\xc3"))
def test_standard_input_as_the_prompt(capsys, monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert check(capsys, ["generate", "-", *BASE["generate"][1:]], "standard input", "PROMPT") == 2
    monkeypatch.setattr(sys, "stdin", None)
    assert check(capsys, ["generate", "-", *BASE["generate"][1:]], "standard input") == 2


@pytest.mark.parametrize("prompt", ("", "a\udcff", "x " * 9000, "a\0b", "\n", "\u202e"))
def test_a_prompt_is_refused_by_name_or_the_work_begins(capsys, prompt):
    check(capsys, ["generate", prompt, *BASE["generate"][1:]], "PROMPT")


@pytest.mark.parametrize(
    "command, option", [("evaluate", "--json"), ("evaluate", "--plot"), ("bench", "--json"), ("bench", "--plot")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(capsys, tmp_path, command, option):
    ending = ".png" if option == "--plot" else ""
    (tmp_path / f"folder{ending}").mkdir()
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / f"pipe{ending}")
    for name in ("", "folder", "none/x", "file/x", "pipe", "a\0b", "x" * 300, "/", "/proc/none/x", "/none/x"):
        assert check(capsys, [command, *BASE[command], option, f"{name}{ending}"], f"{option} ") == 2, name


@pytest.mark.parametrize("command", ("evaluate", "bench"))
def test_a_file_is_left_as_it_is_until_the_work_is_done(capsys, tmp_path, command):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("results")
    for path in (old, new):
        assert outcome(capsys, [command, *BASE[command], "--json", str(path)])[0] is None
    assert old.read_text() == "results" and not new.exists()


@pytest.mark.parametrize("name", ("x", "x.", "x.docx", ".png/x", "x.png.txt"))
def test_a_picture_has_a_known_ending(capsys, needs, name):
    needs("matplotlib")
    assert check(capsys, ["bench", *BASE["bench"], "--plot", name], "--plot") == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--preset deepseek-v3.2", "deepseek-v3.2: "),
        ("--preset qwen3-next --mode plain", "qwen3-next: "),
        ("--preset tiny --depth 2147483647", "--depth"),
        ("--preset tiny --num-nodes 2147483647", "--num-nodes"),
    ],
)
def test_what_does_not_fit_is_known_before_the_first_byte(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(subject.weights, "random_weights", None)
    assert check(capsys, ["bench", *arguments.split()], message) == 2


@pytest.mark.parametrize(
    "message, wanted",
    [
        ("max_new_tokens=0: must be at least 1", "--max-new-tokens 0: must be at least 1"),
        ("Eagle(depth=0): depth must be at least 1", "--depth 0: depth must be at least 1"),
        ("Eagle(depth=4, width=2, num_nodes=3): num_nodes is", "--depth 4 --width 2 --num-nodes 3: --num-nodes is"),
        ("Eagle(window=4, keep_first=5): no", "--draft-window 4 --keep-first 5: no"),
        ("Ngram(depth=2.5): must be an int", "--depth 2.5: must be an int"),
        ("needs a head: jspec.load(..., draft=\"...\")", "needs a head: --draft MODEL"),
        ("accept='greedy' ignores it, or use 'coupled'", "--accept greedy ignores it, or use 'coupled'"),
        ("accept='block': give Standalone width=1", "--accept block: give Standalone --width 1"),
        ("draft='a b' differs", "--draft 'a b' differs"),
        ("draft='' differs", "--draft '' differs"),
        ("debug=True: no", "--debug: no"),
        ("Eagle(depth=70, width=2, num_nodes=None): too deep", "--depth 70 --width 2: too deep"),
        ("use drafter=None or 'ngram'", "use --drafter plain or 'ngram'"),
        ("omit it: draft=None", "omit it: no --draft"),
        ("set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95", "set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"),
        ("config.json: hidden_size=3 and x_depth=2", "config.json: hidden_size=3 and x_depth=2"),
        ("jspec.load(...) loads them", "this command loads them"),
    ],
)  # fmt: skip
def test_errors_have_the_names_of_options(message, wanted):
    names = [
        "max_new_tokens", "depth", "width", "num_nodes", "window", "keep_first", "draft", "accept", "debug",
        "drafter",
    ]  # fmt: skip
    assert shared.in_options(message, names) == wanted
    assert shared.in_options(message, []) == message


def test_options_that_contradict_each_other(capsys, tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(["a"]))
    for arguments, message in (
        (["generate"], "PROMPT or --prompts FILE: none is given"),
        (["generate", "x", "--prompts", str(path)], "PROMPT or --prompts FILE: both are given"),
        (["generate", "x", "--batch", "2"], "--batch 2: requires --prompts"),
        (["generate", "x", "--compare", "--json"], "--compare: prints text for one PROMPT; omit --json"),
        (["generate", "--show", "--prompts", str(path)], "--show: prints text for one PROMPT; omit --prompts"),
        (["generate", "x", "--stop", ""], "--stop '': must not be empty"),
        (["generate", "x", "--model", ""], "--model '': must be"),
        (["generate", "x", "--draft", ""], "--draft '': must be"),
        (["bench", "--preset", "tiny", "--plot", "none/x.png"], "--plot none/x.png: "),
    ):
        assert check(capsys, arguments, message) == 2


def test_a_missing_extra_is_one_line(capsys, monkeypatch, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert cli.main(["generate", "--model", str(tmp_path / "model.gguf"), "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith('model.gguf: requires gguf: pip install "jspec-decoding[gguf]"')
