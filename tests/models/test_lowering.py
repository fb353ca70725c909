"""A model's kernels are lowered once, however many layers call them: they take most of the time before compilation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
import toy
from crosslower import cross_lower

from jspec.core.types import DraftTree
from pallas_kernels import platform

SHAPE = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}


def kernels(target, where, monkeypatch):
    """How many kernels a forward contains."""
    monkeypatch.setattr(platform, "platform", lambda: {"cuda": "gpu"}.get(where, where))
    params = target.param_shapes(jnp.bfloat16)
    cache = jax.eval_shape(functools.partial(target.init_cache, batch=2, capacity=64, page_size=16), params)
    nodes = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    start = jax.ShapeDtypeStruct((2,), jnp.int32)

    def forward(params, tokens, cache, start):
        return target.forward(params, DraftTree(tokens, None), cache, start)

    return cross_lower(forward, where, params, nodes, cache, start).count("custom_call @")


@pytest.mark.fast("cuda-True", "tpu-False")
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("where", "exact"), [("cuda", False), ("cuda", True), ("tpu", False)])
def test_more_layers_have_no_more_kernels(where, exact, monkeypatch):
    target = dataclasses.replace(toy.TARGET, **SHAPE, exact=exact)
    few, many = (kernels(dataclasses.replace(target, num_layers=count), where, monkeypatch) for count in (2, 6))
    assert 0 < few == many
