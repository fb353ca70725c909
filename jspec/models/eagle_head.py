"""EAGLE heads: one or more decoder layers draft from the target's hidden states (Li et al., arXiv 2401.15077,
section 4.1, for EAGLE-1 and also EAGLE-2, arXiv 2406.16858; arXiv 2503.01840, section 3, for EAGLE-3).

Row p reads the target's feature at position p and the token at p + 1, and predicts the token at p + 2. While drafting,
the head's own output replaces the feature.
"""

import dataclasses
from collections.abc import Collection, Sequence
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from jspec.cache import HybridCache, MhaCache
from jspec.cache.mha import Rows
from jspec.core.sharding import gather_last
from jspec.core.struct import leaf, struct
from jspec.core.types import Params, Target
from jspec.models import layers, weights
from jspec.models.rope import Rope
from jspec.models.sizes import tree_bytes
from jspec.models.stack import DraftShape, LayerParams, decoder_layer, empty_cache, layer_weights
from jspec.models.weights import interleaved, linear, plain


@struct
class EagleParams:
    """Weights of a head; matrices are [in, out]. C: width of the captured hidden states, Vd: draft vocabulary size."""

    embed: Float[Array, "V Ed"] | None = leaf(split=-2, if_even=True)
    """None: the target's embedding."""
    fc: Float[Array, "F E"] | None = leaf(linear=True)
    """EAGLE-3: [C, E], applied once to captured states; None: they are the feature, of the target's width. EAGLE-1:
    [2 E, E], applied to each (token, feature) pair."""
    fc_bias: Float[Array, " E"] | None
    fc_norms: tuple[Float[Array, " Et"], ...] | None
    """A norm for each captured layer (SpecForge's `fc_norm`)."""
    input_norm: Float[Array, " C"] | None
    """One norm for all captured layers together (SpecForge's `norm_before_fc`)."""
    hidden_norm: Float[Array, " E"] | None
    """EAGLE-3: norm of the feature, read by the attention next to the embedding; None in EAGLE-1."""
    layers: tuple[LayerParams, ...]
    norm: Float[Array, " E"] | None
    """Norm before the LM head; None in EAGLE-1."""
    lm_head: Float[Array, "E Vd"] | None = leaf(split=-1, if_even=True, linear=True)
    """None: the target's LM head."""
    ids: Int[Array, " Vd"] | None
    """Target ids of the draft's vocabulary, ascending; None: the target's own vocabulary."""


@struct
class HeadOutput:
    """The result of one forward of a head."""

    logits: Float[Array, "B N Vd"]
    feature: Float[Array, "B N E"]
    """Feature fed to the next drafting step."""
    rows: PyTree


@dataclasses.dataclass(frozen=True)
class EagleHead(DraftShape):
    """The configuration of a head: static and hashable by value. Its methods take the weights as arguments.

    version: 3, or 1 for EAGLE-1 and EAGLE-2 (with the same weights).
    vocab_size: the target's.
    capture_layers: the target's hidden states to read, as in `Decoder.apply`; for EAGLE-1, L + 1 (after the
      final norm).
    norm_before_residual: EAGLE-3: the residual stream starts with the normalized feature (`speculators`).
    norm_output: the next step's feature is the output after the final norm ("EAGLE 3.1").
    windows: for each layer the positions that a row sees, its own included, or None: all; empty: all in all layers.
    neox: whether checkpoints have the rotated pairs (i, i + D/2) of heads; otherwise `weights` reorders (2 i, 2 i + 1).
    tensor: devices to split heads, MLPs and the LM head over; the sizes here are those of the whole head.
    """

    version: int
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    capture_layers: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    rope: Rope = Rope()
    norm_before_residual: bool = False
    norm_output: bool = False
    windows: tuple[int | None, ...] = ()
    neox: bool = True
    tensor: int = 1
    drafter: ClassVar[str] = "eagle"
    """Name of the drafter for this kind of draft."""

    def summary(self) -> str:
        """The draft in a few words."""
        return f"EAGLE-{self.version} head"

    def param_shapes(self, dtype: DTypeLike) -> EagleParams:
        """The weights as `jax.ShapeDtypeStruct`s, without optional ones, such as biases.

        An EAGLE-3 head has its own LM head, EAGLE-1 shares the target's. The embedding is the target's, unless the
        head's width differs.
        """
        shapes = weights.shapes(self.weights(), dtype)
        if self.version == 1:
            return shapes
        return dataclasses.replace(shapes, ids=jax.ShapeDtypeStruct((self.draft_vocab_size,), jnp.int32))

    def weights(
        self,
        names: Collection[str] = (),
        *,
        embed: bool | None = None,
        lm_head: bool = True,
        fc: bool = True,
        fc_norms: Sequence[str] = (),
        qk_norm: bool = False,
    ) -> EagleParams:
        """The table of the weights, without the ids of the draft's vocabulary.

        Args:
          names: of tensors; optional weights are read if their names are among them.
          embed: whether the head has its own embedding; None: if its width differs from the target's.
          lm_head: whether an EAGLE-3 head has its own LM head.
          fc: whether it projects captured states.
          fc_norms: the tensors of norms of captured layers.
          qk_norm: whether norms of heads are required.
        """
        # Sizes, and the prefix of the first layer in this layout.
        width, outer, three = self.hidden_size, self.target_hidden_size, self.version == 3
        captured = len(self.capture_layers) * outer
        first = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
        prefixes = [first, *(f"layers.{index}." for index in range(1, self.num_layers))]
        # Optional tensors.
        own_embed = width != outer if embed is None else embed
        own_input_norm = three and "input_norm.weight" in names
        return EagleParams(
            embed=plain("embed_tokens.weight", self.vocab_size, width) if own_embed else None,
            fc=linear(captured if three else 2 * width, {"fc.weight": width}) if fc else None,
            fc_bias=plain("fc.bias", width) if "fc.bias" in names else None,
            fc_norms=tuple(plain(name, outer) for name in fc_norms) or None,
            input_norm=plain("input_norm.weight", captured) if own_input_norm else None,
            hidden_norm=plain(first + "hidden_norm.weight", width) if three else None,
            layers=tuple(self._layer_weights(index, prefix, names, qk_norm) for index, prefix in enumerate(prefixes)),
            norm=plain("norm.weight", width) if three else None,
            lm_head=linear(width, {"lm_head.weight": self.draft_vocab_size}) if three and lm_head else None,
            ids=None,
        )

    def _layer_weights(self, index: int, prefix: str, names: Collection[str], qk_norm: bool) -> LayerParams:
        """A layer. In checkpoints for SGLang the later ones have the norm of the first one's feature."""
        width, joined = self.hidden_size, self.version == 3 and index == 0
        # SGLang calls the norm of later layers hidden_norm.
        norm = prefix + "input_layernorm.weight"
        if index and norm not in names and prefix + "hidden_norm.weight" in names:
            norm = prefix + "hidden_norm.weight"
        layer = layer_weights(
            self,
            prefix,
            norm=plain(norm, width) if self.version == 3 or index else None,
            input_width=2 * width if joined else width,
            qk_norm=qk_norm or prefix + "self_attn.q_norm.weight" in names,
            qkv_bias=prefix + "self_attn.q_proj.bias" in names,
            o_bias=prefix + "self_attn.o_proj.bias" in names,
        )
        return layer if self.neox else interleaved(layer, self.num_heads, self.num_kv_heads, self.head_dim)

    def step_bytes(self, params: Params) -> int:
        """Bytes of weights read by one forward while drafting."""
        draft: EagleParams = params.draft
        # EAGLE-1 applies `fc` in every step, EAGLE-3 only to captured hidden states.
        every_step = (draft.fc, draft.fc_bias) if self.version == 1 else None
        return tree_bytes((draft.layers, draft.norm, draft.hidden_norm, every_step)) + self.head_bytes(params)

    def extend_bytes(self, params: Params) -> int:
        """Bytes of weights read by the head after a round: those of a step and of the fusion of hidden states."""
        draft: EagleParams = params.draft
        fusing = (draft.fc, draft.fc_bias, draft.fc_norms, draft.input_norm) if self.version == 3 else None
        return self.step_bytes(params) + tree_bytes(fusing)

    def init_cache(self, params: EagleParams, batch: int, capacity: int, page_size: int) -> MhaCache | HybridCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, in the precision of `params`."""
        norm = params.layers[0].mlp_norm
        assert norm is not None
        return empty_cache(self, batch, capacity, page_size, norm.dtype, self.windows)

    def fuse(self, params: EagleParams, hidden: Float[Array, "B N C"]) -> Float[Array, "B N E"]:
        """The feature computed from captured hidden states; in EAGLE-1, the hidden states themselves."""
        # EAGLE-1 reads the last hidden state as it is.
        if self.version == 1:
            return hidden
        # Optional norms of each captured layer, and of all.
        if params.fc_norms is not None:
            parts = jnp.split(hidden, len(params.fc_norms), axis=-1)
            normed = [layers.rms_norm(x, w, self.rms_norm_eps) for x, w in zip(parts, params.fc_norms, strict=True)]
            hidden = jnp.concatenate(normed, axis=-1)
        if params.input_norm is not None:
            hidden = layers.rms_norm(hidden, params.input_norm, self.rms_norm_eps)
        return hidden if params.fc is None else layers.linear(hidden, params.fc, params.fc_bias)

    def apply(
        self,
        params: Params,
        target: Target,
        tokens: Int[Array, "B N"],
        feature: Float[Array, "B N E"],
        positions: Int[Array, "#B #N"],
        cache: PyTree,
        start: Int[Array, " B"] | None,
        *,
        mask: Bool[Array, "#B N R"] | None = None,
        earlier: Rows | None = None,
        select: Int[Array, " B"] | None = None,
    ) -> HeadOutput:
        """One forward over N (token, feature) pairs per sequence; `start`, `mask`, `earlier` as in `Decoder.apply`.

        Args:
          params: the head's weights, and the target's, whose embedding and LM head it may share.
          target: the target's configuration.
          feature: the result of `fuse`, or the `feature` of an earlier output of this head.
          positions: positions of the features; each token is one position later.
          select: the only pair of each sequence whose logits and feature are returned; None: all.
        """
        head: EagleParams = params.draft
        # Join the embedding with the feature.
        x, first = self._read(head, self.embed(params, target, tokens), feature)
        rotation = self.rope.rotation(positions, self.head_dim, x.dtype)
        rows, selected = [], layers.SelectedToken.from_index(select, mask, tokens, earlier)
        attend = partial(cache.attend, start=start, mask=mask, scale=self.head_dim**-0.5)
        # Layers.
        readings = layers.Reading.of_layers(len(head.layers), attend, earlier, selected)
        for index, (layer, reading) in enumerate(zip(head.layers, readings, strict=True)):
            normed = first
            if index:
                assert layer.attention_norm is not None
                normed = layers.rms_norm(x, layer.attention_norm, self.rms_norm_eps)
            x, pair = decoder_layer(self, layer, x, normed, rotation, reading)
            rows.append(pair)
        # Logits, and the feature of the next step.
        if select is not None and x.shape[1] > 1:
            x = layers.take_token(x, select)
        normed = x if head.norm is None else layers.rms_norm(x, head.norm, self.rms_norm_eps)
        return HeadOutput(self.unembed(params, target, normed), normed if self.norm_output else x, tuple(rows))

    def embed(self, params: Params, target: Target, tokens: Int[Array, "B N"]) -> Float[Array, "B N Ed"]:
        """The embeddings of `tokens` for the head."""
        if params.draft.embed is None:
            return target.embed(params.target, tokens)
        return layers.look_up(params.draft.embed, tokens, self.vocab_size, self.tensor)

    def unembed(self, params: Params, target: Target, normed: Float[Array, "B N E"]) -> Float[Array, "B N Vd"]:
        """Logits over the draft's vocabulary, in float32."""
        if params.draft.lm_head is None:
            return target.unembed(params.target, normed)
        logits = layers.linear(normed, params.draft.lm_head)
        return gather_last(logits, self.draft_vocab_size).astype(jnp.float32)

    def _read(self, head: EagleParams, embedded, feature) -> tuple[Array, Array]:
        """The residual stream before the first layer, and the input of its attention."""
        (layer, *_) = head.layers
        # EAGLE-1: one projection of both.
        if self.version == 1:
            assert head.fc is not None
            x = layers.linear(jnp.concatenate([embedded, feature], axis=-1), head.fc, head.fc_bias)
            norm = layer.attention_norm
            return x, x if norm is None else layers.rms_norm(x, norm, self.rms_norm_eps)
        # EAGLE-3: both are normalized, and the first layer is twice as wide.
        assert layer.attention_norm is not None and head.hidden_norm is not None
        normed = layers.rms_norm(feature, head.hidden_norm, self.rms_norm_eps)
        read = jnp.concatenate([layers.rms_norm(embedded, layer.attention_norm, self.rms_norm_eps), normed], axis=-1)
        return normed if self.norm_before_residual else feature, read
