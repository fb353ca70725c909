"""`check_rule`: tests an acceptance rule on small random distributions."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from tqdm.auto import tqdm

from jspec.analysis.contract import depths_of, hidden, path_to, report
from jspec.core.accept import NEEDS, RULES
from jspec.core.checks import check_flag, check_int, shorten
from jspec.core.types import Accept, Acceptance, DraftTree

VOCABULARY, ROWS, SIGMAS = 4, 1 << 16, 6.0
"""Tokens; sequences of a case; largest difference of a text's frequency from its probability, in standard errors."""
SHAPES: dict[str, list[int] | None] = {
    "one draft": None,
    "a chain": None,
    "a tree": [0, 0, 0, 1, 1, 3],
    "siblings alone": [0, 0, 0, 0],
}
"""The parents of the nodes; None: a chain, of one draft or of three."""
CHAIN_DEPTH = {"one draft": 1, "a chain": 3}
KINDS = {"any": "any p and q", "zeros": "zeros in p and q", "equal": "p equal to q", "points": "one token in each p"}
"""Pairs of distributions."""


@dataclasses.dataclass(frozen=True, repr=False)
class RuleReport:
    """The result of `check_rule` for a lossless rule.

    rule: its name or repr.
    tokens_per_round: mean number of tokens appended per round, by tree shape and kind of drafts.
    """

    rule: str
    tokens_per_round: dict[str, float]

    def __repr__(self) -> str:
        cases = [f"{case}: {mean:.2f} tokens per round" for case, mean in self.tokens_per_round.items()]
        return report(f"{self.rule} is lossless, as far as {ROWS:,} rounds of each case can tell", cases)


@dataclasses.dataclass(frozen=True)
class _Case:
    """A tree shape and a pair of distributions after each prefix.

    parents, depths: of all nodes.
    p, q: the distributions after all texts of each length, in the order of `_index`.
    sampled: whether drafts are sampled from q, which is in the tree; otherwise they are certain.
    """

    shape: str
    kind: str
    parents: list[int]
    depths: list[int]
    chain: bool
    sampled: bool
    p: list[Float[np.ndarray, "texts V"]]
    q: list[Float[np.ndarray, "texts V"]]

    @property
    def name(self) -> str:
        return f"{self.shape}, {'sampled' if self.sampled else 'certain'} drafts"

    @property
    def title(self) -> str:
        """The name, and the kind of distributions."""
        return f"{self.name}, {KINDS[self.kind]}"

    @property
    def depth(self) -> int:
        return max(self.depths)

    @property
    def width(self) -> int:
        return max(self.parents[1:].count(node) for node in range(len(self.parents)))


def check_rule(
    rule: str | Accept, *, trees: bool = True, sampled: bool | None = None, seed: int = 0, progress: bool | None = None
) -> RuleReport:
    """Test that the tokens of an acceptance rule have the target's distribution for any draft.

    With a vocabulary of four tokens, the distributions after all prefixes are known, and so is the probability of each
    text. A case runs 65,536 rounds, and exact probabilities complete the text after a round. No text may be further
    from its probability than six standard errors. Drafts are certain tokens, or sampled from another distribution, in
    chains and trees. Also tested: accepted nodes are a path of the tree with its tokens, lengths are in range, a
    sequence depends on its own key only, and the next round, at a later position, is independent.

    Args:
      rule: a function as `jspec.core.types.Accept`, or a name as in `jspec.generate`.
      trees: whether the rule takes trees. A rule by name defines this and `sampled` itself.
      sampled: True: only sampled drafts; False: only certain ones; None: both.
      seed: seed of the distributions and of all draws.
      progress: whether to show a progress bar; None: in a terminal.

    Raises:
      AssertionError: the rule is not lossless; the message states the case and what is wrong.
      ValueError, TypeError: an invalid argument.
    """
    disable, means = hidden(progress), collections.defaultdict(list)
    name = rule if isinstance(rule, str) else getattr(rule, "__name__", repr(rule))
    with tqdm(list(cases(rule, trees=trees, sampled=sampled, seed=seed)), unit="case", disable=disable) as bar:
        for case, run in bar:
            try:
                means[case.name].append(run())
            except AssertionError as error:
                raise AssertionError(f"{name}: {case.title}: {error}") from None
            except Exception as error:
                error.add_note(f"raised in check_rule({name}): {case.title}")
                raise
    return RuleReport(name, {case: sum(values) / len(values) for case, values in means.items()})


def cases(
    rule: object, *, trees: object = True, sampled: object = None, seed: object = 0
) -> Iterator[tuple[_Case, Callable[[], float]]]:
    """The cases of `check_rule`, each with a function to run it: it returns the mean number of appended tokens.

    Raises:
      ValueError, TypeError: an invalid argument.
    """
    allowed, seed = check_flag("trees", trees), check_int("seed", seed, least=0, most=2**31 - 1)
    kinds = (True, False) if sampled is None else (check_flag("sampled", sampled),)
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"rule={rule!r}: must be one of {', '.join(RULES)}, or a function")
        allowed, rule = allowed and not (rule in NEEDS and NEEDS[rule].chains), RULES[rule]
    if not callable(rule):
        raise TypeError(f"rule={shorten(rule)}: must be a function, or one of {', '.join(RULES)}")
    run: Callable[..., Any] = jax.jit(rule)
    return ((case, partial(_check, run, case, seed)) for case in _cases(allowed, kinds, seed))


def _cases(trees: bool, sampled: Sequence[bool], seed: int) -> Iterator[_Case]:
    for number, (shape, parents) in enumerate(SHAPES.items()):
        if parents is not None and not trees:
            continue
        chain = parents is None
        parents = [0, *range(CHAIN_DEPTH[shape])] if parents is None else parents
        depths = depths_of(parents)
        # Cases of one program follow each other.
        for samples, (index, kind) in itertools.product(sampled, enumerate(KINDS)):
            rng = np.random.default_rng([seed, number, index])
            pairs = [[_pair(rng, kind) for _ in range(VOCABULARY**size)] for size in range(max(depths) + 1)]
            p, q = ([np.array([pair[i] for pair in of_size]) for of_size in pairs] for i in (0, 1))
            yield _Case(shape, kind, parents, depths, chain, samples, p, q)


def _pair(rng: np.random.Generator, kind: str) -> tuple[np.ndarray, np.ndarray]:
    p, q = rng.dirichlet(np.ones(VOCABULARY), 2)
    if kind == "zeros":
        keep = rng.random((2, VOCABULARY)) < 0.6
        keep[[0, 1], rng.integers(0, VOCABULARY, 2)] = True
        p, q = p * keep[0], q * keep[1]
    elif kind == "points":
        p = np.eye(VOCABULARY)[rng.integers(VOCABULARY)]
    elif kind == "equal":
        q = p
    return p / p.sum(), q / q.sum()


def _check(run: Callable[..., Any], case: _Case, seed: int) -> float:
    """Run a rule on a case; returns the mean number of appended tokens."""
    tokens = _draft(case, np.random.default_rng([seed, 1]))
    arguments = _arguments(case, tokens, seed)
    decided = run(*arguments)
    if not isinstance(decided, Acceptance):
        raise AssertionError(f"returns a {type(decided).__name__}: must be a jspec.core.types.Acceptance")
    path, following, length = _check_form(case, tokens, decided)
    _check_alone(run, arguments, decided)
    _check_texts(case, path, following, length)
    _check_next(run, case, arguments, following, length)
    return float(length.mean())


def _draft(case: _Case, rng: np.random.Generator) -> Int[np.ndarray, "B N"]:
    """Draft the tokens of all nodes; siblings are sampled from q without replacement, in order."""
    count = ROWS if case.sampled else 1
    tokens = np.zeros((count, len(case.parents)), np.int32)
    for parent in range(len(case.parents)):
        children = [node for node in range(1, len(case.parents)) if case.parents[node] == parent]
        if not children:
            continue
        # The largest values of log q plus Gumbel noise are a sample without replacement; tokens without mass come last.
        q = _after(case, case.q, tokens, parent)
        with np.errstate(divide="ignore"):
            score = np.log(q) + rng.gumbel(size=q.shape)
        score = np.where(q > 0, score, -1e9 - np.arange(VOCABULARY))
        tokens[:, children] = np.argsort(-score, axis=1)[:, : len(children)]
    return np.broadcast_to(tokens, (ROWS, len(case.parents)))


def _index(tokens: Int[np.ndarray, "B size"]) -> Int[np.ndarray, " B"]:
    """The index of each text among all texts of its length."""
    return tokens @ VOCABULARY ** np.arange(tokens.shape[1], dtype=np.int64)


def _after(case: _Case, table: list[np.ndarray], tokens: np.ndarray, node: int) -> Float[np.ndarray, "B V"]:
    """The distribution after a node, for each sequence."""
    return table[case.depths[node]][_index(tokens[:, path_to(case.parents, node)])]


def _arguments(case: _Case, tokens: np.ndarray, seed: int) -> tuple[Any, ...]:
    nodes = range(len(case.parents))
    p = np.stack([_after(case, case.p, tokens, node) for node in nodes], axis=1)
    q = np.stack([_after(case, case.q, tokens, node) for node in nodes], axis=1).astype(np.float32)
    with np.errstate(divide="ignore"):
        logits = np.log(p).astype(np.float32)
    parents = None if case.chain else np.broadcast_to(np.array(case.parents, np.int32), tokens.shape)
    draft_tree = DraftTree(
        tokens=jnp.asarray(tokens),
        parents=None if parents is None else jnp.asarray(parents),
        depth=None if case.chain else case.depth,
        width=None if case.chain else case.width,
        probs=jnp.asarray(q) if case.sampled else None,
    )
    keys = jax.random.split(jax.random.key(seed), ROWS)
    return keys, draft_tree, jnp.asarray(logits), jnp.arange(ROWS, dtype=jnp.int32) % 7 + 1


def _check_form(
    case: _Case, tokens: np.ndarray, decided: Acceptance
) -> tuple[Int[np.ndarray, "B A"], Int[np.ndarray, "B A"], Int[np.ndarray, " B"]]:
    """Check shapes, lengths and paths; returns path, tokens and lengths."""
    path, following, length = (
        None if x is None else np.asarray(x)
        for x in jax.tree.leaves((decided.path, decided.tokens, decided.length), is_leaf=lambda x: x is None)
    )
    # Shapes and the range of lengths.
    assert following is not None and length is not None
    columns = case.depth + 1
    if length.shape != (ROWS,) or length.dtype.kind != "i":
        raise AssertionError(f"length is {length.dtype}{list(length.shape)}: must be int32[{ROWS}]")
    if following.ndim != 2 or len(following) != ROWS or following.shape[1] < columns or following.dtype.kind != "i":
        raise AssertionError(f"tokens are {following.dtype}{list(following.shape)}: must be int32[{ROWS}, {columns}]")
    if length.min() < 1 or length.max() > columns:
        raise AssertionError(f"length is from {length.min()} to {length.max()}: must be from 1 to {columns}")
    # The path: nodes of the tree, each after its parent.
    if path is None:
        if not case.chain:
            raise AssertionError("path is None for a tree: must be the accepted nodes")
        path = np.broadcast_to(np.arange(columns), (ROWS, columns))
    column = np.arange(columns)[None]
    accepted = column < length[:, None]
    if path.shape[0] != ROWS or path.shape[1] < columns or not np.isin(path[:, :columns], range(tokens.shape[1])).all():
        raise AssertionError(f"path must be nodes of the tree, int32[{ROWS}, {columns}]")
    path, following = path[:, :columns], following[:, :columns]
    above = np.array(case.parents)[path[:, 1:]]
    if (path[:, 0] != 0).any() or ((above != path[:, :-1]) | (path[:, 1:] == 0))[accepted[:, 1:]].any():
        raise AssertionError("path is no path of the tree from its root")
    # The tokens: the accepted drafts, then any token of the vocabulary.
    drafted = np.take_along_axis(tokens, path, axis=1)[:, 1:]
    if (drafted != following[:, :-1])[accepted[:, 1:]].any():
        raise AssertionError("tokens before the last are not those of the accepted nodes")
    if not ((following >= 0) & (following < VOCABULARY))[accepted].all():
        raise AssertionError("tokens are outside of the vocabulary")
    return path, following, length


def _check_alone(run: Callable[..., Any], arguments: tuple[Any, ...], decided: Acceptance) -> None:
    """Check that a sequence gets the same result in another batch."""
    few = jax.tree.map(lambda x: x[5:8], arguments)
    again = run(*few)
    for name in ("length", "tokens", "path"):
        one, other = getattr(decided, name), getattr(again, name)
        if one is None:
            continue
        valid = np.arange(1 if name == "length" else one.shape[1])[None] < np.asarray(decided.length)[5:8, None]
        if (np.asarray(one)[5:8].reshape(3, -1) != np.asarray(other).reshape(3, -1))[valid].any():
            raise AssertionError(f"{name} of a sequence depends on the others of its batch")


def _check_texts(case: _Case, path: np.ndarray, following: np.ndarray, length: np.ndarray) -> None:
    """Compare the frequencies of all texts of up to depth + 1 tokens with their probabilities."""
    texts = (itertools.product(range(VOCABULARY), repeat=size) for size in range(1, case.depth + 2))
    for text in itertools.chain.from_iterable(texts):
        size, appended = len(text), np.minimum(length, len(text))
        befores = [_index(np.array([text[:i]], np.int64)) for i in range(size)]
        steps = np.array([case.p[i][befores[i][0], token] for i, token in enumerate(text)])
        # The target's distribution completes a text after the tokens of the round.
        rest = np.append(np.cumprod(steps[::-1])[::-1], 1.0)
        begins = (following[:, :size] == np.array(text)) | (np.arange(size)[None] >= appended[:, None])
        probability = float(np.prod(steps))
        frequency = float(np.where(begins.all(1), rest[appended], 0.0).mean())
        # Values between 0 and 1 have at most the variance of a coin.
        if abs(frequency - probability) > SIGMAS * np.sqrt(probability * (1 - probability) / len(length)) + 1e-6:
            raise AssertionError(
                f"the tokens {', '.join(map(str, text))} have the probability {probability:.4f}, but are generated "
                f"with {frequency:.4f}"
            )


def _check_next(
    run: Callable[..., Any], case: _Case, arguments: tuple[Any, ...], following: np.ndarray, length: np.ndarray
) -> None:
    """Check that another round of each sequence, with the same key at a later position, is independent of the first."""
    keys, draft_tree, logits, position = arguments
    # Drafts of another sequence: the same ones would relate the rounds of a lossless rule.
    draft_tree, logits = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), (draft_tree, logits))
    later = np.asarray(run(keys, draft_tree, logits, position + length).tokens)[:, 0]
    p = case.p[0][0]
    for first, second in itertools.product(range(VOCABULARY), repeat=2):
        probability = float(p[first] * p[second])
        frequency = float(((following[:, 0] == first) & (later == second)).mean())
        if abs(frequency - probability) > SIGMAS * np.sqrt(probability * (1 - probability) / ROWS) + 1e-6:
            raise AssertionError(
                f"two rounds begin with the tokens {first} and {second} with the probability {probability:.4f}, but "
                f"generate them with {frequency:.4f}: draw random numbers from key and position"
            )
