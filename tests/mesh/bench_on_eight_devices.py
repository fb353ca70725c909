"""`jspec bench --tensor` and `--data`: what each device has, its bytes, and the command as a user types it.

test_mesh.py runs these tests in a process with eight CPU devices.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import cli
from jspec.bench import machine, presets
from jspec.bench import subject as subjects
from jspec.bench.measure import BenchSetup, case_bytes
from jspec.bench.options import BenchOptions
from jspec.core.types import Params
from jspec.drafters import Plain
from jspec.loading import memory
from jspec.models.quantized import widen
from jspec.models.sizes import tree_bytes


def run(capsys, *arguments):
    status = cli.main(["bench", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def subject_of(**options):
    return subjects.of(BenchOptions(**options))


def held(params):
    """Bytes of the arrays of the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ("bfloat16", "int4"))
def test_random_weights_are_those_of_one_device_and_each_device_has_its_share(monkeypatch, weights):
    preset = presets.PRESETS["tiny"]
    wide = dataclasses.replace(preset.target, hidden_size=64, num_kv_heads=2, head_dim=128, intermediate_size=256)
    head = presets.eagle_head(wide, draft_vocab_size=32)
    monkeypatch.setitem(presets.PRESETS, "tiny", dataclasses.replace(preset, target=wide, head=head))
    options = {"preset": "tiny", "dtype": "bfloat16", "weights": None if weights == "bfloat16" else weights}
    one, two = subject_of(**options), subject_of(**options, tensor=2)
    assert (two.target.tensor, str(two.placement)) == (2, "2 devices")
    made = two.make()
    for x, y in zip(jax.tree.leaves(widen(made)), jax.tree.leaves(widen(one.make())), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
    layer = made.target.layers[0]
    for matrix, axis in ((layer.qkv, -1), (layer.o, -2), (layer.gate_up, -1), (layer.down, -2)):
        part = getattr(matrix, "narrow", matrix)
        shares = {shard.data.shape[axis] for shard in part.addressable_shards}
        assert shares == {part.shape[axis] // 2} and len(part.sharding.device_set) == 2
    assert held(made) == tree_bytes(two.placement.local(two.params))
    assert held(made.target) < 0.52 * tree_bytes(made.target) and held(made.draft) == tree_bytes(made.draft)


def test_a_draft_is_split_as_by_load(monkeypatch):
    """A small head is faster whole; assistants and MTP heads are split wherever the target is."""
    small = subject_of(preset="tiny", tensor=2)
    assert (small.draft.tensor, small.placement.draft) == (1, False)
    monkeypatch.setattr("jspec.checkpoints.plan.SUM_SECONDS", 0.0)
    head = subject_of(preset="tiny", tensor=2)
    assert (head.draft.tensor, head.placement.draft) == (2, True)
    with pytest.raises(ValueError, match="tensor=2: must divide"):
        subject_of(preset="tiny-qwen3-next", drafter="mtp", tensor=2)
    for name, drafter in (("tiny-gemma-4", "frozen-kv-mtp"), ("tiny-deepseek-v3.2", "mtp")):
        made = subject_of(preset=name, drafter=drafter, tensor=2)
        assert (made.draft.tensor, made.placement.draft) == (2, True)


def test_the_floor_is_that_of_one_device():
    """Weights and caches of the shapes of published models, which are not made."""
    for name in ("llama-3.3-70b", "qwen3-30b-a3b", "qwen3.6-27b"):
        preset = presets.PRESETS[name]
        floors = {}
        for devices in (1, 2, 4):
            target = preset.target.split(devices) if devices > 1 else preset.target
            placement = subjects.make_placement(devices, None, jax.devices())
            params = Params(target.param_shapes(jnp.bfloat16))
            setup = BenchSetup(target, params, 1.0, 1, 1, 16, placement=placement)
            floors[devices] = case_bytes(setup, Plain(), 8, 4096)
        for devices in (2, 4):
            assert 1 <= floors[devices] * devices / floors[1] < 1.02


def test_the_floor_of_a_group_is_that_of_its_sequences():
    target = presets.PRESETS["tiny"].target
    params = Params(target.param_shapes(jnp.float32))
    setups = [
        BenchSetup(target, params, 1.0, 1, 1, 16, placement=subjects.make_placement(None, None, jax.devices(), data))
        for data in (1, 4)
    ]
    assert case_bytes(setups[0], Plain(), 2, 64) == case_bytes(setups[1], Plain(), 8, 64)


def test_heads_of_keys_that_several_devices_copy_count_for_each():
    target = presets.PRESETS["qwen3-30b-a3b"].target
    assert target.num_kv_heads == 4
    rows = [target.split(devices).kv_bytes(100, 2) for devices in (2, 4, 8)]
    assert rows[0] == 2 * rows[1] and rows[1] == rows[2] == target.kv_bytes(100, 2) // 4


def test_weights_that_do_not_fit_on_a_device_are_refused_before_they_are_made(capsys, monkeypatch):
    free = 20_000_000_000
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: (4 * free, 4 * free))  # Four devices share it.
    monkeypatch.setattr(subjects.Subject, "make", None)
    status, out, err = run(capsys, "--preset", "llama-3.3-70b", "--dtype", "bfloat16", "--mode", "plain", "--tensor", 4)
    assert status == 2 and not out
    assert "llama-3.3-70b: 35.28 GB of weights (bfloat16) on each of 4 devices do not fit: 20.00 GB of" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ("--preset tiny --tensor 16", "--tensor 16: must be at most 8, the number of devices that JAX has"),
        ("--preset tiny --tensor 3", "--tensor 3: must divide 2 heads and 32 columns of the MLP of this model"),
        ("--preset tiny --tensor 2 --exact --kv fp8", "--exact: no exact forward with --kv fp8 yet"),
        ("--preset tiny --tensor 2 --weights int4", "--tensor 2: o has 16 rows with 128 packed together"),
        ("--preset tiny --data 2 --batch 4 3", "--batch 3: must be a multiple of --data 2"),
        ("--preset tiny --data 3 --tensor 4 --batch 3", "--data 3, --tensor 4: their product must be at most 8"),
    ),
)
def test_what_cannot_be_split_is_refused(capsys, arguments, message):
    status, out, err = run(capsys, *arguments.split())
    assert status == 2 and message in err and not out


@pytest.mark.slow
@pytest.mark.parametrize("axis", ("tensor", "data"))
def test_a_report_over_two_devices(capsys, tmp_path, monkeypatch, axis):
    monkeypatch.setattr(machine, "COPY_BYTES", {"cpu": 2**16})
    sizes = ("--context", 16, "--depth", 2, "--tokens-per-round", 2, "--rounds", 4, "--repeats", 1)
    out = tmp_path / "lines.jsonl"
    status, text, _ = run(
        capsys, "--preset", "tiny", f"--{axis}", 2, "--batch", 2, "--mode", "plain", "chain", *sizes, "--json", out
    )
    assert status == 0 and "; 2 x cpu, jax " in text.splitlines()[0]
    rows = [line.split() for line in text.splitlines()[2:]]
    assert [row[0] for row in rows] == ["plain", "chain"] and all(row[6:11] == ["-"] * 5 for row in rows)
    assert [float(row[5]) for row in rows] == [1.0, 2.0]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["device_count"] for line in lines} == {2}
    assert all(line["settings"][axis] == 2 for line in lines if line["metric"] == "round")


@pytest.mark.slow
def test_a_group_has_the_caches_of_its_own_sequences(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "COPY_BYTES", {"cpu": 2**16})
    sizes = ("--mode", "plain", "--context", 16, "--rounds", 4, "--repeats", 1)
    bytes_of = []
    for over in (("--batch", 2), ("--batch", 6, "--data", 3)):
        out = tmp_path / f"{len(bytes_of)}.jsonl"
        assert run(capsys, "--preset", "tiny", *over, *sizes, "--json", out)[0] == 0
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        bytes_of += [line["median"] for line in lines if line["metric"] == "caches and buffers"]
    assert len(bytes_of) == 2 and bytes_of[0] == bytes_of[1] > 0
