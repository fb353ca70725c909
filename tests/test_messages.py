"""What frequent mistakes print: the cure, not only the rule."""

import io
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import toy

import jspec
from jspec import cli
from jspec.analysis.contract import Case, run_cases
from jspec.cli import generate
from jspec.cli.common import why_slower
from jspec.generation.result import GenerationStats
from jspec.text import highlight


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generat x", "did you mean generate?"),
        ("generate x --max-tokens 5", "did you mean --max-new-tokens?"),
        ("generate x --max-tokens=5", "did you mean --max-new-tokens?"),
        ("bench --presett tiny", "did you mean --preset?"),
        ("train eagel3", "did you mean eagle3?"),
    ],
)
def test_a_misspelled_word_is_followed_by_the_nearest_one(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments.split())
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_word_that_is_like_no_other_gets_no_proposal(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "x", "--zzz"])
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nodir", "--model ./nodir: no such directory"),
        ("/no/such", "--model /no/such: no such directory"),
        (".hidden/model", "--model .hidden/model: no such directory"),
        (__file__, f"--model {__file__}: is a file; must be a directory, a .gguf file or a hub id"),
    ],
)
def test_a_path_is_never_a_hub_id(monkeypatch, capsys, model, message):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    assert cli.main(["generate", "x", "--model", model]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "prompt"), [("x\n", "x"), ("x\n\n", "x\n"), ("x\r\n", "x"), ("x", "x"), ("\nx", "\nx")]
)
def test_a_final_newline_of_standard_input_is_no_part_of_the_prompt(monkeypatch, text, prompt):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert generate._read_prompts(generate.Options(prompt="-")) == [{"prompt": prompt}]


def test_sampling_parameters_have_a_place():
    model = jspec.Model("toy", toy.TARGET, toy.params(), None, ())
    hint = r"temperature=0\.5: is a sampling parameter: sampling=jspec\.Sampling\(temperature=0\.5\)"
    for function in (jspec.generate, jspec.stream, jspec.generate_ids):
        with pytest.raises(TypeError, match=hint):
            function(model, [1], temperature=0.5)


def test_an_unknown_argument_is_an_error_with_those_that_are_taken():
    model = jspec.Model("toy", toy.TARGET, toy.params(), None, ())
    for function in (jspec.generate, jspec.stream, jspec.generate_ids, jspec.Engine):
        name = getattr(function, "__name__", "")
        with pytest.raises(TypeError, match=rf"^max_token=5: is no argument of {name}.*, which takes .*\bdrafter\b"):
            function(model, [1], max_token=5)


def test_weights_that_are_no_params_name_the_cure():
    model = jspec.Model("toy", toy.TARGET, toy.params(), None, ())
    with jspec.Engine(model, drafter=None, slots=2, context=16) as engine:
        with pytest.raises(ValueError, match=r"params: is of type Model; must be .*Params, such as Params\(nnx.state"):
            engine.update(model)


def test_a_text_without_a_tokenizer_names_both_cures():
    model = jspec.Model("toy", toy.TARGET, toy.params(), None, ())
    with pytest.raises(ValueError, match=r"give token ids, as jspec.generate in Python takes them, or add a tokenizer"):
        jspec.generate(model, "x")


@pytest.mark.parametrize("seconds, line", [(2.0, True), (0.5, False)])
def test_why_drafts_do_not_pay_is_said_with_measured_numbers(seconds, line):
    counts = np.array([[0, 10]]), np.array([[20]])
    drafted = GenerationStats(np.array([10]), counts[0], seconds, np.array([0]))
    plain = GenerationStats(np.array([20]), counts[1], 1.0, np.array([0]))
    text = f"drafts do not pay on this {jax.devices()[0].platform.upper()}: a round takes 4.0 times as long as a plain "
    assert why_slower(drafted, plain) == (text + "step and brings 2.0 tokens" if line else None)


def test_no_color_leaves_the_text(monkeypatch):
    sequence = highlight.DisplayedSequence([1, 2], ["a", "b"], [0, 1], heading="", prompt="p")
    assert "\x1b[" in highlight.to_ansi(sequence, 1)
    monkeypatch.setenv("NO_COLOR", "1")
    assert highlight.to_ansi(sequence, 1) == "pab" and "\x1b" not in highlight.ansi_legend(2)


def test_checks_are_printed_as_they_pass(capsys):
    first = Case("the first holds", lambda: None)

    def second():
        assert "the first holds" in capsys.readouterr().err
        raise AssertionError("the second does not")

    with pytest.raises(AssertionError, match="it: the second does not"):
        run_cases("check", "it", [first, Case("the second", second)], False)
    capsys.readouterr()
    assert run_cases("check", "it", [first], None) == ("the first holds",)
    assert capsys.readouterr().err == "", "this is no terminal"
