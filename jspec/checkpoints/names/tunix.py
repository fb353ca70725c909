"""Weights as Tunix holds them (`tunix.models`: llama3, qwen3, gemma4): states of modules of flax.nnx.

Queries, keys and values of Llama and Qwen3 are [in, heads, head], those of Gemma 4 [heads, in, head].
"""

from jspec.checkpoints.names import gemma, llama
from jspec.checkpoints.names.leaves import Layout, Library
from jspec.models.gemma4 import Gemma4
from jspec.models.llama import Llama

_LLAMA = {
    "model.embed_tokens.weight": "embedder.input_embedding",
    "model.norm.weight": "final_norm.w",
    "lm_head.weight": "lm_head.w",
    **{f"{name}.weight": f"{name}.w" for name in ("input_layernorm", "post_attention_layernorm")},
    **{f"self_attn.{name}.weight": f"attn.{name}.w" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{f"self_attn.{name}.weight": f"attn.{name}.w" for name in ("q_norm", "k_norm")},
    **{f"mlp.{name}_proj.weight": f"mlp.{name}_proj.kernel" for name in ("gate", "up", "down")},
    "mlp.gate.weight": "mlp.router.kernel",
    "mlp.experts.gate_up_proj": "mlp.gate_proj mlp.up_proj",
    "mlp.experts.down_proj": "mlp.down_proj",
}
_GEMMA = {
    "mlp.gate_proj.weight": ("mlp.gate_proj.kernel", "EF>F,E"),
    "mlp.up_proj.weight": ("mlp.up_proj.kernel", "EF>F,E"),
    "mlp.down_proj.weight": ("mlp.down_proj.kernel", "FE>E,F"),
    **gemma.experts("moe."),
    **gemma.norms(
        pre_feedforward_layernorm_2="moe_pre_ffw_norm",
        post_feedforward_layernorm_2="moe_post_ffw_norm",
        post_feedforward_layernorm_1="dense_post_ffw_norm",
    ),
}


def _gemma(config: Gemma4) -> Layout:
    return gemma.layout("layers.{}.", gemma.SINGLE | _GEMMA, "per_layer_input_embedding", "_")


LIBRARY = Library(roots=(), layouts={Llama: lambda config: llama.layout("layers.{}.", _LLAMA), Gemma4: _gemma})
