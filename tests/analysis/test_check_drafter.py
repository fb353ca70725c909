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
        return tree.chain(self.tokens(s)), s.draft

    def extend(self, params, s, committed):
        return s.draft

    def tokens(self, s):
        return jnp.repeat(s.root, self.depth + 1, axis=1)


def broken(name, base=Repeat, **members):
    """A drafter with other members."""
    return dataclasses.dataclass(frozen=True)(type(name, (base,), members))()


def proposing(name, change):
    """A drafter whose proposal is a function of its tokens."""
    return broken(name, draft=lambda self, params, s: (change(self.tokens(s)), s.draft))


def extending(name, change):
    """A drafter whose state is a function of itself after the prompt."""
    new = lambda self, params, s, committed: s.draft if committed.first else change(s.draft)  # noqa: E731
    return broken(name, extend=new)


class ByIdentity(Repeat):
    __hash__ = object.__hash__


NO_EXTEND = type(
    "NoExtend", (), {name: getattr(Repeat, name) for name in ("depth", "capture_layers", "bind", "init", "draft")}
)
OTHER_FORM = "returns a state of another form: it is"
NO_PAIR = r"must return \(jspec.core.types.DraftTree, state\)"
BROKEN = [
    (NO_EXTEND(), "NoExtend is not a drafter: it has no extend"),
    (Repeat, "give an object, not a class"),
    (Repeat(depth=-1), r"Repeat\(depth=-1\): must be from 0 to 127"),
    (Repeat(depth=2.0), r"Repeat\(depth=2.0\): must be an int"),
    (
        type("Unhashable", (Repeat,), {"__hash__": None})(),
        "Unhashable: unhashable type: .* so make it a frozen dataclass",
    ),
    (broken("BindsToNothing", bind=lambda *_: None), "bind: must return a drafter, but this NoneType has no depth"),
    (broken("ListOfLayers", capture_layers=[1]), r"capture_layers=\[1\]\): must be a tuple of layers"),
    (broken("DeepLayer", capture_layers=(99,)), r"DeepLayer\(capture_layers=99\): must be from 0 to"),
    (ByIdentity(), "ByIdentity: it is hashed by identity"),
    (
        broken("StateGrows", draft=lambda self, params, s: (tree.chain(self.tokens(s)), s.draft[:, None])),
        rf"draft: {OTHER_FORM} int32\[4, 1\], but was int32\[4\]",
    ),
    (
        extending("StateBecomesFloat", lambda state: state.astype(jnp.float32)),
        rf"extend: {OTHER_FORM} float32\[4\], but was int32\[4\]",
    ),
    (
        extending("StateBecomesDict", lambda state: {"count": state}),
        rf"extend: {OTHER_FORM} missing, but was int32\[4\]",
    ),
    (
        broken("NoState", draft=lambda self, params, s: tree.chain(self.tokens(s))),
        f"draft: returns DraftTree; {NO_PAIR}",
    ),
    (proposing("NoTree", lambda tokens: tokens), rf"draft: returns \(.*\); {NO_PAIR}"),
    (
        proposing("FloatTokens", lambda tokens: DraftTree(tokens.astype(jnp.float32))),  # pyright: ignore
        r"draft: returns tokens float32\[4, 3\]; must be int32\[4, N\]",
    ),
    (
        proposing("LongChain", lambda tokens: tree.chain(jnp.concatenate([tokens, tokens], axis=1))),
        "draft: returns a chain of 5 drafts; must have at most depth=2",
    ),
    (
        proposing("OtherRoot", lambda tokens: tree.chain((tokens + 1) % 61)),
        "round 0, sequence 0: node 0 of the tree has the token 52, but the last token of the sequence is 51",
    ),
]


@pytest.mark.parametrize(
    "drafter, message",
    BROKEN,
    ids=[(drafter if isinstance(drafter, type) else type(drafter)).__name__ for drafter, _ in BROKEN],
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


@pytest.mark.slow
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


def other_drafts(name, change):
    """`Ngram` with drafts that are a function of its own."""

    def draft(self, params, s):
        draft_tree, state = Ngram.draft(self, params, s)
        tokens = draft_tree.tokens.at[:, 1:].set(change(draft_tree.tokens[:, 1:]) % 61)
        return dataclasses.replace(draft_tree, tokens=tokens), state

    return broken(name, Ngram, draft=draft)


def at_random(tokens):
    """Other tokens at random, with randomness that is not an argument."""
    return tokens + jax.experimental.io_callback(
        lambda: np.int32(COIN.randrange(2)), jax.ShapeDtypeStruct((), np.int32)
    )


def of_the_first(tokens):
    """The tokens of the first sequence for all of them."""
    return jnp.broadcast_to(tokens[:1], tokens.shape)


COIN, NUMBERS = random.Random(0), itertools.count()


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
class NeverEqual(Repeat):
    """Binds to another value every time."""

    number: int = 0

    def bind(self, target, draft):
        return dataclasses.replace(self, number=next(NUMBERS))


@dataclasses.dataclass(frozen=True)
class OtherDrafts(Repeat):
    """Drafts that no target accepts, since a model of 61 tokens prefers others: of a random token, or of the batch."""

    of_the_batch: bool = False

    def draft(self, params, s):
        batch = s.length.shape[0]
        if self.of_the_batch:
            drafted = (jnp.arange(batch) * 7 + batch)[:, None] + s.length[:, None] + jnp.arange(self.depth)[None]
        else:
            shape = jax.ShapeDtypeStruct((), np.int32)
            drafted = jax.experimental.io_callback(lambda: np.int32(COIN.randrange(61)), shape) + s.length[:, None]
        tokens = [self.tokens(s)[:, :1], jnp.broadcast_to(drafted, (batch, self.depth)) % 61]
        return DraftTree(jnp.concatenate(tokens, axis=1).astype(jnp.int32)), s.draft


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter, message",
    [
        (other_drafts("Impure", at_random), "a second call of draft with the same arguments proposes other tokens"),
        (OtherDrafts(), "a second call of draft with the same arguments proposes other tokens"),
        (OtherDrafts(of_the_batch=True), "sequence 0 has other (drafts|rounds) alone than in a batch"),
        (ChangedByEmptyChunks(), "has other rounds if its prompt is read in chunks"),
        (other_drafts("SharedDraft", of_the_first), "sequence 1 has other rounds alone than in a batch"),
        (NeverEqual(), "other prompts of the same shape compile the program again"),
    ],
    ids=("impure", "rejected", "rejected_of_a_batch", "changed_by_empty_chunks", "shared_draft", "never_equal"),
)
def test_rounds_depend_only_on_the_sequence(drafter, message):
    with pytest.raises(AssertionError, match=f"{type(drafter).__name__}: .*{message}"):
        check(drafter)


def test_an_exception_of_the_drafter_gets_a_note():
    with pytest.raises(KeyError, match="mine") as raised:
        check(broken("Raises", draft=lambda self, params, s: {}["mine"]))
    assert any("check_drafter(Raises(...))" in note for note in raised.value.__notes__)
