"""A corpus for `Suffix`, in place of a model's draft."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jspec.core.checks import check_int
from jspec.core.types import Params
from jspec.drafters.suffix import Corpus
from jspec.generation.run import encode_prompts
from jspec.loading.model import Model

_STEP = 1024


def with_corpus(
    model: Model, texts: str | Sequence[str] | Sequence[Sequence[int]], *, size: int | None = None
) -> Model:
    """The model with a corpus in place of its draft, for `jspec.Suffix`: earlier outputs, files or rollouts.

    Each round searches all of it for each sequence, which costs time if it is large. Of equally long matches the last
    ones vote, so put the most useful texts last.

    Args:
      texts: texts, or token ids, in the forms of `jspec.generate`'s prompts.
      size: tokens of the array that holds them, one more for each text included. None: as many as needed, rounded up to
        a multiple of 1024. A corpus of the same size compiles nothing: pass the new model to `jspec.generate`, or its
        `params` to `Engine.update`.

    Raises:
      ValueError, TypeError: not texts, ids outside the vocabulary, or more tokens than `size`.
    """
    _, ids = encode_prompts(model, texts, "texts")
    # One separator per text.
    needed = sum(map(len, ids)) + len(ids)
    if size is None:
        size = -(-needed // _STEP) * _STEP
    elif check_int("size", size, least=1, most=2**31 - 1) < needed:
        raise ValueError(f"size={size}: must be at least {needed}, the tokens of the texts and one more for each text")
    tokens = np.full(size, -1, np.int32)
    tokens[size - needed :] = np.concatenate([np.append(np.asarray(text, np.int32), np.int32(-1)) for text in ids])
    return dataclasses.replace(model, params=Params(model.params.target, Corpus(jax.device_put(tokens))), draft=None)
