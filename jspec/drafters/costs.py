"""Tables of costs of a round, by batch, as options of drafters that choose by them."""

from collections.abc import Mapping, Sequence

import numpy as np

from jspec.core.checks import check_int, check_number, shorten

Costs = tuple[tuple[int, tuple[float, ...]], ...]
"""Batch and costs, by ascending batch."""


def check_costs(owner: str, costs: object) -> Costs:
    """The table of costs as a tuple, by batch or for all batches; TypeError or ValueError if it is no such table.

    owner: the class whose option it is, for messages.
    """
    # Rows of (batch, costs).
    if isinstance(costs, Mapping):
        rows = list(costs.items())
    elif isinstance(costs, tuple) and costs and all(isinstance(row, tuple) and len(row) == 2 for row in costs):
        rows = list(costs)
    else:
        rows = [(1, costs)]
    # Check every row.
    table: dict[int, tuple[float, ...]] = {}
    for batch, row in rows:
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise TypeError(f"{owner}: costs={shorten(costs)}: must be a number for each drafter, or those by batch")
        batch = check_int("costs", batch, least=1, owner=owner)
        table[batch] = tuple(check_number("costs", cost, above=0.0, owner=owner) for cost in row)
    if not table or len({len(row) for row in table.values()}) != 1:
        raise ValueError(f"{owner}: costs={shorten(costs)}: must be one cost for each drafter in every batch")
    return tuple(sorted(table.items()))


def interpolated(costs: Costs, batch: int) -> list[float]:
    """The costs at a batch, constant beyond the first or last one."""
    columns = np.array([row for _, row in costs], float).T
    return [float(np.interp(batch, [size for size, _ in costs], column)) for column in columns]
