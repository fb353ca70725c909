"""`verify`: evidence that drafts change nothing but the speed, for a model, a drafter and a machine."""

import collections
import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Literal, TypeAlias

import jax
from tqdm.auto import tqdm

from jspec import drafters
from jspec.analysis import check_drafter, check_target, verify_checks
from jspec.analysis.contract import Case, Cases, Outcome, hidden
from jspec.analysis.verify_subject import Subject, default_prompts
from jspec.core import package
from jspec.core.checks import check_int, check_number
from jspec.core.types import Accept, Drafter
from jspec.generation.options import MAX_SEED
from jspec.generation.run import Prompt, check_model, encode_prompts
from jspec.loading import fingerprint
from jspec.loading.model import Model, refuse_split

Verdict: TypeAlias = Literal["passed", "near-tie", "warning", "failed", "not run"]
VERDICTS: tuple[Verdict, ...] = ("failed", "warning", "near-tie", "passed", "not run")
"""From the most important one."""
WORKERS = min(4, os.cpu_count() or 1)
"""Cases that run side by side: with more than there are cores, the first ones would compile more slowly."""
CHECKS: Mapping[str, Callable[[Subject], Cases]] = {
    **verify_checks.CHECKS,
    "proposals": check_drafter.proposals,
    "forwards": lambda subject: check_target.cases(check_target.TargetCase(subject.wide, subject.seed)),
}
"""What finds most faults in the least time comes first."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a case of a check has shown.

    check, case: their names.
    verdict: "near-tie": another token was chosen where the logits of both are nearly equal. "warning": the output is
      right, but the draft could be better. "not run": the model or the drafter does not allow the case.
    compared: compared tokens or samples.
    message: where and how it failed, or why it was not run.
    seconds: its time, compilation included.
    """

    check: str
    case: str
    verdict: Verdict
    compared: int = 0
    message: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, repr=False)
class Certificate:
    """The findings of `verify`, and what repeats them.

    subject: names and values of what was verified: model, drafter, dtype, exactness, seed, fingerprints of weights.
    environment: versions and the device.
    findings: in order of time.
    unfinished: checks with more cases than the time allowed.
    seconds: time of everything.
    """

    subject: dict[str, str]
    environment: dict[str, str]
    findings: tuple[Finding, ...]
    unfinished: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether something ran, and nothing failed."""
        verdicts = {finding.verdict for finding in self.findings}
        return "passed" in verdicts and "failed" not in verdicts

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """A row per check: its name, cases by verdict, what was compared, and the messages."""
        checks: dict[str, list[Finding]] = {}
        for finding in self.findings:
            checks.setdefault(finding.check, []).append(finding)
        return [(name, *_summary(findings, name in self.unfinished)) for name, findings in checks.items()]

    def __repr__(self) -> str:
        name, drafter = self.subject["model"], self.subject["drafter"]
        verdict = "changes nothing but the speed" if self.passed else "FAILED"
        lines, rows = [f"{name} with {drafter}: {verdict}"], self.rows
        width = max((len(check) for check, *_ in rows), default=0)
        for check, cases, compared, message in rows:
            lines.append(f"  {check:<{width}}  {cases}{', ' + compared if compared else ''}")
            lines += [f"  {'':<{width}}  {part}" for part in message.splitlines()]
        return "\n".join([*lines, f"{self.seconds:.0f} s on {self.environment['device']}"])

    def to_json(self) -> str:
        """Everything as JSON."""
        return json.dumps({**dataclasses.asdict(self), "passed": self.passed}, indent=2, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        """A page with the subject, the environment and a table of the checks."""
        facts = [f"- {name}: {value}" for name, value in {**self.subject, **self.environment}.items()]
        rows = [
            f"| {check} | {cases} | {compared} | {' '.join(message.split()).replace('|', chr(92) + '|')} |"
            for check, cases, compared, message in self.rows
        ]
        head = "passed" if self.passed else "FAILED"
        table = ["| check | cases | compared | remarks |", "|---|---|---|---|", *rows]
        return "\n".join([f"# jspec verify: {head}", "", *facts, f"- seconds: {self.seconds:.0f}", "", *table]) + "\n"


def _summary(findings: Sequence[Finding], unfinished: bool) -> tuple[str, str, str]:
    counts = collections.Counter(finding.verdict for finding in findings)
    cases = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    compared = sum(finding.compared for finding in findings)
    # The first message of each verdict stands for the others.
    first = {finding.verdict: f"{finding.case}: {finding.message}" for finding in reversed(findings) if finding.message}
    messages = [first[verdict] for verdict in VERDICTS if verdict in first]
    more = ", then time was up" if unfinished else ""
    return f"{cases}{more}", f"{compared:,} compared" if compared else "", "\n".join(messages)


def verify(
    model: Model,
    drafter: str | Drafter = "auto",
    prompts: Sequence[Prompt] | None = None,
    *,
    accept: str | Accept | None = None,
    max_new_tokens: int = 48,
    minutes: float = 2.0,
    seed: int = 0,
    progress: bool | None = None,
) -> Certificate:
    """Verify that a drafter changes nothing but the speed, by comparison with plain decoding.

    Each check has cases from the most to the least telling one. All checks run their first case, then their second, and
    so on until the time has passed. `docs/losslessness.md` lists them.

    Greedy and coupled tokens must be those of plain decoding; samples of other rules must have the distribution of the
    target. Without an exact forward, another token is a near-tie if the logits of both differ by less than 0.25 in
    float32 (0.002 for a model in float32).

    Args:
      model: as loaded; with an exact forward (`model.target.exact`) the verdict is strict in half precision, too.
      drafter, accept, seed: as in `jspec.generate`.
      prompts: None: eight of different lengths.
      max_new_tokens: new tokens of each sequence, at least 16.
      minutes: time after which no further case begins.
      progress: whether to show a progress bar; None: in a terminal.

    Raises:
      ValueError, TypeError: an invalid argument, or a model split over devices.
    """
    check_model(model)
    refuse_split(model, "verify")
    check_int("max_new_tokens", max_new_tokens, least=16)
    check_int("seed", seed, least=0, most=MAX_SEED)
    ids = default_prompts(model, max_new_tokens) if prompts is None else [*map(list, encode_prompts(model, prompts)[1])]
    subject = Subject(model, drafter, ids, accept, max_new_tokens, seed)
    checks = {name: check(subject) for name, check in CHECKS.items()}
    return certify(_described(subject), checks, minutes=minutes, workers=WORKERS, progress=progress)


def certify(
    subject: dict[str, str],
    checks: Mapping[str, Cases],
    *,
    minutes: float,
    workers: int = 1,
    progress: bool | None = None,
) -> Certificate:
    """Runs the cases of all checks in turns, until all have run, or the time has passed.

    workers: how many cases run side by side, as most of their time is that of compilers.

    Raises:
      ValueError, TypeError: invalid `minutes` or `progress`.
    """
    minutes, disable = check_number("minutes", minutes, least=0.0), hidden(progress)
    began, findings = time.monotonic(), []
    turns = collections.deque((name, check, case) for name, check in checks.items() if (case := next(check, None)))
    running: dict[futures.Future[Finding], tuple[str, Cases]] = {}
    with futures.ThreadPoolExecutor(workers) as pool, tqdm(unit="case", disable=disable) as bar:
        while True:
            while turns and len(running) < workers and time.monotonic() - began < 60 * minutes:
                name, check, case = turns.popleft()
                bar.set_description(name)
                running[pool.submit(_run, name, case)] = name, check
            if not running:
                break
            for done in futures.wait(running, return_when=futures.FIRST_COMPLETED).done:
                name, check = running.pop(done)
                findings.append(done.result())
                bar.update()
                if following := next(check, None):
                    (turns.appendleft if following.quick else turns.append)((name, check, following))
    begun = {finding.check for finding in findings}
    unfinished = tuple(name for name, *_ in turns if name in begun)
    findings += [Finding(name, case.name, "not run", 0, "time was up") for name, _, case in turns if name not in begun]
    return Certificate(subject, _environment(), tuple(findings), unfinished, time.monotonic() - began)


def _run(check: str, case: Case) -> Finding:
    """Runs a case. Refused combinations are not run; any other error is a failure."""
    began = time.monotonic()
    try:
        outcome = case.run() or Outcome("passed")
    except AssertionError as error:
        outcome = Outcome("failed", 0, str(error))
    except Exception as error:  # A fault may raise anything.
        # Errors of JAX are subclasses of ValueError, too.
        refused = type(error) is ValueError
        outcome = Outcome("not run" if refused else "failed", 0, f"{type(error).__name__}: {error}".splitlines()[0])
    return Finding(check, case.name, *outcome, time.monotonic() - began)


def _described(subject: Subject) -> dict[str, str]:
    model = subject.model
    described = {
        "model": model.name,
        "drafter": drafters.describe(subject.drafter),
        "rule": str(subject.accept or "greedy, or coupled for samples"),
        "dtype": str(subject.dtype),
        "exact": str(subject.exact),
        "seed": str(subject.seed),
        "target": fingerprint.of_weights(model.params.target),
    }
    return described if model.draft is None else {**described, "draft": fingerprint.of_weights(model.params.draft)}


def _environment() -> dict[str, str]:
    device = jax.devices()[0]
    return {
        "jspec": package.VERSION,
        "jax": jax.__version__,
        "device": f"{device.device_kind} ({device.platform})",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
