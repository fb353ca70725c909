"""A language model of any function of tokens."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Never

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from jspec.cache.tokens import TokenCache, put_tokens
from jspec.core.types import ForwardOutput
from jspec.models.decoder import Decoder
from jspec.models.layers import ForwardBatch
from jspec.models.sizes import tree_bytes

Function = Callable[[Any, Int[Array, "B T"]], ArrayLike]
"""f(params, tokens [B, T]) -> logits [B, T, V] of the token after each."""
_ROUNDING_FLOAT32, _ROUNDING = 1e-4, 1e-2
"""What counts as rounding in logits of at least 32 bits, and of less, relative to the largest."""


def _refusal(reason: str) -> Callable[..., Never]:
    """A method that raises ValueError, in place of one that only models with layers have."""

    def refuse(self: "FunctionModel", *args: object, **options: object) -> Never:
        raise ValueError(f"{describe(self.function)}: {reason}")

    return refuse


def describe(function: Function) -> str:
    """The name of a function."""
    return getattr(function, "__name__", type(function).__name__)


@dataclasses.dataclass(frozen=True)
class FunctionModel(Decoder):
    """A model of a function of all tokens so far, without keys and values.

    Each forward calls the function with all columns of the sequences. For the nodes of a tree it is called once per
    node, with the path to the node as the end of the text.

    function: f(params, tokens [B, T]) -> logits [B, T, V]. Causal: logits of a token do not depend on later ones.
      Two models with equal functions share compiled programs.
    vocab_size: V.
    max_length: largest T.
    """

    function: Function
    vocab_size: int
    max_length: int
    hidden_size = intermediate_size = num_heads = 0
    num_layers = 1
    rms_norm_eps = 0.0

    @property
    def refuses_embeds(self) -> str:
        """A function has no embeddings."""
        return "is a function of token ids"

    @property
    def attention_layers(self) -> range:
        """None."""
        return range(0)

    def init_cache(self, params: PyTree, batch: int, capacity: int, page_size: int) -> TokenCache:
        """An empty cache."""
        return self.empty_cache(batch, capacity, page_size, jnp.int32)

    def empty_cache(self, batch: int, capacity: int, page_size: int, dtype: DTypeLike) -> TokenCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens."""
        return TokenCache(jnp.zeros((batch, min(capacity, self.max_length)), jnp.int32))

    def apply(self, params: PyTree, batch: ForwardBatch, *, capture_layers: tuple[int, ...] = ()) -> ForwardOutput:
        """As `Decoder.apply`. Positions are not read: a token's position is its column in the function's argument."""
        if capture_layers:
            raise ValueError(f"capture_layers={capture_layers}: a function of tokens has no hidden states to capture")
        # The rows of a cache are the tokens themselves.
        rows = batch.tokens if batch.earlier is None else jnp.concatenate([batch.earlier, batch.tokens], axis=1)
        begin = jnp.zeros(len(rows), jnp.int32) if batch.start is None else batch.start
        if batch.mask is None:
            logits = self._along_chain(params, batch, rows, begin)
        else:
            logits = self._along_paths(params, batch, batch.mask, rows, begin)
        return ForwardOutput(logits, rows, None)

    def _along_chain(
        self, params: PyTree, batch: ForwardBatch, rows: Int[Array, "B R"], begin: Int[Array, " B"]
    ) -> Float[Array, "B M V"]:
        """Logits of the batch's tokens, each the continuation of the one before, or of the selected one."""
        count, select = batch.tokens.shape[1], batch.select
        column = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
        logits = self._call(params, put_tokens(batch.cache.tokens, begin[:, None] + column, rows))
        column_index = column[:, -count:] if select is None else (rows.shape[1] - count + select)[:, None]
        return jnp.take_along_axis(logits, (begin[:, None] + column_index)[:, :, None], axis=1, mode="clip")

    def _along_paths(
        self,
        params: PyTree,
        batch: ForwardBatch,
        mask: Bool[Array, "#B N R"],
        rows: Int[Array, "B R"],
        begin: Int[Array, " B"],
    ) -> Float[Array, "B M V"]:
        """Logits of each node, at the end of its own path."""
        mask, committed = jnp.broadcast_to(mask, (rows.shape[0], *mask.shape[1:])), batch.cache.tokens
        if batch.select is not None:
            mask = jnp.take_along_axis(mask, batch.select[:, None, None], axis=1)

        def at_node(seen: Bool[Array, "B R"]) -> Float[Array, "B V"]:
            # Parents come before their children, so the rows are in the order of the path.
            depth = jnp.cumsum(seen.astype(jnp.int32), axis=1) - 1
            at = jnp.where(seen, begin[:, None] + depth, committed.shape[1])
            logits = self._call(params, put_tokens(committed, at, rows))
            last = begin + depth[:, -1]
            return jnp.take_along_axis(logits, last[:, None, None], axis=1, mode="clip")[:, 0]

        # One node after the other: the logits of all columns are the largest array.
        return jnp.moveaxis(lax.map(at_node, jnp.moveaxis(mask, 1, 0)), 0, 1)

    def _call(self, params: PyTree, tokens: Int[Array, "B C"]) -> Float[Array, "B C V"]:
        return jnp.asarray(self.function(params, tokens)).astype(jnp.float32)

    def logit_bytes(self, batch: int, capacity: int) -> int:
        """Bytes of the logits of all columns, in float32."""
        return 4 * batch * min(capacity, self.max_length) * self.vocab_size

    def outline(self) -> str:
        """What it is, in a few words."""
        return "a function of tokens"

    # What a draft is asked for

    def forward_bytes(self, params: PyTree, tokens: int = 1) -> int:
        """Bytes of the weights."""
        return tree_bytes(params)

    def summary(self) -> str:
        """The draft in a few words."""
        return f"draft {describe(self.function)}"

    # What only models with layers have

    param_shapes: ClassVar[Any] = _refusal("the shapes of its weights are not known")
    embed: ClassVar[Any] = _refusal("a function of tokens has no embedding")
    unembed: ClassVar[Any] = _refusal("a function of tokens has no LM head")
    layer_keys: ClassVar[Any] = _refusal("a function of tokens has no keys")
    layer_rotation = layer_scale = layer_windows = layer_keys


def is_causal(function: Function, params: PyTree, vocab_size: int, length: int) -> bool:
    """Whether no logit depends on later tokens, up to rounding; ValueError if one is NaN or +inf."""
    index = jnp.arange(length, dtype=jnp.int32)
    changed = index[None] >= jnp.where(index == 0, length, index)[:, None]
    tokens = jnp.where(changed, index[None] + 1, index[None]) % vocab_size
    # Row 0 is the text itself; in row i all tokens from position i on are others.
    result = jax.jit(function)(params, tokens)
    logits = result.astype(jnp.float32)
    # NaN and +inf cannot be compared; -inf may be a mask.
    if not (logits < jnp.inf).all():
        kind = "NaN" if jnp.isnan(logits).any() else "+inf"
        raise ValueError(f"function: {describe(function)} returns logits that are {kind}; its weights may be wrong")
    # Compare the logits before the change, up to rounding.
    reference = jnp.broadcast_to(logits[:1], logits.shape)
    same = (reference == logits) | changed[:, :, None]
    finite = jnp.where(jnp.isfinite(logits), jnp.abs(logits), 0.0)
    tolerance = _ROUNDING if jnp.finfo(result.dtype).bits < 32 else _ROUNDING_FLOAT32
    return bool((jnp.where(same, 0.0, jnp.abs(reference - logits)) <= tolerance * (1 + finite.max())).all())
