"""The heads of an attention layer: backends and shared checks."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Operation
from pallas_kernels.split_heads import reference

OPERATION = Operation("split_heads", "pallas_kernels.split_heads", reference.split_heads, ("triton",))


def split_heads(
    qkv: Float[Array, "B N J D"] | Float[Array, "P B N J D"],
    cos: Float[Array, "#B #N half"],
    sin: Float[Array, "#B #N half"],
    q_norm: Float[Array, " D"] | None = None,
    k_norm: Float[Array, " D"] | None = None,
    *,
    kv_heads: int,
    eps: float,
    exact: bool = False,
    backend: str | None = None,
) -> tuple[Float[Array, "B N H D"], Float[Array, "B N K D"], Float[Array, "B N K D"]]:
    """Split a projection into queries, keys and values; normalize (if there are norms) and rotate queries and keys.

    Rotary positions (Su et al., arXiv 2104.09864) with the pairs (i, i + D/2); root-mean-square norms (Zhang and
    Sennrich, arXiv 1910.07467), computed in float32. Every backend has gradients.

    Args:
      qkv: the J = H + 2 K heads of each token: H of queries, then K of keys, then K of values; or their parts
        from `exact_matmul`, in float32, to be added first, in order, and rounded to the dtype of `cos`.
      cos, sin: of the angles by which a token's pairs are rotated.
      q_norm, k_norm: weights of the norms of each query head and each key head; None: no norm.
      kv_heads: K.
      eps: added to the mean square by the norms.
      exact: a token's result does not depend on the other tokens, to the bit. The kernels are exact in any case.
      backend: as in `dispatch.Operation.run`.

    Raises:
      ValueError: the backend is unknown or cannot run, or the arguments do not fit together.
    """
    *_, total, dim = qkv.shape
    if qkv.ndim > 4 and qkv.dtype != "float32":
        raise ValueError(f"qkv is {qkv.dtype}{list(qkv.shape)}: parts must be float32")
    if total <= 2 * kv_heads:
        raise ValueError(f"kv_heads={kv_heads}: must be below {total / 2:g}, as qkv {qkv.shape} has {total} heads")
    if dim % 2 or cos.shape[-1] != dim // 2 or cos.shape != sin.shape:
        raise ValueError(
            f"cos {cos.shape} and sin {sin.shape}: must have {dim / 2:g} pairs, as the heads of qkv {qkv.shape}"
        )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must both be given, or neither")
    return OPERATION.run(backend, qkv, cos, sin, q_norm, k_norm, kv_heads=kv_heads, eps=eps, exact=exact)
