"""Strict numerics for every test: no implicit promotion of dtypes or ranks, and warnings are errors (pyproject.toml)."""

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
