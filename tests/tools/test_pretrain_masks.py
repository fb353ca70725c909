"""Tokens that do not count contribute nothing to a language model."""

import extras  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_models import LENGTH, random_mask, random_tokens, same, sharp_params, widened
from train_models import MASKED as TARGET

from jspec.train import batches
from tools.pretrain import lm, model, objective
from tools.pretrain.objective import LmRecipe, LmSetup


@pytest.fixture(scope="module")
def target():
    return sharp_params(TARGET)


@pytest.mark.slow
@pytest.mark.parametrize("cross_entropy", [None, 0.3], ids=["alone", "distilled"])
def test_only_counted_tokens_teach_a_language_model(target, cross_entropy):
    teacher = None if cross_entropy is None else TARGET
    recipe = LmRecipe(steps=4, batch_tokens=24, length=LENGTH - 1, warmup=1, cross_entropy=cross_entropy or 0.0)
    setup = LmSetup(recipe, "float32", TARGET, teacher)
    state, frozen = objective.init(setup), None if teacher is None else target
    gradient = jax.jit(jax.grad(lambda params, batch: setup.loss(state.replace(params=params), frozen, batch)[0]))

    @jax.jit
    @jax.grad
    def by_hand(params, tokens, mask):
        """The mean over the counted tokens, each from the logits of the token before."""
        logits = jax.nn.log_softmax(model.logits(TARGET, params, tokens, "float32"))[:, :-1]
        chosen = -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=2, mode="clip")[..., 0]
        if frozen is not None:
            wanted = jax.nn.log_softmax(model.logits(TARGET, frozen, tokens, "float32"))[:, :-1]
            distance = jnp.sum(jnp.exp(wanted) * (wanted - logits), axis=2)
            chosen = cross_entropy * chosen + (1 - cross_entropy) * distance
        return jnp.sum(mask[:, 1:] * chosen) / jnp.sum(mask[:, 1:])

    for seed in range(2):
        rng = np.random.default_rng(seed)
        last = int(rng.integers(4, LENGTH - 1))
        tokens, mask = random_tokens(rng), random_mask(rng, last)
        found = gradient(state.params, (tokens, mask))
        for ours, theirs in zip(
            jax.tree.leaves(found), jax.tree.leaves(by_hand(state.params, tokens, mask)), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
        after = np.where(np.arange(LENGTH) > last, (tokens + 7) % 31, tokens)
        assert same(gradient(state.params, (after, mask)), found)
        changed = np.where(np.arange(LENGTH) == last, (tokens + 7) % 31, tokens)
        assert not same(gradient(state.params, (changed, mask)), found)
    whole, none = np.ones_like(mask), gradient(state.params, (tokens, np.zeros_like(mask)))
    assert all(np.array_equal(leaf, np.zeros_like(leaf)) for leaf in jax.tree.leaves(none))
    for ours, theirs in zip(
        jax.tree.leaves(gradient(state.params, (tokens, whole))),
        jax.tree.leaves(gradient(state.params, (tokens, None))),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.slow
def test_heldout_metrics_do_not_depend_on_padding(target):
    """Sequences in a wider array, with any tokens after their ends, have the same metrics."""
    rng = np.random.default_rng(0)
    (tokens, mask), wide = widened(rng)
    lm_setup = LmSetup(LmRecipe(steps=4, batch_tokens=24, length=LENGTH - 1), "float32", TARGET, None)
    counts = rng.integers(1, 5, 31)
    found = [
        lm.evaluate(target, lm.Heldout(batches.Source(x, mask=y), counts), lm_setup) for x, y in ((tokens, mask), wide)
    ]
    logits = np.asarray(jax.nn.log_softmax(model.logits(TARGET, target, jnp.asarray(tokens), "float32")))[:, :-1]
    nats = -np.take_along_axis(logits, tokens[:, 1:, None], 2)[..., 0]
    assert found[0]["heldout_nats_per_token"] == pytest.approx((nats * mask[:, 1:]).sum() / mask[:, 1:].sum(), rel=1e-5)
    size = (counts[tokens] * mask)[:, 1:].sum()
    assert found[0]["heldout_bits_per_byte"] == pytest.approx((nats * mask[:, 1:]).sum() / np.log(2) / size, rel=1e-5)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
