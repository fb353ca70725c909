"""Adapters of the library peft on tiny random models, for tests. A module that imports this one needs peft."""

import warnings

import hf
import optional
from lora_files import ATTENTION, MLP

torch, peft = optional.lazy("torch", "peft")


def adapt(model, directory, *, seed=1, **options):
    """A model of `transformers` with a random adapter, which is written to a directory. options: of LoraConfig."""
    options = {"r": 4, "lora_alpha": 6, "target_modules": list(ATTENTION + MLP), "task_type": "CAUSAL_LM", **options}
    with warnings.catch_warnings(action="ignore"):
        adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                noise = torch.randn(weight.shape, generator=generator) * 0.3
                weight.copy_(weight * (1 + noise) if "magnitude" in name or weight.ndim == 1 else noise)
    with warnings.catch_warnings(action="ignore"):
        adapted.save_pretrained(directory)
    return adapted.eval()


def pair(family, directory, *, seed=1, changes=(), **options):
    """The base's directory, the adapter's, and the oracle. changes: of the family's configuration."""
    model = hf.build(family, **dict(changes))
    base = hf.save(model, directory / "base")
    return base, directory / "adapter", adapt(model, directory / "adapter", seed=seed, **options)
