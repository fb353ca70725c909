"""`check_drafter`: tests a drafter against the contract of all drafters."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int, PyTree

from jspec.analysis import contract, verify_checks
from jspec.analysis.contract import Case, Cases, Outcome
from jspec.analysis.verify_subject import Subject
from jspec.core import accept, returned
from jspec.core.checks import check_int, shorten
from jspec.core.method import Method
from jspec.core.prefill import prefill
from jspec.core.round import accept_drafts, commit_round, draft, extend, verify
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import DecodeState, Drafter, DraftTree, Params, Target
from jspec.generation.method import bind_drafter, choose_drafter
from jspec.generation.options import DEFAULT_PAGE_SIZE
from jspec.generation.result import Generation, Generations
from jspec.generation.run import Run, check_model, encode_prompts
from jspec.loading.model import Model, refuse_split

PROMPTS = ("x", "def f(x):", "a = b\na = b")
"""Prompts of different lengths and one program shape. The shortest has one token, which leaves the caches empty."""
NEAR_TIES = 0.1
"""The largest share of rounds whose drafts may be others in a batch of another shape, by rounding."""
_PROMPT_IDS = ([0], [1, 2, 3, 4], [5, 6, 7, 5, 6, 7, 5])


@dataclasses.dataclass(frozen=True, repr=False)
class DrafterReport:
    """The result of `check_drafter` for a drafter that satisfies the contract.

    drafter: its repr, with all options.
    accept_length: mean number of tokens per round in greedy sequences, bonus token included.
    sampled_accept_length: the same in sampled sequences.
    checks: the passed checks.
    """

    drafter: str
    accept_length: float
    sampled_accept_length: float
    checks: tuple[str, ...]

    def __repr__(self) -> str:
        summary = f"accept length {self.accept_length:.2f} greedy, {self.sampled_accept_length:.2f} sampled"
        return contract.report(f"{self.drafter} satisfies the contract", self.checks, summary)


def check_drafter(
    drafter: str | Drafter,
    model: Model,
    prompts: Sequence[str] | Sequence[Sequence[int]] | None = None,
    *,
    max_new_tokens: int = 24,
    temperature: float = 1.0,
    seed: int = 0,
    progress: bool | None = None,
) -> DrafterReport:
    """Test a drafter against the contract of `jspec.core.types.Drafter`, in float32.

    Each prompt is continued once greedily and once by sampling, and outputs are compared token for token. On an
    accelerator, a near-tie of the target's logits can make this fail, so run it on a CPU.

    Args:
      drafter: an object, or a name as in `jspec.generate`.
      model: a small one is enough. Its weights are cast to float32.
      prompts: None: a few short ones.
      max_new_tokens, seed: as in `jspec.generate`.
      temperature: temperature of the sampled sequences.
      progress: whether to print each passed check below a bar; None: in a terminal.

    Raises:
      AssertionError: the drafter violates the contract; the message states where and how.
      ValueError, TypeError: another invalid argument, or models that the drafter's `bind` does not support.
    """
    check_model(model)
    refuse_split(model, "check_drafter")
    tested = _check_interface(drafter, model)
    if prompts is None:
        prompts = PROMPTS if model.tokenizer else _PROMPT_IDS
    single, ids = encode_prompts(model, prompts)
    if single:
        raise ValueError(f"prompts={shorten(prompts)}: must be a list of prompts")
    check_int("max_new_tokens", max_new_tokens, least=1)
    disable = contract.hidden(progress)
    sampling = [Sampling(temperature=t) for t in (0.0, temperature) for _ in ids]
    counted = (_CountedBranches if hasattr(type(tested), "branches") else _Counted)(tested, [])
    subject = Subject(contract.in_float32(model), counted, [*map(list, ids)] * 2, None, max_new_tokens, seed, sampling)
    _ = subject.options()
    name = type(tested.bind(model.target, model.draft)).__name__
    passed = contract.run_cases("check_drafter", name, _cases(subject), disable)
    greedy, sampled = subject.drafted()[: len(ids)], subject.drafted()[len(ids) :]
    passed = ("it has the attributes and methods of a drafter, and can be hashed", *passed)
    return DrafterReport(repr(tested), _accept_length(greedy), _accept_length(sampled), passed)


def _member(name: str) -> property:
    return property(lambda wrapper: getattr(wrapper.drafter, name))


@dataclasses.dataclass(frozen=True)
class _Counted:
    """Wraps a drafter, compares by its value, and counts the traces of `draft`.

    It has only the members of the contract: costs of branches would be measured, and rounds would not repeat.
    """

    drafter: Any
    traces: list[int] = dataclasses.field(compare=False)
    depth, capture_layers, init, extend = map(_member, ("depth", "capture_layers", "init", "extend"))

    def bind(self, target: Target, draft: object) -> "_Counted":
        return type(self)(self.drafter.bind(target, draft), self.traces)

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, PyTree]:
        self.traces.append(1)
        return self.drafter.draft(params, s)


@dataclasses.dataclass(frozen=True)
class _CountedBranches(_Counted):
    """Wraps a drafter with branches, and counts the traces of `choose`."""

    branches, states, parts, with_parts = map(_member, ("branches", "states", "parts", "with_parts"))

    def choose(self, params: Params, s: DecodeState) -> tuple[Int[Array, ""], PyTree]:
        self.traces.append(1)
        return self.drafter.choose(params, s)


def _check_interface(drafter: str | Drafter, model: Model) -> Drafter:
    try:
        tested = choose_drafter(drafter, model)
    except TypeError as error:
        raise AssertionError(str(error)) from None
    name = type(tested).__name__
    try:
        contract.check_hashed(tested, "a drafter")
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None
    tested.bind(model.target, model.draft)  # an error of its own is about the models
    contract.require(bind_drafter, tested, model.target, model.draft)
    return tested


def _check_state(subject: Subject) -> None:
    model, bound = subject.model, subject.drafter.bind(subject.model.target, subject.model.draft).drafter
    batch, width, name = len(subject.prompts), max(map(len, subject.prompts)), type(bound).__name__
    row_sampling = per_row(subject.sampling, batch, model.target.vocab_size)
    for sampling, rule in ((None, accept.greedy), (row_sampling, accept.coupled)):
        method = Method(model.target, bound, rule)
        capacity = width + subject.new
        read = partial(prefill, method=method, capacity=capacity, page_size=DEFAULT_PAGE_SIZE)
        prompts = jax.eval_shape(partial(contract.abstract_prompts, batch, width, sampling))
        s = jax.eval_shape(read, model.params, prompts)
        drafted = jax.eval_shape(bound.draft, model.params, s)
        _, state = contract.require(returned.check_draft, bound, drafted, batch, bound.depth)
        contract.require(returned.check_same_form, f"{name}.draft", s.draft, state)
        after = jax.eval_shape(partial(_round, method=method), model.params, s)
        contract.require(returned.check_same_form, f"{name}.extend", s.draft, after.draft)


def _round(params: Params, s: DecodeState, *, method: Method) -> DecodeState:
    """As `jspec.core.round.step`, without its checks of states."""
    draft_tree, s = draft(params, s, method=method)
    out = verify(params, s, draft_tree, method=method)
    s, committed = commit_round(s, out, accept_drafts(s, draft_tree, out, method=method))
    return extend(params, s, committed, method=method)


@dataclasses.dataclass(frozen=True)
class _Examined:
    """Generations of one call per round, and the trees of each round on the host."""

    generations: Generations
    trees: list[DraftTree]


_draft: Callable[..., DraftTree] = jax.jit(lambda params, s, bound: bound.draft(params, s)[0], static_argnums=2)


def _round_by_round(subject: Subject, generate: Callable[..., Generations] = verify_checks.in_pieces) -> _Examined:
    """A generation of one call per round, in which each tree is examined.

    generate: calls the function `before` ahead of each round.
    """
    trees: list[DraftTree] = []

    def examine(run: Run) -> None:
        s, bound = run.state, run.method.drafter
        bound: Any = bound.drafter if isinstance(bound, _Counted) else bound
        once, twice = (_draft(subject.precise.params, s, bound) for _ in range(2))
        draft_tree, again, tokens, lengths = jax.device_get((once, twice, s.tokens, s.length))
        if not all(_same_tree(draft_tree, i, again, i) for i in range(len(tokens))):
            raise AssertionError(
                f"round {int(s.round_index)}: a second call of draft with the same arguments proposes other tokens: "
                "draft must be a pure function of its arguments"
            )
        trees.append(draft_tree)
        for i, (buffer, length) in enumerate(zip(tokens, lengths, strict=True)):
            fault = _find_fault(draft_tree, i, int(buffer[length - 1]), bound.depth, subject.model.target.vocab_size)
            if fault:
                raise AssertionError(f"round {int(s.round_index)}, sequence {i}: {fault}")

    try:
        return _Examined(generate(subject, before=examine, debug=True), trees)
    except jax.errors.JaxRuntimeError as error:
        raise AssertionError(str(error).splitlines()[0]) from None


def _same_tree(one: DraftTree, row: int, other: DraftTree, other_row: int) -> bool:
    """Whether two sequences have the same drafts, in arrays on the host."""
    leaves = (jax.tree.leaves((tree.tokens, tree.parents)) for tree in (one, other))
    return all(np.array_equal(a[row], b[other_row]) for a, b in zip(*leaves, strict=True))


def _find_fault(draft_tree: DraftTree, sequence: int, last: int, depth: int, vocab_size: int) -> str | None:
    """Describe a fault of the tree of a sequence, in arrays on the host; None if it is valid.

    last: the last token of the sequence.
    depth: the drafter's depth.
    """
    tokens = draft_tree.tokens[sequence].tolist()
    invalid = [node for node, token in enumerate(tokens) if not 0 <= token < vocab_size]
    if invalid:
        node = invalid[0]
        return f"node {node} of the tree has the token {tokens[node]}: must be from 0 to {vocab_size - 1}"
    if tokens[0] != last:
        return f"node 0 of the tree has the token {tokens[0]}, but the last token of the sequence is {last}"
    if draft_tree.parents is None:
        return None
    parents = draft_tree.parents[sequence].tolist()
    if parents[0] != 0:
        return f"the parent of node 0 is {parents[0]}: must be 0, the root itself"
    for node, parent in enumerate(parents[1:], 1):
        if not 0 <= parent < node:
            return f"the parent of node {node} is {parent}: must come before its children"
    deepest, widest = (
        max(contract.depths_of(parents)),
        max((parents[1:].count(node) for node in range(len(tokens))), default=0),
    )
    for kind, value, owner, bound in (
        ("depth", deepest, "the drafter's", depth),
        ("depth", deepest, "the tree's own", draft_tree.depth),
        ("width", widest, "the tree's own", draft_tree.width),
    ):
        if bound is not None and value > bound:
            return f"the tree has {kind} {value}, more than {owner} {kind}={bound}"
    return None


def _in_the_batch(subject: Subject) -> _Examined:
    return subject.once("round by round", partial(_round_by_round, subject))


def _pieces(subject: Subject) -> Outcome:
    where = "in a single call than round by round: draft and extend must be pure functions of their arguments"
    return verify_checks.same_rounds(subject, lambda: _in_the_batch(subject).generations, where)


def _same_proposals(
    subject: Subject, where: str, generate: Callable[..., Generations], indices: Sequence[int] | None = None
) -> Outcome:
    """Rounds and drafts of some of the prompts (None: all) are those of the batch."""
    indices, whole = range(len(subject.prompts)) if indices is None else indices, _in_the_batch(subject)
    run, branches = _round_by_round(subject, generate), hasattr(subject.drafter, "branches")
    only = branches and len(indices) < len(subject.prompts)
    outcome = verify_checks.same_rounds(subject, lambda: run.generations, where, indices, only=only)
    # A choice among drafters is the batch's; it may depend on times.
    if branches or outcome.verdict == "failed":
        return outcome
    for row, index in enumerate(indices):
        rounds = range(len(whole.generations[index].tokens_per_round))
        others = sum(not _same_tree(whole.trees[r], index, run.trees[r], row) for r in rounds)
        if others > NEAR_TIES * len(rounds):
            return Outcome(
                "failed", 0, f"sequence {index} has other drafts {where}, in {others} of {len(rounds)} rounds"
            )
    return outcome


def _alone(subject: Subject) -> Outcome:
    everything = range(len(subject.prompts))
    outcome = verify_checks.alone(subject, everything)
    for index in everything:
        if outcome.verdict == "failed":
            break
        generate = partial(verify_checks.in_pieces, only=index)
        outcome = _same_proposals(subject, "alone than in a batch", generate, [index])
    return outcome


def _check_traces(subject: Subject) -> None:
    before = len(subject.drafter.traces)
    others = dataclasses.replace(subject, prompts=[ids[::-1] for ids in subject.prompts])
    verify_checks.each_alone(others, [subject.longest])
    if len(subject.drafter.traces) > before:
        raise AssertionError(
            "other prompts of the same shape compile the program again: a drafter and what bind returns must compare "
            "equal to an identical one and hash by value; make it a frozen dataclass of static values"
        )


_SAME = "greedy output equals plain decoding, sampled output equals plain sampling with the same seed"
_CHUNKS = (
    "if its prompt is read in chunks: extend is called for each chunk, with length 0 for a sequence whose prompt has "
    "ended, and must not change what it proposes for that sequence"
)


def _cases(subject: Subject) -> Cases:
    words = "draft and extend preserve the structure, shapes and dtypes of its state"
    yield Case(words, partial(_check_state, subject))
    yield from proposals(subject)
    yield Case(_SAME, partial(verify_checks.same_output, subject))
    yield Case("running all rounds in one call equals one call per round", partial(_pieces, subject))
    for name, generate, where in (
        ("NaN in rows without committed tokens changes no round", verify_checks.poisoned, "with NaN in free rows"),
        ("reading a prompt in chunks changes no round", partial(verify_checks.in_pieces, chunk=2), _CHUNKS),
    ):
        yield Case(name, partial(_same_proposals, subject, where, generate))
    same = "has the same tokens" if hasattr(subject.drafter, "branches") else "takes the same rounds"
    yield Case(f"each sequence {same} alone as in a batch", partial(_alone, subject))
    yield Case("other prompts of the same shape run the same program", partial(_check_traces, subject))


def proposals(subject: Subject) -> Cases:
    """The examination of all trees, also a case of `verify`."""
    words = "trees are valid: ids in the vocabulary, last token at node 0, parents first, depth at most the drafter's"
    yield Case(words, lambda: Outcome("passed", sum(map(len, _in_the_batch(subject).generations))))


def _accept_length(generations: Sequence[Generation]) -> float:
    counts = [count for generation in generations for count in generation.tokens_per_round]
    return sum(counts) / max(len(counts), 1)
