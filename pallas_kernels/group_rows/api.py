"""Dispatch of the order of groups: a table of backends, and the checks every backend relies on."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import platform
from pallas_kernels.group_rows import gpu, reference

BACKENDS = {"xla": reference.group_rows, "triton": gpu.group_rows}


def group_rows(
    groups: Int[Array, "T k"], count: int, always: int = 0, *, backend: str | None = None
) -> tuple[Int[Array, " S"], Int[Array, "T a"], Int[Array, " X"]]:
    """Where each row of a token stands when all S = T a rows are put in the order of their groups; a = k + always.

    Rows of one group stay in the order of their tokens. Places are counted, not sorted: a sort keeps a GPU from running
    the loop as one graph.

    Args:
      groups: of each token's first k rows, numbers below `count`.
      always: of each token's further rows, one in each of so many groups behind those: X = count + always.
      backend: a name in `BACKENDS`, which runs or raises; on a CPU kernels run in Pallas' interpreter.
        None: the best one of this platform.

    Returns:
      the token at each place, the place of each row, and the rows of each group.

    Raises:
      ValueError: an unknown backend, one that cannot run here, or more rows and groups than 32 bits can order.
    """
    (tokens, each), all_groups = groups.shape, count + always
    if (all_groups + 1) * tokens * (each + always) > jnp.iinfo(jnp.int32).max:
        raise ValueError(f"groups {groups.shape}: so many rows of {all_groups} groups have no order in 32 bits")
    return platform.choose("group_rows", backend, BACKENDS)(groups, count, always)
