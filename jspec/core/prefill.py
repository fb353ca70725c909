"""Prefill: reads the prompts and chooses the first new token of each sequence, as a round without drafts would.

That token is in no cache yet: it is the root of the first round's tree.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jspec.core import branches, groups, stopping, tree
from jspec.core.automaton import Automaton
from jspec.core.commit import commit_rows
from jspec.core.embeds import Embeds
from jspec.core.method import Method, Records
from jspec.core.pieces import Pieces
from jspec.core.returned import check_output
from jspec.core.round import accept_drafts, append, extend
from jspec.core.struct import struct
from jspec.core.types import Committed, DecodeState, Params, Prompts, Recorded, RowSampling, Stats, Support, TopTokens


def prefill(
    params: Params, prompts: Prompts, *, method: Method, capacity: int, page_size: int, chunk: int | None = None
) -> DecodeState:
    """The state before the first round: prompts in the caches, first generated token appended.

    Args:
      capacity: columns of the token buffer, at least max(prompts.limit).
      page_size: rows per page of the caches.
      chunk: columns per forward, to bound the memory of activations; longer prompts are read in a loop
        with as many iterations as the longest prompt needs. None: all columns.
    """
    width = prompts.ids.shape[1]
    s = _unread(params, prompts, method, capacity, page_size)
    size = width if chunk is None else min(chunk, width)

    def read(s: DecodeState, start: Int[Array, ""] | None) -> DecodeState:
        """Reads `size` more columns, from column `start` (None: the first chunk)."""
        begin = jnp.zeros_like(s.prompt_length) if start is None else jnp.minimum(start, s.prompt_length)
        count = jnp.minimum(s.prompt_length - begin, size)
        ends = (count > 0) & (begin + count == s.prompt_length)
        column = begin[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        embeds = jax.tree.map(lambda x: tree.take_path(x, column), prompts.embeds)
        chunk = Chunk(begin, count, ends, embeds)
        return read_columns(params, s, chunk, method=method, size=size, first=start is None)

    s = read(s, None)
    if size == width:
        return s
    return lax.fori_loop(1, -(-jnp.max(prompts.length) // size), lambda i, s: read(s, i * size), s)


@struct
class Chunk:
    """The next `count` tokens of each sequence to read, from position `begin` on."""

    begin: Int[Array, " B"]
    count: Int[Array, " B"]
    ends: Bool[Array, " B"]
    """Sequences to get the token after the last one read, chosen as in a round without drafts."""
    embeds: Embeds | None = None
    """In the places of some of the tokens, from the first column on; None: there are none."""
    pieces: Pieces | None = None
    """Which chunks are pieces of a prompt; None: each sequence reads one chunk."""


def read_columns(
    params: Params, s: DecodeState, chunk: Chunk, *, method: Method, size: int, first: bool = False
) -> DecodeState:
    """The state after each sequence has read a chunk.

    size: columns of the program; at most this many tokens are read.
    first: nothing is committed before these columns, in any sequence.
    """
    begin, count = chunk.begin, chunk.count
    # The tokens of this chunk.
    column, last = jnp.arange(size, dtype=jnp.int32)[None], jnp.maximum(count - 1, 0)
    tokens = jnp.take_along_axis(s.tokens, begin[:, None] + column, axis=1, mode="clip")
    # Verify and accept: the last token of each prompt is the root of a tree without drafts.
    prefix, layers = None if first else begin, method.capture_layers
    tokens_tree = tree.chain(tokens, chunk.embeds)
    options = {} if chunk.pieces is None else {"pieces": chunk.pieces}
    out = method.target.forward(
        params.target, tokens_tree, s.cache, prefix, capture_layers=layers, select=last, **options
    )
    check_output(method.target, out, 1)
    root = tree.chain(jnp.take_along_axis(tokens, last[:, None], axis=1))
    decision = accept_drafts(s, root, out, method=method, live=chunk.ends)
    # Commit and extend: all rows of the chunk are permanent.
    cache = commit_rows(s.cache, out.rows, begin, None, count, after=out.logits, pieces=chunk.pieces)
    s = dataclasses.replace(append(s, decision), cache=cache)
    following = jnp.take_along_axis(s.tokens, begin[:, None] + column + 1, axis=1, mode="clip")
    committed = Committed(begin, following, out.hidden, count, pieces=chunk.pieces, first=first)
    return extend(params, s, committed, method=method)


def empty_record(shape: tuple[int, int], sampling: RowSampling | None, record: Records | None) -> Recorded | None:
    """`DecodeState.recorded` before the first token, with this shape [B, C].

    sampling: of the sequences; distributions after processing are recorded only if one of them samples.
    record: as in `Method`.
    """
    if record is None:
        return None
    zeros = jnp.zeros(shape, jnp.float32)
    top = TopTokens(jnp.zeros((*shape, record.top), jnp.int32), jnp.zeros((*shape, record.top), jnp.float32))
    support = Support(jnp.zeros(shape, jnp.int32), jnp.zeros((*shape, record.support), jnp.int32))
    samples = sampling is not None and sampling.temperature is not None
    return Recorded(
        zeros, top if record.top else None, zeros if samples else None, support if samples and record.support else None
    )


@partial(jax.jit, static_argnames=("method", "capacity", "page_size", "chunk"))
def jitted_prefill(
    params: Params, prompts: Prompts, *, method: Method, capacity: int, page_size: int, chunk: int | None = None
) -> DecodeState:
    """`prefill`, jitted: one compiled program for each configuration and shape of the prompts.

    If the placement has several groups of devices, the state is stacked, as `jspec.core.groups` describes.
    """
    read = partial(prefill, method=method, capacity=capacity, page_size=page_size, chunk=chunk)
    return groups.prefill(method.placement, read, params, prompts)


def _unread(params: Params, prompts: Prompts, method: Method, capacity: int, page_size: int) -> DecodeState:
    """The state before the prompts are read: empty caches and counters."""
    batch, width = prompts.ids.shape
    # Tokens proposed past the limit are dropped, so they need no columns.
    columns = max(capacity, width)
    # Padded, because writing a slice of a whole array crashes XLA of JAX 0.11.2 over devices.
    tokens = jnp.pad(prompts.ids.astype(jnp.int32), ((0, 0), (0, columns - width)))
    ended = prompts.length >= prompts.limit
    stats = Stats(
        rounds=jnp.zeros(batch, jnp.int32),
        accept_counts=jnp.zeros((batch, method.drafter.depth + 1), jnp.int32),
        dropped=jnp.zeros(batch, jnp.int32),
        branch_counts=branches.counters(method.drafter, batch),
    )
    return DecodeState(
        tokens=tokens,
        length=prompts.length,
        limit=prompts.limit,
        finish_code=jnp.where(ended, jnp.int32(stopping.LENGTH), jnp.int32(stopping.RUNNING)),
        stop=prompts.stop,
        cache=method.target.init_cache(params.target, batch, columns, page_size),
        draft=method.drafter.init(params, batch, columns, page_size),
        sampling=prompts.sampling,
        key=prompts.key,
        prompt_length=prompts.length,
        origin=jnp.zeros((batch, columns), jnp.int8),
        round_index=jnp.zeros((), jnp.int32),
        stats=stats,
        recorded=empty_record((batch, columns), prompts.sampling, method.record),
        grammar=Automaton() if prompts.grammar is None else prompts.grammar,
        costs=branches.costs(method.drafter, batch),
        draft_limits=prompts.draft_limits,
    )
