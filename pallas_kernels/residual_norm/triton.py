"""The residual stream and its norm as one Triton kernel: XLA makes one per sum and one per norm."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform
from pallas_kernels._triton import call
from pallas_kernels._types import Ref
from pallas_kernels.parts import add_parts

Norms = tuple[jax.Array | None, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided: a program owns a token."""

    num_warps: int


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of `default_config` for a kind of device."""

    elements_per_warp: int
    max_warps: int


TUNING = {"NVIDIA H100": Tuning(elements_per_warp=512, max_warps=16)}
"""By device kind; the first entry is the default."""


def default_config(*, width: int) -> Config:
    """The configuration for tokens of `width` elements; it does not depend on the number of tokens."""
    tuning = platform.for_device_kind(TUNING)
    return Config(min(max(pl.next_power_of_2(width) // tuning.elements_per_warp, 1), tuning.max_warps))


def residual_norm(
    x: jax.Array,
    branch: jax.Array | None,
    norms: Norms,
    factor: jax.Array | None,
    *,
    eps: float,
    wide: bool = False,
    exact: bool = False,
    config: Config | None = None,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Arguments as in `api.residual_norm` and `dispatch.Operation`; always exact."""
    width = x.shape[-1]
    config = config or default_config(width=width)
    tokens = x.size // width
    # The part of each array for a token.
    row, weight = pl.BlockSpec((None, width), lambda token: (token, 0)), pl.BlockSpec((width,), lambda token: (0,))
    added = row
    if branch is not None and branch.ndim > x.ndim:
        added = pl.BlockSpec((len(branch), None, width), lambda token: (0, token, 0))
        branch = branch.reshape(-1, tokens, width)
    elif branch is not None:
        branch = branch.reshape(tokens, width)
    results = (branch is not None) + (branch is None or norms[1] is not None)
    out = call(
        functools.partial(_kernel, eps=eps, wide=wide),
        out_shape=[jax.ShapeDtypeStruct((tokens, width), x.dtype)] * results,
        grid=(tokens,),
        in_specs=[
            row,
            None if branch is None else added,
            *(None if norm is None else weight for norm in norms),
            None if factor is None else pl.BlockSpec((1,), lambda token: (0,)),
        ],
        out_specs=[row] * results,
        num_warps=config.num_warps,
        interpret=platform.resolve_interpret(interpret),
        name="residual_norm",
    )(x.reshape(tokens, width), branch, *norms, None if factor is None else factor.reshape(1))
    out = [result.reshape(x.shape) for result in out]
    stream = x if branch is None else out.pop(0)
    return stream, out[0] if out else None


def _kernel(
    x_ref: Ref,  # [E]
    branch_ref: Ref | None,  # [E], or [P, E] of parts
    branch_norm_ref: Ref | None,  # [E]
    norm_ref: Ref | None,  # [E]
    factor_ref: Ref | None,  # [1]
    *out_refs: Ref,  # [E], the stream, if there is a branch; and [E], its norm, if it is computed
    eps: float,
    wide: bool,
) -> None:
    (width,) = x_ref.shape
    place = jnp.arange(pl.next_power_of_2(width))
    inside = place < width

    def load(ref, *lead):
        return pltriton.load(ref.at[*lead, place], mask=inside, other=0)

    def norm(stream, weight):
        values = stream.astype(jnp.float32)
        scaled = values * lax.rsqrt((values * values).sum() / width + eps)
        if weight is None:
            return scaled.astype(stream.dtype)
        if wide:
            return (weight.astype(jnp.float32) * scaled).astype(stream.dtype)
        return weight * scaled.astype(stream.dtype)

    # Rounds where the reference rounds. Weights are read before the sums over the row, which they would wait for.
    stream = load(x_ref)
    branch_weight, weight = (None if ref is None else load(ref) for ref in (branch_norm_ref, norm_ref))
    if branch_ref is not None:
        if len(branch_ref.shape) == 1:
            branch = load(branch_ref)
        else:
            branch = add_parts([load(branch_ref, index) for index in range(branch_ref.shape[0])], stream.dtype)
        stream = stream + (branch if branch_weight is None else norm(branch, branch_weight))
        if factor_ref is not None:
            stream = stream * factor_ref[0].astype(stream.dtype)
        pltriton.store(out_refs[0].at[place], stream, mask=inside)
    if len(out_refs) > (branch_ref is not None):
        pltriton.store(out_refs[-1].at[place], norm(stream, weight), mask=inside)
