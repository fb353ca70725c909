"""Keys and values with fewer bits than the model: formats of pools, and the rounding common to all readers.

Attention reads a round's own rows before they are committed. It rounds them first, so that a token has the same values
in its own round and in all later ones, and drafted output equals plain output.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

KV_FORMATS: dict[str, np.dtype] = {"fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
"""Name -> type of the elements of a pool (FP8 formats, arXiv 2209.05433).

A checkpoint may have one scale for the keys of a layer and one for its values; they are divided by it before rounding
(github.com/vllm-project/compressed-tensors). The default is 1.
"""


def check_kv(kv: object) -> None:
    """Raises ValueError unless `kv` is the name of a format or None."""
    if kv is not None and (not isinstance(kv, str) or kv not in KV_FORMATS):
        raise ValueError(
            f"kv={kv!r}: must be {' or '.join(map(repr, KV_FORMATS))}, or None for the precision of weights"
        )


def stored_dtype(kv: str | None, dtype: DTypeLike) -> DTypeLike:
    """The type of a pool's elements. dtype: the type without a format."""
    return dtype if kv is None else KV_FORMATS[kv]


def narrowed(x: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """Converts `x` to the type of a pool: rounds to nearest even, and clips to the range of a narrow type.

    A conversion alone gives NaN beyond the range. NaN stays NaN.
    """
    kind = jnp.dtype(dtype)
    if kind not in KV_FORMATS.values():
        return x.astype(kind)
    # Clip before the conversion.
    most = jnp.asarray(jnp.finfo(kind).max, x.dtype)
    return jnp.clip(x, -most, most).astype(kind)


def divided(
    q: Float[Array, "B N H D"],
    k: Float[Array, "B R K D"],
    v: Float[Array, "B R K D"],
    scales: Float[Array, "2"],
    kv: str,
) -> tuple[Float[Array, "B N H D"], Float[Array, "B R K D"], Float[Array, "B R K D"]]:
    """Scales queries, keys and values for attention over a pool with scaled keys and values.

    Rounds keys and values to the pool's format, once, whatever their type. Multiplies queries by the scale of the keys
    instead of their products; the caller multiplies the result of attention by the scale of the values.

    scales: of keys, and of values. kv: a key of `KV_FORMATS`.
    """

    def stored(x: Float[Array, "B R K D"], scale: Float[Array, ""]) -> Float[Array, "B R K D"]:
        return as_stored(x.astype(jnp.float32) / scale, KV_FORMATS[kv]).astype(x.dtype)

    return multiplied(q, scales[0]), stored(k, scales[0]), stored(v, scales[1])


def multiplied(x: Float[Array, "*shape"], scale: Float[Array, ""]) -> Float[Array, "*shape"]:
    """`x` times a scale, in the type of `x`."""
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def as_stored(x: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """Rounds `x` to the type of a pool and back; with a wide pool, returns `x` itself."""
    return narrowed(x, dtype).astype(x.dtype) if jnp.dtype(dtype) in KV_FORMATS.values() else x
