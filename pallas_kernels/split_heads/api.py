"""Dispatch of the heads of a layer: a table of backends, and the checks every backend relies on."""

from jaxtyping import Array, Float

from pallas_kernels import platform
from pallas_kernels.split_heads import gpu, reference

BACKENDS = {"xla": reference.split_heads, "triton": gpu.split_heads}


def split_heads(
    qkv: Float[Array, "B N J D"],
    cos: Float[Array, "#B #N half"],
    sin: Float[Array, "#B #N half"],
    q_norm: Float[Array, " D"] | None = None,
    k_norm: Float[Array, " D"] | None = None,
    *,
    kv_heads: int,
    eps: float,
    backend: str | None = None,
) -> tuple[Float[Array, "B N H D"], Float[Array, "B N K D"], Float[Array, "B N K D"]]:
    """Queries, keys and values of a projection; queries and keys normed, where there are norms, and rotated.

    Rotary positions after Su et al. (arXiv 2104.09864), with the pairs (i, i + D/2); root-mean-square norms after Zhang
    and Sennrich (arXiv 1910.07467), computed in float32. Has gradients with every backend.

    Args:
      qkv: of the J = H + 2 K heads of each token, the H of queries first, then K of keys, then K of values.
      cos, sin: of the angles by which a token's pairs are rotated.
      q_norm, k_norm: weights of the norms of each query and each key head (Qwen3); None: no norm.
      kv_heads: K.
      eps: what the norms add to the mean square.
      backend: a name in `BACKENDS`, which runs or raises; on a CPU kernels run in Pallas' interpreter.
        None: the best one of this platform.

    Raises:
      ValueError: an unknown backend, one that cannot run here, or arguments that do not fit together.
    """
    *_, total, dim = qkv.shape
    if total <= 2 * kv_heads:
        raise ValueError(f"kv_heads={kv_heads}: qkv {qkv.shape} has {total} heads, and no query head is left of them")
    if dim % 2 or cos.shape[-1] != dim // 2 or cos.shape != sin.shape:
        raise ValueError(f"cos {cos.shape} and sin {sin.shape}: qkv is {qkv.shape}, its heads have {dim / 2:g} pairs")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: queries and keys are both normed, or neither")
    return platform.choose("split_heads", backend, BACKENDS)(qkv, cos, sin, q_norm, k_norm, kv_heads=kv_heads, eps=eps)
