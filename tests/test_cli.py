"""The command line."""

import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import recorded

import jspec
from jspec import cli
from jspec.cli import common, evaluate, generate, prompt_sets
from jspec.loading import startup
from jspec.loading.hub import locate
from jspec.models import Assistant, EagleHead, Llama

PAIR = ("--model", "bundled:python-tiny", "--draft", "bundled:python-tiny", "--drafter", "standalone")


@pytest.fixture(autouse=True)
def no_notices(monkeypatch):
    """Standard error does not depend on the speed of the machine."""
    monkeypatch.setattr(startup, "NOTICE_DELAY", 1000.0)


def run(capsys, *arguments):
    status = cli.main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_generate_streams_text_and_prints_a_summary(capsys):
    status, out, err = run(capsys, "generate", "def quicksort(items):", "--max-new-tokens", "32", *PAIR)
    assert status == 0
    assert out.startswith("def quicksort(items):") and len(out) > 40
    (summary,) = err.strip().splitlines()
    assert "standalone: 32 new tokens in" in summary
    assert "accept length" in summary and "tokens/s" in summary


@pytest.mark.slow
def test_compare_runs_plain_decoding(capsys):
    arguments = ("--max-new-tokens", "24", "--compare", "--drafter", "frozen-kv-mtp", "--depth", "4")
    status, _, err = run(capsys, "generate", "def add(a, b):", *arguments)
    assert status == 0 and "frozen-kv-mtp: 24 new tokens" in err
    assert re.search(r"^plain: [\d.]+ tokens/s; the same tokens; [\d.]+x$", err, re.MULTILINE)


@pytest.mark.slow
def test_show_prints_the_text_once_and_in_color(capsys):
    arguments = ("generate", "def add(a, b):", "--max-new-tokens", "24", *PAIR, "--depth", "2")
    _, plain, _ = run(capsys, *arguments)
    status, out, err = run(capsys, *arguments, "--show")
    assert status == 0
    *text, legend = re.sub("\x1b\\[[0-9;]*m|↵", "", out).splitlines()
    assert "\n".join(text).rstrip("\n") == plain.rstrip("\n") and "\x1b[48;5;" in out
    assert legend == " target's own token  accepted draft, by depth:  1  2 "
    assert "24 new tokens" in err


@pytest.mark.slow
def test_sampling_and_shape_options_reach_generate(capsys):
    shape = ("--depth", "3", "--width", "2", "--num-nodes", "6", "--draft-window", "7", "--keep-first", "2")
    choice = ("--temperature", "0.8", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01", "--seed", "4")
    arguments = ("--max-new-tokens", "16", "--repetition-penalty", "1.1", *PAIR, *shape, *choice)
    status, out, err = run(capsys, "generate", "def add(a, b):", *arguments, "--compare")
    assert status == 0 and "the same tokens" in err
    sampling = jspec.Sampling(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    model = jspec.load("bundled:python-tiny", draft="bundled:python-tiny")
    drafter = jspec.Standalone(depth=3, width=2, num_nodes=6, window=7, keep_first=2)
    wanted = jspec.generate(model, "def add(a, b):", drafter=drafter, max_new_tokens=16, sampling=sampling, seed=4)
    assert out == "def add(a, b):" + wanted.text + "\n"
    assert f"in {wanted.stats.rounds.sum()} rounds" in err


@pytest.mark.parametrize(
    "arguments, sampling",
    [
        ({}, None),
        ({"temperature": 0}, None),
        ({"repetition_penalty": 1.2}, jspec.Sampling(temperature=0.0, repetition_penalty=1.2)),
        ({"top_p": 0.5}, jspec.Sampling(top_p=0.5)),
        ({"seed": 3}, None),
    ],
)
def test_decoding_is_greedy_without_sampling_options(arguments, sampling):
    options = generate.Options(prompt="x", **arguments)
    assert options.sampling(repetition_penalty=options.repetition_penalty) == sampling


@pytest.mark.slow
def test_compare_does_not_compare_the_tokens_of_rules_that_sample_differently(capsys):
    arguments = ("--max-new-tokens", "16", "--temperature", "1", "--accept", "rejection", "--compare")
    status, _, err = run(capsys, "generate", "def add(a, b):", "--model", "bundled:python-tiny", *arguments)
    assert status == 0 and "different samples from the same distribution (--accept rejection)" in err


@pytest.mark.slow
def test_a_stop_string_ends_the_text(capsys):
    arguments = ("generate", "import os\n", "--model", "bundled:python-tiny", "--max-new-tokens", "24")
    _, whole, _ = run(capsys, *arguments)
    stop = whole[20:23]
    _, out, err = run(capsys, *arguments, "--stop", stop)
    assert whole.startswith(out.removesuffix("\n")) and stop not in out[len("import os\n") :]
    assert "(stop)" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["generate", "x", "--model", "/no/such"], "/no/such: no such directory"),
        (["generate", "x", "--model", "bundled:nothing"], "bundled models: "),
        (["generate", "x", "--drafter", "plain", "--depth", "3"], "--depth 3: the drafter plain drafts no tokens"),
        (["generate", "x", "--drafter", "ngram", "--width", "3"], "--width 3: the drafter ngram drafts no trees"),
        (
            ["generate", "x", "--drafter", "ngram", "--draft-window", "9"],
            "--draft-window 9: the drafter ngram has no window",
        ),
        (["generate", "x", *PAIR, "--keep-first", "4"], "--keep-first 4: requires a window"),
        (
            ["generate", "x", *PAIR, "--draft-window", "4", "--keep-first", "5"],
            "--draft-window 4 --keep-first 5: must keep no more",
        ),
        (["generate", "x", "--drafter", "ngram", "--num-nodes", "9"], "--num-nodes 9: the drafter ngram drafts no"),
        (
            ["generate", "x", *PAIR, "--depth", "4", "--num-nodes", "3"],
            "--depth 4 --width 1 --num-nodes 3: --num-nodes, root",
        ),
        (["generate", "x", "--model", "bundled:python-tiny", "--drafter", "eagle"], "needs an EAGLE head"),
        (["generate", "x", "--temperature", "-1"], "--temperature -1"),
        (["generate", "x", "--process-id", "0"], "--process-id 0: requires --coordinator"),
        (["serve", "x", "--coordinator", "a:1"], "--coordinator a:1: requires --tensor or --data"),
        (
            ["generate", "x", "--tensor", "2", "--coordinator", "auto", "--processes", "2"],
            "--processes 2: requires --coordinator HOST:PORT",
        ),
        (["generate", "x", "--tensor", "2", "--coordinator", "a"], "--coordinator 'a': must be HOST:PORT or auto"),
        (
            ["serve", "x", "--tensor", "2", "--coordinator", "a:1", "--processes", "2"],
            "requires --processes and --process-id",
        ),
        (
            ["serve", "x", "--tensor", "2", "--coordinator", "a:1", "--processes", "2", "--process-id", "2"],
            "--process-id 2: must be less than --processes, 2",
        ),
        (["generate", "x", "--top-p", "1.5"], "--top-p 1.5"),
        (["generate", "x", "--repetition-penalty", "0"], "--repetition-penalty 0"),
        (["generate", "x", "--temperature", "1", "--accept", "greedy"], "--accept greedy"),
        (["generate", "x", "--corpus", "a.txt"], "--corpus a.txt: requires --drafter suffix"),
        (["evaluate", "--drafter", "ngram", "--corpus", "a.txt"], "--corpus a.txt: requires --drafter suffix"),
        (["generate", "x", "--drafter", "suffix", "--corpus", "a.txt"], "--corpus a.txt: cannot be read"),
        (["generate", "x", "--drafter", "suffix", "--corpus", os.devnull], "null: must not be empty"),
        (["evaluate", "--drafter", "ngram", "--width", "2"], "--width 2: the drafter ngram drafts no trees"),
        (["generate", "x", "--chat"], "chat template"),
    ],
)
def test_invalid_input_prints_one_line_and_exits_with_status_2(capsys, arguments, message):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert err.startswith("jspec: ") and message in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["generate", "x", "--draft-window", "0"], "argument --draft-window: '0': must be from 1"),
        (["generate", "x", "--top-p", "much"], "argument --top-p: 'much': must be a number"),
        (["generate", "x", "--seed", str(2**32)], "must be from 0 to 4294967295"),
        (["generate", "x", "--drafter", "magic"], "argument --drafter: invalid choice: 'magic'"),
        (["train"], "the following arguments are required: command"),
        (["train", "eagle3", "--steps", "x"], "argument --steps: 'x': must be an integer"),
        ([], "the following arguments are required: COMMAND"),
        (["generate", "x", "--colorful"], "unrecognized arguments: --colorful"),
    ],
)
def test_options_that_are_no_values_exit_with_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    err = capsys.readouterr().err
    assert end.value.code == 2 and message in err and err.startswith("jspec") and len(err.splitlines()) == 1
    assert len(err) < 700


@pytest.fixture
def chatty(tmp_path):
    """A directory of the tiny model with a chat template."""
    directory = tmp_path / "chatty"
    shutil.copytree(locate("bundled:python-tiny"), directory)
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    return directory


def test_chat_applies_the_template(capsys, chatty):
    arguments = ("--model", str(chatty), "--max-new-tokens", "8", "--drafter", "ngram")
    _, chat, _ = run(capsys, "generate", "hello", "--chat", *arguments)
    _, plain, _ = run(capsys, "generate", "# user: hello\n", *arguments)
    assert plain == "# user: hello\n" + chat


@pytest.mark.slow
def test_evaluate_writes_lines_of_data(capsys, tmp_path):
    prompts, metrics = tmp_path / "prompts.json", tmp_path / "metrics.jsonl"
    prompts.write_text(json.dumps(["def f(x):", {"prompt": "class A:"}, "import sys"]))
    arguments = ["--prompts", str(prompts), "--json", str(metrics), "--max-new-tokens", "16", "--batch", "2"]
    status, out, _ = run(capsys, "evaluate", "--model", "bundled:python-tiny", *arguments)
    assert status == 0
    values = {(line.mode, line.metric): line.median for line in recorded.read(metrics)}
    plain, ngram = dict.fromkeys(mode for mode, _ in values)
    assert plain == "plain" and values[plain, "accept length"] == 1 and values[ngram, "accept length"] >= 1
    assert [metric for mode, metric in values if mode == ngram and metric.startswith("acceptance")] == [
        f"acceptance at {i}" for i in range(1, 5)
    ]
    assert values[plain, "new tokens"] == 3 * 16, "without the copy that fills the second batch"
    assert ngram == "Ngram(depth=4)"
    assert values[ngram, "sequences unlike plain"] == 0 and values[plain, "speed against plain"] == 1
    assert out.count("sequences that differ from plain: 0") == 2


@pytest.mark.slow
def test_evaluate_compares_categories(capsys, tmp_path):
    """Categories in the order in which they come, each in batches of its own; the whole is their sum."""
    files = [tmp_path / name for name in ("some.jsonl", "code.jsonl")]
    files[0].write_text('{"turns": ["x = [1, 2"], "category": "code"}\n"import os"\n{"prompt": "a", "category": ""}')
    files[1].write_text('["def f(x):", "class A:"]')
    lines, options = tmp_path / "lines.jsonl", ("--max-new-tokens", "16", "--batch", "2", "--drafter", "ngram")
    given = ("--prompts", *map(str, files), "--json", str(lines), "--model", "bundled:python-tiny")
    status, out, _ = run(capsys, "evaluate", *given, *options)
    assert status == 0
    rows = [line.split() for line in out.splitlines() if line.startswith("  ") and "drafts do not pay" not in line]
    assert [row[:2] for row in rows] == 2 * [["category", "prompts"], ["code", "3"], ["some", "1"], ["other", "1"]]
    assert all(row[4] == "1.00x" and row[5:] == ["0", "-"] for row in rows[1:4])
    found = recorded.read(lines)
    assert {line.settings.get("category") for line in found} == {None, "code", "some", "other"}
    assert len({line.id for line in found}) == len(found)

    def value(metric, category=None):
        (line,) = [
            line
            for line in found
            if (line.mode, line.metric, line.settings.get("category")) == ("Ngram(depth=4)", metric, category)
        ]
        return line.median

    assert value("new tokens") == 5 * 16 == sum(value("new tokens", name) for name in ("code", "some", "other"))
    assert value("sequences unlike plain") == 0
    reached, at = 1.0, 0
    for at in range(1, 5):
        assert value(f"acceptance at {at}") == pytest.approx(reached * value(f"conditional acceptance at {at}"))
        reached = value(f"acceptance at {at}")
        if not reached:
            break
    assert f"{value('accept length', 'code'):.3f}" == rows[5][2]


def test_evaluate_limits_each_category(capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"x{i}", "category": "ab"[i % 2]}) + "\n" for i in range(6)))
    given = ("--prompts", str(path), "--limit", "2", "--model", "bundled:python-tiny", "--max-new-tokens", "4")
    _, out, _ = run(capsys, "evaluate", *given, "--drafter", "plain")
    assert "\n4 prompts" in out and out.count("plain: accept length") == 1


@pytest.mark.slow
def test_a_conversation_has_the_replies_of_the_model(chatty):
    """The prompts of all turns, against a loop over conversations that decodes plainly, one prompt at a time."""
    chats = [["hello", "class A:", "x"], ["def f(x):"], ["import os", "y ="]]
    groups = {"a": chats[:2], "b": chats[2:]}
    given = {
        name: [prompt_sets.Entry(name, {"prompt": chat[0], "turns": chat}) for chat in own]
        for name, own in groups.items()
    }
    model = jspec.load(chatty)
    generation = {"max_new_tokens": 6, "sampling": None, "accept": None}
    found = prompt_sets.encode(model, given, chat=True, batch=2, seed=0, generation=generation)
    wanted: dict = {name: [[], [], []] for name in groups}
    for name, own in groups.items():
        for chat in own:
            text = ""
            for turn, message in enumerate(chat):
                text += f"# user: {message}\n"
                wanted[name][turn].append(model.tokenizer.encode(text, special=False))
                reply = jspec.generate(model, wanted[name][turn][-1], drafter=None, max_new_tokens=6).text
                text += f"# assistant: {reply}\n"
    assert found == {name: [*itertools.chain(*turns)] for name, turns in wanted.items()}
    assert [len(prompts) for prompts in found.values()] == [4, 2]


@pytest.mark.slow
def test_evaluate_samples_the_same_tokens_for_every_batch_size(capsys, tmp_path):
    prompts, metrics = tmp_path / "prompts.json", tmp_path / "metrics.jsonl"
    prompts.write_text(json.dumps(["def f(x):", "class A:", "import sys"]))
    model = ("--model", "bundled:python-tiny", "--drafter", "ngram", "--max-new-tokens", "8", "--temperature", "1")
    seen = []
    for batch in ("1", "3"):
        options = ("--prompts", str(prompts), "--json", str(metrics), "--batch", batch, "--seed", "5")
        _, out, _ = run(capsys, "evaluate", *model, *options)
        assert out.count("sequences that differ from plain: 0") == 2 and "; temperature 1\n" in out
        lines = [line for line in recorded.read(metrics) if line.metric == "accept length"]
        assert lines[1].settings["temperature"] == 1 and lines[1].settings["seed"] == 5
        seen.append([line.median for line in lines])
    assert seen[0] == seen[1]
    _, out, _ = run(capsys, "evaluate", *model, "--prompts", str(prompts), "--accept", "block")
    assert out.count("sequences that differ from plain: not compared (--accept block gives different samples") == 2


def test_a_bundled_model_has_a_draft_for_each_drafter():
    options, loaded = evaluate.Options(), {}
    kinds = {"auto": EagleHead, "ngram": EagleHead, "eagle": EagleHead, "standalone": Llama}
    kinds |= {"frozen-kv-mtp": Assistant}
    models = {name: common.load_model(name, options, loaded=loaded) for name in kinds}
    for name, kind in kinds.items():
        assert type(models[name].draft) is kind
        common.make_drafter(name, options, models[name]).bind(models[name].target, models[name].draft)
    assert models["auto"] is models["ngram"] is models["eagle"], "not loaded once"


def test_evaluate_rejects_other_json(capsys, tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text('[{"text": "x"}]')
    status, _, err = run(capsys, "evaluate", "--prompts", str(path))
    assert status == 2 and f"{path}, prompt 1: must be a string, or an object whose key 'prompt'" in err


GENERATE = ["generate", "# é\ndef f(x):", "--model", "bundled:python-tiny", "--max-new-tokens", "24"]


@pytest.mark.slow
def test_prompts_from_a_file_are_continued_as_lines_of_json(capsys, tmp_path):
    """Three prompts in batches of two, with the texts of one prompt each."""
    path, options = tmp_path / "prompts.jsonl", [*PAIR, "--depth", "2", "--max-new-tokens", "24"]
    path.write_text('"def f(x):"\n{"prompt": "class A:", "id": 7, "text": "?"}\n\n"import é"\n')
    status, out, err = run(capsys, "generate", "--prompts", str(path), "--batch", "2", "--json", *options)
    records = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and "72 new tokens in" in err and ", 3 prompts" in err
    assert [record["prompt"] for record in records] == ["def f(x):", "class A:", "import é"]
    assert [record.get("id") for record in records] == [None, 7, None]
    for record in records:
        assert len(record["tokens"]) == 24 and record["finish_reason"] == "length"
        assert record["accept_length"] == pytest.approx(23 / record["rounds"], rel=0.1)
    _, text, _ = run(capsys, "generate", "--prompts", str(path), "--batch", "2", *options)
    assert text == "".join(f"{record['prompt']}{record['text']}\n\n" for record in records)
    _, one, _ = run(capsys, "generate", "class A:", "--json", *options)
    assert json.loads(one) == {name: value for name, value in records[1].items() if name != "id"}


@pytest.mark.slow
def test_a_prompt_from_standard_input_is_that_of_the_command_line(capsys, monkeypatch):
    options = ("--model", "bundled:python-tiny", "--max-new-tokens", "24")
    _, wanted, _ = run(capsys, "generate", "# é\ndef f(x):", *options)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("# é\ndef f(x):".encode()), encoding="latin-1"))
    assert run(capsys, "generate", "-", *options)[:2] == (0, wanted)


@pytest.mark.slow
def test_one_token_has_no_rounds_to_compare(capsys, tmp_path):
    options = ("--model", "bundled:python-tiny", "--max-new-tokens", "1")
    status, _, err = run(capsys, "generate", "x", *options, "--compare")
    assert status == 0 and "the same tokens; no rounds, so not compared" in err
    lines = tmp_path / "lines.jsonl"
    status, out, _ = run(capsys, "evaluate", "--limit", "1", "--json", str(lines), *options)
    assert status == 0 and "no rounds" in out
    assert not {"speed", "speed against plain"} & {line.metric for line in recorded.read(lines)}


def test_a_closed_pipe_is_no_error(monkeypatch, capsys):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Closed())
    assert cli.main(["generate", "x", "--model", "bundled:python-tiny", "--max-new-tokens", "4"]) == 0
    assert "pipe" not in capsys.readouterr().err


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"jspec {jspec.__version__}, jax {jax.__version__}\n"


def test_memory_that_runs_out_is_one_line(capsys, monkeypatch):
    for error in (MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 9 bytes")):
        monkeypatch.setattr(common, "load_model", raising(error))
        status, _, err = run(capsys, "generate", "x")
        assert status == 2 and err.startswith("jspec: out of memory: ") and err.count("\n") == 1
    monkeypatch.setattr(common, "load_model", raising(jax.errors.JaxRuntimeError("INTERNAL: a bug")))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        cli.main(["generate", "x"])


def raising(error):
    def function(*args, **options):
        raise error

    return function


ENVIRONMENTS = {
    "the root": {},
    "no home": {"HOME": None, "XDG_CACHE_HOME": None},
    "a locale of ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "an output of ASCII": {"PYTHONIOENCODING": "ascii"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_command_runs_in_any_environment(name):
    environment = {key: value for key, value in (os.environ | ENVIRONMENTS[name]).items() if value is not None}
    environment["PYTHONPATH"] = str(Path(jspec.__file__).parents[1])
    done = subprocess.run([sys.executable, "-m", "jspec", *GENERATE], capture_output=True, cwd="/", env=environment)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    assert b"def f(x):" in done.stdout and b"24 new tokens" in done.stderr


@pytest.mark.slow
def test_a_reader_may_stop_before_the_end():
    """As `head -1` does; Python's own flush at the end fails, too."""
    command = [sys.executable, "-m", "jspec", *GENERATE[:-1], "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 0 and b"pipe" not in errors.lower() and b"Traceback" not in errors


def test_train_has_its_own_help(needs, capsys):
    needs("optax")
    for arguments, shown in ((["--help"], "train a draft"), (["eagle3", "--help"], "--steps")):
        with pytest.raises(SystemExit) as end:
            cli.main(["train", *arguments])
        assert end.value.code == 0
        assert shown in capsys.readouterr().out


def test_the_command_imports_no_optional_package():
    code = (
        "import sys; import jspec, jspec.cli; "
        "print([m for m in ('torch', 'transformers', 'optax', 'orbax', 'matplotlib', 'flax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_output_in_a_grammar(capsys, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}')
    arguments = ("generate", "x = ", "--max-new-tokens", "32", "--json", *PAIR)
    status, out, _ = run(capsys, *arguments, "--json-schema", str(schema))
    record = json.loads(out)
    assert status == 0 and record["finish_reason"] == "eos" and json.loads(record["text"])["n"] in (1, 2)
    status, out, _ = run(capsys, *arguments, "--regex", "[ab]{3}-[cd]")
    assert status == 0 and re.fullmatch("[ab]{3}-[cd]", json.loads(out)["text"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--regex", "("), r"--regex '\('.*is not a regex"),
        (("--json-schema", "missing.json"), "--json-schema missing.json: cannot be read"),
        (("--json-schema", "{}"), "--json-schema {}: "),
        (("--regex", "a", "--json-schema", "b"), "must not be given with --json-schema"),
    ],
)
def test_grammars_that_are_refused(capsys, options, message):
    try:
        status, _, err = run(capsys, "generate", "x", *options)
    except SystemExit as stop:
        status, err = stop.code, capsys.readouterr().err
    assert status == 2 and re.search(message, err), err
