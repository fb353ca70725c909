"""`benchmarks/kernel_times.py`: the time of an operation alone, and the bytes that it reads."""

import dataclasses

import jax
import jax.numpy as jnp
import kernel_times
import numpy as np
import pytest
import recorded

from jspec.bench import machine
from jspec.bench.presets import PRESETS


@pytest.fixture
def one_gb_per_second(monkeypatch):
    """In place of a copy, which takes longer than all else."""
    monkeypatch.setattr(machine, "copy_bandwidth", lambda repeats: machine.Bandwidth(10**9, [1.0]))


def run_kernels(capsys, *arguments):
    status = kernel_times.main([*arguments, "--batch", "2", "--nodes", "3", "--repeats", "1"])
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    ("preset", "row_bytes"), [("tiny", 2 * 8 * 4), ("tiny-qwen3-next", 2 * 8 * 4), ("tiny-deepseek", 24 * 4)]
)
def test_attention_alone_reads_the_rows_of_the_prefix(preset, row_bytes, one_gb_per_second, monkeypatch, tmp_path):
    works = []
    monkeypatch.setattr(
        kernel_times, "measure", lambda work, *_: works.append(work) or [("default", [1e-6]), ("2x3", "no room")]
    )
    shape = ["--batch", "2", "--nodes", "3", "--context", "100", "--page-size", "16", "--dtype", "float32"]
    file = tmp_path / "kernels.jsonl"
    assert kernel_times.main(["attention", "--preset", preset, *shape, "--json", str(file)]) == 0
    (work,) = works
    copy, default, tile = recorded.read(file)
    assert copy.metric == "copy bandwidth" and copy.values == [1.0]
    assert (default.mode, default.unit, default.values, default.batch, default.context) == (
        "kernel",
        "us",
        [1.0],
        2,
        100,
    )
    assert {"preset": preset, "nodes": 3, "page_size": 16}.items() <= default.settings.items()
    assert (tile.settings["tile"], tile.values, tile.note) == ("2x3", [], "no room")
    assert work.bytes == 2 * 100 * row_bytes
    assert len(work.calls) == len(work.static) == kernel_times.CALLS
    layers = {static["layer"] for static in work.static}
    assert layers == set(range(work.shared[3].shape[0]))


def test_experts_alone_read_those_that_were_chosen(capsys, one_gb_per_second):
    status, out, _ = run_kernels(capsys, "experts", "--preset", "tiny-deepseek", "--dtype", "float32")
    assert status == 0
    heading, columns, *rows = out.splitlines()
    assert heading.startswith("tiny-deepseek, batch 2, float32; ")
    assert columns.split()[:3] == ["kernel", "nodes", "tile"]
    assert [row.split("  ")[0] for row in rows if " default " in row] == ["grouped_matmul, gated", "grouped_matmul"]
    gated, other = kernel_times.experts(PRESETS["tiny-deepseek"].target, 6, jnp.float32)
    chosen = [int((call["sizes"] > 0).sum()) for call in gated.calls]
    assert gated.bytes == pytest.approx(np.mean(chosen) * 16 * 16 * 4)
    assert other.bytes == gated.bytes / 2


@pytest.mark.slow
@pytest.mark.parametrize("preset, names", [("tiny", ["qkv", "o", "gate and up", "down", "LM head"])])
def test_exact_kernels_are_timed_beside_the_others(preset, names, capsys, one_gb_per_second, tmp_path):
    file = tmp_path / "kernels.jsonl"
    status, out, _ = run_kernels(capsys, "exact-products", "--preset", preset, "--json", str(file))
    assert status == 0 and [line.split("  ")[0] for line in out.splitlines() if " default " in line] == [
        f"exact_matmul, {name}" for name in names
    ]
    _, *lines = recorded.read(file)
    assert [line.mode for line in lines] == ["kernel", "inexact"] * len(names)
    for work in kernel_times.exact_products(PRESETS[preset].target, 3, jnp.float32):
        for call, static in zip(work.calls[:1], work.static, strict=False):
            exact = work.operation.run("xla", *work.shared, **call, **static)
            other = work.peer[1](*work.shared, **call, **static)
            np.testing.assert_allclose(exact, other, rtol=1e-4, atol=1e-4)
    status, out, _ = run_kernels(capsys, "exact-attention", "--preset", preset, "--context", "70")
    assert status == 0 and "exact_attention" in out and "inexact" in out
    status, out, _ = run_kernels(capsys, "gated-products", "--preset", preset)
    assert status == 0 and [line.split()[:3] for line in out.splitlines()[2:]] == [["gated_matmul", "3", "default"]]
    assert [kernel_times.gated_products(PRESETS[preset].target, count, jnp.float32).many for count in (32, 33)] == [
        0,
        1,
    ]
    status, _, err = run_kernels(capsys, "gated-products", "--preset", "qwen3-30b-a3b")
    assert status == 2 and "its last layer has experts; gated-products requires a dense one" in err
    status, _, err = run_kernels(capsys, "exact-products", "--preset", "tiny-deepseek")
    assert status == 2 and "exact-products requires a model of the Llama shape" in err
    status, _, err = run_kernels(capsys, "exact-products", "--preset", preset, "--context", "70")
    assert status == 2 and "--context 70: products do not read the cache" in err


def test_kernels_alone_refuse_what_does_not_fit(capsys, monkeypatch):
    fields = "block_m, block_k, splits, num_warps, num_stages"
    for platform, arguments, message in (
        ("gpu", ["experts", "--preset", "tiny"], "--preset tiny has no experts; must be one of qwen3-next"),
        (
            "gpu",
            ["experts", "--preset", "tiny-deepseek", "--page-size", "16"],
            "--page-size 16: experts do not read the cache",
        ),
        (
            "gpu",
            ["attention", "--preset", "tiny", "--tile", "16x16"],
            f"--tile 16x16: must be integers joined by x: {fields}",
        ),
        ("gpu", ["attention", "--preset", "tiny", "--tile", "1x2x3x4xa"], "--tile 1x2x3x4xa: must be integers"),
        (
            "gpu",
            ["attention", "--preset", "tiny-deepseek", "--tile", "16x16"],
            f"must be integers joined by x: splits; or {fields}",
        ),
        ("cpu", ["attention", "--preset", "tiny", "--tile", "16x16x1x4x2"], "requires a GPU, but this device is a"),
    ):
        monkeypatch.setattr(kernel_times.platform, "platform", lambda platform=platform: platform)
        status, _, err = run_kernels(capsys, *arguments)
        assert status == 2 and message in err


@pytest.mark.slow
def test_a_kernel_alone_runs_in_each_way(monkeypatch):
    """With a GPU's tiles, which the interpreter runs here, and a tile that does not fit."""
    work = kernel_times.attention(PRESETS["tiny-deepseek"].target, 1, 2, 16, 16, jnp.float32)
    work = dataclasses.replace(work, calls=work.calls[:1], static=work.static[:1])
    triton = work.operation.module("triton")
    config = triton.Config

    def fails(*args, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory\nmore")

    found = dict(kernel_times.measure(work, [config(16, 16, 1, 4, 2)], 1))
    assert list(found)[:2] == ["default", "16x16x1x4x2"]
    assert all(min(seconds) > 0 for way, seconds in found.items() if way != "mosaic_gpu")
    # As on a GPU, where the operation has two kernels.
    monkeypatch.setattr(kernel_times, "_kernels", lambda operation, name: ["mosaic_gpu", "triton"])
    found = dict(kernel_times.measure(work, [], 1))
    assert list(found) == ["default", "mosaic_gpu", "triton", "XLA"] and min(found["triton"]) > 0
    assert "latent rows of 16 + 8: must have" in found["mosaic_gpu"]
    monkeypatch.setattr(triton, "mla_attention", fails)
    assert (
        dict(kernel_times.measure(work, [config(32, 16, 1, 4, 2)], 1))["32x16x1x4x2"]
        == "RESOURCE_EXHAUSTED: Shared memory"
    )
