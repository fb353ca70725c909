"""Each acceptance rule, exactly: all possible drafts, and every cell between the thresholds of its coins.

A rule is proved in two steps. It is written again below, as a program of choices with known probabilities: all paths
through the program together give the distribution of the output, which must be the target's. And the rule of
`jspec.core.accept` must decide like that program for any coins: they are placed close to the thresholds, on both sides,
and the residual distribution of the last token is compared.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.analysis.contract import depths_of
from jspec.core import accept, grow, sampling
from jspec.core.types import DraftTree

# Programs of choices


class Scripted:
    """Makes the choices of a script, then the first possible ones; `others` are the scripts that diverge from it."""

    def __init__(self, script):
        self.script, self.made, self.weight, self.others = script, [], 1.0, []

    def pick(self, dist):
        """An index, with the probabilities of `distribution`."""
        possible = [i for i, mass in enumerate(dist) if mass > 0]
        if len(self.made) < len(self.script):
            choice = self.script[len(self.made)]
        else:
            choice = possible[0]
            self.others += [(*self.made, other) for other in possible[1:]]
        self.made.append(choice)
        self.weight *= dist[choice]
        return choice

    def cell(self, at, thresholds):
        """How many of the ascending thresholds the coin of node `at` reaches."""
        return self.pick(np.diff([0.0, *thresholds, 1.0]))


def outcomes(program):
    """Every result of a program of choices, with its probability."""
    scripts = [()]
    while scripts:
        choices = Scripted(scripts.pop())
        result = program(choices)
        scripts += choices.others
        yield choices.weight, result


class Probing:
    """Makes any choice that is not too unlikely, and records coins just inside the edges of the chosen cells."""

    def __init__(self, rng, coins):
        self.rng, self.coins = rng, coins

    def cell(self, at, thresholds):
        edges = np.array([0.0, *thresholds, 1.0])
        wide = np.flatnonzero(np.diff(edges) > 0.01)
        cell = int(self.rng.choice(wide))
        low, high = edges[cell], edges[cell + 1]
        self.coins[at] = self.rng.choice([low + (low > 0) * 2e-4, high - 2e-4, (low + high) / 2])
        return cell


# What is drafted


def dists(seed, kind, vocabulary):
    """p and q of each prefix; the kinds differ in where they are zero."""

    @functools.cache
    def both(prefix):
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        p, q = rng.dirichlet(np.ones(vocabulary), 2)
        if kind in ("zeros", "apart"):
            keep = rng.integers(0, 2, (2, vocabulary)).astype(float)
            keep[[0, 1], rng.integers(0, vocabulary, 2)] = 1
            if kind == "apart":
                keep[1] = 1 - keep[0] if keep[0].min() == 0 else keep[1]
            p, q = p * keep[0], q * keep[1]
        if kind == "points":
            p = np.eye(vocabulary)[rng.integers(vocabulary)] if rng.integers(2) else p
            q = np.eye(vocabulary)[rng.integers(vocabulary)] if rng.integers(2) else q
        q = p if kind == "equal" else q
        return p / p.sum(), q / q.sum()

    return (lambda prefix: both(prefix)[0]), (lambda prefix: both(prefix)[1])


KINDS = ("dense", "zeros", "apart", "points", "equal")


class Drafted:
    """A tree whose nodes are sampled only when a rule reads them: unread nodes sum to probability 1.

    tokens: the certain tokens of all nodes; None: sampled from q.
    """

    def __init__(self, choices, parents, p, q, tokens=None):
        self.choices, self.parents, self.dist_p, self.dist_q = choices, parents, p, q
        self.tokens = dict(enumerate([] if tokens is None else tokens))
        self.sampled = tokens is None
        self.prefix = {0: ()}

    def p(self, node):
        return self.dist_p(self.prefix[node])

    def q(self, node):
        return self.dist_q(self.prefix[node]) if self.sampled else None

    def children(self, node):
        found = [n for n in range(1, len(self.parents)) if self.parents[n] == node]
        if self.sampled:
            self.tokens.update(zip(found, sample_distinct(self.choices.pick, self.q(node), len(found)), strict=True))
        self.prefix.update({n: (*self.prefix[node], int(self.tokens[n])) for n in found})
        return found


def of_arrays(tokens, parents, p, q):
    """The same of the arrays of one sequence."""
    below = [[n for n in range(1, len(parents)) if parents[n] == node] for node in range(len(parents))]
    q = [None] * len(p) if q is None else q
    return SimpleNamespace(tokens=tokens, p=p.__getitem__, q=q.__getitem__, children=below.__getitem__)


def sample_distinct(pick, q, count):
    """Tokens sampled from q without replacement; once q is exhausted, the lowest remaining ids."""
    tokens = []
    for _ in range(count):
        left = without(q, tokens)
        free = [v for v in range(len(q)) if v not in tokens]
        tokens.append(pick(left / left.sum()) if left.sum() > 0 else free[0])
    return tokens


def without(dist, tokens):
    return np.where(np.isin(np.arange(len(dist)), tokens), 0.0, dist)


def normalized(dist, otherwise):
    return dist / dist.sum() if dist.sum() > 1e-12 else otherwise


# The rules, once more: (choices, tree) -> (accepted nodes, the distribution of the token after them)


def greedy(choices, drafted):
    return walk(drafted, lambda node: int(np.argmax(drafted.p(node))))


def coupled(choices, drafted):
    return walk(drafted, lambda node: choices.pick(drafted.p(node)))


def walk(drafted, choose):
    path = [0]
    while True:
        wanted = choose(path[-1])
        following = [n for n in drafted.children(path[-1]) if drafted.tokens[n] == wanted]
        if not following:
            return path[1:], np.eye(len(drafted.p(0)))[wanted]
        path.append(following[0])


def rejection(choices, drafted, residual=True):
    path = [0]
    while True:
        left, q, tried = drafted.p(path[-1]), drafted.q(path[-1]), []
        for child in drafted.children(path[-1]):
            token = drafted.tokens[child]
            dist = np.eye(len(left))[token] if q is None else normalized(without(q, tried), 0 * q)
            ratio = min(1.0, left[token] / dist[token]) if dist[token] > 0 else 0.0
            if choices.cell(child, [ratio]) == 0:
                path.append(child)
                break
            left = normalized(np.maximum(left - dist, 0), left) if residual else left
            tried.append(token)
        else:
            return path[1:], left


def block(choices, drafted):
    nodes = [0]
    while children := drafted.children(nodes[-1]):
        nodes += children
    p, q, weight = [drafted.p(n) for n in nodes], [drafted.q(n) for n in nodes], [1.0]
    for i in range(1, len(nodes)):
        token = drafted.tokens[nodes[i]]
        q[i - 1] = np.eye(len(p[0]))[token] if q[i - 1] is None else q[i - 1]
        weight.append(min(1.0, weight[-1] * p[i - 1][token] / q[i - 1][token]))
    for i in range(len(nodes) - 1, 0, -1):
        threshold = weight[i]
        if i < len(nodes) - 1:
            mass = np.maximum(weight[i] * p[i] - q[i], 0).sum()
            threshold = mass / (mass + 1 - weight[i]) if mass > 0 else 0.0
        if choices.cell(nodes[i], [threshold]) == 0:
            break
    else:
        i = 0
    last = i == len(nodes) - 1
    return nodes[1 : i + 1], p[i] if last else normalized(np.maximum(weight[i] * p[i] - q[i], 0), p[i])


def thresholds(single, total):
    def rule(choices, drafted):
        path = [0]
        while True:
            p, children, tried, edges = drafted.p(path[-1]), drafted.children(path[-1]), [], []
            for child in children:
                token = drafted.tokens[child]
                fresh = p[token] if token not in tried else 0.0
                tried.append(token)
                raised = 1.0 if fresh >= single else without(p, [v for v in range(len(p)) if v not in tried]).sum()
                below = edges[-1] if edges else 0.0
                edges.append(max(below, min(1.0, raised / total)) if fresh > 0 else below)
            cell = choices.cell(path[-1], edges)
            if cell == len(children):
                return path[1:], normalized(without(p, tried), p)
            path.append(children[cell])

    return rule


# The distribution of the output


def first_tokens(count, vocabulary, p):
    """The target's distribution of the first tokens."""
    dist = np.zeros((vocabulary,) * count)
    for sequence in np.ndindex(dist.shape):
        dist[sequence] = np.prod([p(sequence[:i])[token] for i, token in enumerate(sequence)])
    return dist


def output(rule, p, vocabulary, count, drafted):
    """The distribution of the first tokens if a rule decides about a round and the target samples the others."""
    dist, cache = np.zeros((vocabulary,) * count), {}

    def after(prefix):
        if prefix not in cache:
            cache[prefix] = first_tokens(count - len(prefix), vocabulary, lambda more: p((*prefix, *more)))
        return cache[prefix]

    def program(choices):
        candidates = drafted(choices)
        path, last = rule(choices, candidates)
        return tuple(int(candidates.tokens[node]) for node in path), last

    for weight, (tokens, last) in outcomes(program):
        if len(tokens) >= count:
            dist[tokens[:count]] += weight
            continue
        for token in np.flatnonzero(last):
            dist[(*tokens, token)] += weight * last[token] * after((*tokens, int(token)))
    return dist


def distance(rule, seed, kind, vocabulary, parents, certain=False):
    """Between the distributions of the first tokens with a rule and without: half of what they differ by in all."""
    p, q = dists(seed, kind, vocabulary)
    tokens = np.random.default_rng(seed).integers(0, vocabulary, len(parents)) if certain else None
    count = max(3, 1 + max(depths_of(parents)))
    got = output(rule, p, vocabulary, count, lambda choices: Drafted(choices, parents, p, q, tokens))
    assert abs(got.sum() - 1) < 1e-9
    return np.abs(got - first_tokens(count, vocabulary, p)).sum() / 2


def chain(depth):
    return (0, *range(depth))


SHAPES = {
    "chain of 1": (4, chain(1)),
    "chain of 2": (3, chain(2)),
    "chain of 3": (3, chain(3)),
    "siblings": (4, grow.sampled_topology(1, 3, 4)),
    "more siblings than tokens have mass": (4, grow.sampled_topology(1, 4, 5)),
    "tree of 2": (3, grow.sampled_topology(2, 2, 7)),
    "ragged tree of 2": (4, grow.sampled_topology(2, 3, 8)),
    "tree of 3": (2, grow.sampled_topology(3, 2, 10)),
    "ragged tree of 3": (3, grow.sampled_topology(3, 2, 7)),
}
RULES = {"coupled": coupled, "rejection": rejection, "block": block, "thresholds": thresholds(1, 1)}


@pytest.mark.slow(unless=("coupled-tree of 2-sampled", "rejection-tree of 2-sampled"))
@pytest.mark.parametrize("certain", (False, True), ids=("sampled", "certain"))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", RULES)
def test_the_first_tokens_have_the_distribution_of_the_target(name, shape, certain):
    if name == "block" and "chain" not in shape:
        return
    vocabulary, parents = SHAPES[shape]
    for kind in KINDS:
        for seed in range(6 if certain else 2):
            assert distance(RULES[name], seed, kind, vocabulary, parents, certain) < 1e-9, (kind, seed)


def test_greedy_acceptance_keeps_the_distribution_of_greedy_sequences():
    vocabulary, parents = SHAPES["ragged tree of 3"]
    for seed in range(9):
        p, q = dists(seed, "dense", vocabulary)

        def sharp(prefix, p=p):
            return np.eye(vocabulary)[np.argmax(p(prefix))]

        got = output(greedy, sharp, vocabulary, 4, lambda choices, p=sharp, q=q: Drafted(choices, parents, p, q))
        np.testing.assert_allclose(got, first_tokens(4, vocabulary, sharp), atol=1e-12)


def mean_length(rule, seed):
    p, q = dists(seed, "dense", 3)
    found = outcomes(lambda choices: rule(choices, Drafted(choices, chain(3), p, q)))
    return sum(weight * len(path) for weight, (path, _) in found)


def test_block_accepts_more_than_rejection():
    assert all(mean_length(block, seed) > mean_length(rejection, seed) + 1e-3 for seed in range(5))


@pytest.mark.parametrize(
    ("rule", "expected"),
    (
        (thresholds(0.3, 1), 0.1060),
        (thresholds(1, 0.5), 0.1059),
        (functools.partial(rejection, residual=False), 0.1036),
    ),
    ids=("single 0.3", "total 0.5", "no residual"),
)
def test_a_rule_that_is_not_lossless_is_detected(rule, expected):
    """The total variation distances of three tokens' distributions are those in the list: 0 would be lossless."""
    assert distance(rule, 0, "dense", 3, chain(3)) == pytest.approx(expected, abs=5e-4)


# The rules of jspec.accept decide as these programs do

ROWS, WORDS = 400, 4


@functools.cache
def compiled(rule):
    """A rule with its coins and the last token given; it returns the distribution of that token, too."""

    @jax.jit
    def run(draft_tree, logits, coins, final):
        seen = []

        def toss(key, position, count):
            assert coins.shape[1] == count
            return coins

        def sample(key, dist, position):
            seen.append(dist)
            return final

        rows = coins.shape[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(accept, "_coins", toss)
            patch.setattr(accept, "_sample", sample)
            keys = jax.random.split(jax.random.key(0), rows)
            out = rule(keys, draft_tree, logits, jnp.zeros(rows, jnp.int32))
        (dist,) = seen
        return out, dist

    return run


def random_rows(seed, parents, sampled):
    """Trees with p and q of all kinds in turn; tokens sampled like those of a drafter, or certain ones."""
    rng = np.random.default_rng(seed)
    nodes = parents.shape[1]
    p, q = np.zeros((2, ROWS, nodes, WORDS))
    tokens = rng.integers(0, WORDS, (ROWS, nodes))
    for b in range(ROWS):
        dist_p, dist_q = dists(seed, KINDS[b % len(KINDS)], WORDS)
        for node in range(nodes):
            p[b, node], q[b, node] = dist_p((b, node)), dist_q((b, node))
            children = np.flatnonzero((parents[b] == node) & (np.arange(nodes) > 0))
            if sampled:
                tokens[b, children] = sample_distinct(lambda q: rng.choice(WORDS, p=q), q[b, node], len(children))
    return tokens, p, q if sampled else None


def random_parents(seed, nodes):
    return np.random.default_rng(seed).integers(0, np.maximum(np.arange(nodes), 1), (ROWS, nodes))


def fixed(parents):
    return np.tile(np.array(parents), (ROWS, 1))


def assert_same_decisions(rule, program, parents, sampled, *, is_chain=False, width=None, depth=None, at_child=0):
    """at_child: which coin is a node's, counted from the node's own number."""
    tokens, p, q = random_rows(1, parents, sampled)
    rng = np.random.default_rng(2)
    coins = rng.random((ROWS, parents.shape[1]))
    expected = []
    for b in range(ROWS):
        candidates = of_arrays(tokens[b], parents[b], p[b], None if q is None else q[b])
        expected.append(program(Probing(rng, coins[b]), candidates))
    last = rng.integers(0, WORDS, ROWS).astype(np.int32)
    draft_tree = DraftTree(
        tokens.astype(np.int32),
        None if is_chain else parents.astype(np.int32),
        depth,
        width,
        None if q is None else q.astype(np.float32),
    )
    with np.errstate(divide="ignore"):
        logits = np.log(p).astype(np.float32)
    coins = coins[:, at_child:].astype(np.float32)
    out, dist = jax.tree.map(np.asarray, compiled(rule)(draft_tree, logits, coins, last))
    dist = dist / dist.sum(-1, keepdims=True)
    for b, (path, left) in enumerate(expected):
        assert out.length[b] == len(path) + 1, b
        taken = np.arange(out.length[b]) if is_chain else out.path[b, : out.length[b]]
        np.testing.assert_array_equal(taken, [0, *path])
        np.testing.assert_array_equal(out.tokens[b, : len(path) + 1], [*tokens[b, path], last[b]])
        np.testing.assert_allclose(dist[b], left, atol=1e-4, err_msg=str(b))
    lengths = np.bincount(out.length)
    assert (lengths[1:4] > 4).all(), "hardly any sequence accepts, or rejects: the case shows little"


@pytest.mark.slow(unless=("rejection-2", "block-2"))
@pytest.mark.parametrize("sampled", (True, False), ids=("sampled", "certain"))
@pytest.mark.parametrize("depth", (1, 2, 4))
@pytest.mark.parametrize("name", ("rejection", "block"))
def test_on_chains_the_code_decides_like_the_program(name, depth, sampled):
    rule, program = accept.RULES[name], RULES[name]
    assert_same_decisions(rule, program, fixed(chain(depth)), sampled, is_chain=True, at_child=1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "tree" in shape or "siblings" in shape])
def test_in_trees_of_sampled_drafts_rejection_decides_like_the_program(shape):
    _, parents = SHAPES[shape]
    depth, width = max(depths_of(parents)), max(parents.count(node) - (node == 0) for node in parents)
    assert_same_decisions(accept.rejection, rejection, fixed(parents), True, width=width, depth=depth)


@pytest.mark.slow(unless=("rejection-6", "single 0.3-2"))
@pytest.mark.parametrize("nodes", (2, 6))
@pytest.mark.parametrize("name", ("rejection", "single 0.3", "total 0.5", "lossless thresholds"))
def test_in_any_tree_of_certain_tokens_the_code_decides_like_the_program(name, nodes):
    numbers = {"single 0.3": (0.3, 1.0), "total 0.5": (1.0, 0.5), "lossless thresholds": (1.0, 1.0)}.get(name)
    rule = accept.LossyThresholds(*numbers) if numbers else accept.rejection
    program = thresholds(*numbers) if numbers else rejection
    assert_same_decisions(rule, program, random_parents(nodes, nodes), False)


def test_on_a_chain_thresholds_decide_like_the_program():
    parents = fixed(chain(3))
    assert_same_decisions(accept.LossyThresholds(0.3, 0.5), thresholds(0.3, 0.5), parents, False, is_chain=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_chain", (False, True), ids=("tree", "chain"))
def test_coupled_acceptance_takes_each_choice_from_the_noise_of_its_position(monkeypatch, is_chain):
    """Other tests check which noise belongs to which position, and that it does not depend on the drafts."""
    nodes = 5
    parents = fixed(chain(nodes - 1)) if is_chain else random_parents(3, nodes)
    tokens, p, _ = random_rows(3, parents, False)
    noise = np.random.default_rng(0).gumbel(size=(ROWS, nodes, WORDS)).astype(np.float32)
    asked = []

    def gumbel(key, name, position, count, vocab_size):
        asked.append((name, count, vocab_size))
        return noise[:, :count]

    monkeypatch.setattr(sampling, "gumbel", gumbel)
    with np.errstate(divide="ignore"):
        logits = np.log(p).astype(np.float32)
    draft_tree = DraftTree(jnp.asarray(tokens, jnp.int32), None if is_chain else jnp.asarray(parents, jnp.int32))
    keys = jax.random.split(jax.random.key(0), ROWS)
    out = accept.coupled(keys, draft_tree, jnp.asarray(logits), jnp.zeros(ROWS, jnp.int32))
    assert asked == [(sampling.NOISE, nodes, WORDS)]
    for b in range(ROWS):
        depth = depths_of(parents[b])

        def choose(node, b=b, depth=depth):
            return int(np.argmax(logits[b, node] + noise[b, depth[node]]))

        path, last = walk(of_arrays(tokens[b], parents[b], p[b], None), choose)
        assert out.length[b] == len(path) + 1
        np.testing.assert_array_equal(out.tokens[b, : len(path) + 1], [*tokens[b, path], np.argmax(last)])
    assert len(set(map(int, out.length))) > 2
