"""A sum and its norm as one Triton kernel: a program owns a token."""

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


def supported(*args: object, interpret: bool | None = None, **options: object) -> str | None:
    """None: the kernel can run all arguments of `add_norm`."""
    return None


def add_norm(
    x: jax.Array,
    branch: jax.Array | None,
    weight: jax.Array | None,
    *,
    eps: float,
    wide: bool = False,
    config: Config | None = None,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `api.add_norm` and `dispatch.Operation`."""
    width = x.shape[-1]
    tokens = x.size // width
    config = config or default_config(width=width)
    row = pl.BlockSpec((None, width), lambda token: (token, 0))
    added = row
    if branch is not None and branch.ndim > x.ndim:
        added = pl.BlockSpec((len(branch), None, width), lambda token: (0, token, 0))
        branch = branch.reshape(-1, tokens, width)
    elif branch is not None:
        branch = branch.reshape(tokens, width)
    shape = jax.ShapeDtypeStruct((tokens, width), x.dtype)
    results = call(
        functools.partial(_kernel, eps=eps, wide=wide),
        out_shape=[shape] * (1 if branch is None else 2),
        grid=(tokens,),
        in_specs=[
            row,
            None if branch is None else added,
            None if weight is None else pl.BlockSpec((width,), lambda token: (0,)),
        ],
        out_specs=[row] * (1 if branch is None else 2),
        num_warps=config.num_warps,
        interpret=platform.resolve_interpret(interpret),
        name="add_norm",
    )(x.reshape(tokens, width), branch, weight)
    *stream, normed = (result.reshape(x.shape) for result in results)
    return stream[0] if stream else x, normed


def _kernel(
    x_ref: Ref,  # [E]
    branch_ref: Ref | None,  # [E], or [P, E] of parts
    weight_ref: Ref | None,  # [E]
    *out_refs: Ref,  # [E], the sum, if there is a branch; and [E], its norm
    eps: float,
    wide: bool,
) -> None:
    (width,) = x_ref.shape
    place = jnp.arange(pl.next_power_of_2(width))
    inside = place < width

    def load(ref, *lead):
        return pltriton.load(ref.at[*lead, place], mask=inside, other=0)

    stream = load(x_ref)
    # Read before the sum over the row, which it would wait for otherwise.
    weight = None if weight_ref is None else load(weight_ref)
    if branch_ref is not None:
        if len(branch_ref.shape) == 1:
            branch = load(branch_ref)
        else:
            branch = add_parts([load(branch_ref, index) for index in range(branch_ref.shape[0])], stream.dtype)
        stream = stream + branch
        pltriton.store(out_refs[0].at[place], stream, mask=inside)
    values = stream.astype(jnp.float32)
    scaled = values * lax.rsqrt((values * values).sum() / width + eps)
    if weight is None:
        normed = scaled.astype(stream.dtype)
    elif wide:
        normed = (weight.astype(jnp.float32) * scaled).astype(stream.dtype)
    else:
        normed = weight * scaled.astype(stream.dtype)
    pltriton.store(out_refs[-1].at[place], normed, mask=inside)
