"""The text models of Gemma 3: Gemma 4's layers with scaled scores, values as projected, and norms stored less 1."""

import dataclasses

from jaxtyping import Array, Float

from jspec.models.gemma4 import NORMS, Gemma4, Gemma4LayerParams, Gemma4Params
from jspec.models.weights import centered


@dataclasses.dataclass(frozen=True)
class Gemma3(Gemma4):
    """The configuration of a model; static, hashable by value. query_scalar: scores are divided by its square root."""

    query_scalar: int = 256

    def layer_scale(self, layer: int) -> float:
        """The factor on the products of queries and keys."""
        return self.query_scalar**-0.5

    def norm_values(self, v: Float[Array, "B N K D"]) -> Float[Array, "B N K D"]:
        """Values are not normed."""
        return v

    def weights(self, root: str = "model.") -> Gemma4Params:
        """The table of the weights. root: with what the names of their tensors begin."""
        return dataclasses.replace(super().weights(root), norm=centered(root + "norm.weight", self.hidden_size))

    def _layer_weights(self, index: int, prefix: str) -> Gemma4LayerParams:
        dim, attention = self.attention[index].head_dim, prefix + "self_attn."
        return dataclasses.replace(
            super()._layer_weights(index, prefix),
            **{field: centered(prefix + name, self.hidden_size) for field, name in NORMS.items()},
            q_norm=centered(attention + "q_norm.weight", dim),
            k_norm=centered(attention + "k_norm.weight", dim),
            scalar=None,
        )
