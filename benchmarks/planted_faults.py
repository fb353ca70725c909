"""Plants the faults of `tests/helpers/faults.py` one by one, and measures how soon `jspec verify` finds each.

    python benchmarks/planted_faults.py --json benchmarks/results/DATE-MACHINE-planted-faults.jsonl

All checks run as in the command, with the bundled model and nothing in a compilation cache. The lines have the seconds
until the sentence, which is their note. The exit status is 1 if a fault is not found within two minutes.
"""

import argparse
import sys
import time
from pathlib import Path

import recorded

import jspec
from jspec.analysis import verify, verify_endpoint
from jspec.analysis.verify_subject import Subject, default_prompts
from jspec.bench import report
from jspec.bench.machine import environment
from jspec.drafters import Standalone

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
import faults  # noqa: E402, after the path of the tests' helpers

MODEL, DRAFT, MINUTES = "python-small", "python-tiny", 2.0
PROMPT = "def mean(values):\n    "


def checks_of_server(model: jspec.Model, fault: str):
    """The checks of a server with this fault."""
    plain = verify_endpoint.Plain(model)
    pair = verify_endpoint.Pair(faults.Stub(plain, fault), plain, [PROMPT], 48)  # pyright: ignore[reportArgumentType]
    return {name: check(pair) for name, check in verify_endpoint.CHECKS.items()}


def find(name: str):
    """Plants a fault and verifies; returns the finding, or None, and the seconds."""
    model = jspec.load(f"bundled:{MODEL}", draft=f"bundled:{DRAFT}")
    server = name.removeprefix("server: ")
    if server in faults.SERVER_FAULTS:
        check, words = faults.SERVER_FAULTS[server]
        with faults.planted(lambda patch: None):
            checks = checks_of_server(model, server)
            return faults.until_failed(checks, MINUTES, words=words, only=check)
    plant, _, words = faults.FAULTS[name]
    with faults.planted(plant) as drafter:
        began = time.monotonic()
        subject = Subject(model, drafter or Standalone(), default_prompts(model, 48), None, 48, 0)
        checks = {check: cases(subject) for check, cases in verify.CHECKS.items()}
        finding, _ = faults.until_failed(checks, MINUTES, verify.WORKERS, words)
        return finding, time.monotonic() - began


def main() -> int:
    """Measures all faults; returns the exit status."""
    names = [*faults.FAULTS, *(f"server: {name}" for name in faults.SERVER_FAULTS)]
    parser = argparse.ArgumentParser(description="Measures how soon planted faults are found.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"faults to plant (default: all): {', '.join(names)}")
    parser.add_argument("--json", type=Path, help="file of measurements to which the lines are added")
    options = parser.parse_args()
    missed = 0
    for name in options.names or names:
        finding, seconds = find(name)
        missed += finding is None
        sentence = f"{finding.check}, {finding.case}: {finding.message}" if finding else "not found"
        print(f"{seconds:6.1f} s  {name}: {sentence}", flush=True)
        if options.json is not None:
            line = report.measurement(
                environment(),
                *("verify", name),
                metric="seconds until a planted fault is found",
                unit="s",
                values=[round(seconds, 1)] if finding else [],
                command="python benchmarks/planted_faults.py",
                subject=MODEL,
                mode=name,
                note=sentence,
            )
            recorded.add(options.json, [line])
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
