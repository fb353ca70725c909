"""Tokens that do not count contribute nothing to a language model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason='needs flax: pip install -e ".[train]"')
pytest.importorskip("optax", reason='needs optax: pip install -e ".[train]"')
pytest.importorskip("orbax.checkpoint", reason='needs orbax-checkpoint: pip install -e ".[train]"')

from jspec.models import Llama  # noqa: E402
from jspec.train import batches  # noqa: E402
from tools.pretrain import lm, model, objective  # noqa: E402
from tools.pretrain.objective import LmRecipe, LmSetup  # noqa: E402

TARGET = Llama(
    vocab_size=31,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_length=32,
    tie_embeddings=True,
)
LENGTH = 12


@pytest.fixture(scope="module")
def target():
    params = model.init_params(TARGET, jax.random.key(3))
    return dataclasses.replace(params, embed=20 * params.embed)


def random_tokens(rng, count=2):
    return rng.integers(0, 31, (count, LENGTH), np.int32)


def random_mask(rng, last):
    """A mask in which `last` is the last token that counts."""
    mask = rng.integers(0, 2, (2, LENGTH)).astype(np.float32)
    mask[:, last], mask[:, last + 1 :] = 1, 0
    return mask


def same(one, other):
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


@pytest.mark.slow
@pytest.mark.parametrize("cross_entropy", [None, 0.3], ids=["alone", "distilled"])
def test_only_counted_tokens_teach_a_language_model(target, cross_entropy):
    teacher = None if cross_entropy is None else TARGET
    recipe = LmRecipe(steps=4, batch_tokens=24, length=LENGTH - 1, warmup=1, cross_entropy=cross_entropy or 0.0)
    setup = LmSetup(TARGET, recipe, teacher, "float32")
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
    tokens, mask = random_tokens(rng, 4), np.concatenate([random_mask(rng, 9), random_mask(rng, 6)]).astype(np.uint8)
    wide = np.concatenate([tokens, random_tokens(rng, 4)[:, :5]], axis=1), np.pad(mask, ((0, 0), (0, 5)))
    lm_setup = LmSetup(TARGET, LmRecipe(steps=4, batch_tokens=24, length=LENGTH - 1), None, "float32")
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
