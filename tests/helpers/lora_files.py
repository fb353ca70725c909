"""Directories of LoRA adapters, as the library peft writes them, without it."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def write(base: Path, directory: Path, *, seed: int = 1, targets=ATTENTION + MLP, r: int = 3, **config) -> Path:
    """A random adapter for the matrices of a checkpoint whose modules have one of these names."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if weight.ndim == 2 and module.endswith(tuple(targets)):
            out, width = weight.shape
            tensors[f"{PREFIX}{module}.lora_A.weight"] = rng.normal(size=(r, width)).astype(np.float32)
            tensors[f"{PREFIX}{module}.lora_B.weight"] = rng.normal(size=(out, r)).astype(np.float32) * 0.03
    directory.mkdir(parents=True)
    options = {"peft_type": "LORA", "r": r, "lora_alpha": 2 * r, "target_modules": list(targets), **config}
    (directory / CONFIG).write_text(json.dumps(options))
    save_file(tensors, directory / WEIGHTS)
    return directory


def merge(base: Path, adapter: Path, directory: Path, scale: float = 2.0) -> Path:
    """The checkpoint with the adapter in its weights, by NumPy."""
    weights, factors = load_file(base / "model.safetensors"), load_file(adapter / WEIGHTS)
    for name in factors:
        if ".lora_A." in name:
            matrix = name.removeprefix(PREFIX).replace(".lora_A", "")
            weights[matrix] = weights[matrix] + scale * factors[name.replace("lora_A", "lora_B")] @ factors[name]
    directory.mkdir(parents=True)
    for file in base.glob("*.json"):
        (directory / file.name).write_bytes(file.read_bytes())
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def edit(adapter: Path, **values) -> None:
    """Change keys of an adapter's configuration."""
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_tensors(adapter: Path, change) -> None:
    """Pass the tensors of an adapter, by name, through a function that changes them in place."""
    tensors = load_file(adapter / WEIGHTS)
    change(tensors)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, adapter / WEIGHTS)
