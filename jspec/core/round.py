"""One round: draft, verify, accept, commit, extend.

`step` calls the five in order. Benchmarks and inspection call the same functions. A round reads the cache and writes it
once, in `commit_round`; the drafter, the target and the acceptance rule come with the `Method`.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jspec.core import branches, ragged, sampling, stopping, tree, watch
from jspec.core import grammar as grammars
from jspec.core import logprobs as log_probabilities
from jspec.core.automaton import Automaton
from jspec.core.commit import commit_rows
from jspec.core.invariants import check_round
from jspec.core.method import Method
from jspec.core.returned import check_acceptance, check_draft, check_output, check_same_form
from jspec.core.types import (
    Acceptance,
    Committed,
    Decision,
    DecodeState,
    DraftTree,
    ForwardOutput,
    Params,
    Recorded,
    Stats,
)

_NOWHERE = 2**30
"""A column after the end of every buffer."""


def step(
    params: Params, s: DecodeState, *, method: Method, branch: int | None = None, debug: bool = False
) -> DecodeState:
    """One round. branch: the index of the branch that drafts, for a drafter with branches; otherwise None."""
    with jax.named_scope("draft"):
        draft_tree, drafted = draft(params, s, method=method, branch=branch)
    with jax.named_scope("verify"):
        out = verify(params, drafted, draft_tree, method=method)
    with jax.named_scope("accept"):
        decision = accept_drafts(drafted, draft_tree, out, method=method)
        if debug:
            check_round(drafted, draft_tree, out.logits, decision.accepted, method.target.vocab_size)
    with jax.named_scope("commit"):
        appended, committed = commit_round(drafted, out, decision, branch)
    with jax.named_scope("extend"):
        extended = extend(params, appended, committed, method=method)
    return _check_form(method, s, extended)


def draft(
    params: Params, s: DecodeState, *, method: Method, branch: int | None = None
) -> tuple[DraftTree, DecodeState]:
    """The draft tree, without tokens that a grammar forbids, and the state with the drafter's new state."""
    drafter, state = branches.drafting(method.drafter, s.draft, branch)
    returned = drafter.draft(params, dataclasses.replace(s, draft=state))
    draft_tree, drafted = check_draft(drafter, returned, s.length.shape[0], drafter.depth)
    state = branches.after_draft(drafter, s.draft, state, drafted, branch)
    return grammars.mend(s.grammar, branches.limited(s, branch, draft_tree)), dataclasses.replace(s, draft=state)


def verify(params: Params, s: DecodeState, draft_tree: DraftTree, *, method: Method) -> ForwardOutput:
    """One forward of the target over all nodes of the tree; it reads the cache and does not write it."""
    forward = method.target.forward if draft_tree.packed is None else partial(ragged.forward, method.target)
    out = forward(params.target, draft_tree, s.cache, s.length - 1, capture_layers=method.capture_layers)
    return check_output(method.target, out, draft_tree.tokens.shape[1])


def accept_drafts(
    s: DecodeState, draft_tree: DraftTree, out: ForwardOutput, *, method: Method, live: Bool[Array, " B"] | None = None
) -> Decision:
    """Decides which drafts to keep, and the token after them. live: sequences that get tokens; None: all."""
    logits = node_logits(s, draft_tree, out)
    accepted = check_acceptance(method.accept, method.accept(s.key, draft_tree, logits, s.length), draft_tree)
    return _decide(s, _cut(accepted, draft_tree), live, record(s, out.logits, logits, accepted))


def commit_round(
    s: DecodeState, out: ForwardOutput, decision: Decision, branch: int | None = None
) -> tuple[DecodeState, Committed]:
    """The state with the accepted rows in the cache and their tokens appended, and the input of `extend`."""
    start, path, length = s.length - 1, decision.appended.path, decision.appended.length
    cache = commit_rows(s.cache, out.rows, start, path, length, after=out.logits)
    s = dataclasses.replace(append(count_round(s, decision, branch), decision), cache=cache)
    return s, Committed(start, decision.appended.tokens, tree.take_path(out.hidden, path), length)


def extend(params: Params, s: DecodeState, committed: Committed, *, method: Method) -> DecodeState:
    """The state after the drafter has absorbed the committed tokens."""
    s, committed = _watch(s, committed, method)
    return dataclasses.replace(s, draft=method.drafter.extend(params, s, committed))


# Parts of the five steps


def node_logits(s: DecodeState, draft_tree: DraftTree, out: ForwardOutput) -> Float[Array, "B N V"]:
    """Logits of the token after each node, with sampling parameters and grammars applied."""
    return sampling.process(s, out.logits, tree.paths(draft_tree))


def record(
    s: DecodeState, logits: Float[Array, "B N V"], processed: Float[Array, "B N V"], accepted: Acceptance
) -> Recorded | None:
    """The records of the accepted tokens, with the columns of `accepted.tokens`; None if `s.recorded` is.

    logits, processed: of each node, before and after sampling parameters and grammars.
    """
    if s.recorded is None:
        return None
    top, before = s.recorded.top, tree.take_path(logits, accepted.path)
    sampled, support = None, s.recorded.support
    if s.recorded.sampled_logprobs is not None:
        after = tree.take_path(processed, accepted.path)
        sampled = log_probabilities.of_tokens(after, accepted.tokens)
        support = None if support is None else log_probabilities.support(after, support.ids.shape[-1])
    return Recorded(
        logprobs=log_probabilities.of_tokens(before, accepted.tokens),
        top=None if top is None else log_probabilities.most_probable(before, top.ids.shape[-1]),
        sampled_logprobs=sampled,
        support=support,
    )


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


def append(s: DecodeState, decision: Decision) -> DecodeState:
    """The state with the new tokens and their records in its buffers."""
    appended, num_accepted = decision.appended, decision.accepted.length - 1
    column = jnp.arange(appended.tokens.shape[1], dtype=jnp.int32)[None]
    # Columns beyond the new tokens go out of bounds, where a scatter drops them.
    index = jnp.where(column < appended.length[:, None], s.length[:, None] + column, _NOWHERE)

    def write(buffer: Array, new: Array, start: Array | None = None) -> Array:
        at = index if start is None else index - start[:, None]
        return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(buffer, at, new)

    origin = jnp.where(column < num_accepted[:, None], column + 1, 0).astype(s.origin.dtype)
    return dataclasses.replace(
        s,
        tokens=write(s.tokens, appended.tokens),
        origin=write(s.origin, origin),
        recorded=jax.tree.map(partial(write, start=s.record_start), s.recorded, decision.recorded),
        length=s.length + appended.length,
        finish_code=decision.finish_code,
        stop=decision.stop,
        grammar=decision.grammar,
    )


def count_round(s: DecodeState, decision: Decision, branch: int | None = None) -> DecodeState:
    """Counts a round, also for `branch` if the drafter has branches."""
    counts = jnp.arange(s.stats.accept_counts.shape[1], dtype=jnp.int32)[None]
    length, branch_counts = jnp.where(s.done, 0, decision.accepted.length), s.stats.branch_counts
    one_hot = (counts == length[:, None] - 1).astype(jnp.int32)
    if branch is not None and branch_counts is not None:
        in_branch = np.arange(branch_counts.shape[1]) == branch
        branch_counts = branch_counts + one_hot[:, None] * in_branch[None, :, None].astype(np.int32)
    stats = Stats(
        jnp.where(s.done, s.stats.rounds, s.stats.rounds + 1),
        s.stats.accept_counts + one_hot,
        s.stats.dropped + length - decision.appended.length,
        branch_counts,
    )
    return dataclasses.replace(s, round_index=s.round_index + 1, stats=stats)


def _watch(s: DecodeState, committed: Committed, method: Method) -> tuple[DecodeState, Committed]:
    """Keep the hidden states for a learner, if there is one, and leave only those of the drafter's layers.

    A learner also reads the state after the final norm, the last part of `hidden`.
    """
    if method.watch is None:
        return s, committed
    hidden, width = committed.hidden, method.target.hidden_size * len(method.drafter.capture_layers)
    assert hidden is not None
    watched = watch.observe(s.watched, hidden, committed.start, committed.length, method.watch)
    committed = dataclasses.replace(committed, hidden=hidden[..., :width] if width else None)
    return dataclasses.replace(s, watched=watched), committed


def _cut(accepted: Acceptance, draft_tree: DraftTree) -> Acceptance:
    """The acceptance without drafts beyond the limits of the tree."""
    if draft_tree.limit is None:
        return accepted
    return dataclasses.replace(accepted, length=jnp.minimum(accepted.length, draft_tree.limit + 1))


def _decide(
    s: DecodeState, accepted: Acceptance, live: Bool[Array, " B"] | None, recorded: Recorded | None
) -> Decision:
    """The decision of a round: the accepted tokens up to the end of each sequence, and the automata after them."""
    if live is not None:
        accepted = dataclasses.replace(accepted, length=jnp.where(live, accepted.length, 0))
    appended, stop, finish_code = truncate_at_stop(s, accepted)
    grammar = grammars.advance(s.grammar, appended.tokens, appended.length)
    return Decision(accepted, appended, stop, grammar, finish_code, recorded)


def _check_form(method: Method, before: DecodeState, after: DecodeState) -> DecodeState:
    """Checks the state after a round for the loop: structure, shapes and dtypes must be those before it."""
    check_same_form(f"{type(before.cache).__name__}.commit", before.cache, after.cache)
    check_same_form(f"{type(method.drafter).__name__}.extend", before.draft, after.draft)
    return after
