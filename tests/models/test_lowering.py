"""A model's kernels are lowered once, however many layers call them: they take most of the time before compilation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
import toy
from crosslower import cross_lower

from jspec.core.types import DraftTree
from jspec.models import layers
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("where", "exact"), [("cuda", False), ("cuda", True), ("tpu", False)])
def test_more_layers_have_no_more_kernels(where, exact, monkeypatch):
    target = dataclasses.replace(toy.TARGET, **SHAPE, exact=exact)
    few, many = (kernels(dataclasses.replace(target, num_layers=count), where, monkeypatch) for count in (2, 6))
    assert 0 < few == many


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("starts", (False, True))
@pytest.mark.parametrize(("where", "exact"), [("cuda", False), ("cuda", True), ("tpu", False)])
def test_a_forward_has_gradients(where, exact, starts, monkeypatch):
    """On a GPU and on a TPU, of a whole text and of nodes after committed ones: those of a trainer's loss."""
    monkeypatch.setattr(platform, "platform", lambda: {"cuda": "gpu"}.get(where, where))
    target = dataclasses.replace(toy.TARGET, **SHAPE, exact=exact)
    params = target.param_shapes(jnp.bfloat16)
    cache = jax.eval_shape(functools.partial(target.init_cache, batch=2, capacity=64, page_size=16), params)
    start = jax.ShapeDtypeStruct((2,), jnp.int32) if starts else None

    def loss(params, tokens, cache, start):
        out = target.forward(params, DraftTree(tokens, None), cache, start)
        return jax.nn.logsumexp(out.logits.astype(jnp.float32), -1).sum()

    lowered = cross_lower(jax.grad(loss), where, params, jax.ShapeDtypeStruct((2, 8), jnp.int32), cache, start)
    assert lowered.count("custom_call @") > 0


@pytest.mark.parametrize(("batch", "kernel"), [(32, True), (8, False)])
@pytest.mark.parametrize("activation", (jax.nn.silu, layers.gelu))
def test_the_gate_of_many_tokens_is_a_kernel_of_its_own(activation, batch, kernel, monkeypatch):
    """At the shape of a large model, whose tiles occupy the device."""
    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    shapes = (batch, 6, 4096), (4096, 2 * 14336), (14336, 4096)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    text = str(jax.make_jaxpr(functools.partial(layers.gated_mlp, activation=activation))(*args))
    assert text.count("dot_general[") == (1 if kernel else 2), "that of the kernel is another primitive"
