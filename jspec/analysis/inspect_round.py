"""One round, taken apart to learn from: what was drafted, what the target wanted, what stands."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec.core import decode, sampling, tree
from jspec.core.sampling import Sampling
from jspec.core.types import Accept, Acceptance, DecodeState, Drafter, DraftTree, Params, Target
from jspec.engine.model import Model
from jspec.engine.options import DEFAULT_PAGE_SIZE, choose
from jspec.engine.run import Run, encode_prompts


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of one row. Node 0 is the root, the last token that stood before the round.

    number: rounds before this one.
    before: ids that stood before the round, prompt included; the root's is the last of them.
    tokens: Int[N] drafted token of each node.
    parents: Int[N] parent of each node; the root's is itself.
    depths: Int[N] generations between each node and the root.
    choices: Int[N] the token that the target wants after each node.
    accepted: nodes on the accepted path, root first.
    appended: ids that the round added: the accepted drafts, then the target's own token, unless the text ended before.
    """

    number: int
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
    round: int = 3,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> Round:
    """Continues a prompt for `round` rounds, and takes the next one apart.

    Args:
      prompt: one prompt, as text or as token ids.
      round: rounds before the one that is returned; 0 is the first.
      drafter, sampling, seed: as in `jspec.generate`; drafts are accepted by the rule that is chosen by itself.

    Raises:
      ValueError, TypeError: as `jspec.generate`; more than one prompt; or a text that ends before that round.
    """
    if isinstance(round, bool) or not isinstance(round, int) or round < 0:
        raise ValueError(f"round={round!r}: give the number of rounds before the one to look at, from 0")
    single, (ids, *_) = encode_prompts(model, prompt)
    if not single:
        raise ValueError("prompt is a list of prompts: give one of them")
    chosen = choose(drafter, model)
    depth = chosen.bind(model.target, model.draft).depth
    # Not less than `generate` takes by default, so that both run one program.
    most = min(max(128, 1 + (round + 1) * (depth + 1)), max(1, model.target.max_length - len(ids)))
    run = Run(model, ids, chosen, most, sampling, None, (), seed, False, DEFAULT_PAGE_SIZE, False)
    if run.advance(round):
        last = int(run.state.round_index) - 1
        where = f"in round {last}; give a smaller number" if last >= 0 else "with its first token, before any round"
        raise ValueError(f"round={round}: the text ends {where}")
    s = run.state
    draft_tree, choices, accepted, length = jax.device_get(_take_apart(model.params, s, **run.parts))
    nodes = draft_tree.tokens.shape[1]
    parents = np.maximum(np.arange(nodes) - 1, 0) if draft_tree.parents is None else draft_tree.parents[0]
    depths = np.zeros(nodes, int)
    for node in range(1, nodes):
        depths[node] = depths[parents[node]] + 1
    path = np.arange(nodes) if accepted.path is None else accepted.path[0]
    appended = accepted.tokens[0, : int(length[0])].tolist()
    return Round(
        number=round,
        before=[*run.prompts[0], *run.tokens[0]],
        tokens=draft_tree.tokens[0],
        parents=parents,
        depths=depths,
        choices=choices,
        accepted=path[: min(int(accepted.length[0]), len(appended) + 1)].tolist(),
        appended=appended,
    )


@partial(jax.jit, static_argnames=("target", "drafter", "accept"))
def _take_apart(
    params: Params, s: DecodeState, *, target: Target, drafter: Drafter, accept: Accept
) -> tuple[DraftTree, Int[Array, " N"], Acceptance, Int[Array, " 1"]]:
    """Of a state's only row: the tree, the target's choice after each node, what `decode.step` would accept of it, and
    how many tokens it would append.
    """
    draft_tree, _ = drafter.draft(params, s)
    out = target.forward(params.target, draft_tree, s.cache, s.length - 1, capture_layers=drafter.capture_layers)
    logits = sampling.process(s, out.logits, tree.paths(draft_tree))
    accepted = accept(s.key, draft_tree, logits, s.length)
    kept, _, _ = decode.truncate_at_stop(s, accepted)
    # A tree of one node has no drafts to accept: what a rule appends to it is the target's choice.
    nodes = draft_tree.tokens.shape[1]
    alone = accept(
        jnp.broadcast_to(s.key, (nodes,)),
        tree.chain(draft_tree.tokens.reshape(nodes, 1)),
        logits.reshape(nodes, 1, -1),
        s.length + jnp.broadcast_to(tree.depths(draft_tree), (1, nodes))[0],
    )
    return draft_tree, alone.tokens[:, 0], accepted, kept.length
