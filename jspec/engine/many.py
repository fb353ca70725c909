"""More prompts than run at once: they take turns in the slots of an engine."""

from collections.abc import Sequence

from jspec.core.sampling import per_row
from jspec.engine import programs
from jspec.engine.engine import Engine
from jspec.engine.model import Model
from jspec.engine.options import GenerateOptions, bind_drafter, check_fits, choose_drafter, choose_rule
from jspec.engine.result import Generations
from jspec.engine.run import Prompt, bucket, encode_prompts

MAX_BATCH = 64
"""Prompts that run at once. More of them take turns, so memory does not grow with their number, and a sequence that
ends early makes room for the next one."""


def generate_many(
    model: Model, prompts: Prompt | Sequence[Prompt], options: GenerateOptions, *, progress: bool = False
) -> Generations | None:
    """As `jspec.generate` if more than `MAX_BATCH` prompts are given; `stats.seconds` is the time of the whole call.

    None: there are no more than that, or an engine lacks what is asked for: `debug`, or a cache that has no slots.

    Raises:
      ValueError, TypeError: as `jspec.generate`, before anything is compiled.
    """
    if options.debug or not isinstance(prompts, Sequence) or isinstance(prompts, str) or len(prompts) <= MAX_BATCH:
        return None
    single, prompt_ids = encode_prompts(model, prompts)
    count, longest = len(prompt_ids), max(map(len, prompt_ids))
    if single:
        return None
    options.seeds(count)
    row_sampling = per_row(options.sampling, count, model.target.vocab_size)
    _, drafter = choose_rule(options.accept, row_sampling, choose_drafter(options.drafter, model))
    bound = bind_drafter(drafter, model.target, model.draft)
    check_fits(model.target, longest, options.max_new_tokens, bound)
    if programs.without_slots(model.params, model.target, bound):
        return None
    # If nothing is sampled, every named rule is the greedy one, and so is None.
    all_greedy = row_sampling is None or row_sampling.temperature is None
    with Engine(
        model,
        drafter=options.drafter,
        accept=None if all_greedy and isinstance(options.accept, str) else options.accept,
        slots=MAX_BATCH,
        context=min(bucket(longest + options.max_new_tokens), model.target.max_length),
        page_size=options.page_size,
    ) as engine:
        out = engine.generate(
            prompt_ids,
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling,
            stop=options.stop,
            seed=options.seed,
            logprobs=options.logprobs,
            progress=progress,
        )
    assert isinstance(out, Generations)
    return out
