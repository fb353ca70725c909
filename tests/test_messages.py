"""What frequent mistakes print: the cure, not only the rule."""

import io
import sys
from types import SimpleNamespace

import pytest
import toy

import jspec
from jspec import cli
from jspec.cli import generate


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
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        jspec.generate(model, [1], temprature=0.5)


def test_weights_that_are_no_params_name_the_cure():
    model = jspec.Model("toy", toy.TARGET, toy.params(), None, ())
    with jspec.Engine(model, drafter=None, slots=2, context=16) as engine:
        with pytest.raises(ValueError, match=r"params: is of type Model; must be .*Params, such as Params\(nnx.state"):
            engine.update(model)


def test_a_text_without_a_tokenizer_names_both_cures():
    model = jspec.Model("toy", toy.TARGET, toy.params(), None, ())
    with pytest.raises(ValueError, match=r"give token ids, as jspec.generate in Python takes them, or add a tokenizer"):
        jspec.generate(model, "x")
