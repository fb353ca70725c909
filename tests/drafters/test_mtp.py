"""MTP heads: the state of the drafter between rounds equals one pass over the whole text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jspec.core import tree
from jspec.drafters import Eagle, Mtp
from jspec.models import MtpHeads
from jspec.models.layers import ForwardBatch

TARGET, HEADS = toy.TARGET, toy.HEADS


@pytest.fixture(scope="module")
def read_all():
    """The predictions of the heads after a text, each from the whole text, without a cache, and each head's rows."""

    def predict(params, text):
        rows = text.shape[1] - 1
        cache = TARGET.init_cache(params.target, 1, 4, 4)
        out = TARGET.forward(
            params.target, tree.chain(text[:, :-1]), cache, None, capture_layers=(TARGET.num_layers + 1,)
        )
        assert out.hidden is not None
        feature, position, drafts, pairs = out.hidden, jnp.arange(rows, dtype=jnp.int32)[None], [], []
        for index in range(HEADS.count):
            head = HEADS.head(index, TARGET)
            cache = head.init_cache(params.draft, 1, 4, 4)
            known = jnp.concatenate([text, *drafts], axis=1)[:, 1 + index : 1 + index + rows]
            feature, (pair,) = head.read(params, TARGET, ForwardBatch(known, position, cache, None), feature)
            pairs.append(pair)
            logits = head.unembed(params, TARGET, feature[:, -1:])
            drafts.append(jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)[:, None])
        return jnp.concatenate(drafts, axis=1), pairs

    return jax.jit(predict)


def check_rows(cache, row, pair, count):
    """The first rows of a head's cache are those of a pass over the whole text: hidden states are those of the text."""
    pool, pages = np.array(cache.pool), np.array(cache.page_table)[row]
    for kept, expected in zip(pool[0, :, pages].swapaxes(0, 1), pair, strict=True):
        flat = kept.reshape(-1, *kept.shape[2:])
        np.testing.assert_allclose(flat[:count], expected[0, :count], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", (None, 2))
def test_proposals_are_those_of_a_pass_over_the_whole_text(read_all, chunk):
    drafter, params = toy.bound_drafters()["mtp"], toy.mtp_params()
    s = toy.start(drafter, params, limit=[30, 17, 21], chunk=chunk)
    for until in (0, 1, 2, 5, 9):
        s = toy.run(drafter, params, s, until)
        proposed = np.concatenate([np.array(p.tokens[:, 0]) for p in s.draft.proposals], axis=1)
        for row, length in enumerate(np.array(s.length)):
            if not s.done[row]:
                expected, pairs = read_all(params, s.tokens[row : row + 1, :length])
                np.testing.assert_array_equal(proposed[row], expected[0])
                for index, (cache, pair) in enumerate(zip(s.draft.caches, pairs, strict=True)):
                    check_rows(cache, row, pair, max(length - 1 - index, 0))
    assert s.done.any() and not s.done.all()


def test_a_single_head_is_used_like_an_eagle_head():
    bound = Mtp(depth=4, width=2, heads=1).bind(TARGET, HEADS)
    assert bound == Eagle(depth=4, width=2).bind(TARGET, HEADS.head(0, TARGET))
    assert bound == Mtp(depth=4, width=2).bind(TARGET, dataclasses.replace(HEADS, count=1))
    assert bound.capture_layers == (TARGET.num_layers + 1,)


def test_by_default_a_chain_has_one_token_per_head():
    two = dataclasses.replace(HEADS, count=2)
    assert Mtp().bind(TARGET, two) == Mtp(depth=2).bind(TARGET, HEADS).bind(TARGET, two)
    assert Mtp(heads=2).bind(TARGET, HEADS).depth == 2
    assert Mtp(heads=1).bind(TARGET, HEADS) == Mtp(depth=3, heads=1).bind(TARGET, HEADS)


@pytest.mark.parametrize(
    ("drafter", "draft", "message"),
    (
        (Mtp(), None, "needs the heads of the target's own checkpoint as draft, but none is loaded"),
        (Mtp(), toy.DRAFT, "but the loaded draft is of type Llama"),
        (Mtp(heads=4), HEADS, r"Mtp\(heads=4\): the checkpoint has 3"),
        (Mtp(depth=4), HEADS, "3 heads propose a chain of 3 tokens; set depth=3 and width=1, or heads=1"),
        (Mtp(depth=2, heads=3), HEADS, "3 heads propose a chain of 3 tokens"),
        (Mtp(depth=3, width=2), HEADS, "set depth=3 and width=1"),
        (Mtp(), MtpHeads(toy.DRAFT, 3), "hidden size 16, but this target has"),
    ),
)
def test_heads_that_do_not_fit_are_refused(drafter, draft, message):
    with pytest.raises(ValueError, match=message):
        drafter.bind(TARGET, draft)


def test_invalid_configurations_are_refused():
    with pytest.raises(ValueError, match=r"Mtp\(heads=0\)"):
        Mtp(heads=0)
    with pytest.raises(ValueError, match="num_layers=2: must be 1"):
        MtpHeads(TARGET, 1)
    with pytest.raises(ValueError, match="count=0"):
        MtpHeads(HEADS.layer, 0)
