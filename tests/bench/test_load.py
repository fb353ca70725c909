"""`jspec bench --load`: the load, what is counted of it, and the command as a user types it."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest
import recorded

from jspec import cli
from jspec.bench import load_report, machine, traffic
from jspec.bench.presets import PRESETS
from jspec.bench.subject import Subject
from jspec.bench.traffic import LoadResult, LoadRun
from jspec.loading import startup
from jspec.runner.request import EngineError


def run(capsys, *arguments):
    status = cli.main(["bench", "--load", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_load_is_the_published_one():
    given = traffic.requests(256, 1000)
    assert (sum(len(prompt) for prompt, _ in given), sum(new for _, new in given)) == (84_345, 48_502)
    assert all(32 <= len(prompt) <= 1536 and 16 <= new <= 512 for prompt, new in given)
    assert max(max(prompt) for prompt, _ in given) == 999
    assert traffic.requests(9, 1000) == given[:9]


def test_tokens_of_one_report_came_at_even_distances():
    handle = SimpleNamespace(times=SimpleNamespace(arrivals=[(1.0, 2), (1.5, 5), (2.5, 1)]))
    assert traffic._gaps(handle) == pytest.approx([0.0, *[0.1] * 5, 1.0])


class FakeEngine:
    """In place of an engine."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def warm_up(self):
        pass


RUN = LoadRun(2.0, 300, 50, 120, (0.5, 1.5), (0.01, 0.02), 3, [(0.0, 1, 2, 0), (2.0, 0, 0, 0)])


def measured(monkeypatch, compiles=(), repeats=2, error=None, start=FakeEngine):
    """compiles: how many programs each run compiles."""
    events, pending, result = [0], list(compiles), LoadResult("chain", 4)

    def one_run(*_):
        if error is not None:
            raise error
        events[0] += pending.pop(0) if pending else 0
        return RUN

    monkeypatch.setattr(traffic, "run", one_run)
    monkeypatch.setattr(startup, "compilations", lambda: events[0])
    traffic.measure(result, start, [], repeats, lambda _: None)
    return result


def test_runs_that_compile_do_not_count(monkeypatch):
    result = measured(monkeypatch, [9, 0, 2])
    assert (len(result.runs), result.problem) == (2, None)
    result = measured(monkeypatch, [1] * 99)
    assert (result.runs, result.problem) == ([], "0 of 2 runs count: programs were compiled during the others")
    assert result.row_rounds_used() == []


def test_what_does_not_fit_is_a_problem(monkeypatch):
    result = measured(monkeypatch, error=EngineError("the engine has failed: RESOURCE_EXHAUSTED: no\nmore"))
    assert result.problem == "out of memory while running: the engine has failed: RESOURCE_EXHAUSTED: no"
    with pytest.raises(EngineError, match="out of luck"):
        measured(monkeypatch, error=EngineError("out of luck"))

    def refuse():
        raise ValueError("slots=4, context=2048: the state takes 9 GB")

    assert measured(monkeypatch, start=refuse).problem == "slots=4, context=2048: the state takes 9 GB"


def test_programs_that_are_compiled_are_counted():
    before = startup.compilations()
    program = jax.jit(lambda x: x + 17)
    program(1.0).block_until_ready()
    after = startup.compilations()
    assert after > before
    program(2.0).block_until_ready()
    assert startup.compilations() == after


def report_of(*results):
    here = machine.Environment("2026-01-02T03:04:05+00:00", None, None, "1", None, "NVIDIA H1", 1, "", None)
    return load_report.LoadReport(
        model="m",
        dtype="bfloat16",
        command="jspec bench --load",
        environment=here,
        settings={
            "drafter": "eagle",
            "depth": 5,
            "tokens_per_round": 3.0,
            "width": 8,
            "num_nodes": 32,
            "page_size": 64,
        },
        parameters={"target": 8_030_261_248, "draft": 424_700_000},
        tokens=(84_345, 48_502),
        requests=256,
        results=list(results),
    )


def test_a_table_and_lines_of_runs():
    slower = dataclasses.replace(RUN, seconds=3.0, rounds=60)
    out = report_of(LoadResult("chain", 4, [RUN, slower, RUN]), LoadResult("plain", 4, problem="no room"))
    headline, heading, cells, problem = load_report.table(out).splitlines()
    assert headline == (
        "m: 8.03 B parameters + eagle draft of 424.70 M, bfloat16, imposed acceptance; NVIDIA H1, jax 1; 256 requests "
        "of 84,345 prompt and 48,502 output tokens in all"
    )
    assert len(heading) == len(cells) and heading.split()[:3] == ["mode", "slots", "tokens/s"]
    assert cells.split() == "chain 4 150.0 2.00 50 60% 500.0 1500.0 10.0 20.0 3".split()
    assert problem == "plain 4: no room"
    *lines, missing = load_report.lines(out)
    assert (missing.mode, missing.values, missing.note) == ("plain", [], "no room")
    assert "drafter" not in missing.settings and missing.settings["output_tokens"] == 48_502
    assert {line.metric: list(line.values) for line in lines} == {
        "output tokens per second": [150.0, 100.0, 150.0],
        "rounds": [50, 60, 50],
        "row-rounds used": [0.6, 0.5, 0.6],
        "median first token time": [0.5] * 3,
        "99th percentile of the first token time": [1.5] * 3,
        "median inter-token time": [10.0] * 3,
        "99th percentile of the inter-token time": [20.0] * 3,
        "preemptions": [3] * 3,
    }
    assert lines[0].id == "h1/m/load/chain/4-slots/output-tokens-per-second/20260102030405"
    assert (lines[0].batch, lines[0].context, lines[0].subject) == (4, 2048, "m")


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ("--mode chain --width 3", "--width 3: requires --mode tree, but --mode is chain"),
        ("--tokens-per-round 7", "--tokens-per-round 7: must be at most 6 with --depth 5"),
        ("--num-nodes 5", "--num-nodes, root included, must be at least depth + 1 = 6"),
        ("--json /no/such/file", "--json /no/such/file: the directory /no/such does not exist"),
        ("--slots 1 2 3 4 5 6 7 8 9 --plot x.png", "--plot x.png: draws at most 24 loads, but there are 27"),
    ),
)
def test_options_that_do_not_fit_together_are_refused_at_once(capsys, monkeypatch, arguments, message):
    """Before any weight is made."""
    monkeypatch.setattr(Subject, "make", None)
    status, out, err = run(capsys, "--preset", "tiny", *arguments.split())
    assert status == 2 and message in err and not out


def test_a_model_whose_context_is_too_short_is_refused(capsys, monkeypatch):
    preset = PRESETS["tiny"]
    short = dataclasses.replace(preset, head=dataclasses.replace(preset.head, max_length=2047))
    monkeypatch.setitem(PRESETS, "tiny", short)
    monkeypatch.setattr(Subject, "make", None)
    status, _, err = run(capsys, "--preset", "tiny")
    assert status == 2 and "jspec: requests have up to 2048 tokens; the context of tiny is 2047" in err


@pytest.mark.slow
def test_a_load_of_the_tiny_preset(capsys, tmp_path, needs):
    """With a whole number of imposed tokens a request of n tokens takes the rounds that n - 1 tokens need."""
    needs("matplotlib")
    files = ("--json", tmp_path / "load.jsonl", "--plot", tmp_path / "load.png")
    shape = ("--depth", 2, "--width", 2, "--num-nodes", 5, "--tokens-per-round", 2, "--slots", 2, "--repeats", 1)
    status, out, err = run(capsys, "--preset", "tiny", "--requests", 8, *shape, *files)
    assert status == 0 and not err, "a progress bar in a file"
    lines = recorded.read(tmp_path / "load.jsonl")
    assert len({line.id for line in lines}) == len(lines) == 3 * 8
    values = {(line.mode, line.metric): line.values[0] for line in lines}
    requests = traffic.requests(8, 128)
    for mode, tokens in {"plain": 1, "chain": 2, "tree": 2}.items():
        needed = sum(-(-(new - 1) // tokens) for _, new in requests)
        used, rounds = values[mode, "row-rounds used"], values[mode, "rounds"]
        assert round(used * 2 * rounds) == pytest.approx(needed, abs=0 if mode == "plain" else 8)
        assert 0.5 <= used <= 1 and values[mode, "preemptions"] == 0
        assert 0 < values[mode, "median first token time"] <= values[mode, "99th percentile of the first token time"]
    assert [line.split()[:2] for line in out.splitlines()[2:]] == [["plain", "2"], ["chain", "2"], ["tree", "2"]]
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
