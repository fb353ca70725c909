"""Estimates the cost of a round with a drafter from its bytes and operations."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jspec.core.types import DecodeState, Drafter, Params, Target
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft
from jspec.models.sizes import count_parameters, tree_bytes
from pallas_kernels import platform

OPERATIONS_PER_BYTE = {"cpu": 16.0}
"""Operations of matrix products in the time of reading one byte of memory, by platform; 230 on the others, as on an
H100: 700e12 per second beside 3e12 bytes per second."""


def estimate(
    params: Params, target: Target, drafters: Sequence[Drafter], states: Sequence[DecodeState], depth: int
) -> list[float]:
    """Estimates the cost of a round with each drafter, in bytes: weights read, and operations on them.

    A round has one forward of the target over the drafter's tree, its forwards of the draft, and the draft's extension
    by up to `depth` + 1 tokens for any drafter. Ignores keys and values, about the same for all drafters, and the
    overhead of small forwards. Measured costs are better.

    params: arrays, or shapes of them.
    states: the state of each drafter.
    """
    model = next((config for drafter in drafters if (config := _model(drafter)) is not None), None)
    extension = 0.0
    if model is not None:
        extension = _draft_bytes(params, model.extend_bytes(params), states[0].length.shape[0] * (depth + 1))
    rounds = zip(drafters, states, strict=True)
    return [extension + _round(params, target, drafter, s) for drafter, s in rounds]


def _round(params: Params, target: Target, drafter: Drafter, s: DecodeState) -> float:
    """The cost of drafting and verifying."""
    batch = s.length.shape[0]
    nodes = jax.eval_shape(drafter.draft, params, s)[0].tokens.shape[1]
    if isinstance(target, Decoder):
        read = target.forward_bytes(params.target, batch * nodes)
        operations = 2 * batch * nodes * target.forward_bytes(params.target) * _elements_per_byte(params.target)
    else:
        read = tree_bytes(params.target)
        operations = 2 * batch * nodes * count_parameters(params.target)
    # Forwards of the draft.
    total, model = _bytes(read, operations), _model(drafter)
    if drafter.depth and model is not None:
        steps = 1 if model.at_once else drafter.depth - bool(model.extend_bytes(params))
        tokens = batch * (nodes if model.at_once else getattr(drafter, "width", 1))
        total += steps * _draft_bytes(params, model.step_bytes(params), tokens)
    return total


def _draft_bytes(params: Params, read: int, tokens: int) -> float:
    """The cost of a forward of the draft with this number of bytes read."""
    return _bytes(read, 2 * tokens * read * _elements_per_byte(params.draft))


def _bytes(read: float, operations: float) -> float:
    return read + operations / OPERATIONS_PER_BYTE.get(platform.platform(), 230.0)


def _elements_per_byte(weights: object) -> float:
    return count_parameters(weights) / max(tree_bytes(weights), 1)


def _model(drafter: Drafter) -> Draft | None:
    """The draft model's configuration; None if there is none, or if it has no sizes."""
    model: Any = getattr(drafter, "model", None)
    return model if hasattr(model, "step_bytes") else None


def interpolate(table: Sequence[tuple[int, Sequence[float]]], batch: int) -> list[float]:
    """Interpolates costs at a batch linearly; constant beyond the ends of the table."""
    batches = np.array([size for size, _ in table], float)
    columns = np.array([row for _, row in table], float)
    return [float(np.interp(batch, batches, column)) for column in columns.T]
