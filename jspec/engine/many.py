"""More prompts than run at once: they take turns in the slots of an engine, in the thread of the caller."""

import dataclasses
import time

from tqdm import tqdm

from jspec.core import groups, stopping
from jspec.core.sampling import each_of, per_row
from jspec.engine.assembly import OneShape, assemble, hold, make_requests
from jspec.engine.batches import split
from jspec.engine.handle import Handle
from jspec.engine.loop import Loop
from jspec.engine.schedule import Scheduler
from jspec.generation.method import choose_drafter, choose_method
from jspec.generation.options import EngineOptions, GenerateOptions, check_draft_fits, check_fits, longest_sequence
from jspec.generation.result import Generations, GenerationStats
from jspec.generation.run import bucket, one_call
from jspec.loading import memory
from jspec.loading.model import Model
from jspec.runner.device import Device, DeviceRequest, option_set_of
from jspec.runner.slot_state import without_slots

MAX_BATCH = 64
"""Prompts that run at once. More of them take turns, so memory does not grow with their number, and a sequence
makes room for the next one when it ends."""
PREFILL_TOKENS = 1024
"""Prompt tokens that are read between two bursts."""
BURST_SECONDS = 0.1
"""Time of the rounds between two reports to the host."""


def generate_many(
    model: Model,
    prompts: list[list[int]],
    options: GenerateOptions,
    *,
    progress: bool = False,
    slots: int | None = None,
) -> Generations | None:
    """Generates for more than `slots` prompts, with this number at a time.

    prompts: ids of each.
    slots: None: `MAX_BATCH`; above it, reads are longer as well, since sequences end more often.

    Returns:
      The results; `stats.seconds` is the time of prefills and rounds, without compilation. None: the prompts fit
      in one batch, or an engine lacks a requested feature: `debug`, or a cache without slots.

    Raises:
      ValueError, TypeError: as `jspec.generate`, before anything is compiled.
    """
    count, placement, slots = len(prompts), model.placement, slots or MAX_BATCH
    most = slots * groups.count(placement)
    if options.debug or count <= most:
        return None
    if placement is not None and (placement.groups > 1 or placement.spans_processes):
        return _generate_batches(model, prompts, options, most, progress)
    options.seeds(count)
    longest, new = longest_sequence(prompts, options.limits(count))
    drafter = choose_drafter(options.drafter, model)
    row_sampling = per_row(options.sampling, count, model.target.vocab_size)
    method, row_sampling = choose_method(model.target, model.draft, drafter, options.accept, row_sampling, batch=count)
    check_fits(model.target, longest, new)
    check_draft_fits(method.drafter, prompts, options.limits(count))
    if without_slots(model.params, method):
        return None

    # If nothing is sampled, every named rule is the greedy one, and so is None.
    all_greedy = row_sampling is None or row_sampling.temperature is None
    accept = None if all_greedy and isinstance(options.accept, str) else options.accept
    device, scheduler = _assemble(model, prompts, dataclasses.replace(options, accept=accept), slots, longest + new)
    # Run all requests.
    began = time.monotonic()
    requests = make_requests(device, scheduler, prompts, options)
    hold([(device, request) for request in requests])
    handles = {x: Handle(x, model.tokenizer, lambda _: None, device.method.drafter) for x in requests}
    _run(Loop(device, scheduler, burst_seconds=BURST_SECONDS), scheduler, handles, progress)
    seconds = time.monotonic() - began - device.executor.compile_seconds
    items = [handle.generation() for handle in handles.values()]
    return Generations(items, GenerationStats.total([x.stats for x in items], seconds))


def _assemble(
    model: Model, prompts: list[list[int]], options: GenerateOptions, slots: int, length: int
) -> tuple[Device, Scheduler]:
    """The parts of an engine. All requests are known, so one program of each kind is enough.

    length: of the longest sequence.
    """
    prefill_tokens = PREFILL_TOKENS if slots <= MAX_BATCH else max(PREFILL_TOKENS, 64 * slots)
    columns = min(bucket(max(map(len, prompts))), prefill_tokens)
    engine = EngineOptions(
        drafter=options.drafter,
        accept=options.accept,
        slots=slots,
        context=min(bucket(length), model.target.max_length),
        page_size=options.page_size,
        prefill_tokens=prefill_tokens,
    )
    option_set = max(map(option_set_of, each_of(options.sampling, len(prompts))))
    return assemble(
        model,
        engine.for_model(model),
        free=memory.least_free(None if model.placement is None else model.placement.devices),
        only=OneShape((min(slots, prefill_tokens // columns), columns), option_set),
    )


def _generate_batches(
    model: Model, prompts: list[list[int]], options: GenerateOptions, size: int, progress: bool
) -> Generations:
    """As `generate_many`, `size` prompts at a time: over groups of devices or several processes."""
    with one_call(model):
        check_fits(model.target, *longest_sequence(prompts, options.limits(len(prompts))))
        batches = split(prompts, options, size)
    parts = []
    with tqdm(total=len(prompts), unit="prompt", disable=not progress) as bar:
        for batch in batches:
            parts.append(batch.run(model))
            bar.update(batch.count)
    stats = GenerationStats.total([part.stats for part in parts], sum(part.stats.seconds for part in parts))
    return Generations([item for part in parts for item in part], stats)


def _run(loop: Loop, scheduler: Scheduler, handles: dict[DeviceRequest, Handle], progress: bool) -> None:
    """Runs all requests until the last of them has ended."""
    for request in handles:
        scheduler.submit(request)
    with tqdm(total=len(handles), unit="prompt", disable=not progress) as bar:
        while not loop.idle:
            _, results = loop.turn()
            now = time.monotonic()
            for request, landing in results:
                handles[request].deliver(landing, now, loop.device.executor.compile_seconds)
            bar.update(sum(landing.finish_code != stopping.RUNNING for _, landing in results))
