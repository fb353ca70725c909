"""Tokens that do not count contribute nothing: gradients and metrics are those of the tokens that count."""

import extras  # noqa: F401
import jax
import numpy as np
import pytest
from train_models import LENGTH, random_mask, random_tokens, same, sharp_params, widened
from train_models import MASKED as TARGET

from jspec.core.types import Params
from jspec.train import batches, distill, ttt
from jspec.train.assistant import AssistantLearner
from jspec.train.head import HeadLearner
from jspec.train.recipe import AssistantShape, DraftRecipe, HeadShape

STEPS = 3
RECIPE = DraftRecipe(steps=4, batch_tokens=24, length=LENGTH, warmup=1, ttt_steps=STEPS)
LEARNERS = {
    "eagle3": HeadLearner.make(TARGET, HeadShape(capture_layers=(1, 2), draft_vocab_size=28), RECIPE, "float32"),
    "frozen-kv-mtp": AssistantLearner.make(TARGET, AssistantShape(num_layers=1), RECIPE, "float32"),
}
VOCABULARIES = {"eagle3": np.arange(3, 31, dtype=np.int32), "frozen-kv-mtp": None}
"""The target's ids of the tokens of each draft; None: all."""


@pytest.fixture(scope="module")
def target():
    return sharp_params(TARGET)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(LEARNERS))
def test_only_counted_tokens_teach_a_draft(target, kind):
    """The target's distribution of a token that does not count is unread, and so is text after the last that does."""
    draft, ids = LEARNERS[kind], VOCABULARIES[kind]
    params = distill.init(draft, target, ids).params

    @jax.jit
    def gradient(params, tokens, logits, rows):
        def total(params):
            observed = draft.observe(draft.run_target(target, tokens))
            targets = ttt.make_targets(logits, ids)
            found = draft.unroll(Params(target, params), tokens, observed, targets, rows)
            return draft.total(found.loss), found

        return jax.grad(total, has_aux=True)(params)

    for seed in range(2):
        rng = np.random.default_rng(seed)
        last = int(rng.integers(4, LENGTH - 1))
        tokens, mask = random_tokens(rng), random_mask(rng, last)
        logits = rng.normal(size=(2, LENGTH, 31)).astype(np.float32)
        rows = ttt.row_mask(mask)
        expected = gradient(params, tokens, logits, rows)
        assert expected[1].counted.tolist() == [int(mask[:, k + 2 :].sum()) for k in range(STEPS)]
        # The logits at j are the target's distribution of the token at j + 1.
        unread = np.pad(mask, ((0, 0), (0, 1)))[:, 1:, None] == 0
        changed = np.where(unread, logits[:, :, ::-1], logits)
        after = np.where(np.arange(LENGTH) >= last, (tokens + 7) % 31, tokens)
        assert not np.array_equal(changed, logits) and not np.array_equal(after, tokens)
        assert same(gradient(params, after, changed, rows), expected)
        # What counts does have an effect: the token before the last one, and the distribution of the last.
        before = np.where(np.arange(LENGTH) == last - 1, (tokens + 7) % 31, tokens)
        assert not same(gradient(params, before, logits, rows)[0], expected[0])
        other = np.where(np.arange(LENGTH)[:, None] == last - 1, logits[:, :, ::-1], logits)
        assert not same(gradient(params, tokens, other, rows)[0], expected[0])


@pytest.mark.slow
def test_heldout_metrics_do_not_depend_on_padding(target):
    """Sequences in a wider array, with any tokens after their ends, have the same metrics."""
    texts = widened(np.random.default_rng(0))
    learner = LEARNERS["eagle3"]
    params = Params(target, distill.init(learner, target, VOCABULARIES["eagle3"]).params)
    ids = VOCABULARIES["eagle3"]
    narrow, wider = (distill.agreement(params, batches.Source(x, mask=y), learner, ids) for x, y in texts)
    for name, value in narrow.items():
        np.testing.assert_allclose(wider[name], value, rtol=1e-5)


def test_batches_carry_their_masks():
    rng = np.random.default_rng(1)
    tokens, mask = rng.integers(0, 31, (9, 6)).astype(np.uint16), rng.integers(0, 2, (9, 6)).astype(np.uint8)
    mask[:, -1] = 1
    sources = (batches.Source(tokens, 0.5, mask=mask), batches.Source(np.arange(100, dtype=np.uint16), 0.5))
    by_row = {row.tobytes(): counted for row, counted in zip(tokens.astype(np.int32), mask, strict=True)}
    masked = 0
    for step in range(30):
        batch, counted = batches.sample(sources, seed=2, step=step, batch_tokens=20, length=5)
        assert np.array_equal(batch, batches.sample(sources, seed=2, step=step, batch_tokens=20, length=5)[0])
        if counted is None:
            assert (np.diff(batch, axis=1) == 1).all()
            continue
        masked += 1
        assert all(np.array_equal(by_row[row.tobytes()], found) for row, found in zip(batch, counted, strict=True))
    assert 5 < masked < 25
    learner = HeadLearner.make(TARGET, HeadShape(capture_layers=(1,), draft_vocab_size=3), RECIPE, "float32")
    once = np.zeros((9, 6), np.uint8)
    once[2, :3] = 1
    common = learner.vocabulary((batches.Source(tokens, mask=once),))
    assert {*tokens[2, :3].tolist()} <= {*common.tolist()}


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.ones((3, 4), np.uint8), ValueError, r"is uint8\[3, 4\]; must be \[2, 4\], one value per token"),
        (np.ones((2, 4), np.float32), TypeError, "must be 0 and 1, which are ints or bools"),
        (np.full((2, 4), 2), ValueError, "has values from 2 to 2; must be 0 or 1"),
        (np.zeros((2, 4), bool), ValueError, "is 0 for all tokens; at least one must count"),
    ],
)
def test_masks_that_do_not_fit(mask, error, message):
    with pytest.raises(error, match=f"the mask of sequences: .*{message}"):
        batches.Source(np.ones((2, 4), np.uint16), name="sequences", mask=mask)
    with pytest.raises(ValueError, match="only sequences have masks"):
        batches.Source(np.ones(4, np.uint16), mask=np.ones(4, np.uint8))
