"""Rows put in the order of their groups, as products of one matrix a group need them."""

from pallas_kernels.group_rows.api import BACKENDS, group_rows

__all__ = ["BACKENDS", "group_rows"]
