"""The order of rows by groups as one Triton kernel: some programs count places of rows, the others rows of groups."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import platform
from pallas_kernels._triton import call
from pallas_kernels._types import Ref


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work of one call is divided. All are powers of two."""

    block: int
    """Rows, or groups, of a program."""
    compared: int
    """Rows that it compares them with per iteration, at most."""
    num_warps: int


TUNING = {"NVIDIA H100": Config(block=64, compared=256, num_warps=4)}
"""By device kind; the first entry is the default."""


def default_config() -> Config:
    """The configuration for all shapes."""
    return platform.for_device_kind(TUNING)


def supported(*args: object, interpret: bool | None = None, **options: object) -> str | None:
    """None: the kernel can run all arguments of `group_rows`."""
    return None


def group_rows(
    groups: jax.Array, count: int, always: int = 0, *, config: Config | None = None, interpret: bool | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Arguments as in `api.group_rows` and `dispatch.Operation`."""
    tokens, routed = groups.shape
    rows, all_groups = tokens * (routed + always), count + always
    config = config or default_config()
    compared = min(config.compared, pl.next_power_of_2(rows))
    token, place, sizes = call(
        functools.partial(_kernel, routed=routed, always=always, block=config.block, compared=compared),
        out_shape=[jax.ShapeDtypeStruct((size,), jnp.int32) for size in (rows, rows, all_groups)],
        grid=(pl.cdiv(rows, config.block) + pl.cdiv(all_groups, config.block),),
        num_warps=config.num_warps,
        interpret=platform.resolve_interpret(interpret),
        name="group_rows",
    )(groups.reshape(-1).astype(jnp.int32))
    return token, place.reshape(tokens, -1), sizes


def _kernel(
    groups_ref: Ref,  # [T * k]
    token_ref: Ref,  # [S]
    place_ref: Ref,  # [S]
    sizes_ref: Ref,  # [X]
    *,
    routed: int,
    always: int,
    block: int,
    compared: int,
) -> None:
    (rows,), (all_groups,), rows_per_token = place_ref.shape, sizes_ref.shape, routed + always
    row_programs = pl.cdiv(rows, block)
    program = pl.program_id(0)

    def load(slot):
        """The groups of slots; padding slots get group id `all_groups`."""
        token, index = slot // rows_per_token, slot % rows_per_token
        inside, last = slot < rows, all_groups - always + index - routed
        group = pltriton.load(groups_ref.at[token * routed + index], mask=inside & (index < routed), other=0)
        return jnp.where(inside, jnp.where(index < routed, group, last), all_groups)

    def count(test):
        """How many rows, by their slots and groups, pass `test` for each row or group of the program."""

        def body(i, total):
            slot = i * compared + jnp.arange(compared)
            return total + test(slot[None], load(slot)[None]).astype(jnp.int32).sum(1)

        return lax.fori_loop(0, pl.cdiv(rows, compared), body, jnp.zeros((block,), jnp.int32))

    # The first programs: the place of each row is the number of rows before it.
    @pl.when(program < row_programs)
    def _():
        row = program * block + jnp.arange(block)
        key = (load(row) * rows + row)[:, None]
        place = count(lambda slot, group: group * rows + slot < key)
        pltriton.store(place_ref.at[row], place, mask=row < rows)
        pltriton.store(token_ref.at[place], row // rows_per_token, mask=row < rows)

    # The others: the number of rows in each group.
    @pl.when(program >= row_programs)
    def _():
        counted = (program - row_programs) * block + jnp.arange(block)
        sizes = count(lambda slot, group: group == counted[:, None])
        pltriton.store(sizes_ref.at[counted], sizes, mask=counted < all_groups)
