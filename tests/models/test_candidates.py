"""LM heads that score candidates: what finds them, factors of a head, and its drafts and those of the whole head."""

import dataclasses
import functools

import eagle_files
import jax
import jax.numpy as jnp
import masked
import numpy as np
import pytest
import toy

import jspec
from jspec.checkpoints.files import CheckpointError
from jspec.core.types import Params
from jspec.drafters import Eagle
from jspec.drafters.hot_tokens import trim
from jspec.loading.model import Model
from jspec.models import candidates
from jspec.train.head import HeadLearner
from jspec.train.recipe import DraftRecipe

CONFIG = toy.CANDIDATES_HEAD
WHOLE = dataclasses.replace(CONFIG, rank=0, num_candidates=0)


@functools.cache
def model():
    """The toy target with an EAGLE-3 head."""
    return Model("toy", toy.TARGET, masked.head_params(WHOLE), None, (), WHOLE)


@pytest.mark.parametrize("size", (40, 511, 512, 5000))
def test_candidates_are_the_largest_logits_of_their_bins(size):
    logits = np.random.default_rng(size).normal(size=(2, 3, size)).astype(np.float32)
    index = np.array(candidates.find(jnp.asarray(logits), 8))
    bins = 256 if size >= 512 else size
    for row, few in zip(logits.reshape(-1, size), index.reshape(-1, 8), strict=True):
        best = [max(range(start, size, bins), key=row.__getitem__) for start in range(bins)]
        assert list(few) == sorted(best, key=row.__getitem__)[:-9:-1]
        # Few are lost.
        assert len({*few} & {*np.argsort(-row)[:8]}) >= 6


def test_the_largest_are_found_by_several_calls():
    scores = np.random.default_rng(0).normal(size=(2, 3, 200)).astype(np.float32)
    index = np.array(candidates.largest(jnp.asarray(scores), 2 * candidates.MOST + 5))
    np.testing.assert_array_equal(index, np.argsort(-scores, axis=-1)[..., : 2 * candidates.MOST + 5])


def test_factors_are_those_of_the_closest_product():
    """Eckart and Young: the squared error is the sum of the smaller squared singular values."""
    head = np.random.default_rng(0).normal(size=(12, 30)).astype(np.float32)
    values = np.linalg.svd(head, compute_uv=False)
    for rank in (1, 5, 12):
        small = candidates.factorize(jnp.asarray(head), rank)
        np.testing.assert_array_equal(small.rows, head.T)
        error = np.sum((head - np.array(small.down, np.float64) @ np.array(small.up, np.float64)) ** 2)
        np.testing.assert_allclose(error, np.sum(values[rank:] ** 2), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("drafter", (Eagle(depth=3), Eagle(depth=4, width=3, num_nodes=12)), ids=("chain", "tree"))
def test_the_same_text_from_candidates_and_the_same_rounds_from_all_tokens(drafter):
    for sampling in (None, jspec.Sampling(temperature=0.7)):
        options = dict(sampling=sampling, max_new_tokens=20, ignore_eos=True)
        ids = toy.PROMPTS
        expected = jspec.generate(model(), ids, drafter=None, **options)
        whole = jspec.generate(model(), ids, drafter=drafter, **options)
        every = jspec.generate(
            model().with_candidates(WHOLE.draft_vocab_size, rank=32), ids, drafter=drafter, **options
        )
        assert every.tokens == whole.tokens == expected.tokens
        np.testing.assert_array_equal(every.stats.rounds, whole.stats.rounds)
        few = jspec.generate(model().with_candidates(4, rank=2), ids, drafter=drafter, **options)
        assert few.tokens == expected.tokens and few.stats.rounds.sum() > whole.stats.rounds.sum()


def test_a_step_reads_the_factors_and_the_rows_of_candidates():
    small = model().with_candidates(16, rank=12)
    less = model().draft.step_bytes(model().params) - small.draft.step_bytes(small.params)
    assert less == 4 * (32 * 48 - 12 * (32 + 48) - 16 * 32)
    assert small.draft.summary() == "EAGLE-4 head"


@pytest.mark.parametrize(
    ("run", "message"),
    (
        (lambda m: m.with_candidates(49, rank=4), "candidates=49: must be from 1 to 48"),
        (lambda m: m.with_candidates(8, rank=33), "rank=33: must be from 1 to 32"),
        (lambda m: m.with_candidates(8, rank=4).with_candidates(8), "must be an EAGLE-3 head that scores all tokens"),
        (lambda m: m.with_draft(None).with_candidates(8), "must be an EAGLE-3 head that scores all tokens"),
        (
            lambda m: trim(m.with_candidates(8, rank=4).params, m.target, CONFIG, np.arange(61)),
            "the LM head scores candidates alone",
        ),
        (
            lambda m: jspec.generate(m.with_candidates(2, rank=4), [[1]], drafter=Eagle(width=3), max_new_tokens=1),
            r"Eagle\(width=3\): must be at most 2, the candidates of the head",
        ),
        (
            lambda m: HeadLearner.of(m.with_candidates(8, rank=4).draft, m.target, DraftRecipe(steps=2), "float32", 1),
            "an EAGLE-4 head cannot be trained",
        ),
    ),
)
def test_what_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run(model())


def test_a_shared_lm_head_is_factorized():
    weights = dataclasses.replace(model().params.draft, lm_head=None, ids=None)
    shared = dataclasses.replace(WHOLE, draft_vocab_size=61)
    both = Params(model().params.target, weights)
    small = dataclasses.replace(model(), params=both, draft=shared).with_candidates(16, rank=32)
    target = jax.device_get(both.target)
    head = target.embed if target.lm_head is None else target.lm_head.T
    np.testing.assert_array_equal(small.params.draft.candidates.rows, head)


def test_a_file_without_factors_has_those_of_its_lm_head(tmp_path):
    """As the authors' engine reads it; rows of padding do not count."""
    raw, stored = eagle_files.any_head(**eagle_files.EAGLE4)
    stored = {name: x for name, x in stored.items() if "efficient" not in name}
    head = candidates.factorize(jnp.asarray(stored["lm_head.weight"].T), 6)
    params = eagle_files.load(eagle_files.write(tmp_path / "head", raw, stored)).params.candidates
    for field in ("down", "rows", "up"):
        np.testing.assert_allclose(getattr(params, field), getattr(head, field), rtol=1e-5, atol=1e-6)
    wide = {**stored, "lm_head.weight": np.pad(stored["lm_head.weight"], ((0, 3), (0, 0)), constant_values=9)}
    sizes = {"vocab_size": eagle_files.V + 3, "draft_vocab_size": eagle_files.V + 3}
    with pytest.warns(UserWarning, match="taken for padding"):
        padded = eagle_files.load(eagle_files.write(tmp_path / "padded", {**raw, **sizes}, wide)).params.candidates
    np.testing.assert_array_equal(padded.down, params.down)
    weighted = {**raw["efficient_lm_head_config"], "type": "weighted_low_rank"}
    with pytest.raises(CheckpointError, match="type=weighted_low_rank: must be low_rank without the tensors"):
        eagle_files.load(eagle_files.write(tmp_path / "head", {**raw, "efficient_lm_head_config": weighted}, stored))
