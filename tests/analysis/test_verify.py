"""`jspec.verify` finds planted faults, each by its check and with a sentence about what is wrong."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest
import verified
from verified import TINY

import jspec
from jspec import cli
from jspec.analysis import verify, verify_checks, verify_statistics
from jspec.analysis.contract import Case, Outcome, difference
from jspec.analysis.verify import Certificate, Finding
from jspec.analysis.verify_subject import Subject, default_prompts, reshaped
from jspec.cache import pages
from jspec.core import accept, logprobs, round, sampling, stopping, tree
from jspec.drafters import Standalone
from jspec.engine.pages import Pages

model = verified.model


def subject_of(model, drafter=None, new=24):
    prompts = [ids for ids in default_prompts(model, new) if len(ids) in (3, 8, 16)]
    return Subject(model, drafter or Standalone(depth=4), prompts, None, new, 0)


def change(module, name, wrap):
    """A fault: `wrap(right)` in place of a function."""
    return lambda patch: patch.setattr(module, name, wrap(getattr(module, name)))


def longer(right):
    def follow(draft_tree, choice):
        out = right(draft_tree, choice)
        return dataclasses.replace(out, length=jnp.minimum(out.length + 1, draft_tree.tokens.shape[1]))

    return follow


def other_last_token(right):
    def follow(draft_tree, choice):
        out = right(draft_tree, choice)
        last = jnp.arange(out.tokens.shape[1])[None] == out.length[:, None] - 1
        return dataclasses.replace(out, tokens=jnp.where(last, jnp.roll(out.tokens, 1, 1), out.tokens))

    return follow


def all_see_all(right):
    def mask(draft_tree):
        if draft_tree.parents is not None or draft_tree.tokens.shape[1] > 8:
            return right(draft_tree)
        nodes = draft_tree.tokens.shape[1]
        return jnp.ones((draft_tree.tokens.shape[0], nodes, nodes), bool)

    return mask


def wrong_parents(right):
    def mask(draft_tree):
        if draft_tree.parents is None:
            return right(draft_tree)
        # Nodes below the first generation hang at the sibling of their parent.
        parents = jnp.where(draft_tree.parents > 1, draft_tree.parents - 1, draft_tree.parents)
        return right(dataclasses.replace(draft_tree, parents=parents))

    return mask


def without_path(right):
    return lambda s, path, *rest: right(s, jnp.full_like(path, -1), *rest)


def other_noise(right):
    return lambda key, name, position, count, size: right(key, name, position + int(count > 1), count, size)


def all_read(right):
    def run(stop, tokens, length):
        after, _, finish = right(stop, tokens, length)
        return after, length, finish

    return run


def forgets(right):
    def run(stop, tokens, length):
        state = None if stop.state is None else jnp.where(stop.state > 0, 0, stop.state).astype(stop.state.dtype)
        return right(dataclasses.replace(stop, state=state), tokens, length)

    return run


def one_more(right):
    return lambda s, accepted: right(dataclasses.replace(s, limit=s.limit + 1), accepted)


def counts_twice(right):
    def count(s, decision, branch=None):
        out = right(s, decision, branch)
        return dataclasses.replace(out, stats=dataclasses.replace(out.stats, dropped=out.stats.dropped + 1))

    return count


def shares_pages(right):
    def table(batch, pages):
        out = right(batch, pages)
        return out.at[:, 1].set(out[0, 1]) if pages > 4 else out

    return table


@dataclasses.dataclass(frozen=True)
class Faulty(Standalone):
    """A draft with a fault of its own."""

    fault: str = ""

    def draft(self, params, s):
        drafted, state = super().draft(params, s)
        shift = jnp.zeros(s.length.shape, jnp.int32)
        if self.fault == "batch":
            shift = shift + int(s.length.shape[0] > 1)
        if self.fault == "free rows":
            shift = shift + jnp.isnan(s.cache.pool).any().astype(jnp.int32)
        tokens = drafted.tokens.at[:, 1:].set((drafted.tokens[:, 1:] + shift[:, None]) % self.target.vocab_size)
        return dataclasses.replace(drafted, tokens=tokens), state

    def extend(self, params, s, committed):
        if self.fault == "chunks" and committed.tokens.shape[1] == 2:
            committed = dataclasses.replace(committed, length=jnp.minimum(committed.length, 1))
        return super().extend(params, s, committed)


def custom(fault):
    return lambda patch: Faulty(depth=4, fault=fault)


def one_row_late(right):
    return lambda cache, rows, start, *rest, **options: right(cache, rows, start + 1, *rest, **options)


def of_committed_tokens(right):
    return lambda grammar, logits, path, *rest, **options: right(
        grammar, logits, jnp.full_like(path, -1), *rest, **options
    )


def of_another_node(right):
    return lambda logits, tokens: right(jnp.roll(logits, 1, 1), tokens)


def without_tokens(right):
    return lambda self, parent, tokens, index: right(self, parent, [0] * len(tokens), index)


def of_another_token(right):
    return lambda *arguments: jnp.roll(right(*arguments), 1, -1)


def no_residual(right):
    return lambda distribution, otherwise: otherwise


DIFFERS = "differs from plain decoding at new token"
FAULTS = {
    "a draft too many is accepted": (change(accept, "follow", longer), "chains", DIFFERS),
    "the bonus token of another node": (change(accept, "follow", other_last_token), "chains", DIFFERS),
    "rows are committed one place late": (change(round, "commit_rows", one_row_late), "chains", DIFFERS),
    "nodes see later nodes": (change(tree, "ancestor_mask", all_see_all), "chains", DIFFERS),
    "rounds are counted as longer": (change(round, "count_round", counts_twice), "chains", "counts 1 +"),
    "keys of other ancestors": (change(tree, "ancestor_mask", wrong_parents), "trees", DIFFERS),
    "tokens after the end of the text": (change(stopping, "run", all_read), "ends of texts", "tokens instead of"),
    "stop strings within a round only": (change(stopping, "run", forgets), "stop strings", "after a stop string"),
    "a limit one too large": (change(round, "truncate_at_stop", one_more), "ends of texts", "tokens instead of"),
    "sequences share a page": (change(pages, "contiguous_table", shares_pages), "pages", DIFFERS),
    "penalties leave out drafted tokens": (change(sampling, "_count", without_path), "sampling", "_penalty"),
    "noise of another position": (change(sampling, "gumbel", other_noise), "sampling", "with Sampling"),
    "a grammar without drafts": (
        change(sampling.grammars, "forbid", of_committed_tokens),
        "grammars",
        "with a grammar",
    ),
    "another node's log-probability": (
        change(logprobs, "of_tokens", of_another_node),
        "log-probabilities",
        "at new token",
    ),
    "pages named without tokens": (change(Pages, "_key", without_tokens), "engine", "of an engine differs"),
    "q of another token": (change(accept, "_chain_probs", of_another_token), "distributions", "the distribution of"),
    "no residual distribution": (change(accept, "_normalize", no_residual), "rules", "have the probability"),
    "a draft that depends on the batch": (custom("batch"), "batches", "other rounds alone than in a batch"),
    "a draft that reads free rows": (custom("free rows"), "rounds", "other rounds with NaN"),
    "a draft that depends on chunks": (custom("chunks"), "chunks", "other rounds if prompts are read in chunks"),
}


@pytest.mark.slow(unless=["a draft too many is accepted"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(model, name, monkeypatch):
    plant, check, words = FAULTS[name]
    subject = subject_of(model, custom("")(None))
    # Programs are traced again, with the fault, and without it afterwards.
    jax.clear_caches()
    findings = []
    try:
        faulty = plant(monkeypatch)
        if isinstance(faulty, Faulty):
            subject = subject_of(model, faulty)
        for case in verify_checks.CHECKS[check](subject):
            findings.append(verify._run(check, case))
            if findings[-1].verdict == "failed":
                break
    finally:
        monkeypatch.undo()
        jax.clear_caches()
    assert findings[-1].verdict == "failed" and re.search(words, findings[-1].message), findings


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
