"""The user's call: text or ids in, a `Generation` out; and the pure function under it."""

from collections.abc import Iterator, Sequence

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
from jspec.engine.options import DEFAULT_PAGE_SIZE, choose_rule
from jspec.engine.result import Generation, Piece
from jspec.engine.run import Run, prefill_chunk


@struct
class GeneratedIds:
    """The result of `generate_ids`."""

    tokens: Int[Array, "B C"]
    """Prompts included; zeros behind each row's end."""
    length: Int[Array, " B"]
    """Of each row, prompt included."""
    logprobs: Float[Array, "B C"] | None
    """log p of each new token under the target's own logits, 0 elsewhere; None unless asked for."""
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
    """Generation as a pure function of arrays, to be called inside a `jit` of your own.

    Args:
      params: weights, `model.params`.
      ids: prompts, padded on the right with any id.
      lengths: tokens of each prompt, at least 1.
      key: of the random choices: one for each row, or one that is split among the rows. Greedy decoding uses none.
      target, draft: configurations, `model.target` and `model.draft`.
      max_new_tokens: bound on new tokens, for all rows or for each; may be traced.
      drafter: a name, an object, or None for plain decoding.
      max_length: C, columns of the result, a shape. A row ends where it is full. None: T + max_new_tokens, which must
        then be an int.
      eos: ids that end a row.
      page_size: rows of a cache page.
      sampling: for all rows, or one for each; a `RowSampling` where the parameters are arrays of your program.
      accept: the rule of acceptance, as in `generate`.
      logprobs: record the log-probability of each new token.

    Raises:
      ValueError: arguments that do not fit together; see the message.
    """
    if max_length is None:
        if not isinstance(max_new_tokens, int):
            raise ValueError("max_length=None: give the columns of the result where max_new_tokens is an array")
        max_length = ids.shape[1] + max_new_tokens
    if max_length < ids.shape[1]:
        raise ValueError(f"max_length={max_length} is less than the prompts' {ids.shape[1]} columns")
    rows = sampling if isinstance(sampling, RowSampling) else per_row(sampling, ids.shape[0], target.vocab_size)
    rule, chosen = choose_rule(accept, rows, drafters.resolve(drafter))
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
        rows,
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


def generate(
    model: Model,
    prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
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
) -> Generation:
    """Continues prompts; the tokens are those that the target alone would give.

    With sampling, too: by default the tokens are those of plain sampling with the same seed, whatever the drafter, the
    shape of its tree, the batch or the page size.

    Args:
      model: from `jspec.load`.
      prompts: one prompt or a list of them, as text or as token ids.
      drafter: a name in `jspec.drafters.DRAFTERS`, an object such as `jspec.Eagle(depth=5, width=8)`, or None for plain
        decoding. "auto": what the draft that is loaded is made for; without one, ngram.
      max_new_tokens: bound on the new tokens of each row.
      sampling: for all rows, or one for each; None is greedy.
      accept: the rule of acceptance, one of `jspec.core.accept.RULES` by name, or an object. None: "coupled" where a
        row samples, else "greedy". "rejection" and "block" have drafts drawn from the drafter's own law; all rules are
        the greedy one where all rows are greedy.
      stop: strings that end a row; the text ends before them.
      seed: of the random choices. Row i takes seed + i; or give a list, a seed for each row.
      logprobs: record the log-probability of each new token.
      page_size: rows of a cache page.
      progress: shows a bar of the tokens produced.
      debug: checks the invariants of every round and raises at the first that is broken. Slower.

    Raises:
      ValueError, TypeError: an argument that cannot be honoured, or a generation whose caches do not fit the device's
        memory, before anything runs.
    """
    with tqdm(unit="tok", desc="compiling", disable=not progress) as bar:
        run = Run(model, prompts, drafter, max_new_tokens, sampling, accept, stop, seed, logprobs, page_size, debug)
        bar.set_description()
        bar.reset(run.most_tokens)
        while not run.advance(16 if progress else None):
            bar.update(run.new_tokens - bar.n)
        bar.update(run.new_tokens - bar.n)
    return run.result()


def stream(
    model: Model,
    prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
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
) -> Iterator[Piece]:
    """As `generate`, in pieces as they are produced; its return value (of `yield from`) is the `Generation`.

    Arguments are those of `generate`, and `rounds`: rounds between two looks of the host. A multi-byte character
    comes whole, and text that may turn out to be the beginning of a stop string is held back.
    """
    if not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"rounds={rounds!r}: the host looks after at least 1 round")
    run = Run(model, prompts, drafter, max_new_tokens, sampling, accept, stop, seed, logprobs, page_size, debug)
    return _stream(run, rounds)


def _stream(run: Run, rounds: int):
    finished = run.advance(0)  # the prompt gave each row its first token
    yield from run.pieces()
    while not finished:
        finished = run.advance(rounds)
        yield from run.pieces()
    return run.result()
