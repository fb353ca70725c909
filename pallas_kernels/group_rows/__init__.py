"""Sorts rows by their groups, the order in which products with one matrix per group read them."""

from pallas_kernels.group_rows.api import OPERATION, group_rows

__all__ = ["OPERATION", "group_rows"]
