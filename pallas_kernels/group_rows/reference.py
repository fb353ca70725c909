"""The order of rows by groups in plain JAX."""

import jax
import jax.numpy as jnp


def group_rows(groups: jax.Array, count: int, always: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compares each row with every other. Arguments as in `api.group_rows`."""
    tokens, rows_per_token = groups.shape[0], groups.shape[1] + always
    last = jnp.broadcast_to(jnp.arange(count, count + always, dtype=jnp.int32)[None], (tokens, always))
    group = jnp.concatenate([groups.astype(jnp.int32), last], axis=1).reshape(-1)
    rows = tokens * rows_per_token
    slot = jnp.arange(rows, dtype=jnp.int32)
    key = group * rows + slot
    place = (key[:, None] < key[None]).sum(0, dtype=jnp.int32)
    token = jnp.zeros_like(place).at[place].set(slot // rows_per_token, unique_indices=True, mode="promise_in_bounds")
    sizes = (group[None] == jnp.arange(count + always, dtype=jnp.int32)[:, None]).sum(1, dtype=jnp.int32)
    return token, place.reshape(tokens, rows_per_token), sizes
