"""EAGLE-3 heads whose layers have latent attention and a dense MLP, such as those for Kimi-K2 and DeepSeek V3.

The attention is that of `jspec.models.deepseek`; in the first layer it reads the embedding beside the feature.
"""

import dataclasses
from typing import Any

from jaxtyping import Array, Float, PyTree

from jspec.core.types import Cache
from jspec.models.deepseek import Deepseek, DeepseekLayerParams
from jspec.models.eagle_head import EagleHead
from jspec.models.latent_weights import Latent
from jspec.models.layers import Reading, Rotation


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentHead(EagleHead):
    """The configuration of a head; other fields as of `EagleHead`.

    num_kv_heads, head_dim: the number of heads, and the rotated dimensions of each.
    """

    latent: Latent

    @property
    def decoder(self) -> Deepseek:
        """A model with these layers."""
        # Only the layers count: vocabulary and embedding are read by `EagleHead`.
        shared = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "latent", "max_length")
        values: dict[str, Any] = {name: getattr(self, name) for name in (*shared, "rms_norm_eps", "rope", "tensor")}
        return Deepseek(**values, experts=None, dense_layers=self.num_layers)

    def layer_weights(self, prefix: str, *, norm: Any, input_width: int, **absent: bool) -> DeepseekLayerParams:
        """The table of a layer, which has no biases and no norms of heads."""
        # All layers have the dense MLP of the decoder's first ones.
        return dataclasses.replace(self.decoder.layer_weights(0, prefix, input_width), attention_norm=norm)

    def layer_windows(self) -> tuple[int | None, ...]:
        """As in `Decoder.layer_windows`: raises ValueError."""
        return tuple(self.decoder.layer_windows())

    def kv_bytes(self, context: int, itemsize: int, target: Any) -> int:
        """As in `Draft`."""
        return self.decoder.kv_bytes(context, itemsize)

    def init_cache(self, params: PyTree, batch: int, capacity: int, page_size: int) -> Cache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, in the precision of `params`."""
        return self.decoder.empty_cache(batch, capacity, page_size, params.layers[0].mlp_norm.dtype)

    def run_layer(
        self,
        layer: DeepseekLayerParams,
        x: Float[Array, "B N E"],
        normed: Float[Array, "B N X"],
        rotation: Rotation,
        reading: Reading,
    ) -> tuple[Float[Array, "B M E"], tuple[Array, ...]]:
        """As in `EagleHead`."""
        return self.decoder.run_normed(layer, x, normed, rotation, reading)
