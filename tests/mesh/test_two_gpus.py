"""Models over two GPUs of one process give what one GPU gives, through each entry point.

Eight CPU devices run the same points, and many more (`product_on_eight_devices.py`).
"""

import jax
import product
import pytest
import several

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not several.have_gpus(), reason=f"needs {several.PROCESSES} GPUs in JAX"),
]
POINTS = [
    product.on_two(*names)
    for names in (
        ("llama", "standalone", "tensor 2", "generate"),
        ("llama", "plain", "data 2", "generate_ids"),
        ("qwen3", "eagle", "tensor 2", "engine"),
        ("qwen3", "eagle", "data 2", "engine"),
        ("experts", "block", "data 2", "generate"),
        ("latents", "eagle", "tensor 2", "generate"),
        ("indexed latents", "ngram", "tensor 2", "generate_ids"),
        ("windows", "plain", "tensor 2", "engine"),
        ("windows and experts", "frozen_kv_mtp", "data 2", "generate"),
        ("sinks", "adaptive", "tensor 2", "generate"),
        ("states", "mtp", "tensor 2", "generate"),
        ("states and experts", "suffix", "data 2", "engine"),
    )
]
"""Each family and drafter, and each placement with each entry point.

MTP heads over latents are left out: for a float32 product of so small heads XLA finds no configuration without
autotuning, which tests turn off.
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return product.Checkpoints(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def reference(checkpoints):
    return product.references(checkpoints)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_two_gpus_give_what_one_gives(point, checkpoints, reference):
    model = checkpoints.load(point)
    assert {device for leaf in jax.tree.leaves(model.params) for device in leaf.devices()} == set(jax.devices()[:2])
    product.assert_same(product.ENTRIES[point.entry](model, point), reference(point), point)
