"""Models that are stored with scaled matrices, and what is read from their files."""

import dataclasses
import json

import deepseek
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_targets
import toy
from safetensors.numpy import save_file

import jspec
from jspec.checkpoints import language_model
from jspec.checkpoints.safetensors_file import SafetensorFiles
from jspec.loading import memory
from jspec.models.layers import ForwardBatch
from jspec.models.moe import Routed, Router
from jspec.models.quantized import is_matrix, widen

EXPERTS = dataclasses.replace(
    toy.TARGET, experts=Routed(Router(count=4, chosen=2, normalize=True), width=24, shared_width=0), dense_layers=(1,)
)


PROMPTS = toy.PROMPTS
MODELS = {
    "llama": (toy.TARGET, lambda: toy.random_params(toy.TARGET)),
    "experts": (EXPERTS, lambda: tiny_targets.weights(EXPERTS, 3)),
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


def equal(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(
        jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b)
    )


def assert_same_values(got, expected, **tolerance):
    """Weights, widened where they are quantized, are equal. tolerance: of vectors."""
    for (path, x), (_, y) in zip(values(got), values(expected), strict=True):
        bounds = tolerance if tolerance and x.ndim == 1 else {"rtol": 0, "atol": 0}
        np.testing.assert_allclose(x, y, **bounds, err_msg=jax.tree_util.keystr(path))


def assert_same_logits(narrow, wide):
    """Quantized weights give the logits of the widened ones."""
    config = narrow.target
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, (2, 9)), jnp.int32)

    @jax.jit
    def logits(params):
        cache = config.init_cache(params, 2, 16, 4)
        batch = ForwardBatch(tokens, jnp.arange(9, dtype=jnp.int32)[None], cache, None)
        return config.apply(params, batch).logits

    got, expected = (np.asarray(logits(model.params.target)) for model in (narrow, wide))
    np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max())


def assert_same_rounds(narrow, wide, prompts, drafter, *, above, **options):
    """Quantized weights give the drafted tokens and rounds of the widened ones. above: a bound of the accept length."""
    plain = jspec.generate(narrow, prompts, drafter=None, **options)
    runs = [jspec.generate(model, prompts, drafter=drafter, **options) for model in (narrow, wide)]
    assert runs[0].tokens == runs[1].tokens == plain.tokens
    np.testing.assert_array_equal(runs[0].stats.rounds, runs[1].stats.rounds)
    assert runs[0].stats.accept_length > above


def assert_stored_bytes_are_counted(directory, monkeypatch):
    """A model loads if its weights as they are stored just fit, and not with a byte less."""
    size = memory.tree_bytes(jspec.load(directory).params)
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: (size, 10**9))
    jspec.load(directory)
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: (size - 1, 10**9))
    with pytest.raises(ValueError, match="do not fit"):
        jspec.load(directory)


def store(path, config, params, method, change):
    """Writes a checkpoint with quantized matrices in `narrow`, and one with their values in float32 in `wide`.

    method: the quantization_config of the first.
    change: gives the tensors in place of one, and its value in float32; None: it stays as it is.
    """
    for kind in ("narrow", "wide"):
        language_model.save(path / kind, config, params, dtype="float32")
    stored = {"narrow": {}, "wide": {}}
    for name, tensor in load_file(path / "wide" / "model.safetensors").items():
        tensors, stored["wide"][name] = change(name, tensor) or ({name: tensor}, tensor)
        stored["narrow"] |= tensors
    for kind, tensors in stored.items():
        save_file(tensors, path / kind / "model.safetensors", metadata={"format": "pt"})
    configure(path / "narrow", method)
    return path


def configure(directory, method):
    """Changes the quantization_config of a checkpoint."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": method}))


def damaged(source, directory, tensors=None, **config):
    """A copy of a checkpoint with other tensors, removed by None, and other keys of config.json."""
    raw = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | config))
    stored = load_file(source / "model.safetensors") | (tensors or {})
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, directory / "model.safetensors")
    return directory


def assert_close_in_int8(narrow, wide):
    """Each matrix of a draft that was stored in int8 is within half a step of the original, and some stay narrow."""
    leaves = [jax.tree.leaves(params, is_leaf=is_matrix) for params in (narrow, wide)]
    assert jax.tree.structure(wide) == jax.tree.structure(jax.tree.map(widen, narrow, is_leaf=is_matrix))
    assert any(is_matrix(leaf) for leaf in leaves[0])
    for stored, original in zip(*leaves, strict=True):
        if original.ndim == 2:
            largest = np.maximum(*(np.abs(original).max(axis=axis, keepdims=True) for axis in (0, 1)))
            assert (np.abs(widen(stored) - original) <= largest * 0.501 / 127).all()
        elif original.ndim == 3:  # A part of a matrix that is widened when it is read.
            assert (np.abs(stored - original) <= np.abs(original).max() * 0.501 / 127 * 2).all()
        else:
            np.testing.assert_array_equal(stored, original)
