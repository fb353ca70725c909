"""The layout of weights in the `gemma` library (`gemma.gm.nn.gemma4`): variables of modules of flax.linen.

Axes are those of `leaves.Table`. With experts, `mlp` is the experts and `mlp2` the MLP in parallel.
"""

from collections.abc import Iterator
from typing import Any

from jaxtyping import Array

from jspec.checkpoints.names.leaves import Layout, Leaves, Library, Table
from jspec.models.gemma4 import Gemma4


def norms(**names: str) -> dict[str, tuple[str, str]]:
    """Rows of a table, for norms. names: tensor -> module."""
    return {f"{name}.weight": (f"{path}.scale", "E>E") for name, path in names.items()}


def experts(path: str) -> dict[str, tuple[str, str]]:
    """Rows of a table, for experts and their router. path: prefix of the leaves."""
    return {
        "router.proj.weight": (f"{path}router_logits", "EX>X,E"),
        "router.scale": (f"{path}router_scale", "E>E"),
        "router.per_expert_scale": (f"{path}per_expert_scale", "X>X"),
        "experts.gate_up_proj": (f"{path}gating_einsum", "X2IE>X,2I,E"),
        "experts.down_proj": (f"{path}linear", "XIE>X,E,I"),
    }


SINGLE = norms(
    input_layernorm="pre_attention_norm",
    post_attention_layernorm="post_attention_norm",
    pre_feedforward_layernorm="pre_ffw_norm",
    post_feedforward_layernorm="post_ffw_norm",
)
"""The norms of a layer without experts."""
_NORMS_WITH_EXPERTS = norms(
    pre_feedforward_layernorm_2="pre_ffw_norm",
    post_feedforward_layernorm_2="post_ffw1_norm",
    pre_feedforward_layernorm="pre_ffw2_norm",
    post_feedforward_layernorm_1="post_ffw2_norm",
)


def layout(path: str, table: Table, inputs: str, mark: str = "") -> Layout:
    """The layout of Gemma 4 in a library.

    path: of a layer, with {} for its index.
    table: the rows of norms and MLPs.
    inputs: name of the table of per-layer embeddings.
    mark: prefix of the names of query and key norms.
    """
    rows = {
        "model.embed_tokens.weight": ("embedder.input_embedding", "VE>V,E"),
        "model.norm.weight": ("final_norm.scale", "E>E"),
        "model.embed_tokens_per_layer.weight": (f"embedder.{inputs}", "VLP>V,LP"),
        "model.per_layer_model_projection.weight": ("embedder.per_layer_model_projection.w", "ELP>LP,E"),
        "model.per_layer_projection_norm.weight": ("embedder.per_layer_projection_norm.scale", "P>P"),
        "self_attn.q_proj.weight": ("attn.q_einsum.w", "HED>HD,E"),
        # Keys and values in one leaf; or keys alone, if they are the values, too.
        "self_attn.k_proj.weight self_attn.v_proj.weight": ("attn.kv_einsum.w", "2KED>KD,E"),
        "self_attn.k_proj.weight": ("attn.k_einsum.w", "KED>KD,E"),
        "self_attn.o_proj.weight": ("attn.attn_vec_einsum.w", "HDE>E,HD"),
        "self_attn.q_norm.weight": (f"attn.{mark}query_norm.scale", "D>D"),
        "self_attn.k_norm.weight": (f"attn.{mark}key_norm.scale", "D>D"),
        "layer_scalar": ("skip_scale", "1>1"),
        "per_layer_input_gate.weight": ("per_layer_input_gate.w", "EP>P,E"),
        "per_layer_projection.weight": ("per_layer_projection.w", "PE>E,P"),
        "post_per_layer_input_norm.weight": ("post_per_layer_input_norm.scale", "E>E"),
    }

    def spare(config: Gemma4, index: int) -> Iterator[str]:
        # A layer that shares the keys of another has a projection of its own, which is unused.
        if index != config.kv_source_layer(index):
            yield from (f"attn.{name}." for name in ("k_einsum", "kv_einsum", f"{mark}key_norm"))

    return Layout(path, {**rows, **table}, _sizes, spare)


def _sizes(config: Gemma4, index: int) -> dict[str, int]:
    kind, routed = config.attention[index], config.experts
    return {
        **{"V": config.vocab_size, "E": config.hidden_size, "F": config.mlp_width(index), "1": 1, "2": 2},
        **{"H": config.num_heads, "K": kind.kv_heads, "D": kind.head_dim},
        **{"L": config.num_layers, "P": config.per_layer_size},
        **({} if routed is None else {"X": routed.router.count, "I": routed.width}),
    }


class _Leaves(Leaves):
    def take(self, path: str, *shape: int, **options: Any) -> Array:
        """As in `Leaves`; some paths have the `w` that checkpoints append."""
        return super().take(f"{path}.w" if f"{path}.w" in self.arrays else path, *shape, **options)


def _layout(config: Gemma4) -> Layout:
    mlp, rest = ("mlp", {}) if config.experts is None else ("mlp2", experts("mlp.") | _NORMS_WITH_EXPERTS)
    table = {
        "mlp.gate_proj.weight mlp.up_proj.weight": (f"{mlp}.gating_einsum", "2FE>F,E"),
        "mlp.down_proj.weight": (f"{mlp}.linear", "FE>E,F"),
    }
    return layout("layer_{}.", SINGLE | table | rest, "per_layer_embeddings")


LIBRARY = Library(roots=("params", "transformer"), layouts={Gemma4: _layout}, leaves=_Leaves)
