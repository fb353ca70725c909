"""Small models, tokens and masks of tests that train."""

import dataclasses

import jax
import numpy as np
import toy

from jspec.models import Llama
from tools.pretrain import model

TARGET = dataclasses.replace(
    toy.TARGET, intermediate_size=48, num_layers=4, head_dim=8, max_length=64, tie_embeddings=True
)
ONE_LAYER = dataclasses.replace(TARGET, num_layers=1, max_length=32)
TINY = Llama(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_length=32,
)
MASKED = dataclasses.replace(TINY, vocab_size=31, num_layers=2, tie_embeddings=True)
LENGTH = 12


def sharp_params(config):
    """Random weights with a large embedding, so that the model has sharp distributions."""
    params = model.init_params(config, jax.random.key(3))
    return dataclasses.replace(params, embed=jax.device_put(20 * np.array(params.embed)))


def random_tokens(rng, count=2):
    """Texts of `MASKED`."""
    return rng.integers(0, 31, (count, LENGTH), np.int32)


def random_mask(rng, last):
    """A mask in which `last` is the last token that counts."""
    mask = rng.integers(0, 2, (2, LENGTH)).astype(np.float32)
    mask[:, last], mask[:, last + 1 :] = 1, 0
    return mask


def widened(rng):
    """Four texts with their mask, and the same in a wider array with any tokens after their ends."""
    tokens, mask = random_tokens(rng, 4), np.concatenate([random_mask(rng, 9), random_mask(rng, 6)]).astype(np.uint8)
    wide = np.concatenate([tokens, random_tokens(rng, 4)[:, :5]], axis=1), np.pad(mask, ((0, 0), (0, 5)))
    return (tokens, mask), wide


def same(one, other):
    """Whether two trees of arrays are equal."""
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))
