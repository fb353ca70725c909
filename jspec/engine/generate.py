"""`generate` and `stream`, which take text or ids; and `generate_ids`, the pure function of arrays."""

from collections.abc import Generator, Sequence
from typing import Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key
from tqdm import tqdm

from jspec import drafters
from jspec.core import decode, stopping
from jspec.core.sampling import Sampling, per_row
from jspec.core.struct import struct
from jspec.core.types import Accept, Drafter, Params, RowSampling, Stats, Target
from jspec.engine.model import Model
from jspec.engine.options import DEFAULT_PAGE_SIZE, GenerateKeywords, GenerateOptions, check_int, choose_rule
from jspec.engine.result import Generation, Generations, Piece
from jspec.engine.run import Prompt, Run, prefill_chunk

ROUNDS_PER_UPDATE = 16
"""Rounds between two updates of the progress bar."""


# A str is a Sequence[str], too; type checkers and `encode_prompts` take it as a single prompt.
@overload
def generate(  # pyright: ignore[reportOverlappingOverload]
    model: Model, prompts: str | Sequence[int], *, progress: bool = ..., **options: Unpack[GenerateKeywords]
) -> Generation: ...


@overload
def generate(
    model: Model, prompts: Sequence[Prompt], *, progress: bool = ..., **options: Unpack[GenerateKeywords]
) -> Generations: ...


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    drafter: str | Drafter | None = "auto",
    max_new_tokens: int = 128,
    sampling: Sampling | Sequence[Sampling | None] | None = None,
    accept: str | Accept | None = None,
    stop: str | Sequence[str] = (),
    seed: int | Sequence[int] = 0,
    logprobs: bool = False,
    page_size: int = DEFAULT_PAGE_SIZE,
    progress: bool = False,
    debug: bool = False,
) -> Generation | Generations:
    """Continues prompts with the tokens that the target alone would generate.

    The drafter changes the speed, not the output. This includes sampling: by default the tokens are those of plain
    sampling with the same seed, for any drafter, tree shape, batch and page size.

    Args:
      model: from `jspec.load`.
      prompts: one prompt or a list of prompts, each as text or as token ids.
      drafter: a name in `jspec.drafters.DRAFTERS`, an object such as `jspec.Eagle(depth=5, width=8)`, or None for plain
        decoding. "auto": the drafter that uses the loaded draft; ngram if there is none.
      max_new_tokens: maximum number of new tokens per sequence.
      sampling: sampling parameters of all sequences, or a list with one entry per sequence. None: greedy.
      accept: the acceptance rule: a name in `jspec.core.accept.RULES`, or an object. None: "coupled" if any sequence
        samples, otherwise "greedy". With "rejection" and "block", drafts are sampled from the distribution of the
        drafter. If all sequences are greedy, every rule is the greedy one.
      stop: strings that end a sequence; its text ends before them.
      seed: seed of the random choices; sequence i uses seed + i. Or a list with one seed per sequence.
      logprobs: whether to record the log-probability of each new token.
      page_size: rows per cache page.
      progress: whether to show a progress bar.
      debug: whether to check the invariants of every round and raise at the first violation. Slower.

    Returns:
      A `Generation` for a single prompt, `Generations` for a list of prompts.

    Raises:
      ValueError, TypeError: an invalid argument, or caches that do not fit in the memory of the device. Raised before
        anything is compiled.
    """
    options = GenerateOptions(
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        accept=accept,
        stop=stop,
        seed=seed,
        logprobs=logprobs,
        page_size=page_size,
        debug=debug,
    )
    with tqdm(unit="tok", desc="compiling", disable=not progress) as bar:
        run = Run(model, prompts, options)
        bar.set_description()
        bar.reset(len(run.prompts) * max_new_tokens)
        while not run.advance(ROUNDS_PER_UPDATE if progress else None):
            bar.update(run.new_tokens - bar.n)
        bar.update(run.new_tokens - bar.n)
    return run.result()[0] if run.single else run.result()


def stream(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    rounds: int = 4,
    drafter: str | Drafter | None = "auto",
    max_new_tokens: int = 128,
    sampling: Sampling | Sequence[Sampling | None] | None = None,
    accept: str | Accept | None = None,
    stop: str | Sequence[str] = (),
    seed: int | Sequence[int] = 0,
    logprobs: bool = False,
    page_size: int = DEFAULT_PAGE_SIZE,
    debug: bool = False,
) -> Generator[Piece, None, Generation | Generations]:
    """Like `generate`, but yields text and tokens while they are generated.

    The other arguments are those of `generate`. A multi-byte character is yielded whole, and text that may be the
    beginning of a stop string is held back until that is decided.

    Args:
      rounds: rounds on the device between two pieces.

    Yields:
      The new text and tokens of each sequence that has any.

    Returns:
      What `generate` returns, as the value of `yield from`.
    """
    check_int("rounds", rounds, least=1)
    options = GenerateOptions(
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        accept=accept,
        stop=stop,
        seed=seed,
        logprobs=logprobs,
        page_size=page_size,
        debug=debug,
    )
    return _stream(Run(model, prompts, options), rounds)


def _stream(run: Run, rounds: int) -> Generator[Piece, None, Generation | Generations]:
    yield from run.stream(rounds)
    return run.result()[0] if run.single else run.result()


@struct
class GeneratedIds:
    """The result of `generate_ids`."""

    tokens: Int[Array, "B C"]
    """Prompt and new tokens of each sequence, followed by zeros."""
    length: Int[Array, " B"]
    """Tokens of each sequence, prompt included."""
    logprobs: Float[Array, "B C"] | None
    """Log-probability of each new token under the target's own logits, 0 elsewhere; None unless requested."""
    stats: Stats


def generate_ids(
    params: Params,
    ids: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    key: Key[Array, ""] | Key[Array, " B"],
    *,
    target: Target,
    max_new_tokens: int | Int[Array, ""] | Int[Array, " B"],
    drafter: str | Drafter | None = None,
    draft: Target | None = None,
    max_length: int | None = None,
    eos: Sequence[int] = (),
    page_size: int = DEFAULT_PAGE_SIZE,
    sampling: Sampling | Sequence[Sampling | None] | RowSampling | None = None,
    accept: str | Accept | None = None,
    logprobs: bool = False,
) -> GeneratedIds:
    """Generation as a pure function of arrays, for use inside your own `jit`.

    The arrays are the traced arguments; everything else is static, except where noted. For example:

        @jax.jit
        def complete(params, ids, lengths, key):
            return jspec.generate_ids(params, ids, lengths, key, target=model.target, max_new_tokens=64)

    Args:
      params: weights of target and draft: `model.params`.
      ids: prompts, padded on the right with any id.
      lengths: number of tokens of each prompt, at least 1.
      key: one key per sequence, or a single key that is split. Greedy decoding does not use it.
      target: configuration of the target: `model.target`.
      max_new_tokens: maximum number of new tokens, of all sequences or of each. May be traced; see `max_length`.
      drafter: a name in `jspec.drafters.DRAFTERS`, an object, or None for plain decoding.
      draft: configuration of the draft model: `model.draft`. None if the drafter uses none.
      max_length: C, the number of columns of the result. A sequence that fills them ends. None: T + max_new_tokens,
        which requires `max_new_tokens` to be an int.
      eos: ids that end a sequence.
      page_size: rows per cache page.
      sampling: sampling parameters of all sequences, or a list with one entry per sequence; a `RowSampling` holds
        them as arrays, which may be traced. None: greedy.
      accept: the acceptance rule, as in `generate`.
      logprobs: whether to record the log-probability of each new token.

    Returns:
      Tokens and lengths of all sequences; the tokens are those of `generate` for the same keys.

    Raises:
      ValueError, TypeError: invalid arguments, while tracing.
    """
    if max_length is None:
        if not isinstance(max_new_tokens, int):
            raise ValueError("max_length=None: must be given if max_new_tokens is an array")
        max_length = ids.shape[1] + max_new_tokens
    if max_length < ids.shape[1]:
        raise ValueError(f"max_length={max_length}: must be at least the {ids.shape[1]} columns of the prompts")
    if not isinstance(sampling, RowSampling):
        sampling = per_row(sampling, ids.shape[0], target.vocab_size)
    rule, chosen = choose_rule(accept, sampling, drafters.resolve(drafter))
    bound = chosen.bind(target, draft)
    table = stopping.build_table(target.vocab_size, eos)
    limit = jnp.broadcast_to(jnp.minimum(lengths + jnp.asarray(max_new_tokens, jnp.int32), max_length), lengths.shape)
    s = decode.prefill(
        params,
        ids,
        lengths,
        limit,
        key if key.ndim else jax.random.split(key, ids.shape[0]),
        stopping.init(table, ids.shape[0]),
        sampling,
        target=target,
        drafter=bound,
        accept=rule,
        capacity=max_length,
        page_size=page_size,
        logprobs=logprobs,
        chunk=prefill_chunk(ids.shape[0]),
    )
    until = jnp.asarray(np.iinfo(np.int32).max, jnp.int32)
    s = decode.run_rounds(params, s, until, target=target, drafter=bound, accept=rule)
    written = jnp.arange(max_length, dtype=jnp.int32)[None] < s.length[:, None]
    return GeneratedIds(jnp.where(written, s.tokens, 0), s.length, s.logprobs, s.stats)
