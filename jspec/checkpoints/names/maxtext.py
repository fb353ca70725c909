"""Weights as MaxText holds them: variables of modules of flax.linen, with layers stacked on axis 1 or apart.

Of Llama, pairs of dimensions that rotate together are neighbors, and queries contain the factor head_dim**-0.5 of
attention. Of Qwen3, both are as in Hugging Face models. A padded vocabulary is cut.
"""

import re
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jspec.checkpoints.names import llama
from jspec.checkpoints.names.leaves import Leaves, Library
from jspec.models.llama import Llama

_QUERY, _KEY = "self_attention.query.kernel", "self_attention.key.kernel"
_EMBEDDING, _HEAD = "token_embedder.embedding", "decoder.logits_dense.kernel"
_PATHS = {
    "model.embed_tokens.weight": _EMBEDDING,
    "model.norm.weight": "decoder.decoder_norm.scale",
    "lm_head.weight": _HEAD,
    "input_layernorm.weight": "pre_self_attention_layer_norm.scale",
    "post_attention_layernorm.weight": "post_self_attention_layer_norm.scale",
    "self_attn.q_proj.weight": _QUERY,
    "self_attn.k_proj.weight": _KEY,
    "self_attn.v_proj.weight": "self_attention.value.kernel",
    "self_attn.o_proj.weight": "self_attention.out.kernel",
    "self_attn.q_norm.weight": "self_attention.query_norm.scale",
    "self_attn.k_norm.weight": "self_attention.key_norm.scale",
    "mlp.gate_proj.weight": "mlp.wi_0.kernel",
    "mlp.up_proj.weight": "mlp.wi_1.kernel",
    "mlp.down_proj.weight": "mlp.wo.kernel",
    "mlp.gate.weight": "moe_block.gate.kernel",
    "mlp.experts.gate_up_proj": "moe_block.wi_0 moe_block.wi_1",
    "mlp.experts.down_proj": "moe_block.wo",
}
_LAYER = "decoder.layers_{}."


class _Leaves(Leaves):
    def take(self, path: str, *shape: int, **options: Any) -> Array:
        """As in `Leaves`, from a stack of layers or not, with queries and keys as in Hugging Face models."""
        match = re.match(_LAYER.format(r"(\d+)"), path)
        name = path[match.end() :] if match else path
        stacked = f"decoder.layers.{name}"
        if match and stacked in self.arrays:
            array = super().take(stacked, shape[0], self.config.num_layers, *shape[1:])[:, int(match[1])]
        else:
            array = super().take(path, *shape, pad={_EMBEDDING: 0, _HEAD: 1}.get(name))
        if self.config.qk_norm or name not in (_QUERY, _KEY):
            return array
        if name == _QUERY:
            array = array.astype(jnp.float32) * self.config.head_dim**0.5
        # The first dimensions of all pairs, then the second ones.
        return jnp.concatenate([array[..., ::2], array[..., 1::2]], axis=-1)


LIBRARY = Library(("params",), {Llama: lambda config: llama.layout(_LAYER, _PATHS)}, _Leaves)
