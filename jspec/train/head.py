"""An EAGLE-3 head while it is trained: its recipe, its vocabulary, its first weights, and a step of the training.

Recipe and losses follow Li et al., EAGLE-3, arXiv 2503.01840, section 3, and SafeAILab's code; see `ttt`.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jspec.models import EagleHead, EagleParams, Llama, LlamaParams
from jspec.struct import struct
from jspec.train import model, ttt
from jspec.train.batches import Source
from jspec.types import Params


@dataclasses.dataclass(frozen=True)
class HeadRecipe:
    """The numbers of a training run. With the target and the data they determine it.

    Heads of large targets want a lower rate: SafeAILab and SpecForge train those of 8B targets at 5e-5 to 1e-4.
    """

    steps: int
    batch_tokens: int = 131072
    length: int = 512
    """T: tokens of a sequence; a source of whole sequences has its own."""
    learning_rate: float = 2e-3
    warmup: int = 200
    clip: float = 0.5
    seed: int = 0
    ttt_steps: int = 7
    """K: steps of the training-time test, the longest chain that the head learns to draft."""
    decay: float = 0.8
    """Step k's loss counts decay^k."""
    draft_vocab_size: int | None = None
    """Tokens that the head can propose, the most common ones of the data; None: all."""

    def schedule(self) -> optax.Schedule:
        """Learning rate by step: a linear rise over `warmup` steps, then a cosine down to zero."""
        return optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, min(self.warmup, self.steps - 1), self.steps)

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW without decay, on clipped gradients."""
        adamw = optax.adamw(self.schedule(), b1=0.9, b2=0.95, weight_decay=0.0)
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)


@dataclasses.dataclass(frozen=True)
class HeadSetup:
    """All that is static in a training step."""

    config: EagleHead
    target: Llama
    recipe: HeadRecipe
    dtype: str
    """Precision of the forward and backward pass; the head's weights themselves are float32."""


@struct
class HeadState:
    """What changes from step to step, the draft's vocabulary beside it: what a checkpoint holds."""

    params: EagleParams
    """What is trained, in float32; without `ids`, which are integers."""
    ids: Int[Array, " Vd"] | None
    optimizer: optax.OptState
    step: Int[Array, ""]

    def head(self, dtype: Any) -> EagleParams:
        """The head as it is served, in `dtype`: a copy, which lives on when the state is donated."""
        params = jax.tree.map(lambda leaf: jnp.array(leaf, dtype), self.params)
        return dataclasses.replace(params, ids=None if self.ids is None else jnp.array(self.ids))


def configure(
    target: Llama, *, capture: tuple[int, ...] | None = None, draft_vocab_size: int | None = None, **shape: int | None
) -> EagleHead:
    """A head of one layer for a target: of the target's shape, except for what is given.

    It reads the target's embedding, unless its width is another: then it has one of its own, which is trained, too.

    Args:
      capture: layers whose input it reads, ascending, L for the output of the last; None: (2, L // 2, L - 3).
      shape: hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim; None: the target's.

    Raises:
      ValueError: layers that the target lacks, or a vocabulary or a number of heads that does not fit.
    """
    given = {name: value for name, value in shape.items() if value is not None}
    count = target.num_layers
    if capture is None:
        capture = (2, count // 2, count - 3)
        if count < 7:
            raise ValueError(f"capture=None: a target of {count} layers has no default; give the layers to read")
    if not capture or list(capture) != sorted(set(capture)) or not 0 <= capture[0] <= capture[-1] <= count:
        raise ValueError(f"capture={capture}: give layers in ascending order, from 0 to {count}")
    vocabulary = draft_vocab_size or target.vocab_size
    if not 0 < vocabulary <= target.vocab_size:
        raise ValueError(f"draft_vocab_size={vocabulary}: give 1 to {target.vocab_size}, the target's vocabulary")
    same = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_length", "rms_norm_eps")
    ours: dict[str, Any] = {name: getattr(target, name) for name in (*same, "rope_theta", "rope_scaling", "vocab_size")}
    ours |= given
    if ours["num_heads"] % ours["num_kv_heads"]:
        raise ValueError(f"num_heads={ours['num_heads']} is no multiple of num_kv_heads={ours['num_kv_heads']}")
    return EagleHead(
        version=3,
        draft_vocab_size=vocabulary,
        target_hidden_size=target.hidden_size,
        num_layers=1,
        capture=tuple(capture),
        **ours,
    )


def most_common(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` most common tokens, Int32[size] ascending; of equally common ones, unused ones too, the lower ids.

    counts: [V] how often each token occurs, or a weight.
    """
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def count_tokens(tokens: np.ndarray, vocab_size: int, mask: np.ndarray | None = None) -> np.ndarray:
    """Int64[V]: how often each token occurs in `tokens`, where `mask` is not 0."""
    counts = np.zeros(vocab_size, np.int64)
    # In pieces: the file may be larger than memory, and `bincount` widens what it is given.
    for i in range(0, len(tokens), 2**16):
        piece = tokens[i : i + 2**16]
        kept = piece if mask is None else piece[mask[i : i + 2**16] != 0]
        counts += np.bincount(kept.reshape(-1), minlength=vocab_size)
    return counts


def vocabulary(setup: HeadSetup, sources: tuple[Source, ...]) -> np.ndarray | None:
    """The draft's vocabulary, Int32[Vd]: the most common tokens of the sources, each source weighted by its share.

    None where the draft has the target's own.
    """
    size, full = setup.config.draft_vocab_size, setup.target.vocab_size
    if size == full:
        return None
    weighted = [source.share / source.tokens.size * count_tokens(source.tokens, full) for source in sources]
    return most_common(np.sum(weighted, axis=0), size)


def init(setup: HeadSetup, target: LlamaParams, ids: np.ndarray | None) -> HeadState:
    """The state before the first step, from the recipe's seed. It shares no memory with the target's weights."""
    return _init(target, None if ids is None else jnp.asarray(ids, jnp.int32), setup=setup)


@partial(jax.jit, static_argnames=("setup",))
def _init(target: LlamaParams, ids: Int[Array, " Vd"] | None, *, setup: HeadSetup) -> HeadState:
    params: Any = init_params(setup.config, target, ids, jax.random.key(setup.recipe.seed))
    return HeadState(params, ids, setup.recipe.optimizer().init(params), jnp.zeros((), jnp.int32))


def init_params(config: EagleHead, target: LlamaParams, ids: Int[Array, " Vd"] | None, key: Array) -> EagleParams:
    """First weights in float32: random, except for norm and LM head, which are the target's where the widths agree."""
    keys = iter(jax.random.split(key, 7))
    width, captured = config.hidden_size, len(config.capture) * config.target_hidden_size
    fc, head = (
        model.init_matrix(next(keys), captured, width),
        model.init_matrix(next(keys), width, config.draft_vocab_size),
    )
    norm, embed = jnp.ones(width, jnp.float32), None
    if width == config.target_hidden_size:
        full = target.embed.T if target.lm_head is None else target.lm_head
        head = (full if ids is None else jnp.take(full, ids, axis=1, mode="clip")).astype(jnp.float32)
        norm = target.norm.astype(jnp.float32)
    else:
        embed = model.init_matrix(next(keys), config.vocab_size, width, model.EMBEDDING_SPREAD * config.vocab_size**0.5)
    return EagleParams(
        embed=embed,
        fc=fc,
        fc_bias=None,
        fc_norms=None,
        input_norm=None,
        hidden_norm=jnp.ones(width, jnp.float32),
        layers=(model.init_layer(config, keys, read=2 * width, branch=2**-0.5),),
        norm=norm,
        lm_head=head,
        ids=None,
    )


@partial(jax.jit, static_argnames=("setup",), donate_argnames=("state",))
def train_step(
    state: HeadState, target: LlamaParams, tokens: Int[Array, "B T"], mask: Float[Array, "B T"], *, setup: HeadSetup
) -> tuple[HeadState, Float[Array, ""], Float[Array, ""]]:
    """One step: the next state, the loss in nats, and the norm of the gradient. The state is donated.

    target: its weights in the setup's precision.
    mask: 1 where a token counts, 0 elsewhere, as in `ttt.figures`.
    """
    hidden, lesson = observe(setup, target, tokens, state.ids)

    def loss(params):
        cast = jax.tree.map(lambda leaf: leaf.astype(setup.dtype), params)
        found = ttt.figures(
            setup.config,
            setup.target,
            Params(target, cast),
            tokens,
            hidden,
            lesson,
            mask,
            setup.recipe.ttt_steps,
            # XLA on CPU orders the program so that this would cost time and save no memory.
            recompute=jax.default_backend() != "cpu",
        )
        return ttt.total(found.loss, setup.recipe.decay)

    params: Any = state.params
    value, gradient = jax.value_and_grad(loss)(params)
    # optax multiplies floats with its integer counter.
    with jax.numpy_dtype_promotion("standard"):
        updates, optimizer = setup.recipe.optimizer().update(gradient, state.optimizer, params)
    following: Any = optax.apply_updates(params, updates)
    return HeadState(following, state.ids, optimizer, state.step + 1), value, optax.tree.norm(gradient)


@partial(jax.jit, static_argnames=("setup",))
def measure(
    head: EagleParams, target: LlamaParams, tokens: Int[Array, "B T"], mask: Float[Array, "B T"], *, setup: HeadSetup
) -> ttt.Figures:
    """The figures of a batch. Both models' weights are in the setup's precision."""
    hidden, lesson = observe(setup, target, tokens, head.ids)
    steps = setup.recipe.ttt_steps
    return ttt.figures(setup.config, setup.target, Params(target, head), tokens, hidden, lesson, mask, steps)


def observe(
    setup: HeadSetup, target: LlamaParams, tokens: Int[Array, "B T"], ids: Int[Array, " Vd"] | None
) -> tuple[Float[Array, "B T C"], ttt.Lesson]:
    """What the head reads of the target at each token, and what it is to learn from it."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    attention = model.causal_attention(setup.dtype)
    out = setup.target.apply(target, tokens, positions, attention, None, capture=setup.config.capture)
    assert out.hidden is not None
    return out.hidden, ttt.teach(out.logits, ids)


def text_mask(tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The mask of a text of which all counts. Nothing follows its last token, from which padding would be learnt."""
    return jnp.ones(tokens.shape, jnp.float32).at[:, -1].set(0.0)
