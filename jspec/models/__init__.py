"""Model families: a frozen configuration with a pure forward, and the pytree of its weights."""

from jspec.models.eagle_head import EagleHead, EagleParams
from jspec.models.llama import Llama, LlamaParams

__all__ = ["EagleHead", "EagleParams", "Llama", "LlamaParams"]
