"""Inspects one round: the drafted tree, the target's choices and the accepted path."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec.analysis.contract import depths_of
from jspec.core import optional, tree
from jspec.core.checks import check_int, shorten
from jspec.core.method import Method
from jspec.core.round import accept_drafts, draft, node_logits, verify
from jspec.core.sampling import Sampling
from jspec.core.types import Decision, DecodeState, Drafter, DraftTree, Params
from jspec.generation.method import choose_drafter
from jspec.generation.options import GenerateOptions
from jspec.generation.run import Run, encode_prompts
from jspec.loading.model import Model, refuse_split


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of one sequence. Node 0 is the root, the last token before the round.

    round_index: rounds before this one.
    before: ids before the round, prompt included; the last one is the root.
    tokens: Int[N] token of each node.
    parents: Int[N] parent of each node; the root's is itself.
    depths: Int[N] generations below the root; 0 for the root.
    choices: Int[N] the target's token after each node, if it were accepted.
    accepted: nodes on the accepted path, root first.
    appended: new ids of the round: the accepted drafts, then the bonus token, unless the text ended before it.
    """

    round_index: int
    before: list[int]
    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    choices: np.ndarray
    accepted: list[int]
    appended: list[int]


def inspect_round(
    model: Model,
    prompt: str | Sequence[int],
    *,
    drafter: str | Drafter = "auto",
    round_index: int = 3,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> Round:
    """Continue a prompt for `round_index` rounds, and return the next round.

    Args:
      prompt: one prompt, as text or as token ids.
      round_index: index of the round; 0 is the first.
      drafter, sampling, seed: as in `jspec.generate`; the acceptance rule is the default one.

    Raises:
      ValueError, TypeError: as `jspec.generate`; more than one prompt; or the text ends before the round.
    """
    round_index = check_int("round_index", round_index, least=0)
    single, (ids, *_) = encode_prompts(model, prompt, "prompt")
    refuse_split(model, "inspect_round")
    if not single:
        raise ValueError("prompt is a list of prompts: give one of them")
    if sampling is not None and not isinstance(sampling, Sampling):
        raise TypeError(f"sampling={shorten(sampling)}: must be a jspec.Sampling, or None (greedy)")
    # Room for all rounds, and at least the default of `generate`, so that both run the same program.
    resolved = choose_drafter(drafter, model)
    bound = resolved.bind(model.target, model.draft)
    context = min(model.target.max_length, optional.max_length(bound) or model.target.max_length)
    limit = min(max(128, 1 + (round_index + 1) * (bound.depth + 1)), max(1, context - len(ids)))
    run = Run(model, ids, GenerateOptions(drafter=resolved, max_new_tokens=limit, sampling=sampling, seed=seed))
    if run.advance(round_index):
        last = int(run.state.round_index) - 1
        where = f"in round {last}; pass a smaller index" if last >= 0 else "with its first token, before any round"
        raise ValueError(f"round_index={round_index}: the text ends {where}")
    # Run the next round on the state, then copy it to the host.
    s = run.state
    draft_tree, choices, decision = jax.device_get(_run_round(model.params, s, method=run.method))
    accepted = decision.accepted
    nodes = draft_tree.tokens.shape[1]
    parents = np.maximum(np.arange(nodes) - 1, 0) if draft_tree.parents is None else draft_tree.parents[0]
    path = np.arange(nodes) if accepted.path is None else accepted.path[0]
    appended = accepted.tokens[0, : int(decision.appended.length[0])].tolist()
    return Round(
        round_index=round_index,
        before=[*run.prompts[0], *run.tokens[0]],
        tokens=draft_tree.tokens[0],
        parents=parents,
        depths=np.array(depths_of(parents)),
        choices=choices,
        accepted=path[: min(int(accepted.length[0]), len(appended) + 1)].tolist(),
        appended=appended,
    )


@partial(jax.jit, static_argnames=("method",))
def _run_round(params: Params, s: DecodeState, *, method: Method) -> tuple[DraftTree, Int[Array, " N"], Decision]:
    """Draft, verify and accept for a state with one sequence. Also returns the target's choice after each node."""
    draft_tree, s = draft(params, s, method=method)
    out = verify(params, s, draft_tree, method=method)
    decision = accept_drafts(s, draft_tree, out, method=method)
    # The choice after a node: what the rule accepts for a tree of this node alone, as a batch of N sequences.
    nodes = draft_tree.tokens.shape[1]
    choices = method.accept(
        jnp.broadcast_to(s.key, (nodes,)),
        tree.chain(draft_tree.tokens.reshape(nodes, 1)),
        node_logits(s, draft_tree, out).reshape(nodes, 1, -1),
        s.length + jnp.broadcast_to(tree.depths(draft_tree), (1, nodes))[0],
    )
    return draft_tree, choices.tokens[:, 0], decision
