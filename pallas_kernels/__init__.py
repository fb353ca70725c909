"""Attention and cache operations as pure functions of arrays: one folder an operation, each with its XLA reference."""
