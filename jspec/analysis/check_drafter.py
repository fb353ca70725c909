"""What every drafter must keep, checked on a model: for drafters of your own, and for those of this package."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jspec.core import accept, decode, stopping
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import Committed, DecodeState, Drafter, DraftTree, Params
from jspec.engine.model import Model
from jspec.engine.options import DEFAULT_PAGE_SIZE, choose
from jspec.engine.result import Generation
from jspec.engine.run import Run, encode_prompts

PROMPTS = ("x", "def f(x):", "a = b\na = b")
"""Of different lengths, the shortest of one token, which leaves the caches empty; all of one program's shape."""
_IDS = ([0], [1, 2, 3, 4], [5, 6, 7, 5, 6, 7, 5])


@dataclasses.dataclass(frozen=True, repr=False)
class DrafterReport:
    """The result of `check_drafter` for a drafter that keeps the contract.

    drafter: how it was set.
    accept_length: mean tokens a round in greedy rows, bonus included.
    sampled_accept_length: the same in rows that sample.
    checks: what was checked.
    """

    drafter: str
    accept_length: float
    sampled_accept_length: float
    checks: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join(
            [
                f"{self.drafter} keeps the contract",
                *(f"  ok  {check}" for check in self.checks),
                f"accept length {self.accept_length:.2f} greedy, {self.sampled_accept_length:.2f} sampled",
            ]
        )


def check_drafter(
    drafter: str | Drafter,
    model: Model,
    prompts: Sequence[str] | Sequence[Sequence[int]] | None = None,
    *,
    max_new_tokens: int = 24,
    temperature: float = 1.0,
    seed: int = 0,
) -> DrafterReport:
    """Runs a drafter through the contract of `jspec.core.types.Drafter`, in float32, and reports.

    Each prompt is continued by one greedy and one sampling row. Outputs are compared token for token; on an accelerator
    that may fail at a near-tie of the target's logits, so check on a CPU.

    Args:
      drafter: an object, or a name as in `jspec.generate`.
      model: small is enough. Its weights are cast to float32.
      prompts: None: a few short ones.
      temperature: of the rows that sample.

    Raises:
      AssertionError: the drafter breaks the contract; the message says where and how.
      ValueError, TypeError: another argument that cannot be honoured, or one that the drafter's `bind` refuses.
    """
    chosen = _check_interface(drafter, model)
    bound = chosen.bind(model.target, model.draft)
    if prompts is None:
        prompts = PROMPTS if model.tokenizer else _IDS
    _, ids = encode_prompts(model, list(prompts))
    case = _Case(_in_float32(model), _Counted(chosen, []), ids, max_new_tokens, temperature, seed)
    done = ["the attributes and methods of a drafter, which can be hashed"]
    for check in (_check_state, _check_trees, _check_outputs, _check_pieces, _check_chunks, _check_rows, _check_traces):
        try:
            done.append(check(case))
        except AssertionError as error:
            raise AssertionError(f"{type(bound).__name__}: {error}") from None
        except Exception as error:
            error.add_note(f"raised in check_drafter({type(bound).__name__}(...)), by {check.__name__}")
            raise
    greedy, sampled = (case.accept_length(rows) for rows in (slice(0, len(ids)), slice(len(ids), None)))
    return DrafterReport(repr(chosen), greedy, sampled, tuple(done))


@dataclasses.dataclass(frozen=True)
class _Counted:
    """A drafter that is equal to its like, and counts how often `draft` was traced."""

    drafter: Any
    traces: list = dataclasses.field(compare=False)

    @property
    def depth(self) -> int:
        return self.drafter.depth

    @property
    def capture_layers(self) -> tuple[int, ...]:
        return self.drafter.capture_layers

    def bind(self, target: Any, draft: Any) -> "_Counted":
        return _Counted(self.drafter.bind(target, draft), self.traces)

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> Any:
        return self.drafter.init(params, batch, capacity, page_size)

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, Any]:
        self.traces.append(1)
        return self.drafter.draft(params, s)

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> Any:
        return self.drafter.extend(params, s, committed)


@dataclasses.dataclass
class _Case:
    """What the checks share: the greedy rows first, then the sampling ones, and what came out so far."""

    model: Model
    drafter: _Counted
    ids: list[list[int]]
    max_new_tokens: int
    temperature: float
    seed: int
    out: Generation | None = None

    @property
    def sampling(self) -> list[Sampling]:
        return [Sampling(temperature=t) for t in (0.0, self.temperature) for _ in self.ids]

    def run(self, drafter: Any, **changes: Any) -> Run:
        rows = {"prompts": self.ids * 2, "sampling": self.sampling, "seed": self.seed, "debug": False}
        rest = {"accept": None, "stop": (), "logprobs": False, "page_size": DEFAULT_PAGE_SIZE}
        return Run(self.model, drafter=drafter, max_new_tokens=self.max_new_tokens, **(rows | rest | changes))

    def result(self) -> Generation:
        assert self.out is not None
        return self.out

    def accept_length(self, rows: slice) -> float:
        out = self.result()
        rounds = [count for row in range(len(out.tokens))[rows] for count in out.rounds_of(row)]
        return sum(rounds) / max(len(rounds), 1)


def _check_interface(drafter: Any, model: Model) -> Drafter:
    try:
        chosen = choose(drafter, model)
    except TypeError as error:
        raise AssertionError(str(error)) from None
    name = type(chosen).__name__
    try:
        hash(chosen)
    except TypeError as error:
        raise AssertionError(
            f"{name}: {error}: a drafter is a static argument, so make it a frozen dataclass"
        ) from None
    bound = chosen.bind(model.target, model.draft)
    missing = [
        part for part in ("depth", "capture_layers", "bind", "init", "draft", "extend") if not hasattr(bound, part)
    ]
    if missing:
        given = type(bound).__name__
        raise AssertionError(f"{name}: bind returns the drafter to use, and this {given} has no {', '.join(missing)}")
    if isinstance(bound.depth, bool) or not isinstance(bound.depth, int) or bound.depth < 0:
        raise AssertionError(f"{name}: depth={bound.depth!r}: give the tokens of the longest chain, an int from 0 up")
    if not isinstance(bound.capture_layers, tuple):
        raise AssertionError(f"{name}: capture_layers={bound.capture_layers!r}: give a tuple of layers, () for none")
    return chosen


def _check_state(case: _Case) -> str:
    model, bound = case.model, case.drafter.bind(case.model.target, case.model.draft).drafter
    rows = per_row(case.sampling, 2 * len(case.ids), model.target.vocab_size)
    for sampling, rule in ((None, accept.greedy), (rows, accept.coupled)):
        static = {"target": model.target, "drafter": bound, "accept": rule}
        batch, width = 2 * len(case.ids), max(map(len, case.ids))
        count = jax.ShapeDtypeStruct((batch,), jnp.int32)
        prefill = partial(decode.prefill, **static, capacity=width + case.max_new_tokens, page_size=DEFAULT_PAGE_SIZE)
        tokens = jax.ShapeDtypeStruct((batch, width), jnp.int32)
        key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))  # noqa: B023
        s = jax.eval_shape(prefill, model.params, tokens, count, count, key, stopping.init(None, batch), sampling)
        drafted = jax.eval_shape(bound.draft, model.params, s)
        if not isinstance(drafted, tuple) or len(drafted) != 2:
            raise AssertionError(f"draft returns a {type(drafted).__name__}: give (DraftTree, state)")
        _check_tree_shape(drafted[0], bound, batch)
        _check_same_shape("draft", s.draft, drafted[1])
        after = jax.eval_shape(partial(decode.step, **static), model.params, s)
        _check_same_shape("extend", s.draft, after.draft)
    return "structure, shapes and dtypes of its state stay as they are after prefill"


def _check_tree_shape(draft_tree: Any, bound: Drafter, batch: int) -> None:
    if not isinstance(draft_tree, DraftTree):
        raise AssertionError(f"draft returns a {type(draft_tree).__name__} as tree: give a jspec.core.types.DraftTree")
    shape = draft_tree.tokens.shape
    for name, array in (("tokens", draft_tree.tokens), ("parents", draft_tree.parents)):
        if array is None:
            continue
        if array.dtype != jnp.int32 or len(shape) != 2 or shape[0] != batch or array.shape != shape:
            wanted = f"int32[{batch}, nodes], and parents as many as tokens"
            raise AssertionError(f"the tree's {name} are {_describe(array)}: give {wanted}")
    if draft_tree.parents is None and shape[1] - 1 > bound.depth:
        raise AssertionError(f"it drafts a chain of {shape[1] - 1} tokens, more than its depth={bound.depth}")


def _check_same_shape(method: str, before: Any, after: Any) -> None:
    """Raises where a state is no longer of the form that it had after prefill."""
    then, now = (
        {jax.tree_util.keystr(path) or "itself": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
        for state in (before, after)
    )
    changed = [
        f"{name} is {_describe(now.get(name))}, and was {_describe(then.get(name))}"
        for name in dict.fromkeys([*then, *now])
        if _describe(then.get(name)) != _describe(now.get(name))
    ]
    if not changed and jax.tree.structure(before) != jax.tree.structure(after):
        changed = [f"it is {jax.tree.structure(after)}, and was {jax.tree.structure(before)}"]
    if changed:
        raise AssertionError(f"the state that {method} returns is not of the form it had after prefill: {changed[0]}")


def _describe(leaf: Any) -> str:
    return "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"


def _check_trees(case: _Case) -> str:
    run = case.run(case.drafter, debug=True)
    bound = run.parts["drafter"].drafter
    draft: Callable[..., DraftTree] = jax.jit(lambda params, s: bound.draft(params, s)[0])
    number, finished = 0, False
    while not finished:
        draft_tree, tokens, length = jax.device_get(
            (draft(case.model.params, run.state), run.state.tokens, run.state.length)
        )
        for row, (buffer, end) in enumerate(zip(tokens, length, strict=True)):
            broken = _broken(draft_tree, row, int(buffer[end - 1]), bound.depth, case.model.target.vocab_size)
            if broken:
                raise AssertionError(f"round {number}, row {row}: {broken}")
        try:
            finished = run.advance(1)
        except jax.errors.JaxRuntimeError as error:
            raise AssertionError(str(error).splitlines()[0]) from None
        number += 1
    case.out = run.result()
    return f"trees: tokens in the vocabulary, node 0 the last token, parents first, depth at most {bound.depth}"


def _broken(draft_tree: DraftTree, row: int, last: int, depth: int, vocab_size: int) -> str | None:
    """What is wrong with the tree of a row, as arrays on the host; None if nothing is."""
    tokens = draft_tree.tokens[row].tolist()
    outside = [node for node, token in enumerate(tokens) if not 0 <= token < vocab_size]
    if outside:
        node = outside[0]
        return f"node {node} of the tree has the token {tokens[node]}: ids are 0 to {vocab_size - 1}"
    if tokens[0] != last:
        return f"node 0 of the tree has the token {tokens[0]}, and the row's last token is {last}"
    if draft_tree.parents is None:
        return None
    parents = draft_tree.parents[row].tolist()
    depths = [0] * len(tokens)
    if parents[0] != 0:
        return f"the parent of node 0 is {parents[0]}: the root's is itself, 0"
    for node, parent in enumerate(parents[1:], 1):
        if not 0 <= parent < node:
            return f"the parent of node {node} is {parent}: a parent stands before its children"
        depths[node] = depths[parent] + 1
    deepest, widest = max(depths), max((parents[1:].count(node) for node in range(len(tokens))), default=0)
    for kind, value, name, bound in (
        ("depth", deepest, "the drafter's", depth),
        ("depth", deepest, "the tree's own", draft_tree.depth),
        ("width", widest, "the tree's own", draft_tree.width),
    ):
        if bound is not None and value > bound:
            return f"the tree has {kind} {value}, more than {name} {kind}={bound}"
    return None


def _check_outputs(case: _Case) -> str:
    plain = case.run(None)
    plain.advance(None)
    for row, (got, wanted) in enumerate(zip(case.result().tokens, plain.result().tokens, strict=True)):
        kind = "greedy" if row < len(case.ids) else "sampled"
        at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), len(wanted))
        if got != wanted:
            raise AssertionError(
                f"{kind} output of row {row} is not plain decoding's from new token {at} on: {got[at:][:4]} in place "
                f"of {wanted[at:][:4]}"
            )
    return "greedy output is plain decoding's, and sampled output plain sampling's at the same seed"


def _check_pieces(case: _Case) -> str:
    _check_rounds(
        case,
        case.run(case.drafter, debug=True),
        "in one call than round by round: what draft and extend return must be a function of their arguments and "
        "nothing else",
    )
    return "one call for all rounds does what a call for each round does"


def _check_chunks(case: _Case) -> str:
    _check_rounds(
        case,
        case.run(case.drafter, chunk=2),
        "where its prompt is read in chunks: extend is called for each chunk, with length 0 once a row's prompt has "
        "ended, and what it would propose for that row must stay as it is",
    )
    return "a prompt that is read in chunks is followed by the same rounds"


def _check_rounds(case: _Case, run: Run, where: str) -> None:
    """Raises where a run of all rows takes other rounds than those of `_check_trees`."""
    run.advance(None)
    for row in range(len(case.ids) * 2):
        if _figures(run.result(), row) != _figures(case.result(), row):
            raise AssertionError(f"row {row} takes other rounds {where}")


def _check_rows(case: _Case) -> str:
    for row, prompt in enumerate(case.ids):
        alone = case.run(case.drafter, prompts=[prompt], sampling=None, seed=[case.seed + row])
        alone.advance(None)
        if _figures(alone.result(), 0) != _figures(case.result(), row):
            raise AssertionError(
                f"row {row} takes other rounds alone than in a batch: "
                f"{_figures(alone.result(), 0)[1]} tokens against {_figures(case.result(), row)[1]}; what is drafted "
                "for a row must not depend on the other rows"
            )
    return "each row takes the same rounds alone as in a batch"


def _check_traces(case: _Case) -> str:
    before = len(case.drafter.traces)
    case.run(case.drafter, prompts=[case.ids[-1][::-1]], sampling=None).advance(None)
    if len(case.drafter.traces) > before:
        raise AssertionError(
            "other prompts of the same shape compile the program again: a drafter, and what bind makes of it, is equal "
            "to its like and hashed by value; make it a frozen dataclass of static numbers"
        )
    return "other prompts of the same shape run the same program"


def _figures(out: Generation, row: int) -> tuple[list[int], list[int]]:
    """New ids of a row, and how many tokens each of its rounds appended."""
    return out.tokens[row], out.rounds_of(row)


def _in_float32(model: Model) -> Model:
    def cast(leaf):
        return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return dataclasses.replace(model, params=jax.tree.map(cast, model.params))
