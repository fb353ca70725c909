"""Block drafts in training: shape, initial weights, and the blocks of a text to learn.

Anchors are sampled in each text. After each of them one block is predicted as in decoding, from the target's hidden
states before the anchor; Markov head, selector and confidence head read the text's own tokens (DSpark, arXiv
2607.05147; also DFlash, arXiv 2602.06036; DFlash2, vLLM #52816; and JetSpec, arXiv 2606.18394).
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key

from jspec.cache.mha import Rows
from jspec.core.struct import struct
from jspec.core.types import Params
from jspec.models import BlockHead, BlockParams, Llama, ModelParams
from jspec.models.block_head import MarkovParams
from jspec.models.decoder import Decoder
from jspec.models.dflash2 import ConvParams, LayerConvs, SelectorParams
from jspec.models.llama import require_llama
from jspec.train import model
from jspec.train.extra import optax
from jspec.train.learner import Learned, Learner, StepMetrics, Texts
from jspec.train.recipe import BlockRecipe, BlockShape

_SPREAD = 0.01
"""Standard deviation of initial embeddings of the Markov head and the selector."""
_SOURCES = {
    "DFlash": "arXiv 2602.06036",
    "DFlash2": "vLLM #52816",
    "DSpark": "arXiv 2607.05147",
    "JetSpec": "arXiv 2606.18394",
}
"""Method -> where it is described."""


@dataclasses.dataclass(frozen=True)
class BlockAttention:
    """Takes the place of a cache: the rows of each block attend to the text before its anchor and to their own block.

    context: keys and values of the text, for each layer.
    anchors: [B, A] positions of the first rows of A blocks.
    windows: for each layer how many positions a row sees, its own included; None: all.
    """

    context: Rows
    anchors: Int[Array, "B A"]
    windows: tuple[int | None, ...]

    def attend(
        self,
        layer: int,
        q: Float[Array, "B N H D"],
        k: Float[Array, "B N K D"],
        v: Float[Array, "B N K D"],
        start: None,
        mask: Bool[Array, "1 N N"] | None,
        scale: float,
        positions: Int[Array, "B N"],
    ) -> Float[Array, "B N H D"]:
        """Attention of the rows of all blocks, block by block; `mask` None: causal within a block, otherwise both ways.

        No row of a window reaches beyond its block, at most as long.
        """
        assert start is None
        q, k, v = (x.reshape(*self.anchors.shape, -1, *x.shape[2:]) for x in (q, k, v))
        size, window = q.shape[2], self.windows[layer]
        text_k, text_v = self.context[layer]
        # The text before the anchor, within the window.
        column = jnp.arange(text_k.shape[1], dtype=jnp.int32)[None, None, None]
        seen = column < self.anchors[:, :, None, None]
        if window is not None:
            seen = seen & (positions.reshape(*self.anchors.shape, size, 1) - column < window)
        within = jnp.tril(jnp.ones((size, size), bool)) if mask is None else None
        out = model.attend_to_two(q, (text_k, text_v), (k, v), seen, scale, within)
        return out.reshape(out.shape[0], -1, *out.shape[3:])


@struct
class Predicted:
    """The d predictions of A blocks."""

    logits: Float[Array, "B A d V"]
    """After the Markov head, and before the selector."""
    scores: Float[Array, "B A d k"] | None
    """After the selector, of its candidates; None: there is none."""
    ids: Int[Array, "B A d k"] | None
    """The candidates."""
    confidence: Float[Array, "B A d"] | None
    """Logits of the probability of accepting a prediction after those before it; None: there is no such head."""

    @property
    def tokens(self) -> Int[Array, "B A d"]:
        """The chosen tokens."""
        if self.scores is None or self.ids is None:
            return jnp.argmax(self.logits, axis=-1)
        return jnp.take_along_axis(self.ids, jnp.argmax(self.scores, axis=-1)[..., None], axis=-1)[..., 0]


@dataclasses.dataclass(frozen=True)
class BlockLearner(Learner):
    """A block draft for a target."""

    config: BlockHead
    target: Llama
    recipe: BlockRecipe
    test: ClassVar[str] = "blocks after sampled anchors"

    def __post_init__(self):
        size, full = self.config.draft_vocab_size, self.config.vocab_size
        if size != full:
            raise ValueError(f"draft_vocab_size={size}: a block draft is trained with the target's {full} tokens")

    @classmethod
    def configure(cls, target: Decoder, shape: BlockShape) -> BlockHead:
        """A draft whose layers have the shape of the target's, with full attention and its embedding and LM head."""
        llama = require_llama(target, "the training of a block draft")
        count = llama.num_layers
        if shape.capture_layers is None and count < 8:
            raise ValueError(f"capture_layers=None: a target of {count} layers has no default; name the layers to read")
        spread = tuple(2 + round(index * (count - 4) / 4) for index in range(5))
        markov: Any = None if shape.markov == "none" else shape.markov  # a str of `MARKOV_KINDS`
        confidence = None if shape.no_confidence else "hidden" if markov is None else "markov"
        # Of the target's shape.
        sizes = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_length")
        same = ("vocab_size", "hidden_size", *sizes, "rms_norm_eps", "rope")
        return BlockHead(
            **{name: getattr(llama, name) for name in same},
            draft_vocab_size=llama.vocab_size,
            # Stated, as layouts have other defaults.
            embed_scale=None if llama.embed_factor == 1.0 else llama.embed_factor,
            target_hidden_size=llama.hidden_size,
            num_layers=shape.num_layers,
            capture_layers=model.check_capture(shape.capture_layers, spread, count),
            block_size=shape.block_size,
            mask_token=llama.vocab_size - 1 if shape.mask_token is None else shape.mask_token,
            next_token=not shape.fill_in,
            windows=(None,) * shape.num_layers,
            causal=(shape.causal,) * shape.num_layers,
            markov=markov,
            markov_rank=0 if markov is None else shape.markov_rank,
            confidence=confidence,
            conv_kernel_size=shape.conv_kernel_size,
            conv_group_size=shape.conv_group_size if shape.conv_kernel_size else 0,
            selector_rank=shape.selector_rank,
            selector_top_k=shape.selector_top_k if shape.selector_rank else 0,
        )

    def describe(self, target: str) -> tuple[str, str]:
        """Its kind and paper, the layers that it reads, and its Markov head."""
        config, markov = self.config, "no Markov head"
        if config.markov is not None:
            markov = f"a {config.markov} Markov head of rank {config.markov_rank}"
        if config.conv_kernel_size:
            markov += f", convolutions of {config.conv_kernel_size} taps"
        if config.selector_rank:
            markov += f", a selector of rank {config.selector_rank} among {config.selector_top_k} candidates"
        return (
            f"A {config.summary()} ({_SOURCES[config.method]}) for {target}",
            "over projections of the residual stream that enters the target's layers "
            f"{', '.join(map(str, config.capture_layers))}, {markov}, the target's embedding and LM head",
        )

    def describe_loss(self) -> str:
        """The loss, for a card."""
        recipe, config = self.recipe, self.config
        terms = {
            "cross-entropy": recipe.cross_entropy,
            "the L1 distance to the target's distribution": recipe.distance,
            "the KL divergence from the target's distribution": recipe.divergence,
            "the confidence head's cross-entropy": recipe.confidence if config.confidence else 0,
            "the selector's cross-entropy": recipe.selector if config.selector_rank else 0,
        }
        shown = ", ".join(f"{weight:g} times {term}" for term, weight in terms.items() if weight)
        return (
            f"blocks after {recipe.anchors} anchors in each text; {shown}; prediction k weighted by "
            f"exp(-(k-1)/{recipe.reach:g})"
        )

    def init(self, target: ModelParams, ids: Int[Array, " Vd"] | None, key: Key[Array, ""]) -> BlockParams:
        """Random weights, except for the norm, which is the target's.

        Markov head and selector begin small, and convolutions change nothing at first.
        """
        assert ids is None
        config = self.config
        shapes = config.param_shapes(jnp.float32)
        keys = iter(jax.random.split(key, 4 * config.num_layers + 6))
        return BlockParams(
            embed=None,
            mask_embed=None,
            fc=model.init_matrix(next(keys), *shapes.fc.shape),
            hidden_norm=jnp.ones(shapes.hidden_norm.shape, jnp.float32),
            layers=tuple(
                model.init_layer(layer, keys, branch=(2 * config.num_layers) ** -0.5) for layer in shapes.layers
            ),
            norm=target.norm.astype(jnp.float32),
            lm_head=None,
            ids=None,
            markov=None if shapes.markov is None else _init_markov(shapes.markov, keys),
            confidence=None if shapes.confidence is None else model.init_matrix(next(keys), *shapes.confidence.shape),
            confidence_bias=None if shapes.confidence is None else jnp.zeros(1, jnp.float32),
            convs=None if shapes.convs is None else tuple(_init_convs(convs) for convs in shapes.convs),
            selector=None if shapes.selector is None else _init_selector(shapes.selector, keys),
        )

    def logits_per_token(self) -> float:
        """Those of all blocks."""
        return self.config.vocab_size * min(self.recipe.anchors / self.recipe.length, 1) * self.config.depth

    def count_rows(self, tokens: Int[Array, "B T"], mask: ArrayLike | None) -> Float[Array, "B T"]:
        """The counted tokens: those of the mask."""
        return jnp.ones(tokens.shape, jnp.float32) if mask is None else jnp.asarray(mask, jnp.float32)

    def learn(self, params: Params, texts: Texts) -> Learned:
        """The mean loss of blocks after sampled anchors, its weight, and metrics of each of the d predictions."""
        tokens, mask, out = texts.tokens, texts.mask, texts.out
        assert out.hidden is not None
        anchors, used = sample_anchors(mask, self.recipe.anchors, texts.keys)
        predicted = self.forward(params, tokens, out.hidden, anchors)
        place = anchors[:, :, None] + jnp.arange(self.config.depth, dtype=jnp.int32)[None, None]
        row = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None, None]
        # Of a prediction k, counted from 0, the target's distribution is that after position a + k.
        target_logits = out.logits.at[row, place].get(mode="clip")
        labels = tokens.at[row, place + 1].get(mode="clip")
        # Predictions that count are a prefix of each block.
        counted = mask.at[row, place + 1].get(mode="fill", fill_value=0.0) * used[:, :, None]
        counted = jnp.cumprod(counted, axis=2)
        weight = counted * jnp.exp(-jnp.arange(self.config.depth, dtype=jnp.float32) / self.recipe.reach)[None, None]
        total = weight.sum() + 1e-6
        loss, nats = self._loss(predicted, labels, target_logits, weight)
        # The metrics.
        agreed = (counted > 0) & (predicted.tokens == jnp.argmax(target_logits, axis=-1))
        chained = jnp.cumprod(agreed.astype(jnp.int32), axis=2)
        sums = (jnp.sum(x, axis=(0, 1), dtype=jnp.int32) for x in (agreed, chained, counted > 0))
        return loss / total, total, StepMetrics(jnp.sum(counted * nats, axis=(0, 1)) / tokens.size, *sums)

    def _loss(
        self,
        predicted: Predicted,
        labels: Int[Array, "B A d"],
        target_logits: Float[Array, "B A d V"],
        weight: Float[Array, "B A d"],
    ) -> tuple[Float[Array, ""], Float[Array, "B A d"]]:
        """The weighted sum of all losses, and the cross-entropy of each prediction."""
        recipe, logits = self.recipe, predicted.logits
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        p = jax.nn.softmax(target_logits)
        distance = jnp.abs(jax.nn.softmax(logits) - p).sum(-1)
        loss = recipe.cross_entropy * jnp.sum(weight * nats) + recipe.distance * jnp.sum(weight * distance)
        if recipe.divergence:
            divergence = optax.kl_divergence(jax.nn.log_softmax(logits), p)
            loss = loss + recipe.divergence * jnp.sum(weight * divergence)
        if predicted.confidence is not None:
            accepted = lax.stop_gradient(jnp.clip(1.0 - 0.5 * distance, 0.0, 1.0))
            surprise = optax.sigmoid_binary_cross_entropy(predicted.confidence, accepted)
            loss = loss + recipe.confidence * jnp.sum(weight * surprise)
        if predicted.scores is not None:
            # A label that is no candidate teaches the selector nothing.
            right = predicted.ids == labels[..., None]
            surprise = -jnp.sum(jnp.where(right, jax.nn.log_softmax(predicted.scores), 0.0), axis=-1)
            loss = loss + recipe.selector * jnp.sum(weight * surprise)
        return loss, nats

    def forward(
        self, params: Params, tokens: Int[Array, "B T"], hidden: Float[Array, "B T C"], anchors: Int[Array, "B A"]
    ) -> Predicted:
        """The predictions of the blocks after these anchors. hidden: the target's captured states of the text."""
        config, draft = self.config, params.draft
        batch, blocks = anchors.shape
        size, depth = config.block_size, config.depth
        _, rows = config.read(draft, hidden, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None])
        offset = jnp.arange(size, dtype=jnp.int32)[None, None]
        positions = (anchors[:, :, None] + offset).reshape(batch, blocks * size)
        root = jnp.take_along_axis(tokens, anchors, axis=1)[:, :, None]
        block = jnp.where(offset == 0, root, config.mask_token).reshape(batch, blocks * size)
        attention = BlockAttention(rows, anchors, config.windows)
        out = config.apply(params, self.target, block, positions, attention, None)
        out = out.reshape(batch * blocks, size, -1)[:, size - depth :]
        logits = config.unembed(params, self.target, out)
        # The token before each prediction.
        before = jnp.take_along_axis(tokens, jnp.minimum(positions, tokens.shape[1] - 1), axis=1)
        before = before.reshape(batch * blocks, size)[:, :depth]
        scores, ids, confidence = None, None, config.confide(draft, before, out)
        if draft.selector is None:
            logits = self._correct(draft, before, out, logits)
        else:
            scores, ids = config.candidates(draft, logits)
            scores, _ = config.correct(draft, None, before, out, scores, ids)
        predicted = Predicted(logits, scores, ids, confidence)
        return jax.tree.map(lambda x: x.reshape(batch, blocks, *x.shape[1:]), predicted)

    def _correct(
        self, draft: BlockParams, before: Int[Array, "N d"], out: Float[Array, "N d E"], logits: Float[Array, "N d V"]
    ) -> Float[Array, "N d V"]:
        state = self.config.begin(draft, before.shape[0])
        if state is None:
            return self.config.correct(draft, None, before, out, logits)[0]
        corrected = []
        for k in range(before.shape[1]):
            row = slice(k, k + 1)
            logits_of_row, state = self.config.correct(draft, state, before[:, row], out[:, row], logits[:, row])
            corrected.append(logits_of_row)
        return jnp.concatenate(corrected, axis=1)


def sample_anchors(
    mask: Float[Array, "B T"], count: int, keys: Key[Array, " B"]
) -> tuple[Int[Array, "B A"], Float[Array, "B A"]]:
    """Up to `count` counted positions of each text, ascending, whose next token counts, and 1 for each of them.

    Texts with fewer such positions have 0 at the end, with 0 in the second result.
    """
    length = mask.shape[1]
    valid = (mask[:, :-1] > 0) & (mask[:, 1:] > 0)
    noise = jnp.where(valid, jax.vmap(lambda key: jax.random.uniform(key, valid.shape[1:]))(keys), 2.0)
    _, candidates = lax.top_k(-noise, min(count, length - 1))
    anchors = jnp.sort(jnp.where(jnp.take_along_axis(valid, candidates, axis=1), candidates, length), axis=1)
    used = anchors < length
    return jnp.where(used, anchors, 0).astype(jnp.int32), used.astype(jnp.float32)


def _init_markov(shapes: MarkovParams, keys) -> MarkovParams:
    mix = shapes.mix
    return MarkovParams(
        previous=jax.random.normal(next(keys), shapes.previous.shape, jnp.float32) * _SPREAD,
        out=model.init_matrix(next(keys), *shapes.out.shape),
        mix=None if mix is None else model.init_matrix(next(keys), *mix.shape),
        mix_bias=None if mix is None else jnp.zeros(mix.shape[1], jnp.float32),
    )


def _init_convs(shapes: LayerConvs) -> LayerConvs:
    def identity(conv: ConvParams) -> ConvParams:
        base = jnp.zeros(conv.base.shape, jnp.float32).at[:, 0].set(1.0)
        return ConvParams(base, jnp.zeros(conv.dynamic.shape, jnp.float32))

    return LayerConvs(identity(shapes.attention), identity(shapes.mlp))


def _init_selector(shapes: SelectorParams, keys) -> SelectorParams:
    rank = shapes.candidate.shape[1]
    return SelectorParams(
        previous=jax.random.normal(next(keys), shapes.previous.shape, jnp.float32) * _SPREAD,
        candidate=jax.random.normal(next(keys), shapes.candidate.shape, jnp.float32) * rank**-0.5,
        gate=model.init_matrix(next(keys), *shapes.gate.shape),
    )
