"""Block drafts: a few decoder layers propose all tokens of a round in one forward.

DFlash (arXiv 2602.06036): the rows of a block are the last token and masks. Each row attends to the whole block and to
the context, whose keys and values are projections of the target's hidden states; no forward reads the prompt.
DSpark (arXiv 2607.05147) adds a Markov head, to correct the logits of a row by the token before its
prediction, and a confidence head. The blocks of JetSpec (arXiv 2606.18394) are causal. DFlash2: see `dflash2.py`.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jspec.cache.mha import Rows
from jspec.core.checks import check_int
from jspec.core.struct import leaf, struct
from jspec.core.types import Params, Target
from jspec.models import dflash2, layers, weights
from jspec.models.dflash2 import LayerConvs, SelectorParams
from jspec.models.moe import layer_mlp
from jspec.models.sizes import tree_bytes
from jspec.models.stack import DraftShape, LayerParams, attention_branch, decoder_layer
from jspec.models.weights import linear, plain
from pallas_kernels.topk import topk

MARKOV_KINDS: tuple[Literal["vanilla", "gated", "rnn"], ...] = ("vanilla", "gated", "rnn")
"""Kinds of Markov heads (arXiv 2607.05147)."""
MOST_CANDIDATES = 64
"""Bound of a selector's candidates: the top-k kernel takes one pass for each."""


@struct
class MarkovParams:
    """Weights of a Markov head of rank R, [in, out]."""

    previous: Float[Array, "V R"]
    """Embedding of the token before the predicted one."""
    out: Float[Array, "R Vd"] = leaf(linear=True)
    mix: Float[Array, "X Y"] | None
    """gated: [E + R, R], from a row's output and the embedding. rnn: [2 R + E, 3 R], from the state, the embedding and
    the output. None in a vanilla head."""
    mix_bias: Float[Array, " Y"] | None


@struct
class BlockParams:
    """Weights of a block draft; matrices are [in, out]. C: width of the captured hidden states."""

    embed: Float[Array, "V E"] | None = leaf(split=-2, if_even=True)
    """None: the target's embedding."""
    mask_embed: Float[Array, " E"] | None
    """The embedding of the mask token; None: its row of the embedding."""
    fc: Float[Array, "C E"] = leaf(linear=True)
    hidden_norm: Float[Array, " E"]
    layers: tuple[LayerParams, ...]
    norm: Float[Array, " E"]
    lm_head: Float[Array, "E Vd"] | None = leaf(split=-1, if_even=True, linear=True)
    """None: the target's LM head."""
    ids: Int[Array, " Vd"] | None
    """Target ids of the draft's vocabulary, ascending; None: the target's own vocabulary."""
    markov: MarkovParams | None
    confidence: Float[Array, "X 1"] | None
    """[E, 1] or [E + R, 1]; None: there is no confidence head."""
    confidence_bias: Float[Array, " 1"] | None
    convs: tuple[LayerConvs, ...] | None = None
    """One for each layer; None: there are none."""
    selector: SelectorParams | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockHead(DraftShape):
    """The configuration of a block draft: static and hashable by value. Its methods take the weights as arguments.

    block_size: rows of a block.
    mask_token: the token of all rows of a block but the first; beyond the target's, its embedding is `mask_embed`.
    next_token: row j predicts the token at its position + 1, as in DSpark. False: at its own position, as in DFlash,
      where the first row predicts nothing.
    windows: one for each layer.
    causal: for each layer whether a row sees only the rows up to its own of the block.
    markov, markov_rank: kind and rank of the Markov head; None and 0: there is none.
    confidence: what the confidence head reads: "hidden", the row's output, or "markov", the embedding of the token
      before, too; None: there is none.
    logit_scale, soft_cap: factor on the logits, and bound of their result before the Markov head; None: no bound.
    conv_kernel_size, conv_group_size: taps of the convolutions along a block, and channels whose kernels move together;
      0: there are none.
    selector_rank, selector_top_k: rank of the selector, and the candidates of a row among which it chooses by the token
      before; 0: there is none.
    """

    block_size: int
    mask_token: int  # pyright: ignore[reportIncompatibleVariableOverride]  # a frozen field
    next_token: bool
    causal: tuple[bool, ...]
    markov: Literal["vanilla", "gated", "rnn"] | None = None
    markov_rank: int = 0
    confidence: Literal["hidden", "markov"] | None = None
    attention_bias: bool = False
    own_embed: bool = False
    own_head: bool = False
    logit_scale: float = 1.0
    soft_cap: float | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    drafter: ClassVar[str] = "block"

    def __post_init__(self):
        # Layers: one window and one direction each.
        for name, value in (("windows", self.windows), ("causal", self.causal)):
            if len(value) != self.num_layers:
                raise ValueError(f"{name}={value}: must have num_layers={self.num_layers} entries")
        # The block and its tokens.
        check_int("block_size", self.block_size, least=1 if self.next_token else 2)
        for window in self.windows:
            if window is not None and window < self.block_size:
                raise ValueError(f"a window of {window} positions: must be at least block_size={self.block_size}")
        if self.mask_token < 0 or (self.mask_token >= self.vocab_size and not self.own_embed):
            raise ValueError(f"mask_token={self.mask_token}: must be from 0 to {self.vocab_size - 1}")
        # The heads after the layers.
        if (self.markov is None) != (self.markov_rank == 0):
            raise ValueError(
                f"markov={self.markov!r} with markov_rank={self.markov_rank}: must both be set, or neither"
            )
        if self.markov is not None and self.markov not in MARKOV_KINDS:
            raise ValueError(f"markov={self.markov!r}: must be one of {', '.join(MARKOV_KINDS)}")
        if self.markov == "rnn" and not self.next_token:
            raise ValueError("markov='rnn': requires next_token, as its state begins with the first row")
        if self.confidence == "markov" and self.markov is None:
            raise ValueError("confidence='markov': requires a Markov head")
        if self.draft_vocab_size < self.vocab_size and not self.own_head:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size}: a reduced vocabulary requires an LM head")
        self._check_dflash2()

    def _check_dflash2(self) -> None:
        for pair in (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")):
            first, second = (getattr(self, name) for name in pair)
            if (first == 0) != (second == 0):
                raise ValueError(f"{pair[0]}={first} with {pair[1]}={second}: must both be set, or neither")
        if self.conv_kernel_size:
            check_int("conv_kernel_size", self.conv_kernel_size, least=1, most=self.block_size)
            check_int("conv_group_size", self.conv_group_size, least=1)
            if self.hidden_size % self.conv_group_size:
                raise ValueError(f"conv_group_size={self.conv_group_size}: must divide hidden_size={self.hidden_size}")
        if self.selector_rank:
            check_int("selector_rank", self.selector_rank, least=1)
            most = min(MOST_CANDIDATES, self.draft_vocab_size)
            check_int("selector_top_k", self.selector_top_k, least=1, most=most)
            if self.markov is not None:
                raise ValueError(f"markov={self.markov!r}: must be None with a selector")

    @property
    def depth(self) -> int:
        """Tokens predicted by a block."""
        return self.block_size if self.next_token else self.block_size - 1

    def summary(self) -> str:
        """The draft in a few words."""
        return f"{self.method} block draft of {self.depth} tokens"

    @property
    def method(self) -> str:
        """The name of the method."""
        if self.conv_kernel_size and self.selector_rank:
            return "DFlash2"
        if self.markov is not None or self.next_token:
            return "DSpark"
        return "JetSpec" if all(self.causal) and not any(self.windows) else "DFlash"

    def param_shapes(self, dtype: DTypeLike) -> BlockParams:
        """The weights as `jax.ShapeDtypeStruct`s, without the optional `mask_embed`."""
        shapes = weights.shapes(self.weights(), dtype)
        if self.draft_vocab_size == self.vocab_size:
            return shapes
        return dataclasses.replace(shapes, ids=jax.ShapeDtypeStruct((self.draft_vocab_size,), jnp.int32))

    def weights(self) -> BlockParams:
        """The table of the weights, without a `mask_embed` and the ids of the draft's vocabulary."""
        # Widths of the inputs.
        width, bias = self.hidden_size, self.attention_bias
        captured = len(self.capture_layers) * self.target_hidden_size
        read = width + (self.markov_rank if self.confidence == "markov" else 0)
        layers = [
            self.layer_weights(
                f"layers.{index}.",
                norm=plain(f"layers.{index}.input_layernorm.weight", width),
                qk_norm=True,
                qkv_bias=bias,
                o_bias=bias,
            )
            for index in range(self.num_layers)
        ]
        convs = width, self.conv_kernel_size, self.conv_group_size
        return BlockParams(
            embed=plain("embed_tokens.weight", self.vocab_size, width) if self.own_embed else None,
            mask_embed=None,
            fc=linear(captured, {"fc.weight": width}),
            hidden_norm=plain("hidden_norm.weight", width),
            layers=tuple(layers),
            norm=plain("norm.weight", width),
            lm_head=linear(width, {"lm_head.weight": self.draft_vocab_size}) if self.own_head else None,
            ids=None,
            markov=self._markov_weights(),
            confidence=linear(read, {"confidence_head.proj.weight": 1}) if self.confidence else None,
            confidence_bias=plain("confidence_head.proj.bias", 1) if self.confidence else None,
            convs=tuple(dflash2.conv_weights(f"layers.{index}.", *convs) for index in range(self.num_layers))
            if self.conv_kernel_size
            else None,
            selector=dflash2.selector_weights(self.vocab_size, width, self.selector_rank)
            if self.selector_rank
            else None,
        )

    def _markov_weights(self) -> MarkovParams | None:
        if self.markov is None:
            return None
        # The vanilla kind mixes nothing.
        mix, bias, rank, width = None, None, self.markov_rank, self.hidden_size
        shape = {"gated": (width + rank, rank), "rnn": (2 * rank + width, 3 * rank)}.get(self.markov)
        if shape is not None:
            name = f"markov_head.{'gate' if self.markov == 'gated' else 'joint'}_proj"
            mix, bias = linear(shape[0], {f"{name}.weight": shape[1]}), plain(f"{name}.bias", shape[1])
        return MarkovParams(
            previous=plain("markov_head.markov_w1.weight", self.vocab_size, self.markov_rank),
            out=linear(self.markov_rank, {"markov_head.markov_w2.weight": self.draft_vocab_size}),
            mix=mix,
            mix_bias=bias,
        )

    def step_bytes(self, params: Params) -> int:
        """Bytes of weights read by the forward of a block, and by each generation after it: the Markov head once."""
        draft: BlockParams = params.draft
        gate = None if draft.selector is None else draft.selector.gate
        markov = None if draft.markov is None else (draft.markov.out, draft.markov.mix, draft.markov.mix_bias)
        return tree_bytes((draft.layers, draft.convs, draft.norm, markov, gate)) + self.head_bytes(params)

    def extend_bytes(self, params: Params) -> int:
        """Bytes of weights read after a round: the fusion of hidden states, and each layer's keys and values."""
        draft: BlockParams = params.draft
        share = 1 - self._queries / draft.layers[0].qkv.shape[1]
        return int(share * tree_bytes([layer.qkv for layer in draft.layers])) + tree_bytes(
            (draft.fc, draft.hidden_norm)
        )

    @property
    def _queries(self) -> int:
        """Columns of queries in a layer's projection."""
        return self.num_heads // self.tensor * self.head_dim

    def read(
        self, params: BlockParams, hidden: Float[Array, "B T C"], positions: Int[Array, "#B #T"]
    ) -> tuple[Float[Array, "B T E"], Rows]:
        """What the draft remembers of committed tokens: their fused features, and each layer's keys and values of them.

        hidden: the target's captured hidden states at these positions, concatenated.
        """
        feature = self.norm(layers.linear(hidden, params.fc), params.hidden_norm)
        rotation = self.rotation(positions, feature.dtype)
        return feature, tuple(self._context_rows(layer, feature, rotation) for layer in params.layers)

    def _context_rows(
        self, layer: LayerParams, feature: Float[Array, "B T E"], rotation: layers.Rotation
    ) -> tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        # The norm before the attention does not apply to features, and nothing passes from layer to layer.
        bias = None if layer.qkv_bias is None else layer.qkv_bias[self._queries :]
        pair = layers.linear(feature, layer.qkv[:, self._queries :], bias)
        k, v = jnp.split(pair.reshape(*feature.shape[:2], -1, self.head_dim), 2, axis=2)
        assert layer.k_norm is not None
        return layers.rotate(self.norm(k, layer.k_norm), rotation), v

    def apply(
        self,
        params: Params,
        target: Target,
        tokens: Int[Array, "B N"],
        positions: Int[Array, "B N"],
        cache: PyTree,
        start: Int[Array, " B"] | None,
    ) -> Float[Array, "B N E"]:
        """The outputs of the rows of a block, after the final norm.

        params: the draft's weights, and the target's, whose embedding and LM head it may share.
        tokens: the last committed token, then masks.
        positions: from `start` on.
        start: committed rows in the cache. None: none.
        """
        draft: BlockParams = params.draft
        # The block: embeddings, rotation and the mask of both directions.
        x = self.embed(params, target, tokens)
        rotation, nodes = self.rotation(positions, x.dtype), tokens.shape[1]
        both_ways = jnp.ones((1, nodes, nodes), bool)
        # Layers write no rows of the block.
        for index, layer in enumerate(draft.layers):
            mask = None if self.causal[index] else both_ways
            batch = layers.ForwardBatch(tokens, positions, cache, start, mask)
            reading = layers.Reading(batch, index).bound(scale=self.head_dim**-0.5, positions=positions)
            x = self._layer(layer, None if draft.convs is None else draft.convs[index], x, rotation, reading)
        return self.norm(x, draft.norm)

    def _layer(
        self,
        layer: LayerParams,
        convs: LayerConvs | None,
        x: Float[Array, "B N E"],
        rotation: layers.Rotation,
        reading: layers.Reading,
    ) -> Float[Array, "B N E"]:
        assert layer.attention_norm is not None and layer.mlp_norm is not None
        normed = self.norm(x, layer.attention_norm)
        if convs is None:
            return decoder_layer(self, layer, x, normed, rotation, reading)[0]
        # Convolutions before and after each branch.
        before, after = dflash2.convolutions(convs.attention, normed, self.block_size)
        branch, _ = attention_branch(self, layer, before(normed), rotation, reading)
        x = x + after(self.ops.whole(branch, x))
        normed = self.norm(x, layer.mlp_norm)
        before, after = dflash2.convolutions(convs.mlp, normed, self.block_size)
        return x + after(self.ops.whole(layer_mlp(before(normed), layer, None, self.ops), x))

    def unembed(self, params: Params, target: Target, normed: Float[Array, "B N E"]) -> Float[Array, "B N Vd"]:
        """Logits over the draft's vocabulary before the Markov head or the selector, in float32."""
        logits = super().unembed(params, target, normed)
        if self.logit_scale != 1.0:
            logits = self.logit_scale * logits
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def candidates(
        self, params: BlockParams, logits: Float[Array, "B d Vd"]
    ) -> tuple[Float[Array, "B d C"], Int[Array, " Vd"] | Int[Array, "B d C"] | None]:
        """The tokens that each row may propose: their logits, and their target ids, as `ids` or of each row.

        With a selector those are the best of the row; otherwise, all of the draft's vocabulary.
        """
        if params.selector is None:
            return logits, params.ids
        _, index, _ = topk(lax.stop_gradient(logits), self.selector_top_k)
        ids = index if params.ids is None else params.ids.at[index].get(mode="clip")
        return jnp.take_along_axis(logits, index, axis=2, mode="clip"), ids

    def begin(self, params: BlockParams, batch: int) -> Float[Array, "B 1 R"] | None:
        """The state of the Markov head before the first prediction of a block; None if it has no state."""
        if self.markov != "rnn":
            return None
        assert params.markov is not None
        return jnp.zeros((batch, 1, self.markov_rank), params.markov.out.dtype)

    def correct(
        self,
        params: BlockParams,
        state: Float[Array, "B M R"] | None,
        previous: Int[Array, "B M"],
        hidden: Float[Array, "B _ E"],
        logits: Float[Array, "B _ C"],
        ids: Array | None = None,
    ) -> tuple[Float[Array, "B M C"], Float[Array, "B M R"] | None]:
        """Logits of one prediction after each of M paths, and the Markov head's state after it.

        state: of each path; None: the head has none.
        previous: the last token of each path, as a target id.
        hidden: of the predicting row; the same for all paths, or one for each.
        logits, ids: of its `candidates`, likewise.
        """
        if params.selector is not None:
            assert ids is not None
            return dflash2.select(params.selector, previous, hidden, logits, ids), None
        if params.markov is None:
            return logits, None
        # The embedding of the token before each row.
        markov, nodes = params.markov, previous.shape[1]
        embedded = jnp.take(markov.previous, previous, axis=0, mode="clip")
        hidden = jnp.broadcast_to(hidden, (hidden.shape[0], nodes, hidden.shape[2]))
        # A bias from the previous token alone, or gated by the hidden state.
        if self.markov == "vanilla":
            return logits + self._bias(markov, embedded), None
        assert markov.mix is not None
        if self.markov == "gated":
            gate = layers.linear(jnp.concatenate([hidden, embedded], axis=-1), markov.mix, markov.mix_bias)
            return logits + self._bias(markov, jax.nn.sigmoid(gate) * embedded), None
        # A recurrent state along the block.
        assert state is not None
        joined = jnp.concatenate([state, embedded, hidden], axis=-1)
        keep, new, out = jnp.split(layers.linear(joined, markov.mix, markov.mix_bias), 3, axis=-1)
        keep = jax.nn.sigmoid(keep)
        return logits + self._bias(markov, jnp.tanh(out)), keep * state + (1 - keep) * jnp.tanh(new)

    def confide(
        self, params: BlockParams, previous: Int[Array, "B M"], hidden: Float[Array, "B M E"]
    ) -> Float[Array, "B M"] | None:
        """Logits, in float32, of the probability of a prediction to be accepted after those before it.

        previous, hidden: of each prediction, as in `correct`. None: there is no confidence head.
        """
        if params.confidence is None:
            return None
        if self.confidence == "markov":
            assert params.markov is not None
            embedded = jnp.take(params.markov.previous, previous, axis=0, mode="clip")
            hidden = jnp.concatenate([hidden, embedded], axis=-1)
        return layers.linear(hidden, params.confidence, params.confidence_bias)[..., 0].astype(jnp.float32)

    def _bias(self, markov: MarkovParams, latent: Float[Array, "B M R"]) -> Float[Array, "B M Vd"]:
        return layers.linear(latent, markov.out).astype(jnp.float32)
