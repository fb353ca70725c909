"""Training of block drafts: training equals serving, the loss is that of a loop over blocks, and it falls."""

import dataclasses
from functools import partial

import extras  # noqa: F401
import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_models import TARGET, sharp_params

import jspec
from jspec.core.types import Params
from jspec.train import block, distill, draft
from jspec.train.block import BlockLearner
from jspec.train.learner import Texts
from jspec.train.recipe import BlockRecipe, BlockShape

LENGTH = 14
RECIPE = BlockRecipe(steps=30, batch_tokens=56, length=LENGTH, learning_rate=1e-2, warmup=2, anchors=5, reach=3.0)


def _configure(**shape):
    shape = {"block_size": 4, "capture_layers": (1, 3), "markov_rank": 6, **shape}
    return BlockLearner.configure(TARGET, BlockShape(**shape))


_WINDOWS = {"windows": (None, 6), "causal": (False, True)}
_FILL_IN = {"fill_in": True, "markov": "none", "no_confidence": True}
_DFLASH2 = {**_FILL_IN, "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 7}
CONFIGS = {
    "dspark": dataclasses.replace(_configure(markov="rnn"), **_WINDOWS),
    "dflash": _configure(**_FILL_IN, num_layers=1),
    "dflash2": _configure(**_DFLASH2),
    "jetspec": _configure(**_FILL_IN, causal=True),
    "fill-in": _configure(fill_in=True, markov="gated", num_layers=1),
}


@pytest.fixture(scope="module")
def target():
    return sharp_params(TARGET)


def random_draft(learner, target):
    """Weights that are far from their initial ones, so that each part of the draft matters."""
    params = learner.init(target, None, jax.random.key(1))
    if params.markov is not None:
        params = dataclasses.replace(
            params, markov=dataclasses.replace(params.markov, previous=50 * params.markov.previous)
        )
    if params.convs is not None:
        rng = np.random.default_rng(3)
        convs = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 3, params.convs)
        selector = dataclasses.replace(params.selector, previous=200 * params.selector.previous)
        params = dataclasses.replace(params, convs=convs, selector=selector)
    return params


@partial(jax.jit, static_argnames="config")
def serve(config, both, hidden, tokens, anchor):
    """The draft as it decodes: rows of the features before the anchor in its cache, then one block.

    Logits of each prediction before the selector, after it, and of the confidence head.
    """
    cache = config.init_cache(both.draft, 1, 16, 4)
    _, rows = config.read(both.draft, hidden, jnp.arange(hidden.shape[1], dtype=jnp.int32)[None])
    cache = cache.commit(rows, jnp.zeros(1, jnp.int32), None, anchor)
    row = jnp.full((1, config.block_size), config.mask_token).at[:, 0].set(tokens[:, anchor[0]])
    positions = anchor[:, None] + jnp.arange(config.block_size, dtype=jnp.int32)[None]
    out = config.apply(both, TARGET, row, positions, cache, anchor)[:, -config.depth :]
    logits, state, made, sure = config.unembed(both, TARGET, out), config.begin(both.draft, 1), [], []
    candidates, ids = config.candidates(both.draft, logits)
    for k in range(config.depth):
        at = slice(k, k + 1)
        before = jax.lax.dynamic_slice_in_dim(tokens, jnp.minimum(anchor[0] + k, LENGTH - 1), 1, axis=1)
        row_ids = ids[:, at] if config.selector_rank else None
        corrected, state = config.correct(both.draft, state, before, out[:, at], candidates[:, at], row_ids)
        if config.selector_rank:
            corrected = jnp.full((1, 1, logits.shape[-1]), -jnp.inf).at[0, 0, row_ids[0, 0]].set(corrected[0, 0])
        made.append(corrected[0, 0])
        sure.append(config.confide(both.draft, before, out[:, at]))
    made = jnp.stack(made)
    return (logits[0] if config.selector_rank else made), made, None if sure[0] is None else jnp.concatenate(sure, 1)[0]


def softmax(x):
    return np.exp(x - np.logaddexp.reduce(x, axis=-1, keepdims=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_is_that_of_a_loop_over_served_blocks(target, name):
    """Each block is computed on its own, as in decoding, and each term of the loss in plain numpy."""
    config, rng = CONFIGS[name], np.random.default_rng(0)
    recipe = dataclasses.replace(RECIPE, cross_entropy=0.3, confidence=0.7, divergence=0.2, selector=0.6)
    learner = BlockLearner(recipe, "float32", config, TARGET)
    both = Params(target, random_draft(learner, target))
    tokens = rng.integers(0, 61, (3, LENGTH)).astype(np.int32)
    mask = np.ones((3, LENGTH), np.float32)
    mask[1, [3, 9]], mask[2, 4:] = 0, 0
    out = jax.jit(learner.run_target)(target, tokens)
    keys = jax.random.split(jax.random.key(5), 3)
    learned = jax.jit(learner.learn)(both, Texts(tokens, learner.count_rows(tokens, mask), out, None, keys))
    loss, loss_weight, metrics = jax.device_get(learned)
    anchors, kept = jax.device_get(jax.jit(block.sample_anchors, static_argnums=1)(mask, recipe.anchors, keys))

    hits = [0, 0]
    sums, total, nats, agreed, chained, counted = np.zeros(5), 0.0, *(np.zeros(config.depth) for _ in range(4))
    for b in range(3):
        for a, used in zip(anchors[b], kept[b], strict=True):
            if not used:
                continue
            served = serve(config, both, out.hidden[b : b + 1], tokens[b : b + 1], jnp.array([a]))
            logits, selected, sure = jax.device_get(served)
            chain = True
            for k in range(config.depth):
                if a + k + 1 >= LENGTH or not mask[b, a + k + 1]:
                    break
                q, wanted = softmax(logits[k].astype(np.float64)), np.array(out.logits[b, a + k], np.float64)
                distance, weight = np.abs(q - softmax(wanted)).sum(), np.exp(-k / recipe.reach)
                label, p = tokens[b, a + k + 1], softmax(wanted)
                surprise, choice = -np.log(q[label]), softmax(selected[k].astype(np.float64))
                terms = [surprise, distance, p @ np.log(p / q)]
                terms += [0 if sure is None else cross_entropy(sure[k], 1 - distance / 2)]
                terms += [-np.log(choice[label]) if config.selector_rank and choice[label] > 0 else 0]
                hits[int(choice[label] > 0)] += 1
                sums += weight * np.array(terms)
                total += weight
                same = np.argmax(choice) == np.argmax(wanted)
                chain &= same
                nats[k] += surprise
                agreed[k], chained[k], counted[k] = agreed[k] + same, chained[k] + chain, counted[k] + 1
    expected = (sums / total) @ [
        *(recipe.cross_entropy, recipe.distance, recipe.divergence, recipe.confidence, recipe.selector)
    ]
    np.testing.assert_allclose(loss, expected, rtol=2e-5)
    np.testing.assert_allclose(loss_weight, total, rtol=2e-5)
    assert list(sums > 0) == [True] * 3 + [config.confidence is not None, config.selector_rank > 0]
    assert 0 < counted[-1] < counted[0] and (hits[0] > 0) == (config.selector_rank > 0) and hits[1] > 0
    np.testing.assert_allclose(metrics.loss, nats / tokens.size, rtol=2e-5)
    for found, wanted in ((metrics.agreed, agreed), (metrics.chained, chained), (metrics.counted, counted)):
        np.testing.assert_array_equal(found, wanted)


def cross_entropy(logit, share):
    return share * np.logaddexp(0, -logit) + (1 - share) * np.logaddexp(0, logit)


def test_anchors_are_positions_that_count_with_a_next_token_that_does():
    sample = jax.jit(block.sample_anchors, static_argnums=1)
    rng, seen = np.random.default_rng(0), set()
    mask = rng.integers(0, 2, (40, 12)).astype(np.float32)
    mask[0], mask[1] = 0, 1
    for count in (1, 4, 30):
        for seed in range(3):
            anchors, kept = jax.device_get(sample(mask, count, jax.random.split(jax.random.key(seed), 40)))
            assert anchors.shape == (40, min(count, 11)) and anchors.dtype == np.int32
            for row, found, used in zip(mask, anchors, kept, strict=True):
                valid = [p for p in range(11) if row[p] and row[p + 1]]
                chosen = [int(p) for p, one in zip(found, used, strict=True) if one]
                assert chosen == sorted(set(chosen)) and set(chosen) <= set(valid)
                assert len(chosen) == min(count, len(valid))
                assert not found[used == 0].any()
            seen |= {int(anchors[1, 0])} if count == 1 else set()
    assert len(seen) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ("dspark", "dflash", "dflash2", "jetspec"))
def test_the_loss_falls_and_the_draft_serves(target, name):
    """A text that repeats is learned, so that a draft of its target is accepted more often, and changes no token."""
    pattern = np.random.default_rng(1).integers(0, 60, (1, 7))
    texts = np.tile(np.concatenate([np.roll(pattern, -i, axis=1) for i in range(7)]), (1, 3))[:, :LENGTH].astype(
        np.int32
    )
    base = jspec.Model("small", TARGET, Params(target), None, ())
    kinds = {
        "dspark": {},
        "dflash": {**_FILL_IN, "cross_entropy": 1.0},
        "dflash2": {**_DFLASH2, "cross_entropy": 1.0, "distance": 0.0},
        "jetspec": {**_FILL_IN, "causal": True, "cross_entropy": 1.0, "distance": 0.0},
    }
    options = dict(block_size=4, num_layers=1, markov_rank=6, capture_layers=(1, 3), batch_tokens=56, anchors=8)
    options |= {"learning_rate": 1e-2, "progress": False, **kinds[name]}
    losses = []
    for steps in (2, 40):
        trained = draft.train_draft("dspark", base, texts, steps=steps, warmup=1, **options)
        assert trained.draft.drafter == "block"
        learner = BlockLearner(dataclasses.replace(RECIPE, anchors=8), "float32", trained.draft, TARGET)
        batch = distill.make_batch(learner, texts, None)
        losses.append(np.array(distill.measure(trained.params, None, batch, learner=learner).loss))
    assert (losses[1] < 0.7 * losses[0]).all()
    if name in ("dspark", "dflash2"):
        given = texts[:2, :5], np.full(2, 5, np.int32), jax.random.key(0)
        static = dict(target=TARGET, draft=trained.draft, max_new_tokens=8)
        plain, drafted = (
            jspec.generate_ids(trained.params, *given, drafter=drafter, **static) for drafter in (None, "block")
        )
        np.testing.assert_array_equal(plain.tokens, drafted.tokens)


def test_the_factor_of_the_targets_embedding_is_stated():
    """Layouts have other defaults, so a draft that is read again reads the rows that it was trained with."""
    config = BlockLearner.configure(families.KINDS["granite"], BlockShape(capture_layers=(1, 2)))
    assert (config.embed_scale, _configure().embed_scale) == (3.0, None)


def test_invalid_settings():
    for changes, message in (
        (dict(block_size=0), "block_size=0: must be from 1 to 64"),
        (dict(block_size=1, fill_in=True), "block_size=1: must be from 2 to 64"),
        (dict(markov="lstm"), "markov='lstm': must be one of vanilla, gated, rnn, none"),
        (dict(capture_layers=(3, 1)), r"capture_layers=\(3, 1\): must be ascending, each between 0 and 4"),
        (dict(capture_layers=None), "capture_layers=None: a target of 4 layers has no default"),
        (dict(mask_token=61), "mask_token=61: must be from 0 to 60"),
        (dict(markov_rank=0), "markov_rank=0: must be from 1 to"),
        (dict(selector_rank=6), "markov='vanilla': must be None with a selector"),
        (dict(_DFLASH2, conv_group_size=7), "conv_group_size=7: must divide hidden_size="),
        (dict(_DFLASH2, conv_kernel_size=5), "conv_kernel_size=5: must be from 1 to 4"),
        (dict(_DFLASH2, selector_top_k=65), "selector_top_k=65: must be from 1 to 64"),
    ):
        with pytest.raises(ValueError, match=message):
            _configure(**changes)
    with pytest.raises(ValueError, match="reach=0"):
        dataclasses.replace(RECIPE, reach=0.0)
    base = jspec.Model("small", TARGET, Params(None), None, ())
    with pytest.raises(ValueError, match=r"Block\(depth=5\): must be at most 4, the predictions of a block"):
        distill.check_evaluation(base, CONFIGS["dspark"], [], 5)
    with pytest.raises(TypeError, match="ttt_steps=3: no such argument; recipe options are anchors, clip, confidence"):
        draft.train_draft("dspark", base, np.zeros((2, 8), np.int32), steps=2, capture_layers=(1,), ttt_steps=3)
