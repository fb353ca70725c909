"""The order of groups as one Triton kernel: some programs count the places of rows, the others the rows of groups."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform

BLOCK = 64
"""Rows, or groups, of a program."""
AT_A_TIME = 256
"""Rows that it compares them with at a time."""


def group_rows(groups, count, always=0, *, block=BLOCK, at_a_time=AT_A_TIME):
    """Arguments as in `api.group_rows`; `block` and `at_a_time` are powers of two."""
    tokens, chosen = groups.shape
    rows, all_groups = tokens * (chosen + always), count + always
    at_a_time = min(at_a_time, pl.next_power_of_2(rows))
    token, place, sizes = pl.pallas_call(
        functools.partial(_kernel, chosen=chosen, always=always, block=block, at_a_time=at_a_time),
        out_shape=[jax.ShapeDtypeStruct((size,), jnp.int32) for size in (rows, rows, all_groups)],
        grid=(pl.cdiv(rows, block) + pl.cdiv(all_groups, block),),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=platform.interpret(),
        name="group_rows",
    )(groups.reshape(-1).astype(jnp.int32))
    return token, place.reshape(tokens, -1), sizes


def _kernel(
    groups_ref,  # [T * k]
    token_ref,  # [S]
    place_ref,  # [S]
    sizes_ref,  # [X]
    *,
    chosen,
    always,
    block,
    at_a_time,
):
    (rows,), (all_groups,), each = place_ref.shape, sizes_ref.shape, chosen + always
    for_rows = pl.cdiv(rows, block)
    program = pl.program_id(0)

    def load(slot):
        """Behind the last row there is a group behind the last one."""
        token, number = slot // each, slot % each
        inside, behind = slot < rows, all_groups - always + number - chosen
        given = pltriton.load(groups_ref.at[token * chosen + number], mask=inside & (number < chosen), other=0)
        return jnp.where(inside, jnp.where(number < chosen, given, behind), all_groups)

    def counted(test):
        """How many rows pass `test` of each number that the program has; it is given their slots and groups."""

        def body(i, total):
            slot = i * at_a_time + jnp.arange(at_a_time)
            return total + test(slot[None], load(slot)[None]).astype(jnp.int32).sum(1)

        return lax.fori_loop(0, pl.cdiv(rows, at_a_time), body, jnp.zeros((block,), jnp.int32))

    @pl.when(program < for_rows)
    def _():
        own = program * block + jnp.arange(block)
        key = (load(own) * rows + own)[:, None]
        place = counted(lambda slot, group: group * rows + slot < key)
        pltriton.store(place_ref.at[own], place, mask=own < rows)
        pltriton.store(token_ref.at[place], own // each, mask=own < rows)

    @pl.when(program >= for_rows)
    def _():
        own = (program - for_rows) * block + jnp.arange(block)
        sizes = counted(lambda slot, group: group == own[:, None])
        pltriton.store(sizes_ref.at[own], sizes, mask=own < all_groups)
