"""Targets and drafts: each a frozen configuration with a pure forward, and the pytree of its weights."""

from jspec.models.assistant import Assistant, AssistantParams
from jspec.models.block_head import BlockHead, BlockParams
from jspec.models.decoder import Decoder
from jspec.models.deepseek import Deepseek, DeepseekParams
from jspec.models.draft import Draft, WindowedDraft
from jspec.models.eagle_head import EagleHead, EagleParams
from jspec.models.gemma3 import Gemma3
from jspec.models.gemma4 import Gemma4, Gemma4Params
from jspec.models.gpt_oss import GptOss, GptOssParams
from jspec.models.llama import Llama, LlamaParams
from jspec.models.llama_variant import LlamaVariant
from jspec.models.mtp_head import MtpHead, MtpHeads, MtpParams
from jspec.models.qwen3_next import Qwen3Next, Qwen3NextParams

__all__ = [
    "Assistant",
    "AssistantParams",
    "BlockHead",
    "BlockParams",
    "Decoder",
    "Deepseek",
    "DeepseekParams",
    "Draft",
    "EagleHead",
    "EagleParams",
    "Gemma3",
    "Gemma4",
    "Gemma4Params",
    "GptOss",
    "GptOssParams",
    "Llama",
    "LlamaParams",
    "LlamaVariant",
    "MtpHead",
    "MtpHeads",
    "MtpParams",
    "Qwen3Next",
    "Qwen3NextParams",
    "WindowedDraft",
]
