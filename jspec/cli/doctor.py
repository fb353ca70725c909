"""Looks at the machine: devices, versions of packages, and the kernels in use. Then runs the tests for accelerators, if
this is a clone with pytest, and a short measurement. Writes the results to one file, to send with a report:
without names of hosts or users, and without paths.

With --model it looks at the draft instead: how many of the tokens written by the model the draft proposes, as its
checkpoint is read and under neighboring readings (captured layers and positions one lower or higher, causal or not,
the layout of rotary pairs, norms before or after). It warns if the draft fits clearly better under one of them, or
under none.
"""

import dataclasses
import getpass
import importlib
import importlib.metadata
import importlib.util
import json
import pkgutil
import platform as system
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax

import pallas_kernels
from jspec.bench import machine
from jspec.bench.options import BenchOptions
from jspec.cli import bench
from jspec.cli.arguments import check_output, naming_models
from jspec.core import package
from jspec.core.options import option
from jspec.generation import costs
from jspec.loading.model import load, probe_draft
from jspec.loading.startup import programs_directory
from pallas_kernels import dispatch, platform
from pallas_kernels.dispatch import Operation

_PACKAGES = ("jax", "jaxlib", "numpy", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax")
_ROOT = Path(__file__).resolve().parents[2]
_TESTS = {"cpu": ("tests/engine/test_accelerator.py",)}
"""Platform -> tests; other platforms also test the kernels."""
_TESTS_ELSEWHERE = ("tests/engine/test_accelerator.py", "tests/kernels")
_PRESETS = {"cpu": "tiny"}
"""Platform -> preset to measure; on other platforms a model of 1.2 billion parameters."""
_PRESET_ELSEWHERE = "llama-3.2-1b"
_GEMV_SHARE = 0.8
"""Minimum bandwidth of a gemv relative to a copy; measured on GPUs: 1.02 to 1.05."""
_TEST_SECONDS = 3600
_PATH = re.compile(r"(?<![\w.~-])(?:~|[A-Za-z]:)?[/\\](?:[^\s'\"`,;:()<>|\[\]{}]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `jspec doctor`."""

    json: Path = option(Path("jspec-doctor.json"), "where to write everything", metavar="FILE")
    model: str | None = option(None, "look at the draft of this model: bundled:NAME, a directory or a hub id")
    draft: str | None = option(None, "the draft, given like the model (default: that of the model itself)")
    no_tests: bool = option(False, "run no tests")
    no_bench: bool = option(False, "measure nothing")


def run(options: Options) -> int:
    """Prints and writes; the exit status is 0 if nothing failed, otherwise 1."""
    check_output("--json", options.json)
    if options.draft is not None and options.model is None:
        raise ValueError(f"--draft {options.draft}: requires --model")
    if options.model is not None:
        return _probe(options.model, options.draft, options.json)
    report: dict[str, Any] = {"versions": versions()}
    _show("versions", report["versions"])
    # Only one process can use a TPU at a time, so run the tests before this process does.
    report["tests"] = _not_run("--no-tests") if options.no_tests else run_tests(_ROOT, _platform_of_a_process())
    _show("tests", report["tests"])
    # From here on, this process uses the devices.
    report["devices"], report["kernels"] = devices(), kernels()
    for number, device in enumerate(report["devices"]):
        _show(f"device {number}", device)
    _show("kernels", report["kernels"])
    directory = programs_directory()
    report["costs"] = [] if directory is None else costs.recorded(directory)
    for number, entry in enumerate(report["costs"]):
        _show(f"costs {number}", entry)
    report["bench"] = _not_run("--no-bench") if options.no_bench else run_bench(platform.platform())
    if len(report["devices"]) > 1 and not options.no_bench:
        report["bench over two devices"] = run_bench(platform.platform(), tensor=2)
    benches = {name: lines for name, lines in report.items() if name.startswith("bench")}
    for name, lines in benches.items():
        if "problem" in lines:
            _show(name, lines)
    if speeds := bandwidths(report["bench"], platform.platform()):
        _show("memory", speeds)
    _write(report, options.json)
    failed = report["tests"].get("failed", 0) or any("problem" in part for part in (report["tests"], *benches.values()))
    return int(bool(failed))


def _write(report: Mapping[str, Any], path: Path) -> None:
    """Writes the report, without the names of host and user."""
    anonymous = without_names(report, [socket.gethostname(), _user()])
    path.write_text(json.dumps(anonymous, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {path}")


def _probe(source: str, draft: str | None, path: Path) -> int:
    """Prints and writes how the draft fits under each reading; the exit status is 1 if another fits better, or none."""
    with naming_models({"--draft": draft, "--model": source}):
        model = load(source, draft=draft)
        fit = probe_draft(model)
    report = {"versions": versions(), "devices": devices(), "draft": {"kind": repr(model), **dataclasses.asdict(fit)}}
    print(f"{model}\nas read: {fit.right} of {fit.total} first tokens are right, acceptance {fit.overlap:.2f}")
    for other in fit.others:
        name = f"{other.name} ({other.field})" if other.field else other.name
        tokens = f"{other.right} of {other.total} {other.tokens} tokens (as read: {other.read_right})"
        print(f"  with {name}: {tokens}, acceptance {other.overlap:.2f} ({other.errors:+.1f} standard errors)")
    warning = fit.warning(draft or source)
    print(f"{fit.seconds:.1f} s\n{warning or 'no other reading fits clearly better'}")
    _write(report, path)
    return int(warning is not None)


def versions() -> dict[str, str | None]:
    """Python, the operating system and packages -> version; None: not installed."""
    known = {"jspec": package.VERSION, "commit": machine.commit(), "python": system.python_version()}
    known["system"] = f"{system.system()} {system.machine()}"
    return {**known, **{name: _version(name) for name in _PACKAGES}}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> list[dict[str, Any]]:
    """The devices that JAX uses by default."""
    described = []
    for device in jax.devices():
        stats = (device.memory_stats() or {}) if device.platform != "cpu" else {}
        described.append({"kind": device.device_kind, "platform": device.platform, "memory": stats.get("bytes_limit")})
    return described


def operations() -> list[Operation]:
    """All operations of `pallas_kernels`."""
    names = sorted(module.name for module in pkgutil.iter_modules(pallas_kernels.__path__) if module.ispkg)
    return [importlib.import_module(f"pallas_kernels.{name}.api").OPERATION for name in names]


def kernels() -> dict[str, str]:
    """Operation -> its backend on this platform for supported shapes, with the reason if it is no kernel."""
    return {operation.name: _backend(operation) for operation in operations()}


def _backend(operation: Operation) -> str:
    candidates = [name for name in dispatch.BACKENDS.get(platform.platform(), ()) if name in operation.kernels]
    # The first available kernel is the one in use.
    reasons = []
    for name in candidates:
        reason = dispatch.unavailable(operation, name)
        if reason is None:
            return name
        reasons.append(f"{name} is {reason}")
    return f"xla ({'; '.join(reasons) or 'no kernel for this platform'})"


def _platform_of_a_process() -> str:
    """The platform of JAX, from a child process, so that no device is in use afterwards."""
    code = "from pallas_kernels import platform; print(platform.platform())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return out.stdout.split()[-1] if out.returncode == 0 and out.stdout else "cpu"


def run_tests(root: Path, platform_name: str) -> dict[str, Any]:
    """Counts of the tests for accelerators, and messages of failed ones; or the reason why they were not run.

    root: of the repository.
    """
    files = _TESTS.get(platform_name, _TESTS_ELSEWHERE)
    if not all((root / name).exists() for name in files):
        return _not_run("the tests are in the repository, and this is an installed package")
    # The tests need pytest.
    missing = [name for name in ("pytest", "xdist") if importlib.util.find_spec(name) is None]
    if missing:
        return _not_run(f"{' and '.join(missing)} not installed: {package.install('test')}")
    print(f"testing {' and '.join(files)}: minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={results}"]
        try:
            done = subprocess.run(
                [*command, *files], cwd=root, capture_output=True, text=True, timeout=_TEST_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return {"files": list(files), "problem": f"not done after {_TEST_SECONDS} s"}
        if not results.exists():
            return {"files": list(files), "problem": (done.stdout + done.stderr)[-2000:]}
        return {"files": list(files), **read_results(results)}


def read_results(path: Path) -> dict[str, Any]:
    """The counts and the failures in pytest's XML."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures, reasons = {}, set()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        wrong, skipped = case.find("failure"), case.find("skipped")
        wrong = case.find("error") if wrong is None else wrong
        if wrong is not None:
            failures[f"{case.get('classname')} {case.get('name')}"] = (wrong.get("message") or "")[:500]
        elif skipped is not None:
            reasons.add(skipped.get("message") or "")
        counts["failed" if wrong is not None else "passed" if skipped is None else "skipped"] += 1
    return {**counts, "failures": failures, "skipped because": sorted(reasons)}


def run_bench(platform_name: str, *, tensor: int = 1) -> dict[str, Any]:
    """The lines of a short measurement, as from `jspec bench --json`, or the reason why there are none.

    tensor: devices of the model.
    """
    preset = _PRESETS.get(platform_name, _PRESET_ELSEWHERE)
    measured: dict[str, Any] = {"preset": preset, "batch": (1,), "context": (64 if preset == "tiny" else 512,)}
    measured |= {"tensor": tensor} if tensor > 1 else {}
    cached = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.jsonl"
        try:
            # Whether rounds are one CUDA graph is not known of programs from the cache.
            jax.config.update("jax_enable_compilation_cache", False)
            bench.run(BenchOptions(**measured, repeats=3, json=path))
        except Exception as error:  # any failure on an untested machine belongs in the report
            return {"problem": f"{type(error).__name__}: {error}"[:2000], "options": measured}
        finally:
            jax.config.update("jax_enable_compilation_cache", cached)
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {"options": measured, "lines": lines}


def bandwidths(measured: Mapping[str, Any], platform_name: str) -> dict[str, str]:
    """The measured bandwidths, beside what to expect; empty if nothing was measured."""
    lines = {line["metric"]: line.get("median") for line in measured.get("lines", [])}
    copy, gemv = (lines.get(f"{name} bandwidth") for name in ("copy", "gemv"))
    if not copy or not gemv:
        return {}
    expected = f"{gemv / copy:.0%} of copy; expected: {_GEMV_SHARE:.0%} or more, since a round reads weights like this"
    if platform_name == "cpu":
        expected = "of a small matrix: mostly the time of a call"
    return {"copy": f"{copy:.0f} GB/s", "gemv": f"{gemv:.0f} GB/s ({expected})"}


def _not_run(reason: str) -> dict[str, Any]:
    return {"not run": reason}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def without_names(value: Any, names: Sequence[str]) -> Any:
    """The same data without absolute paths and without these names."""
    if isinstance(value, str):
        text = _PATH.sub("PATH", value)
        for name in filter(None, names):
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "NAME", text)
        return text
    if isinstance(value, Mapping):
        return {without_names(key, names): without_names(part, names) for key, part in value.items()}
    return [without_names(part, names) for part in value] if isinstance(value, list | tuple) else value


def _show(title: str, values: Mapping[str, Any]) -> None:
    width = max(map(len, values))
    print(f"{title}:")
    for name, value in values.items():
        print(f"  {name.ljust(width)}  {json.dumps(value) if isinstance(value, list | dict) else value}", flush=True)
