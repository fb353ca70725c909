"""Makes the parts of an engine: the device with all slots, the scheduler, and requests."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from jspec.core import optional
from jspec.core.accept import greedy
from jspec.core.checks import entries_of
from jspec.core.sampling import each_of, per_row
from jspec.core.types import RowSampling
from jspec.engine.group import MAX_IN_FLIGHT
from jspec.engine.pages import Pages
from jspec.engine.schedule import Scheduler
from jspec.generation.embeds import PromptEmbeds
from jspec.generation.method import by_sequences, choose_drafter, choose_method, knows_greedy
from jspec.generation.options import EngineOptions, RequestOptions, check_grammar_options
from jspec.generation.speculation import draft_limits
from jspec.loading.model import Model
from jspec.runner import sizing
from jspec.runner.device import Device, OneShape
from jspec.runner.request import Request
from jspec.runner.slot_state import Sizes, always_samples, extra_rows, lookahead, without_slots


def assemble(
    model: Model,
    options: EngineOptions,
    *,
    free: tuple[int, int] | None,
    only: OneShape | None = None,
) -> tuple[Device, Scheduler]:
    """Makes the parts of an engine on one group of devices.

    options: those of `jspec.Engine`, made for the model (`EngineOptions.for_model`).
    free: as of `sizing.fit`.
    only: the shapes of all programs; None: those for requests of any kind.

    Raises:
      ValueError, TypeError: an unsuitable drafter, rule or cache, or a state larger than the memory.
    """
    # The method of a round. Some request may sample, so the rule is chosen for sampling.
    any_row, accept = RowSampling(temperature=jnp.zeros(1)), options.accept
    drafter = choose_drafter(options.drafter, model)
    if options.drafter == "auto" and accept is None and model.draft is not None:
        drafter = by_sequences(drafter, model)
    method, _ = choose_method(
        model.target, model.draft, optional.continuous(drafter), accept, any_row, placement=model.placement
    )
    if options.learn is not None:
        if not method.drafter.capture_layers:
            name = type(method.drafter).__name__
            raise ValueError(f"learn: drafter {name} reads no hidden states of the target: must be one that learns")
        method = dataclasses.replace(method, watch=options.learn.window)
    if lacking := without_slots(model.params, method):
        raise ValueError(
            f"model={model.name!r}: its cache {', '.join(sorted(lacking))} must have the methods of "
            "jspec.core.slots.SlotCache, by which sequences come and go; jspec.generate works without them"
        )

    # The caches and the state of all slots. A rule by name is the greedy one where nothing is sampled.
    assert options.context is not None
    sizes = Sizes(options.slots, options.context, options.page_size)
    samples = always_samples(model.params, method=method, sizes=sizes) or not knows_greedy(accept)
    sizes, shares = sizing.fit(model.params, method, dataclasses.replace(sizes, samples=samples), options, free)
    greedy_rule = greedy if accept is None or isinstance(accept, str) else method.accept
    device = Device(model, method, sizes, greedy_rule=greedy_rule, only=only)
    return device, _scheduler(device, options, shares, only)


def _scheduler(device: Device, options: EngineOptions, shares: bool, only: OneShape | None) -> Scheduler:
    """Makes the scheduler of a device. shares: whether sequences share prefixes."""
    drafter, sizes = device.method.drafter, device.sizes
    later, extra = lookahead(device.runner.state, drafter), extra_rows(device.runner.state, drafter)
    narrowest = max(1, later or 0) + extra
    if only is None:
        choose = sizing.piece_shapes if device.packs else sizing.read_shapes
        shapes = choose(sizes.slots, sizes.context, options.prefill_tokens, narrowest)
    else:
        shapes = [(only.read[0], max(only.read[1], narrowest))]
    scheduler = Scheduler(
        slots=sizes.slots,
        pages=Pages(sizes.pages, sizes.page_size, later if shares else None, sizes.snapshots),
        context=sizes.context,
        depth=drafter.depth,
        extra_rows=extra,
        read_shapes=shapes,
        prefill_tokens=options.prefill_tokens,
        max_in_flight=MAX_IN_FLIGHT,
    )
    scheduler.programs, scheduler.packs = device.ready, device.packs
    return scheduler


def make_requests(
    device: Device,
    scheduler: Scheduler,
    prompts: Sequence[Sequence[int]],
    options: RequestOptions,
    priority: int = 0,
    salt: str = "",
) -> list[Request]:
    """Makes requests for this device or for others like it; call `Device.hold` before they are queued.

    Raises:
      ValueError, TypeError: options at odds with the model or each other, or a request too large to fit.
    """
    vocab_size = device.method.target.vocab_size
    options.check_vocabulary(vocab_size)
    count, requests = len(prompts), []
    samplings, seeds = each_of(options.sampling, count), options.seeds(count)
    columns = options.limits(count), seeds, samplings, entries_of("speculation", options.speculation, count)
    for ids, limit, seed, sampling, speculation in zip(prompts, *columns, strict=True):
        request = Request(
            *(ids, limit, priority, salt, sampling, seed),
            stop=tuple(options.stop),
            ignore_eos=options.ignore_eos,
            logprobs=options.records is not None,
            top_logprobs=options.top_logprobs,
            support=options.support,
            speculation=speculation,
            embeds=ids if isinstance(ids, PromptEmbeds) else None,
        )
        draft_limits(speculation, device.method.drafter)
        if request.embeds is not None:
            request.embeds.check_fits("prompt_embeds", device.method.target)
        scheduler.check_fits(request)
        per_row(sampling, 1, vocab_size)
        if request.grammar is not None:
            check_grammar_options(device.method.accept, ignore_eos=options.ignore_eos)
            device.grammars.compile(request.grammar)
        requests.append(request)
    return requests
