"""The checks that `debug` adds to each round: they pass valid rounds and find every broken rule."""

import dataclasses

import jax.numpy as jnp
import pytest
import toy
from jax.experimental import checkify
from planted import Planted, planted_params

from jspec.core import accept
from jspec.core.loop import decode_checked
from jspec.core.method import Method
from jspec.core.types import DraftTree, Params
from jspec.drafters import Plain


def checked(drafter, weights, s, rule=accept.greedy):
    return decode_checked(weights, s, jnp.int32(1000), method=Method(toy.TARGET, drafter, rule))


@dataclasses.dataclass(frozen=True)
class Broken(Planted):
    """Breaks one rule, in round 2 only."""

    depth: int = 2
    rule: str = ""

    def draft(self, params, s):
        draft_tree, state = super().draft(params, s)
        now = (s.round_index == 2).astype(jnp.int32)
        tokens, parents = draft_tree.tokens, jnp.tile(jnp.array([[0, 0, 1]], jnp.int32), (len(toy.IDS), 1))
        if self.rule == "vocabulary":
            tokens = tokens.at[1, 2].add(toy.TARGET.vocab_size * now)
        if self.rule == "negative":
            tokens = tokens.at[1, 2].add(-toy.TARGET.vocab_size * now)
        if self.rule == "root":
            tokens = tokens.at[2, 0].set((tokens[2, 0] + now) % toy.TARGET.vocab_size)
        if self.rule == "parent":
            parents = parents.at[0, 1].add(2 * now)
        return DraftTree(tokens, parents), state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "message"),
    (
        ("vocabulary", "round 2: the drafter proposed a token outside the vocabulary"),
        ("negative", "round 2: the drafter proposed a token outside the vocabulary"),
        ("root", "round 2: node 0 is not the last committed token"),
        ("parent", "round 2: a parent does not come before its child"),
    ),
)
def test_a_drafter_that_breaks_a_rule_is_caught(rule, message):
    drafter = Broken(rule=rule)
    err, _ = checked(drafter, planted_params(), toy.start(drafter, planted_params()))
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        err.throw()


@pytest.mark.slow(unless=("[0, 9, 9]", "[0, 0, 1]"))
@pytest.mark.parametrize("path", ([0, 9, 9], [0, 2, 1], [1, 2, 2], [0, -1, 0], [0, 0, 1]), ids=str)
def test_a_path_that_is_none_is_caught(path):
    """Otherwise rows of another node, or of none, would be committed as those of the accepted tokens."""
    drafter = Planted(2)

    def astray(key, draft_tree, logits, position):
        accepted = accept.greedy(key, draft_tree, logits, position)
        wrong = jnp.broadcast_to(jnp.array([path], jnp.int32), accepted.tokens.shape)
        return dataclasses.replace(accepted, path=wrong, length=jnp.full_like(accepted.length, 3))

    err, _ = checked(drafter, planted_params(), toy.start(drafter, planted_params()), rule=astray)
    wanted = "out of range" if max(path) > 2 or min(path) < 0 else "not a path from the root"
    with pytest.raises(checkify.JaxRuntimeError, match=f"round 0: .* path is {wanted}"):
        err.throw()


def test_weights_that_are_nan_are_caught():
    s = toy.start(Plain(), toy.params())
    weights = Params(dataclasses.replace(toy.params().target, norm=jnp.full(toy.TARGET.hidden_size, jnp.nan)))
    err, _ = checked(Plain(), weights, s)
    with pytest.raises(checkify.JaxRuntimeError, match="round 0: the target's logits contain a NaN"):
        err.throw()


def test_a_rule_of_acceptance_that_accepts_nothing_is_caught():
    def nothing(key, draft_tree, logits, position):
        accepted = accept.greedy(key, draft_tree, logits, position)
        return dataclasses.replace(accepted, length=jnp.zeros_like(accepted.length))

    # Nothing is ever appended: the limit of 1000 rounds ends the loop.
    err, _ = checked(Plain(), toy.params(), toy.start(Plain(), toy.params()), rule=nothing)
    with pytest.raises(checkify.JaxRuntimeError, match="round 0: an accept length is out of range"):
        err.throw()


def test_a_limit_beyond_the_buffer_is_caught():
    s = toy.start(Plain(), toy.params(), limit=[toy.CAPACITY + 1] * 3)
    err, _ = checked(Plain(), toy.params(), s)
    with pytest.raises(checkify.JaxRuntimeError, match="round 0: a sequence is longer than its limit or the buffer"):
        err.throw()
