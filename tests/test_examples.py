"""The scripts of `examples/` are short and run on bundled models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import chat_files
import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


def run(name, *arguments, **environment):
    """What the script prints."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_has_its_own_command(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (120 if path.stem.startswith("grpo") else 80)
    assert f"python examples/{path.name}" in text.split('"""')[1]


@pytest.mark.slow
def test_serve(needs):
    for package in ("msgspec", "starlette", "uvicorn"):
        needs(package)
    pytest.importorskip("openai")
    printed = run("serve.py", "--model", "bundled:python-tiny", "--max-tokens", 12)
    assert printed.startswith("def fibonacci(n):\n") and "\n12 tokens" in printed


@pytest.mark.slow
def test_evaluate_file(tmp_path):
    lines = [{"prompt": "import numpy as", "answer": "np"}, {"prompt": "import os\n", "answer": "no such text"}]
    lines.append({"prompt": "class A:\n", "id": 3})
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    printed = run(
        "evaluate_file.py", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--max-new-tokens", 8, "--context", 64
    )
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [result | line for result, line in zip(results, lines, strict=True)] == results
    assert "np" in results[0]["text"] and "accuracy 50.0% of 2" in printed and "accept length" in printed


@pytest.mark.slow
def test_rl_loop(needs):
    for package in ("flax", "optax"):
        needs(package)
    steps = [line for line in run("rl_loop.py", "--steps", 12).splitlines() if line.startswith("step")]
    rewards = [float(line.split("reward ")[1].split(",")[0]) for line in steps]
    assert len(rewards) == 12 and rewards[-1] > rewards[0] + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("rank", (0, 4))
def test_grpo(tmp_path, needs, rank):
    """Its three engines generate the same rollouts, whose tokens and log-probabilities it compares."""
    for package in ("flax", "optax", "matplotlib"):
        needs(package)
    sizes = ("--steps", 2, "--samples", 2, "--new-tokens", 16, "--lora", rank)
    first, second = run("grpo.py", *sizes, "--picture", tmp_path / "out.png").splitlines()
    assert "none 1.00" in first and "none 1.00" in second
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_grpo_tunix():
    """Every step of the trainer reaches the engine."""
    pytest.importorskip("tunix", reason="needs tunix: pip install google-tunix")
    printed = run("grpo_tunix.py", "--steps", 3, "--samples", 2, "--new-tokens", 16)
    assert [line.partition(":")[0] for line in printed.splitlines()[-3:]] == [f"policy {i}" for i in range(3)]


@pytest.mark.slow
def test_train_a_draft(tmp_path, needs):
    for package in ("flax", "optax"):
        needs(package)
    chat_files.write_model(tmp_path / "target", max_length=512, hidden_size=16, intermediate_size=16, num_layers=8)
    small = ["--prompts", 80, "--max-new-tokens", 24, "--width", 480, "--draft-vocab", 200, "--heldout", 4]
    arguments = ["--model", tmp_path / "target", "--out", tmp_path / "draft", *small]
    printed = run("train_a_draft.py", *arguments, "--minutes", 0.1, "--batch-tokens", 512)
    assert (tmp_path / "draft" / "model.safetensors").is_file()
    assert printed.count("\n$ jspec ") == 3 and "accept length" in printed.rpartition("\n$ jspec ")[2]


@pytest.mark.slow
def test_new_drafter():
    lengths = [float(line.rpartition(" ")[2]) for line in run("new_drafter.py").splitlines()]
    assert len(lengths) == 3 and lengths[2] > max(lengths[:2])


@pytest.mark.slow
def test_two_gpus():
    devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    printed = run("two_gpus.py", "--max-new-tokens", 16, **devices).splitlines()
    assert [line.rpartition(" tokens/s, ")[2] for line in printed] == ["4 of 4 equal"] * 3
