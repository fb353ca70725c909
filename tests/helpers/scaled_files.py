"""Models that are stored with scaled matrices, and what is read from their files."""

import dataclasses

import deepseek
import jax
import numpy as np
import toy

from jspec.checkpoints.safetensors_file import SafetensorFiles
from jspec.models.moe import Routed, RoutedParams
from jspec.models.quantized import is_matrix, widen
from jspec.models.router import Router

EXPERTS = dataclasses.replace(
    toy.TARGET,
    experts=Routed(Router(count=4, chosen=2, normalize=True), width=24, shared_width=0),
    dense_layers=(1,),
)


def expert_weights():
    rng, made = np.random.default_rng(3), toy.random_params(EXPERTS)

    def matrix(*shape):
        return (rng.normal(size=shape) * shape[-2] ** -0.5).astype(np.float32)

    first, *others = made.layers
    experts = RoutedParams(matrix(4, 32), None, matrix(4, 32, 48), matrix(4, 24, 32))
    first = dataclasses.replace(first, experts=experts, gate_up=None, down=None)
    return dataclasses.replace(made, layers=(first, *others))


MODELS = {
    "llama": (toy.TARGET, lambda: toy.random_params(toy.TARGET)),
    "experts": (EXPERTS, expert_weights),
    "latents": (deepseek.MLA, lambda: deepseek.params("mla")),
}


def load_file(path):
    """The tensors of a file; the reader of safetensors has no fp8."""
    files = SafetensorFiles(path.parent)
    return {name: files.get(name) for name in files.names()}


def is_linear(name):
    kept = ("embed_tokens", "norm", "lm_head", "mlp.gate.weight")
    return name.endswith(".weight") and not any(part in name for part in kept)


def values(params):
    return jax.tree_util.tree_leaves_with_path(jax.tree.map(widen, params, is_leaf=is_matrix))


def assert_close_in_int8(narrow, wide):
    """Each matrix of a draft that was stored in int8 is within half a step of the original, and some stay narrow."""
    leaves = [jax.tree.leaves(params, is_leaf=is_matrix) for params in (narrow, wide)]
    assert jax.tree.structure(wide) == jax.tree.structure(jax.tree.map(widen, narrow, is_leaf=is_matrix))
    assert any(is_matrix(leaf) for leaf in leaves[0])
    for stored, original in zip(*leaves, strict=True):
        if original.ndim == 2:
            largest = np.maximum(*(np.abs(original).max(axis=axis, keepdims=True) for axis in (0, 1)))
            assert (np.abs(widen(stored) - original) <= largest * 0.501 / 127).all()
        else:
            np.testing.assert_array_equal(stored, original)
