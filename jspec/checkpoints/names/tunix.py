"""Weights as Tunix holds them (`tunix.models`: llama3, qwen3, gemma4): states of modules of flax.nnx.

Queries, keys and values of Llama and Qwen3 are [in, heads, head], those of Gemma 4 [heads, in, head].
"""

from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.names.gemma import read_attention, read_embedder, read_per_layer
from jspec.checkpoints.names.leaves import Leaves, Library, Named, heads_in, heads_out, join_experts, rows
from jspec.models.gemma4 import Gemma4
from jspec.models.llama import Llama

_GEMMA_NORMS = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_EXPERT_NORMS = {
    "moe_pre_ffw_norm": "pre_feedforward_layernorm_2",
    "moe_post_ffw_norm": "post_feedforward_layernorm_2",
    "dense_post_ffw_norm": "post_feedforward_layernorm_1",
}


def _read_llama(config: Llama, leaves: Leaves) -> Named:
    if config.attention_bias:
        raise CheckpointError("params: the configuration has attention_bias, and modules of Tunix have no biases")
    # Embeddings, final norm and LM head.
    width, vocabulary, dim = config.hidden_size, config.vocab_size, config.head_dim
    named = {
        "model.embed_tokens.weight": leaves.take("embedder.input_embedding", vocabulary, width),
        "model.norm.weight": leaves.take("final_norm.w", width),
    }
    if not config.tie_embeddings:
        named["lm_head.weight"] = rows(leaves.take("lm_head.w", width, vocabulary))
    # Layers: projections, norms, MLP.
    for index in range(config.num_layers):
        path, prefix = f"layers.{index}.", f"model.layers.{index}."
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
            kernel = leaves.take(f"{path}attn.{name}_proj.w", width, heads, dim)
            named[f"{prefix}self_attn.{name}_proj.weight"] = heads_out(kernel)
        out = leaves.take(f"{path}attn.o_proj.w", config.num_heads, dim, width)
        named[f"{prefix}self_attn.o_proj.weight"] = heads_in(out)
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            named[f"{prefix}self_attn.{name}.weight"] = leaves.take(f"{path}attn.{name}.w", dim)
        for name in ("input_layernorm", "post_attention_layernorm"):
            named[f"{prefix}{name}.weight"] = leaves.take(f"{path}{name}.w", width)
        named |= _read_mlp(config, leaves, index, path, prefix)
    return named


def _read_mlp(config: Llama, leaves: Leaves, index: int, path: str, prefix: str) -> Named:
    width, routed = config.hidden_size, config.layer_experts(index)
    if routed is None:
        return read_mlp(leaves, path, prefix, width, config.intermediate_size)
    count, inner = routed.router.count, routed.width
    gate, up = (leaves.take(f"{path}mlp.{name}_proj", count, width, inner) for name in ("gate", "up"))
    return {
        f"{prefix}mlp.gate.weight": rows(leaves.take(f"{path}mlp.router.kernel", width, count)),
        f"{prefix}mlp.experts.gate_up_proj": join_experts(gate, up),
        f"{prefix}mlp.experts.down_proj": leaves.take(f"{path}mlp.down_proj", count, inner, width).swapaxes(1, 2),
    }


def read_mlp(leaves: Leaves, path: str, prefix: str, width: int, inner: int) -> Named:
    """A gated MLP of three kernels."""
    shapes = {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    return {
        f"{prefix}mlp.{name}_proj.weight": rows(leaves.take(f"{path}mlp.{name}_proj.kernel", *shape))
        for name, shape in shapes.items()
    }


def _read_gemma(config: Gemma4, leaves: Leaves) -> Named:
    width, named = config.hidden_size, read_embedder(config, leaves, "per_layer_input_embedding")
    for index in range(config.num_layers):
        path, prefix = f"layers.{index}.", f"model.layers.{index}."
        named |= read_attention(config, leaves, index, path, prefix, ("_query_norm", "_key_norm"))
        named |= read_mlp(leaves, path, prefix, width, config.mlp_width(index))
        norms = _GEMMA_NORMS | (_GEMMA_EXPERT_NORMS if config.experts else {})
        for name, theirs in norms.items():
            named[f"{prefix}{theirs}.weight"] = leaves.take(f"{path}{name}.scale", width)
        named |= read_per_layer(config, leaves, path, prefix)
        # The experts.
        if config.experts is not None:
            count, inner = config.experts.router.count, config.experts.width
            gates = leaves.take(f"{path}moe.gating_einsum", count, 2, inner, width)
            named |= {
                f"{prefix}router.proj.weight": rows(leaves.take(f"{path}moe.router_logits", width, count)),
                f"{prefix}router.scale": leaves.take(f"{path}moe.router_scale", width),
                f"{prefix}router.per_expert_scale": leaves.take(f"{path}moe.per_expert_scale", count),
                f"{prefix}experts.gate_up_proj": gates.reshape(count, 2 * inner, width),
                f"{prefix}experts.down_proj": leaves.take(f"{path}moe.linear", count, inner, width).swapaxes(1, 2),
            }
    return named


LIBRARY = Library(roots=(), readers={Llama: _read_llama, Gemma4: _read_gemma})
