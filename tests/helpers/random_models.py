"""Random weights for a configuration of any family, without files; and their arrays as `transformers` names them."""

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints import language_model
from jspec.checkpoints.tensors import TensorFiles, Tensors
from jspec.models.decoder import Decoder


class RandomTensors(Tensors):
    """A checkpoint that has a random tensor of any name and shape."""

    def __init__(self, seed):
        self.files, self.directory, self.dtype, self.asked = TensorFiles(), "nowhere", np.float32, set()
        self.seed = seed

    def names(self):
        return set()

    def expect(self, name, *shape):
        pass

    def stored(self, name, *shape):
        # By name, so that the order in which a family reads its tensors does not matter.
        values = np.random.default_rng([self.seed, zlib.crc32(name.encode())]).normal(size=shape)
        return values * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.2 * values


def random_weights(config: Decoder, seed: int = 0) -> Any:
    """Weights with a spread that keeps logits apart."""
    return language_model.family_by_config(config).read_params(config, RandomTensors(seed))


def weights_of(kinds: Mapping[str, Decoder]) -> Callable[..., Any]:
    """A function from a kind and a seed to random weights."""
    return functools.cache(lambda kind, seed=0: random_weights(kinds[kind], seed))


def arrays_of(config: Decoder, params: Any) -> dict[str, jax.Array]:
    """Weights as `transformers` would hold them, on the device."""
    family = language_model.family_by_config(config)
    return {name: jnp.asarray(array) for name, array in family.named_tensors(config, params)}
