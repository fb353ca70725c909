"""Makes the parts of an engine: the device with the state of all slots, and the scheduler."""

import jax.numpy as jnp

from jspec.core.accept import greedy
from jspec.core.types import Accept, Drafter, RowSampling
from jspec.engine import programs, sizing
from jspec.engine.device import Device, Static
from jspec.engine.loop import FLIGHTS, MAX_ROUNDS
from jspec.engine.model import Model
from jspec.engine.options import bind_drafter, choose_drafter, choose_rule
from jspec.engine.pages import Pages
from jspec.engine.schedule import Scheduler
from jspec.engine.stop_pool import StopPool


def assemble(
    model: Model,
    drafter: str | Drafter | None,
    accept: str | Accept | None,
    *,
    slots: int,
    context: int,
    pages: int | None,
    fraction: float,
    page_size: int,
    prefill_tokens: int,
    share: bool,
) -> tuple[Device, Scheduler]:
    """The parts of an engine. The arguments are those of `jspec.Engine`.

    Raises:
      ValueError, TypeError: a drafter, a rule or a cache that does not suit, or a state that does not fit.
    """
    # The parts of a round. Some request may sample, so the rule is chosen for one that does.
    any_row = RowSampling(temperature=jnp.zeros(1))
    rule, chosen = choose_rule(accept, any_row, choose_drafter(drafter, model))
    bound = bind_drafter(chosen, model.target, model.draft)
    if lacking := programs.without_slots(model.params, model.target, bound):
        raise ValueError(
            f"model={model.name!r}: its cache {', '.join(sorted(lacking))} must have the methods of "
            "jspec.core.slots.SlotCache, by which sequences come and go; jspec.generate works without them"
        )
    parts: Static = {"target": model.target, "drafter": bound, "accept": rule}
    samples = programs.always_samples(model.params, **parts)

    # The caches and the state of all slots. A rule by name is the greedy one where nothing is sampled.
    sizes = {"samples": samples, "num_slots": slots, "context": context, "page_size": page_size}
    room = sizing.fit(model.params, parts, sizes, pages=pages, fraction=fraction, share=share)
    device = Device(
        model.params,
        parts,
        StopPool(model),
        **sizes,
        pages=room.pages,
        snapshots=room.snapshots,
        max_rounds=MAX_ROUNDS,
        greedy_rule=greedy if accept is None or isinstance(accept, str) else rule,
    )

    # Who runs when.
    ahead = programs.sharing(device.state, bound)
    further = programs.further_rows(device.state, bound)
    scheduler = Scheduler(
        slots=slots,
        pages=Pages(room.pages, page_size, ahead if room.shares else None, room.snapshots),
        context=context,
        depth=bound.depth,
        further=further,
        read_shapes=sizing.read_shapes(slots, context, prefill_tokens, max(1, ahead or 0) + further),
        prefill_tokens=prefill_tokens,
        flights=FLIGHTS,
    )
    return device, scheduler
