"""Attention, cache and layer operations as pure functions of arrays, one folder per operation (docs/kernels.md)."""
