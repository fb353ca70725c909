"""The loop: prefill once, then one XLA program that runs rounds of draft, verify, accept, commit and extend.

Target, drafter and acceptance rule are static arguments; this module knows none of them by name. The five steps of a
round are five functions, which `step` calls in order. Benchmarks and inspection call the same functions.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int, Key

from jspec.core import grammar as grammars
from jspec.core import groups, sampling, sharding, stopping, tree
from jspec.core import logprobs as log_probabilities
from jspec.core.automaton import Automaton
from jspec.core.commit import commit_rows
from jspec.core.invariants import check_choice, check_round
from jspec.core.returned import check_acceptance, check_draft, check_output, check_same_form, check_unchanged
from jspec.core.struct import struct
from jspec.core.types import (
    Accept,
    Acceptance,
    BranchingDrafter,
    Committed,
    DecodeState,
    Drafter,
    DraftTree,
    ForwardOutput,
    Params,
    RowSampling,
    Stats,
    Target,
    TopTokens,
)
from jspec.core.xla_options import LoopProgram, prefers_cublas
from pallas_kernels import platform

# Prefill


def prefill(
    params: Params,
    ids: Int[Array, "B T"],
    length: Int[Array, " B"],
    limit: Int[Array, " B"],
    key: Key[Array, " B"],
    stop: Automaton,
    row_sampling: RowSampling | None = None,
    grammar: Automaton | None = None,
    *,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    capacity: int,
    page_size: int,
    logprobs: bool = False,
    top_logprobs: int = 0,
    chunk: int | None = None,
) -> DecodeState:
    """The state before the first round: prompts in the caches, first generated token appended.

    Args:
      ids: prompts, padded on the right to one width.
      length: tokens of each prompt, at least 1.
      limit: the length at which each sequence ends, prompt included.
      key: random key of each sequence.
      row_sampling: sampling parameters of each sequence; None: greedy.
      grammar: of each sequence, as `jspec.core.grammar.init` makes it; None: all tokens may follow.
      accept: the acceptance rule, as in the rounds.
      capacity: columns of the token buffer, at least max(limit).
      logprobs: record the log-probability of each new token.
      top_logprobs: how many of the most probable tokens to record where each new token is chosen.
      chunk: columns that are read at once, which bounds the memory of activations; longer prompts are read in a loop
        with as many iterations as the longest prompt needs. None: all columns.
    """
    batch, width = ids.shape
    # Tokens proposed past the limit are dropped, so they need no slots.
    buffer_len = max(capacity, width)
    s = DecodeState(
        # Not written into zeros: indices of a slice that is all of an array are empty, which crashes XLA of JAX 0.11.2
        # over devices.
        tokens=jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, buffer_len - width))),
        length=length,
        limit=limit,
        finish_code=jnp.where(length >= limit, jnp.int32(stopping.LENGTH), jnp.int32(stopping.RUNNING)),
        stop=stop,
        cache=target.init_cache(params.target, batch, buffer_len, page_size),
        draft=drafter.init(params, batch, buffer_len, page_size),
        sampling=row_sampling,
        key=key,
        prompt_length=length,
        origin=jnp.zeros((batch, buffer_len), jnp.int8),
        logprobs=jnp.zeros((batch, buffer_len), jnp.float32) if logprobs else None,
        round_index=jnp.zeros((), jnp.int32),
        stats=Stats(
            rounds=jnp.zeros(batch, jnp.int32),
            accept_counts=jnp.zeros((batch, drafter.depth + 1), jnp.int32),
            dropped=jnp.zeros(batch, jnp.int32),
            branch_counts=branch_counters(drafter, batch),
        ),
        top=top_buffer((batch, buffer_len), top_logprobs),
        sampled_logprobs=sampled_buffer((batch, buffer_len), row_sampling, logprobs),
        grammar=Automaton() if grammar is None else grammar,
    )
    size = width if chunk is None else min(chunk, width)
    read = partial(_read_prompt, params, target=target, drafter=drafter, accept=accept, size=size)
    s = read(s, None)
    if size == width:
        return s
    return lax.fori_loop(1, -(-jnp.max(length) // size), lambda i, s: read(s, i * size), s)


def top_buffer(shape: tuple[int, ...], k: int) -> TopTokens | None:
    """An empty `DecodeState.top` for the k most probable tokens of sequences [B, C]; None if k is 0."""
    return TopTokens(jnp.zeros((*shape, k), jnp.int32), jnp.zeros((*shape, k), jnp.float32)) if k else None


def sampled_buffer(
    shape: tuple[int, ...], row_sampling: RowSampling | None, logprobs: bool
) -> Float[Array, "B C"] | None:
    """An empty `DecodeState.sampled_logprobs`; None unless `logprobs` and a sequence samples."""
    samples = row_sampling is not None and row_sampling.temperature is not None
    return jnp.zeros(shape, jnp.float32) if logprobs and samples else None


def branch_counters(drafter: Drafter, batch: int) -> Int[Array, "B K A"] | None:
    """`Stats.branch_counts` before the first round."""
    if not isinstance(drafter, BranchingDrafter):
        return None
    return jnp.zeros((batch, len(drafter.branches), drafter.depth + 1), jnp.int32)


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
    """The state after `size` more columns of the prompts are read, from column `start` (None: the first chunk)."""
    begin = jnp.zeros_like(s.prompt_length) if start is None else jnp.minimum(start, s.prompt_length)
    count = jnp.minimum(s.prompt_length - begin, size)
    ends = (count > 0) & (begin + count == s.prompt_length)
    first = start is None
    return read_columns(
        params, s, begin, count, ends, first=first, target=target, drafter=drafter, accept=accept, size=size
    )


def read_columns(
    params: Params,
    s: DecodeState,
    begin: Int[Array, " B"],
    count: Int[Array, " B"],
    ends: Bool[Array, " B"],
    *,
    first: bool = False,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    size: int,
) -> DecodeState:
    """The state after each sequence has read `count` more of its own tokens, from position `begin` on.

    Args:
      ends: sequences that get the token after the last one read, chosen as in a round without drafts.
      first: nothing is committed before these columns, in any sequence.
      size: columns of the program; at most this many tokens are read.
    """
    # The tokens of this chunk.
    column, last = jnp.arange(size, dtype=jnp.int32)[None], jnp.maximum(count - 1, 0)
    tokens = jnp.take_along_axis(s.tokens, begin[:, None] + column, axis=1, mode="clip")
    # Verify and accept: the last token of each prompt is the root of a tree without drafts.
    prefix = None if first else begin
    out = target.forward(
        params.target, tree.chain(tokens), s.cache, prefix, capture_layers=drafter.capture_layers, select=last
    )
    check_output(target, out, 1)
    root = tree.chain(jnp.take_along_axis(tokens, last[:, None], axis=1))
    decision = accept_drafts(s, root, out, accept=accept, active=ends)
    # Commit and extend: all rows of the chunk are permanent.
    cache = commit_rows(s.cache, out.rows, begin, None, count, after=out.logits)
    s = dataclasses.replace(append(s, decision), cache=cache)
    following = jnp.take_along_axis(s.tokens, begin[:, None] + column + 1, axis=1, mode="clip")
    return extend(params, s, Committed(begin, following, out.hidden, count, first=first), drafter=drafter)


_STATIC = ("target", "drafter", "accept", "placement")


@partial(jax.jit, static_argnames=(*_STATIC, "capacity", "page_size", "logprobs", "top_logprobs", "chunk"))
def jitted_prefill(
    params: Params,
    ids: Int[Array, "B T"],
    length: Int[Array, " B"],
    limit: Int[Array, " B"],
    key: Key[Array, " B"],
    stop: Automaton,
    row_sampling: RowSampling | None = None,
    grammar: Automaton | None = None,
    *,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    capacity: int,
    page_size: int,
    logprobs: bool = False,
    top_logprobs: int = 0,
    chunk: int | None = None,
    placement: sharding.Placement | None = None,
) -> DecodeState:
    """`prefill`, jitted: one compiled program for each configuration and shape of the prompts.

    placement: of the weights over devices; None: they are on one. If it has several groups, the state is stacked, as
      `jspec.core.groups` describes.
    """
    static = {"target": target, "drafter": drafter, "accept": accept, "capacity": capacity, "page_size": page_size}
    static |= {"logprobs": logprobs, "top_logprobs": top_logprobs, "chunk": chunk}
    arrays = params, ids, length, limit, key, stop, row_sampling, grammar
    return groups.prefill(placement, partial(prefill, **static), *arrays)


# A round


def step(
    params: Params,
    s: DecodeState,
    *,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    debug: bool = False,
    branch: int | None = None,
) -> DecodeState:
    """One round. The scopes name its parts in a profile.

    branch: the index of the branch that drafts, if the drafter has branches; None: it has none, or it chooses one.
    """
    if branch is None and isinstance(drafter, BranchingDrafter):
        last = s.round_index
        return loop(
            params, s, lambda s: s.round_index == last, target=target, drafter=drafter, accept=accept, debug=debug
        )
    before = s
    with jax.named_scope("draft"):
        if branch is None:
            draft_tree, s = draft(params, s, drafter=drafter)
        else:
            draft_tree = _draft_in_branch(params, s, drafter=drafter, branch=branch)
    with jax.named_scope("verify"):
        out = verify(params, s, draft_tree, target=target, drafter=drafter)
    with jax.named_scope("accept"):
        decision = accept_drafts(s, draft_tree, out, accept=accept)
        if debug:
            check_round(s, draft_tree, out.logits, decision.accepted, target.vocab_size)
    with jax.named_scope("commit"):
        s, committed = commit_round(s, out, decision, branch)
    with jax.named_scope("extend"):
        s = extend(params, s, committed, drafter=drafter)
    check_same_form(f"{type(s.cache).__name__}.commit", before.cache, s.cache)
    check_same_form(f"{type(drafter).__name__}.extend", before.draft, s.draft)
    return s


def _draft_in_branch(params: Params, s: DecodeState, *, drafter: Drafter, branch: int) -> DraftTree:
    """The proposal of one of a drafter's branches."""
    assert isinstance(drafter, BranchingDrafter)
    chosen, state = drafter.branches[branch], drafter.states(s.draft)[branch]
    draft_tree, after = draft(params, dataclasses.replace(s, draft=state), drafter=chosen)
    check_unchanged(chosen, state, after.draft)
    return draft_tree


@struct
class Decision:
    """The result of `accept_drafts`."""

    accepted: Acceptance
    """What the acceptance rule decided."""
    kept: Acceptance
    """The same, truncated at the length limit and at the first stop."""
    stop: Automaton
    """The stop automaton after the kept tokens."""
    grammar: Automaton
    """The grammars after the kept tokens."""
    finish_code: Int[Array, " B"]
    logprobs: Float[Array, "B A"] | None
    """log p of each token under the unprocessed logits; None unless log-probabilities are recorded."""
    top: TopTokens | None
    """The most probable tokens where each token was chosen, [B, A, k]; None unless they are recorded."""
    sampled_logprobs: Float[Array, "B A"] | None
    """log p of each token under the processed logits; None unless they are recorded."""


def draft(params: Params, s: DecodeState, *, drafter: Drafter) -> tuple[DraftTree, DecodeState]:
    """The drafter's proposal, mended by the grammars, and the state with the drafter's new state."""
    returned = drafter.draft(params, s)
    draft_tree, state = check_draft(drafter, returned, s.length.shape[0], drafter.depth)
    return grammars.mend(s.grammar, draft_tree), dataclasses.replace(s, draft=state)


def verify(params: Params, s: DecodeState, draft_tree: DraftTree, *, target: Target, drafter: Drafter) -> ForwardOutput:
    """One forward of the target over all nodes of the tree; it reads the cache and does not write it."""
    out = target.forward(params.target, draft_tree, s.cache, s.length - 1, capture_layers=drafter.capture_layers)
    return check_output(target, out, draft_tree.tokens.shape[1])


def accept_drafts(
    s: DecodeState,
    draft_tree: DraftTree,
    out: ForwardOutput,
    *,
    accept: Accept,
    active: Bool[Array, " B"] | None = None,
) -> Decision:
    """Decides which drafts to keep and which token follows them.

    active: sequences that may get tokens; None: all. Those that have finished never do.
    """
    processed = node_logits(s, draft_tree, out)
    accepted = check_acceptance(accept, accept(s.key, draft_tree, processed, s.length), draft_tree)
    if active is not None:
        accepted = dataclasses.replace(accepted, length=jnp.where(active, accepted.length, 0))
    kept, stop, finish_code = truncate_at_stop(s, accepted)
    return Decision(
        accepted,
        kept,
        stop,
        grammars.advance(s.grammar, kept.tokens, kept.length),
        finish_code,
        logprobs=None if s.logprobs is None else token_logprobs(out.logits, accepted),
        top=None if s.top is None else top_tokens(out.logits, accepted, s.top.ids.shape[2]),
        sampled_logprobs=None if s.sampled_logprobs is None else token_logprobs(processed, accepted),
    )


def commit_round(
    s: DecodeState, out: ForwardOutput, decision: Decision, branch: int | None = None
) -> tuple[DecodeState, Committed]:
    """The state with the kept rows in the cache and the kept tokens appended, and what `extend` absorbs.

    branch: that of the round, to be counted; None: the drafter has none.
    """
    start, kept = s.length - 1, decision.kept
    cache = commit_rows(s.cache, out.rows, start, kept.path, kept.length, after=out.logits)
    stats = count_round(s, decision, branch)
    s = dataclasses.replace(append(s, decision), cache=cache, round_index=s.round_index + 1, stats=stats)
    return s, Committed(start, kept.tokens, tree.take_path(out.hidden, kept.path), kept.length)


def extend(params: Params, s: DecodeState, committed: Committed, *, drafter: Drafter) -> DecodeState:
    """The state after the drafter has absorbed what was committed."""
    return dataclasses.replace(s, draft=drafter.extend(params, s, committed))


# Parts of the steps


def node_logits(s: DecodeState, draft_tree: DraftTree, out: ForwardOutput) -> Float[Array, "B N V"]:
    """The logits from which the token after each node is chosen."""
    return sampling.process(s, out.logits, tree.paths(draft_tree))


def truncate_at_stop(s: DecodeState, accepted: Acceptance) -> tuple[Acceptance, Automaton, Int[Array, " B"]]:
    """Truncates the accepted tokens at the length limit or the first stop, and to none in finished sequences.

    Returns the truncated acceptance, the stop automaton after it, and the finish codes.
    """
    remaining = jnp.where(s.done, 0, s.limit - s.length)
    stop, length, finish_code = stopping.run(s.stop, accepted.tokens, jnp.minimum(accepted.length, remaining))
    full = s.length + length >= s.limit
    finish_code = jnp.where((finish_code == stopping.RUNNING) & full, stopping.LENGTH, finish_code)
    finish_code = jnp.where(s.done, s.finish_code, finish_code)
    return dataclasses.replace(accepted, length=length), stop, finish_code


def token_logprobs(logits: Float[Array, "B N V"], accepted: Acceptance) -> Float[Array, "B A"]:
    """log p of each appended token under the logits of the node before it."""
    return log_probabilities.of_tokens(tree.take_path(logits, accepted.path), accepted.tokens)


def top_tokens(logits: Float[Array, "B N V"], accepted: Acceptance, k: int) -> TopTokens:
    """The k most probable tokens at the node before each appended token, [B, A, k], under the unprocessed logits."""
    return log_probabilities.most_probable(tree.take_path(logits, accepted.path), k)


def append(s: DecodeState, decision: Decision) -> DecodeState:
    """The state with the kept tokens in the token buffer."""
    kept, num_accepted = decision.kept, decision.accepted.length - 1
    column = jnp.arange(kept.tokens.shape[1], dtype=jnp.int32)[None]
    index = jnp.where(column < kept.length[:, None], s.length[:, None] + column, s.tokens.shape[1])

    def write(buffer: Array, new: Array) -> Array:
        return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(buffer, index, new)

    origin = jnp.where(column < num_accepted[:, None], column + 1, 0).astype(s.origin.dtype)
    return dataclasses.replace(
        s,
        tokens=write(s.tokens, kept.tokens),
        origin=write(s.origin, origin),
        logprobs=jax.tree.map(write, s.logprobs, decision.logprobs),
        top=jax.tree.map(write, s.top, decision.top),
        sampled_logprobs=jax.tree.map(write, s.sampled_logprobs, decision.sampled_logprobs),
        length=s.length + kept.length,
        finish_code=decision.finish_code,
        stop=decision.stop,
        grammar=decision.grammar,
    )


def count_round(s: DecodeState, decision: Decision, branch: int | None = None) -> Stats:
    """The counters of `s` after a round. branch: as in `commit_round`."""
    slots = jnp.arange(s.stats.accept_counts.shape[1], dtype=jnp.int32)[None]
    kept, branches = decision.kept.length, s.stats.branch_counts
    appended = (slots == kept[:, None] - 1).astype(jnp.int32)
    if branch is not None and branches is not None:
        taken = np.arange(branches.shape[1]) == branch
        branches = branches + appended[:, None] * taken[None, :, None].astype(np.int32)
    return Stats(
        jnp.where(s.done, s.stats.rounds, s.stats.rounds + 1),
        s.stats.accept_counts + appended,
        s.stats.dropped + jnp.where(s.done, 0, decision.accepted.length - kept),
        branches,
    )


def with_counters(s: DecodeState, depth: int) -> DecodeState:
    """The state with counters for rounds of this depth, for one that is continued with a drafter of a greater depth."""
    counts = s.stats.accept_counts
    missing = depth + 1 - counts.shape[-1]
    if missing <= 0:
        return s
    counts = jnp.pad(counts, [*[(0, 0)] * (counts.ndim - 1), (0, missing)])
    return dataclasses.replace(s, stats=dataclasses.replace(s.stats, accept_counts=counts))


# The loop


def loop(
    params: Params,
    s: DecodeState,
    going: Callable[[DecodeState], Bool[Array, ""]],
    *,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    held: Callable[[DecodeState], Bool[Array, " B"]] | None = None,
    debug: bool = False,
) -> DecodeState:
    """Rounds while `going(s)` is true.

    A drafter with branches has a loop of rounds for each of them, in a loop over them: each goes on as long as the
    drafter chooses its branch. So a round is the program of its own drafter, and caches are written in place, which
    XLA does in a loop but not in a conditional.

    held: sequences that take no part in the next round; None: all do that have not finished.
    """
    take_step = partial(step, params, target=target, drafter=drafter, accept=accept, debug=debug)

    def with_held(s: DecodeState) -> tuple[Bool[Array, " B"] | None, DecodeState]:
        if held is None:
            return None, s
        hold = held(s)
        return hold, dataclasses.replace(s, finish_code=jnp.where(hold, stopping.HELD, s.finish_code))

    def one_round(branch: int | None, s: DecodeState) -> DecodeState:
        hold, s = with_held(s)
        s = take_step(s, branch=branch)
        if hold is None:
            return s
        return dataclasses.replace(s, finish_code=jnp.where(hold, stopping.RUNNING, s.finish_code))

    if not isinstance(drafter, BranchingDrafter):
        return lax.while_loop(going, partial(one_round, None), s)

    def choose(s: DecodeState) -> tuple[Int[Array, ""], DecodeState]:
        with jax.named_scope("draft"):
            branch, state = drafter.choose(params, with_held(s)[1])
            if debug:
                check_choice(s, branch, len(drafter.branches))
        # Any other index would be nobody's turn, and the loop would not end.
        branch = jnp.clip(branch, 0, len(drafter.branches) - 1).astype(jnp.int32)
        return branch, dataclasses.replace(s, draft=state)

    def rounds_of(branch: int, turn: tuple[Int[Array, ""], DecodeState]) -> tuple[Int[Array, ""], DecodeState]:
        return lax.while_loop(
            lambda turn: (turn[0] == branch) & going(turn[1]), lambda turn: choose(one_round(branch, turn[1])), turn
        )

    def body(turn: tuple[Int[Array, ""], DecodeState]) -> tuple[Int[Array, ""], DecodeState]:
        for branch in range(len(drafter.branches)):
            turn = rounds_of(branch, turn)
        return turn

    return lax.while_loop(lambda turn: going(turn[1]), body, choose(s))[1]


def run_rounds(
    params: Params,
    s: DecodeState,
    until: Int[Array, ""],
    *,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    debug: bool = False,
) -> DecodeState:
    """Rounds until every sequence is done or `s.round_index` reaches `until`. Pure; `decode` is the same, jitted."""
    s = with_counters(s, drafter.depth)

    def going(s: DecodeState) -> Bool[Array, ""]:
        return ~jnp.all(s.done) & (s.round_index < until)

    return loop(params, s, going, target=target, drafter=drafter, accept=accept, debug=debug)


SHARED = (0, 2)
"""The arguments of `run_rounds` that groups of devices have in common; the state is that of each."""


class _Loop(LoopProgram[..., DecodeState]):
    """Its state has the counters before the call: the donated buffer of shorter ones could not be used."""

    def __call__(
        self,
        params: Params,
        s: DecodeState,
        until: Int[Array, ""],
        *,
        drafter: Drafter,
        **static: Target | Accept | sharding.Placement | None,
    ) -> DecodeState:
        return super().__call__(params, with_counters(s, drafter.depth), until, drafter=drafter, **static)


def _loop_program(*, many: bool, devices: int = 1) -> LoopProgram[..., DecodeState]:
    def decode(
        params: Params,
        s: DecodeState,
        until: Int[Array, ""],
        *,
        target: Target,
        drafter: Drafter,
        accept: Accept,
        placement: sharding.Placement | None = None,
    ) -> DecodeState:
        """Rounds on the device until every sequence is done or `s.round_index` reaches `until`; the state is donated.

        To stream, show progress or stop early, call it repeatedly with a growing `until`; the tokens are the same.
        """
        rounds = partial(run_rounds, target=target, drafter=drafter, accept=accept)
        return sharding.over(placement, rounds, params, s, until, shared=SHARED)

    return _Loop(decode, many=many, devices=devices, static_argnames=_STATIC, donate_argnames=("s",))


decode, decode_many = _loop_program(many=False), _loop_program(many=True)
"""The loop, jitted; `decode_many` has compiler options for rounds that verify many tokens (see `verifies_many`)."""
_OVER_DEVICES = {many: _loop_program(many=many, devices=2) for many in (False, True)}
"""The same for models that are split over several devices."""


@partial(jax.jit, static_argnames=("drafter", "placement"))
def _drafted(params: Params, s: DecodeState, drafter: Drafter, placement: sharding.Placement | None) -> DraftTree:
    return sharding.over(placement, lambda params, s: draft(params, s, drafter=drafter)[0], params, s)


def draft_shape(
    params: Params, s: DecodeState, drafter: Drafter, placement: sharding.Placement | None = None
) -> tuple[int, ...]:
    """The shape of a round's tree in one group of devices: sequences and nodes of each."""
    return _drafted.eval_shape(params, s, drafter=drafter, placement=placement).tokens.shape[-2:]


def verifies_many(
    params: Params, s: DecodeState, drafter: Drafter, placement: sharding.Placement | None = None
) -> bool:
    """Whether rounds of these shapes verify enough tokens for `decode_many` to be faster. Only affects GPUs."""
    if platform.platform() != "gpu":
        return False
    return prefers_cublas(params, math.prod(draft_shape(params, s, drafter, placement)))


def fastest(
    params: Params, s: DecodeState, drafter: Drafter, placement: sharding.Placement | None = None
) -> LoopProgram[..., DecodeState]:
    """`decode` or `decode_many`, whichever is faster for rounds of these shapes, or the same over several devices."""
    many = verifies_many(params, s, drafter, placement)
    if placement is not None and placement.size > 1:
        return _OVER_DEVICES[many]
    return decode_many if many else decode


@partial(jax.jit, static_argnames=_STATIC)
def decode_checked(
    params: Params,
    s: DecodeState,
    until: Int[Array, ""],
    *,
    target: Target,
    drafter: Drafter,
    accept: Accept,
    placement: sharding.Placement | None = None,
) -> tuple[checkify.Error, DecodeState]:
    """`decode` with `check_round` in every round; `error.throw()` raises the first broken invariant."""
    rounds = partial(run_rounds, target=target, drafter=drafter, accept=accept, debug=True)
    checked = checkify.checkify(rounds, errors=checkify.user_checks)
    return sharding.over(placement, checked, params, s, until, shared=SHARED)
