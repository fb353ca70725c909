"""The real models, each loaded once, and their oracles."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import real_models

import jspec


@dataclasses.dataclass(frozen=True)
class RealModel:
    """A file with what it is compared with.

    prompts: texts, or the first turns of chats.
    noise: how far logits in float32 may be apart. They reach 40. Those of `transformers` are up to 1.1e-4 (SmolLM2) and
      4e-5 (Gemma) from its own in float64, ours 2.4e-4 and 9e-5; other processors sum in other orders.
    """

    path: Path
    prompts: tuple[str, ...]
    noise: float

    @functools.cached_property
    def model(self) -> jspec.Model:
        return jspec.load(self.path, dtype="float32")

    @functools.cached_property
    def oracle(self) -> Any:
        """The model as `transformers` reads the file."""
        import torch
        import transformers

        options = {"gguf_file": self.path.name, "dtype": torch.float32}
        return transformers.AutoModelForCausalLM.from_pretrained(self.path.parent, **options).eval()

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer as `transformers` reads the file."""
        import transformers

        return transformers.AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)

    @functools.cached_property
    def ids(self) -> list[list[int]]:
        """The prompts, encoded; as chats if the model has a template."""
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        if not tokenizer.templates:
            return [tokenizer.encode(prompt) for prompt in self.prompts]
        return [tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in self.prompts]


PROMPTS = {
    "smollm2": (
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (
            "What is the capital of France?",
            "Write a Python function that adds two numbers, and call it three times.",
            "Name 12 animals, one per line.",
            "Repeat this sentence four times: The quick brown fox jumps over the lazy dog.",
        ),
        3e-4,
    ),
    "gemma3": (
        "gemma-3-270m-q4_k_m.gguf",
        (
            "The capital of France is",
            "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
            "Monday, Tuesday, Wednesday,",
            "The quick brown fox jumps over the lazy dog. " * 3,
        ),
        1.5e-4,
    ),
}
"""Name -> file, prompts and noise. SmolLM2 is a chat model, Gemma's file a base model without a template."""


@pytest.fixture(scope="module", params=PROMPTS)
def real(request) -> RealModel:
    return find(request.param)


@functools.cache
def find(name: str) -> RealModel:
    file, *others = PROMPTS[name]
    path, missing = real_models.find(file)
    if path is None:
        pytest.skip(missing)
    return RealModel(path, *others)


@pytest.fixture(scope="module")
def chat_model() -> RealModel:
    return find("smollm2")


@pytest.fixture(scope="module")
def windowed() -> RealModel:
    return find("gemma3")
