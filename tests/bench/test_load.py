"""`jspec bench --load`: the load, what is counted of it, and the command as a user types it."""

import dataclasses
import gc
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recorded

from jspec import cli
from jspec.bench import load_report, machine, traffic
from jspec.bench.acceptance import Varied
from jspec.bench.presets import PRESETS
from jspec.bench.subject import Subject
from jspec.bench.traffic import Chat, LoadResult, LoadRun, Objective
from jspec.core import tree
from jspec.core.sampling import seeds_to_keys
from jspec.core.types import DraftTree
from jspec.loading import startup
from jspec.runner.request import EngineError


def run(capsys, *arguments):
    status = cli.main(["bench", "--load", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_percentage_is_shown_in_the_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        run(capsys, "--help")
    assert "99% of its times between tokens" in " ".join(capsys.readouterr().out.split())


def test_the_load_is_the_published_one():
    given = traffic.requests(256, 1000)
    assert (sum(len(prompt) for prompt, _ in given), sum(new for _, new in given)) == (84_345, 48_502)
    assert all(32 <= len(prompt) <= 1536 and 16 <= new <= 512 for prompt, new in given)
    assert max(max(prompt) for prompt, _ in given) == 999
    assert traffic.requests(9, 1000) == given[:9]


def test_tokens_of_one_report_came_at_even_distances():
    handle = SimpleNamespace(times=SimpleNamespace(arrivals=[(1.0, 2), (1.5, 5), (2.5, 1)]))
    assert traffic._gaps(handle) == pytest.approx([0.0, *[0.1] * 5, 1.0])


def test_chats_share_a_beginning_and_add_to_it():
    assert traffic.chats([0.0] * 9, 1000) == [Chat(0.0, [turn]) for turn in traffic.requests(9, 1000)]
    turns = traffic.requests(6, 1000)
    chats = traffic.chats([0.5, 1.5], 1000, turns=3, shared=5)
    assert [chat.start for chat in chats] == [0.5, 1.5]
    assert [chat.turns[1:] for chat in chats] == [turns[1:3], turns[4:]]
    for chat, (ids, new) in zip(chats, turns[::3], strict=True):
        assert chat.turns[0][0][5:] == ids and chat.turns[0][1] == new
    assert chats[0].turns[0][0][:5] == chats[1].turns[0][0][:5]


def test_arrivals_are_those_of_a_poisson_process():
    times = traffic.poisson(40.0, 100.0)
    assert times == sorted(times) and times == traffic.poisson(40.0, 100.0) and times[-1] < 100.0
    assert len(times) == pytest.approx(4000, abs=4 * 4000**0.5)
    gaps = np.diff(times)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.1) and np.mean(gaps) == pytest.approx(1 / 40, rel=0.1)
    assert traffic.poisson(20.0, 200.0) == pytest.approx([2 * time for time in times])


def test_a_trace_has_equal_numbers_where_prompts_begin_alike():
    """A number names a block and all before it, as in the traces of Mooncake."""
    same = [*range(32)]
    load = [Chat(0.0, [([*same, 7], 3)]), Chat(0.25, [([*same, 8, 9], 4)]), Chat(1.5, [([1, *same[1:], 7], 5)])]
    assert list(traffic.trace(load)) == [
        {"timestamp": 0.0, "input_length": 33, "output_length": 3, "hash_ids": [0, 1, 2]},
        {"timestamp": 0.25, "input_length": 34, "output_length": 4, "hash_ids": [0, 1, 3]},
        {"timestamp": 1.5, "input_length": 33, "output_length": 5, "hash_ids": [4, 5, 6]},
    ]


class TimedEngine:
    """Answers each request `first` seconds after it comes and then a token each `gap`, on a clock of the test."""

    def __init__(self, monkeypatch, first, gap, delay=0.0, last=0.0):
        """delay: seconds of a submission. last: seconds that the last token of a request takes longer."""
        self.now, self.first, self.gap, self.handles = 100.0, iter(first), iter(gap), []
        self.delay, self.last = delay, last
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("time.sleep", self.sleep)

    def sleep(self, seconds):
        self.now += seconds or 1e-3

    def submit(self, prompt, *, max_new_tokens, seed):
        begin, gap = self.now + next(self.first), next(self.gap)
        arrivals = [(begin + gap * i + self.last * (i == max_new_tokens - 1), 1) for i in range(max_new_tokens)]
        self.now += self.delay
        times = SimpleNamespace(arrivals=arrivals, ended=arrivals[-1][0], submitted=self.now)
        handle = TimedHandle(self, times, SimpleNamespace(prompt=prompt, rounds=max_new_tokens - 1, seed=seed))
        self.handles.append(handle)
        return handle

    def metrics(self):
        read = sum(len(handle.request.prompt) for handle in self.handles)
        counts = dict(running=1, waiting=2, held=0, device_rounds=len(self.handles), preemptions=0)
        return SimpleNamespace(**counts, prefix_queries=read, prefix_hits=read / 4)


@dataclasses.dataclass
class TimedHandle:
    engine: TimedEngine
    times: SimpleNamespace
    request: SimpleNamespace

    @property
    def done(self):
        return self.engine.now >= self.times.ended

    def result(self):
        return SimpleNamespace(tokens=[50 + i for i in range(self.request.rounds + 1)])


GAPS = 1 / 128, 1 / 64, 1 / 128, 1 / 16


def test_a_run_counts_from_when_a_request_is_due(monkeypatch):
    load = [Chat(start, [([1, 2, 3, 4], 3)]) for start in (0.0, 0.5, 0.5, 2.0)]
    engine = TimedEngine(monkeypatch, first=(0.5, 0.25, 1.0, 0.5), gap=GAPS)
    run = traffic.run(engine, load)
    submitted = [handle.times.submitted for handle in engine.handles]
    assert submitted == pytest.approx([100.0, 100.5, 100.5, 102.0])
    assert [handle.request.seed for handle in engine.handles] == [0, 1, 2, 3]
    assert (run.requests, run.tokens, run.row_rounds, run.rounds) == (4, 12, 8, 4)
    assert run.seconds == pytest.approx(2.625) and run.cached == 0.25
    assert run.first_token == pytest.approx((0.5, 0.985))
    assert run.inter_token == pytest.approx((1.5 / 128, 1 / 16))
    # One is late by its first token, one by its gaps.
    assert run.good == 0.5
    engine = TimedEngine(monkeypatch, first=(0.5, 0.25, 1.0, 0.5), gap=GAPS)
    assert traffic.run(engine, load, Objective(1.1, 1 / 64)).good == 0.5
    engine = TimedEngine(monkeypatch, first=(0.5, 0.25, 1.0, 0.5), gap=GAPS)
    assert traffic.run(engine, load, Objective(1.1, 0.07)).good == 1.0


def test_late_submissions_and_rare_gaps_count(monkeypatch):
    """Two requests are due at once, and the second one is submitted late; one gap in eight is long."""
    for objective, good in ((Objective(0.7, 0.2), 0.5), (Objective(0.8, 0.2), 1.0), (Objective(0.8, 0.1), 0.0)):
        engine = TimedEngine(monkeypatch, first=(0.5, 0.5), gap=(1 / 64, 1 / 64), delay=0.25, last=7 / 64)
        run = traffic.run(engine, [Chat(0.0, [([1], 9)])] * 2, objective)
        assert run.good == good and run.first_token == pytest.approx((0.625, 0.7475))


def test_a_turn_of_a_chat_continues_the_text_after_the_reply(monkeypatch):
    engine = TimedEngine(monkeypatch, first=[0.25] * 4, gap=[0.125] * 4)
    load = [Chat(0.0, [([1, 2], 3), ([4], 1)]), Chat(0.125, [([5], 1), ([6, 7], 2)])]
    run = traffic.run(engine, load)
    prompts = {handle.request.seed: [] for handle in engine.handles}
    for handle in engine.handles:
        prompts[handle.request.seed].append(handle.request.prompt)
    assert prompts == {0: [[1, 2], [1, 2, 50, 51, 52, 4]], 1: [[5], [5, 50, 6, 7]]}
    assert (run.requests, run.tokens) == (4, 7)
    assert run.first_token == pytest.approx((0.25, 0.25))
    assert [handle.times.submitted for handle in engine.handles] == pytest.approx(
        [100.0, 100.125, 100.375, 100.5], abs=0.02
    )


def test_the_acceptance_of_requests_varies_as_stated():
    """It belongs to the position of a draft, whichever round has it, and to the sequence."""
    keys, rule = seeds_to_keys(jnp.array([(seed, 0) for seed in range(3000)], jnp.uint32)), jax.jit(Varied(0.709))
    rates = np.array(jax.jit(Varied(0.709).rates)(keys))
    assert rates.mean() == pytest.approx(0.709, abs=0.01) and 0.05 <= rates.min() and rates.max() <= 0.97
    mean = 8.4 / 12
    assert rates.std() == pytest.approx(0.709 / mean * (mean * (1 - mean) / 13) ** 0.5, abs=0.01)

    def judged(position, depth):
        tokens = jnp.broadcast_to(jnp.arange(depth + 1), (len(rates), depth + 1))
        logits = jax.nn.one_hot(jnp.full(tokens.shape, 9), 10)
        out = rule(keys, tree.chain(tokens), logits, jnp.full(len(rates), position))
        return np.array(out.tokens), np.array(out.length)

    tokens, length = judged(40, 5)
    assert length.mean() == pytest.approx(np.mean([(rates**k) for k in range(6)], 1).sum(), abs=0.1)
    row = int(np.flatnonzero(length == 4)[0])
    assert tokens[row, :4].tolist() == [1, 2, 3, 9]
    np.testing.assert_array_equal(judged(40, 2)[1], np.minimum(length, 3))
    later = judged(41, 5)[1]
    np.testing.assert_array_equal(np.minimum(later, 5)[length > 1], np.minimum(length - 1, 5)[length > 1])
    assert judged(40, 0)[1].tolist() == [1] * len(rates)
    with pytest.raises(ValueError, match="judges chains only"):
        tokens = jnp.zeros((1, 3), jnp.int32)
        rule(keys[:1], DraftTree(tokens, tokens, depth=1), jnp.zeros((1, 3, 4)), jnp.zeros(1, jnp.int32))


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
    frozen = gc.get_freeze_count()
    traffic.measure([(result, [])], start, repeats, lambda _: None)
    assert start is not FakeEngine or gc.get_freeze_count() > frozen
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


def test_goodput_is_the_highest_rate_below_which_all_are_good():
    def result(rate, *good):
        return LoadResult("chain", 4, [dataclasses.replace(RUN, good=share) for share in good], rate=rate)

    results = [result(32.0, 0.95, 0.2, 0.96), result(16.0, 1.0), result(48.0, 0.94), result(64.0, 1.0)]
    assert traffic.goodput(results) == 32.0
    assert traffic.goodput([result(8.0, 0.9)]) == traffic.goodput([LoadResult("chain", 4, rate=8.0)]) == 0.0


def test_a_table_and_lines_of_rates():
    run = dataclasses.replace(RUN, good=0.975, requests=40, cached=0.5)
    out = dataclasses.replace(report_of(LoadResult("chain", 4, [run], rate=16.0)), tokens=None, requests=None)
    out.settings = {**out.settings, "acceptance": 0.7, "prefix_cache": True}
    headline, heading, cells, goodput = load_report.table(out).splitlines()
    assert "bfloat16, varied acceptance; NVIDIA H1, jax 1; Poisson arrivals" in headline
    assert heading.split()[-3:] == ["rate", "good", "cached"] and cells.split()[-3:] == ["16", "97.5%", "50%"]
    assert goodput == "goodput of chain, 4 slots: 16 requests/s"
    lines = load_report.lines(out)
    assert {line.metric: list(line.values) for line in lines[-3:]} == {
        "good requests": [0.975],
        "good requests per second": [19.5],
        "cached prompt tokens": [0.5],
    }
    assert lines[0].id == "h1/m/load/chain/4-slots/16-per-second/output-tokens-per-second/20260102030405"
    assert lines[0].settings["rate"] == 16.0 and "requests" not in lines[0].settings


def test_a_trace_is_written_without_weights(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(Subject, "make", None)
    path = tmp_path / "load.jsonl"
    status, out, _ = run(
        capsys, "--preset", "tiny", "--rate", 20, "--seconds", 3, "--shared-prefix", 40, "--trace", path
    )
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    sizes = traffic.requests(len(rows), 9)
    assert status == 0 and out == f"{path}: {len(rows)} requests\n"
    assert [row["timestamp"] for row in rows] == traffic.poisson(20.0, 3.0)
    assert [(row["input_length"] - 40, row["output_length"]) for row in rows] == [(len(ids), new) for ids, new in sizes]
    assert {tuple(row["hash_ids"][:2]) for row in rows} == {(0, 1)}
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // 16) for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ("--mode adaptive", "--mode adaptive: requires --acceptance"),
        ("--acceptance 0.7 --mode tree", "--mode tree: drafts of --acceptance are chains"),
        ("--trace x.jsonl --turns 2", "--turns 2: must be a single one with --trace"),
        ("--trace x.jsonl --rate 2 4", "--rate 2.0 4.0: must be a single one with --trace"),
        ("--rate 9 0.01 --seconds 2 --requests 3", "--rate 0.01: no request arrives within --seconds 2; raise one"),
        ("--turns 3", "requests have up to 6144 tokens; the context of tiny is 4096"),
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
    assert not {"rate", "good", "cached"} & set(out.splitlines()[1].split())
    assert [line.split()[:2] for line in out.splitlines()[2:]] == [["plain", "2"], ["chain", "2"], ["tree", "2"]]
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_chats_at_rates_share_their_beginnings(capsys, tmp_path, needs, monkeypatch):
    """The second turn finds the first one in the cache; a cold engine finds nothing."""
    needs("matplotlib")
    monkeypatch.setattr(traffic, "PROMPT", (20, 0.5, 8, 48))
    monkeypatch.setattr(traffic, "OUTPUT", (8, 0.5, 4, 16))
    monkeypatch.setattr(traffic, "CONTEXT", 64)
    shape = ("--mode", "chain", "--acceptance", 0.8, "--slots", 2, "--repeats", 1, "--page-size", 8)
    load = ("--rate", 2, 4, "--seconds", 3, "--turns", 2, "--shared-prefix", 32)
    files = ("--json", tmp_path / "load.jsonl", "--plot", tmp_path / "load.png")
    status, out, err = run(capsys, "--preset", "tiny", *shape, *load, *files)
    assert status == 0 and not err and "goodput of chain, 2 slots: " in out
    lines = recorded.read(tmp_path / "load.jsonl")
    values = {(line.settings["rate"], line.metric): line.values[0] for line in lines}
    for rate in (2.0, 4.0):
        assert 0.4 < values[rate, "cached prompt tokens"] < 0.95 and 0 <= values[rate, "good requests"] <= 1
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    run(capsys, "--preset", "tiny", *shape, *load, "--no-prefix-cache", *files)
    assert {line.settings["prefix_cache"] for line in recorded.read(tmp_path / "load.jsonl")} == {False}
