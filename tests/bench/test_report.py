"""Tables, lines and plots of results of `jspec bench` that are made by hand."""

import dataclasses
import json
import re

import pytest

from jspec.analysis import plots
from jspec.bench import machine, report
from jspec.bench.measure import CaseResult


def result(mode="tree", **changes):
    given = CaseResult(mode, 8, 512, floor_bytes=6 * 3026 * 10**6, capacity=1024, accept_length=3.0)
    given.round_seconds, given.first_token_seconds = [0.008], [0.02, 0.03, 0.021]
    given.compile_seconds = {"prefill": 5.0, "decode": 6.5}
    given.phase_seconds = {"draft": [0.001], "verify": [0.006], "accept_commit": [0.0005], "extend": [0.001]}
    return dataclasses.replace(given, **changes)


def unfit(problem):
    return CaseResult("plain", 8, 512, floor_bytes=1, capacity=1024, problem=problem)


def report_of(*results):
    here = machine.Environment("2026-01-02T03:04:05+00:00", None, None, "1", None, "NVIDIA H1", 1, "", None)
    return report.Report(
        model="m",
        dtype="bfloat16",
        command=None,
        environment=here,
        settings={"drafter": "eagle", "tokens_per_round": 3.0, "rounds": 85, "width": 8, "num_nodes": 32},
        parameters={"target": 8_030_261_248, "draft": 424_700_000},
        streamed_bytes={"target": 10},
        bandwidth={"copy": machine.Bandwidth(3026 * 10**9, [1.0]), "gemv": machine.Bandwidth(2846 * 10**9, [1.0])},
        results=list(results),
    )


def test_a_table_names_what_was_not_measured():
    text = report.table(report_of(result(accept_length=2.4), unfit("does not fit: 1 GB")))
    headline, _, cells, missing, shallow = text.splitlines()
    assert headline == (
        "m: 8.03 B parameters + eagle draft of 424.70 M, bfloat16, imposed acceptance; NVIDIA H1, jax 1; "
        "copy 3026 GB/s, gemv 2846 GB/s"
    )
    assert cells.split() == (
        "tree 8 512 8.000 2400.0 2.40 1.000 6.000 0.5000 1.000 -0.5000 6.000 75% 21.00 11.5".split()
    )
    assert missing == "plain 8 x 512: does not fit: 1 GB"
    assert shallow == "tree 8 x 512: 2.40 tokens per round instead of 3, because some trees are shallower"


def test_a_case_that_was_not_measured_is_a_line_without_values():
    lines = report.lines(report_of(unfit("does not fit: 1 GB"), result()))
    (missing,) = [line for line in lines if line.mode == "plain"]
    assert (missing.metric, missing.values, missing.median) == ("round", [], None)
    assert missing.note == "does not fit: 1 GB" and "drafter" not in missing.settings
    (rounds,) = [line for line in lines if line.mode == "tree" and line.metric == "round"]
    assert rounds.id == "h1/m/tree/b8/c512/round/20260102030405"
    assert (rounds.median, rounds.floor) == (8.0, pytest.approx(6.0))


def test_a_plot_stacks_the_phases_up_to_the_round(needs):
    needs("matplotlib")
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    results = [result(), result("chain", phase_seconds={}), unfit("does not fit")]
    lines = [json.loads(line.to_json()) for line in report.lines(report_of(*results))]
    ax = plots.bench_report(lines)
    assert [bar.get_y() + bar.get_height() for bar in ax.containers[-1]] == pytest.approx([8.0, 8.0])
    assert [bar.get_height() for bar in ax.containers[1]] == [6.0, 0.0]
    (floor,) = ax.collections
    assert [segment[0][1] for segment in floor.get_segments()] == pytest.approx([6.0, 6.0])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["tree\n8 x 512", "chain\n8 x 512"]
    with pytest.raises(ValueError, match="nothing was measured: does not fit"):
        plots.bench_report([line for line in lines if line["mode"] == "plain"])
    plt.close("all")


def test_the_commit_is_that_of_the_checkout():
    """None where this package is not in one."""
    commit = machine.environment().commit
    assert commit is None or re.fullmatch("[0-9a-f]{7,}(-dirty)?", commit)


def test_the_driver_is_read_from_the_kernel_module(tmp_path):
    path = tmp_path / "version"
    text = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\nGCC version:  gcc 12.2.0\n"
    )
    path.write_text(text)
    assert machine._driver(path) == "580.82.07"
    assert machine._driver(tmp_path / "other") is None


def test_the_command_of_a_measurement_names_no_file_of_the_machine():
    given = ["--batch", "1", "8", "--json", "/a/b.jsonl", "/a/c.jsonl", "--variant", "as it is"]
    assert report.command("python x.py", given) == "python x.py --batch 1 8 --variant 'as it is'"
    assert report.command("python x.py", ["--json", "a.jsonl"]) == "python x.py"
    given = ["--plot", "a.png", "--state", "/a/b", "--k", "3"]
    assert report.command("python x.py", given, {"--state": "FILE"}) == "python x.py --state FILE --k 3"
    given = ["--json=a", "--state=/a/b", "--k=3"]
    assert report.command("python x.py", given, {"--state": "FILE"}) == "python x.py --state=FILE --k=3"


@pytest.mark.parametrize(
    ("starts", "known", "text"),
    (
        ("", True, "all rounds of a call are one CUDA graph"),
        ("the host starts ['kWhile']", False, "tree 8 x 512: not one CUDA graph: the host starts ['kWhile']"),
        (None, None, None),
    ),
)
def test_whether_rounds_are_one_graph(starts, known, text):
    measured = report_of(result(starts=starts))
    (line,) = (line for line in report.lines(measured) if line.metric == "round")
    assert line.settings.get("one_graph") is known
    shown = report.table(measured)
    assert text in shown if text else "graph" not in shown
