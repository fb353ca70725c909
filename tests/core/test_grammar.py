"""Grammars in the loop: what is generated is in the grammar, and is what plain constrained decoding generates.

The oracles walk the bytes of tokens in Python and read the target over whole texts.
"""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from grammars import EOS, SIZE, TOKENS, compiled, spelled, walk
from planted import REPEATED, path_to, weights_of

from jspec.core import accept, stopping, tree
from jspec.core import grammar as grammars
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.core.prefill import jitted_prefill
from jspec.core.propose import propose
from jspec.core.types import DraftTree, RowSampling
from jspec.drafters import Block, Ngram, Plain, Standalone
from jspec.text.grammar import Grammar
from jspec.text.grammar import expression as e
from jspec.text.tool_calls import FORMATS

SCHEMA = {
    "properties": {"name": {"type": "string", "maxLength": 4}, "kind": {"enum": ["ab", "xyz"]}},
    "required": ["name", "kind"],
    "type": "object",
}
GRAMMARS = [Grammar.json_schema(SCHEMA), None, Grammar.regex("[a-f]{3,9}(x|y)+")]
"""Those of the three sequences of a batch."""
KIND = {"type": "object", "properties": {"kind": SCHEMA["properties"]["kind"]}, "required": ["kind"]}
CALLS = FORMATS["llama3-json"].grammar({"ab": KIND, "name": {"type": "object", "properties": {}}}, several=False)
THOUGHT = e.concat(e.literal("-"), e.Until("-.", bounded=True))
BATCHES = {
    "schemas": GRAMMARS,
    "calls and thinking": [
        CALLS,
        Grammar.json_schema(KIND).after("-."),
        Grammar.json_schema(KIND).within(e.optional(THOUGHT)),
    ],
}
BUDGETS = {"calls and thinking": np.array([99, 4, 6], np.int32)}


@functools.cache
def batch(kind="schemas"):
    return grammars.init(compiled(BATCHES[kind]), SIZE)


@functools.cache
def stops():
    return stopping.build_table(SIZE, [EOS])


def may_follow(grammar, tokens):
    """[V] bool: which tokens may follow these new ones, by the bytes of each; none after one that may not."""
    if grammar is None:
        return np.ones(SIZE, bool)
    state = 0
    for token in tokens:
        state = walk(grammar.dfa, state, TOKENS[token])
        if state < 0 or (token == EOS and not grammar.dfa.accepts[state]) or (token != EOS and not TOKENS[token]):
            return np.zeros(SIZE, bool)
    allowed = [state >= 0 and bool(each) and walk(grammar.dfa, state, each) >= 0 for each in TOKENS]
    allowed[EOS] = state >= 0 and bool(grammar.dfa.accepts[state])
    return np.array(allowed)


SAMPLED = RowSampling(temperature=np.array([0.8, 0.0, 1.0], np.float32))


@functools.cache
def constrained(name, rule=accept.coupled, sampled=True, kind="schemas"):
    """The end of a constrained run of a drafter, and its new tokens."""
    drafter = Plain() if name == "plain" else toy.bound_drafters()[name]
    weights = weights_of(drafter)
    rows = dataclasses.replace(SAMPLED, thinking_budget=BUDGETS.get(kind)) if sampled else None
    limit = toy.LENGTHS + 24 if kind == "schemas" else [toy.CAPACITY] * len(toy.LENGTHS)
    s = toy.start(drafter, weights, limit=limit, table=stops(), rows=rows, rule=rule, grammar=batch(kind))
    s = toy.run(drafter, weights, s, rule=rule)
    new = [tokens[length:] for tokens, length in zip(toy.generated(s), toy.LENGTHS, strict=True)]
    return s, new


def check_texts(s, new, kind="schemas"):
    for grammar, tokens, code in zip(BATCHES[kind], new, np.array(s.finish_code), strict=True):
        for i in range(len(tokens)):
            assert may_follow(grammar, tokens[:i])[tokens[i]], spelled(tokens[: i + 1])
        if grammar is not None:
            assert grammar.matches(spelled(tokens).decode()) == (code == stopping.EOS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in toy.bound_drafters() if name not in (*REPEATED, "plain")])
@pytest.mark.parametrize("kind", BATCHES)
def test_constrained_output_does_not_depend_on_the_drafter(kind, name):
    """One sequence is greedy, and the other two are sampled. Of the schemas, one has no grammar."""
    s, new = constrained(name, kind=kind)
    plain, expected = constrained("plain", kind=kind)
    assert new == expected
    check_texts(s, new, kind)
    assert np.array(s.finish_code).tolist() == np.array(plain.finish_code).tolist()
    np.testing.assert_array_equal(np.array(s.grammar.state), np.array(plain.grammar.state))
    assert (np.array(s.stats.rounds)[[0, 2]] < np.array(plain.stats.rounds)[[0, 2]]).all(), "drafts are accepted"
    if kind != "schemas":
        assert b"-." in spelled(new[1][:6]), "the thinking ends within its budget"
        assert np.array(s.finish_code).tolist() == [stopping.EOS] * 3


@pytest.mark.slow
def test_the_sequence_without_a_grammar_is_that_of_a_batch_without():
    free = toy.run(Plain(), toy.params(), toy.start(Plain(), toy.params(), table=stops()))
    assert constrained("plain")[1][1] == toy.generated(free)[1][toy.LENGTHS[1] :]


@functools.cache
def read_target():
    @jax.jit
    def read(params, tokens):
        cache = toy.TARGET.init_cache(params, 1, 4, 4)
        return toy.TARGET.forward(params, tree.chain(tokens), cache, None).logits[0]

    return read


def logits_after(tokens):
    """The target's logits after a whole text."""
    padded = np.zeros((1, toy.CAPACITY), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.array(read_target()(toy.params().target, padded))[len(tokens) - 1]


def test_greedy_output_is_the_best_allowed_token_each_time():
    _, new = constrained("plain", accept.greedy, sampled=False)
    for ids, length, grammar, tokens in zip(toy.IDS, toy.LENGTHS, GRAMMARS, new, strict=True):
        text = ids[:length].tolist()
        for i, token in enumerate(tokens):
            allowed = may_follow(grammar, tokens[:i])
            assert token == np.where(allowed, logits_after([*text, *tokens[:i]]), -np.inf).argmax()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["standalone", "eagle_tree", "suffix"])
def test_greedy_output_does_not_depend_on_the_drafter(name):
    s, new = constrained(name, accept.greedy, sampled=False)
    assert new == constrained("plain", accept.greedy, sampled=False)[1]
    check_texts(s, new)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["standalone", "eagle", "mtp", "frozen_kv_mtp", "block"])
def test_drafts_are_in_the_grammar(name):
    drafter = toy.bound_drafters()[name]
    weights = weights_of(drafter)
    s = toy.start(drafter, weights, table=stops(), rows=SAMPLED, rule=accept.coupled, grammar=batch())
    drafted = np.array(jax.jit(lambda s: drafter.draft(weights, s)[0].tokens)(s))
    first = [tokens[length:] for tokens, length in zip(toy.generated(s), toy.LENGTHS, strict=True)]
    for grammar, before, chain in zip(GRAMMARS, first, drafted[:, 1:].tolist(), strict=True):
        for i in range(len(chain)):
            done = EOS in chain[:i]
            assert done or may_follow(grammar, [*before, *chain[:i]])[chain[i]]


@pytest.mark.slow
def test_nodes_of_a_block_have_the_masks_of_their_own_paths():
    """Without a Markov head and options, the nodes of a generation share their logits, but not what is allowed."""
    drafter = Block(depth=3, width=3, num_nodes=12).bind(toy.TARGET, toy.FILL_IN)
    weights, drafted = weights_of(drafter), []
    for rows in (None, RowSampling(temperature=np.zeros(3, np.float32))):
        s = toy.start(drafter, weights, table=stops(), rows=rows, grammar=batch())
        drafted.append(jax.device_get(jax.jit(lambda s: drafter.draft(weights, s)[0])(s)))
    np.testing.assert_array_equal(drafted[0].tokens, drafted[1].tokens)
    np.testing.assert_array_equal(drafted[0].parents, drafted[1].parents)


# The distribution

FEW = Grammar.regex("(a|ab|bb?)(12?|-)")
COUNT = 4096


def exact_distribution(ids):
    """Text of tokens -> its probability under the target, constrained and with temperature 1."""
    found, todo = {}, [((), 1.0)]
    while todo:
        tokens, mass = todo.pop()
        logits = np.where(may_follow(FEW, tokens), logits_after([*ids, *tokens]).astype(np.float64), -np.inf)
        p = np.exp(logits - logits.max())
        for token in np.flatnonzero(p):
            (found.__setitem__ if token == EOS else lambda key, value: todo.append((key, value)))(
                (*tokens, int(token)), mass * p[token] / p.sum()
            )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "width"), [("rejection", 1), ("rejection", 3), ("block", 1), ("coupled", 3)])
def test_the_distribution_is_the_constrained_one(rule, width):
    """Chi-square against the exact probabilities of all texts."""
    drafter = Standalone(depth=2, width=width).bind(toy.TARGET, toy.NEAR)
    if rule in ("rejection", "block"):
        drafter = dataclasses.replace(drafter, sampled=True)
    ids = np.repeat(toy.IDS[2:, :3], COUNT, axis=0)
    given = dict(ids=ids, length=np.full(COUNT, 3), limit=np.full(COUNT, 12), table=stops(), seeds=np.arange(COUNT))
    rows = RowSampling(temperature=np.ones(COUNT, np.float32))
    constraint = grammars.init(compiled([FEW]) * COUNT, SIZE)
    weights, judge = toy.params(), accept.RULES[rule]
    s = toy.start(drafter, weights, rows=rows, rule=judge, grammar=constraint, **given)
    s = toy.run(drafter, weights, s, rule=judge)
    texts = [tuple(tokens[3:]) for tokens in toy.generated(s)]
    expected = exact_distribution(ids[0].tolist())
    assert set(texts) <= set(expected) and len(expected) > 8
    counts = np.array([texts.count(text) for text in expected])
    wanted = COUNT * np.array(list(expected.values()))
    common = wanted >= 5
    terms = (counts - wanted)[common] ** 2 / wanted[common]
    degrees = common.sum()
    assert terms.sum() < degrees + 5 * np.sqrt(2 * degrees), (counts, wanted)
    assert np.array(s.stats.accept_counts)[:, 1:].sum() > COUNT / 4, "drafts are accepted"


# Parts


def path_oracle(draft_tree, b, node):
    return path_to(draft_tree.tokens[b], draft_tree.parents[b], node)


def random_tree(seed, nodes=9):
    """Most tokens may follow their parents, so most paths lead on."""
    rng = np.random.default_rng(seed)
    parents = np.array([[0] + [rng.integers(0, n) for n in range(1, nodes)] for _ in GRAMMARS], np.int32)
    tokens = rng.integers(0, SIZE, parents.shape)
    for b, grammar in enumerate(GRAMMARS):
        for node in range(1, nodes):
            allowed = may_follow(grammar, path_oracle(DraftTree(tokens, parents), b, parents[b, node]))
            if allowed.any() and rng.random() < 0.8:
                tokens[b, node] = rng.choice(np.flatnonzero(allowed))
    return DraftTree(tokens.astype(np.int32), parents, nodes - 1)


def forbid(constraint, draft_tree, logits, ids=None, **options):
    return grammars.forbid(constraint, logits, tree.paths(draft_tree), ids, **options)


FORBID = jax.jit(forbid)
MEND = jax.jit(grammars.mend)


@pytest.mark.parametrize("seed", range(3))
def test_every_node_of_a_tree_has_the_mask_of_its_path(seed):
    draft_tree, rng = random_tree(seed), np.random.default_rng(seed)
    logits = rng.normal(size=(3, 9, SIZE)).astype(np.float32)
    # Nodes where nothing that may follow is left, as in a draft's smaller vocabulary.
    logits[:, 4] = -np.inf
    found = np.array(FORBID(batch(), draft_tree, logits))
    for b, node in itertools.product(range(3), range(9)):
        path = path_oracle(draft_tree, b, node)
        allowed = may_follow(GRAMMARS[b], path)
        if not allowed.any():
            assert np.isfinite(found[b, node]).any(), "no node is without a token"
            continue
        wanted = np.where(allowed, 0 if node == 4 and GRAMMARS[b] is not None else logits[b, node], -np.inf)
        if GRAMMARS[b] is not None or node != 4:
            np.testing.assert_array_equal(found[b, node], wanted)


@pytest.mark.parametrize("per_node", [False, True])
def test_logits_of_a_smaller_vocabulary_are_masked_as_they_are(per_node):
    """Where none of its tokens may follow, all of its logits are 0."""
    draft_tree, rng = random_tree(0), np.random.default_rng(0)
    ids = np.stack([rng.permutation(SIZE)[:5] for _ in range(27 if per_node else 1)]).astype(np.int32)
    ids = ids.reshape(3, 9, 5) if per_node else ids[0]
    logits = rng.normal(size=(3, 9, 5)).astype(np.float32)
    logits[:, 4] = -np.inf
    found, without = np.array(FORBID(batch(), draft_tree, logits, ids)), 0
    for b, node in itertools.product((0, 2), range(9)):
        allowed = may_follow(GRAMMARS[b], path_oracle(draft_tree, b, node))
        if not allowed.any():
            continue
        allowed = allowed[ids[b, node] if per_node else ids]
        without += not allowed.any()
        wanted = np.where(allowed | ~allowed.any(), 0.0 if node == 4 or not allowed.any() else logits[b, node], -np.inf)
        np.testing.assert_array_equal(found[b, node], wanted)
    assert without > 1, "some nodes have none"


def test_the_best_token_is_found_without_a_pass_over_the_logits():
    draft_tree, rng = random_tree(1), np.random.default_rng(1)
    logits = rng.normal(size=(3, 9, SIZE)).astype(np.float32)
    logits[:, 4], logits[:, 5, ::2] = -np.inf, -np.inf
    best = jax.jit(functools.partial(forbid, best_only=True))
    found, both = np.array(best(batch(), draft_tree, logits)), np.array(FORBID(batch(), draft_tree, logits))
    np.testing.assert_array_equal(found.argmax(-1), both.argmax(-1))
    text = str(jax.make_jaxpr(best)(batch(), draft_tree, logits))
    assert "reduce_or" not in text and "reduce_or" in str(jax.make_jaxpr(FORBID)(batch(), draft_tree, logits))


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3])
def test_greedy_drafts_of_a_smaller_vocabulary_are_not_widened(width):
    """They are the tokens that the widened logits give, where the vocabulary has one that may follow."""
    rng = np.random.default_rng(width)
    ids = np.sort(rng.permutation(SIZE)[:40]).astype(np.int32)
    logits = jnp.asarray(rng.normal(size=(3, 2, 40)), jnp.float32)
    path = jnp.array(
        [[[TOKENS.index(b'{"')], [3]], [[5], [6]], [[TOKENS.index(b"a")], [TOKENS.index(b"f")]]], jnp.int32
    )
    greedy, tempered = (
        toy.start(Plain(), weights_of(Plain()), table=stops(), rows=rows, grammar=batch())
        for rows in (None, RowSampling(temperature=np.zeros(3, np.float32)))
    )

    def drafts(logits, s=greedy):
        return propose(s, logits, path, width=width, vocab_size=SIZE, ids=jnp.asarray(ids))

    text = str(jax.make_jaxpr(drafts)(logits))
    assert f"[3,2,{SIZE}]" not in text and "[3,2,40]" in text
    found, wide = drafts(logits), drafts(logits, tempered)
    for b, node in itertools.product(range(3), range(2)):
        allowed = np.ones(SIZE, bool) if GRAMMARS[b] is None else may_follow(GRAMMARS[b], path[b, node].tolist())
        count = min(width, allowed[ids].sum())
        np.testing.assert_array_equal(found.tokens[b, node, :count], wide.tokens[b, node, :count])
        if width > 1 and count:
            np.testing.assert_allclose(found.scores[b, node, :count], wide.scores[b, node, :count], atol=1e-5)


@pytest.mark.parametrize("parents", [None, [0, 0, 0, 1, 1, 2, 3, 3, 6, 8]], ids=["chain", "tree"])
def test_a_text_without_choices_replaces_every_draft(parents):
    """In the last generation, too: each node of a generation has the token that the text has there."""
    constraint = grammars.init(compiled([Grammar.choice(["zyxwvutsrq"])]), SIZE)
    draft_tree = DraftTree(np.full((1, 10), TOKENS.index(b"a"), np.int32), parents and np.array([parents], np.int32))
    depths = np.array(tree.depths(draft_tree))[0]
    draft_tree = dataclasses.replace(draft_tree, depth=int(depths.max()))
    mended = np.array(MEND(constraint, draft_tree).tokens)[0]
    assert spelled(mended[1:]) == bytes(b"zyxwvutsrq"[depth - 1] for depth in depths[1:])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chain", [False, True])
def test_forbidden_drafts_give_way_to_likely_ones(seed, chain):
    draft_tree = random_tree(seed)
    if chain:
        draft_tree = DraftTree(draft_tree.tokens, None)
    else:
        draft_tree = dataclasses.replace(draft_tree, depth=int(tree.depths(draft_tree).max()))
    mended, tables = np.array(MEND(batch(), draft_tree).tokens), compiled(GRAMMARS)
    above = np.maximum(np.arange(9) - 1, 0) if chain else None
    changed = 0
    for b, (grammar, table) in enumerate(zip(GRAMMARS, tables, strict=True)):
        parents = above if chain else np.array(draft_tree.parents)[b]
        for node in range(1, 9):
            path, up = [], parents[node]
            while up:
                path, up = [int(mended[b, up]), *path], parents[up]
            given = int(draft_tree.tokens[b, node])
            if grammar is None or not may_follow(grammar, path).any() or may_follow(grammar, path)[given]:
                assert mended[b, node] == given
                continue
            likely = int(table.likely[walk(grammar.dfa, 0, spelled(path))])
            assert mended[b, node] == (given if likely < 0 else likely)
            changed += likely >= 0
    assert changed
    sampled = dataclasses.replace(draft_tree, probs=np.zeros((3, 9, 1), np.float32))
    np.testing.assert_array_equal(MEND(batch(), sampled).tokens, draft_tree.tokens)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex('name": 12, "kind": null\\}'),
        Grammar.json_schema({"properties": {"a": {"const": 12}, "f": {"const": None}}, "required": ["a", "f"]}),
    ],
    ids=["regex", "schema"],
)
def test_a_copying_drafter_takes_keys_whole(grammar):
    """Its own drafts copy the prompt; what the grammar leaves no choice about is drafted all the same."""
    table = compiled([grammar])[0]
    rounds = {}
    for likely in (True, False):
        known = table if likely else dataclasses.replace(table, likely=np.full_like(table.likely, -1))
        constraint = grammars.init([known] * 3, SIZE)
        s = toy.start(Ngram(n=2, depth=4), toy.params(), table=stops(), grammar=constraint)
        s = toy.run(Ngram(n=2, depth=4), toy.params(), s)
        assert (np.array(s.finish_code) == stopping.EOS).all()
        rounds[likely] = np.array(s.stats.rounds)
    assert (rounds[True] < rounds[False]).all()


@pytest.mark.slow
def test_the_sizes_of_a_batch_are_rounded_up():
    constraint = batch()
    table = constraint.table
    (states,) = table.first.shape
    assert table.pattern.shape == constraint.map_of_state.shape == constraint.likely.shape == (states,)
    assert table.leads.shape == (64, 4) and len(table.following) == 2**14 and states == 1024
    assert grammars.init([None] * 3, SIZE).table is None
    assert len(constraint.token_class) == 2, "a power of two"
    (large,) = compiled([Grammar.regex("[a-z]{11000}")])
    assert len(grammars.init([large], SIZE).table.first) == 12_288, "11,002 states"
    many = [dataclasses.replace(large) for _ in range(3)]
    with pytest.raises(ValueError, match="3 grammars of the batch have 33004 states; must have at most 32767 together"):
        grammars.init(many, SIZE)


@pytest.mark.slow
def test_other_grammars_of_these_sizes_run_the_same_program():
    drafter = Ngram(n=2, depth=4)
    others = [None, Grammar.choice(["ab", "name"]), Grammar.regex("[0-9]{2,200}")]
    programs = []
    for given in (GRAMMARS, others):
        constraint = grammars.init(compiled(given), SIZE)
        s = toy.run(drafter, toy.params(), toy.start(drafter, toy.params(), table=stops(), grammar=constraint))
        assert (np.array(s.finish_code) == stopping.RUNNING).sum() == 0
        programs.append((jitted_prefill._cache_size(), jax.tree.map(jnp.shape, constraint.table)))
    assert programs[0] == programs[1]


@pytest.mark.slow
def test_the_loop_has_no_way_to_the_host():
    drafter = toy.bound_drafters()["suffix"]
    s = toy.start(drafter, toy.params(), table=stops(), grammar=batch())
    method = Method(toy.TARGET, drafter, accept.greedy)
    text = decode.lower(toy.params(), s, jnp.int32(9), method=method).compile().as_text()
    assert "while" in text
    for word in ("infeed", "outfeed", "callback", "send(", "recv("):
        assert word not in text


@pytest.mark.slow
def test_a_document_parses():
    text = spelled(constrained("plain")[1][0])
    assert json.loads(text.removesuffix(TOKENS[EOS]))["kind"] in ("ab", "xyz")
