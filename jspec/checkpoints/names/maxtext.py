"""Weights as MaxText holds them: variables of modules of flax.linen, with layers stacked on axis 1 or apart.

Of Llama, pairs of dimensions that rotate together are neighbors, and queries contain the factor head_dim**-0.5 of
attention. Of Qwen3, both are as in Hugging Face models. A padded vocabulary is cut.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.names.leaves import Leaves, Library, Named, heads_in, heads_out, join_experts, rows
from jspec.models.llama import Llama

_STACKED = "decoder.layers."


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The leaves of one layer of `count`."""

    leaves: Leaves
    index: int
    count: int

    def take(self, name: str, *shape: int) -> Array:
        """A leaf of this layer."""
        stacked = _STACKED + name
        if self.leaves.has(stacked):
            return self.leaves.take(stacked, shape[0], self.count, *shape[1:])[:, self.index]
        return self.leaves.take(f"decoder.layers_{self.index}.{name}", *shape)


def _read(config: Llama, leaves: Leaves) -> Named:
    if config.attention_bias:
        raise CheckpointError("params: the configuration has attention_bias, which is not supported here")
    # Embeddings, final norm and LM head.
    width, vocabulary = config.hidden_size, config.vocab_size
    named = {
        "model.embed_tokens.weight": leaves.take("token_embedder.embedding", vocabulary, width, pad=0),
        "model.norm.weight": leaves.take("decoder.decoder_norm.scale", width),
    }
    if not config.tie_embeddings:
        named["lm_head.weight"] = rows(leaves.take("decoder.logits_dense.kernel", width, vocabulary, pad=1))
    # Layers.
    for index in range(config.num_layers):
        layer, prefix = _Layer(leaves, index, config.num_layers), f"model.layers.{index}."
        named |= _read_attention(config, layer, f"{prefix}self_attn.") | _read_mlp(config, layer, f"{prefix}mlp.")
        for name, theirs in (("pre", "input_layernorm"), ("post", "post_attention_layernorm")):
            named[f"{prefix}{theirs}.weight"] = layer.take(f"{name}_self_attention_layer_norm.scale", width)
    return named


def _read_attention(config: Llama, layer: _Layer, prefix: str) -> Named:
    width, heads, kv, dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    query, key, value = (
        layer.take(f"self_attention.{name}.kernel", width, count, dim)
        for name, count in (("query", heads), ("key", kv), ("value", kv))
    )
    # Without norms the stored queries have the scale of attention, and pairs are interleaved.
    if not config.qk_norm:
        query, key = _apart(query.astype(jnp.float32) * dim**0.5), _apart(key)
    named = {f"{prefix}{n}_proj.weight": heads_out(x) for n, x in (("q", query), ("k", key), ("v", value))}
    named[f"{prefix}o_proj.weight"] = heads_in(layer.take("self_attention.out.kernel", heads, dim, width))
    for name, theirs in (("query", "q_norm"), ("key", "k_norm")) if config.qk_norm else ():
        named[f"{prefix}{theirs}.weight"] = layer.take(f"self_attention.{name}_norm.scale", dim)
    return named


def _apart(x: Array) -> Array:
    """The first dimensions of all pairs, then the second ones."""
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def _read_mlp(config: Llama, layer: _Layer, prefix: str) -> Named:
    width, routed = config.hidden_size, config.layer_experts(layer.index)
    # A dense MLP, then experts.
    if routed is None:
        inner = config.intermediate_size
        shapes = {"wi_0": ("gate", width, inner), "wi_1": ("up", width, inner), "wo": ("down", inner, width)}
        return {
            f"{prefix}{theirs}_proj.weight": rows(layer.take(f"mlp.{name}.kernel", *shape))
            for name, (theirs, *shape) in shapes.items()
        }
    count, inner = routed.router.count, routed.width
    gate, up = (layer.take(f"moe_block.{name}", count, width, inner) for name in ("wi_0", "wi_1"))
    return {
        f"{prefix}gate.weight": rows(layer.take("moe_block.gate.kernel", width, count)),
        f"{prefix}experts.gate_up_proj": join_experts(gate, up),
        f"{prefix}experts.down_proj": layer.take("moe_block.wo", count, inner, width).swapaxes(1, 2),
    }


LIBRARY = Library(roots=("params",), readers={Llama: _read})
