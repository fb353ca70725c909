"""Whole loops of tiny models: every drafter on one target, and every kind of target with chains and trees."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import deepseek
import gemma
import jax
import jax.numpy as jnp
import numpy as np
import oss
import qwen
import toy
from planted import Planted, weights_of
from random_models import random_weights

from jspec.core import accept, stopping
from jspec.core.grow import sampled_topology
from jspec.core.method import Method, Records
from jspec.core.prefill import prefill
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import Accept, DecodeState, Drafter, DraftTree, Params, Prompts
from jspec.drafters import FrozenKvMtp, Mtp, Ngram, Plain, Standalone
from jspec.models import Assistant, MtpHeads
from jspec.models.assistant import Clusters
from jspec.models.decoder import Decoder
from pallas_kernels.topk import topk


@dataclasses.dataclass(frozen=True)
class BlockTree(Planted):
    """A tree that is grown all at once: the candidates of every position are known before any of them is chosen.

    Its weights are a table: root, position, token -> logit.
    """

    depth: int = 3
    width: int = 3
    num_nodes: int = 12

    def draft(self, params, s):
        _, tokens, _ = topk(params.draft[s.root[:, 0]], self.width)
        parents = sampled_topology(self.depth, self.width, self.num_nodes)
        generation, rank = [0], [0]
        for node in range(1, self.num_nodes):
            generation.append(generation[parents[node]] + 1)
            rank.append(parents[1:node].count(parents[node]))
        drafts = tokens[:, np.array(generation[1:]) - 1, np.array(rank[1:])]
        above = jnp.broadcast_to(jnp.asarray(parents, jnp.int32)[None], (len(tokens), self.num_nodes))
        return DraftTree(jnp.concatenate([s.root, drafts], axis=1), above, self.depth, self.width), s.draft


def block_params() -> Params:
    """The target's weights, and how often each token follows another at each distance in texts of the target."""
    texts, depth = toy.plain_tokens(), BlockTree().depth
    table = np.zeros((toy.TARGET.vocab_size, depth, toy.TARGET.vocab_size), np.float32)
    for ahead in range(depth):
        np.add.at(table[:, ahead], (texts[:, : -1 - ahead], texts[:, 1 + ahead :]), 1)
    return Params(toy.params().target, jax.device_put(table))


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop and its models. `drafter` is bound; `weights` makes random weights, and `shapes` only their shapes."""

    target: Decoder
    drafter: Drafter
    weights: Callable[[], Params]
    shapes: Callable[[], Params]
    rule: Accept = accept.greedy
    sampling: Sampling | None = None
    top: int = 0
    """How many of the most probable tokens are recorded with each new one."""

    @property
    def method(self) -> Method:
        """The static half of its rounds."""
        return Method(self.target, self.drafter, self.rule, record=Records(self.top) if self.top else None)

    def start(self, weights: Params) -> DecodeState:
        """The state after prefill of three prompts, with 24 tokens to generate; `weights` may be shapes."""
        length, batch = np.asarray(toy.LENGTHS), len(toy.IDS)
        rows = None if self.sampling is None else per_row(self.sampling, batch, self.target.vocab_size)
        keys, stop = toy.row_keys(np.arange(batch)), stopping.init(None, batch)
        read = functools.partial(prefill, method=self.method, capacity=toy.CAPACITY, page_size=4)
        given = weights, Prompts(toy.IDS, length, length + np.int32(24), keys, stop, rows)
        if isinstance(jax.tree.leaves(weights)[0], jax.ShapeDtypeStruct):
            return jax.eval_shape(read, *given)
        return jax.jit(read)(*given)


def _llama(drafter: Drafter, **options: Any) -> Loop:
    def shapes():
        if isinstance(drafter, BlockTree):
            size = toy.TARGET.vocab_size
            draft = jax.ShapeDtypeStruct((size, drafter.depth, size), jnp.float32)
        else:
            model = getattr(drafter, "model", None)
            heads = isinstance(getattr(model, "layer", None), Decoder)
            model = toy.HEADS if heads else model
            draft = None if model is None else model.param_shapes(jnp.float32)
        return Params(toy.TARGET.param_shapes(jnp.float32), draft)

    weights = block_params if isinstance(drafter, BlockTree) else functools.partial(weights_of, drafter)
    return Loop(toy.TARGET, drafter, weights, shapes, **options)


ASSISTANT = Assistant(61, 24, 32, 48, num_heads=4, target_layers=(2, 3), head_dims=(8, 16), clusters=Clusters(61, 20))
"""For the layers of `gemma.KINDS["shared"]`."""


def _family(module: Any, kind: str, drafter: Drafter) -> Loop:
    """A target of one of these modules, with a draft of the same shape or with what the drafter needs."""
    target: Decoder = module.KINDS[kind]
    draft: Any = {FrozenKvMtp: ASSISTANT, Mtp: None}.get(type(drafter), target)
    if isinstance(drafter, Mtp):
        draft = MtpHeads(target.mtp_layer(), count=2)
    own = None if isinstance(drafter, Plain | Ngram) else draft

    def weights():
        exact = module.params(kind)
        if own is None:
            return Params(exact)
        if isinstance(drafter, FrozenKvMtp):
            return Params(exact, toy.in_clusters(ASSISTANT, toy.random_assistant(ASSISTANT)))
        if isinstance(drafter, Mtp):
            with_heads = dataclasses.replace(deepseek.KINDS[kind], mtp_layers=own.count)
            return Params(exact, random_weights(with_heads, 2).mtp)
        return Params(exact, toy.near(exact, module.params(kind, 1), 0.02))

    def shapes():
        return Params(target.param_shapes(jnp.float32), None if own is None else own.param_shapes(jnp.float32))

    return Loop(target, drafter.bind(target, own), weights, shapes)


CHAIN, TREE = Standalone(depth=3), Standalone(depth=3, width=3, num_nodes=10)
SAMPLED = Standalone(depth=3, width=2, num_nodes=7, sampled=True).bind(toy.TARGET, toy.NEAR)
NEAR_TREE = TREE.bind(toy.TARGET, toy.NEAR)
LOOPS: dict[str, Loop] = {
    **{name: _llama(drafter) for name, drafter in toy.bound_drafters().items()},
    "block_tree": _llama(BlockTree()),
    "temperature": _llama(NEAR_TREE, rule=accept.coupled, sampling=Sampling(temperature=0.8)),
    "top_p": _llama(NEAR_TREE, rule=accept.coupled, sampling=Sampling(top_k=40, top_p=0.9, repetition_penalty=1.1)),
    "top_logprobs": _llama(Standalone(depth=3).bind(toy.TARGET, toy.NEAR), top=20),
    "rejection": _llama(SAMPLED, rule=accept.rejection, sampling=Sampling(temperature=0.8)),
    **{
        f"{name}_{shape}": _family(module, kind, drafter)
        for name, module, kind, drafters in (
            ("mla", deepseek, "mla", {"standalone_tree": TREE, "mtp": Mtp(depth=2)}),
            ("dsa", deepseek, "dsa", {"standalone": CHAIN, "mtp_tree": Mtp(depth=3, width=2, num_nodes=7, heads=1)}),
            ("sliding", gemma, "dense", {"standalone_tree": TREE}),
            ("shared", gemma, "shared", dict(frozen_kv_mtp=FrozenKvMtp(depth=3), frozen_kv_mtp_tree=FrozenKvMtp(3, 2))),
            ("experts", gemma, "experts", {"ngram": Ngram(depth=3)}),
            ("recurrent", qwen, "dense", {"standalone_tree": TREE}),
            ("recurrent_experts", qwen, "experts", {"standalone": CHAIN}),
            ("sinks", oss, "sinks", {"standalone_tree": TREE}),
        )
        for shape, drafter in {"plain": Plain(), **drafters}.items()
    },
}
"""Name -> loop. Those of other families begin with the kind of target; the others have the target of `toy`."""


def plain_of(name: str) -> str:
    """The loop of plain decoding with the same target."""
    return next((f"{kind}_plain" for kind in KINDS if name.startswith(kind)), "plain")


KINDS = sorted((name.removesuffix("_plain") for name in LOOPS if name.endswith("_plain")), key=len, reverse=True)
"""Kinds of targets, the longest first: `recurrent_experts` before `recurrent`."""
