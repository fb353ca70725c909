"""Caches are sized by the free memory; a generation that does not fit is an error that states how much fits."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
import toy

import jspec
from jspec.core import accept, decode
from jspec.core.types import Params
from jspec.drafters import Plain, Standalone
from jspec.engine import memory
from jspec.models import Llama
from pallas_kernels import platform

TEXT_AS_SHIPPED = True

STANDALONE = Standalone(depth=3).bind(toy.TARGET, toy.TARGET)
# Keys and values of 2 layers with 2 heads of 16 features, in float32. The draft has the shape of the target.
PER_TOKEN = 2 * 2 * 2 * 16 * 4


def both():
    """The weights of the target, also as those of the draft."""
    return Params(toy.params().target, toy.params().target)


def model():
    return jspec.Model("toy", toy.TARGET, both(), None, (), toy.TARGET)


@pytest.fixture
def free(monkeypatch):
    """A function that sets the free and total memory that the device reports."""

    def set_bytes(count, limit=1_000_000):
        monkeypatch.setattr(memory, "free_bytes", lambda device: (count, limit))

    return set_bytes


@pytest.mark.parametrize("page_size, rows", [(1, 40), (16, 48), (64, 64)])
def test_need_equals_the_size_of_the_arrays_of_prefill(page_size, rows):
    asked = memory.need(both(), toy.TARGET, STANDALONE, 3, 40, page_size)
    s = jax.eval_shape(partial(toy.start, STANDALONE, both(), page_size=page_size))
    assert asked.target == memory.tree_bytes(s.cache)
    assert asked.draft == memory.tree_bytes((s.draft.cache, s.draft.length))
    assert memory.tree_bytes(s.cache.pool) == 3 * rows * PER_TOKEN
    assert memory.tree_bytes(s.key) == 0, "NumPy does not know the size of keys"


def test_the_capacity_is_a_power_of_two_if_that_fits_otherwise_the_minimum(free):
    asked = (toy.params(), toy.TARGET, Plain(), 2, 1)
    free(2 * 128 * (PER_TOKEN + 4) + 50_000)
    assert memory.fit(*asked, 128, 70) == 128
    free(2 * 128 * (PER_TOKEN + 4) + 50_000 - 1)
    assert memory.fit(*asked, 128, 70) == 70


def test_a_generation_that_does_not_fit_is_an_error(free):
    free(300_000)
    with pytest.raises(ValueError, match="this generation does not fit") as raised:
        jspec.generate(model(), [[1] * 9] * 2, drafter=Standalone(depth=3), max_new_tokens=300)
    text = str(raised.value)
    assert "2 sequences of 309 tokens take" in text
    fits = int(re.search(r"tokens fit: (\d+) in each of 2 sequences", text)[1])
    out = jspec.generate(model(), [[1] * 9] * 2, drafter=Standalone(depth=3), max_new_tokens=fits - 64 - 9)
    assert len(out.tokens[0]) == fits - 64 - 9, "minus the rest of a page"


def test_allocation_errors_get_a_note(monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: "cpu")
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.")
    memory.explain(error, memory.Need(8, 4096, 4_000_000_000, 500_000_000))
    assert error.__notes__ == [
        "jspec: 8 sequences of 4096 tokens take 4.50 GB, 137,329 bytes per token: 4.00 GB for the target's cache and "
        "0.50 GB for the draft's, in addition to weights and activations"
    ]
    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    memory.explain(error, memory.Need(1, 1, 1, 1))
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in error.__notes__[1]
    other = jax.errors.JaxRuntimeError("INTERNAL: something else")
    memory.explain(other, memory.Need(1, 1, 1, 1))
    assert not hasattr(other, "__notes__")


def test_a_cpu_does_not_report_its_memory():
    if jax.default_backend() != "cpu":
        pytest.skip("needs a CPU as JAX's default backend")
    assert memory.free_bytes() is None


WIDE = Llama(
    vocab_size=64,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=4,
    num_heads=4,
    num_kv_heads=1,
    head_dim=64,
    max_length=4096,
)


@pytest.mark.slow
@pytest.mark.parametrize("depth", (0, 3), ids=("plain", "standalone"))
def test_no_second_copy_of_weights_is_ever_made(depth):
    """The temporary memory of the loop is small compared with the weights. test_program.py checks the cache pools."""
    weights = toy.random_params(WIDE)
    params = Params(weights, weights if depth else None)
    drafter = Standalone(depth=depth).bind(WIDE, WIDE) if depth else Plain()
    ids = jnp.ones((1, 16), jnp.int32)
    one = jnp.full(1, 16, jnp.int32)
    keys, stop = jax.random.split(jax.random.key(0), 1), decode.stopping.init(None, 1)
    static = {"target": WIDE, "drafter": drafter, "accept": accept.greedy}
    s = decode.jitted_prefill(params, ids, one, one + 64, keys, stop, **static, capacity=80, page_size=16)
    loop = decode.decode.lower(params, s, jnp.int32(9), **static).compile()
    used = loop.memory_analysis()
    assert used.alias_size_in_bytes >= (1 + bool(depth)) * s.cache.pool.nbytes, (
        "the result does not reuse the donated state"
    )
    assert used.temp_size_in_bytes < memory.tree_bytes(weights) / 4
