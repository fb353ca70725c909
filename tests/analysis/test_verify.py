"""`jspec.verify` finds planted faults, each by its check and with a sentence about what is wrong."""

import dataclasses
import json

import faults
import jax.numpy as jnp
import pytest
import verified
from verified import TINY

import jspec
from jspec import cli
from jspec.analysis import verify, verify_checks, verify_statistics
from jspec.analysis.contract import Case, Outcome, difference
from jspec.analysis.verify import Certificate, Finding
from jspec.analysis.verify_subject import LENGTHS, Subject, default_prompts, reshaped
from jspec.core.types import Params
from jspec.drafters import Standalone

model = verified.model


def subject_of(model, drafter=None, new=24, lengths=(3, 8, 16)):
    prompts = [ids for ids in default_prompts(model, new) if len(ids) in lengths]
    return Subject(model, drafter or Standalone(depth=4), prompts, None, new, 0)


@pytest.mark.slow(unless=["a draft too many is accepted"])
@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_planted_fault_is_found(model, name):
    plant, check, words = faults.FAULTS[name]
    with faults.planted(plant) as drafter:
        # Short texts are not preempted.
        sizes = {"new": 48, "lengths": LENGTHS} if check == "engine" else {}
        cases = verify_checks.CHECKS[check](subject_of(model, drafter or faults.Faulty(depth=4), **sizes))
        assert faults.until_failed({check: cases}, words=words)


def test_a_certificate_has_what_repeats_it():
    findings = (
        Finding("chains", "depth 1", "passed", 384),
        Finding("chains", "depth 9", "not run", 0, "depth=9: must be at most 7"),
        Finding("trees", "width 2", "near-tie", 40, "sequence 0 | 1"),
    )
    subject = {"model": "m", "drafter": "d", "target": "sha256:0"}
    out = Certificate(subject, {"device": "cpu"}, findings, ("trees",), 3.0)
    assert out.passed and "m with d: changes nothing but the speed" in repr(out)
    assert "1 passed, 1 not run, 384 compared" in repr(out) and "depth 9: depth=9: must be at most 7" in repr(out)
    assert json.loads(out.to_json())["findings"][1]["verdict"] == "not run"
    assert "- target: sha256:0" in out.to_markdown() and "sequence 0 \\| 1" in out.to_markdown()
    failed = dataclasses.replace(out, findings=(*findings, Finding("engine", "shared", "failed", 0, "x")))
    assert not failed.passed and "m with d: FAILED" in repr(failed)
    assert not dataclasses.replace(out, findings=findings[1:2]).passed, "nothing has run"


@pytest.mark.parametrize("workers", (1, 3))
def test_checks_take_turns_and_quick_cases_follow_at_once(workers):
    ran = []

    def cases(name, count, quick):
        for index in range(count):
            yield Case(f"{index}", lambda at=(name, index): ran.append(at) or Outcome("passed", 1), quick)

    def certify(quick=False, **options):
        checks = {"a": cases("a", 3, quick), "b": cases("b", 1, quick)}
        out = verify.certify({}, checks, workers=workers, progress=False, **{"minutes": 1, **options})
        run, ran[:] = [*ran], []
        return out, run if workers == 1 else sorted(run)

    out, run = certify(minutes=0)
    assert run == [] and not out.passed and out.unfinished == ()
    assert [(one.check, one.verdict, one.message) for one in out.findings] == [
        (name, "not run", "time was up") for name in ("a", "b")
    ]
    turns = [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    assert certify()[1] == (turns if workers == 1 else sorted(turns))
    assert certify(quick=True)[1] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]


def test_what_cannot_run_is_not_a_failure():
    def refused():
        raise ValueError("depth=9: must be at most 7")

    def broken():
        raise IndexError("out of range")

    def wrong():
        raise AssertionError("another token")

    refusal, error, failure = (verify._run("chains", Case("depth 9", run)) for run in (refused, broken, wrong))
    assert (refusal.verdict, refusal.message) == ("not run", "ValueError: depth=9: must be at most 7")
    assert (error.verdict, error.message) == ("failed", "IndexError: out of range")
    assert (failure.verdict, failure.message) == ("failed", "another token")


@pytest.mark.parametrize(
    ("one", "other", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [2], 0)]
)
def test_the_first_difference(one, other, at):
    assert difference(one, other) == at


def test_near_ties_are_told_from_faults(model, monkeypatch):
    """By the logits of both tokens in float32."""
    subject = subject_of(model)
    right = subject.plain().tokens
    (best, value), *_ = jspec.score(model, [[*subject.prompts[0], 0]], top_k=1)[0].top[-1]
    assert best == right[0][0]
    wrong = [[(best + 1) % 100, *right[0][1:]], *right[1:]]
    assert subject.compare(right, right).verdict == "passed"
    outcome = subject.compare(wrong, right)
    assert outcome.verdict == "failed" and "sequence 0 differs from plain decoding at new token 0" in outcome.message
    monkeypatch.setattr("jspec.analysis.verify_subject.NEAR_TIE", {"float32": 1e9})
    assert subject.compare(wrong, right).verdict == "near-tie"
    assert subject.compare([ids[:-1] for ids in right], right).message == "sequence 0 has 23 tokens instead of 24"


def test_a_shape_that_a_drafter_cannot_have_is_left_out():
    assert reshaped(jspec.Suffix(depth=4, width=2, num_nodes=9), 4, 3, 16) is None
    assert reshaped(Standalone(), 4, 3, 16) == Standalone(4, 3, 16) and reshaped(jspec.Ngram(), 4, 3) is None


@pytest.mark.slow
def test_samples_of_equally_probable_tokens(model):
    def twins(params):
        return dataclasses.replace(params, embed=jnp.repeat(params.embed[::2], 2, axis=0))

    target = twins(model.params.target)
    subject = subject_of(dataclasses.replace(model, params=Params(target, twins(model.params.draft))))
    out = next(verify_statistics.samples(subject)).run()
    assert (out.verdict, out.compared) == ("passed", 256), out


def test_the_power_of_a_test_grows_with_its_samples():
    assert 0.13 < verify_statistics.detectable(1024, 26) < 0.16
    assert verify_statistics.detectable(4096, 26) == pytest.approx(verify_statistics.detectable(1024, 26) / 2, rel=1e-2)


@pytest.mark.slow
def test_the_command_writes_a_certificate(capsys, tmp_path):
    files = ("--json", str(tmp_path / "c.json"), "--markdown", str(tmp_path / "c.md"))
    short = ("--max-new-tokens", "16", "--minutes", "0.05")
    status = cli.main(["verify", "--model", TINY, "--drafter", "ngram", *short, *files])
    assert status == 0 and "changes nothing but the speed" in capsys.readouterr().out
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["passed"] and written["subject"]["command"].startswith("jspec verify --model")
    assert (tmp_path / "c.md").read_text().startswith("# jspec verify: passed")
