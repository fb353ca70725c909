"""What DFlash2 adds to a block draft (vLLM #52816): convolutions along the block, and a selector of candidates."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.struct import leaf, struct
from jspec.models import layers
from jspec.models.weights import linear, plain


@struct
class ConvParams:
    """Weights of the convolutions before and after a branch, with J taps; X = 2 * J * groups of channels."""

    base: Float[Array, "2 J E"]
    """The part of the kernels that all rows share."""
    dynamic: Float[Array, "E X"] = leaf(linear=True)
    """From a row's input to the other part, for each side, tap and group."""


@struct
class LayerConvs:
    """The convolutions of a layer, around its attention and its MLP."""

    attention: ConvParams
    mlp: ConvParams


@struct
class SelectorParams:
    """Weights of a selector of rank R."""

    previous: Float[Array, "V R"]
    """Embedding of the token before a candidate."""
    candidate: Float[Array, "V R"]
    gate: Float[Array, "E R"] = leaf(linear=True)


def conv_weights(prefix: str, width: int, taps: int, group: int) -> LayerConvs:
    """The table of a layer's convolutions. prefix: of the names of its tensors; group: channels of a group."""

    def weights(name: str) -> ConvParams:
        outs = {f"{prefix}{name}.kernel_projection.weight": 2 * taps * (width // group)}
        return ConvParams(plain(f"{prefix}{name}.base_kernel", 2, taps, width), linear(width, outs))

    return LayerConvs(weights("attention_conv"), weights("mlp_conv"))


def selector_weights(vocab_size: int, width: int, rank: int) -> SelectorParams:
    """The table of a selector."""
    prefix = "candidate_selector."
    return SelectorParams(
        previous=plain(prefix + "predecessor_codebook", vocab_size, rank),
        candidate=plain(prefix + "successor_codebook", vocab_size, rank),
        gate=linear(width, {prefix + "hidden_projection.weight": rank}),
    )


def convolutions(
    params: ConvParams, normed: Float[Array, "B N E"], size: int
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """The convolutions before and after a branch, functions of its rows; both have kernels from its input `normed`.

    size: rows of a block, of which N is a multiple. A row's kernel reaches back within its block alone.
    """
    _, taps, width = params.base.shape
    dynamic = layers.linear(normed, params.dynamic)
    groups = dynamic.shape[-1] // (2 * taps)
    kernels = params.base[None, None] + jnp.repeat(dynamic.reshape(-1, size, 2, taps, groups), width // groups, axis=-1)
    return partial(_convolve, kernels[:, :, 0]), partial(_convolve, kernels[:, :, 1])


def _convolve(kernels: Float[Array, "b n J E"], x: Float[Array, "B N E"]) -> Float[Array, "B N E"]:
    """Each row of a block, and those before it by tap, times the kernel of the row."""
    size, taps = kernels.shape[1:3]
    padded = jnp.pad(x.reshape(-1, size, x.shape[-1]), ((0, 0), (taps - 1, 0), (0, 0)))
    out = kernels[:, :, 0] * padded[:, taps - 1 :]
    for tap in range(1, taps):
        out = out + kernels[:, :, tap] * padded[:, taps - 1 - tap : taps - 1 - tap + size]
    return out.reshape(x.shape)


def select(
    params: SelectorParams,
    previous: Int[Array, "B M"],
    hidden: Float[Array, "B _ E"],
    logits: Float[Array, "B _ k"],
    ids: Int[Array, "B _ k"],
) -> Float[Array, "B M k"]:
    """Logits of k candidates after each of M paths: their own, and how well they follow a path's last token.

    previous: the last token of each path.
    hidden, logits, ids: of the predicting row and its candidates; the same for all paths, or of each.
    """
    before = jnp.take(params.previous, previous, axis=0, mode="clip") * layers.linear(hidden, params.gate)
    after = jnp.take(params.candidate, ids, axis=0, mode="clip").astype(jnp.float32)
    return logits + (before.astype(jnp.float32)[:, :, None] * after).sum(-1)
