"""Sorting rows by group: backends and shared checks."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.dispatch import Operation
from pallas_kernels.group_rows import reference

OPERATION = Operation("group_rows", "pallas_kernels.group_rows", reference.group_rows, ("triton",))


def group_rows(
    groups: Int[Array, "T k"], count: int, always: int = 0, *, backend: str | None = None
) -> tuple[Int[Array, " S"], Int[Array, "T a"], Int[Array, " X"]]:
    """Sort all S = T a rows by group; each token has a = k + always rows.

    Rows of a group keep the order of their tokens. Rows are counted, not sorted by XLA, whose sort would prevent the
    loop from running as one CUDA graph.

    Args:
      groups: of each token's first k rows, below `count`.
      always: further rows of each token, one in each of the last `always` groups: X = count + always.
      backend: as in `dispatch.Operation.run`.

    Returns:
      the token at each sorted place, the place of each row, and the number of rows of each group.

    Raises:
      ValueError: the backend is unknown or cannot run, or there are too many rows and groups for 32-bit keys.
    """
    (tokens, routed), all_groups = groups.shape, count + always
    if (all_groups + 1) * tokens * (routed + always) > jnp.iinfo(jnp.int32).max:
        raise ValueError(f"groups {groups.shape} of {all_groups} groups: too many rows x groups for 32-bit keys")
    return OPERATION.run(backend, groups, count, always)
