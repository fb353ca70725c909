"""Dispatch of grouped products: a table of backends, and the checks every backend relies on."""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from pallas_kernels import platform
from pallas_kernels.grouped_matmul import gpu, reference

BACKENDS = {"xla": reference.grouped_matmul, "triton": gpu.grouped_matmul}


def grouped_matmul(
    x: Float[Array, "T K"],
    weight: Float[Array, "X K N"],
    sizes: Int[Array, " X"],
    *,
    rows: Int[Array, " S"] | None = None,
    activation: Callable[[Array], Array] | None = None,
    backend: str | None = None,
) -> Float[Array, "S M"]:
    """The first sizes[0] rows times weight[0], the next sizes[1] times weight[1], and so on.

    As `lax.ragged_dot`. The kernel reads the matrices that have rows, where XLA on a GPU reads all of them. Products of
    float32 are exact float32 on every platform.

    Args:
      sizes: they add up to S.
      rows: which of `x` each row is; None: they are those of `x`, S = T.
      activation: that of a gated MLP, whose matrices have the columns of the gate and behind them the others: the
        result is activation(gate) * other, rounded once, M = N / 2. None: the products themselves, M = N.
      backend: a name in `BACKENDS`, which runs or raises; on a CPU kernels run in Pallas' interpreter.
        None: the best one of this platform that can run these types.

    Raises:
      ValueError: an unknown backend, one that cannot run here, or arguments that do not fit together.
    """
    if x.shape[1] != weight.shape[1] or sizes.shape != weight.shape[:1]:
        raise ValueError(
            f"x {x.shape}, weight {weight.shape} and sizes {sizes.shape} do not fit: rows of K numbers, X matrices of "
            "K rows, and X sizes"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype} and weight {weight.dtype}: they have one type")
    if activation is not None and weight.shape[2] % 2:
        raise ValueError(f"weight {weight.shape}: with an activation its columns are two halves")

    def refuses(name: str) -> str | None:
        # The interpreter takes any types.
        return None if name == "xla" or platform.interpret() else gpu.refuses(x)

    return platform.choose("grouped_matmul", backend, BACKENDS, refuses)(
        x, weight, sizes, rows=rows, activation=activation
    )
