"""Plants the faults of `tests/helpers/faults.py` one by one, and measures how soon `jspec verify` finds each.

    python benchmarks/planted_faults.py --json benchmarks/results/DATE-MACHINE-planted-faults.jsonl

Each is verified in a process of its own, by all checks of the command, with a bundled model and no compilation cache.
The lines have the time of all cores until the sentence, as other programs do not change it; `settings` has the seconds
that passed, and `note` the sentence. The exit status is 1 if a fault is missed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import recorded

from jspec.analysis import verify, verify_endpoint
from jspec.analysis.verify_subject import Subject, default_prompts
from jspec.bench import report
from jspec.bench.machine import environment
from jspec.drafters import Standalone

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
import faults  # noqa: E402, after the path of the tests' helpers
import verified  # noqa: E402

MINUTES, NEW = 2.0, 48
PROMPT = "def mean(values):\n    "
NAMES = (*faults.FAULTS, *(f"server: {name}" for name in faults.SERVER_FAULTS))


def find(name: str) -> None:
    """Plants a fault, verifies, and ends the process with a line of JSON at the sentence."""
    model, server = verified.noisy(), name.removeprefix("server: ")
    plant, _, words = faults.FAULTS.get(name, (lambda patch: None, *faults.SERVER_FAULTS.get(server, ("", ""))))
    began, busy = time.monotonic(), time.process_time()

    def end(finding: verify.Finding) -> None:
        times = {"seconds": time.monotonic() - began, "busy": time.process_time() - busy}
        print(json.dumps({**times, "sentence": f"{finding.check}, {finding.case}: {finding.message}"}), flush=True)
        os._exit(0)

    with faults.planted(plant) as drafter:
        if server in faults.SERVER_FAULTS:
            plain = verify_endpoint.Plain(model)
            stub: verify_endpoint.Server = faults.Stub(plain, server)  # pyright: ignore[reportAssignmentType]
            pair = verify_endpoint.Pair(stub, plain, [PROMPT], NEW)
            checks = {check: cases(pair) for check, cases in verify_endpoint.CHECKS.items()}
        else:
            subject = Subject(model, drafter or Standalone(depth=4), default_prompts(model, NEW), None, NEW, 0)
            checks = {check: cases(subject) for check, cases in verify.CHECKS.items()}
        workers = 1 if server in faults.SERVER_FAULTS else verify.WORKERS
        faults.until_failed(checks, MINUTES, workers, words, end)


def main() -> int:
    """Measures faults; returns the exit status."""
    parser = argparse.ArgumentParser(description="Measures how soon planted faults are found.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"faults (default: all): {', '.join(NAMES)}")
    parser.add_argument("--json", type=Path, help="file of measurements to which the lines are added")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        find(options.names[0])
        return 1
    missed = 0
    for name in options.names or NAMES:
        command, uncached = [sys.executable, __file__, "--here", name], {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        done = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ | uncached, text=True)
        missed += done.returncode != 0
        # Two checks may end at once.
        out = {"sentence": "missed"} if done.returncode else json.JSONDecoder().raw_decode(done.stdout)[0]
        print(name, out, flush=True)
        if options.json is not None:
            line = report.measurement(
                environment(),
                *("verify", name),
                metric="time of all cores until a planted fault is found",
                unit="s",
                values=[] if done.returncode else [round(out["busy"], 1)],
                command="python benchmarks/planted_faults.py",
                subject=verified.TINY,
                mode=name,
                settings={"seconds": out.get("seconds"), "cores": os.cpu_count()},
                note=out["sentence"],
            )
            recorded.add(options.json, [line])
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
