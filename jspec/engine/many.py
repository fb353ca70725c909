"""More prompts than run at once: they take turns in the slots of an engine, in the thread of the caller."""

import time
from collections.abc import Sequence

import jax
import numpy as np
from tqdm import tqdm

from jspec.core import groups, stopping
from jspec.core.method import Method
from jspec.core.sampling import per_row
from jspec.engine import memory
from jspec.engine.assembly import OneShape, assemble, hold, make_requests
from jspec.engine.batches import split
from jspec.engine.device import DeviceRequest, tier_of
from jspec.engine.handle import Handle
from jspec.engine.loop import Loop
from jspec.engine.model import Model
from jspec.engine.options import (
    GenerateOptions,
    bind_drafter,
    check_fits,
    choose_drafter,
    choose_rule,
    longest_sequence,
    with_point_masses,
)
from jspec.engine.result import Generations, GenerationStats
from jspec.engine.run import Prompt, bucket, encode_prompts, one_call
from jspec.engine.schedule import Scheduler
from jspec.engine.sizing import Budget
from jspec.engine.slot_state import Sizes, without_slots

MAX_BATCH = 64
"""Prompts that run at once. More of them take turns, so memory does not grow with their number, and a sequence that
ends early makes room for the next one."""
PREFILL_TOKENS = 1024
"""Prompt tokens that are read between two bursts."""
BURST_SECONDS = 0.1
"""Time of the rounds after which the host hears of sequences that have ended."""


def generate_many(
    model: Model, prompts: Prompt | Sequence[Prompt], options: GenerateOptions, *, progress: bool = False
) -> Generations | None:
    """As `jspec.generate` if more than `MAX_BATCH` prompts are given; `stats.seconds` is the time of the whole call.

    None: there are no more than that, or an engine lacks what is asked for: `debug`, or a cache that has no slots.

    Raises:
      ValueError, TypeError: as `jspec.generate`, before anything is compiled.
    """
    listed = isinstance(prompts, Sequence | np.ndarray | jax.Array) and not isinstance(prompts, str)
    placement = getattr(model, "placement", None)
    most = MAX_BATCH * groups.count(placement)
    if options.debug or not listed or not getattr(prompts, "ndim", 1) or len(prompts) <= most:
        return None
    with one_call(model):
        single, prompt_ids = encode_prompts(model, prompts)
    count = len(prompt_ids)
    if single:
        return None
    if placement is not None and (placement.groups > 1 or placement.spans_processes):
        return _generate_batches(model, prompt_ids, options, most, progress)
    options.seeds(count)
    longest, new = longest_sequence(prompt_ids, options.limits(count))
    row_sampling = per_row(options.sampling, count, model.target.vocab_size)
    row_sampling = with_point_masses(options.accept, row_sampling, count)
    rule, drafter = choose_rule(options.accept, row_sampling, choose_drafter(options.drafter, model))
    bound = bind_drafter(drafter, model.target, model.draft)
    check_fits(model.target, longest, new, bound)
    if without_slots(model.params, Method(model.target, bound, rule)):
        return None

    # All requests are known, so one program of each kind is enough.
    given = options.sampling
    samplings = list(given) if isinstance(given, Sequence) else [given] * count
    columns = min(bucket(max(map(len, prompt_ids))), PREFILL_TOKENS)
    # If nothing is sampled, every named rule is the greedy one, and so is None.
    all_greedy = row_sampling is None or row_sampling.temperature is None
    device, scheduler = assemble(
        model,
        options.drafter,
        None if all_greedy and isinstance(options.accept, str) else options.accept,
        Sizes(MAX_BATCH, min(bucket(longest + new), model.target.max_length), options.page_size),
        Budget(
            None, memory.usable_fraction(), True, memory.least_free(None if placement is None else placement.devices)
        ),
        prefill_tokens=PREFILL_TOKENS,
        only=OneShape((min(MAX_BATCH, PREFILL_TOKENS // columns), columns), max(map(tier_of, samplings))),
    )
    began = time.monotonic()
    requests = make_requests(device, scheduler, prompt_ids, options, samplings)
    hold([(device, request) for request in requests])
    handles = {x: Handle(x, model.tokenizer, lambda _: None, device.method.drafter) for x in requests}
    _run(Loop(device, scheduler, burst_seconds=BURST_SECONDS), scheduler, handles, progress)
    items = [handle.generation() for handle in handles.values()]
    return Generations(items, GenerationStats.total([x.stats for x in items], time.monotonic() - began))


def _generate_batches(
    model: Model, prompts: list[list[int]], options: GenerateOptions, size: int, progress: bool
) -> Generations:
    """As `generate_many`, `size` prompts at a time: over groups of devices or several processes."""
    with one_call(model):
        check_fits(model.target, *longest_sequence(prompts, options.limits(len(prompts))))
        batches = split(prompts, options, size)
    began, items = time.monotonic(), []
    with tqdm(total=len(prompts), unit="prompt", disable=not progress) as bar:
        for batch in batches:
            items += batch.run(model).items
            bar.update(batch.count)
    return Generations(items, GenerationStats.total([x.stats for x in items], time.monotonic() - began))


def _run(loop: Loop, scheduler: Scheduler, handles: dict[DeviceRequest, Handle], progress: bool) -> None:
    """Runs all requests until the last of them has ended."""
    for request in handles:
        scheduler.submit(request)
    with tqdm(total=len(handles), unit="prompt", disable=not progress) as bar:
        while not loop.idle:
            _, results = loop.turn()
            now = time.monotonic()
            for request, landing in results:
                handles[request].deliver(landing, now)
            bar.update(sum(landing.finish_code != stopping.RUNNING for _, landing in results))
