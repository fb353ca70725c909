"""`generate` and `stream`, from text or ids."""

from collections.abc import Generator, Sequence
from typing import Unpack, overload

from tqdm import tqdm

from jspec.core.checks import check_flag, check_int
from jspec.engine.many import generate_many
from jspec.generation.options import GenerateKeywords, GenerateOptions, repeat, takes
from jspec.generation.result import Generation, Generations, Piece
from jspec.generation.run import Prompt, Run, encode_prompts, one_call
from jspec.loading.model import Model

ROUNDS_PER_UPDATE = 16
"""Rounds between two updates of the progress bar."""


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

    Of more than 64 prompts, 64 run at a time: the end of a sequence makes room for the next one, as in `jspec.Engine`.
    With groups of devices (`jspec.load(..., data=2)`), batches of 64 for each group take turns.

    Args:
      model: from `jspec.load`.
      prompts: one prompt or a list of prompts, each as text or as token ids.
      drafter: a name in `jspec.drafters.DRAFTERS`, an object such as `jspec.Eagle(depth=5, width=8)`, or None for plain
        decoding. "auto": the drafter for the loaded draft; without one, plain decoding or n-grams, by measured cost.
      max_new_tokens: maximum number of new tokens of every sequence, or a list with one entry per prompt.
      sampling: sampling parameters of all sequences, or a list with one entry per sequence. None: greedy.
      accept: the acceptance rule: a name in `jspec.core.accept.RULES`, or an object. None: "coupled" if any sequence
        samples, otherwise "greedy". With "rejection" and "block", drafts are sampled from the distribution of the
        drafter. Greedy sequences stay greedy under every lossless rule.
      stop: stop strings; a text ends before the first of them.
      ignore_eos: whether a sequence goes on after the model has ended the text, for measurements of fixed lengths.
      seed: from 0 to 2**32 - 1. Sequence i has the noise of (seed, i), which no other seed repeats. Or a list with one
        seed s, which is (s, 0), or one pair per sequence: [(7, 3)] repeats sequence 3 of seed=7 alone.
      logprobs: whether to record the log-probability of each new token. A number k from 1 to 20: also the k most
        probable tokens in the place of each, with theirs. All are those of the target's own, unprocessed logits; the
        result has those of the sampled distributions as well (`sampled_logprobs`).
      n: samples of each prompt. The result has n items for the first prompt, then n for the next, and so on; `sampling`
        and `max_new_tokens` have one entry per prompt, `seed` one per item. None: one sample, and for a single prompt
        no list.
      page_size: rows per cache page.
      progress: whether to show a progress bar.
      debug: whether to check the invariants of every round and raise at the first violation. Slower.

    Returns:
      A `Generation` for a single prompt without `n`, otherwise `Generations`.

    Raises:
      ValueError, TypeError: an invalid argument, or caches too large for the memory of the device. Raised before
        anything is compiled.
    """
    # Check the arguments, for all processes at once.
    with one_call(model):
        options = GenerateOptions(**keywords)
        check_flag("progress", progress)
        single, prompt_ids = encode_prompts(model, prompts)
        if n is not None:
            options = repeat(options, len(prompt_ids), check_int("n", n, least=1))
            prompt_ids = [ids for ids in prompt_ids for _ in range(n)]
    # More prompts than slots go through an engine.
    generations = generate_many(model, prompt_ids, options, progress=progress)
    if generations is None:
        generations = _generate(model, prompt_ids, options, progress)
    return generations[0] if single and n is None else generations


def _generate(model: Model, prompts: list[list[int]], options: GenerateOptions, progress: bool) -> Generations:
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
