"""EAGLE heads: one or more decoder layers draft from the target's hidden states (Li et al., arXiv 2401.15077,
section 4.1, for EAGLE-1 and also EAGLE-2, arXiv 2406.16858; arXiv 2503.01840, section 3, for EAGLE-3).

Row p reads the target's feature at position p and the token at p + 1, and predicts the token at p + 2. While drafting,
the head's own output replaces the feature. A P-EAGLE head (Hui et al., arXiv 2602.01469, section 3) reads a mask token
and a learned hidden state instead, all in one forward. An EAGLE-4 head is an EAGLE-3 head whose LM head scores
candidates (`jspec.models.candidates`).
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jspec.core.struct import leaf, struct
from jspec.core.types import Params, Target
from jspec.models import candidates, layers, weights
from jspec.models.candidates import CandidateHead
from jspec.models.layers import ForwardBatch
from jspec.models.sizes import tree_bytes
from jspec.models.stack import DraftShape, decoder_layer
from jspec.models.weights import fused, linear, plain


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
    """EAGLE-3: norm of the feature, which attention reads beside the embedding; None in EAGLE-1."""
    layers: tuple[PyTree, ...]
    """`LayerParams`, or those of latent attention."""
    norm: Float[Array, " E"] | None
    """Norm before the LM head; None in EAGLE-1."""
    lm_head: Float[Array, "E Vd"] | None = leaf(split=-1, if_even=True, linear=True)
    """None: the target's LM head."""
    ids: Int[Array, " Vd"] | None
    """Target ids of the draft's vocabulary, ascending; None: the target's own vocabulary."""
    mask_embed: Float[Array, " Ed"] | None = None
    """The embedding of a mask token that the target does not have; None: its row of the embedding."""
    mask_hidden: Float[Array, " C"] | None = None
    """P-EAGLE: the input of masks, in place of captured states."""
    candidates: CandidateHead | None = None
    """EAGLE-4: in place of `lm_head`."""


@struct
class HeadOutput:
    """The result of one forward of a head."""

    logits: Float[Array, "B N Vd"]
    """Those of the draft's vocabulary, or of candidates."""
    feature: Float[Array, "B N E"]
    """Feature fed to the next drafting step."""
    rows: PyTree
    ids: Int[Array, " Vd"] | Int[Array, "B N Vd"] | None
    """Target ids of the logits, shared or of each row; None: the target's vocabulary."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleHead(DraftShape):
    """The configuration of a head: static and hashable by value. Its methods take the weights as arguments.

    version: 3, or 1 for EAGLE-1 and EAGLE-2 (with the same weights).
    capture_layers: in EAGLE-1, L + 1: the state after the final norm.
    norm_before_residual: EAGLE-3: the residual stream starts with the normalized feature (`speculators`).
    norm_output: the next step's feature is the output after the final norm ("EAGLE 3.1").
    mask_token: P-EAGLE: the token read after the first prediction; None: each step reads the token of the step before.
    rank: EAGLE-4: of the product that finds candidates; 0: the LM head scores all tokens.
    num_candidates: EAGLE-4: tokens that the LM head scores.
    """

    version: int
    rms_norm_eps: float = 1e-5
    norm_before_residual: bool = False
    norm_output: bool = False
    mask_token: int | None = None
    rank: int = 0
    num_candidates: int = 0
    drafter: ClassVar[str] = "eagle"

    def summary(self) -> str:
        """The kind of draft, for display."""
        return "P-EAGLE head" if self.at_once else f"EAGLE-{4 if self.rank else self.version} head"

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
        factors: bool = True,
    ) -> EagleParams:
        """The table of the weights, without the ids of the draft's vocabulary.

        names: of the tensors; an optional weight is in the table if its tensor is among them.
        embed: whether the head has its own embedding; None: if its width differs from the target's.
        lm_head, fc: whether an EAGLE-3 head has its own LM head, and whether it projects captured states.
        fc_norms: names of the norms of captured layers.
        qk_norm: whether query and key norms are required.
        factors: whether those of a head with candidates are tensors.
        """
        # Sizes, and the prefix of the first layer in this layout.
        width, target_width, eagle3 = self.hidden_size, self.target_hidden_size, self.version == 3
        captured, size = len(self.capture_layers) * target_width, self.draft_vocab_size
        first = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
        prefixes = [first, *(f"layers.{index}." for index in range(1, self.num_layers))]
        # All weights; None for absent ones.
        has_embed = width != target_width if embed is None else embed
        has_input_norm = eagle3 and "input_norm.weight" in names
        return EagleParams(
            embed=plain("embed_tokens.weight", self.vocab_size, width) if has_embed else None,
            fc=linear(captured if eagle3 else 2 * width, {"fc.weight": width}) if fc else None,
            fc_bias=plain("fc.bias", width) if "fc.bias" in names else None,
            fc_norms=tuple(plain(name, target_width) for name in fc_norms) or None,
            input_norm=plain("input_norm.weight", captured) if has_input_norm else None,
            hidden_norm=plain(first + "hidden_norm.weight", width) if eagle3 else None,
            layers=tuple(self._layer_weights(index, prefix, names, qk_norm) for index, prefix in enumerate(prefixes)),
            norm=plain("norm.weight", width) if eagle3 else None,
            lm_head=linear(width, {"lm_head.weight": size}) if eagle3 and lm_head and not self.rank else None,
            ids=None,
            mask_hidden=_flat("mask_hidden", (1, 1, captured)) if self.at_once else None,
            candidates=candidates.table(width, self.rank, size, factors) if self.rank else None,
        )

    def _layer_weights(self, index: int, prefix: str, names: Collection[str], qk_norm: bool) -> PyTree:
        """The table of a layer."""
        width, joined = self.hidden_size, self.version == 3 and index == 0
        # In checkpoints for SGLang, the norm of later layers is hidden_norm.
        norm = prefix + "input_layernorm.weight"
        if index and norm not in names and prefix + "hidden_norm.weight" in names:
            norm = prefix + "hidden_norm.weight"
        return self.layer_weights(
            prefix,
            norm=plain(norm, width) if self.version == 3 or index else None,
            input_width=2 * width if joined else width,
            qk_norm=qk_norm or prefix + "self_attn.q_norm.weight" in names,
            qkv_bias=prefix + "self_attn.q_proj.bias" in names,
            o_bias=prefix + "self_attn.o_proj.bias" in names,
        )

    def head_bytes(self, params: Params) -> int:
        """As in `DraftShape`; with candidates, the factors and the rows of one token."""
        if (head := params.draft.candidates) is None:
            return super().head_bytes(params)
        return tree_bytes((head.down, head.up)) + self.num_candidates * tree_bytes(head.rows) // len(head.rows)

    def step_bytes(self, params: Params) -> int:
        """Bytes of weights read by one forward while drafting."""
        draft: EagleParams = params.draft
        if self.at_once:  # `extend` reads everything except the LM head.
            return self.head_bytes(params)
        # EAGLE-1 applies `fc` in every step, EAGLE-3 only to captured hidden states.
        every_step = (draft.fc, draft.fc_bias) if self.version == 1 else None
        return tree_bytes((draft.layers, draft.norm, draft.hidden_norm, every_step)) + self.head_bytes(params)

    def extend_bytes(self, params: Params) -> int:
        """Bytes of weights read by the head after a round: those of a step, and of `fuse`."""
        draft: EagleParams = params.draft
        fusing = (draft.fc, draft.fc_bias, draft.fc_norms, draft.input_norm) if self.version == 3 else None
        if self.at_once:
            return tree_bytes((draft.layers, draft.norm, draft.hidden_norm, fusing))
        return self.step_bytes(params) + tree_bytes(fusing)

    def fuse(self, params: EagleParams, hidden: Float[Array, "B N C"]) -> Float[Array, "B N E"]:
        """The feature computed from captured hidden states; in EAGLE-1, the hidden states themselves."""
        if self.version == 1:
            return hidden
        # Optional norms of each captured layer, and of all.
        if params.fc_norms is not None:
            parts = jnp.split(hidden, len(params.fc_norms), axis=-1)
            normed = [self.norm(x, w) for x, w in zip(parts, params.fc_norms, strict=True)]
            hidden = jnp.concatenate(normed, axis=-1)
        if params.input_norm is not None:
            hidden = self.norm(hidden, params.input_norm)
        return hidden if params.fc is None else layers.linear(hidden, params.fc, params.fc_bias)

    def apply(self, params: Params, target: Target, batch: ForwardBatch, feature: Float[Array, "B N E"]) -> HeadOutput:
        """One forward over N (token, feature) pairs per sequence.

        params: the head's weights, and the target's, whose embedding and LM head it may share.
        batch: tokens, and the positions of the features; each token is one position later.
        feature: the result of `fuse`, or the `feature` of an earlier output of this head.
        """
        x, rows = self._run(params, target, batch, feature)
        normed, ids = self._normed(params.draft, x), self.ids(params.draft)
        feature = normed if self.norm_output else x
        if (head := params.draft.candidates) is None:
            return HeadOutput(self.unembed(params, target, normed), feature, rows, ids)
        logits, index = head.score(normed, self.num_candidates, self.draft_vocab_size)
        return HeadOutput(logits, feature, rows, index if ids is None else jnp.take(ids, index, mode="clip"))

    def read(
        self, params: Params, target: Target, batch: ForwardBatch, feature: Float[Array, "B N E"]
    ) -> tuple[Float[Array, "B N E"], PyTree]:
        """The inputs of the LM head, and the rows: `apply` without the LM head."""
        x, rows = self._run(params, target, batch, feature)
        return self._normed(params.draft, x), rows

    def _normed(self, head: EagleParams, x: Float[Array, "B N E"]) -> Float[Array, "B N E"]:
        return x if head.norm is None else self.norm(x, head.norm)

    def _run(
        self, params: Params, target: Target, batch: ForwardBatch, feature: Float[Array, "B N E"]
    ) -> tuple[Float[Array, "B N E"], PyTree]:
        """The residual stream after the layers, and the rows of the layers."""
        head: EagleParams = params.draft
        # Join the embedding with the feature.
        x, joined = self._join(head, self.embed(params, target, batch.tokens), feature)
        rotation, rows = self.rotation(batch.positions, x.dtype), []
        # Layers.
        for layer, reading in zip(head.layers, batch.readings(len(head.layers)), strict=True):
            normed = joined
            if reading.layer:
                assert layer.attention_norm is not None
                normed = self.norm(x, layer.attention_norm)
            x, pair = self.run_layer(layer, x, normed, rotation, reading)
            rows.append(pair)
        return batch.take(x), tuple(rows)

    def run_layer(
        self,
        layer: PyTree,
        x: Float[Array, "B N E"],
        normed: Float[Array, "B N X"],
        rotation: layers.Rotation,
        reading: layers.Reading,
    ) -> tuple[Float[Array, "B M E"], tuple[Array, ...]]:
        """The residual stream `x` after a layer whose attention reads `normed`, and the rows of the layer."""
        return decoder_layer(self, layer, x, normed, rotation, reading.bound(scale=self.head_dim**-0.5))

    def _join(self, head: EagleParams, embedded: Array, feature: Array) -> tuple[Array, Array]:
        """The residual stream before the first layer [B, N, E], and the input of its attention [B, N, E or 2 E]."""
        (layer, *_) = head.layers
        # EAGLE-1: one projection of both.
        if self.version == 1:
            assert head.fc is not None
            x = layers.linear(jnp.concatenate([embedded, feature], axis=-1), head.fc, head.fc_bias)
            norm = layer.attention_norm
            return x, x if norm is None else self.norm(x, norm)
        # EAGLE-3: both are normalized, and the first layer is twice as wide.
        assert layer.attention_norm is not None and head.hidden_norm is not None
        normed = self.norm(feature, head.hidden_norm)
        joined = jnp.concatenate([self.norm(embedded, layer.attention_norm), normed], axis=-1)
        return normed if self.norm_before_residual else feature, joined


def _flat(name: str, shape: tuple[int, ...]) -> Any:
    """A vector, stored as a tensor of this shape."""
    return fused((math.prod(shape),), {name: shape}, lambda x: [x.reshape(-1)], lambda x: [x.reshape(shape)])
