"""The loop: prefill once, then rounds of draft, verify, accept, commit, extend, in one XLA program.

Target, drafter and rule of acceptance are handed in as static arguments; this module knows none of them.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify
from jaxtyping import Array, Float, Int, Key

from jspec.core import sampling, stopping, tree
from jspec.core.types import Accept, Acceptance, Committed, DecodeState, Drafter, Params, Stats, Target
from jspec.core.xla_options import FEW, loop_options


def prefill(
    params: Params,
    ids: Int[Array, "B T"],
    length: Int[Array, " B"],
    limit: Int[Array, " B"],
    key: Key[Array, " B"],
    stop: stopping.Stop,
    rows: sampling.RowSampling | None = None,
    *,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    capacity: int,
    page_size: int,
    logprobs: bool = False,
    chunk: int | None = None,
) -> DecodeState:
    """The state before the first round: the prompt is in the caches, and behind it stands the first new token.

    Args:
      ids: prompts, padded on the right to one width.
      length: tokens of each prompt, at least 1.
      limit: the length at which each row ends, prompt included.
      key: of each row's random numbers.
      rows: parameters of the choice of tokens; None: greedy.
      accept: the rule that chooses, as in the rounds.
      capacity: columns of the token buffer, at least max(limit).
      logprobs: record the log-probability of each new token.
      chunk: columns that are read at once, which bounds the memory it takes; longer prompts are read in a loop, of as
        many turns as the longest needs. None: all.
    """
    batch, width = ids.shape
    # The last round may propose past the limit; those rows need somewhere to be dropped from, not a place.
    room = max(capacity, width)
    s = DecodeState(
        tokens=jnp.zeros((batch, room), jnp.int32).at[:, :width].set(ids),
        length=length,
        limit=limit,
        finish_code=jnp.where(length >= limit, jnp.int32(stopping.LENGTH), jnp.int32(stopping.RUNNING)),
        stop=stop,
        cache=target.init_cache(params.target, batch, room, page_size),
        draft=drafter.init(params, batch, room, page_size),
        sampling=rows,
        key=key,
        prompt_length=length,
        origin=jnp.zeros((batch, room), jnp.int8),
        logprobs=jnp.zeros((batch, room), jnp.float32) if logprobs else None,
        round_index=jnp.zeros((), jnp.int32),
        stats=Stats(jnp.zeros(batch, jnp.int32), jnp.zeros((batch, drafter.depth + 1), jnp.int32)),
    )
    size = width if chunk is None else min(chunk, width)
    read = partial(_read_prompt, params, target=target, drafter=drafter, accept=accept, size=size)
    s = read(s, None)
    if size == width:
        return s
    return lax.fori_loop(1, -(-jnp.max(length) // size), lambda i, s: read(s, i * size), s)


def _read_prompt(
    params: Params,
    s: DecodeState,
    start: Int[Array, ""] | None,
    *,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    size: int,
) -> DecodeState:
    """The state with `size` more columns of the prompts read, from column `start` on or, for None, the first ones.

    Rows whose prompt ends here get their first token, chosen as in a round without drafts.
    """
    begin = jnp.zeros_like(s.prompt_length) if start is None else jnp.minimum(start, s.prompt_length)
    count = jnp.minimum(s.prompt_length - begin, size)
    column, last = jnp.arange(size, dtype=jnp.int32)[None], jnp.maximum(count - 1, 0)
    tokens = jnp.take_along_axis(s.tokens, begin[:, None] + column, axis=1, mode="clip")
    prefix = None if start is None else begin
    out = target.forward(
        params.target, tree.chain(tokens), s.cache, prefix, capture_layers=drafter.capture_layers, select=last
    )
    root = tree.chain(jnp.take_along_axis(tokens, last[:, None], axis=1))
    chosen = accept(s.key, root, sampling.process(s, out.logits, tree.paths(root)), s.length)
    ends = (count > 0) & (begin + count == s.prompt_length)
    kept, stop, finish = truncate_at_stop(s, dataclasses.replace(chosen, length=jnp.where(ends, chosen.length, 0)))
    # Orders the write behind the last layer's read, as in `truncate_at_stop`.
    count = jnp.where(kept.tokens[:, 0] < 0, 0, count)
    logprobs = token_logprobs(out.logits, kept) if s.logprobs is not None else None
    cache = s.cache.commit(out.rows, begin, None, count)
    s = append(s, kept, jnp.zeros_like(kept.length), logprobs, stop=stop, finish_code=finish, cache=cache)
    following = jnp.take_along_axis(s.tokens, begin[:, None] + column + 1, axis=1, mode="clip")
    committed = Committed(begin, following, out.hidden, count, first=start is None)
    return dataclasses.replace(s, draft=drafter.extend(params, s, committed))


jitted_prefill = jax.jit(
    prefill, static_argnames=("target", "drafter", "accept", "capacity", "page_size", "logprobs", "chunk")
)
"""`prefill` for a host to call; one compiled program for each configuration and shape of the prompts."""


def step(
    params: Params, s: DecodeState, *, target: Target, drafter: Drafter, accept: Accept, debug: bool = False
) -> DecodeState:
    """One round: draft, verify, accept, commit, extend; these are also the names of its parts in a profile."""
    with jax.named_scope("draft"):
        draft_tree, draft_state = drafter.draft(params, s)
    start = s.length - 1
    with jax.named_scope("verify"):
        out = target.forward(params.target, draft_tree, s.cache, start, capture_layers=drafter.capture_layers)
    with jax.named_scope("accept"):
        accepted = accept(s.key, draft_tree, sampling.process(s, out.logits, tree.paths(draft_tree)), s.length)
        if debug:
            check_round(s, draft_tree, out.logits, accepted, target.vocab_size)
        kept, stop, finish = truncate_at_stop(s, accepted)
        logprobs = token_logprobs(out.logits, kept) if s.logprobs is not None else None
    with jax.named_scope("commit"):
        cache = s.cache.commit(out.rows, start, kept.path, kept.length)
        counted = {"round_index": s.round_index + 1, "stats": count_round(s, kept)}
        s = append(
            s,
            kept,
            accepted.length - 1,
            logprobs,
            stop=stop,
            finish_code=finish,
            cache=cache,
            draft=draft_state,
            **counted,
        )
    with jax.named_scope("extend"):
        committed = Committed(start, kept.tokens, tree.take_path(out.hidden, kept.path), kept.length)
        return dataclasses.replace(s, draft=drafter.extend(params, s, committed))


def truncate_at_stop(s: DecodeState, accepted: Acceptance) -> tuple[Acceptance, stopping.Stop, Int[Array, " B"]]:
    """Shortens what was accepted to the limit and to the first stop; to nothing in finished rows."""
    room = jnp.where(s.done, 0, s.limit - s.length)
    # Every choice is a token, so this orders only: the pages are written after the last layer has read them. Without
    # it, XLA may see the write and that read as unordered, and copies the pool in every round.
    room = jnp.where(accepted.tokens[:, 0] < 0, 0, room)
    stop, length, finish = stopping.run(s.stop, accepted.tokens, jnp.minimum(accepted.length, room))
    full = s.length + length >= s.limit
    finish = jnp.where((finish == stopping.RUNNING) & full, stopping.LENGTH, finish)
    finish = jnp.where(s.done, s.finish_code, finish)
    return dataclasses.replace(accepted, length=length), stop, finish


def token_logprobs(logits: Float[Array, "B N V"], accepted: Acceptance) -> Float[Array, "B A"]:
    """log p of each appended token under the unprocessed logits of the node before it."""
    after = tree.take_path(logits, accepted.path)
    assert after is not None
    chosen = jnp.take_along_axis(after, accepted.tokens[:, :, None], axis=2)[:, :, 0]
    return chosen - jax.nn.logsumexp(after, axis=-1)


def append(
    s: DecodeState,
    accepted: Acceptance,
    drafted: Int[Array, " B"],
    logprobs: Float[Array, "B A"] | None = None,
    **changes,
) -> DecodeState:
    """The state with the accepted tokens, of which the first `drafted[b]` are drafts, written behind the others, and
    `changes` made.
    """
    column = jnp.arange(accepted.tokens.shape[1], dtype=jnp.int32)[None]
    index = jnp.where(column < accepted.length[:, None], s.length[:, None] + column, s.tokens.shape[1])

    def write(buffer, new):
        return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(buffer, index, new)

    origin = jnp.where(column < drafted[:, None], column + 1, 0).astype(s.origin.dtype)
    return dataclasses.replace(
        s,
        tokens=write(s.tokens, accepted.tokens),
        origin=write(s.origin, origin),
        logprobs=None if s.logprobs is None else write(s.logprobs, logprobs),
        length=s.length + accepted.length,
        **changes,
    )


def count_round(s: DecodeState, accepted: Acceptance) -> Stats:
    """The counters after a round that `s` has entered."""
    slots = jnp.arange(s.stats.accept_counts.shape[1], dtype=jnp.int32)[None]
    return Stats(
        jnp.where(s.done, s.stats.rounds, s.stats.rounds + 1),
        s.stats.accept_counts + (slots == accepted.length[:, None] - 1).astype(jnp.int32),
    )


def run_rounds(
    params: Params, s: DecodeState, until: Int[Array, ""], *, target, drafter, accept, debug: bool = False
) -> DecodeState:
    """Rounds until every row is done or `s.round_index` reaches `until`. Pure; `decode` is the same, jitted."""
    body = partial(step, params, target=target, drafter=drafter, accept=accept, debug=debug)
    return lax.while_loop(lambda s: ~jnp.all(s.done) & (s.round_index < until), body, s)


_STATIC = ("target", "drafter", "accept")


def _jitted(many: bool):
    @partial(jax.jit, static_argnames=_STATIC, donate_argnames=("s",), compiler_options=loop_options(many=many))
    def decode(params: Params, s: DecodeState, until: Int[Array, ""], *, target, drafter, accept) -> DecodeState:
        """Rounds on the device until every row is done or `s.round_index` reaches `until`; the state is donated.

        A host that streams, shows progress or stops early calls it again with a later `until`: the tokens are the same.
        """
        return run_rounds(params, s, until, target=target, drafter=drafter, accept=accept)

    return decode


decode, decode_many = _jitted(many=False), _jitted(many=True)
"""The loop, jitted; the second one compiled for rounds that verify many tokens (see `verifies_many`)."""
_drafted = jax.jit(lambda params, s, drafter: drafter.draft(params, s)[0], static_argnames=("drafter",))


def verifies_many(params: Params, s: DecodeState, drafter: Drafter) -> bool:
    """Whether rounds of these shapes verify so many tokens that `decode_many` is the faster one; only GPUs care."""
    return jax.default_backend() == "gpu" and _drafted.eval_shape(params, s, drafter=drafter).tokens.size > FEW


def fastest(params: Params, s: DecodeState, drafter: Drafter):
    """`decode` or `decode_many`, whichever is compiled better for rounds of these shapes."""
    return decode_many if verifies_many(params, s, drafter) else decode


@partial(jax.jit, static_argnames=_STATIC)
def decode_checked(
    params: Params, s: DecodeState, until: Int[Array, ""], *, target, drafter, accept
) -> tuple[checkify.Error, DecodeState]:
    """`decode` with `check_round` in every round; `error.throw()` raises the first broken invariant."""
    rounds = partial(run_rounds, target=target, drafter=drafter, accept=accept, debug=True)
    return checkify.checkify(rounds, errors=checkify.user_checks)(params, s, until)


def check_round(s: DecodeState, draft_tree, logits, accepted: Acceptance, vocab_size: int) -> None:
    """Invariants of a round, for `checkify`: indices in range, parents before children, no NaN."""
    tokens, nodes = draft_tree.tokens, draft_tree.tokens.shape[1]
    in_vocabulary = (tokens >= 0) & (tokens < vocab_size)
    checkify.check(
        jnp.all(in_vocabulary), "round {s}: the drafter proposed a token outside the vocabulary", s=s.round_index
    )
    root = jnp.take_along_axis(s.tokens, s.length[:, None] - 1, axis=1)
    checkify.check(jnp.all(tokens[:, :1] == root), "round {s}: node 0 is not the last committed token", s=s.round_index)
    if draft_tree.parents is not None:
        before = jnp.maximum(jnp.arange(nodes, dtype=jnp.int32) - 1, 0)[None]
        ordered = (draft_tree.parents >= 0) & (draft_tree.parents <= before)
        checkify.check(jnp.all(ordered), "round {s}: a parent does not stand before its child", s=s.round_index)
    finite = ~jnp.isnan(logits).any((1, 2)) | s.done
    checkify.check(jnp.all(finite), "round {s}: the target's logits hold a NaN", s=s.round_index)
    fits = (accepted.length >= 1) & (accepted.length <= accepted.tokens.shape[1])
    checkify.check(jnp.all(fits), "round {s}: an accept length is out of range", s=s.round_index)
    within = (s.length >= 1) & (s.length <= s.limit) & (s.limit <= s.tokens.shape[1])
    checkify.check(jnp.all(within), "round {s}: a row is longer than its limit or the buffer", s=s.round_index)
