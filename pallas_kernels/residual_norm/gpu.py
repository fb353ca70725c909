"""The residual stream behind a branch on a GPU, in one kernel: XLA makes one of each sum and one of each norm."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform
from pallas_kernels.residual_norm import reference

NUMBERS_A_WARP = 512
"""Of a token's: more of them are shared by more warps."""


def residual_norm(x, branch, weight, following, factor, *, eps):
    """Arguments as in `api.residual_norm`."""
    return _residual_norm(eps, x, branch, weight, following, factor)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _residual_norm(eps, x, branch, weight, following, factor):
    width = x.shape[-1]
    tokens = x.size // width
    row = pl.BlockSpec((None, width), lambda token: (token, 0))
    whole = pl.BlockSpec((width,), lambda token: (0,))
    out = [jax.ShapeDtypeStruct((tokens, width), x.dtype)] * (1 if following is None else 2)
    made = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        out_shape=out,
        grid=(tokens,),
        in_specs=[
            row,
            row,
            whole,
            None if following is None else whole,
            None if factor is None else pl.BlockSpec((1,), lambda token: (0,)),
        ],
        out_specs=[row] * len(out),
        compiler_params=pltriton.CompilerParams(
            num_warps=min(max(pl.next_power_of_2(width) // NUMBERS_A_WARP, 1), 16), num_stages=1
        ),
        interpret=platform.interpret(),
        name="residual_norm",
    )(
        x.reshape(tokens, width),
        branch.reshape(tokens, width),
        weight,
        following,
        None if factor is None else factor.reshape(1),
    )
    stream, *normed = (each.reshape(x.shape) for each in made)
    return stream, normed[0] if normed else None


def _forward(eps, *operands):
    return _residual_norm(eps, *operands), operands


def _backward(eps, operands, gradients):
    """The reference's: a training step is not short of kernels to start."""
    return jax.vjp(functools.partial(reference.residual_norm, eps=eps), *operands)[1](gradients)


_residual_norm.defvjp(_forward, _backward)


def _kernel(
    x_ref,  # [E]
    branch_ref,  # [E]
    weight_ref,  # [E]
    following_ref,  # [E] or None
    factor_ref,  # [1] or None
    *out_refs,  # [E], and where there is a following norm, [E]
    eps,
):
    (width,) = x_ref.shape
    place = jnp.arange(pl.next_power_of_2(width))
    inside = place < width

    def load(ref):
        return pltriton.load(ref.at[place], mask=inside, other=0)

    def norm(values, ref):
        wide = values.astype(jnp.float32)
        scaled = wide * lax.rsqrt((wide * wide).sum() / width + eps)
        return (load(ref).astype(jnp.float32) * scaled).astype(values.dtype)

    # Rounded where the reference rounds.
    stream = load(x_ref) + norm(load(branch_ref), weight_ref)
    if factor_ref is not None:
        stream = stream * factor_ref[0].astype(stream.dtype)
    pltriton.store(out_refs[0].at[place], stream, mask=inside)
    if following_ref is not None:
        pltriton.store(out_refs[1].at[place], norm(stream, following_ref), mask=inside)
