"""Model families: a frozen configuration with a pure forward, and the pytree of its weights."""

from jspec.models.llama import Llama, LlamaParams

__all__ = ["Llama", "LlamaParams"]
