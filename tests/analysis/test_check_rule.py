"""`check_rule` passes the lossless rules of this package and finds what is wrong with others."""

import jax
import jax.numpy as jnp
import pytest
from faults import at_last, result

from jspec.analysis import check_rule as checks
from jspec.analysis.check_rule import check_rule
from jspec.core import accept
from jspec.core.accept import Imposed, LossyThresholds

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
    """`rejection` with fields of its result that are functions of it and of (key, tree, logits, position)."""
    return result(**fields)(accept.rejection)


def accepts_too_often(key, draft_tree, logits, position):
    """Judges with a tenth of probability given away."""
    return accept.rejection(key, draft_tree, logits * 0.9, position)


def one_key(key, draft_tree, logits, position):
    return accept.rejection(jnp.broadcast_to(key[:1], key.shape), draft_tree, logits, position)


def every_round_alike(key, draft_tree, logits, position):
    return accept.coupled(key, draft_tree, logits, jnp.zeros_like(position))


def on_paths(change):
    return changed(path=lambda out, *_: None if out.path is None else change(out.path))


PROBABILITY = "have the probability"
WRONG = {
    "greedy": (accept.greedy, PROBABILITY),
    "thresholds": (LossyThresholds(0.3), PROBABILITY),
    "scaled": (LossyThresholds(1.0, 0.8), PROBABILITY),
    "imposed": (Imposed(2.0), PROBABILITY),
    "too often": (accepts_too_often, PROBABILITY),
    "one key": (one_key, "depends on the others|have the probability"),
    # The bonus token is sampled from p, not from the residual distribution.
    "no residual": (changed(tokens=lambda out, *args: at_last(out, accept.coupled(*args).tokens[:, :1])), PROBABILITY),
    "every round alike": (every_round_alike, "two rounds begin with the tokens 0 and 0 .* from key and position"),
    "length 0": (changed(length=lambda out, *_: out.length - 1), "length is from 0"),
    "too long": (changed(length=lambda out, *_: out.length + 9), "must be from 1 to 2"),
    "lengths in floats": (
        changed(length=lambda out, *_: out.length.astype(jnp.float32)),
        r"length is float32\[65536\]",
    ),
    "one length": (changed(length=lambda out, *_: out.length[:1]), r"length is int32\[1\]"),
    "a token of the batch": (
        changed(tokens=lambda out, *_: jnp.where(out.length[:, None] > 0, out.tokens.max() - out.tokens, 0)),
        "accepted nodes|have the probability",
    ),
    "tokens in floats": (changed(tokens=lambda out, *_: out.tokens.astype(jnp.float32)), "tokens are float32"),
    "few tokens": (changed(tokens=lambda out, *_: out.tokens[:, :1]), r"tokens are int32\[65536, 1\]"),
    "no vocabulary": (changed(tokens=lambda out, *_: at_last(out, 4)), "outside of the vocabulary"),
    "no path": (changed(path=lambda *_: None), "path is None for a tree"),
    "another path": (on_paths(lambda path: path[:, ::-1]), "path is no path of the tree"),
    "nodes that are not there": (on_paths(lambda path: path + 9), "path must be nodes of the tree"),
    "a pair": (lambda *args: (jnp.zeros(1), jnp.zeros(1)), "returns a tuple: must be a jspec.core.types.Acceptance"),
}


OFTEN = (
    *("greedy", "too often", "one key", "no residual", "every round alike", "too long", "one length", "few tokens"),
    "no path",
)


@pytest.mark.slow(unless=(*OFTEN,))
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name, few):
    rule, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        check_rule(rule)


def test_tokens_of_other_nodes_are_found(few):
    moved = changed(tokens=lambda out, *_: jnp.where(out.length[:, None] > 1, (out.tokens + 1) % 4, out.tokens))
    with pytest.raises(AssertionError, match="tokens before the last are not those of the accepted nodes"):
        check_rule(moved)


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
