"""Drafters with planted right proposals, and what the tests of the loop share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import masked
import numpy as np
import pytest
import toy

from jspec.analysis import contract
from jspec.core import accept, stopping, tree
from jspec.core.automaton import Automaton
from jspec.core.method import Method
from jspec.core.prefill import jitted_prefill
from jspec.core.types import DecodeState, DraftTree, Params, Prompts, Stats
from jspec.drafters import Adaptive, Block, Eagle, FrozenKvMtp
from jspec.models import MtpHead, MtpHeads


@dataclasses.dataclass(frozen=True)
class Planted:
    """A chain of right tokens. Its weights, `params.draft`, are the tokens of plain decoding."""

    depth: int = 4
    capture_layers = ()

    def bind(self, target, draft):
        return self

    def init(self, params, batch, capacity, page_size):
        return None

    def draft(self, params, s):
        position = s.length[:, None] - 1 + jnp.arange(self.depth + 1, dtype=jnp.int32)[None]
        return tree.chain(jnp.take_along_axis(params.draft, position, axis=1, mode="clip")), s.draft

    def extend(self, params, s, committed):
        return s.draft


@dataclasses.dataclass(frozen=True)
class RandomTree(Planted):
    """A random tree per sequence and round: parents are any nodes of the layer above; half of the tokens are right."""

    width: int = 3

    def draft(self, params, s):
        index = np.arange(1 + self.width * self.depth)
        above = np.maximum((index - 1) // self.width * self.width + 1, 1).astype(np.float32)
        parent_key, token_key, right_key = jax.random.split(jax.random.fold_in(s.key[0], s.length.sum()), 3)
        shape = (s.length.shape[0], len(index))
        parents = jnp.floor(jax.random.uniform(parent_key, shape) * above[None]).astype(jnp.int32)
        wrong = jax.random.randint(token_key, shape, 0, toy.TARGET.vocab_size)
        position = s.length[:, None] - 1 + tree.depths(DraftTree(wrong, parents, self.depth))
        right = jnp.take_along_axis(params.draft, position, axis=1, mode="clip")
        keep = jax.random.bernoulli(right_key, 0.5, shape) | (index == 0)[None]
        return DraftTree(jnp.where(keep, right, wrong), parents, self.depth), s.draft


REPEATED = (
    *("block", "dflash2", "eagle", "eagle_candidates_tree", "eagle_masks", "frozen_kv_mtp", "mtp_reused_tree"),
    *("standalone", "suffix"),
)
"""Second shapes of drafters: slow points of the tests of all shapes."""


def _points(drafters, slow=(*REPEATED, "adaptive")):
    return [pytest.param(x, id=name, marks=[pytest.mark.slow] * (name in slow)) for name, x in drafters.items()]


def _every():
    return toy.bound_drafters() | {"random_tree": RandomTree()}


all_drafters = pytest.mark.parametrize("drafter", _points(_every()))
one_shape_of_each_drafter = pytest.mark.parametrize(
    "drafter", _points({name: x for name, x in _every().items() if name not in REPEATED})
)
"""For properties of the loop rather than of a shape."""
each_name = pytest.mark.parametrize("name", _points({name: name for name in toy.bound_drafters()}))
one_name_of_each = pytest.mark.parametrize("name", [name for name in toy.bound_drafters() if name not in REPEATED])
each_name_and_trees = pytest.mark.parametrize(
    "name", _points({name: name for name in (*toy.bound_drafters(), "random_tree")})
)


@functools.cache
def planted_params():
    return Params(toy.params().target, toy.plain_tokens())


def weights_of(drafter):
    """The weights that a drafter of `toy.bound_drafters` or of this module runs with."""
    if isinstance(drafter, Planted):
        return planted_params()
    if isinstance(drafter, FrozenKvMtp):
        return toy.assistant_params(drafter.model.clusters is not None)
    if isinstance(getattr(drafter, "model", None), MtpHead | MtpHeads):
        return toy.mtp_params()
    if isinstance(drafter, Block):
        return toy.block_params(drafter.model)
    if getattr(getattr(drafter, "model", None), "at_once", False):
        return masked.params(drafter.model)
    if isinstance(drafter, Eagle):
        return masked.head_params(drafter.model)
    return toy.head_params() if isinstance(drafter, Adaptive) else toy.params()


def greedy(drafter):
    """The method of greedy decoding of the toy target."""
    return Method(toy.TARGET, drafter, accept.greedy)


def complete(drafter, **options):
    return toy.run(drafter, weights_of(drafter), toy.start(drafter, weights_of(drafter), **options))


def assert_counted(s, prompt=toy.LENGTHS):
    """The counters add up to the rounds and tokens of each sequence, without the first token, which prefill appends."""
    counts = np.array(s.stats.accept_counts)
    np.testing.assert_array_equal(counts.sum(1), s.stats.rounds)
    in_rounds = np.maximum(np.array(s.length) - prompt - 1, 0)
    np.testing.assert_array_equal(counts @ np.arange(1, counts.shape[1] + 1) - s.stats.dropped, in_rounds)


def paged_caches(s):
    """The target's cache and, if it has one, the drafter's, or the groups of each."""
    states = getattr(s.draft, "states", (s.draft,))
    caches = [s.cache, *(state.cache for state in states if hasattr(state, "cache"))]
    return [group for cache in caches for group in getattr(cache, "groups", (cache,))]


def pools(s):
    """Their pools."""
    return [cache.pool for cache in paged_caches(s)]


def best_first_by_hand(dist, root, depth, width, nodes):
    """Tokens and parents of the tree that EAGLE-2 keeps, best first. dist: path -> log-probabilities."""
    proposed, frontier = [], [((), np.float32(0), None)]
    for _ in range(depth):
        fresh = []
        for path, score, number in frontier:
            logp = dist(path)
            for token in np.argsort(-logp, kind="stable")[:width]:
                proposed.append(((*path, int(token)), score + logp[token], number))
                fresh.append((*proposed[-1][:2], len(proposed) - 1))
        frontier = sorted(fresh, key=lambda node: -node[1])[:width]
    best = sorted(range(len(proposed)), key=lambda i: -proposed[i][1])[: nodes - 1]
    tokens = [root] + [proposed[i][0][-1] for i in best]
    parents = [0] + [0 if proposed[i][2] is None else best.index(proposed[i][2]) + 1 for i in best]
    return tokens, parents


def path_to(tokens, parents, node):
    """The tokens of one sequence from the root (excluded) to a node (included)."""
    return [int(tokens[below]) for below in contract.path_to(parents, node)]


def prefilled(model, prompts, drafter, new_tokens: int):
    """The bound drafter, and the state after prefill as `generate` makes it, with room for `new_tokens` tokens."""
    ids, length = toy.padded(prompts)
    bound = drafter.bind(model.target, model.draft)
    keys = toy.row_keys(np.arange(len(prompts)))
    prompts_state = Prompts(ids, length, length + np.int32(new_tokens), keys, stopping.init(None, len(prompts)))
    method = Method(model.target, bound, accept.greedy)
    return bound, jitted_prefill(model.params, prompts_state, method=method, capacity=128, page_size=4)


def state_without_models(tokens, prompt_length, length, **fields):
    """A state of sequences with these tokens, for what needs neither a target nor a drafter."""
    batch = len(tokens)
    nothing = np.zeros(batch, np.int32)
    fields = {"stop": Automaton(None, None, None), "key": toy.row_keys(np.arange(batch)), "limit": length, **fields}
    return DecodeState(
        tokens=tokens,
        length=length,
        prompt_length=prompt_length,
        finish_code=nothing,
        cache=None,
        draft=None,
        origin=np.zeros(tokens.shape, np.int8),
        round_index=np.zeros((), np.int32),
        stats=Stats(nothing, nothing[:, None], nothing),
        **fields,
    )
