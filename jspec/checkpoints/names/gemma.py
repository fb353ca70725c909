"""Weights as the `gemma` library holds them (`gemma.gm.nn.gemma4`): variables of modules of flax.linen.

Queries, keys and values are [heads, in, head]. With experts, `mlp` is the experts and `mlp2` the MLP in parallel.
"""

from jspec.checkpoints.names.leaves import Leaves, Library, Named, heads_first, heads_in, rows
from jspec.models.gemma4 import Gemma4

_NORMS = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_WITH_EXPERTS = _NORMS | {
    "pre_ffw_norm": "pre_feedforward_layernorm_2",
    "post_ffw1_norm": "post_feedforward_layernorm_2",
    "pre_ffw2_norm": "pre_feedforward_layernorm",
    "post_ffw2_norm": "post_feedforward_layernorm_1",
}


def read_embedder(config: Gemma4, leaves: Leaves, per_layer: str) -> Named:
    """The embedding, the inputs of layers, and the last norm.

    per_layer: name of the table of inputs of layers.
    """
    width, size, layers = config.hidden_size, config.per_layer_size, config.num_layers
    named = {
        "model.embed_tokens.weight": leaves.take("embedder.input_embedding", config.vocab_size, width),
        "model.norm.weight": leaves.take("final_norm.scale", width),
    }
    # Embeddings per layer.
    if size:
        table = leaves.take(f"embedder.{per_layer}", config.vocab_size, layers, size)
        projection = leaves.take("embedder.per_layer_model_projection.w", width, layers, size)
        named |= {
            "model.embed_tokens_per_layer.weight": table.reshape(config.vocab_size, -1),
            "model.per_layer_model_projection.weight": projection.reshape(width, -1).T,
            "model.per_layer_projection_norm.weight": leaves.take("embedder.per_layer_projection_norm.scale", size),
        }
    return named


def read_attention(config: Gemma4, leaves: Leaves, index: int, path: str, prefix: str, norms: tuple[str, str]) -> Named:
    """The attention of a layer. norms: names of those of queries and of keys.

    A layer that reads the keys of another has its own all the same, which nothing uses.
    """
    # Queries and output.
    kind, width = config.attention[index], config.hidden_size
    kv, dim, attention = kind.kv_heads, kind.head_dim, f"{prefix}self_attn."
    named = {
        f"{attention}q_proj.weight": heads_first(leaves.take(f"{path}attn.q_einsum.w", config.num_heads, width, dim)),
        f"{attention}o_proj.weight": heads_in(
            leaves.take(f"{path}attn.attn_vec_einsum.w", config.num_heads, dim, width)
        ),
        f"{attention}q_norm.weight": leaves.take(f"{path}attn.{norms[0]}.scale", dim),
    }
    # With shared keys and values there are no more.
    if config.kv_source_layer(index) != index:
        leaves.leave(*(f"{path}attn.{name}." for name in ("k_einsum", "kv_einsum", norms[1])))
        return named
    # Keys and values, in one array or as one.
    named[f"{attention}k_norm.weight"] = leaves.take(f"{path}attn.{norms[1]}.scale", dim)
    if kind.values_are_keys:
        named[f"{attention}k_proj.weight"] = heads_first(leaves.take(f"{path}attn.k_einsum.w", kv, width, dim))
        return named
    both = leaves.take(f"{path}attn.kv_einsum.w", 2, kv, width, dim)
    return named | {f"{attention}{name}_proj.weight": heads_first(both[i]) for i, name in enumerate("kv")}


def read_per_layer(config: Gemma4, leaves: Leaves, path: str, prefix: str) -> Named:
    """The factor on the output of a layer, and what it makes of its own input."""
    width, size = config.hidden_size, config.per_layer_size
    named = {f"{prefix}layer_scalar": leaves.take(f"{path}skip_scale", 1)}
    if size:
        named |= {
            f"{prefix}per_layer_input_gate.weight": rows(leaves.take(f"{path}per_layer_input_gate.w", width, size)),
            f"{prefix}per_layer_projection.weight": rows(leaves.take(f"{path}per_layer_projection.w", size, width)),
            f"{prefix}post_per_layer_input_norm.weight": leaves.take(f"{path}post_per_layer_input_norm.scale", width),
        }
    return named


def _read(config: Gemma4, leaves: Leaves) -> Named:
    width, named = config.hidden_size, read_embedder(config, leaves, "per_layer_embeddings")
    for index in range(config.num_layers):
        path, prefix = f"layer_{index}.", f"model.layers.{index}."
        named |= read_attention(config, leaves, index, path, prefix, ("query_norm", "key_norm"))
        named |= _read_mlp(config, leaves, index, path, prefix)
        norms = _NORMS if config.experts is None else _NORMS_WITH_EXPERTS
        for name, theirs in norms.items():
            named[f"{prefix}{theirs}.weight"] = leaves.take(f"{path}{name}.scale", width)
        named |= read_per_layer(config, leaves, path, prefix)
    return named


def _read_mlp(config: Gemma4, leaves: Leaves, index: int, path: str, prefix: str) -> Named:
    # The dense MLP; beside experts it is the second one.
    width, inner = config.hidden_size, config.mlp_width(index)
    mlp = f"{path}mlp." if config.experts is None else f"{path}mlp2."
    gates = leaves.take(_spelled(leaves, f"{mlp}gating_einsum"), 2, inner, width)
    named = {
        f"{prefix}mlp.gate_proj.weight": gates[0],
        f"{prefix}mlp.up_proj.weight": gates[1],
        f"{prefix}mlp.down_proj.weight": rows(leaves.take(_spelled(leaves, f"{mlp}linear"), inner, width)),
    }
    if config.experts is None:
        return named
    # The experts and their router.
    count, inner, moe = config.experts.router.count, config.experts.width, f"{path}mlp."
    gates = leaves.take(_spelled(leaves, f"{moe}gating_einsum"), count, 2, inner, width)
    down = leaves.take(_spelled(leaves, f"{moe}linear"), count, inner, width)
    return named | {
        f"{prefix}router.proj.weight": rows(leaves.take(_spelled(leaves, f"{moe}router_logits"), width, count)),
        f"{prefix}router.scale": leaves.take(f"{moe}router_scale", width),
        f"{prefix}router.per_expert_scale": leaves.take(f"{moe}per_expert_scale", count),
        f"{prefix}experts.gate_up_proj": gates.reshape(count, 2 * inner, width),
        f"{prefix}experts.down_proj": down.swapaxes(1, 2),
    }


def _spelled(leaves: Leaves, path: str) -> str:
    """A path as modules have it, or with the `w` that checkpoints append."""
    return f"{path}.w" if leaves.has(f"{path}.w") else path


LIBRARY = Library(roots=("params", "transformer"), readers={Gemma4: _read})
