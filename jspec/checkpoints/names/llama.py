"""The tensors of Llama and Qwen3, as all libraries hold them: their axes."""

from collections.abc import Mapping

from jspec.checkpoints.names.leaves import Layout
from jspec.models.llama import Llama

_AXES = {
    "model.embed_tokens.weight": "VE>V,E",
    "model.norm.weight": "E>E",
    "lm_head.weight": "EV>V,E",
    **dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), "E>E"),
    "self_attn.q_proj.weight": "EHD>HD,E",
    **dict.fromkeys(("self_attn.k_proj.weight", "self_attn.v_proj.weight"), "EKD>KD,E"),
    "self_attn.o_proj.weight": "HDE>E,HD",
    **dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), "D>D"),
    **dict.fromkeys(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "EF>F,E"),
    "mlp.down_proj.weight": "FE>E,F",
    "mlp.gate.weight": "EX>X,E",
    "mlp.experts.gate_up_proj": "XEI>X,I,E",
    "mlp.experts.down_proj": "XIE>X,E,I",
}


def layout(path: str, names: Mapping[str, str]) -> Layout:
    """The layout of a library. path: of a layer. names: Hugging Face name -> paths of leaves."""
    return Layout(path, {name: (paths, _AXES[name]) for name, paths in names.items()}, _sizes)


def _sizes(config: Llama, index: int) -> dict[str, int]:
    routed = config.layer_experts(index)
    return {
        **{"V": config.vocab_size, "E": config.hidden_size, "F": config.intermediate_size},
        **{"H": config.num_heads, "K": config.num_kv_heads, "D": config.head_dim},
        **({} if routed is None else {"X": routed.router.count, "I": routed.width}),
    }
