"""What models generate that are split over devices: the tokens, rounds and log-probabilities of one device's.

test_mesh.py runs these tests in a process with eight CPU devices.
"""

import dataclasses
import functools
import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from random_models import arrays_of
from tiny_targets import (
    BIASED,
    DIFFERENT,
    HEAD,
    HYBRIDS,
    KINDS,
    LATENTS,
    PROMPTS,
    TARGETS,
    TIED,
    hybrid_weights,
    weights,
)

import jspec
from jspec.checkpoints import drafts, language_model, named, tensors
from jspec.checkpoints.files import CheckpointError, write_tensors
from jspec.checkpoints.safetensors_file import SafetensorFiles
from jspec.cli import main
from jspec.core import sharding
from jspec.core.loop import decode
from jspec.core.prefill import jitted_prefill
from jspec.core.sharding import TENSOR
from jspec.core.types import Params
from jspec.drafters import Ngram, Standalone
from jspec.generation import score
from jspec.models.draft import Draft
from jspec.models.llama import Llama

slow = pytest.mark.slow
ALL = TARGETS | LATENTS | DIFFERENT | HYBRIDS


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A function that writes a checkpoint once and returns its directory."""
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def directory(name: str) -> Path:
        path = root / name.replace(" ", "_")
        if name == "head":
            made = toy.fit_head(toy.TARGET, HEAD, toy.params().target, toy.plain_tokens())
            drafts.save(path, HEAD, made.draft, layout="safeailab", dtype="float32")
        elif name.startswith("draft of "):
            config = ALL[name.removeprefix("draft of ")]
            near = toy.near(weights(config), weights(config, seed=1))
            if isinstance(config, Llama):
                config = dataclasses.replace(config, num_layers=1)
                near = dataclasses.replace(near, layers=near.layers[:1])
            language_model.save(path, config, near, dtype="float32")
        else:
            language_model.save(path, ALL[name], weights(ALL[name]), dtype="float32")
        return path

    return directory


@pytest.fixture(scope="module")
def load(directories):
    @functools.cache
    def loaded(name: str, draft: str | None, tensor: int | None, draft_tensor: bool | None = None) -> jspec.Model:
        path = None if draft is None else directories(draft)
        return jspec.load(directories(name), draft=path, tensor=tensor, draft_tensor=draft_tensor)

    return loaded


def assert_same(got, expected):
    assert got.tokens == expected.tokens
    for field in ("rounds", "accept_counts", "dropped"):
        np.testing.assert_array_equal(getattr(got.stats, field), getattr(expected.stats, field))
    for a, b in zip(got, expected, strict=True):
        assert a.finish_reason == b.finish_reason and a.origin == b.origin
        if a.logprobs is not None:
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def assert_same_model(model, expected):
    """Configurations, placements, weights and their shardings are equal."""
    assert (model.target, model.draft, model.placement) == (expected.target, expected.draft, expected.placement)
    pairs = zip(jax.tree_util.tree_leaves_with_path(model.params), jax.tree.leaves(expected.params), strict=True)
    for (path, got), wanted in pairs:
        assert got.dtype == wanted.dtype and got.sharding.is_equivalent_to(wanted.sharding, got.ndim), path
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (got, wanted)), str(path))


@slow
def test_streams_and_checks_invariants_as_one_device_generates(load):
    one, two = (load("tied", "draft of tied", tensor, split) for tensor, split in ((None, None), (4, None)))
    options = dict(
        drafter=Standalone(depth=3), max_new_tokens=24, page_size=16, seed=7, logprobs=True, **KINDS["rejection"]
    )
    expected = jspec.generate(one, PROMPTS, **options)
    pieces = list(jspec.stream(two, PROMPTS, rounds=2, **options))
    for i in range(len(PROMPTS)):
        assert [t for piece in pieces if piece.index == i for t in piece.tokens] == expected[i].tokens
    assert_same(jspec.generate(two, PROMPTS, debug=True, **options), expected)


@pytest.fixture
def operands(monkeypatch):
    """The sizes of all operands of programs over devices that are traced.

    XLA of JAX 0.11.2 crashes where one has no elements, such as the indices of a slice that is all of an array.
    """
    sizes = []

    def mapped(function, **options):
        run = jax.shard_map(function, **options)

        def call(*args):
            (eqn,) = (e for e in jax.make_jaxpr(run)(*args).eqns if e.primitive.name == "shard_map")
            sizes.extend(var.aval.size for var in eqn.invars)
            return run(*args)

        return call

    monkeypatch.setattr(sharding, "jax", types.SimpleNamespace(**{**vars(jax), "shard_map": mapped}))
    jax.clear_caches()
    return sizes


@pytest.mark.parametrize(
    "drafter", (pytest.param(None, marks=slow), Ngram(depth=3), pytest.param(Standalone(depth=3), marks=slow)), ids=str
)
def test_no_operand_of_a_generation_is_empty(load, drafter, operands):
    # The prompt is as wide as the buffer of tokens.
    out = jspec.generate(load("tied", "draft of tied", 2), [PROMPTS[0]], drafter=drafter, max_new_tokens=2)
    assert len(out[0].tokens) == 2 and len(operands) > 40 and min(operands) > 0


@slow
@pytest.mark.parametrize("name", ("tied", "latents in one step", "sinks", "windows", "states"))
def test_no_operand_of_an_engine_is_empty(load, name, operands):
    model = load(name, None, 2)
    with jspec.Engine(model, drafter=Ngram(depth=2), slots=1, context=32, page_size=4, prefill_tokens=8) as engine:
        out = engine.generate([PROMPTS[0], PROMPTS[0]], max_new_tokens=4, ignore_eos=True)
    jspec.score(model, PROMPTS[:1])
    assert [len(each.tokens) for each in out] == [4, 4] and len(operands) > 40 and min(operands) > 0


def test_each_device_has_its_part(load):
    names = "biased", "latents in one step", "sinks", "windows", "states"
    model, *rest = (load(name, None, 4) for name in names)
    paths, *others = (jax.tree_util.tree_leaves_with_path(each.params.target) for each in (model, *rest))
    split = {path[-1].name for path, leaf in sum(others, paths) if not leaf.sharding.is_fully_replicated}
    columns = {"qkv", "qkv_bias", "sinks", "gate_up", "gate_up_bias", "lm_head", "down_projection"}
    assert split == {"embed", "o", "down", "keys", "values", "conv", "log_rate", "rate_bias"} | columns
    inputs = rest[2].params.target.per_layer
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(inputs))
    for _, leaf in paths:
        assert len(leaf.addressable_shards) == 4
        parts = 1 if leaf.sharding.is_fully_replicated else 4
        assert all(shard.data.size * parts == leaf.size for shard in leaf.addressable_shards)
    # Fused weights are sorted by device: the first device has the first heads of queries, of keys and of values.
    whole = weights(BIASED).layers[0].qkv
    queries, keys = BIASED.num_heads * BIASED.head_dim, BIASED.num_kv_heads * BIASED.head_dim
    cut = np.split(np.array(whole), [queries, queries + keys], axis=1)
    own = np.concatenate([np.split(part, 4, axis=1)[0] for part in cut], axis=1)
    np.testing.assert_array_equal(model.params.target.layers[0].qkv.addressable_shards[0].data, own)
    # The inputs of a convolution are those of the device's heads of queries, of keys and of values.
    whole, state = hybrid_weights(HYBRIDS["states"]).layers[0].mixer, HYBRIDS["states"].state
    keys = state.key_heads * state.key_dim
    for field, ends in (("conv", [keys, 2 * keys]), ("rate_bias", [])):
        own = [np.split(part, 4, axis=-1)[0] for part in np.split(np.array(getattr(whole, field)), ends, axis=-1)]
        got = getattr(rest[-1].params.target.layers[0].mixer, field).addressable_shards[0].data
        np.testing.assert_array_equal(got, np.concatenate(own, axis=-1))


def test_a_mesh_of_the_caller(directories):
    devices = np.array(jax.devices()[2:4])
    mesh = jax.sharding.Mesh(devices.reshape(1, 2), ("data", TENSOR))
    model = jspec.load(directories("tied"), mesh=mesh)
    assert model.placement.size == model.target.tensor == 2
    assert {device for leaf in jax.tree.leaves(model.params) for device in leaf.devices()} == set(devices)
    assert "on 2 devices" in repr(model)


@pytest.mark.parametrize(
    "options, error, match",
    [
        (dict(tensor=3), ValueError, "tensor=3: must divide 4 heads and 64 columns of the MLP of this model, and d"),
        (dict(tensor=8), ValueError, "divide or be a multiple of 2 heads of keys and values: 1, 2 or 4"),
        (dict(tensor=9), ValueError, "tensor=9: must be at most 8"),
        (dict(tensor=0), ValueError, "tensor=0: must be at least 1"),
        (dict(tensor=2.5), TypeError, "tensor=2.5"),
        (dict(mesh=(2,)), TypeError, "mesh is of type tuple: must be a jax.sharding.Mesh"),
        (dict(mesh="model"), ValueError, "must have the axis 'tensor' or 'data'"),
        (dict(mesh="model, tensor"), ValueError, "no other of several devices"),
        (dict(mesh="tensor", tensor=4), ValueError, "tensor=4: the mesh has 2 devices"),
        (dict(draft_tensor=True), ValueError, "draft_tensor=True: requires tensor or mesh"),
        (dict(tensor=2, draft_tensor=1), TypeError, "draft_tensor=1"),
        (dict(tensor=2, draft_tensor=True), ValueError, "draft_tensor=True: no draft is loaded"),
    ],
    ids=str,
)
def test_a_wrong_placement_is_an_error(options, error, match, directories):
    if isinstance(options.get("mesh"), str):
        names = tuple(options["mesh"].split(", "))
        options = {**options, "mesh": jax.make_mesh((2,) * len(names), names)}
    with pytest.raises(error, match=match):
        jspec.load(directories("odd vocabulary"), **options)


def test_states_are_split_by_key_heads(directories):
    wrong = "tensor=8: must divide 4 heads, 4 key heads of the recurrent layers and 64 columns of the MLP .*: 1, 2 or 4"
    with pytest.raises(ValueError, match=wrong):
        jspec.load(directories("states"), tensor=8)


def test_a_family_that_cannot_be_split_is_an_error_before_it_is_read(tmp_path, monkeypatch):
    language_model.save(tmp_path, TIED, weights(TIED))
    monkeypatch.setattr(tensors.Tensors, "get", None)
    monkeypatch.setattr(type(TIED), "split", Draft.split)  # What a family has that defines nothing else.
    with pytest.raises(ValueError, match="tensor=2: models of type Llama cannot be split over devices yet"):
        jspec.load(tmp_path, tensor=2)


def test_a_draft_that_cannot_be_split_is_an_error_before_the_target_is_read(directories, monkeypatch):
    target, head = directories("odd vocabulary"), directories("head")
    monkeypatch.setattr("jspec.checkpoints.family.Family.read_params", None)
    wrong = "draft_tensor=True: draft=.*head' cannot be split: tensor=4: must divide 2 heads.*; omit draft_tensor"
    with pytest.raises(ValueError, match=wrong):
        jspec.load(target, draft=head, tensor=4, draft_tensor=True)
    with pytest.raises(ValueError, match="^tensor=3: must divide 4 heads"):
        jspec.load(target, draft=head, tensor=3, draft_tensor=True)


def stored(path: Path) -> dict[str, np.ndarray]:
    files = SafetensorFiles(path)
    return {name: files.get(name) for name in files.names()}


@pytest.mark.parametrize(("name", "tensor"), [("experts", 4), ("tied", 8)])
def test_each_byte_is_read_once(directories, name, tensor, monkeypatch):
    """What the devices share is read in as many pieces as there are shares; experts and copied heads as well."""
    expected = stored(directories(name))
    read, part, get = {each: [] for each in expected}, SafetensorFiles.part, SafetensorFiles.get

    def count(how):
        def counted(self, name, *index):
            found = how(self, name, *index)
            read[name].append(found.nbytes)
            return found

        return counted

    monkeypatch.setattr(SafetensorFiles, "part", count(part))
    monkeypatch.setattr(SafetensorFiles, "get", count(get))
    model = jspec.load(directories(name), tensor=tensor)
    assert {each: sum(sizes) for each, sizes in read.items()} == {each: x.nbytes for each, x in expected.items()}
    # Heads of keys and values are copied if there are fewer of them than devices.
    shares = {"q_proj": tensor, "o_proj": tensor, "k_proj": tensor if model.target.num_kv_heads >= tensor else 1}
    shares |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), tensor)
    for each, sizes in read.items():
        wanted = next((share for part, share in shares.items() if f"{part}.weight" in each), len(sizes))
        assert len(sizes) == wanted, each
    monkeypatch.setattr(tensors.Tensors, "defers", lambda self, name: False)
    for got, whole in zip(
        *(jax.tree.leaves(each) for each in (model.params, jspec.load(directories(name), tensor=tensor).params)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, whole)


def test_a_part_that_is_not_finite_is_an_error(directories, tmp_path):
    """The last value of a matrix whose columns the devices share."""
    for file in directories("tied").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = stored(tmp_path)
    weights["model.layers.0.mlp.down_proj.weight"][-1, -1] = np.nan
    write_tensors(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="down_proj.weight has values that are NaN or infinite"):
        jspec.load(tmp_path, tensor=4)


def test_stored_scales_of_whole_columns_are_on_each_device(directories, tmp_path):
    """All devices have the scales of a matrix whose rows are split; otherwise each has those of its columns."""
    for file in directories("biased").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = stored(tmp_path)
    for name in [name for name in weights if name.endswith("proj.weight")]:
        scale = np.abs(weights[name]).max(axis=1, keepdims=True) / 127
        weights |= {name: np.rint(weights[name] / scale).astype(np.int8), f"{name}_scale": scale}
    write_tensors(weights, tmp_path / "model.safetensors")
    kind = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    method = dict(quant_method="compressed-tensors", format="int-quantized", config_groups={"0": {"weights": kind}})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    one, two = (jspec.load(tmp_path, tensor=tensor) for tensor in (None, 2))
    for whole, split in zip(one.params.target.layers, two.params.target.layers, strict=True):
        for was, now, columns in ((whole.o, split.o, 32), (whole.gate_up, split.gate_up, 64)):
            assert now.scale.addressable_shards[0].data.shape == (1, columns)
            assert now.narrow.dtype == np.int8 and now.narrow.addressable_shards[0].data.size * 2 == was.narrow.size
        np.testing.assert_array_equal(split.o.narrow, whole.o.narrow)
        np.testing.assert_array_equal(split.o.scale, whole.o.scale)


def assert_same_scores(got, expected):
    """Log-probabilities are equal up to rounding, and the most probable tokens are the same."""
    for a, b in zip(got, expected, strict=True):
        assert a.tokens == b.tokens and a.logprobs[0] is None and len(a) == len(b)
        np.testing.assert_allclose(a.logprobs[1:], b.logprobs[1:], atol=1e-5)
        for ours, theirs in zip(a.top, b.top, strict=True):
            assert [token for token, _ in ours] == [token for token, _ in theirs]
            np.testing.assert_allclose([x for _, x in ours], [x for _, x in theirs], atol=1e-5)


LONG = [np.random.default_rng(length).integers(0, 61, length).tolist() for length in (40, 1, 16, 9, 33)]
"""Prompts that are scored in several chunks, the longest ones of 16 tokens."""


@pytest.mark.parametrize(
    ("name", "tensor"), [("tied", 4), *(pytest.param(*each, marks=slow) for each in (("experts", 2), ("latents", 2)))]
)
def test_scores_are_those_of_one_device(load, name, tensor, monkeypatch):
    monkeypatch.setattr(score, "LOGITS_BYTES", 4 * 64 * 16)
    got, expected = (jspec.score(load(name, None, over), LONG, top_k=3, page_size=8) for over in (tensor, None))
    assert_same_scores(got, expected)


def test_what_needs_one_device_is_refused(load, tmp_path):
    model = load("tied", None, 4)
    with pytest.raises(ValueError, match="is split over 4 devices, which inspect_round does not support yet"):
        jspec.inspect_round(model, PROMPTS[0])
    with pytest.raises(ValueError, match="the weights are split over 4 devices: load them without tensor"):
        language_model.save(tmp_path / "copy", model.target, model.params.target)
    assert not (tmp_path / "copy").exists()
    given = model.params, toy.IDS, toy.LENGTHS, jax.random.key(0)
    with pytest.raises(ValueError, match="the target is split over 4 devices, and must be over 1; pass placement=mod"):
        jspec.generate_ids(*given, target=model.target, max_new_tokens=4)


def test_weights_that_do_not_fit_count_per_device(directories, monkeypatch):
    free = {}
    monkeypatch.setattr("jspec.loading.memory.free_bytes", lambda device=None: (free["bytes"], 10**9))
    shapes = TIED.param_shapes(np.float32)
    for tensor, name in ((None, "$"), (4, " on each of 4 devices do not fit")):
        free["bytes"] = 100
        with pytest.raises(ValueError, match="GB of weights .float32." + name.replace("$", " do not fit")):
            jspec.load(directories("tied"), tensor=tensor)
    half = sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes)) // 2
    free["bytes"] = 4 * half  # four CPU devices share it
    assert jspec.load(directories("tied"), tensor=4).placement.size == 4


def test_the_command_splits_the_model(capsys):
    assert main(["generate", "x", "--model", "bundled:python-tiny", "--tensor", "3"]) == 2
    assert "--tensor 3: must divide 2 heads" in capsys.readouterr().err


def spread(arrays, mesh):
    """Arrays as a trainer holds them: split on their first axis over the mesh, where that is possible."""
    size = mesh.devices.size

    def place(array):
        axes = tuple(mesh.axis_names) if array.ndim and array.shape[0] % size == 0 else None
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axes)))

    return {name: place(array) for name, array in arrays.items()}


def meshes():
    """How arrays are given: on one device, over the devices of the model in several ways, and over others."""
    devices = np.array(jax.devices())
    return {
        "host": None,
        "one device": jax.sharding.Mesh(devices[:1], ("data",)),
        "the same": jax.sharding.Mesh(devices[:2], ("data",)),
        "turned": jax.sharding.Mesh(devices[1::-1], ("data",)),
        "others": jax.sharding.Mesh(devices[4:], ("data",)),
        "more": jax.sharding.Mesh(devices.reshape(2, 4), ("data", "model")),
    }


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way == "the same" else slow) for way in meshes()])
def test_arrays_become_the_weights_of_a_split_checkpoint(way, load):
    """Values and shardings are those of `jspec.load`, and other arrays compile nothing."""
    mesh, config = meshes()[way], TARGETS["biased"]
    loaded = load("biased", None, 2)
    named = arrays_of(config, weights(config))
    given = {name: np.array(array) for name, array in named.items()} if mesh is None else spread(named, mesh)
    model = jspec.from_named(config, given, tensor=2)
    assert_same_model(model, loaded)


@slow
def test_weights_of_a_trainer_go_into_a_split_model_without_compiling(load):
    config = TARGETS["tied"]
    mesh = jax.make_mesh((2, 2), ("data", TENSOR))
    options = dict(drafter=Ngram(), max_new_tokens=12)
    model, counts = None, []
    for seed in range(3):
        given = spread(arrays_of(config, weights(config, seed)), mesh)
        new = jspec.from_named(config, given, mesh=jax.make_mesh((1, 4), ("data", TENSOR)))
        if model is None:
            model = new
            jspec.generate(model, PROMPTS, **options)
        model = model.with_params(new.params.target)
        whole = jspec.from_named(config, arrays_of(config, weights(config, seed)))
        assert jspec.generate(model, PROMPTS, **options).tokens == jspec.generate(whole, PROMPTS, **options).tokens
        counts.append([f._cache_size() for f in (jitted_prefill, decode.variant(devices=4), named._fuse)])
    assert counts[0] == counts[1] == counts[2]
    with pytest.raises(ValueError, match=r"params.target.embed: has the sharding .*; must have that of the model"):
        model.with_params(whole.params.target)
    with pytest.raises(ValueError, match="params.target.embed: is of type ndarray; must be a jax.Array"):
        model.with_params(jax.tree.map(np.array, model.params.target))

    @jax.jit
    def complete(arrays, ids, lengths):
        split = jspec.from_named(config, arrays, tensor=4)
        options = dict(target=split.target, drafter=Ngram(), max_new_tokens=12, placement=split.placement)
        return jspec.generate_ids(split.params, ids, lengths, jax.random.key(0), **options).tokens

    with pytest.raises(ValueError, match=r"arrays: .* is traced with the type float32\[.*@"):
        complete(given, toy.IDS, toy.LENGTHS)
    automatic = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    given = spread(arrays_of(config, weights(config, 2)), automatic)
    expected, tokens = jspec.generate(model, PROMPTS, **options), complete(given, toy.IDS, toy.LENGTHS)
    assert tokens[0, toy.LENGTHS[0] :].tolist()[:12] == expected[0].tokens


def family_weights(name, seed):
    """The configuration of a target without heads, and random weights."""
    config = {"qwen3": dataclasses.replace(TIED, qk_norm=True), **ALL}[name]
    config = dataclasses.replace(config, mtp_layers=0) if name in LATENTS | HYBRIDS else config
    return config, weights(config, seed)


@slow
@pytest.mark.parametrize("name", ["qwen3", "experts", "latents in one step", "indexed latents"])
def test_new_weights_of_each_family_compile_nothing_over_devices(name):
    options, counts, tokens, model = dict(drafter="plain", max_new_tokens=6), [], [], None
    for seed in range(3):
        config, made = family_weights(name, seed)
        new = jspec.from_named(config, arrays_of(config, made), tensor=2)
        model = new if model is None else model.with_params(new.params.target)
        tokens += [jspec.generate(model, PROMPTS, **options).tokens for _ in range(2)]
        counts.append([f._cache_size() for f in (jitted_prefill, decode.variant(devices=4), named._fuse)])
        whole = jspec.from_named(config, arrays_of(config, made))
        assert tokens[-1] == jspec.generate(whole, PROMPTS, **options).tokens
    # The first weights compile, also the programs of the model that is not split.
    assert counts[1] == counts[2]
    assert tokens[1] != tokens[3]


@slow
@pytest.mark.parametrize("name", ["experts", "latents", "indexed latents", "states", *DIFFERENT])
def test_other_families_are_split_as_their_checkpoints(name, load):
    loaded = load(name, None, 2)
    whole = load(name, None, None)
    heads = whole.params.draft is not None
    config = dataclasses.replace(whole.target, mtp_layers=1) if heads else whole.target
    params = whole.params.target
    if heads:
        params = dataclasses.replace(params, mtp=whole.params.draft)
    model = jspec.from_named(config, arrays_of(config, params), tensor=2)
    assert_same_model(model, loaded)


@slow
def test_arrays_over_devices_make_a_model_that_is_not_split():
    config = TARGETS["tied"]
    arrays = arrays_of(config, weights(config))
    given = spread(arrays, jax.make_mesh((4,), ("data",)))
    options = dict(drafter=Ngram(), max_new_tokens=8)
    got, wanted = (jspec.generate(jspec.from_named(config, each), PROMPTS, **options) for each in (given, arrays))
    assert got.tokens == wanted.tokens


def test_a_split_model_takes_a_whole_draft(load):
    model, draft = load("tied", None, 4), load("draft of tied", None, None)
    drafted = model.with_draft(draft)
    assert drafted.placement == dataclasses.replace(model.placement, draft=False)
    assert all(leaf.sharding.device_set == set(jax.devices()[:4]) for leaf in jax.tree.leaves(drafted.params))
    with pytest.raises(ValueError, match="is split over 4 devices, which with_draft does not support"):
        draft.with_draft(model)


@pytest.mark.parametrize(
    "config, options, error, match",
    [
        ("tied", dict(tensor=3), ValueError, "tensor=3: must divide 8 heads"),
        ("tied", dict(tensor=9), ValueError, "tensor=9: must be at most 8"),
        ("tied", dict(tensor=0), ValueError, "tensor=0: must be at least 1"),
        ("tied", dict(mesh=5), TypeError, "mesh is of type int"),
        ("split", dict(), ValueError, "config: is that of a model on 4 devices; tensor or mesh must be given"),
    ],
    ids=str,
)
def test_a_wrong_placement_of_arrays_is_an_error(config, options, error, match):
    kinds = {"tied": TIED, "split": dataclasses.replace(TIED, tensor=4)}
    with pytest.raises(error, match=match):
        jspec.from_named(kinds[config], arrays_of(TIED, weights(TIED)), **options)


def test_quantized_weights_are_split_with_the_scales_of_whole_columns(directories):
    """Each device has the scales of its columns; where rows are split, all scales, which are those of whole columns."""
    one, two = (jspec.load(directories("biased"), tensor=tensor, weights="fp8") for tensor in (None, 2))
    for whole, split in zip(one.params.target.layers, two.params.target.layers, strict=True):
        for field, parts in (("qkv", (64 * 2, 64, 64)), ("o", None), ("gate_up", (64, 64)), ("down", None)):
            was, now = getattr(whole, field), getattr(split, field)
            shares = [shard.data.shape for shard in now.narrow.addressable_shards]
            rows, columns = was.shape
            assert shares == [(rows // 2, columns) if parts is None else (rows, columns // 2)] * 2
            assert now.scale.addressable_shards[0].data.shape == (1, columns if parts is None else columns // 2)
            got, expected = (jax.tree.map(lambda x: np.asarray(x, np.float32), each) for each in (now, was))
            if parts is not None:
                # The columns of a device are those of its heads.
                order = np.concatenate(
                    [block.reshape(2, -1) for block in np.split(np.arange(columns), np.cumsum(parts)[:-1])], axis=1
                ).reshape(-1)
                expected = jax.tree.map(lambda x, order=order: x[:, order], expected)
            np.testing.assert_array_equal(got.narrow, expected.narrow)
            np.testing.assert_array_equal(got.scale, expected.scale)
    assert two.params.target.embed.dtype == np.float32


@pytest.mark.slow
def test_scales_of_keys_and_values_are_on_all_devices():
    config, names = TARGETS["odd vocabulary"], ("k_scale", "v_scale")
    arrays = arrays_of(config, weights(config))
    for index, pair in enumerate([(0.03, 1.7), (2.6, 0.4)]):
        for name, scale in zip(names, pair, strict=True):
            arrays[f"model.layers.{index}.self_attn.{name}"] = jnp.full(1, scale, jnp.float32)
    models = [jspec.from_named(config, arrays, kv="fp8", **devices) for devices in (dict(data=2, tensor=2), {})]
    options = dict(drafter=Ngram(), max_new_tokens=12)
    got, expected = (jspec.generate(model, PROMPTS, **options) for model in models)
    assert_same(got, expected)
    assert models[0].params.target.layers[0].kv_scales.sharding.is_fully_replicated
    with pytest.raises(ValueError, match="kv_scales is missing"):
        models[0].with_params(jspec.from_named(config, arrays_of(config, weights(config)), data=2, tensor=2).params)


@slow
def test_packed_weights_are_split_by_blocks_of_rows(directories):
    one, two = (jspec.load(directories("blocks"), tensor=tensor, weights="int4") for tensor in (None, 2))
    (whole, others), (split, experts) = one.params.target.layers, two.params.target.layers
    pairs = (whole.o, split.o), (whole.down, split.down), (others.experts.down, experts.experts.down)
    for was, now in pairs:
        stack = was.shape[:-2]
        assert [shard.data.shape for shard in now.narrow.addressable_shards] == [(*stack, 16, 32)] * 2
        assert [shard.data.shape for shard in now.scale.addressable_shards] == [(*stack, 1, 32)] * 2
        np.testing.assert_array_equal(now.narrow, was.narrow)
        np.testing.assert_array_equal(now.scale, was.scale)
    runs = [jspec.generate(model, PROMPTS[:2], drafter=Ngram(), max_new_tokens=8) for model in (two, one)]
    assert_same(*runs)
    reason = "tensor=2: o has 128 rows with one scale for each 128; must be 1"
    with pytest.raises(ValueError, match=reason):
        jspec.load(directories("biased"), tensor=2, weights="int4")
    with pytest.raises(ValueError, match=reason):
        jspec.from_named(BIASED, arrays_of(BIASED, weights(BIASED)), tensor=2, weights="int4")


@pytest.mark.parametrize(
    ("name", "format"), [("experts", "int8"), ("blocks", "int4"), pytest.param("states and experts", "fp8", marks=slow)]
)
def test_quantized_weights_from_arrays_are_those_of_files(directories, name, format):
    """They are quantized by the program that fuses them, which splits the scales as well."""
    config, made = family_weights(name, 0)
    arrays = arrays_of(config, made)
    loaded = jspec.load(directories(name), tensor=2, weights=format)
    model = jspec.from_named(config, arrays, tensor=2, weights=format)
    assert_same_model(model, dataclasses.replace(loaded, draft=None, params=Params(loaded.params.target)))
