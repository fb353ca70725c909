"""The command line, as a user types it."""

import json
import subprocess
import sys

import pytest

from jspec import cli


def run(capsys, *arguments):
    status = cli.main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_generate_streams_text_and_prints_one_line_of_facts(capsys):
    status, out, err = run(capsys, "generate", "def quicksort(items):", "--max-new-tokens", "32")
    assert status == 0
    assert out.startswith("def quicksort(items):") and len(out) > 40
    facts = err.strip().splitlines()
    assert len(facts) == 1
    assert "standalone: 32 new tokens in" in facts[0]
    assert "accept length" in facts[0] and "tokens/s" in facts[0]


def test_compare_decodes_plainly_too(capsys):
    arguments = (
        "generate",
        "def add(a, b):",
        "--max-new-tokens",
        "24",
        "--compare",
        "--drafter",
        "ngram",
        "--depth",
        "2",
    )
    status, _, err = run(capsys, *arguments)
    assert status == 0
    assert "ngram: 24 new tokens" in err and "plain:" in err and "the same tokens" in err and err.strip().endswith("x")


def test_a_stop_string_ends_the_text(capsys):
    _, whole, _ = run(capsys, "generate", "import os\n", "--max-new-tokens", "24")
    stop = whole[20:23]
    _, out, err = run(capsys, "generate", "import os\n", "--max-new-tokens", "24", "--stop", stop)
    assert whole.startswith(out.removesuffix("\n")) and stop not in out[len("import os\n") :]
    assert "(stop)" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["generate", "x", "--model", "/no/such"], "/no/such: no such directory"),
        (["generate", "x", "--model", "bundled:nothing"], "bundled models are"),
        (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["generate", "x", "--page-size", "0"], "page_size=0"),
        (["generate", "x", "--depth", "0"], "depth=0"),
        (["generate", "x", "--drafter", "plain", "--depth", "3"], "drafter plain drafts no tokens"),
        (["generate", "x", "--chat"], "chat template"),
        (["evaluate", "--batch", "0"], "--batch 0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert err.startswith("jspec: ") and message in err and len(err.strip().splitlines()) == 1


def test_chat_uses_the_template(capsys, tmp_path):
    import shutil

    from jspec.model import locate

    directory = tmp_path / "chatty"
    shutil.copytree(locate("bundled:python-tiny"), directory)
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    arguments = ("--model", str(directory), "--max-new-tokens", "8", "--drafter", "ngram")
    _, chat, _ = run(capsys, "generate", "hello", "--chat", *arguments)
    _, plain, _ = run(capsys, "generate", "# user: hello\n", *arguments)
    assert plain == "# user: hello\n" + chat


def test_evaluate_writes_figures(capsys, tmp_path):
    prompts, figures = tmp_path / "prompts.json", tmp_path / "figures.json"
    prompts.write_text(json.dumps(["def f(x):", {"prompt": "class A:"}, "import sys"]))
    arguments = ["--prompts", str(prompts), "--json", str(figures), "--max-new-tokens", "16", "--batch", "2"]
    status, out, _ = run(capsys, "evaluate", "--model", "bundled:python-tiny", *arguments)
    assert status == 0
    plain, ngram = json.loads(figures.read_text())
    assert plain["accept_length"] == 1 and ngram["accept_length"] >= 1
    assert len(ngram["acceptance_by_position"]) == 4
    assert out.count("rows unlike plain: 0") == 2


def test_evaluate_refuses_other_json(capsys, tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text('[{"text": "x"}]')
    status, _, err = run(capsys, "evaluate", "--prompts", str(path))
    assert status == 2 and "JSON list of strings" in err


def test_train_has_its_own_help(capsys):
    pytest.importorskip("optax", reason='needs optax: pip install -e ".[train]"')
    for arguments, shown in ((["--help"], "language model"), (["lm", "--help"], "--steps")):
        with pytest.raises(SystemExit) as end:
            cli.main(["train", *arguments])
        assert end.value.code == 0
        assert shown in capsys.readouterr().out


def test_the_installed_command_needs_no_optional_package():
    """Neither torch, transformers nor the training stack is imported by what a user starts with."""
    code = (
        "import sys; import jspec, jspec.cli; "
        "print([m for m in ('torch', 'transformers', 'optax', 'orbax', 'matplotlib', 'flax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
