"""`benchmarks/compile_for.py`, and what TPU compilers make of loops of every family: nothing here runs on a TPU.

The tests that compile need libtpu (the extra `tpu`). `tests/helpers/small_loops.py` compiles all cases.
"""

import importlib.util
import itertools
import json
from pathlib import Path

import compile_for
import compiled
import jax
import pytest
import recorded
import small_loops
import tpu

from jspec.bench import machine
from jspec.bench.measure import CaseResult
from jspec.bench.presets import PRESETS
from jspec.drafters import DRAFTERS
from jspec.models import layers

TEXT = """HloModule jit_decode

%fused (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %copied = f32[2]{0} copy(%p)
}

%inner_body (t: f32[2]) -> f32[2] {
  ROOT %add.1 = f32[2]{0} add(%t, %t), backend_config={"estimated_cycles":"5"}
}

%body (t: f32[2]) -> f32[2] {
  %t = f32[2]{0} parameter(0)
  %fusion.1 = f32[2]{0} fusion(%t), calls=%fused, backend_config={"estimated_cycles":"100"}
  %kernel.1 = f32[2]{0} custom-call(%fusion.1), custom_call_target="tpu_custom_call"
  ROOT %while.2 = f32[2]{0} while(%kernel.1), condition=%inner, body=%inner_body
}

%unused (t: f32[2]) -> f32[2] {
  ROOT %add.2 = f32[2]{0} add(%t, %t), backend_config={"estimated_cycles":"7"}
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %copy.1 = f32[2]{0} copy(%a), backend_config={"estimated_cycles":"1000"}
  ROOT %while.1 = f32[2]{0} while(%copy.1), condition=%cond, body=%body
}
"""


def run(capsys, *arguments):
    status = compile_for.main(["--preset", "tiny", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_only_what_is_in_the_loop_counts():
    assert compiled.round_cycles(TEXT) == 105
    lines = compiled.loop_lines(TEXT)
    assert sum("tpu_custom_call" in line for line in lines) == 1 and any("%copied" in line for line in lines)
    assert compiled.loop_lines(TEXT.replace("body=%body", "")) == []


def test_without_libtpu_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    tpu.devices.cache_clear()
    status, out, err = run(capsys, "--chip", "v5p")
    assert (status, out) == (2, "")
    reason = "requires libtpu, which compiles for TPUs"
    assert err == f'jspec: --chip v5p: {reason}: pip install "jspec-decoding[tpu]"\n'


CHIP = tpu.Chip("", gb_per_second=1000, memory=2**34, hertz=1e9)


def report_of(*results):
    here = machine.Environment(
        "2026-01-02T03:04:05+00:00", None, None, "1", None, "kind (compiled, not run)", 1, "", None
    )
    settings = {"drafter": "eagle", "depth": 5, "width": 8, "num_nodes": 32, "tokens_per_round": 3.0, "libtpu": "2"}
    parameters = {"target": 10, "draft": 0}
    shared = {"model": "m", "dtype": "bfloat16", "command": None, "environment": here, "settings": settings}
    return compile_for.CompileReport(**shared, parameters=parameters, chip=CHIP, results=list(results))


def case_of(kernels=33, problem=None):
    case = CaseResult("chain", 2, 512, floor_bytes=8 * 10**9, capacity=600, problem=problem)
    if problem:
        return compiled.CompiledCase(case)
    case.compile_seconds = {"prefill": 1.0, "decode": 2.5}
    memory = {"prefill": compiled.Memory(5 * 10**9, 2 * 10**9), "decode": compiled.Memory(6 * 10**9, 10**9)}
    fields = dict(cycles=9 * 10**6, modeled=0.0085, accessed=1e10, operations=3e12, kernels=kernels)
    return compiled.CompiledCase(case, memory, 5_900_000_000, **fields, kernel_bytes=10**9)


def test_kernels_take_the_time_of_the_roofline_for_keys_and_values():
    assert case_of().roofline(CHIP) == pytest.approx(0.008)
    assert case_of().estimate(CHIP) == pytest.approx(0.010)
    assert case_of(kernels=0).estimate(CHIP) == pytest.approx(0.009)


def test_everything_written_is_marked_as_not_run():
    out = report_of(case_of(), case_of(problem="does not compile: no memory"))
    head, _, row, problem = compile_for.table(out).splitlines()
    assert head.endswith("; kind (compiled, not run), jax 1, libtpu 2; roofline at 1000 GB/s")
    assert row.split() == "chain 2 512 10.000 8.000 1.25 8.500 10.00 3000.0 33 6.00 2.00 3.5".split()
    assert problem == "chain 2 x 512: does not compile: no memory"
    lines = compile_for.lines(out)
    assert all(line.note.startswith("compiled, not run") and "(compiled, not run)" in line.device for line in lines)
    assert all(line.id.startswith("kind-compiled-not-run/m/chain/b2/c512/") for line in lines)
    values = {line.metric: (line.median, line.floor, line.expected) for line in lines[:-1]}
    assert values["estimated round"] == (pytest.approx(10), pytest.approx(8), None)
    assert values["round in the cost model"][0] == 8.5
    assert values["arguments of decode"] == (6e9, None, 5_900_000_000)
    assert values["temporary memory of prefill"][0] == 2e9
    assert (lines[-1].values, lines[-1].note) == ([], "compiled, not run: does not compile: no memory")
    assert "width" not in lines[0].settings and lines[0].settings["libtpu"] == "2"


@pytest.mark.parametrize(("name", "size", "rows"), (("tpu", 4096, 2), ("gpu", 4096, 1), ("gpu", 8, 2), ("cpu", 8, 1)))
def test_a_single_row_is_multiplied_as_two_where_a_sum_over_columns_is_slow(name, size, rows, monkeypatch):
    monkeypatch.setattr(layers, "platform", lambda: name)
    row, matrix = jax.ShapeDtypeStruct((1, 1, size), "float32"), jax.ShapeDtypeStruct((size, size), "float32")
    program = str(jax.make_jaxpr(lambda x, w: layers.linear(x, w))(row, matrix))
    assert (f"f32[2,{size}]" in program) == (rows == 2), program


def test_every_family_and_drafter_has_cases():
    names = [str(case) for case in small_loops.CASES]
    assert len(set(names)) == len(names)
    assert {f"{name}-plain" for name in small_loops.TARGETS if name != "llama-8-heads"} <= set(names)
    families = {type(target) for target in small_loops.TARGETS.values()}
    assert families == {type(preset.target) for preset in PRESETS.values()}
    assert {case.drafter for case in small_loops.CASES} == {"", *small_loops._KINDS} >= DRAFTERS.keys() - {"plain"}


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
DEVICES = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite", "v5p": "TPU v5"}
"""The names of the chips in JAX."""


def test_what_is_recorded_is_a_case_that_fails_where_it_is_known_to():
    """`benchmarks/tpu.md` is rendered from these lines, and `KNOWN` names what does not hold in them."""
    cases = {}
    for case, chip in itertools.product(small_loops.CASES, tpu.CHIPS):
        mode = f"{case.drafter} {case.shape}".strip()
        place = f"{DEVICES[chip]} (compiled, not run)", case.devices, f"small {case.target}", mode
        cases[place] = case, chip
    checked = []
    for path in RESULTS.glob("*-small-loops-for-*.jsonl"):
        for line in recorded.read(path):
            case, chip = cases[line.device, line.device_count, line.subject, line.mode]
            if line.metric != small_loops.CHECKS or line.superseded_by is not None:
                continue
            known = small_loops.known(case, chip)
            assert line.values == [len(known)], line
            assert all(f"{check}: " in line.note and message in line.note for check, message in known.items()), line
            checked.append((case, chip))
    assert checked and len(set(checked)) == len(checked)


PAIRS = [
    ("llama-eagle-chain", "v6e"),
    ("llama-64-eagle-chain", "v5e"),
    ("llama-adaptive-chain", "v5p"),
    ("llama-suffix-tree", "v6e"),
    ("llama-8-heads-eagle-chain-over-4", "v5e"),
    ("gpt-oss-suffix-chain", "v5p"),
    ("gemma4-frozen-kv-mtp-chain", "v5e"),
    ("deepseek-mtp-chain", "v6e"),
    ("qwen3-next-mtp-chain", "v5p"),
]
"""One of each family, on one chip and over four, that takes little time; the tree has a prefill."""


@pytest.mark.slow(unless="llama-eagle-chain")
@pytest.mark.parametrize(("name", "chip"), PAIRS, ids=lambda part: part)
def test_a_loop_compiles_and_keeps_its_promises(name, chip, needs):
    """In place, donated, without sorts or transfers, in the memory that arithmetic gives; or as `KNOWN` has it."""
    needs("libtpu")
    case = small_loops.case_of(name)
    found, known = small_loops.compile_for(case, chip).problems, small_loops.known(case, chip)
    assert found.keys() == known.keys(), found
    assert all(message in found[check] for check, message in known.items()), found


@pytest.mark.slow
def test_a_preset_is_compiled_and_reported(capsys, tmp_path, needs):
    needs("libtpu")
    path = tmp_path / "out.jsonl"
    status, out, _ = run(capsys, "--chip", "v6e", "--mode", "plain", "--json", str(path))
    assert status == 0 and out.startswith("tiny: 8,784 parameters") and "TPU v6 lite (compiled, not run)" in out
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    values = {line["metric"]: line["median"] for line in lines}
    assert values["estimated round"] > 0 and values["operations of a call of one round"] > 0
    assert values["arguments of decode"] > 0 and {line["dtype"] for line in lines} == {"bfloat16"}
