"""`jspec bench` at tiny shapes: presets, byte counts, the phases of a round, and the command as a user types it."""

import dataclasses
import functools
import json
import re
from datetime import UTC, datetime, timedelta
from functools import partial

import gemma
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen
import toy
from hlo import loop_body, opcode

import jspec
from jspec import cli
from jspec.analysis import plots
from jspec.bench import machine, measurement, phases, report, weights
from jspec.bench import subject as subjects
from jspec.bench.measure import BenchSetup, CaseResult, from_host, measure
from jspec.bench.options import BenchOptions
from jspec.bench.presets import PRESETS, eagle_head
from jspec.bench.unfolded import Unfolded, seed
from jspec.checkpoints import language_model
from jspec.core import accept, stopping
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.core.prefill import jitted_prefill
from jspec.core.round import step
from jspec.core.types import Params, Prompts
from jspec.drafters import Eagle, FrozenKvMtp, Mtp, Plain, Standalone
from jspec.engine import memory
from jspec.models.moe import Routed
from jspec.models.quantized import quantize, widen
from jspec.models.router import Router
from jspec.models.sizes import count_parameters

RULE = accept.Imposed(2.5)
ROUTED = Routed(Router(count=8, chosen=2), width=8)
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


# Presets and their bytes


@pytest.mark.parametrize(
    ("name", "published"),
    (
        ("llama-3.1-8b", 8.03e9),
        ("llama-3.2-1b", 1.24e9),
        ("qwen3-8b", 8.19e9),
        ("qwen3-0.6b", 0.60e9),
        ("llama-3.3-70b", 70.6e9),
        ("qwen3-32b", 32.8e9),
        ("gemma-4-31b", 30.7e9),
        ("deepseek-v2-lite", 15.7e9),
        ("qwen3-30b-a3b", 30.5e9),
        # 8 billion with the encoders of images and sound, of 150 and 300 million.
        ("gemma-4-e4b", 7.5e9),
        ("qwen3-next", 79.7e9),
        ("qwen3.5-9b", 9.0e9),
        ("deepseek-v3.2", 671e9),
        # 27, 35 and 122 billion with the encoder of images and the MTP head.
        ("qwen3.6-27b", 26.9e9),
        ("qwen3.6-35b-a3b", 34.7e9),
        ("qwen3.5-122b-a10b", 122.1e9),
        ("gpt-oss-20b", 20.9e9),
        ("gpt-oss-120b", 116.8e9),
    ),
)
def test_a_preset_has_the_published_number_of_parameters(name, published):
    shapes = PRESETS[name].target.param_shapes(jnp.bfloat16)
    assert count_parameters(shapes) == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("name", "head", "target", "step", "extend", "kv"),
    (
        ("llama-3.1-8b", 424.7e6, 15.01e9, 0.749e9, 0.849e9, 128 * 1024),
        ("qwen3-8b", 399.5e6, 15.14e9, 0.698e9, 0.799e9, 144 * 1024),
    ),
)
def test_bytes_are_those_of_the_literature(name, head, target, step, extend, kv):
    """Worked out by hand from the published shapes, in bfloat16."""
    preset = PRESETS[name]
    params = _shapes(name)
    assert count_parameters(params.draft) == pytest.approx(head, rel=1e-3)
    assert preset.target.forward_bytes(params.target) == pytest.approx(target, rel=1e-3)
    assert preset.head.step_bytes(params) == pytest.approx(step, rel=1e-3)
    assert preset.head.extend_bytes(params) == pytest.approx(extend, rel=1e-3)
    assert preset.target.kv_bytes(1, 2) == kv
    assert preset.target.kv_bytes(512, 2) == 512 * kv
    plain = weights.round_bytes(params, preset.target, None, depth=0, batch=8, context=512)
    assert plain == preset.target.forward_bytes(params.target) + 8 * 512 * kv
    chain = weights.round_bytes(params, preset.target, preset.head, depth=5, batch=8, context=512)
    assert chain - plain == pytest.approx(extend + 4 * step + 5 * 8 * 512 * 4096, rel=1e-3)
    narrow = weights.round_bytes(params, preset.target, preset.head, depth=5, batch=8, context=512, seen=100)
    assert chain - narrow == 5 * 8 * 412 * 4096


@pytest.mark.parametrize("version", (1, 3))
def test_an_eagle_head_reads_every_weight_of_its_own_once(version):
    """With all optional weights: what a round reads are the weights, without ids, plus the LM head that is shared."""
    head, target = dataclasses.replace(TINY.head, version=version), TINY.target.param_shapes(jnp.float32)
    width, captured, own = 16, 3 * 16, head.param_shapes(jnp.float32)
    bias, norm = (jax.ShapeDtypeStruct((size,), jnp.float32) for size in (width, captured))
    three = {"input_norm": norm, "fc_norms": (bias,) * 3} if version == 3 else {}
    own = dataclasses.replace(own, fc_bias=bias, **three)
    params = Params(target, own)
    shared = memory.tree_bytes(target.lm_head) if version == 1 else 0
    assert head.extend_bytes(params) == memory.tree_bytes(dataclasses.replace(own, ids=None)) + shared
    fused = 0 if version == 1 else memory.tree_bytes((own.fc, own.fc_bias, own.fc_norms, own.input_norm))
    assert head.extend_bytes(params) - head.step_bytes(params) == fused


def test_a_tied_model_reads_its_embedding_as_the_head():
    params, config = _shapes("llama-3.2-1b"), PRESETS["llama-3.2-1b"].target
    assert config.forward_bytes(params.target) == memory.tree_bytes(params.target)
    # A draft that is a language model reads in `extend` what it reads in a step.
    pair = Params(_shapes("llama-3.1-8b").target, params.target)
    assert config.extend_bytes(pair) == config.step_bytes(pair) == memory.tree_bytes(params.target)


def test_bytes_of_an_assistants_round():
    """Worked out by hand, in bfloat16: 31B, and E4B's head of clusters; windows bound what is read of a context."""
    params, preset = _shapes("gemma-4-31b"), PRESETS["gemma-4-31b"]
    assert preset.target.forward_bytes(params.target) == pytest.approx(61.4e9, rel=1e-3)
    windows, full = 50 * 1024 * 2 * 16 * 256 * 2, 10 * 2 * 4 * 512 * 2
    assert preset.target.kv_bytes(32_768, 2) == windows + 32_768 * full
    assert preset.target.kv_bytes(100, 2) == 100 * (windows // 1024 + full)
    # Projections, then queries, outputs and MLPs of three sliding layers and a full one, then the head.
    layers = 3 * 2 * 32 * 256 * 1024 + 2 * 32 * 512 * 1024 + 4 * 3 * 1024 * 8192
    step = 2 * (3 * 5376 * 1024 + layers + 262_144 * 1024)
    assert preset.assistant.step_bytes(params) == pytest.approx(step, rel=1e-4)
    plain = weights.round_bytes(params, preset.target, None, depth=0, batch=2, context=4096)
    chain = weights.round_bytes(params, preset.target, preset.assistant, depth=5, batch=2, context=4096)
    read = 2 * (3 * 1024 * 2 * 16 * 256 * 2 + 4096 * 2 * 4 * 512 * 2)
    assert chain - plain == pytest.approx(5 * step + 5 * read, rel=1e-4), "and nothing for an extension"
    small = PRESETS["gemma-4-e4b"]
    layers = 3 * 2 * 8 * 256 * 256 + 2 * 8 * 512 * 256 + 4 * 3 * 256 * 2048
    step = 2 * (3 * 2560 * 256 + layers + 2048 * 256 + 32 * 128 * 256)
    assert small.assistant.step_bytes(_shapes("gemma-4-e4b")) == pytest.approx(step, rel=1e-3)


def test_bytes_of_recurrent_layers_and_of_the_experts_that_are_read():
    """Worked out by hand, in bfloat16: 80B-A3B has 36 layers with states and 12 with keys."""
    params, preset = _shapes("qwen3-next"), PRESETS["qwen3-next"]
    state = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert preset.target.state_bytes(2) == state
    assert preset.target.kv_bytes(100, 2) == 100 * 12 * 2 * 2 * 256 * 2
    expert = 48 * 3 * 2048 * 512 * 2
    plain = weights.round_bytes(params, preset.target, None, depth=0, batch=1, context=100)
    every = preset.target.forward_bytes(params.target, 10_000)
    assert plain == pytest.approx(every - 502 * expert + 100 * 24_576 + 2 * state, rel=1e-6)
    two = weights.round_bytes(params, preset.target, None, depth=0, batch=2, context=100)
    # The second token chooses 100 / 512 experts that the first one has chosen, too.
    assert two - plain == pytest.approx((10 - 100 / 512) * expert + 100 * 24_576 + 2 * state, rel=1e-6)


def test_bytes_of_experts_are_those_that_are_chosen():
    """Worked out by hand, in bfloat16: 6 of the 64 experts of each of 26 layers for a token, all of them for many."""
    config = PRESETS["deepseek-v2-lite"].target
    params = config.param_shapes(jnp.bfloat16)
    expert, routers = 2 * 3 * 2048 * 1408, 26 * 4 * 2048 * 64
    attention = 2048 * (16 * 192 + 576) + 16 * (128 + 128) * 512 + 16 * 128 * 2048
    shared = 26 * 2 * expert + 2 * 3 * 2048 * 10_944 + 2 * 27 * attention + 2 * 2048 * 102_400 + routers
    assert config.forward_bytes(params) == pytest.approx(shared + 26 * 6 * expert, rel=1e-3)
    two = 64 * (1 - (1 - 6 / 64) ** 2)
    assert config.forward_bytes(params, 2) == pytest.approx(shared + 26 * two * expert, rel=1e-3)
    everything = memory.tree_bytes(params) - memory.tree_bytes(params.embed)
    assert config.forward_bytes(params, 1000) == everything
    assert config.kv_bytes(100, 2) == 100 * 27 * 576 * 2
    draft = PRESETS["deepseek-v2-lite"].standalone
    pair = Params(params, draft.param_shapes(jnp.bfloat16))
    plain = weights.round_bytes(pair, config, None, depth=0, batch=1, context=0)
    assert plain == config.forward_bytes(params)
    chain = weights.round_bytes(pair, config, draft, depth=3, batch=2, context=0)
    drafting = 3 * draft.forward_bytes(pair.draft)
    assert chain == config.forward_bytes(params, 8) + drafting
    grown = weights.round_bytes(pair, config, draft, depth=3, batch=2, context=0, nodes=12)
    assert grown == config.forward_bytes(params, 24) + drafting


def test_the_floor_of_a_tree_is_that_of_all_its_nodes():
    preset = PRESETS["tiny-deepseek"]
    params = Params(*(config.param_shapes(jnp.float32) for config in (preset.target, preset.standalone)))
    setup = BenchSetup(preset.target, params, tokens_per_round=2, rounds=4, repeats=1, page_size=8)
    drafter = Standalone(depth=2, width=2, num_nodes=6).bind(preset.target, preset.standalone)
    row = measure(setup, "tree", drafter, 3, preset.target.max_length, lambda _: None)
    sizes = {"depth": 2, "batch": 3, "context": preset.target.max_length, "nodes": 6}
    assert row.problem is not None and "the context length is" in row.problem
    assert row.floor_bytes == weights.round_bytes(params, preset.target, preset.standalone, **sizes)


def test_shapes_of_deepseek_and_of_experts_are_those_of_their_checkpoints(tmp_path):
    for config in (PRESETS["tiny-deepseek"].target, dataclasses.replace(TINY.target, qk_norm=True, experts=ROUTED)):
        shapes = config.param_shapes(jnp.float32)
        language_model.save(tmp_path, config, weights.random_weights(shapes, 128), dtype="float32")
        loaded = language_model.load(tmp_path, dtype="float32")
        assert loaded.config == config
        assert jax.tree.map(lambda x: (x.shape, x.dtype), loaded.params) == jax.tree.map(
            lambda x: (x.shape, x.dtype), shapes
        )


def _shapes(name):
    """Shapes of the weights of a target and its first draft."""
    preset = PRESETS[name]
    return Params(*(each.param_shapes(jnp.bfloat16) for each in (preset.target, preset.head or preset.assistant)))


@pytest.mark.parametrize("name", PRESETS)
def test_the_drafts_of_a_preset_suit_its_target(name):
    preset = PRESETS[name]
    drafts = {Eagle: preset.head, Standalone: preset.standalone, FrozenKvMtp: preset.assistant, Mtp: preset.mtp}
    assert any(drafts.values())
    for drafter, draft in drafts.items():
        assert draft is None or drafter(depth=5, width=8).bind(preset.target, draft)
    count = preset.target.num_layers
    assert preset.head is None or name.startswith("tiny") or preset.head.capture_layers == (2, count // 2, count - 3)


def test_shapes_are_those_that_the_model_runs_with():
    for kind in gemma.KINDS:
        shapes = gemma.KINDS[kind].param_shapes(jnp.float32)
        assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, gemma.params(kind))
    for kind, config in qwen.KINDS.items():
        shapes = config.param_shapes(jnp.float32)
        assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, qwen.params(kind))
    own = toy.random_assistant(toy.ASSISTANT)
    for config, made in ((toy.ASSISTANT, own), (toy.CLUSTERED, toy.in_clusters(toy.CLUSTERED, own))):
        shapes = config.param_shapes(jnp.float32)
        assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, made)


def test_random_weights_are_what_the_shapes_say_and_keep_what_is_there():
    target, head = PRESETS["tiny"].target, PRESETS["tiny"].head
    shapes = Params(target.param_shapes(jnp.bfloat16), head.param_shapes(jnp.bfloat16))
    made = weights.random_weights(shapes, target.vocab_size)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    assert np.std(np.asarray(made.target.layers[1].gate_up, np.float32)) == pytest.approx(weights.SPREAD, rel=0.1)
    assert not np.array_equal(made.target.layers[0].qkv, made.target.layers[1].qkv)
    np.testing.assert_array_equal(made.draft.ids, 2 * np.arange(64))
    kept = weights.random_weights(Params(made.target, shapes.draft), target.vocab_size)
    assert all(a is b for a, b in zip(jax.tree.leaves(kept.target), jax.tree.leaves(made.target), strict=True))


# Imposed acceptance in the loop


@pytest.mark.slow(unless="chain")
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
    assert status == 0 and "3/3" in err, "a progress bar"
    headline, heading, *lines = out.splitlines()
    parts = "tiny: 8,784 parameters + eagle draft of 4,672, bfloat16, imposed acceptance"
    assert headline.startswith(f"{parts}; {jax.devices()[0].device_kind}, jax {jax.__version__}")
    assert [line.split()[:3] for line in lines] == [[mode, "2", "64"] for mode in ("plain", "chain", "tree")]
    assert {len(line) for line in lines} == {len(heading)}
    written = measurement.read(tmp_path / "report.jsonl")
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
            "--depth 3: requires --mode chain or tree or stepped or unfolded, but --mode is plain",
        ),
        ("--preset tiny-gemma-4 --draft-window 9", "--draft-window 9: the drafter frozen-kv-mtp has no window"),
        ("--keep-first 2", "--keep-first 2: requires a window"),
        ("--mode plain --draft-window 9", "--draft-window 9: requires --mode chain or tree or stepped or unfolded"),
        ("--mode plain --drafter eagle", "--drafter eagle: requires --mode chain or tree or stepped or unfolded"),
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
def test_an_unfolded_seed_changes_no_token():
    """Nor how many each round appends."""
    drafter = toy.bound_drafters()["frozen_kv_mtp"]
    both = toy.assistant_params()
    expected = toy.run(drafter, both, toy.start(drafter, both))
    unfolded = Unfolded(drafter)
    run = partial(decode, both, method=Method(toy.TARGET, unfolded, accept.greedy))
    s = from_host(lambda s, until: run(s, until), partial(seed, both, drafter=unfolded), toy.start(unfolded, both), 12)
    assert toy.generated(s) == toy.generated(expected)
    toy.assert_same(s.stats, expected.stats)
    with pytest.raises(ValueError, match="must be a bound chain that is not sampled"):
        Unfolded(FrozenKvMtp())


@pytest.mark.slow
def test_rounds_that_the_host_calls(capsys):
    sizes = ("--depth", 2, "--rounds", 4, "--repeats", 1, "--tokens-per-round", 2)
    status, out, _ = run(capsys, "--preset", "tiny-gemma-4", "--mode", "stepped", "unfolded", *sizes)
    assert status == 0
    lines = [line.split() for line in out.splitlines()[2:]]
    assert [line[0] for line in lines] == ["stepped", "unfolded"]
    assert all(line[5] == "2.00" and line[6:11] == ["-"] * 5 for line in lines), "no split"
    status, _, err = run(capsys, "--preset", "tiny", "--mode", "unfolded")
    assert status == 2 and "--mode unfolded: requires the drafter frozen-kv-mtp, not eagle" in err


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


def test_bytes_of_an_mtp_head_and_of_indexed_attention():
    """Worked out by hand, in bfloat16: a head has one of the 61 layers; of a long context 2,048 rows are read."""
    preset = PRESETS["deepseek-v3.2"]
    shapes = Params(preset.target.param_shapes(jnp.bfloat16), preset.mtp.param_shapes(jnp.bfloat16))
    expert, index = 2 * 3 * 7168 * 2048, 61 * 2 * 128
    layer = memory.tree_bytes(shapes.draft[0].layer) - (256 - 8) * expert
    other = 2 * (2 * 7168 * 7168 + 3 * 7168 + 7168 * 129_280)
    assert preset.mtp.step_bytes(shapes) == pytest.approx(layer + other, rel=1e-6)
    assert preset.mtp.extend_bytes(shapes) == preset.mtp.step_bytes(shapes)
    assert preset.target.kv_bytes(1000, 2) == 1000 * (index + 61 * 2 * 576)
    assert preset.target.kv_bytes(100_000, 2) == 100_000 * index + 61 * 2 * 2048 * 576
    assert preset.mtp.kv_bytes(100_000, 2, preset.target) == (100_000 * index + 61 * 2 * 2048 * 576) // 61


def test_weights_that_do_not_fit_are_refused(capsys, monkeypatch):
    """Before anything is measured."""
    monkeypatch.setattr(machine, "copy_bandwidth", None)
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: (10**9, 8 * 10**9))
    small = dataclasses.replace(PRESETS["tiny"].target, vocab_size=2**24)
    preset = dataclasses.replace(PRESETS["tiny"], target=small, head=eagle_head(small))
    monkeypatch.setitem(PRESETS, "tiny", preset)
    status, _, err = run(capsys, "--preset", "tiny", "--dtype", "float32")
    assert status == 2 and "tiny: 2.15 GB of weights (float32, int32) do not fit: 1.00 GB of 8.00 GB are free" in err


# Tables, lines and plots of results made by hand


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
