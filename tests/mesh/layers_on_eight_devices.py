"""Models whose layers differ, over devices: windows, sinks, shared keys, and assistants that read the target's keys.

test_mesh.py runs these tests in a process with eight CPU devices.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import on_eight_devices as split
import pytest
import tiny_targets as tiny
import toy
from random_models import random_weights
from safetensors.numpy import load_file, save_file

import jspec
from jspec.checkpoints import drafts, language_model
from jspec.drafters import FrozenKvMtp, Ngram
from jspec.generation.run import Run
from jspec.loading import memory
from jspec.models import Assistant
from jspec.models.assistant import Clusters
from jspec.models.quantized import widen
from jspec.models.sizes import tree_bytes

slow = pytest.mark.slow
directories, load = split.directories, split.load
SHAPE = dict(vocab_size=64, hidden_size=48, target_hidden_size=32, intermediate_size=64, num_heads=4)
ASSISTANTS = {
    "windows": Assistant(**SHAPE, target_layers=(2, 3), head_dims=(8, 16), clusters=Clusters(16, 5)),
    "windows and experts": Assistant(**SHAPE, target_layers=(1, 0), head_dims=(16, 8)),
}
"""Assistants of targets, with an LM head in clusters and a whole one."""


@pytest.fixture(scope="module")
def load_assistant(directories, tmp_path_factory):
    """A function that loads a target with its assistant."""
    root = tmp_path_factory.mktemp("assistants")

    def loaded(name, **options):
        config, path = ASSISTANTS[name], root / name.replace(" ", "_")
        if not path.exists():
            made = toy.random_assistant(config)
            made = toy.in_clusters(config, made) if config.clusters else made
            drafts.save(path, config, made, dtype="float32")
        return jspec.load(directories(name), draft=path, **options)

    return loaded


def assert_same_state(got, expected):
    """Compares all caches and the state of the drafter: only committed rows are written, so whole pools are equal."""
    states = [(run.state.cache, run.state.draft) for run in (got, expected)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    compared = 0
    for x, y in zip(*map(jax.tree.leaves, states), strict=True):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        x, y = np.asarray(x), np.asarray(y)
        if x.shape != y.shape:  # several devices have copies of a head
            y = np.repeat(y, x.shape[-2] // y.shape[-2], axis=-2)
        np.testing.assert_allclose(x, y, atol=5e-5)
        compared += x.size
    assert compared


@slow
def test_an_assistant_in_clusters_drafts_as_on_one_device(load_assistant):
    """Tokens, rounds, log-probabilities, and the rows of all caches."""
    one, two = load_assistant("windows"), load_assistant("windows", tensor=2)
    assert two.placement.draft and two.draft.tensor == 2
    # Longer than a window of 8 tokens.
    options = dict(drafter=FrozenKvMtp(depth=2), max_new_tokens=20, seed=7, logprobs=True, **tiny.KINDS["rejection"])
    runs = [Run(model, tiny.PROMPTS, jspec.GenerateOptions(**options)) for model in (two, one)]
    got, expected = (run.finish() for run in runs)
    split.assert_same(got, expected)
    assert_same_state(*runs)
    for leaf in jax.tree.leaves(runs[0].state.cache):
        if leaf.ndim == 6:
            assert leaf.addressable_shards[0].data.shape[4] * 2 == leaf.shape[4]


def test_an_assistant_is_split_with_its_target(load_assistant, tmp_path, monkeypatch):
    """What is not possible is an error before the target is read."""
    model, placed = load_assistant("windows and experts", tensor=4), set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params.draft):
        assert leaf.sharding.device_set == set(jax.devices()[:4])
        placed |= set() if leaf.sharding.is_fully_replicated else {path[-1].name}
    assert placed == {"qkv", "o", "gate_up", "down", "head"}
    with pytest.raises(ValueError, match="the weights are split over 4 devices"):
        drafts.save(tmp_path / "copy", model.draft, model.params.draft)
    monkeypatch.setattr("jspec.checkpoints.family.Family.read_params", None)
    given = dict(tensor=4, draft_tensor=False)
    with pytest.raises(ValueError, match="draft_tensor=False: .* reads keys and values of the target, and is split as"):
        load_assistant("windows and experts", **given)
    odd = dataclasses.replace(ASSISTANTS["windows and experts"], intermediate_size=66)
    drafts.save(tmp_path / "odd", odd, toy.random_assistant(odd), dtype="float32")
    message = "odd' cannot be split: tensor=4: must divide 4 heads and 66 columns of the MLP of this model: 1 or 2; it"
    with pytest.raises(ValueError, match=message):
        jspec.load(model.name, draft=tmp_path / "odd", tensor=4)


UNFIT = [
    ("windows", 8, "tensor=8: must divide 4 heads and 64 columns of the MLP of this model"),
    ("windows and experts", 3, "and 16 columns of each expert .* 1 heads of keys and values in layer 1 and 2 heads"),
    ("sinks", 8, "tensor=8: must divide 4 heads and 16 columns of each expert of this model"),
]


@pytest.mark.parametrize("name, tensor, match", UNFIT)
def test_a_number_of_devices_that_does_not_fit(name, tensor, match, directories):
    with pytest.raises(ValueError, match=match):
        jspec.load(directories(name), tensor=tensor)


@slow
def test_experts_in_blocks_are_split_by_blocks(directories, tmp_path, monkeypatch):
    """Experts in MXFP4: each device has the scales of its values, and packs its rows alone.

    The 192 rows of `down` fill a block and a half of 128, those of a device three quarters of one.
    """
    made = language_model.load(directories("sinks"), dtype="float32")
    routed = dataclasses.replace(made.config.experts, width=192)
    config = dataclasses.replace(made.config, experts=routed)
    language_model.save(tmp_path, config, random_weights(config), dtype="float32")
    rng, stored = np.random.default_rng(0), {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        stored[name] = tensor
        if name.endswith(("gate_up_proj", "down_proj")):
            count, width, out = stored.pop(name).shape
            stored[name + "_blocks"] = rng.integers(0, 256, (count, out, width // 32, 16)).astype(np.uint8)
            stored[name + "_scales"] = rng.integers(119, 125, (count, out, width // 32)).astype(np.uint8)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "mxfp4"}}))
    counted = []
    monkeypatch.setattr(memory, "check_weights", lambda name, shapes, **options: counted.append(tree_bytes(shapes)))
    models = [jspec.load(tmp_path, tensor=tensor) for tensor in (None, 2, 4)]
    first = [jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, model.params.target) for model in models]
    assert counted == list(map(tree_bytes, first)), "the memory of one device is counted"
    one, two, four = (model.params.target.layers[0].experts for model in models)
    assert (one.down.filling, two.down.filling) == (256 - 192, 128 - 96) and one.down.shape == two.down.shape
    columns = np.arange(384).reshape(2, 2, 96)  # of the gate and of the other half, each of the devices in turn
    wide = np.asarray(widen(one.down))
    with pytest.raises(ValueError, match="the rows of a packed matrix are split over devices"):
        widen(two.down)
    for device in range(2):
        own = jax.tree.map(lambda leaf, device=device: leaf.addressable_shards[device].data, two.down)
        assert own.shape == (wide.shape[0], 96, wide.shape[2])
        np.testing.assert_array_equal(np.asarray(widen(own)), wide[:, 96 * device : 96 * (device + 1)])
        for part in ("narrow", "scale"):
            held = getattr(two.gate_up, part).addressable_shards[device].data
            whole = np.asarray(getattr(one.gate_up, part))
            np.testing.assert_array_equal(held, whole[:, :, columns[:, device].reshape(-1)])
        held = two.gate_up_bias.addressable_shards[device].data
        np.testing.assert_array_equal(held, np.asarray(one.gate_up_bias)[:, columns[:, device].reshape(-1)])
    # Six scales for four devices: zeros fill the experts up to eight.
    assert (models[2].target.filler, four.down.shape[1], four.gate_up.shape[2]) == (64, 256, 512)
    assert {shard.data.shape[1] for shard in four.down.scale.addressable_shards} == {2}
    prompts = [[1, 2, 3] * 5, list(range(1, 20))]
    outputs = [jspec.generate(model, prompts, drafter=Ngram(depth=3), max_new_tokens=12) for model in models]
    for expected, *others in zip(*outputs, strict=True):
        for got in others:
            assert np.array_equal(got.tokens, expected.tokens) and (got.stats.rounds == expected.stats.rounds).all()
