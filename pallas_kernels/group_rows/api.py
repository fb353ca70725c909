"""Dispatch of the order of groups: a table of backends, and the checks every backend relies on."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import platform
from pallas_kernels.group_rows import gpu, reference

BACKENDS = {"xla": reference.group_rows, "triton": gpu.group_rows}


def group_rows(
    groups: Int[Array, "T k"], count: int, *, backend: str | None = None
) -> tuple[Int[Array, " S"], Int[Array, "T k"], Int[Array, " count"]]:
    """Where each row of a token stands when all S = T k rows are put in the order of their groups.

    Rows of one group stay in the order of their tokens. Places are counted, not sorted: a sort keeps a GPU from running
    the loop as one graph.

    Args:
      groups: of each row, numbers below `count`.
      backend: a name in `BACKENDS`, which runs or raises; on a CPU kernels run in Pallas' interpreter.
        None: the best one of this platform.

    Returns:
      the token at each place, the place of each row, and the rows of each group.

    Raises:
      ValueError: an unknown backend, one that cannot run here, or more rows and groups than 32 bits can order.
    """
    if (count + 1) * groups.size > jnp.iinfo(jnp.int32).max:
        raise ValueError(f"groups {groups.shape}: so many rows of {count} groups have no order in 32 bits")
    return platform.choose("group_rows", backend, BACKENDS)(groups, count)
