"""`generate_ids`, generation as a pure function of arrays."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key

from jspec import drafters
from jspec.cache.pages import DEFAULT_PAGE_SIZE, fit_page_size
from jspec.core import grammar, groups, optional, sharding, stopping
from jspec.core.automaton import Automaton
from jspec.core.checks import check_hashable, check_int, check_sequence, shorten
from jspec.core.loop import SHARED, run_rounds
from jspec.core.method import Method, Records, on_devices
from jspec.core.options import check_options, option, set_checked
from jspec.core.prefill import prefill
from jspec.core.sampling import Sampling, check_rows, per_row
from jspec.core.sharding import Placement
from jspec.core.struct import struct
from jspec.core.types import Accept, DecodeState, Drafter, Params, Prompts, RowSampling, Stats, Target
from jspec.generation.method import choose_method
from jspec.generation.options import grammars_of, takes
from jspec.generation.run import prefill_chunk
from jspec.loading import memory

Limit = int | Int[Array, ""] | Int[Array, " B"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdsOptions:
    """The options of `generate_ids`, whose keywords they are.

    Raises:
      ValueError, TypeError: an option of another type or out of bounds.
    """

    target: Target
    """Configuration of the target: `model.target`."""
    max_new_tokens: Limit
    """Maximum number of new tokens, of all sequences or of each. May be traced; see `max_length`."""
    drafter: str | Drafter | None = None
    """A name in `jspec.drafters.DRAFTERS`, an object, or None for plain decoding."""
    draft: Target | None = None
    """Configuration of the draft model: `model.draft`. None if the drafter uses none."""
    max_length: int | None = option(None, least=1)
    """C, the number of columns of the result, at most the model's context; a full sequence ends. None:
    T + max_new_tokens, for which `max_new_tokens` must be an int."""
    eos: Sequence[int] = ()
    """Ids of the end of a text."""
    page_size: int = option(DEFAULT_PAGE_SIZE, least=1)
    """Rows per cache page."""
    sampling: Sampling | Sequence[Sampling | None] | RowSampling | None = None
    """Sampling parameters of all sequences, or a list with one entry per sequence; a `RowSampling` holds them as
    arrays, also traced ones. None: greedy."""
    accept: str | Accept | None = None
    """The acceptance rule, as in `jspec.generate`."""
    logprobs: bool = option(False)
    """Whether to record the log-probability of each new token."""
    placement: Placement | None = None
    """`model.placement` of a split model."""
    token_bytes: Sequence[bytes] | None = None
    """The bytes of each id in the text, `model.tokenizer.token_bytes()`; required with a grammar."""

    def __post_init__(self):
        if not isinstance(self.target, Target):
            raise TypeError(
                f"target={shorten(self.target)}: must be the configuration of a model, such as model.target"
            )
        check_options(self)
        _check_placement(self.target, self.draft, self.placement)
        # Options whose types are converted.
        values: dict[str, Any] = {}
        eos, most = check_sequence("eos", self.eos, items="a list of ids"), self.target.vocab_size - 1
        values["eos"] = [check_int(f"eos[{i}]", token, least=0, most=most) for i, token in enumerate(eos)]
        if not isinstance(self.max_new_tokens, jax.Array | np.ndarray):
            values["max_new_tokens"] = check_int("max_new_tokens", self.max_new_tokens, least=1)
        set_checked(self, **values)

    def columns(self, batch: int, columns: int) -> int:
        """The number of columns of the result, for prompts of this shape.

        Raises:
          ValueError, TypeError: the prompts, or the new tokens, do not fit in the columns or in the model's context.
        """
        # Without a length: the columns of the prompts and the new tokens.
        new, most = self.max_new_tokens, self.target.max_length
        if not isinstance(new, int):
            _check_array("max_new_tokens", new, [(), (batch,)], 1, np.iinfo(np.int32).max)
        if self.max_length is not None:
            if self.max_length < columns:
                raise ValueError(f"max_length={self.max_length}: must be at least the {columns} columns of the prompts")
            if self.max_length > most:
                raise ValueError(f"max_length={self.max_length}: must be at most the model's context of {most}")
            return self.max_length
        if not isinstance(new, int):
            raise ValueError("max_length=None: must be given if max_new_tokens is an array")
        if columns + new > most:
            raise ValueError(
                f"max_new_tokens={new}: with {columns} columns of prompts, this exceeds the model's context of {most}; "
                f"pass max_length={most} to end sequences there"
            )
        return columns + new

    def rows(self, batch: int) -> tuple[RowSampling | None, Automaton]:
        """The sampling parameters of each sequence, and the automaton of the grammars.

        Raises:
          ValueError, TypeError: sampling parameters of another batch or model.
        """
        vocabulary = self.target.vocab_size
        if isinstance(self.sampling, RowSampling):
            check_rows(self.sampling, batch, vocabulary)
            return self.sampling, Automaton()
        return per_row(self.sampling, batch, vocabulary), _compile_grammars(self, batch)


class IdsKeywords(TypedDict, total=False):
    """The fields of `IdsOptions`, as keywords of a function."""

    target: Required[Target]
    max_new_tokens: Required[Limit]
    drafter: str | Drafter | None
    draft: Target | None
    max_length: int | None
    eos: Sequence[int]
    page_size: int
    sampling: Sampling | Sequence[Sampling | None] | RowSampling | None
    accept: str | Accept | None
    logprobs: bool
    placement: Placement | None
    token_bytes: Sequence[bytes] | None


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


@takes(IdsOptions)
def generate_ids(
    params: Params,
    ids: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    key: Key[Array, ""] | Key[Array, " B"],
    **keywords: Unpack[IdsKeywords],
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
      key: one key per sequence, or a single key, to be split. Greedy decoding does not use it.
      keywords: the fields of `jspec.generation.ids.IdsOptions`.

    Returns:
      Tokens and lengths of all sequences; the tokens are those of `generate` for the same keys.

    Raises:
      ValueError, TypeError: invalid arguments, or caches that do not fit in the memory of the device, while tracing.
        Values of traced arrays are not checked; those of other arrays are.
    """
    # Check shapes, options and memory.
    options = IdsOptions(**keywords)
    batch, columns = _check_arrays(params, ids, lengths, key, options.target.vocab_size)
    capacity = options.columns(batch, columns)
    sampling, constraint = options.rows(batch)
    method, sampling = _method(options, sampling, batch, capacity)
    local = groups.batch_of(options.placement, batch)
    memory.fit(params, options.target, method.drafter, local, options.page_size, capacity, capacity)

    # The limits of all sequences, without an overflow whatever the sum.
    ids, lengths = jnp.asarray(ids, jnp.int32), jnp.asarray(lengths, jnp.int32)
    new = jnp.broadcast_to(jnp.asarray(options.max_new_tokens, jnp.int32), lengths.shape)
    limit = lengths + jnp.minimum(new, capacity - lengths)
    key = key if key.ndim else jax.random.split(key, batch)

    # Prefill and rounds.
    stop = stopping.init(stopping.build_table(options.target.vocab_size, options.eos), batch)
    shape = {"capacity": capacity, "page_size": fit_page_size(options.page_size, capacity)}
    read = partial(prefill, method=method, **shape, chunk=prefill_chunk(local))
    prompts = Prompts(ids, lengths, limit, key, stop, sampling, constraint)
    s = groups.prefill(options.placement, read, params, prompts)
    until = jnp.asarray(np.iinfo(np.int32).max, jnp.int32)
    s = on_devices(run_rounds, shared=SHARED)(params, s, until, method=method)
    return _results(s, method, batch)


def _method(
    options: IdsOptions, sampling: RowSampling | None, batch: int, capacity: int
) -> tuple[Method, RowSampling | None]:
    """Chooses the method, and the sampling parameters as its rule needs them."""
    drafter = drafters.resolve(options.drafter)
    check_hashable("drafter", drafter)
    method, sampling = choose_method(
        *(options.target, options.draft, drafter, options.accept, sampling),
        batch=batch,
        placement=options.placement,
        record=Records() if options.logprobs else None,
    )
    context = optional.max_length(method.drafter)
    if context is not None and capacity > context:
        raise ValueError(
            f"max_length={capacity}: exceeds the draft's context of {context}, after which it "
            "proposes nothing useful; pass less, or another drafter"
        )
    return method, sampling


def _results(s: DecodeState, method: Method, batch: int) -> GeneratedIds:
    """The results of all groups of devices."""
    arrays = s.tokens, s.length, s.recorded, s.stats
    tokens, length, recorded, stats = groups.unstack(method.placement, arrays, batch)
    written = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < length[:, None]
    logprobs = sampled = None
    if recorded is not None:
        logprobs, sampled = recorded.logprobs, recorded.sampled_logprobs
        sampled = jnp.zeros_like(logprobs) if sampled is None else sampled
    return GeneratedIds(jnp.where(written, tokens, 0), length, logprobs, stats, sampled)


def _compile_grammars(options: IdsOptions, batch: int) -> Automaton:
    """Compiles the grammars of all sequences to one automaton."""
    assert not isinstance(options.sampling, RowSampling)
    grammars = grammars_of(options.sampling, batch, options.accept)
    if not any(one is not None for one in grammars):
        return Automaton()
    if options.token_bytes is None:
        raise ValueError("token_bytes=None: a grammar requires them: model.tokenizer.token_bytes()")
    # Compile each distinct grammar once.
    vocab_size = options.target.vocab_size
    compiled = {one: one.compile(options.token_bytes, vocab_size, options.eos) for one in grammars if one is not None}
    return grammar.init([None if one is None else compiled[one] for one in grammars], vocab_size)


def _check_arrays(params: object, ids: object, lengths: object, key: object, vocab_size: int) -> tuple[int, int]:
    """Checks the arrays of `generate_ids`; returns B and T."""
    # Types and shapes.
    if not isinstance(params, Params):
        raise TypeError(f"params is of type {type(params).__name__}: must be jspec.core.types.Params, as model.params")
    if not isinstance(ids, jax.Array | np.ndarray) or ids.ndim != 2 or not ids.size:
        shape = getattr(ids, "shape", type(ids).__name__)
        raise TypeError(f"ids: must be an array of ints [B, T], at least one of each, not {shape}")
    batch, columns = ids.shape
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids is {ids.dtype}: must be an array of ints")
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(f"key is of type {type(key).__name__}: must be a key as jax.random.key makes it")
    if key.shape not in ((), (batch,)):
        raise ValueError(f"key has the shape {key.shape}: must be a single key, or one for each of {batch} sequences")
    # Lengths, then the ids of prompts.
    lengths = _check_array("lengths", lengths, [(batch,)], 1, columns)
    if not isinstance(ids, Tracer) and not isinstance(lengths, Tracer):
        read = np.asarray(ids)[np.arange(columns)[None] < np.asarray(lengths)[:, None]]
        _check_array("ids", read, [read.shape], 0, vocab_size - 1)
    return batch, columns


def _check_placement(target: Target, draft: object, placement: object) -> None:
    """Raises unless `placement` is that of the models."""
    # Weights must be split as in the placement.
    if placement is not None and not isinstance(placement, sharding.Placement):
        raise TypeError(f"placement={shorten(placement)}: must be model.placement, or None")
    size, splits_draft = (1, False) if placement is None else (placement.size, placement.draft)
    for name, config, devices in (("target", target, size), ("draft", draft, size if splits_draft else 1)):
        split = getattr(config, "tensor", 1)
        if config is not None and split != devices:
            raise ValueError(
                f"placement={shorten(placement)}: the {name} is split over {split} devices, and must be over "
                f"{devices}; pass placement=model.placement of the model that they belong to"
            )


def _check_array(
    name: str, array: object, shapes: Sequence[tuple[int, ...]], least: int, most: int
) -> Array | np.ndarray:
    """The array, if it has ints within bounds and one of these shapes; traced ints are not checked."""
    if not isinstance(array, jax.Array | np.ndarray) or not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} is {getattr(array, 'dtype', shorten(array))}: must be an array of ints")
    if array.shape not in shapes:
        raise ValueError(f"{name} has the shape {array.shape}: must be {' or '.join(map(str, shapes))}")
    if not isinstance(array, Tracer):
        values = np.asarray(array)
        wrong = values[(values < least) | (values > most)]
        if wrong.size:
            raise ValueError(f"{name} has the value {wrong.flat[0]}: must be from {least} to {most}")
    return array
