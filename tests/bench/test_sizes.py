"""The page of sizes: how many GPUs hold a model and a cache."""

import dataclasses

import jax.numpy as jnp
import pytest
import sizes

from jspec.bench.presets import PRESETS
from jspec.models.quantized import quantize_shapes

LAYERS = 2
"""A few layers of a model have the sizes of its layers, and are fast to count."""


def few_layers(name, **changes):
    return dataclasses.replace(PRESETS[name].target, num_layers=LAYERS, **changes)


@pytest.mark.parametrize(("share", "devices"), ((1.01, 1), (0.99, 2), (0.51, 2), (0.49, 4), (0.01, None)))
def test_the_fewest_devices_whose_memory_suffices(share, devices):
    """Everything but norms is split, so half of the memory suffices on two."""
    target = few_layers("llama-3.1-8b")
    width, keys, mlp = 4096, 1024, 14_336
    layer = 2 * width * width + 2 * width * keys + 3 * width * mlp + 2 * width
    bytes_ = 2 * (2 * 128_256 * width + width + LAYERS * layer)
    cache = 2 * LAYERS * 2 * keys * (sizes.CONTEXT + 16)  # A page more is the one that nobody has.
    memory = share * (bytes_ + cache) / sizes.USABLE
    assert sizes.fewest(target, target.param_shapes(jnp.bfloat16), memory) == devices


def test_a_number_of_devices_that_divides_nothing_does_not_count():
    """Blocks of 128 rows are not divided, nor heads of queries."""
    target = few_layers("llama-3.1-8b", intermediate_size=3 * 128)
    shapes = target.param_shapes(jnp.bfloat16)
    packed = quantize_shapes(shapes, "int4")
    assert sizes.fewest(target, packed, 1e6) is None and sizes.fewest(target, packed, 80e9) == 1
    assert sizes.fewest(target, shapes, 2e9) == 2
    assert sizes.fewest(target, packed, 1.5e9) is None
