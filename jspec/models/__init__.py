"""Targets and drafts: each a frozen configuration with a pure forward, and the pytree of its weights."""

from jspec.models.assistant import Assistant, AssistantParams
from jspec.models.block_head import BlockHead, BlockParams
from jspec.models.decoder import Decoder, ModelParams
from jspec.models.deepseek import Deepseek
from jspec.models.draft import Draft
from jspec.models.eagle_head import EagleHead, EagleParams
from jspec.models.gemma3 import Gemma3
from jspec.models.gemma4 import Gemma4, Gemma4Params
from jspec.models.gpt_oss import GptOss
from jspec.models.latent_head import LatentHead
from jspec.models.llama import Llama
from jspec.models.llama_variant import LlamaVariant
from jspec.models.mtp_head import MtpHead, MtpHeads, MtpParams
from jspec.models.qwen3_next import Qwen3Next

__all__ = [
    "Assistant",
    "AssistantParams",
    "BlockHead",
    "BlockParams",
    "Decoder",
    "Deepseek",
    "Draft",
    "EagleHead",
    "EagleParams",
    "Gemma3",
    "Gemma4",
    "Gemma4Params",
    "GptOss",
    "LatentHead",
    "Llama",
    "LlamaVariant",
    "ModelParams",
    "MtpHead",
    "MtpHeads",
    "MtpParams",
    "Qwen3Next",
]
