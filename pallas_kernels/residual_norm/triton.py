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
from pallas_kernels.residual_norm import reference


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
    """The configuration for tokens of `width` elements."""
    tuning = platform.for_device_kind(TUNING)
    return Config(min(max(pl.next_power_of_2(width) // tuning.elements_per_warp, 1), tuning.max_warps))


def supported(*args: object, interpret: bool | None = None, **options: object) -> str | None:
    """None: the kernel can run all arguments of `residual_norm`."""
    return None


def residual_norm(
    x: jax.Array,
    branch: jax.Array,
    weight: jax.Array,
    following: jax.Array | None,
    factor: jax.Array | None,
    *,
    eps: float,
    exact: bool = False,
    config: Config | None = None,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Arguments as in `api.residual_norm` and `dispatch.Operation`; always exact."""
    config = config or default_config(width=x.shape[-1])
    return _residual_norm(eps, config, platform.resolve_interpret(interpret), x, branch, weight, following, factor)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _residual_norm(
    eps: float,
    config: Config,
    interpret: bool,
    x: jax.Array,
    branch: jax.Array,
    weight: jax.Array,
    following: jax.Array | None,
    factor: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    width = x.shape[-1]
    tokens = x.size // width
    row = pl.BlockSpec((None, width), lambda token: (token, 0))
    whole = pl.BlockSpec((width,), lambda token: (0,))
    out_shape = [jax.ShapeDtypeStruct((tokens, width), x.dtype)] * (1 if following is None else 2)
    results = call(
        functools.partial(_kernel, eps=eps),
        out_shape=out_shape,
        grid=(tokens,),
        in_specs=[
            row,
            row,
            whole,
            None if following is None else whole,
            None if factor is None else pl.BlockSpec((1,), lambda token: (0,)),
        ],
        out_specs=[row] * len(out_shape),
        num_warps=config.num_warps,
        interpret=interpret,
        name="residual_norm",
    )(
        x.reshape(tokens, width),
        branch.reshape(tokens, width),
        weight,
        following,
        None if factor is None else factor.reshape(1),
    )
    stream, *normed = (result.reshape(x.shape) for result in results)
    return stream, normed[0] if normed else None


def _forward(eps, config, interpret, *operands):
    return _residual_norm(eps, config, interpret, *operands), operands


def _backward(eps, config, interpret, operands, gradients):
    """The gradients of the reference: launch overhead does not matter in training."""
    return jax.vjp(functools.partial(reference.residual_norm, eps=eps), *operands)[1](gradients)


_residual_norm.defvjp(_forward, _backward)


def _kernel(
    x_ref: Ref,  # [E]
    branch_ref: Ref,  # [E]
    weight_ref: Ref,  # [E]
    following_ref: Ref | None,  # [E]
    factor_ref: Ref | None,  # [1]
    *out_refs: Ref,  # [E]; and [E], if there is a following norm
    eps: float,
) -> None:
    (width,) = x_ref.shape
    place = jnp.arange(pl.next_power_of_2(width))
    inside = place < width

    def load(ref):
        return pltriton.load(ref.at[place], mask=inside, other=0)

    def norm(values, ref):
        wide = values.astype(jnp.float32)
        scaled = wide * lax.rsqrt((wide * wide).sum() / width + eps)
        return (load(ref).astype(jnp.float32) * scaled).astype(values.dtype)

    # Rounds where the reference rounds.
    stream = load(x_ref) + norm(load(branch_ref), weight_ref)
    if factor_ref is not None:
        stream = stream * factor_ref[0].astype(stream.dtype)
    pltriton.store(out_refs[0].at[place], stream, mask=inside)
    if following_ref is not None:
        pltriton.store(out_refs[1].at[place], norm(stream, following_ref), mask=inside)
