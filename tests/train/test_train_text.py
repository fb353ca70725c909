"""`jspec train text`: the target's own text, greedy and sampled, and how it was made."""

import dataclasses

import jax
import numpy as np
import pytest
from train_models import ONE_LAYER as MODEL

from jspec.train import text
from jspec.train.text import Sampled
from tools.pretrain import model

LOGITS = jax.jit(model.logits, static_argnums=(0, 3))


@pytest.mark.slow
def test_complete_returns_the_models_greedy_output():
    params = model.init_params(MODEL, jax.random.key(3))
    prompts = [[5, 9, 2], [7], [1, 1, 1, 1, 1]]
    rows = text.complete(MODEL, params, prompts, width=12, batch=3)
    assert rows.dtype == np.uint16 and rows.shape == (3, 12)
    for row, prompt in zip(rows, prompts, strict=True):
        assert row[: len(prompt)].tolist() == prompt
        choices = np.argmax(LOGITS(MODEL, params, row[None].astype(np.int32), "float32"), axis=-1)[0]
        assert choices[len(prompt) - 1 : -1].tolist() == row[len(prompt) :].tolist()


@pytest.mark.slow
def test_some_texts_are_sampled():
    """As many as asked for, whatever the batch; the others are those of greedy decoding."""
    params = model.init_params(MODEL, jax.random.key(3))
    prompts = [[5, 9, 2], [7], [1, 1, 1, 1, 1], [4, 4]]
    greedy = text.complete(MODEL, params, prompts, width=24, batch=4)
    mixed = text.complete(MODEL, params, prompts, width=24, batch=4, sampled_share=0.5, seed=1)
    assert (mixed != greedy).any(1).sum() == 2
    again = text.complete(MODEL, params, prompts, width=24, batch=3, sampled_share=0.5, seed=1)
    np.testing.assert_array_equal(again, mixed)
    assert (text.complete(MODEL, params, prompts, width=24, batch=4, sampled_share=0.5, seed=2) != mixed).any()


def test_how_texts_were_made_is_beside_them(tmp_path):
    path = tmp_path / "rows.npy"
    assert Sampled.read(path) is None
    Sampled(sampled_share=0.5, seed=7).write(path)
    assert Sampled.read(path) == Sampled(sampled_share=0.5, seed=7)
    for damaged in ("{", "[]", '{"sampled_share": 2, "seed": 0}', '{"seed": 0}'):
        (tmp_path / "rows.json").write_text(damaged)
        with pytest.raises(ValueError, match="rows.json: not what `jspec train text` writes"):
            Sampled.read(path)


@pytest.mark.slow
def test_large_vocabularies_have_32_bit_ids():
    """As in the vocabularies of Llama 3, Qwen3 and Gemma 4."""
    config = dataclasses.replace(MODEL, hidden_size=16, vocab_size=70_000)
    rows = text.complete(config, model.init_params(config, jax.random.key(3)), [[69_999, 65_536]], width=4, batch=1)
    assert rows.dtype == np.uint32 and rows[0, :2].tolist() == [69_999, 65_536]


def test_widths_that_do_not_fit():
    params = model.init_params(MODEL, jax.random.key(0))
    with pytest.raises(ValueError, match="width=33: exceeds the model's context of 32 tokens"):
        text.complete(MODEL, params, [[1]], width=33, batch=1)
    with pytest.raises(ValueError, match="prompts of up to 12 tokens: must have 1 to 11"):
        text.complete(MODEL, params, [[1] * 12], width=12, batch=1)
