"""`jspec doctor`: what it finds, what it runs, and what its file does not contain."""

import json
import types

import pytest

from jspec import cli
from jspec.cli import bench, doctor
from pallas_kernels import dispatch, platform

TESTS = """
import pytest


def test_passes():
    pass


def test_fails():
    raise ValueError("/home/someone/x is wrong")


@pytest.mark.skip(reason="no device")
def test_skipped():
    pass
"""


def write_tests(root, text):
    path = root / doctor._TESTS["cpu"][0]
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_its_file_has_everything_and_names_nobody(capsys, tmp_path, monkeypatch):
    lines = [{"metric": "round", "unit": "tokens/s", "values": [1.0], "cache": "/home/someone/cache"}]
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "the-host")
    monkeypatch.setattr(doctor.getpass, "getuser", lambda: "someone")
    monkeypatch.setattr(doctor, "_platform_of_a_process", lambda: "cpu")
    monkeypatch.setattr(doctor, "run_tests", lambda root, name: {"passed": 2, "failed": 0, "by": "someone@the-host"})
    monkeypatch.setattr(doctor, "run_bench", lambda name: {"lines": lines})
    measured = {"target": "Llama", "drafters": "plain | Ngram(depth=6)", "batch": 1, "milliseconds": [1.0, 2.0]}
    (tmp_path / "jspec-costs-1.json").write_text(json.dumps(measured))
    (tmp_path / "jspec-costs-2.json").write_text("cut")
    monkeypatch.setattr(doctor, "programs_directory", lambda: tmp_path)
    path = tmp_path / "out.json"
    assert cli.main(["doctor", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert list(found) == ["versions", "tests", "devices", "kernels", "costs", "bench"]
    assert found["costs"] == [measured]
    assert found["versions"]["jax"] and found["devices"][0]["platform"] and found["kernels"]["paged_attention"]
    assert found["tests"] == {"passed": 2, "failed": 0, "by": "NAME@NAME"}
    assert found["bench"]["lines"] == [{"metric": "round", "unit": "tokens/s", "values": [1.0], "cache": "PATH"}]
    assert "paged_attention" in capsys.readouterr().out


def test_bandwidths_are_compared_with_what_is_expected():
    lines = [{"metric": f"{name} bandwidth", "median": speed} for name, speed in (("copy", 3000.0), ("gemv", 1500.0))]
    expected = "1500 GB/s (50% of copy; expected: 80% or more, since a round reads weights like this)"
    assert doctor.bandwidths({"lines": lines}, "gpu") == {"copy": "3000 GB/s", "gemv": expected}
    assert "time of a call" in doctor.bandwidths({"lines": lines}, "cpu")["gemv"]
    assert doctor.bandwidths({"lines": lines[:1]}, "gpu") == doctor.bandwidths({"problem": "x"}, "gpu") == {}


@pytest.mark.parametrize(
    ("tests", "bench"), (({"failed": 1}, {"lines": []}), ({"problem": "x"}, {"lines": []}), ({}, {"problem": "x"}))
)
def test_a_failure_is_its_status(tests, bench, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_platform_of_a_process", lambda: "cpu")
    monkeypatch.setattr(doctor, "run_tests", lambda root, name: {"files": [], **tests})
    monkeypatch.setattr(doctor, "run_bench", lambda name: bench)
    assert cli.main(["doctor", "--json", str(tmp_path / "out.json")]) == 1


def test_what_is_not_asked_for_does_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "run_tests", None)
    monkeypatch.setattr(doctor, "run_bench", None)
    path = tmp_path / "out.json"
    assert cli.main(["doctor", "--no-tests", "--no-bench", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert (found["tests"], found["bench"]) == ({"not run": "--no-tests"}, {"not run": "--no-bench"})


def test_a_file_that_cannot_be_written_is_refused_at_once(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "versions", None)
    assert cli.main(["doctor", "--json", "/no/such/file"]) == 2
    assert "--json /no/such/file: the directory /no/such does not exist" in capsys.readouterr().err


def test_the_results_of_tests_are_counted(tmp_path):
    write_tests(tmp_path, TESTS)
    (tmp_path / "pytest.ini").touch()  # no settings of a directory above
    found = doctor.run_tests(tmp_path, "cpu")
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1), found
    ((name, message),) = found["failures"].items()
    assert name.endswith("test_fails") and "ValueError: /home/someone/x is wrong" in message
    assert found["skipped because"] == ["no device"]
    assert "someone" not in json.dumps(doctor.without_names(found, []))


def test_an_installed_package_has_no_tests(tmp_path, monkeypatch):
    assert "in the repository" in doctor.run_tests(tmp_path, "cpu")["not run"]
    write_tests(tmp_path, TESTS)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor.run_tests(tmp_path, "cpu")["not run"].startswith("pytest and xdist not installed: pip install")


def test_a_measurement_that_fails_is_reported(monkeypatch):
    def fails(options):
        assert (options.preset, options.batch) == ("tiny", (1,))
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(bench, "run", fails)
    assert doctor.run_bench("cpu")["problem"] == "RuntimeError: no such instruction"
    monkeypatch.setattr(bench, "run", lambda options: options.json.write_text('{"metric": "round"}\n'))
    assert doctor.run_bench("cpu")["lines"] == [{"metric": "round"}]


@pytest.mark.parametrize("problem", (False, True))
def test_a_model_over_two_devices_is_measured_too(problem, tmp_path, monkeypatch):
    def measure(name, tensor=1):
        return {"problem": "x"} if problem and tensor == 2 else {"lines": [], "devices": tensor}

    monkeypatch.setattr(doctor, "devices", lambda: 3 * [{"kind": "cpu"}])
    monkeypatch.setattr(doctor, "run_bench", measure)
    path = tmp_path / "out.json"
    assert cli.main(["doctor", "--no-tests", "--json", str(path)]) == int(problem)
    assert json.loads(path.read_text())["bench over two devices"] == measure("cpu", 2)


def test_kernels_are_those_of_the_platform(monkeypatch):
    assert {operation.name for operation in doctor.operations()} >= {"paged_attention", "kv_compact", "topk"}
    monkeypatch.setattr(platform, "platform", lambda: "tpu")
    found = doctor.kernels()
    assert found["paged_attention"] == "mosaic_tpu" and found["residual_norm"] == "xla (no kernel for this platform)"
    monkeypatch.setattr(dispatch, "unavailable", lambda operation, name: "not available in this version of JAX: x")
    assert doctor.kernels()["kv_compact"] == "xla (mosaic_tpu is not available in this version of JAX: x)"


@pytest.mark.parametrize(
    ("capability", "kernel"),
    [("7.5", "xla"), ("7.0", "xla"), ("8.0", "triton"), ("12.0", "triton"), ("gfx942", "triton"), (None, "triton")],
)
def test_old_gpus_have_no_kernels(monkeypatch, capability, kernel):
    """XLA compiles no Triton kernel for a T4 or a V100."""
    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    monkeypatch.setattr(platform, "device", lambda: types.SimpleNamespace(compute_capability=capability))
    backend = doctor.kernels()["paged_attention"]
    assert backend.split()[0] == kernel
    assert kernel == "triton" or f"compute capability {capability}: must be at least 8.0" in backend


@pytest.mark.parametrize(
    ("text", "anonymous"),
    (
        ("at /home/a/b.py:3, in f", "at PATH:3, in f"),
        ("'/a/b c'", "'PATH c'"),
        ("~/.cache/x", "PATH"),
        (r"C:\Users\a", "PATH"),
        ("tokens/s and tpu-v6/tiny/b1", "tokens/s and tpu-v6/tiny/b1"),
        ("tests/kernels/test_topk.py", "tests/kernels/test_topk.py"),
        ("host: box1, boxes", "host: NAME, boxes"),
        (None, None),
    ),
)
def test_paths_and_names_are_left_out(text, anonymous):
    assert doctor.without_names(text, ["box1", "", "box"]) == anonymous


@pytest.mark.slow
def test_a_device_has_its_memory(monkeypatch):
    device = types.SimpleNamespace(device_kind="TPU v6 lite", platform="tpu", memory_stats=lambda: {"bytes_limit": 7})
    monkeypatch.setattr(doctor.jax, "devices", lambda: [device])
    assert doctor.devices() == [{"kind": "TPU v6 lite", "platform": "tpu", "memory": 7}]
