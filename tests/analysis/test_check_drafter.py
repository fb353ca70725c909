"""`check_drafter` accepts every drafter of the package, and reports what is wrong with broken ones."""

import dataclasses
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from planted import weights_of

import jspec
from jspec.analysis import check_drafter as contract
from jspec.analysis.check_drafter import check_drafter
from jspec.core import accept, tree
from jspec.core.types import DraftTree, Params
from jspec.drafters import Ngram
from jspec.models import Llama

IDS = [[3], [5, 6, 7, 5, 6, 7, 5]]
FITTED_PROMPTS = [row[:length].tolist() for row, length in zip(toy.IDS[:2], toy.LENGTHS[:2], strict=True)]
"""Prompts whose continuations the drafts of `toy` were fitted to."""


def model_for(drafter):
    draft = getattr(drafter, "model", None)
    if draft is None:
        # A drafter without a model of its own needs only one layer.
        return jspec.Model("toy", toy.NEAR, Params(toy.params().draft), None, ())
    return jspec.Model("toy", toy.TARGET, weights_of(drafter), None, (), draft)


def check(drafter, prompts=IDS):
    return check_drafter(drafter, model_for(drafter), prompts, max_new_tokens=20)


NAMES = ("adaptive", "block", "eagle_tree", "frozen_kv_mtp_tree", "mtp", "ngram", "plain", "standalone", "suffix")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_drafters_of_this_package_satisfy_the_contract(name):
    drafter = toy.bound_drafters()[name]
    report = check(drafter, None if name in ("ngram", "suffix") else FITTED_PROMPTS)
    assert len(report.checks) == 9
    assert 1 <= report.accept_length <= drafter.depth + 1
    assert (report.accept_length > 1) == (name != "plain")
    lines = repr(report).splitlines()
    assert lines[0] == f"{drafter!r} satisfies the contract"
    assert lines[-1].startswith(f"accept length {report.accept_length:.2f} greedy")


@dataclasses.dataclass(frozen=True)
class Repeat:
    """Repeats the last token; base class of the broken drafters below."""

    depth: int = 2
    capture_layers = ()

    def bind(self, target, draft):
        return self

    def init(self, params, batch, capacity, page_size):
        return jnp.zeros(batch, jnp.int32)

    def draft(self, params, s):
        return self.tree(jnp.repeat(self.last(s), self.depth + 1, axis=1)), s.draft

    def extend(self, params, s, committed):
        return s.draft

    def tree(self, tokens):
        return tree.chain(tokens)

    def last(self, s):
        return s.root


# Attributes and methods


class NoExtend:
    depth, capture_layers = 1, ()

    def bind(self, target, draft): ...

    def init(self, params, batch, capacity, page_size): ...

    def draft(self, params, s): ...


class Unhashable(Repeat):
    __hash__ = None


class BindsToNothing(Repeat):
    def bind(self, target, draft):
        return None


class ListOfLayers(Repeat):
    capture_layers = [1]


# State


class StateGrows(Repeat):
    def draft(self, params, s):
        return super().draft(params, s)[0], jnp.zeros((*s.draft.shape, 1), jnp.int32)


class StateBecomesFloat(Repeat):
    def extend(self, params, s, committed):
        return s.draft if committed.first else s.draft.astype(jnp.float32)


class StateBecomesDict(Repeat):
    def extend(self, params, s, committed):
        return s.draft if committed.first else {"count": s.draft}


class NoState(Repeat):
    def draft(self, params, s):
        return super().draft(params, s)[0]


# Trees


class NoTree(Repeat):
    def tree(self, tokens):
        return tokens


class FloatTokens(Repeat):
    def tree(self, tokens):
        return DraftTree(tokens.astype(jnp.float32))  # pyright: ignore


class LongChain(Repeat):
    def tree(self, tokens):
        return tree.chain(jnp.concatenate([tokens, tokens], axis=1))


class OtherRoot(Repeat):
    def tree(self, tokens):
        return tree.chain((tokens + 1) % 61)


@pytest.mark.parametrize(
    "drafter, message",
    [
        (NoExtend(), "NoExtend is not a drafter: it has no extend"),
        (Repeat, "give an object, not a class"),
        (Repeat(depth=-1), "Repeat: depth=-1: must be the length of the longest chain"),
        (Repeat(depth=2.0), "Repeat: depth=2.0"),
        (Unhashable(), "Unhashable: unhashable type: .* so make it a frozen dataclass"),
        (BindsToNothing(), "bind must return a drafter, but this NoneType has no depth"),
        (ListOfLayers(), r"capture_layers=\[1\]: must be a tuple of layers"),
        (StateGrows(), r"draft: returns a state of another form: it is int32\[4, 1\], but was int32\[4\]"),
        (StateBecomesFloat(), r"extend: returns a state of another form: it is float32\[4\], but was int32\[4\]"),
        (StateBecomesDict(), r"extend: returns a state of another form: it is missing, but was int32\[4\]"),
        (NoState(), r"draft: returns DraftTree; must return \(jspec.core.types.DraftTree, state\)"),
        (NoTree(), r"draft: returns \(.*\); must return \(jspec.core.types.DraftTree, state\)"),
        (FloatTokens(), r"draft: returns tokens float32\[4, 3\]; must be int32\[4, N\]"),
        (LongChain(), "draft: returns a chain of 5 drafts; must have at most depth=2"),
        (
            OtherRoot(),
            "round 0, sequence 0: node 0 of the tree has the token 52, but the last token of the sequence is 51",
        ),
    ],
    ids=lambda value: (
        (value if isinstance(value, type) else type(value)).__name__ if not isinstance(value, str) else ""
    ),
)
def test_a_broken_drafter_is_reported(drafter, message):
    with pytest.raises(AssertionError, match=message):
        check(drafter)


@pytest.mark.parametrize(
    "tokens, parents, options, message",
    [
        ([3, 61, 4], None, {}, "node 1 of the tree has the token 61: must be from 0 to 60"),
        ([3, 4, -1], [0, 0, 0], {}, "node 2 of the tree has the token -1"),
        ([4, 4, 4], None, {}, "node 0 of the tree has the token 4, but the last token of the sequence is 3"),
        ([3, 4, 5], [0, 2, 0], {}, "the parent of node 1 is 2: must come before its children"),
        ([3, 4, 5], [0, 0, -1], {}, "the parent of node 2 is -1"),
        ([3, 4, 5], [1, 0, 0], {}, "the parent of node 0 is 1"),
        ([3, 4, 5, 6], [0, 0, 1, 2], {}, "the tree has depth 3, more than the drafter's depth=2"),
        ([3, 4, 5], [0, 0, 1], {"depth": 1}, "the tree has depth 2, more than the tree's own depth=1"),
        ([3, 4, 5, 6, 7], [0, 0, 0, 0, 1], {"width": 2}, "the tree has width 3, more than the tree's own width=2"),
        ([3, 4, 5, 6], [0, 0, 0, 1], {"width": 2, "depth": 2}, None),
        ([3, 4, 5], None, {}, None),
        ([3], [0], {}, None),
    ],
)
def test_a_broken_tree_is_reported(tokens, parents, options, message):
    draft_tree = DraftTree(np.array([tokens]), None if parents is None else np.array([parents]), **options)
    fault = contract._find_fault(draft_tree, sequence=0, last=3, depth=2, vocab_size=61)
    assert fault is None if message is None else message in fault


# Output


@dataclasses.dataclass(frozen=True)
class Siblings(Ngram):
    """Ngram's proposal, after a wrong child of the root."""

    def draft(self, params, s):
        chain, state = super().draft(params, s)
        tokens = jnp.insert(chain.tokens, 1, (chain.tokens[:, 1] + 1) % 61, axis=1)
        parents = jnp.array([[0, 0, 0, *range(2, self.depth + 1)]], jnp.int32)
        return DraftTree(tokens, jnp.broadcast_to(parents, tokens.shape), self.depth), state


class ChainTarget(Llama):
    """A target that reads every tree as a chain."""

    def forward(self, params, draft_tree, cache, start, **options):
        return super().forward(params, tree.chain(draft_tree.tokens), cache, start, **options)


def test_greedy_output_is_compared_with_plain_decoding():
    """The target scores node 2 as if node 1, which is not its ancestor, came before it."""
    chain_target = ChainTarget(**{field.name: getattr(toy.NEAR, field.name) for field in dataclasses.fields(toy.NEAR)})
    drafter = Siblings()
    model = dataclasses.replace(model_for(drafter), target=chain_target)
    with pytest.raises(AssertionError, match="Siblings: sequence . differs from plain decoding at new token"):
        check_drafter(drafter, model, IDS, max_new_tokens=20)


@pytest.mark.slow
def test_sampled_output_is_compared_with_plain_sampling(monkeypatch):
    def other_noise(key, draft_tree, logits, position):
        return accept.coupled(key, draft_tree, logits, position + int(draft_tree.tokens.shape[1] > 1))

    monkeypatch.setitem(accept.RULES, "coupled", other_noise)
    with pytest.raises(
        AssertionError, match="Ngram: sequence 2 differs from plain decoding at new token 1.*sampled with the same seed"
    ):
        check(Ngram())


# Rounds


@dataclasses.dataclass(frozen=True)
class Impure(Ngram):
    """Proposes other tokens at random, with randomness that is not an argument."""

    def draft(self, params, s):
        draft_tree, state = super().draft(params, s)
        shift = jax.experimental.io_callback(lambda: np.int32(COIN.randrange(2)), jax.ShapeDtypeStruct((), np.int32))
        tokens = draft_tree.tokens.at[:, 1:].add(shift) % 61
        return dataclasses.replace(draft_tree, tokens=tokens), state


COIN = random.Random(0)


@dataclasses.dataclass(frozen=True)
class ChangedByEmptyChunks(Ngram):
    """Proposes wrong tokens after a call of `extend` with length 0."""

    def init(self, params, batch, capacity, page_size):
        return super().init(params, batch, capacity, page_size), jnp.ones(batch, jnp.int32)

    def draft(self, params, s):
        copy, right = s.draft
        draft_tree, _ = super().draft(params, dataclasses.replace(s, draft=copy))
        shifted = draft_tree.tokens.at[:, 1:].add(1 - right[:, None]) % 61
        return dataclasses.replace(draft_tree, tokens=shifted), s.draft

    def extend(self, params, s, committed):
        copy, right = s.draft
        copy = super().extend(params, dataclasses.replace(s, draft=copy), committed)
        return copy, right if committed.first else right * jnp.minimum(committed.length, 1)


@dataclasses.dataclass(frozen=True)
class SharedDraft(Ngram):
    """Proposes the tokens of the first sequence for all of them."""

    def draft(self, params, s):
        draft_tree, state = super().draft(params, s)
        first = jnp.broadcast_to(draft_tree.tokens[:1, 1:], draft_tree.tokens[:, 1:].shape)
        return tree.chain(jnp.concatenate([draft_tree.tokens[:, :1], first], axis=1)), state


@dataclasses.dataclass(frozen=True)
class NeverEqual(Repeat):
    """Binds to another value every time."""

    number: int = 0

    def bind(self, target, draft):
        return dataclasses.replace(self, number=next(NUMBERS))


NUMBERS = itertools.count()


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter, message",
    [
        (Impure(), "has other (rounds|tokens) in a single call than round by round"),
        (ChangedByEmptyChunks(), "has other rounds if its prompt is read in chunks"),
        (SharedDraft(), "sequence 1 has other rounds alone than in a batch"),
        (NeverEqual(), "other prompts of the same shape compile the program again"),
    ],
    ids=("impure", "changed_by_empty_chunks", "shared_draft", "never_equal"),
)
def test_rounds_depend_only_on_the_sequence(drafter, message):
    with pytest.raises(AssertionError, match=f"{type(drafter).__name__}: .*{message}"):
        check(drafter)


class Raises(Repeat):
    def draft(self, params, s):
        raise KeyError("mine")


def test_an_exception_of_the_drafter_gets_a_note():
    with pytest.raises(KeyError, match="mine") as raised:
        check(Raises())
    assert any("check_drafter(Raises(...))" in note for note in raised.value.__notes__)
