"""Model families: a frozen configuration with a pure forward, and the pytree of its weights."""

from jspec.models.assistant import Assistant, AssistantParams
from jspec.models.deepseek import Deepseek, DeepseekParams
from jspec.models.eagle_head import EagleHead, EagleParams
from jspec.models.gemma4 import Gemma4, Gemma4Params
from jspec.models.llama import Llama, LlamaParams
from jspec.models.mtp_head import MtpHead, MtpHeads, MtpParams
from jspec.models.qwen3_next import Qwen3Next, Qwen3NextParams

LanguageModel = Llama | Gemma4 | Deepseek | Qwen3Next
"""The families of targets, and of small models that draft for them."""

__all__ = [
    "Assistant",
    "AssistantParams",
    "Deepseek",
    "DeepseekParams",
    "EagleHead",
    "EagleParams",
    "Gemma4",
    "Gemma4Params",
    "LanguageModel",
    "Llama",
    "LlamaParams",
    "MtpHead",
    "MtpHeads",
    "MtpParams",
    "Qwen3Next",
    "Qwen3NextParams",
]
