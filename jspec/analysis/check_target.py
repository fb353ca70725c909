"""`check_target`: tests a target against its own logits of whole texts."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree

from jspec.analysis import contract, poison
from jspec.analysis.contract import Case, Cases, Outcome
from jspec.analysis.target_case import CAPACITY, CHUNK, DEPTH, LENGTHS, NODES, PAGE_SIZE, WIDTH, TargetCase
from jspec.core import accept, returned
from jspec.core.checks import check_int, check_number
from jspec.core.loop import run_rounds
from jspec.core.method import Method
from jspec.core.prefill import prefill
from jspec.core.types import TARGET_PARTS, DraftTree, ForwardOutput
from jspec.drafters import Ngram
from jspec.generation.run import check_model
from jspec.loading.model import Model, refuse_split


@dataclasses.dataclass(frozen=True, repr=False)
class TargetReport:
    """The result of `check_target` for a target that satisfies the contract.

    target: the name of its class.
    difference: the largest difference of logits, relative to 1 plus the largest logit.
    checks: the passed checks.
    """

    target: str
    difference: float
    checks: tuple[str, ...]

    def __repr__(self) -> str:
        summary = f"logits differ by at most {self.difference:.1e} of the largest one"
        return contract.report(f"{self.target} satisfies the contract", self.checks, summary)


def check_target(model: Model, *, seed: int = 0, tolerance: float = 1e-4, progress: bool | None = None) -> TargetReport:
    """Test a target against the contract of `jspec.core.types.Target`, in float32.

    The reference is the logits of whole texts, read at once without a cache. All other ways to read them must give the
    same: token by token, in chunks, and in trees with a committed path, with sequences at different positions. Also
    tested: the order of the batch, old contents of a cache, page sizes, selected nodes and hidden states. The reference
    itself is not tested: compare it with another implementation.

    Args:
      model: from `jspec.from_target`, with a context of at least 20 tokens; a small one is enough. Its weights are cast
        to float32.
      seed: seed of the texts and trees.
      tolerance: largest difference of logits, relative to 1 plus the largest one.
      progress: whether to print each passed check below a bar; None: in a terminal.

    Raises:
      AssertionError: the target violates the contract; the message states what differs, where and by how much.
      ValueError, TypeError: an invalid argument.
    """
    check_model(model)
    refuse_split(model, "check_target")
    seed = check_int("seed", seed, least=0, most=2**31 - 1)
    tolerance = check_number("tolerance", tolerance, above=0, most=1)
    disable = contract.hidden(progress)
    name, case = type(model.target).__name__, TargetCase(contract.in_float32(model), seed, tolerance)
    passed = contract.run_cases("check_target", name, cases(case), disable)
    return TargetReport(name, max(case.differences), passed)


# The interface


def _check_interface(case: TargetCase) -> None:
    target = case.target
    if missing := [name for name in TARGET_PARTS if not hasattr(target, name)]:
        raise AssertionError(f"it is no target: it has no {', '.join(missing)}")
    for name in TARGET_PARTS[:4]:
        value, least = getattr(target, name), 1 if name in ("vocab_size", "max_length") else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise AssertionError(f"{name}={value!r}: must be an int of at least {least}")
    if target.max_length < WIDTH:
        raise ValueError(f"max_length={target.max_length}: must be at least {WIDTH} to be checked")
    contract.check_hashed(target, "a target")


def _check_shapes(case: TargetCase) -> None:
    batch, target = len(LENGTHS), case.target
    count = jax.ShapeDtypeStruct((batch,), jnp.int32)
    tokens: Any = jax.ShapeDtypeStruct((batch, CHUNK), jnp.int32)
    cache = jax.eval_shape(case.empty)
    if not hasattr(cache, "commit"):
        raise AssertionError(f"init_cache returns a {type(cache).__name__}: must have the method commit")
    for start in (None, count):
        for drafted in (DraftTree(tokens), DraftTree(tokens, tokens, DEPTH)):
            forward = partial(_forward_alone, target)
            out = jax.eval_shape(forward, case.model.params.target, drafted, cache, start)
            _check_output(out, (batch, CHUNK, target.vocab_size))
            path = None if drafted.parents is None else tokens
            after = jax.eval_shape(lambda cache, *args: cache.commit(*args), cache, out.rows, count, path, count)
            contract.require(returned.check_same_form, "commit", cache, after)


def _forward_alone(target: Any, params: PyTree, drafted: DraftTree, cache: Any, start: Any) -> ForwardOutput:
    """Run a forward, and check that it leaves the arrays of the cache alone."""
    before = jax.tree.leaves(cache)
    out = target.forward(params, drafted, cache, start)
    after = jax.tree.leaves(cache)
    if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
        raise AssertionError("forward changes the cache: only commit may, and returns another one")
    return out


def _check_output(out: object, shape: tuple[int, ...]) -> None:
    if not isinstance(out, ForwardOutput):
        raise AssertionError(f"forward returns a {type(out).__name__}: must be a jspec.core.types.ForwardOutput")
    if out.logits.shape != shape or out.logits.dtype != jnp.float32:
        raise AssertionError(
            f"the logits of {shape[1]} tokens of {shape[0]} sequences are {returned.describe(out.logits)}: must be "
            f"float32{list(shape)}, for vocab_size={shape[2]}"
        )
    if out.hidden is not None:
        raise AssertionError(f"hidden is {returned.describe(out.hidden)} without capture_layers: must be None")


# Whole texts


def _check_finite(case: TargetCase) -> None:
    wrong = ~(case.whole < np.inf)
    if wrong.any():
        sequence, position, token = np.argwhere(wrong)[0]
        value = case.whole[sequence, position, token]
        raise AssertionError(
            f"the logit of token {token} after position {position} of sequence {sequence} is {value}: must be a number "
            "or -inf; weights may be wrong"
        )
    if (case.whole == case.whole[:1, :1]).all():
        raise AssertionError("the logits of all tokens are equal: they do not depend on the text")


def _check_causal(case: TargetCase) -> None:
    other = case.random(case.text.shape, 1)
    for position in range(1, WIDTH, 3):
        changed = np.where(np.arange(WIDTH) < position, case.text, other)
        got = case.read_whole(changed)[:, :position]
        case.compare(got, case.whole[:, :position], f"with other tokens from position {position} on")


def _check_batch(case: TargetCase) -> None:
    others, moved, alone = case.random(case.text.shape, 2), [], []
    for sequence in range(len(LENGTHS)):
        text, place = others.copy(), len(LENGTHS) - 1 - sequence
        text[place] = case.text[sequence]
        moved.append(case.read_whole(text)[place])
        alone.append(case.read_whole(case.text[[sequence]])[0])
    case.compare(np.stack(moved), case.whole, "among other sequences in another order")
    case.compare(np.stack(alone), case.whole, "in a batch of its own")


# Texts in pieces


def _step(case: TargetCase, cache: Any, steps: int, how: str, text: np.ndarray | None = None) -> Any:
    """Read texts token by token, some sequences more slowly than others; returns the cache.

    text: None: the case's text, and its logits are compared.
    """
    read, start = case.text if text is None else text, np.zeros(len(LENGTHS), np.int32)
    row, lengths = np.arange(len(LENGTHS)), np.array(LENGTHS)
    for step in range(steps):
        # Sequence i moves in every (i + 1)-th step.
        at = np.minimum(start, lengths - 1)
        moves = (start < lengths) & (step % (row + 1) == 0)
        out, cache = case.read(read[row, at][:, None], cache, at, moves)
        if text is None:
            case.compare(out.logits, case.whole_at(at[:, None]), how, first=at, count=start < lengths)
        start = start + moves
    return cache


def _prefill(case: TargetCase, size: int, cache: Any, how: str, lengths: Any = LENGTHS) -> Any:
    """Read texts in chunks of `size` tokens, and compare the logits; returns the cache. how: for messages."""
    lengths = np.array(lengths)
    for first in range(0, int(lengths.max()), size):
        begin = np.minimum(first, lengths)
        count = np.minimum(lengths - begin, size)
        at = np.minimum(begin[:, None] + np.arange(size), WIDTH - 1)
        tokens = np.take_along_axis(case.text, at, axis=1)
        out, cache = case.read(tokens, cache, begin if first else None, count)
        case.compare(out.logits, case.whole_at(at), how, first=begin, count=count)
    return cache


def _check_steps(case: TargetCase) -> None:
    _step(case, case.empty(), WIDTH + 4, "read token by token")


def _check_chunks(case: TargetCase) -> None:
    for size in (CHUNK, WIDTH):
        before = np.array(LENGTHS) - 1
        cache = _prefill(case, size, case.empty(), f"read in chunks of {size}", before)
        last = np.take_along_axis(case.text, before[:, None], axis=1)
        out, _ = case.read(last, cache, before, before * 0)
        how = f"after the text before it was read in chunks of {size}"
        case.compare(out.logits, case.whole_at(before[:, None]), how, first=before)


def _check_trees(case: TargetCase) -> None:
    start, rng = np.array([5, 1, 3]), np.random.default_rng([case.seed, 3])
    cache = _prefill(case, CHUNK, case.empty(), f"read in chunks of {CHUNK}", start)
    for number in range(3):
        tokens, parents, path, count = _draft(case, start, rng)
        # In each round but the first, one sequence has finished: it commits nothing.
        count[np.arange(len(count)) == number - 1] = 0
        options = {"parents": parents, "depth": DEPTH, "path": path}
        out, cache = case.read(tokens, cache, start, count, **options)
        _compare_nodes(case, out.logits, tokens, parents, start, f"round {number} of trees")
        start = start + count


def _draft(case: TargetCase, start: Int[np.ndarray, " B"], rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Make random trees with a path that continues the texts; returns tokens, parents, path and nodes to commit."""
    batch, rows = len(start), np.arange(len(start))
    tokens = case.random((batch, NODES), 4, int(start.sum()))
    parents, path = np.zeros((batch, NODES), np.int32), np.zeros((batch, DEPTH + 1), np.int32)
    count = rng.integers(2, DEPTH + 2, batch).astype(np.int32)
    tokens[:, 0] = case.text[rows, start]
    for i in rows:
        # Even nodes are on the path; the others have a random earlier node as parent.
        depths = [0] * NODES
        for node in range(1, NODES):
            on_path = node % 2 == 0 and node // 2 <= DEPTH
            allowed = [n for n in range(node) if depths[n] < DEPTH]
            parents[i, node] = node - 2 if on_path else rng.choice(allowed)
            depths[node] = depths[parents[i, node]] + 1
            if on_path:
                tokens[i, node] = case.text[i, start[i] + node // 2]
        path[i] = np.minimum(np.arange(DEPTH + 1), count[i] - 1) * 2
    return tokens, parents, path, count


def _compare_nodes(
    case: TargetCase, logits: Any, tokens: np.ndarray, parents: np.ndarray, start: np.ndarray, where: str
) -> None:
    """Compare each node of a tree with the text that ends with the node's path, read at once."""
    for node in range(NODES):
        text, at = case.text.copy(), start.copy()
        for i in range(len(start)):
            path = [0, *contract.path_to(parents[i], node)]
            text[i, start[i] : start[i] + len(path)] = tokens[i, path]
            at[i] += len(path) - 1
        expected = np.take_along_axis(case.read_whole(text), at[:, None, None], axis=1)
        how = f"{where}, parents {parents.tolist()}"
        case.compare(np.asarray(logits)[:, [node]], expected, how, first=at, node=f"node {node} at ")


# Old contents of a cache


def _check_uncommitted(case: TargetCase) -> None:
    steps = WIDTH // 2
    old = case.random(case.text.shape, 5)
    _, used = case.read(old, case.empty(), None, np.full(len(LENGTHS), WIDTH))
    _step(case, used, steps, "in a cache that held another text before (nothing is committed at start 0)")
    how = "in a cache whose uncommitted rows are NaN (select with where; NaN times 0 is NaN)"
    _step(case, poison.fill(case.empty()), steps, how)


def _check_pages(case: TargetCase) -> None:
    for size in (1, 16):
        _prefill(case, CHUNK, case.empty(size), f"read in chunks of {CHUNK} with page_size={size}")


# Options of a forward


def _check_select(case: TargetCase) -> None:
    nodes = np.array([CHUNK - 1, 0, 2])
    tokens, none = case.text[:, :CHUNK], np.zeros(len(LENGTHS), np.int32)
    for start in (None, none):
        out, _ = case.read(tokens, case.empty(), start, none, select=jnp.asarray(nodes, jnp.int32))
        if out.logits.shape[:2] != (len(LENGTHS), 1):
            raise AssertionError(
                f"with select the logits are {returned.describe(out.logits)}: must be those of one node, "
                f"[{len(LENGTHS)}, 1, {case.target.vocab_size}]"
            )
        case.compare(out.logits, case.whole_at(nodes[:, None]), "selected", first=nodes)


def _check_hidden(case: TargetCase) -> Outcome | None:
    layers = (0, case.target.num_layers) if case.target.num_layers else (0,)
    none = np.zeros(len(LENGTHS), np.int32)
    try:
        whole, _ = case.read(case.text, case.empty(), None, none, capture=layers)
    except ValueError:
        return Outcome("passed", 0, "it has no hidden states to capture: drafters that read them refuse it")
    shape = (len(LENGTHS), WIDTH, len(layers) * case.target.hidden_size)
    if whole.hidden is None or whole.hidden.shape != shape:
        actual = "None" if whole.hidden is None else returned.describe(whole.hidden)
        raise AssertionError(
            f"with capture_layers={layers} hidden is {actual}: must have the shape {list(shape)}; a target without "
            "hidden states raises ValueError"
        )
    start = np.array([5, 1, 3])
    cache = _prefill(case, CHUNK, case.empty(), f"read in chunks of {CHUNK}", start)
    at = start[:, None] + np.arange(CHUNK)
    out, _ = case.read(np.take_along_axis(case.text, at, axis=1), cache, start, none, capture=layers)
    assert out.hidden is not None
    expected = np.take_along_axis(np.asarray(whole.hidden), at[:, :, None], axis=1)
    case.compare(out.hidden, expected, f"read in chunks of {CHUNK}", first=start, what=f"hidden states {layers}")
    return None


def _check_round(case: TargetCase) -> None:
    drafter, batch = Ngram(), len(LENGTHS)
    method = Method(case.target, drafter, accept.greedy)
    read = partial(prefill, method=method, capacity=CAPACITY, page_size=PAGE_SIZE)
    prompts = jax.eval_shape(partial(contract.abstract_prompts, batch, WIDTH))
    s = jax.eval_shape(read, case.model.params, prompts)
    until = jax.ShapeDtypeStruct((), jnp.int32)
    jax.eval_shape(partial(run_rounds, method=method), case.model.params, s, until)


_CHECKS = {
    "it has the attributes and methods of a target, and is hashed by value": _check_interface,
    "forward and commit return the right shapes and dtypes, and forward leaves the cache alone": _check_shapes,
    "logits are finite or -inf, and depend on the text": _check_finite,
    "logits do not depend on later tokens": _check_causal,
    "a sequence does not depend on the others of its batch": _check_batch,
    "token by token, with sequences at different positions": _check_steps,
    "in chunks, with sequences that end in earlier ones": _check_chunks,
    "in trees, of which a path is committed": _check_trees,
    "old contents of a cache do not matter, even NaN": _check_uncommitted,
    "page sizes do not matter": _check_pages,
    "a selected node has its logits": _check_select,
    "hidden states are those of the text read at once": _check_hidden,
    "the loop takes it": _check_round,
}


def cases(case: TargetCase) -> Cases:
    """The cases of `check_target`, also of `verify`."""
    for words, check in _CHECKS.items():
        yield Case(words, partial(check, case))
