"""`generate` and `stream`, which take text or ids; and `generate_ids`, the pure function of arrays."""

from collections.abc import Generator, Sequence
from functools import partial
from typing import Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key
from tqdm import tqdm

from jspec import drafters
from jspec.cache.pages import DEFAULT_PAGE_SIZE, fit_page_size
from jspec.core import grammar, groups, sharding, stopping
from jspec.core.automaton import Automaton
from jspec.core.checks import check_flag, check_hashable, check_int, check_sequence, shorten
from jspec.core.loop import SHARED, run_rounds
from jspec.core.method import Method, on_devices
from jspec.core.prefill import prefill
from jspec.core.sampling import Sampling, check_rows, each_of, per_row
from jspec.core.sharding import Placement
from jspec.core.struct import struct
from jspec.core.types import Accept, BoundedDrafter, Drafter, Params, Prompts, RowSampling, Stats, Target
from jspec.engine import memory
from jspec.engine.many import generate_many
from jspec.engine.model import Model
from jspec.engine.options import (
    GenerateKeywords,
    GenerateOptions,
    bind_drafter,
    check_grammar_options,
    choose_rule,
    repeat,
    with_point_masses,
)
from jspec.engine.result import Generation, Generations, Piece
from jspec.engine.run import Prompt, Run, encode_prompts, one_call, prefill_chunk

ROUNDS_PER_UPDATE = 16
"""Rounds between two updates of the progress bar."""


@overload
def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    n: int,
    progress: bool = ...,
    **options: Unpack[GenerateKeywords],
) -> Generations: ...


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
    max_new_tokens: int | Sequence[int] = 128,
    sampling: Sampling | Sequence[Sampling | None] | None = None,
    accept: str | Accept | None = None,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    seed: int | Sequence[int] = 0,
    logprobs: bool | int = False,
    n: int | None = None,
    page_size: int = DEFAULT_PAGE_SIZE,
    progress: bool = False,
    debug: bool = False,
) -> Generation | Generations:
    """Continues prompts with the tokens that the target alone would generate.

    The drafter changes the speed, not the output. This includes sampling: by default the tokens are those of plain
    sampling with the same seed, for any drafter, tree shape, batch and page size.

    Of more than 64 prompts, 64 run at a time: a sequence that ends makes room for the next one, as in `jspec.Engine`.
    With groups of devices (`jspec.load(..., data=2)`), batches of 64 for each group take turns.

    Args:
      model: from `jspec.load`.
      prompts: one prompt or a list of prompts, each as text or as token ids.
      drafter: a name in `jspec.drafters.DRAFTERS`, an object such as `jspec.Eagle(depth=5, width=8)`, or None for plain
        decoding. "auto": the drafter that uses the loaded draft; ngram if there is none.
      max_new_tokens: maximum number of new tokens of every sequence, or a list with one entry per prompt.
      sampling: sampling parameters of all sequences, or a list with one entry per sequence. None: greedy.
      accept: the acceptance rule: a name in `jspec.core.accept.RULES`, or an object. None: "coupled" if any sequence
        samples, otherwise "greedy". With "rejection" and "block", drafts are sampled from the distribution of the
        drafter. Greedy sequences stay greedy under every lossless rule.
      stop: strings that end a sequence; its text ends before them.
      ignore_eos: whether a sequence goes on after the model has ended the text, for measurements of fixed lengths.
      seed: seed of the random choices, from 0 to 2**32 - 1; sequence i uses seed + i. Or a list with one seed per
        sequence.
      logprobs: whether to record the log-probability of each new token. A number k from 1 to 20: also the k most
        probable tokens in the place of each, with theirs. All are those of the target's own, unprocessed logits; the
        result has those of the distributions that the tokens were sampled from as well (`sampled_logprobs`).
      n: samples of each prompt. The result has n items for the first prompt, then n for the next, and so on; `sampling`
        and `max_new_tokens` have one entry per prompt, `seed` one per item. None: one sample, and for a single prompt
        no list.
      page_size: rows per cache page.
      progress: whether to show a progress bar.
      debug: whether to check the invariants of every round and raise at the first violation. Slower.

    Returns:
      A `Generation` for a single prompt without `n`, otherwise `Generations`.

    Raises:
      ValueError, TypeError: an invalid argument, or caches that do not fit in the memory of the device. Raised before
        anything is compiled.
    """
    with one_call(model):
        options = GenerateOptions(
            drafter=drafter,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            accept=accept,
            stop=stop,
            ignore_eos=ignore_eos,
            seed=seed,
            logprobs=logprobs,
            page_size=page_size,
            debug=debug,
        )
        check_flag("progress", progress)
        if n is not None:
            n = check_int("n", n, least=1)
            _, ids = encode_prompts(model, prompts)
            options = repeat(options, len(ids), n)
            prompts = [prompt for prompt in ids for _ in range(n)]
    if (many := generate_many(model, prompts, options, progress=progress)) is not None:
        return many
    with tqdm(unit="tok", desc="compiling", disable=not progress) as bar:
        rounds = ROUNDS_PER_UPDATE if progress else None
        run = Run(model, prompts, options, plan=f"generate, progress={progress}")
        bar.set_description()
        bar.reset(sum(options.limits(len(run.prompts))))
        while not run.advance(rounds):
            bar.update(run.new_tokens - bar.n)
        bar.update(run.new_tokens - bar.n)
    return run.result()[0] if run.single else run.result()


def stream(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    rounds: int = 4,
    drafter: str | Drafter | None = "auto",
    max_new_tokens: int | Sequence[int] = 128,
    sampling: Sampling | Sequence[Sampling | None] | None = None,
    accept: str | Accept | None = None,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    seed: int | Sequence[int] = 0,
    logprobs: bool | int = False,
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
    with one_call(model):
        rounds = check_int("rounds", rounds, least=1)
        options = GenerateOptions(
            drafter=drafter,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            accept=accept,
            stop=stop,
            ignore_eos=ignore_eos,
            seed=seed,
            logprobs=logprobs,
            page_size=page_size,
            debug=debug,
        )
    return _stream(Run(model, prompts, options, plan=f"stream, rounds={rounds}"), rounds)


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
    sampled_logprobs: Float[Array, "B C"] | None
    """Log-probability of each new token under the distribution that it was sampled from, after penalties, temperature
    and truncation, so 0 where a sequence is greedy, and 0 elsewhere; None unless `logprobs` are requested."""


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
    placement: Placement | None = None,
    token_bytes: Sequence[bytes] | None = None,
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
      max_length: C, the number of columns of the result, at most the model's context. A sequence that fills them ends.
        None: T + max_new_tokens, which requires `max_new_tokens` to be an int.
      eos: ids that end a sequence.
      page_size: rows per cache page.
      sampling: sampling parameters of all sequences, or a list with one entry per sequence; a `RowSampling` holds
        them as arrays, which may be traced. None: greedy.
      accept: the acceptance rule, as in `generate`.
      logprobs: whether to record the log-probability of each new token.
      placement: `model.placement` of a model that is split over devices.
      token_bytes: the bytes that each id adds to the text, `model.tokenizer.token_bytes()`; required with a grammar.

    Returns:
      Tokens and lengths of all sequences; the tokens are those of `generate` for the same keys.

    Raises:
      ValueError, TypeError: invalid arguments, or caches that do not fit in the memory of the device, while tracing.
        Values of traced arrays are not checked; those of other arrays are.
    """
    batch, columns = _check_arrays(params, ids, lengths, key, target)
    _check_placement(target, draft, placement)
    logprobs = check_flag("logprobs", logprobs)
    page_size = check_int("page_size", page_size, least=1)
    vocabulary = target.vocab_size
    eos = [
        check_int(f"eos[{i}]", one, least=0, most=vocabulary - 1)
        for i, one in enumerate(check_sequence("eos", eos, items="a list of ids"))
    ]
    if not isinstance(max_new_tokens, jax.Array | np.ndarray):
        max_new_tokens = check_int("max_new_tokens", max_new_tokens, least=1)
    else:
        _check_array("max_new_tokens", max_new_tokens, [(), (batch,)])
        _check_values("max_new_tokens", max_new_tokens, 1, np.iinfo(np.int32).max)
    if max_length is None:
        if not isinstance(max_new_tokens, int):
            raise ValueError("max_length=None: must be given if max_new_tokens is an array")
        if columns + max_new_tokens > target.max_length:
            raise ValueError(
                f"max_new_tokens={max_new_tokens}: with {columns} columns of prompts, this exceeds the model's context "
                f"of {target.max_length}; pass max_length={target.max_length} to end sequences there"
            )
        max_length = columns + max_new_tokens
    max_length = check_int("max_length", max_length, least=1)
    if max_length < columns:
        raise ValueError(f"max_length={max_length}: must be at least the {columns} columns of the prompts")
    if max_length > target.max_length:
        raise ValueError(f"max_length={max_length}: must be at most the model's context of {target.max_length}")
    constraint = Automaton()
    if isinstance(sampling, RowSampling):
        check_rows(sampling, batch, vocabulary)
    else:
        constraint = _compile_grammars(sampling, batch, vocabulary, eos, accept, token_bytes)
        sampling = per_row(sampling, batch, vocabulary)
    chosen = drafters.resolve(drafter)
    check_hashable("drafter", chosen)
    sampling = with_point_masses(accept, sampling, batch)
    rule, chosen = choose_rule(accept, sampling, chosen)
    bound = bind_drafter(chosen, target, draft)
    if isinstance(bound, BoundedDrafter) and max_length > bound.max_length:
        raise ValueError(
            f"max_length={max_length}: exceeds the draft's context of {bound.max_length}, after which it proposes "
            "nothing useful; pass less, or another drafter"
        )
    local = groups.batch_of(placement, batch)
    memory.fit(params, target, bound, local, page_size, max_length, max_length)
    table = stopping.build_table(vocabulary, eos)
    ids, lengths = jnp.asarray(ids, jnp.int32), jnp.asarray(lengths, jnp.int32)
    new = jnp.asarray(max_new_tokens, jnp.int32)
    # Without an overflow, whatever the sum.
    limit = lengths + jnp.minimum(jnp.broadcast_to(new, lengths.shape), max_length - lengths)
    key = key if key.ndim else jax.random.split(key, batch)
    # Prefill and rounds.
    method = Method(target, bound, rule, placement, record=0 if logprobs else None)
    read = partial(
        prefill,
        method=method,
        capacity=max_length,
        page_size=fit_page_size(page_size, max_length),
        chunk=prefill_chunk(local),
    )
    prompts = Prompts(ids, lengths, limit, key, stopping.init(table, batch), sampling, constraint)
    s = groups.prefill(placement, read, params, prompts)
    until = jnp.asarray(np.iinfo(np.int32).max, jnp.int32)
    s = on_devices(run_rounds, shared=SHARED)(params, s, until, method=method)
    # The results of all groups of devices.
    tokens, length, recorded, stats = groups.unstack(placement, (s.tokens, s.length, s.recorded, s.stats), batch)
    written = jnp.arange(max_length, dtype=jnp.int32)[None] < length[:, None]
    logprobs_of = sampled = None
    if recorded is not None:
        logprobs_of, sampled = recorded.logprobs, recorded.sampled_logprobs
        sampled = jnp.zeros_like(logprobs_of) if sampled is None else sampled
    return GeneratedIds(jnp.where(written, tokens, 0), length, logprobs_of, stats, sampled)


def _compile_grammars(
    sampling: Sampling | Sequence[Sampling | None] | None,
    batch: int,
    vocab_size: int,
    eos: Sequence[int],
    accept: str | Accept | None,
    token_bytes: Sequence[bytes] | None,
) -> Automaton:
    """The automaton of the grammars of `generate_ids`."""
    given = [None if one is None else one.grammar for one in each_of(sampling, batch)]
    if not any(one is not None for one in given):
        return Automaton()
    check_grammar_options(accept, ignore_eos=False)
    if token_bytes is None:
        raise ValueError("token_bytes=None: a grammar requires them: model.tokenizer.token_bytes()")
    compiled = {one: one.compile(token_bytes, vocab_size, eos) for one in given if one is not None}
    return grammar.init([None if one is None else compiled[one] for one in given], vocab_size)


def _check_arrays(params: object, ids: object, lengths: object, key: object, target: object) -> tuple[int, int]:
    """Checks the arrays of `generate_ids`; returns B and T."""
    if not isinstance(target, Target):
        raise TypeError(f"target={shorten(target)}: must be the configuration of a model, such as model.target")
    if not isinstance(params, Params):
        raise TypeError(f"params is of type {type(params).__name__}: must be jspec.core.types.Params, as model.params")
    if not isinstance(ids, jax.Array | np.ndarray) or ids.ndim != 2 or not ids.size:
        shape = getattr(ids, "shape", type(ids).__name__)
        raise TypeError(f"ids: must be an array of ints [B, T], at least one of each, not {shape}")
    batch, columns = ids.shape
    _check_array("ids", ids, [(batch, columns)])
    lengths = _check_array("lengths", lengths, [(batch,)])
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(f"key is of type {type(key).__name__}: must be a key as jax.random.key makes it")
    if key.shape not in ((), (batch,)):
        raise ValueError(f"key has the shape {key.shape}: must be a single key, or one for each of {batch} sequences")
    _check_values("lengths", lengths, 1, columns)
    if not isinstance(ids, Tracer) and not isinstance(lengths, Tracer):
        used = np.arange(columns)[None] < np.asarray(lengths)[:, None]
        _check_values("ids", np.asarray(ids)[used], 0, target.vocab_size - 1)
    return batch, columns


def _check_placement(target: Target, draft: object, placement: object) -> None:
    """Raises unless `placement` is that of the models."""
    if placement is not None and not isinstance(placement, sharding.Placement):
        raise TypeError(f"placement={shorten(placement)}: must be model.placement, or None")
    size, splits_draft = (1, False) if placement is None else (placement.size, placement.draft)
    for name, config, wanted in (("target", target, size), ("draft", draft, size if splits_draft else 1)):
        found = getattr(config, "tensor", 1)
        if config is not None and found != wanted:
            raise ValueError(
                f"placement={shorten(placement)}: the {name} is split over {found} devices, and must be over {wanted}; "
                "pass placement=model.placement of the model that they belong to"
            )


def _check_array(name: str, array: object, shapes: Sequence[tuple[int, ...]]) -> Array | np.ndarray:
    """The array, if it has ints and one of these shapes."""
    if not isinstance(array, jax.Array | np.ndarray) or not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} is {getattr(array, 'dtype', shorten(array))}: must be an array of ints")
    if array.shape not in shapes:
        raise ValueError(f"{name} has the shape {array.shape}: must be {' or '.join(map(str, shapes))}")
    return array


def _check_values(name: str, array: Array | np.ndarray, least: int, most: int) -> None:
    """Raises ValueError if an array that is not traced has other values."""
    if isinstance(array, Tracer):
        return
    values = np.asarray(array)
    wrong = values[(values < least) | (values > most)]
    if wrong.size:
        raise ValueError(f"{name} has the value {wrong.flat[0]}: must be from {least} to {most}")
