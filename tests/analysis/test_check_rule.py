"""`check_rule` passes the lossless rules of this package and finds what is wrong with others."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jspec.analysis import check_rule as checks
from jspec.analysis.check_rule import check_rule
from jspec.core import accept
from jspec.core.accept import Imposed, LossyThresholds
from jspec.core.types import Acceptance

FEW = {"one draft": None, "a tree": [0, 0, 0, 1]}


@pytest.fixture
def few(monkeypatch):
    """Two shapes of drafts, so that a report takes seconds."""
    monkeypatch.setattr(checks, "SHAPES", FEW)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", LossyThresholds(1.0, 1.0)], ids=str)
def test_lossless_rules_pass(rule, request, capsys):
    if rule not in ("rejection", "block"):
        request.getfixturevalue("few")
    report = check_rule(rule, trees=rule != "block", progress=True)
    assert "100%" in capsys.readouterr().err
    assert "is lossless, as far as 65,536 rounds" in repr(report)
    assert all(1 <= mean <= 4 for mean in report.tokens_per_round.values())
    assert len(report.tokens_per_round) == (8 if rule == "rejection" else 4)


def changed(**fields):
    """`rejection` with parts of its result changed by functions of (key, tree, logits, result)."""

    def rule(key, draft_tree, logits, position):
        result = accept.rejection(key, draft_tree, logits, position)
        new = {name: change(key, draft_tree, logits, result) for name, change in fields.items()}
        return dataclasses.replace(result, **new)

    return rule


def accepts_too_often(key, draft_tree, logits, position):
    """Judges with a tenth of probability given away."""
    return accept.rejection(key, draft_tree, logits * 0.9, position)


def one_key(key, draft_tree, logits, position):
    return accept.rejection(jnp.broadcast_to(key[:1], key.shape), draft_tree, logits, position)


def no_residual(key, draft_tree, logits, position):
    """The bonus token is sampled from p, not from what rejection leaves of it."""
    result = accept.rejection(key, draft_tree, logits, position)
    plain = accept.coupled(key, draft_tree, logits, position)
    column = jnp.arange(result.tokens.shape[1])[None]
    last = column == result.length[:, None] - 1
    return dataclasses.replace(result, tokens=jnp.where(last, plain.tokens[:, :1], result.tokens))


WRONG = {
    "greedy": (accept.greedy, "have the probability"),
    "thresholds": (LossyThresholds(0.3), "have the probability"),
    "scaled": (LossyThresholds(1.0, 0.8), "have the probability"),
    "imposed": (Imposed(2.0), "have the probability"),
    "too often": (accepts_too_often, "have the probability"),
    "one key": (one_key, "depends on the others|have the probability"),
    "no residual": (no_residual, "have the probability"),
    "length 0": (changed(length=lambda k, t, z, r: r.length - 1), "length is from 0"),
    "too long": (changed(length=lambda k, t, z, r: r.length + 9), "must be from 1 to 2"),
    "lengths in floats": (
        changed(length=lambda k, t, z, r: r.length.astype(jnp.float32)),
        r"length is float32\[65536\]",
    ),
    "one length": (changed(length=lambda k, t, z, r: r.length[:1]), r"length is int32\[1\]"),
    "a token of the batch": (
        changed(tokens=lambda k, t, z, r: jnp.where(r.length[:, None] > 0, r.tokens.max() - r.tokens, 0)),
        "accepted nodes|have the probability",
    ),
    "tokens in floats": (changed(tokens=lambda k, t, z, r: r.tokens.astype(jnp.float32)), "tokens are float32"),
    "few tokens": (changed(tokens=lambda k, t, z, r: r.tokens[:, :1]), r"tokens are int32\[65536, 1\]"),
    "no vocabulary": (
        changed(
            tokens=lambda k, t, z, r: jnp.where(
                jnp.arange(r.tokens.shape[1])[None] == r.length[:, None] - 1, 4, r.tokens
            )
        ),
        "outside of the vocabulary",
    ),
    "no path": (changed(path=lambda k, t, z, r: None), "path is None for a tree"),
    "another path": (
        changed(path=lambda k, t, z, r: r.path if r.path is None else r.path[:, ::-1]),
        "path is no path of the tree",
    ),
    "nodes that are not there": (
        changed(path=lambda k, t, z, r: r.path if r.path is None else r.path + 9),
        "path must be nodes of the tree",
    ),
    "a pair": (lambda *args: (jnp.zeros(1), jnp.zeros(1)), "returns a tuple: must be a jspec.core.types.Acceptance"),
}


OFTEN = ("greedy", "too often", "one key", "no residual", "too long", "one length", "few tokens", "no path")


@pytest.mark.slow(unless=(*OFTEN,))
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name, few):
    rule, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        check_rule(rule)


def test_tokens_of_other_nodes_are_found(few):
    def rule(key, draft_tree, logits, position):
        result = accept.rejection(key, draft_tree, logits, position)
        moved = jnp.where(result.length[:, None] > 1, (result.tokens + 1) % 4, result.tokens)
        return Acceptance(result.path, moved, result.length)

    with pytest.raises(AssertionError, match="tokens before the last are not those of the accepted nodes"):
        check_rule(rule)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (("x",), ValueError, "rule='x'"),
        ((5,), TypeError, "rule=5"),
        ((None,), TypeError, "rule=None"),
        (("coupled", "yes"), TypeError, "trees"),
        (("coupled", True, 1), TypeError, "sampled=1"),
        (("coupled", True, None, -1), ValueError, "seed=-1"),
        (("coupled", True, None, 0, 1), TypeError, "progress=1"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    names = ("rule", "trees", "sampled", "seed", "progress")
    with pytest.raises(error, match=message):
        check_rule(**dict(zip(names, arguments, strict=False)))


@pytest.mark.slow
def test_a_rule_sees_what_the_loop_gives_it(few):
    """Chains without parents, trees with static depth and width, distributions where drafts are sampled."""
    seen = set()

    def rule(key, draft_tree, logits, position):
        assert key.shape == position.shape == logits.shape[:1]
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        seen.add((draft_tree.parents is None, draft_tree.depth, draft_tree.width, draft_tree.probs is None))
        return accept.coupled(key, draft_tree, logits, position)

    check_rule(rule)
    assert seen == {(True, None, None, flag) for flag in (False, True)} | {
        (False, 2, 2, flag) for flag in (False, True)
    }
