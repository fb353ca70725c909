"""Routers against a loop over tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.moe import Routed, Router
from jspec.models.ops import Ops

ROUTERS = {
    "plain": Router(count=12, chosen=3),
    "normalized": Router(count=12, chosen=3, normalize=True, scale=2.5),
    "all": Router(count=6, chosen=6),
    "groups_by_best": Router(count=12, chosen=3, groups=4, kept_groups=2),
    "groups_by_two_best": Router(
        count=12, chosen=4, sigmoid=True, groups=4, kept_groups=2, best_of_group=2, normalize=True
    ),
    "one_group": Router(count=12, chosen=2, sigmoid=True, best_of_group=2),
}


def oracle(router, logits, bias):
    """One token at a time: expert -> weight."""
    found = []
    for token in logits.astype(np.float64):
        scores = 1 / (1 + np.exp(-token)) if router.sigmoid else np.exp(token) / np.exp(token).sum()
        choice = scores if bias is None else scores + bias
        groups = np.split(np.arange(router.count), router.groups)
        kept = sorted(groups, key=lambda group: -np.sort(choice[group])[-router.best_of_group :].sum())
        allowed = np.concatenate(kept[: router.kept_groups])
        chosen = sorted(allowed, key=lambda expert: -choice[expert])[: router.chosen]
        total = sum(scores[expert] for expert in chosen) if router.normalize else 1.0
        found.append({expert: router.scale * scores[expert] / total for expert in chosen})
    return found


@pytest.mark.parametrize("biased", (False, True), ids=("", "biased"))
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_a_router_equals_a_loop_over_tokens(router, biased):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40, router.count)).astype(np.float32)
    bias = rng.normal(size=router.count).astype(np.float32) if biased else None
    ids, weights = router.route(jnp.asarray(logits), None if bias is None else jnp.asarray(bias), Ops())
    assert weights.dtype == jnp.float32
    for wanted, chosen, given in zip(oracle(router, logits, bias), np.asarray(ids), np.asarray(weights), strict=True):
        assert list(wanted) == chosen.tolist()
        np.testing.assert_allclose(given, list(wanted.values()), rtol=1e-5)


def test_of_equal_groups_the_first_is_used():
    router = Router(count=8, chosen=2, groups=4, kept_groups=1)
    ids, _ = router.route(jnp.zeros((1, 8)), None, Ops())
    assert ids.tolist() == [[0, 1]]


def test_a_router_does_not_sort():
    for router in ROUTERS.values():
        program = jax.jit(partial(router.route, bias=None, ops=Ops())).lower(jnp.zeros((4, router.count)))
        assert "sort" not in program.as_text().replace("sorted", "")


def test_a_shared_gate_requires_a_shared_mlp():
    with pytest.raises(ValueError, match="shared_gate=True requires shared_width > 0"):
        Routed(ROUTERS["plain"], width=8, shared_gate=True)
