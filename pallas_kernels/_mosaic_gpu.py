"""Shared parts of the kernels for Hopper GPUs: their devices and their calls.

These kernels are built on `wgmma`, products of matrices in shared memory by a warpgroup of 128 threads, and on TMA,
to copy tiles between memories. In each, one warpgroup loads and the others multiply.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import platform

ROWS = 64
"""Rows of one `wgmma`, and columns of a swizzled row of shared memory."""
ROW_GROUP = 8
"""Rows of a group moved by TMA."""
SHARED_BYTES = 227 * 1024
"""Shared memory of a program."""
WARPGROUP, PROGRAM, NEIGHBOR = "warpgroup", "program", "neighbor"
"""The axes of a kernel: its warpgroups (the last one loads), its programs or clusters, and the programs of one."""
CAPABILITY = "9."
"""All compute capabilities with `wgmma`."""
DTYPES = ("bfloat16", "float16")
INTERPRETER: Any = getattr(plgpu, "InterpretGPUParams", None)
"""What makes Pallas run a kernel in its interpreter; None: this version of JAX does not export it."""
_EVERYTHING = () if jax.__version_info__ >= (0, 11) else ((),)
"""The index of `plgpu.load` before JAX 0.11."""


def refuse_dtype(name: str, array: jax.Array) -> str | None:
    """Why the kernels cannot run on arrays of this type; None if they can."""
    return None if array.dtype.name in DTYPES else f"{name} is {array.dtype.name}: must be one of {', '.join(DTYPES)}"


def refuse_device(interpret: bool | None) -> str | None:
    """Why the kernels cannot run here; None if they can."""
    if platform.resolve_interpret(interpret):
        return "the interpreter of this kernel requires JAX 0.11 or later" if INTERPRETER is None else None
    capability = str(getattr(platform.device(), "compute_capability", CAPABILITY))
    return None if capability.startswith(CAPABILITY) else f"compute capability {capability}: must be {CAPABILITY}x"


def tiles_of(shape: Sequence[int], dtype: DTypeLike) -> Any:
    """Shared memory for `wgmma`; the last axis is a multiple of `ROWS`, the one before of `ROW_GROUP`."""
    transforms = plgpu.TilingTransform((ROW_GROUP, ROWS)), plgpu.SwizzleTransform(2 * ROWS)
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def filled(array: jax.Array, unit: int = ROW_GROUP) -> jax.Array:
    """An array [..., rows, D] with zeros after its rows, up to a multiple of the unit."""
    missing = -array.shape[-2] % unit
    return jnp.pad(array, ((0, 0),) * (array.ndim - 2) + ((0, missing), (0, 0))) if missing else array


def load(ref: Any, layout: Any) -> jax.Array:
    """An array in registers in that layout, also where the layout has no fast load."""
    return plgpu.load(ref, *_EVERYTHING, layout=layout, optimized=False)


def call(
    body: Callable[..., None],
    *,
    out_type: Any,
    scratch_types: Sequence[Any],
    programs: int,
    warpgroups: int,
    interpret: bool,
    name: str,
    cluster: int | None = None,
) -> Callable[..., Any]:
    """A kernel as a function of arrays.

    programs: or clusters, if these have a size.
    warpgroups: the multiplying ones; one more loads.
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(programs,),
        grid_names=(PROGRAM,),
        cluster=() if cluster is None else (cluster,),
        cluster_names=() if cluster is None else (NEIGHBOR,),
        num_threads=warpgroups + 1,
        thread_name=WARPGROUP,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=INTERPRETER() if interpret else False,
    )
