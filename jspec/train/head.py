"""EAGLE-3 heads in training: shape, vocabulary, initial weights, and unrolling.

Recipe and losses follow Li et al., EAGLE-3, arXiv 2503.01840, section 3, and SafeAILab's code; see `ttt`. A P-EAGLE
head (Hui et al., arXiv 2602.01469) reads masks from step 1 on; all rows learn all steps, without sampling.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jspec.cache.mha import Rows
from jspec.core.checks import check_int
from jspec.core.types import ForwardOutput, Params
from jspec.models import EagleHead, EagleParams, Llama, ModelParams
from jspec.models.decoder import Decoder
from jspec.models.layers import ForwardBatch
from jspec.models.llama import require_llama
from jspec.train import model, ttt
from jspec.train.batches import Source
from jspec.train.recipe import HeadShape


@dataclasses.dataclass(frozen=True)
class TttAttention:
    """Takes the place of a cache: a row of step k attends to what it would see of a cache and its own chain.

    length: T, the rows of a step.
    windows: as in `DraftShape`; each is longer than a chain.
    """

    length: int
    windows: tuple[int | None, ...] = ()

    def attend(
        self,
        layer: int,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B R K D"],
        v: Float[Array, "B R K D"],
        start: None,
        mask: None,
        scale: float,
    ) -> Float[Array, "B T H D"]:
        """Attention of row p at step k, over rows 0 to p of step 0 and row p of the steps 1 to k.

        R = (k + 1) T: the rows of all steps, step by step. `start` and `mask` must be None.
        """
        assert start is None and mask is None
        # Rows of step 0, held by a cache in serving; each row is a group with its own rows of later steps.
        shape = (k.shape[0], -1, self.length, *k.shape[2:])
        (first_k, own_k), (first_v, own_v) = (jnp.split(x.reshape(shape), [1], axis=1) for x in (k, v))
        group = jnp.moveaxis(own_k, 1, 2), jnp.moveaxis(own_v, 1, 2)
        seen = np.tri(self.length, dtype=bool)
        if self.windows and (window := self.windows[layer]) is not None:
            # Row p of step k is at position p + k.
            seen &= ~np.tri(self.length, k=own_k.shape[1] - window, dtype=bool)
        seen = jnp.asarray(seen)[None, :, None]
        return model.attend_to_two(q[:, :, None], (first_k[:, 0], first_v[:, 0]), group, seen, scale)[:, :, 0]


@dataclasses.dataclass(frozen=True)
class HeadLearner(ttt.UnrolledLearner):
    """An EAGLE-3 or P-EAGLE head for a target."""

    config: EagleHead
    target: Llama

    def __post_init__(self):
        if self.config.rank:
            raise ValueError("an EAGLE-4 head cannot be trained: train an EAGLE-3 head, then use Model.with_candidates")

    @classmethod
    def configure(cls, target: Decoder, shape: HeadShape) -> EagleHead:
        """A head that uses the target's embedding; with another width it learns one of its own."""
        llama = require_llama(target, "the training of an EAGLE-3 head")
        # The layers to read, and the vocabulary.
        count, vocabulary = llama.num_layers, llama.vocab_size
        if shape.capture_layers is None and count < 7:
            raise ValueError(f"capture_layers=None: a target of {count} layers has no default; name the layers to read")
        layers = model.check_capture(shape.capture_layers, (2, count // 2, count - 3), count)
        if shape.draft_vocab_size is not None:
            vocabulary = check_int("draft_vocab_size", shape.draft_vocab_size, least=1, most=vocabulary)
        if (mask := shape.mask_token) is not None:
            check_int("mask_token", mask, least=0, most=llama.vocab_size - 1)
        # The target's shape, with changes.
        sizes = shape.sizes(llama, "num_kv_heads", "head_dim")
        same = ("max_length", "rms_norm_eps", "rope", "vocab_size")
        heads, kv_heads = sizes["num_heads"], sizes["num_kv_heads"]
        if heads % kv_heads:
            raise ValueError(f"num_heads={heads} is not a multiple of num_kv_heads={kv_heads}")
        return EagleHead(
            version=3,
            draft_vocab_size=vocabulary,
            target_hidden_size=llama.hidden_size,
            num_layers=shape.num_layers,
            capture_layers=layers,
            mask_token=mask,
            norm_output=shape.norm_output,
            windows=() if shape.sliding_window is None else (shape.sliding_window,) * shape.num_layers,
            **{name: getattr(llama, name) for name in same},
            **sizes,
        )

    def describe(self, target: str) -> tuple[str, str]:
        """Its paper, the layers that it reads, and its vocabulary."""
        layers, size = ", ".join(map(str, self.capture_layers)), self.config.draft_vocab_size
        kind = "A P-EAGLE head (arXiv 2602.01469)" if self.config.at_once else "An EAGLE-3 head (arXiv 2503.01840)"
        return (
            f"{kind} for {target}",
            f"on the residual stream that enters the target's layers {layers}, {size:,} of the target's "
            f"{self.config.vocab_size:,} tokens",
        )

    def vocabulary(self, sources: tuple[Source, ...]) -> np.ndarray | None:
        """The most common tokens of the sources, each source weighted by its share. Only tokens of the loss count."""
        size, full = self.config.draft_vocab_size, self.config.vocab_size
        if size == full:
            return None
        # The distribution of the text, as batches are sampled.
        weighted = []
        for source in sources:
            counts = count_tokens(source.tokens, full, source.mask)
            weighted.append(source.share / counts.sum() * counts)
        return most_common(np.sum(weighted, axis=0), size)

    def init(self, target: ModelParams, ids: Int[Array, " Vd"] | None, key: Key[Array, ""]) -> EagleParams:
        """Random weights, except for norm and LM head, which are the target's if the widths agree."""
        shapes, width = self.config.param_shapes(jnp.float32), self.config.hidden_size
        assert shapes.lm_head is not None and shapes.fc is not None
        keys = iter(jax.random.split(key, 3 + 4 * self.config.num_layers))
        hidden, branch = shapes.mask_hidden, (2 * self.config.num_layers) ** -0.5
        fc = model.init_matrix(next(keys), *shapes.fc.shape)
        head = model.init_matrix(next(keys), *shapes.lm_head.shape)
        norm, embed = jnp.ones(width, jnp.float32), None
        captured = (jnp.ones(self.config.target_hidden_size, jnp.float32),) * len(self.capture_layers)
        # Norm and LM head of the target, or embeddings for another width.
        if shapes.embed is None:
            full = target.embed.T if target.lm_head is None else target.lm_head
            head = (full if ids is None else jnp.take(full, ids, axis=1, mode="clip")).astype(jnp.float32)
            norm = target.norm.astype(jnp.float32)
        else:
            rows, columns = shapes.embed.shape
            embed = model.init_matrix(next(keys), rows, columns, model.EMBEDDING_SPREAD * rows**0.5)
        return EagleParams(
            embed=embed,
            fc=fc,
            fc_bias=None,
            fc_norms=captured if self.config.norm_output else None,
            input_norm=None,
            hidden_norm=jnp.ones(width, jnp.float32),
            layers=tuple(model.init_layer(layer, keys, branch=branch) for layer in shapes.layers),
            norm=norm,
            lm_head=head,
            ids=None,
            mask_hidden=None if hidden is None else jax.random.normal(jax.random.fold_in(key, 1), hidden.shape),
        )

    def observe(self, out: ForwardOutput) -> Float[Array, "B T C"]:
        """The captured hidden states."""
        assert out.hidden is not None
        return out.hidden

    def begin(self, params: Params, observed: Float[Array, "B T C"]) -> tuple[Float[Array, "B T E"], None]:
        """The fused feature, and no rows."""
        return self.config.fuse(params.draft, observed), None

    def forward(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        observed: Float[Array, "B T C"],
        carry: tuple[Float[Array, "B T E"], Rows | None],
        step: int,
    ) -> tuple[Float[Array, "B T Vd"], tuple[Float[Array, "B T E"], Rows]]:
        """The carry is its feature and the rows of all steps so far."""
        feature, earlier = carry
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] + step
        attention, read = TttAttention(tokens.shape[1], self.config.windows), ttt.shift(tokens, step + 1)
        if step and self.config.mask_token is not None:
            masked = jnp.broadcast_to(params.draft.mask_hidden, (*tokens.shape, observed.shape[-1]))
            read, feature = jnp.full_like(tokens, self.config.mask_token), self.config.fuse(params.draft, masked)
        batch = ForwardBatch(read, positions, attention, None, earlier=earlier)
        out = self.config.apply(params, self.target, batch, feature)
        return out.logits, (out.feature, out.rows)


def most_common(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` most common tokens, Int32[size] ascending; among equally common ones, even unused, the lower ids.

    counts: [V] how often each token occurs, or a weight.
    """
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def count_tokens(tokens: np.ndarray, vocab_size: int, mask: np.ndarray | None = None) -> np.ndarray:
    """Int64[V]: how often each token occurs in `tokens` where `mask` is not 0."""
    counts = np.zeros(vocab_size, np.int64)
    # In pieces, because the file may be larger than memory and `bincount` converts its input to int64.
    for i in range(0, len(tokens), 2**16):
        piece = tokens[i : i + 2**16]
        counted = piece if mask is None else piece[mask[i : i + 2**16] != 0]
        counts += np.bincount(counted.reshape(-1), minlength=vocab_size)
    return counts
