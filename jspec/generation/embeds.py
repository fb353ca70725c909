"""Prompts with embeddings, such as those of an image, in the places of a placeholder."""

import hashlib
from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Float, PyTree, Shaped

from jspec.core.checks import check_int, shorten
from jspec.core.embeds import Embeds
from jspec.core.types import Target
from jspec.models.decoder import Decoder


class PromptEmbeds(Sequence[int]):
    """A prompt in which embeddings take the places of a placeholder token. It reads as the sequence of its token ids.

    The target reads them as the input of its first layer, as `model.target.embed` would make it. Drafters and the
    repetition penalty read the placeholder, so the output is the target's own for every drafter. Positions are those of
    tokens.

    embeds: [n, E], one row for each placeholder, in order; cast to the precision of the weights.
    tokens: ids of the whole prompt; None: it consists of the embeddings alone.
    placeholder: the id whose places they take, such as that of `<|image_pad|>`; must be in the vocabulary.

    Raises:
      ValueError, TypeError: an array of another form, infinite values or NaN, or another number of placeholders.
    """

    def __init__(self, embeds: ArrayLike, tokens: Sequence[int] | None = None, *, placeholder: int = 0):
        self.placeholder = check_int("placeholder", placeholder, least=0)
        self.embeds = _check_rows(embeds)
        count = len(self.embeds)
        self.tokens = [self.placeholder] * count if tokens is None else [int(token) for token in tokens]
        self.places = np.flatnonzero(np.array(self.tokens) == self.placeholder)
        if len(self.places) != count:
            raise ValueError(
                f"placeholder={self.placeholder}: occurs {len(self.places)} times in tokens; must occur {count} times, "
                "once for each row of the embeddings"
            )
        digest = hashlib.sha256(repr((self.embeds.dtype, self.embeds.shape, self.places.tolist())).encode())
        digest.update(self.embeds.tobytes())
        self.digest = digest.hexdigest()
        """A hash of the embeddings and their places: prompts share cached pages only if it is equal."""

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self.tokens[index]

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"PromptEmbeds({len(self.embeds)} of {len(self)} tokens, {self.digest[:16]})"

    def check_fits(self, name: str, target: Target) -> None:
        """Checks it against the target: ValueError for another width, or without support for embeddings."""
        refusal = target.refuses_embeds if isinstance(target, Decoder) else "has a forward of its own"
        if refusal is not None:
            raise ValueError(
                f"{name}: holds embeddings, but the model {type(target).__name__} {refusal}; use token ids"
            )
        if self.embeds.shape[1] != target.hidden_size:
            shape, width = self.embeds.shape, target.hidden_size
            raise ValueError(f"{name}: embeddings of shape {shape}; must be [n, {width}], as wide as the model")

    def columns(self, begin: int, count: int) -> tuple[Float[np.ndarray, "m E"], Shaped[np.ndarray, " m"]]:
        """The embeddings among `count` tokens from `begin` on, and their places there."""
        inside = (self.places >= begin) & (self.places < begin + count)
        return self.embeds[inside], self.places[inside] - begin


def embeds_of(
    prompts: Sequence[Sequence[int]],
    begin: Sequence[int],
    count: Sequence[int],
    shape: tuple[int, int, int],
    dtype: Any,
) -> Embeds:
    """The embeddings of the next `count` tokens of each prompt, as NumPy arrays of this shape [B, T, E]."""
    rows, mask = np.zeros(shape, dtype), np.zeros(shape[:2], bool)
    for row, (prompt, first, size) in enumerate(zip(prompts, begin, count, strict=True)):
        if isinstance(prompt, PromptEmbeds):
            values, places = prompt.columns(first, size)
            rows[row, places], mask[row, places] = values.astype(dtype), True
    return Embeds(rows, mask)  # pyright: ignore[reportArgumentType]  # NumPy arrays


def embeds_dtype(target: Target, params: PyTree) -> Any:
    """The precision of the stream before the first layer."""
    return jax.eval_shape(target.embed, params, jax.ShapeDtypeStruct((1, 1), np.int32)).dtype


def _check_rows(embeds: object) -> Float[np.ndarray, "n E"]:
    if isinstance(embeds, Tracer):
        raise TypeError("embeds is traced: prompts must be known")
    rows = np.asarray(embeds)
    is_float = jnp.issubdtype(rows.dtype, jnp.floating)
    if rows.ndim != 2 or not rows.size or not is_float:
        raise ValueError(f"embeds={shorten(f'{rows.dtype}{list(rows.shape)}')}: must be floats of shape [n, E], n >= 1")
    if not np.isfinite(rows.astype(np.float32)).all():
        raise ValueError("embeds: has infinite values or NaN; must be finite in float32")
    return rows
