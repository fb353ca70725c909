"""A target and its texts, read in different ways and compared, for `check_target`."""

import dataclasses
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jspec.core.commit import commit_rows
from jspec.core.types import DraftTree, ForwardOutput, Target
from jspec.loading.model import Model

LENGTHS = (20, 7, 12)
"""Tokens of each text; shorter texts are padded on the right with other tokens."""
WIDTH, CHUNK, NODES, DEPTH = max(LENGTHS), 5, 7, 3
"""Columns of all texts, columns of a chunk, nodes and depth of a tree."""
CAPACITY, PAGE_SIZE = 32, 4
"""Capacity of a cache in tokens, and rows of its pages."""


@partial(jax.jit, static_argnames=("target", "capture"))
def _read(
    params: PyTree,
    draft_tree: DraftTree,
    cache: Any,
    start: Int[Array, " B"] | None,
    path: Int[Array, "B A"] | None,
    length: Int[Array, " B"],
    select: Int[Array, " B"] | None = None,
    *,
    target: Target,
    capture: tuple[int, ...] = (),
) -> tuple[ForwardOutput, Any]:
    """Run a forward; return its output, and the cache with the first `length[b]` rows along `path`."""
    out = target.forward(params, draft_tree, cache, start, capture_layers=capture, select=select)
    begin = jnp.zeros_like(length) if start is None else start
    return out, commit_rows(cache, out.rows, begin, path, length, after=out.logits)


@dataclasses.dataclass
class TargetCase:
    """A target and its texts. differences: the largest of each comparison, relative to `scale`."""

    model: Model
    seed: int
    tolerance: float = 1e-4
    differences: list[float] = dataclasses.field(default_factory=lambda: [0.0])

    @property
    def target(self) -> Any:
        """The target of the model."""
        return self.model.target

    @cached_property
    def text(self) -> Int[np.ndarray, "B T"]:
        """Random token ids."""
        return self.random((len(LENGTHS), WIDTH), 0)

    @cached_property
    def whole(self) -> Float[np.ndarray, "B T V"]:
        """The logits of the texts, read at once."""
        return self.read_whole(self.text)

    @cached_property
    def scale(self) -> float:
        """1 plus the largest absolute value of a finite logit; differences are divided by it."""
        return 1 + float(np.abs(np.where(np.isfinite(self.whole), self.whole, 0)).max())

    def random(self, shape: tuple[int, ...], *key: int) -> Int[np.ndarray, "*shape"]:
        """Random tokens, equal for equal seeds and keys."""
        return np.random.default_rng([self.seed, *key]).integers(0, self.target.vocab_size, shape).astype(np.int32)

    def empty(self, page_size: int = PAGE_SIZE, batch: int = len(LENGTHS)) -> Any:
        """An empty cache."""
        return self.target.init_cache(self.model.params.target, batch, CAPACITY, page_size)

    def read(
        self,
        tokens: Any,
        cache: Any,
        start: Any,
        length: Any,
        *,
        parents: Any = None,
        depth: int | None = None,
        path: Any = None,
        **options: Any,
    ) -> tuple[ForwardOutput, Any]:
        """As `_read`; tokens are a chain, or a tree if there are `parents`."""
        drafted = DraftTree(jnp.asarray(tokens), None if parents is None else jnp.asarray(parents), depth)
        begin, count = None if start is None else jnp.asarray(start, jnp.int32), jnp.asarray(length, jnp.int32)
        path = None if path is None else jnp.asarray(path)
        return _read(self.model.params.target, drafted, cache, begin, path, count, target=self.target, **options)

    def read_whole(self, text: Int[np.ndarray, "B T"]) -> Float[np.ndarray, "B T V"]:
        """The logits of texts, without a cache."""
        batch = len(text)
        return np.asarray(self.read(text, self.empty(batch=batch), None, np.zeros(batch))[0].logits)

    def compare(
        self,
        got: Any,
        expected: Float[np.ndarray, "B n V"],
        how: str,
        *,
        first: Any = 0,
        count: Any = None,
        node: str = "",
        what: str = "logits",
    ) -> None:
        """Compare logits [B, n, V] of n tokens of each text with the expected ones.

        how: how the texts were read, for the message.
        first: position of the first token of each text.
        count: number of tokens compared in each text, the first ones; None: all.

        Raises:
          AssertionError: logits differ by more than the tolerance; the message names the first such token.
        """
        got = np.asarray(got).astype(np.float64)
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
        with np.errstate(invalid="ignore"):
            apart = np.where(same, 0, np.abs(got - expected)) / self.scale
        apart = np.where(np.isnan(apart), np.inf, apart)
        batch, tokens, _ = apart.shape
        if count is not None:
            apart[np.arange(tokens)[None] >= np.asarray(count)[:, None]] = 0
        self.differences.append(float(apart.max(initial=0)))
        for i, t in np.argwhere(apart.max(2, initial=0) > self.tolerance):
            worst, position = int(apart[i, t].argmax()), np.broadcast_to(first, batch)[i] + t
            raise AssertionError(
                f"sequence {i}, {node}position {position}, {how}: {what} differ from those of the text read at once, "
                f"most at index {worst}: {got[i, t, worst]:.6g} instead of {expected[i, t, worst]:.6g}"
            )

    def whole_at(self, position: Int[np.ndarray, "B n"]) -> Float[np.ndarray, "B n V"]:
        """The logits after these positions of the texts, read at once."""
        return np.take_along_axis(self.whole, position[:, :, None], axis=1)
