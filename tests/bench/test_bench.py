"""`jspec bench` at tiny shapes: the phases of a round, and the command as a user types it."""

import dataclasses
import functools
import re
from datetime import UTC, datetime, timedelta
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recorded
import toy
from hlo import loop_body, opcode

import jspec
from jspec import cli
from jspec.bench import machine, phases, report, weights
from jspec.bench import subject as subjects
from jspec.bench.options import BenchOptions
from jspec.bench.presets import PRESETS, eagle_head
from jspec.cli import bench
from jspec.core import accept, stopping
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.core.prefill import jitted_prefill
from jspec.core.round import step
from jspec.core.types import Params, Prompts
from jspec.drafters import Eagle, FrozenKvMtp, Plain, Standalone
from jspec.loading import memory
from jspec.models.quantized import quantize, widen

RULE = accept.Imposed(2.5)
TINY, GEMMA = PRESETS["tiny"], PRESETS["tiny-gemma-4"]
TINY_SHAPES = TINY.target.param_shapes(np.float32)
DRAFTERS = {
    "plain": Plain(),
    "chain": Standalone(depth=2).bind(TINY.target, TINY.standalone),
    "tree": Eagle(depth=2, width=2, num_nodes=6).bind(TINY.target, TINY.head),
    "assistant": FrozenKvMtp(depth=2, width=2, num_nodes=6).bind(GEMMA.target, GEMMA.assistant),
}


def target_of(drafter):
    return GEMMA.target if isinstance(drafter, FrozenKvMtp) else TINY.target


@functools.cache
def params_of(drafter):
    target, model = target_of(drafter), getattr(drafter, "model", None)
    shapes = Params(*(each and each.param_shapes(jnp.float32) for each in (target, model)))
    return weights.random_weights(shapes, target.vocab_size)


def method_of(drafter, rule=RULE):
    return Method(target_of(drafter), drafter, rule)


def prefilled(drafter):
    """Three rows of 9 tokens."""
    target = target_of(drafter)
    ids = np.random.default_rng(0).integers(0, target.vocab_size, (3, 9), np.int32)
    keys = jax.vmap(jax.random.key)(np.arange(3, dtype=np.uint32))
    length, stop = np.full(3, 9, np.int32), stopping.init(None, 3)
    prompts = Prompts(ids, length, length + 30, keys, stop)
    return jitted_prefill(params_of(drafter), prompts, method=method_of(drafter), capacity=40, page_size=4)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    """No test reads the machine's bandwidth, so its measurement may be quick."""
    monkeypatch.setattr(machine, "COPY_BYTES", {jax.default_backend(): 2**16})


def test_a_call_takes_the_mean_of_many_in_a_row(monkeypatch):
    """Beside 5 s of the host, calls of 1 s take 60 at least."""
    now, calls = [0.0], []

    def function(x):
        calls.append(x)
        now[0] += 1
        return x

    def await_all(_):
        now[0] += 5

    monkeypatch.setattr(machine.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(machine.jax, "block_until_ready", await_all)
    assert machine.seconds_of(function, "x", repeats=2, burst=60) == [69 / 64] * 2
    assert machine.seconds_of(function, "x", repeats=3, burst=0) == [6] * 3
    assert calls == ["x"] * (2 + 127 + 2 * 64 + 2 + 1 + 3)


# Imposed acceptance in the loop


@pytest.mark.slow
@pytest.mark.parametrize("shape", ({"width": 1}, {"width": 2, "num_nodes": 6}), ids=("chain", "tree"))
def test_generate_takes_the_rule(shape):
    model = jspec.Model("tiny", TINY.target, params_of(DRAFTERS["chain"]), None, (), TINY.standalone)
    drafter = jspec.Standalone(depth=2, **shape)
    out = jspec.generate(model, [[5, 6, 7], [1, 2]], drafter=drafter, max_new_tokens=50, accept=RULE)
    # With their first tokens rows have 4 and 3, and they end at 53 and 52. Rounds end at 5, 7, 10, ..., 50, 52, but for
    # the first ones, which begin between two of these: from 4 it is 3 tokens to 7, and from 3 it is 2 to 5. The limit
    # cuts the last one of the longer row.
    assert [np.bincount(rounds).tolist() for rounds in out.tokens_per_round] == [[0, 1, 9, 10], [0, 0, 11, 9]]


def _dots(text):
    """The types of all products of a compiled program."""
    return sorted(re.search(r" = (\S+?)[{ ]", line)[1] for line in text.splitlines() if opcode(line) == "dot")


@pytest.mark.slow
def test_imposed_acceptance_leaves_no_work_out(optimized):
    """A whole number of accepted drafts is a constant; drafts after them and their logits are computed all the same."""
    drafter = DRAFTERS["chain"]
    s = prefilled(drafter)
    programs = [
        decode.lower(params_of(drafter), s, jnp.int32(9), method=method_of(drafter, rule)).compile().as_text()
        for rule in (accept.greedy, accept.Imposed(2.0))
    ]
    greedy, imposed = map(_dots, programs)
    assert imposed == greedy and len(greedy) > 10


@pytest.fixture
def optimized():
    """Compiles as for a user, which tests do not by default (conftest.py)."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


# Phases


@pytest.mark.slow
@pytest.mark.parametrize("mode", DRAFTERS)
def test_the_phases_are_the_round(mode):
    drafter = DRAFTERS[mode]
    params, method = params_of(drafter), method_of(drafter)
    expected = jax.jit(partial(step, method=method))(params, prefilled(drafter))
    seconds, got = phases.time_phases(params, prefilled(drafter), phases.Phases(method), count=3, repeats=2)
    assert list(seconds) == (["verify", "accept_commit"] if mode == "plain" else list(report.PHASES)[:-1])
    assert all(len(each) == 2 and min(each) > 0 for each in seconds.values())
    for a, b in zip(toy.arrays(got), toy.arrays(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow(unless="draft")
@pytest.mark.parametrize("phase", ("draft", "verify"))
def test_nothing_of_a_repeated_phase_leaves_the_loop(phase, optimized):
    drafter = DRAFTERS["chain"]
    params, s, parts = params_of(drafter), prefilled(drafter), phases.Phases(method_of(drafter))
    given = s if phase == "draft" else (s, jax.jit(drafter.draft)(params, s)[0])
    repeated = phases.repeat.lower(params, given, None, phase=getattr(parts, phase), count=7).compile().as_text()
    inside = _dots("\n".join(loop_body(repeated)))
    # A GPU's compiler makes a sum of one of the small ones.
    assert inside == _dots(repeated) and len(inside) > (4 if jax.default_backend() == "gpu" else 5)
    # Nor do reads of the prefix, which the loop does not write.
    pages = [line for line in loop_body(repeated) if opcode(line) == "gather"]
    assert len(pages) >= repeated.count(" gather(") > 0


# The command


def run(capsys, *arguments):
    status = cli.main(["bench", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.slow
def test_a_report_of_the_tiny_preset(capsys, tmp_path, needs):
    needs("matplotlib")
    files = ("--json", tmp_path / "report.jsonl", "--plot", tmp_path / "report.png")
    shape = (
        "--depth",
        2,
        "--width",
        2,
        "--num-nodes",
        6,
        "--rounds",
        8,
        "--repeats",
        2,
        "--batch",
        2,
        "--dtype",
        "bfloat16",
        "--draft-window",
        16,
        "--keep-first",
        2,
    )
    status, out, err = run(capsys, "--preset", "tiny", *shape, *files)
    assert status == 0 and not err, "a progress bar in a file"
    headline, heading, *lines = out.splitlines()
    parts = "tiny: 8,784 parameters + eagle draft of 4,672, bfloat16, imposed acceptance"
    assert headline.startswith(f"{parts}; {jax.devices()[0].device_kind}, jax {jax.__version__}")
    assert [line.split()[:3] for line in lines] == [[mode, "2", "64"] for mode in ("plain", "chain", "tree")]
    assert {len(line) for line in lines} == {len(heading)}
    written = recorded.read(tmp_path / "report.jsonl")
    by_metric = {(line.mode, line.metric): line for line in written}
    assert len(by_metric) == len(written) == len({line.id for line in written})
    for line in written:
        assert (line.subject, line.dtype, line.device_count, line.peer) == ("tiny", "bfloat16", 1, None)
        assert line.device == jax.devices()[0].device_kind and line.jax == jax.__version__
        assert line.command is not None and line.command.startswith("jspec bench --preset tiny --depth 2")
        assert abs(datetime.now(UTC) - datetime.fromisoformat(line.date)) < timedelta(hours=1)
    for name in ("copy bandwidth", "gemv bandwidth"):
        line = by_metric[None, name]
        assert len(line.values) == 2 and min(line.values) > 0 and line.unit == "GB/s"
    assert by_metric[None, "parameters of the draft"].values == [4672]
    for mode in ("plain", "chain", "tree"):
        rounds = by_metric[mode, "round"]
        assert rounds.unit == "ms" and len(rounds.values) == 2 and rounds.floor is not None and rounds.floor > 0
        assert (rounds.batch, rounds.context, rounds.settings["rounds"]) == (2, 64, 8)
        assert rounds.settings.get("drafter") == (None if mode == "plain" else "eagle")
        assert ("width" in rounds.settings) == (mode == "tree")
        window = rounds.settings.get("window"), rounds.settings.get("keep_first")
        assert window == ((None, None) if mode == "plain" else (16, 2))
        assert len(by_metric[mode, "first token"].values) == 3
        (accept_length,) = by_metric[mode, "accept length"].values
        assert accept_length == (1 if mode == "plain" else 3)
        speeds = [2e3 * accept_length / value for value in rounds.values]
        assert by_metric[mode, "speed"].values == pytest.approx(speeds)
        split = [line for line in written if line.mode == mode and line.metric in report.PHASES.values()]
        assert [line.metric for line in split] == (
            ["verify", "accept+commit"] if mode == "plain" else list(report.PHASES.values())[:-1]
        )
        assert all(min(line.values) > 0 for line in split)
        assert {(mode, f"compiling {name}") for name in ("prefill", "decode")} <= set(by_metric)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_checkpoints_choose_the_drafter_and_the_split_can_be_left_out(capsys):
    sizes = ("--batch", 1, "--context", 16, "--depth", 2, "--tokens-per-round", 1.5, "--rounds", 4, "--repeats", 1)
    models = ("--checkpoint", "bundled:python-tiny", "--draft", "bundled:python-tiny")
    status, out, _ = run(capsys, *models, "--mode", "chain", "--no-split", *sizes)
    assert status == 0 and out.startswith("bundled:python-tiny: 1.12 M parameters + standalone draft of 1.12 M")
    assert out.splitlines()[-1].split()[5:11] == ["1.25", *5 * "-"]


def test_a_checkpoint_without_a_draft_gets_a_random_head():
    options = BenchOptions(checkpoint="bundled:python-tiny", mode=("tree",))
    subject = subjects.of(options, jspec.load("bundled:python-tiny"))
    drafter = subjects.drafters_of(options, subject)["tree"]
    assert drafter == Eagle(5, 8, 32).bind(subject.target, eagle_head(subject.target))
    made = subject.make()
    assert made.target is subject.params.target or made.target.embed is subject.params.target.embed
    assert made.draft.lm_head.shape == (subject.target.hidden_size, subject.target.vocab_size)


@pytest.mark.parametrize(
    ("before", "option", "exact"), [(True, None, True), (True, False, False), (False, None, False), (False, True, True)]
)
def test_a_checkpoint_is_measured_as_it_is_loaded_and_labeled_so(before, option, exact):
    """On some GPUs `jspec.load` makes it exact."""
    options = BenchOptions(checkpoint="bundled:python-tiny", mode=("plain",), exact=option)
    subject = subjects.of(options, jspec.load("bundled:python-tiny", exact=before))
    assert subject.target.exact is exact
    assert subjects.settings_of(options, subject, ()).get("exact", False) is exact


def test_a_checkpoint_is_loaded_with_its_cache(monkeypatch):
    """A model that was loaded without --kv may be exact."""
    options, values = BenchOptions(checkpoint="bundled:python-tiny", mode=("plain",), kv="fp8", exact=False), {}
    model = jspec.load("bundled:python-tiny", kv="fp8")
    monkeypatch.setattr(bench, "load_model", lambda name, **others: values.update(others) or model)
    subject, _ = bench.prepare(options)
    assert subject.target.kv == values["kv"] == "fp8" and values["exact"] is False


def test_random_weights_in_blocks_have_a_scale_for_128_rows(capsys):
    shape = jax.eval_shape(lambda w: quantize(w, "fp8-blocks"), jnp.zeros((300, 40)))
    made = weights.random_weights(Params(shape), 61).target
    assert (made.group, made.scale.shape, made.narrow.dtype) == (128, (3, 40), jnp.float8_e4m3fn)
    wide = np.asarray(widen(made))
    assert abs(wide.std() / weights.SPREAD - 1) < 0.05
    largest = np.abs(np.asarray(made.narrow, np.float32))
    for first in (0, 128, 256):
        assert (largest[first : first + 128].max(0) == 448).all()
    status, _, err = run(capsys, "--checkpoint", "bundled:python-tiny", "--weights", "fp8-blocks")
    assert status == 2 and "--weights fp8-blocks: requires --preset" in err


@pytest.mark.slow(unless="int8")
@pytest.mark.parametrize("narrow", ("float8_e4m3fn", "int8"))
def test_random_weights_of_8_bits_have_the_spread_of_wide_ones(narrow):
    name = {"float8_e4m3fn": "fp8", "int8": "int8"}[narrow]
    options = BenchOptions(preset="tiny", dtype="float32", weights=name)
    subject = subjects.of(options)
    assert subjects.settings_of(options, subject, ())["weights"] == name
    made = subject.make()
    for head in made.target.lm_head, made.draft.lm_head:
        assert head.narrow.dtype == narrow
        wide = np.asarray(widen(head))
        assert abs(wide.std() / (weights.LOGIT_SPREAD * wide.shape[0] ** -0.5) - 1) < 0.2
    assert made.target.embed.dtype == np.float32
    narrow_bytes, wide = subject.target.forward_bytes(made.target), subject.target.forward_bytes(TINY_SHAPES)
    assert narrow_bytes < 0.35 * wide


@pytest.mark.slow
def test_rows_that_do_not_fit_are_named_and_the_others_run(capsys, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: (400_000, 1_000_000))
    sizes = ("--batch", 1, "--context", 16, 2000, 4096)
    status, out, _ = run(
        capsys, "--preset", "tiny", "--mode", "plain", "--no-split", "--rounds", 2, "--repeats", 1, *sizes
    )
    assert status == 0
    *_, measured, large, long = out.splitlines()
    assert measured.split()[:3] == ["plain", "1", "16"]
    assert large.startswith("plain 1 x 2000: does not fit: needs 0.00 GB of caches and buffers for 1 x 2005 tokens")
    assert long == "plain 1 x 4096: needs 4101 tokens for 2 rounds; the context length is 4096"


@pytest.mark.slow
def test_a_workspace_that_does_not_fit_is_named_before_anything_runs(capsys, monkeypatch):
    free = [(10**9, 10**9)] * 2 + [(60_000, 10**9)] * 9
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: free.pop(0))
    status, out, _ = run(capsys, "--preset", "tiny", "--mode", "plain", "--context", 200, "--rounds", 2, "--repeats", 1)
    assert status == 0 and "GB of workspace of prefill; 0.00 of 1.00 GB are free, and the weights take 0.00 GB" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ("--mode chain --width 4", "--width 4: requires --mode tree, but --mode is chain"),
        ("--mode plain chain --num-nodes 9", "--num-nodes 9: requires --mode tree, but --mode is plain chain"),
        (
            "--mode plain --depth 3",
            "--depth 3: requires --mode chain or tree, but --mode is plain",
        ),
        ("--preset tiny-gemma-4 --draft-window 9", "--draft-window 9: the drafter frozen-kv-mtp has no window"),
        ("--keep-first 2", "--keep-first 2: requires a window"),
        ("--mode plain --draft-window 9", "--draft-window 9: requires --mode chain or tree"),
        ("--mode plain --drafter eagle", "--drafter eagle: requires --mode chain or tree"),
        ("--tokens-per-round 7", "--tokens-per-round 7: must be at most 6 with --depth 5"),
        ("--tokens-per-round 0.5", "--tokens-per-round 0.5: must be from 1, which is the bonus token, to 1000"),
        ("--width 1", "--width 1: a tree must have a width of at least 2"),
        ("--num-nodes 500", "--num-nodes, root included, must be at least depth + 1 = 6"),
        ("--exact --weights fp8", "--exact: no exact forward with --weights fp8 yet; omit one of them"),
        ("--draft x", "--draft x: requires --checkpoint; the weights of a preset are random"),
        ("--json /no/such/file", "--json /no/such/file: the directory /no/such does not exist"),
    ),
)
def test_options_that_do_not_fit_together_are_refused_at_once(capsys, monkeypatch, arguments, message):
    """Before anything is measured."""
    monkeypatch.setattr(machine, "copy_bandwidth", None)
    status, out, err = run(capsys, "--preset", "tiny", *arguments.split())
    assert status == 2 and message in err and not out


def test_a_preset_without_a_smaller_model_names_those_that_have_one(capsys):
    status, _, err = run(capsys, "--preset", "llama-3.2-1b", "--drafter", "standalone")
    assert status == 2
    refused, others = err.split("; those that do: ")
    assert refused.endswith("llama-3.2-1b has no smaller model of its vocabulary")
    assert others.strip().split(", ") == [name for name, preset in PRESETS.items() if preset.standalone]
    status, _, err = run(capsys, "--preset", "gemma-4-31b", "--drafter", "eagle")
    assert status == 2 and "gemma-4-31b has no EAGLE head; those that do: llama-3.1-8b" in err


@pytest.mark.slow
def test_a_report_of_an_assistant(capsys):
    """What the preset has is taken; the extension of a state of one vector is a phase, too."""
    sizes = ("--depth", 2, "--rounds", 4, "--repeats", 1, "--tokens-per-round", 2)
    status, out, _ = run(capsys, "--preset", "tiny-gemma-4", "--dtype", "float32", "--mode", "chain", *sizes)
    assert status == 0
    headline, _, line = out.splitlines()
    assert headline.startswith("tiny-gemma-4: 15,264 parameters + frozen-kv-mtp draft of 4,532, float32")
    assert line.split()[:3] == ["chain", "1", "64"] and line.split()[5] == "2.00" and "-" not in line.split()


@pytest.mark.slow
def test_a_report_of_mtp_heads(capsys):
    """A single head is reused for each token, in chains and trees; phases and floor are those of the head."""
    sizes = ("--depth", 2, "--width", 2, "--num-nodes", 5, "--rounds", 4, "--repeats", 1, "--tokens-per-round", 2)
    choice = ("--drafter", "mtp", "--dtype", "float32", "--mode", "chain", "tree")
    status, out, _ = run(capsys, "--preset", "tiny-deepseek-v3.2", *choice, *sizes)
    assert status == 0
    headline, _, *lines = out.splitlines()
    assert "tiny-deepseek-v3.2: " in headline and " + mtp draft of " in headline
    assert [line.split()[0] for line in lines] == ["chain", "tree"]
    assert all(line.split()[5] == "2.00" and "-" not in line.split() for line in lines)


def test_weights_that_do_not_fit_are_refused(capsys, monkeypatch):
    """Before anything is measured."""
    monkeypatch.setattr(machine, "copy_bandwidth", None)
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: (10**9, 8 * 10**9))
    small = dataclasses.replace(PRESETS["tiny"].target, vocab_size=2**24)
    preset = dataclasses.replace(PRESETS["tiny"], target=small, head=eagle_head(small))
    monkeypatch.setitem(PRESETS, "tiny", preset)
    status, _, err = run(capsys, "--preset", "tiny", "--dtype", "float32")
    assert status == 2 and "tiny: 2.15 GB of weights (float32, int32) do not fit: 1.00 GB of 8.00 GB are free" in err
