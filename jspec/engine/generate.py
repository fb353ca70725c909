"""`generate` and `stream`, from text or ids."""

from collections.abc import Generator, Sequence
from typing import Unpack, overload

from tqdm import tqdm

from jspec.core import groups
from jspec.core.checks import check_flag, check_int
from jspec.core.sampling import each_of
from jspec.engine.batch import run
from jspec.engine.engine import Engine
from jspec.generation.options import GenerateKeywords, GenerateOptions, longest_sequence, repeat, takes
from jspec.generation.result import Generation, Generations, GenerationStats, Piece
from jspec.generation.run import Prompt, Run, bucket, check, encode_prompts, in_batches, one_call
from jspec.loading.model import Model
from jspec.runner.device import OneShape, option_set_of
from jspec.runner.slot_state import without_slots

ROUNDS_PER_UPDATE = 16
"""Rounds between two updates of the progress bar."""
MAX_BATCH = 64
"""Prompts of one program. More of them take turns, so memory does not grow with their number."""
PREFILL_TOKENS = 1024
"""Prompt tokens to read between two bursts where prompts take turns in an engine."""
BURST_MS = 100.0
"""Its time of rounds between two reports to the host."""


@overload
def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    n: int,
    progress: bool = ...,
    **keywords: Unpack[GenerateKeywords],
) -> Generations: ...


# A str is a Sequence[str], too; type checkers and `encode_prompts` take it as a single prompt.
@overload
def generate(  # pyright: ignore[reportOverlappingOverload]
    model: Model, prompts: str | Sequence[int], *, progress: bool = ..., **keywords: Unpack[GenerateKeywords]
) -> Generation: ...


@overload
def generate(
    model: Model, prompts: Sequence[Prompt], *, progress: bool = ..., **keywords: Unpack[GenerateKeywords]
) -> Generations: ...


@takes(GenerateOptions)
def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    n: int | None = None,
    progress: bool = False,
    **keywords: Unpack[GenerateKeywords],
) -> Generation | Generations:
    """Continues prompts with the tokens the target alone would generate.

    The drafter changes the speed, not the output. This includes sampling: by default the tokens are those of plain
    sampling with the same seed, for any drafter, tree shape, batch and page size.

    Of more than 64 prompts, 64 run at a time in each group of devices: the next starts when one ends, as in
    `jspec.Engine`, and those with the most new tokens start first. Over several processes, batches take turns.

    Args:
      model: from `jspec.load`.
      prompts: one prompt or a list of prompts, each as text or as token ids.
      drafter: a name in `jspec.drafters.DRAFTERS`, an object such as `jspec.Eagle(depth=5)`, or None for plain
        decoding. "auto": that of the loaded draft; without one, plain decoding or n-grams, by cost.
      max_new_tokens: maximum number of new tokens of every sequence, or a list with one entry per prompt.
      sampling: sampling parameters of all sequences, or a list with one entry per sequence. None: greedy.
      accept: the acceptance rule: a name in `jspec.core.accept.RULES`, or an object. None: "coupled" if any sequence
        samples, otherwise "greedy". With "rejection" and "block", drafts are sampled from the distribution of the
        drafter. Greedy sequences stay greedy under every lossless rule.
      stop: stop strings, or ids of tokens in a list; a text ends before the first of them.
      ignore_eos: whether a sequence goes on after the model has ended the text, for measurements of fixed lengths.
      seed: from 0 to 2**32 - 1. Sequence i has the noise of (seed, i), which no other seed repeats. Or a list with one
        seed s, which is (s, 0), or one pair per sequence: [(7, 3)] repeats sequence 3 of seed=7 alone.
      logprobs: whether to record the log-probability of each new token. A number k from 1 to 20: also the k most
        probable tokens in the place of each, with theirs. All are those of the target's own, unprocessed logits; the
        result has those of the sampled distributions as well (`sampled_logprobs`).
      support: record with `logprobs` up to this many ids of the tokens left by top-k, top-p, min-p and grammars
        (`TokenSupport`); at most 1024.
      speculation: limits of the drafts of all sequences, or a list with one entry per sequence, such as
        [jspec.Speculation(depth=0), None]. None: the drafter's own.
      n: samples of each prompt. The result has n items for the first prompt, then n for the next, and so on; `seed` has
        one entry per item, `sampling`, `speculation` and `max_new_tokens` one per prompt. None: one sample, and for a
        single prompt no list.
      page_size: rows per cache page.
      progress: whether to show a progress bar.
      debug: whether to check the invariants of every round and raise at the first violation. Slower.

    Returns:
      A `Generation` for a single prompt without `n`, otherwise `Generations`.

    Raises:
      ValueError, TypeError: an invalid argument, or caches too large for the device, before anything is compiled.
    """
    # Check the arguments, for all processes at once.
    with one_call(model):
        options = GenerateOptions(**keywords)
        check_flag("progress", progress)
        single, prompt_ids = encode_prompts(model, prompts, embeds=True)
        if n is not None:
            options = repeat(options, len(prompt_ids), check_int("n", n, least=1))
            prompt_ids = [ids for ids in prompt_ids for _ in range(n)]
    generations = generate_all(model, prompt_ids, options, progress=progress)
    return generations[0] if single and n is None else generations


def generate_all(
    model: Model,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions,
    *,
    progress: bool = False,
    slots: int | None = None,
) -> Generations:
    """Generates for any number of prompts: in one program, or for `slots` of them at a time.

    prompts: ids of each.
    slots: of each group of devices. None: `MAX_BATCH`; above it, reads are longer as well, since sequences end more
      often.

    Returns:
      The results; if prompts take turns, `stats.seconds` is the time of prefills and rounds, without compilation.

    Raises:
      ValueError, TypeError: as `jspec.generate`, before anything is compiled.
    """
    slots, placement = slots or MAX_BATCH, model.placement
    most = min(slots, MAX_BATCH) * groups.count(placement)
    if len(prompts) <= most:
        return _in_one_program(model, prompts, options, progress)
    with one_call(model):
        method, row_sampling = check(model, prompts, options)
    # An engine belongs to one process, and its caches have slots.
    several = placement is not None and placement.spans_processes
    if options.debug or several or without_slots(model.params, method):
        with tqdm(total=len(prompts), unit="prompt", disable=not progress) as bar:
            parts = []
            for part in in_batches(model, prompts, options, most):
                parts.append(part)
                bar.update(len(part))
        stats = GenerationStats.total([part.stats for part in parts], sum(part.stats.seconds for part in parts))
        return Generations([item for part in parts for item in part], stats)
    all_greedy = row_sampling is None or row_sampling.temperature is None
    slots = min(slots, groups.batch_of(placement, len(prompts)))
    return _in_engine(model, prompts, options, slots, all_greedy, progress)


def _in_engine(
    model: Model,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions,
    slots: int,
    all_greedy: bool,
    progress: bool,
) -> Generations:
    """Generates in the slots of an engine. All prompts are known, so one program of each kind is enough."""
    prefill_tokens = PREFILL_TOKENS if slots <= MAX_BATCH else max(PREFILL_TOKENS, 64 * slots)
    columns = min(bucket(max(map(len, prompts))), prefill_tokens)
    option_set = max(map(option_set_of, each_of(options.sampling, len(prompts))))
    length = sum(longest_sequence(prompts, options.limits(len(prompts))))
    engine = Engine(
        model,
        shape=OneShape((min(slots, prefill_tokens // columns), columns), option_set),
        drafter=options.drafter,
        # If nothing is sampled, every named rule is the greedy one, and so is None.
        accept=None if all_greedy and isinstance(options.accept, str) else options.accept,
        slots=slots,
        context=min(bucket(length), model.target.max_length),
        page_size=options.page_size,
        prefill_tokens=prefill_tokens,
        burst_ms=BURST_MS,
    )
    with engine:
        return run(engine.groups, engine.enqueue, engine.make(prompts, options), progress=progress)


def _in_one_program(
    model: Model, prompts: Sequence[Sequence[int]], options: GenerateOptions, progress: bool
) -> Generations:
    """Generates for all prompts at once."""
    # With a progress bar the loop returns after some rounds.
    with tqdm(unit="tok", desc="compiling", disable=not progress) as bar:
        rounds = ROUNDS_PER_UPDATE if progress else None
        run = Run(model, prompts, options, plan=f"generate, progress={progress}")
        bar.set_description()
        bar.reset(sum(options.limits(len(prompts))))
        while not run.advance(rounds):
            bar.update(run.new_tokens - bar.n)
        bar.update(run.new_tokens - bar.n)
    return run.result()


@takes(GenerateOptions)
def stream(
    model: Model, prompts: Prompt | Sequence[Prompt], *, rounds: int = 4, **keywords: Unpack[GenerateKeywords]
) -> Generator[Piece, None, Generation | Generations]:
    """Like `generate`, but yields text and tokens while they are generated.

    The other arguments are those of `generate`. A multi-byte character is yielded whole, and a possible
    beginning of a stop string is held back until it is decided.

    Args:
      rounds: rounds on the device between two pieces.

    Yields:
      The new text and tokens of each sequence, where there are any.

    Returns:
      What `generate` returns, as the value of `yield from`.
    """
    with one_call(model):
        rounds = check_int("rounds", rounds, least=1)
        options = GenerateOptions(**keywords)
    return _stream(Run(model, prompts, options, plan=f"stream, rounds={rounds}"), rounds)


def _stream(run: Run, rounds: int) -> Generator[Piece, None, Generation | Generations]:
    yield from run.stream(rounds)
    return run.result()[0] if run.single else run.result()
