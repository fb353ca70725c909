"""EAGLE heads of every layout: read like the oracle, written back unchanged, rejected if inconsistent."""

import contextlib
import json
from dataclasses import replace
from functools import partial

import eagle_files
import eagle_oracle as oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import toy
from batches import read_by
from eagle_files import HEADS, TARGET, V, load, random_head, write
from safetensors.numpy import load_file
from scaled_files import assert_close_in_int8, equal

import jspec
from jspec.checkpoints import drafts, eagle, language_model
from jspec.checkpoints.language_model import CheckpointError
from jspec.checkpoints.source import Source
from jspec.core.types import Params
from jspec.loading import hub
from jspec.models import EagleHead, Llama, ModelParams


@pytest.fixture
def head(tmp_path):
    """A function that writes a random head."""
    return partial(eagle_files.make_head, tmp_path / "head")


def random_inputs(version, count=9):
    """The target's embedding and LM head [V, E], tokens and captured hidden states."""
    random = np.random.default_rng(7)
    embed, lm_head = random.standard_normal((2, V, 16)).astype(np.float32) / 4
    tokens = random.integers(0, V, count).astype(np.int32)
    return embed, lm_head, tokens, random.standard_normal((count, 16 if version == 1 else 48)).astype(np.float32)


def spread(out, size):
    """The logits of the first sequence in the draft's vocabulary; -inf for tokens that are no candidates."""
    logits = np.array(out.logits)[0]
    if out.ids is None or out.ids.ndim == 1:
        return logits
    every = np.full((len(logits), size), -np.inf)
    np.put_along_axis(every, np.array(out.ids)[0], logits, axis=-1)
    return every


@partial(jax.jit, static_argnums=0)
def apply(config, params, *args):
    return config.apply(params, TARGET, *args)


fuse = jax.jit(lambda config, params, hidden: config.fuse(params, hidden), static_argnums=0)
commit = jax.jit(lambda cache, *rows: cache.commit(*rows))


@pytest.mark.slow(
    unless=(
        "eagle1",
        "eagle3 two layers",
        "speculators two layers",
        "eagle3 narrow",
        "p-eagle",
        "latent yarn",
        "eagle4",
    )
)
@pytest.mark.parametrize("name", HEADS)
def test_forward_equals_the_oracle(head, name):
    directory = head(**HEADS[name])
    raw, stored = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    loaded = load(directory)
    config, draft = loaded.config, loaded.params
    assert config.version == oracle.version(stored)
    embed, lm_head, tokens, hidden = random_inputs(config.version)
    expected = oracle.fuse(raw, stored, hidden)
    logits, after = oracle.forward(raw, stored, embed, lm_head, tokens, expected)

    feature = np.array(fuse(config, draft, hidden[None]))
    np.testing.assert_allclose(feature[0], expected, atol=1e-5)
    target = ModelParams(embed, (), np.ones(16, np.float32), lm_head.T)
    params, cache = Params(target, draft), config.init_cache(draft, 1, 16, 4)
    zero, five, ids = np.array([0], np.int32), np.array([5], np.int32), tokens[None]
    positions = np.arange(len(tokens), dtype=np.int32)[None]
    out = apply(config, params, read_by(ids, positions, cache), feature)
    np.testing.assert_allclose(spread(out, logits.shape[-1]), logits, atol=1e-5)
    np.testing.assert_allclose(np.array(out.feature)[0], after, atol=1e-5)

    cache = commit(cache, out.rows, zero, None, five)
    out = apply(config, params, read_by(ids[:, 5:], positions[:, 5:], cache, five), feature[:, 5:])
    np.testing.assert_allclose(spread(out, logits.shape[-1]), logits[5:], atol=1e-5)
    np.testing.assert_allclose(np.array(out.feature)[0], after[5:], atol=1e-5)
    if config.at_once:
        np.testing.assert_array_equal(draft.mask_hidden, stored["mask_hidden"].reshape(-1))
        assert config.mask_token == 5 and draft.mask_embed is None
    if draft.ids is not None:
        np.testing.assert_array_equal(draft.ids, oracle.target_ids(stored))
        assert draft.ids.dtype == jnp.int32


@pytest.mark.parametrize("name", HEADS)
def test_round_trip_in_each_layout(head, tmp_path, name):
    loaded = load(head(**HEADS[name]))
    unsuited = {
        "eagle1": "must be 'safeailab' for an EAGLE-1 head",
        "eagle3 own": "fc_bias",
        "latent": "must be 'safeailab' for a head with latent attention",
        "eagle4": "an EAGLE-4 head has layout='safeailab', without layout",
    }
    for layout in eagle.LAYOUTS:
        out, write_head = tmp_path / layout, partial(drafts.save, layout=layout, dtype="float32")
        refused = [message for start, message in unsuited.items() if name.startswith(start)]
        if layout == "speculators" and refused:
            with pytest.raises(ValueError, match=refused[0]):
                write_head(out, loaded.config, loaded.params)
            continue
        write_head(out, loaded.config, loaded.params)
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
        again = load(out)
        assert again.config == loaded.config and equal(again.params, loaded.params)
        assert eagle.matches(Source(out))
        # In 8 bits.
        write_head(out, loaded.config, loaded.params, weights="int8")
        again = load(out)
        assert again.config == loaded.config
        assert_close_in_int8(again.params, loaded.params)


def test_what_sglang_reads(head, tmp_path):
    loaded = load(head(num_layers=2, later_norm="hidden_norm", fc_norm="fc_norm"))
    drafts.save(tmp_path / "out", loaded.config, loaded.params, layout="safeailab")
    raw, stored = json.loads((tmp_path / "out/config.json").read_text()), load_file(tmp_path / "out/model.safetensors")
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and raw["model_type"] == "llama"
    assert raw["draft_vocab_size"] == 23 and raw["fc_norm"] is True and raw["norm_output"] is False
    assert raw["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    assert stored["d2t"].dtype == np.int64 and stored["t2d"].dtype == bool and stored["t2d"].sum() == 23
    assert stored["midlayer.self_attn.q_proj.weight"].shape == (32, 32)
    assert stored["fc.weight"].shape == (16, 48) and stored["fc.weight"].dtype == ml_dtypes.bfloat16
    later = ["layers.1.hidden_norm.weight", "layers.1.input_layernorm.weight"]
    np.testing.assert_array_equal(*[stored[name] for name in later])
    assert "embed_tokens.weight" not in stored


def test_the_published_config_of_an_eagle4_head(head, tmp_path):
    """The keys of Qwen3.8-27B's, smaller; what is written has no others."""
    keys = {
        **{"_torchspec_version": "0.1.0", "architectures": ["LlamaForCausalLMEagle4"], "attention_bias": False},
        **{"attention_dropout": 0.0, "bos_token_id": 7, "draft_vocab_size": V, "dtype": "bfloat16", "eos_token_id": 7},
        # They would be read as ids of what enters the layers elsewhere.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "use_aux_hidden_state": True},
        "efficient_lm_head_config": {"num_candidates": 9, "rank": 6, "type": "low_rank"},
        **{"fc_norm": True, "hidden_act": "silu", "initializer_range": 0.02, "layer_types": ["sliding_attention"]},
        **dict(mlp_bias=False, model_type="llama", norm_output=True, num_aux_hidden_states=3, pad_token_id=7),
        **{"pretraining_tp": 1, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}, "sliding_window": 40},
        **{"target_hidden_size": 16, "tie_word_embeddings": False, "transformers_version": "5.8.1", "use_cache": True},
        **{"use_sliding_window": True, "torch_dtype": "bfloat16"},
    }
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes += ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
    directory = head(lambda raw: {**{key: raw[key] for key in sizes}, **keys}, **HEADS["eagle4"])
    loaded = load(directory)
    config = loaded.config
    assert (config.capture_layers, config.rank, config.num_candidates) == ((3, 5, 6), 6, 9)
    assert config.windows == (40,) and config.norm_output and loaded.params.fc_norms is not None
    drafts.save(tmp_path / "out", config, loaded.params, dtype="float32")
    raw, stored = json.loads((tmp_path / "out/config.json").read_text()), load_file(tmp_path / "out/model.safetensors")
    assert set(raw) <= {*sizes, *keys, "rope_theta", "rope_scaling"}
    assert set(stored) == set(load_file(directory / "model.safetensors"))


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"rank": 17}, r"efficient_lm_head_config.rank=17: must be from 1 to 16"),
        ({"num_candidates": V + 1}, r"efficient_lm_head_config.num_candidates=62: must be from 1 to 61"),
        (
            {"type": "clusters"},
            r"efficient_lm_head_config.type='clusters' \(must be 'low_rank' or 'weighted_low_rank'\)",
        ),
        ({"groups": 2}, r"efficient_lm_head_config.groups=2 \(unknown"),
    ),
)
def test_sizes_of_candidates(head, changes, message):
    lesser = {**HEADS["eagle4"]["efficient_lm_head_config"], **changes}
    with pytest.raises(CheckpointError, match=message):
        load(head(lambda raw: {**raw, "efficient_lm_head_config": lesser}, **HEADS["eagle4"]))
    # Without the object, the LM head scores all tokens, and the factors are unused.
    without, start = partial(eagle_files.edit, efficient_lm_head_config="absent"), "efficient_lm_head"
    factors = (f"{start}.weight", f"{start}_down_proj.weight")
    with pytest.raises(CheckpointError, match=rf"2 unused tensor\(s\).*does not read them: {', '.join(factors)}"):
        load(head(without, **HEADS["eagle4"]))
    whole = load(head(without, drop=factors, **HEADS["eagle4"]))
    assert not whole.config.rank and whole.params.lm_head is not None


def test_what_vllm_reads(head, tmp_path):
    language_model.save(tmp_path / "target", toy.DRAFT, toy.random_params(toy.DRAFT))
    loaded = load(head(layout="speculators", qk_norm=True))
    save = partial(drafts.save, tmp_path / "out", loaded.config, loaded.params, layout="speculators")
    save(verifier=str(tmp_path / "target"))
    raw, stored = json.loads((tmp_path / "out/config.json").read_text()), load_file(tmp_path / "out/model.safetensors")
    assert raw["architectures"] == ["Eagle3Speculator"] and raw["speculators_model_type"] == "eagle3"
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    verifier = {"name_or_path": str(tmp_path / "target"), "architectures": ["LlamaForCausalLM"]}
    assert raw["speculators_config"]["verifier"] == verifier
    assert raw["transformer_layer_config"]["model_type"] == "qwen3"
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and raw["norm_before_residual"] is False
    assert "layers.0.hidden_norm.weight" in stored and "layers.0.self_attn.q_norm.weight" in stored
    save(verifier="org/name")
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["speculators_config"]["verifier"] == {"name_or_path": "org/name", "architectures": []}


def test_precision(head):
    halves = {"fc.weight": random_head()[1]["fc.weight"].astype(ml_dtypes.bfloat16)}
    for dtype in ("float32", "bfloat16"):
        params = load(head(tensors=halves), dtype=dtype).params
        assert {leaf.dtype for leaf in jax.tree.leaves(replace(params, ids=None))} == {jnp.dtype(dtype)}
    with pytest.raises(ValueError, match="dtype='int4': must be one of"):
        load(head(), dtype="int4")


@pytest.mark.parametrize("name", ["eagle1 biases", "eagle3", "eagle3 two layers"])
def test_pytorch_model_bin(needs, head, tmp_path, name):
    torch = needs("torch")
    directory = head(**HEADS[name])
    expected = load(directory)
    stored = {key: torch.from_numpy(value) for key, value in load_file(directory / "model.safetensors").items()}
    (directory / "model.safetensors").unlink()
    torch.save(stored, directory / "pytorch_model.bin")
    assert eagle.matches(Source(directory))
    loaded = load(directory)
    assert loaded.config == expected.config and equal(loaded.params, expected.params)
    del stored["fc.weight"]
    torch.save(stored, directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="the tensor 'fc.weight' is missing"):
        load(directory)
    torch.save([1, 2], directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="must hold a dictionary of tensors"):
        load(directory)


def test_missing_files(head):
    directory = head()
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="neither model.safetensors .* nor pytorch_model.bin$"):
        load(directory)
    with pytest.raises(CheckpointError, match="config.json: no such file"):
        load(directory.parent)
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        load(directory / "nowhere")


@pytest.mark.slow(
    unless=("eagle1", "eagle3", "eagle3 narrow", "eagle3 own embedding", "eagle3 two layers", "speculators", "p-eagle")
)
@pytest.mark.parametrize("name", HEADS)
def test_every_tensor_is_needed_and_checked(head, name):
    """A head with a missing tensor or one of another shape is rejected, except where that changes the meaning."""
    directory = head(**HEADS[name])
    expected, stored = load(directory), load_file(directory / "model.safetensors")
    raw = json.loads((directory / "config.json").read_text())
    same = {"t2d"} | ({"embed_tokens.weight"} if expected.params.embed is None else set())
    free = {"fc.bias"} | {name for name in stored if name.endswith("o_proj.bias")}
    if expected.params.ids is None and expected.params.candidates is None:
        free.add("lm_head.weight")
    if expected.config.at_once:
        free.add("embed_tokens.weight")
    for key in stored:
        write(directory, raw, {name: tensor for name, tensor in stored.items() if name != key})
        if key in same | free:
            assert equal(load(directory).params, expected.params) == (key in same)
        else:
            with pytest.raises(CheckpointError, match=key.split(".")[0].removesuffix("_low")):
                load(directory)
        if key not in same - {"t2d"}:
            write(directory, raw, {**stored, key: stored[key][:-1]})
            with pytest.raises(CheckpointError, match=f"{key} has shape"):
                load(directory)


@pytest.mark.parametrize("layout", ["eagle1", "eagle3", "speculators"])
@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.q_proj.weight_scale", "layers.1.mlp.up_proj.weight", "extra.bias"]
)
def test_an_unused_tensor(head, layout, name):
    with pytest.raises(
        CheckpointError,
        match=f"1 unused tensor.*this EAGLE-. head, .*config.json is complete, does not read them: {name}$",
    ):
        load(head(layout=layout, tensors={name: np.zeros(2, np.float32)}))


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    (
        ({}, {}, "'mask_token_id' is missing"),
        ({}, {"ptd_token_id": V}, "ptd_token_id=61: must be from 0 to 60, a row of the embedding"),
        ({}, {"ptd_token_id": 3, "pard_token": 4}, "pard_token=4: must be the same"),
        ({}, {"ptd_token_id": 3, "parallel_drafting": False}, r"parallel_drafting=False \(must be True\)"),
        ({"layout": "eagle1"}, {"ptd_token_id": 3}, "EAGLE-1 head: the tensor 'mask_hidden' of P-EAGLE"),
        ({"layout": "speculators"}, {"mask_token_id": 3}, "speculators_model_type='eagle3'"),
    ),
)
def test_masks_that_contradict_their_keys(head, options, changes, message):
    mask = {"mask_hidden": np.zeros((1, 48), np.float32)}
    with pytest.raises(CheckpointError, match=message):
        load(head(tensors=mask, **options, **changes))


def test_a_mask_token_beyond_the_targets(head, tmp_path):
    """Its embedding is in the head's own table."""
    options = HEADS["p-eagle"] | {"ptd_token_id": V, "vocab_size": V + 1}
    table = np.random.default_rng(1).standard_normal((V + 1, 16)).astype(np.float32)
    tensors = {**options["tensors"], "embed_tokens.weight": table}
    with pytest.warns(UserWarning, match="the ids from 61 on are taken for padding"):
        loaded = load(head(**options | {"tensors": tensors, "drop": ["t2d"]}))
    np.testing.assert_array_equal(loaded.params.mask_embed, table[V])
    tokens = np.array([[V, 3]], np.int32)
    embedded = loaded.config.embed(Params(None, loaded.params), TARGET, jax.device_put(tokens))
    np.testing.assert_array_equal(embedded[0], table[[V, 3]])
    with pytest.raises(ValueError, match="cannot hold mask_embed"):
        drafts.save(tmp_path / "out", loaded.config, loaded.params)


def test_tensors_that_are_copies(head):
    """Frozen copies of the target's tensors, in any shape, and tables that torch modules store."""
    zeros = np.zeros((V, 16), np.float32)
    names = ["embed_tokens.weight", "verifier_lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq"]
    loaded = load(head(tensors=dict.fromkeys(names, zeros)))
    assert loaded.params.embed is None
    assert load(head(layout="eagle1", tensors={"lm_head.weight": zeros})).params.lm_head is None


def test_vocabulary_maps(head):
    stored = random_head()[1]
    ids, offsets = oracle.target_ids(stored), stored["d2t"]
    marked = np.isin(np.arange(V), ids)
    # With t2d, offsets and ids can be told apart.
    for d2t in (offsets, ids):
        np.testing.assert_array_equal(load(head(tensors={"d2t": d2t})).params.ids, ids)
    for d2t in (offsets - 1, np.where(np.arange(23) == 5, 0, offsets), np.arange(23), 0 * offsets):
        with pytest.raises(CheckpointError, match="t2d marks other tokens than d2t maps to"):
            load(head(tensors={"d2t": d2t}))
    with pytest.raises(CheckpointError, match="t2d marks other tokens"):
        load(head(tensors={"t2d": np.roll(marked, 1)}))
    # Without it, only what cannot be ids is an offset.
    np.testing.assert_array_equal(load(head(drop=["t2d"])).params.ids, ids)
    for d2t, problem in (
        (ids[::-1].copy(), "they are not"),
        (offsets - 1 - ids[0], "they are not"),
        (np.where(np.arange(23) == 5, 2**63 - 1, offsets), "they are not"),
        (np.arange(23), "these may be ids as well as offsets"),
        (0 * offsets, "all are 0"),
    ):
        with pytest.raises(CheckpointError, match=f"d2t=.*must hold offsets, .* from 0 to 60: {problem}; with .* t2d"):
            load(head(tensors={"d2t": d2t}, drop=["t2d"]))
    directory = head(drop=["d2t"])
    with pytest.raises(CheckpointError, match="'d2t' is missing, but draft_vocab_size=23 .*token map, hot tokens"):
        load(directory)
    (directory / "eagle_meta.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"\(eagle_meta.pt may hold it\)"):
        load(directory)


def test_a_map_of_the_whole_vocabulary_is_none(head):
    """SpecForge always writes both maps."""
    maps = {"d2t": np.zeros(V, np.int64), "t2d": np.ones(V, bool)}
    assert load(head(draft_vocab=None, tensors=maps)).params.ids is None


def test_two_norms_of_a_later_layer(head):
    stored = random_head(num_layers=2)[1]
    norm = stored["layers.1.input_layernorm.weight"]
    both = load(head(num_layers=2, tensors={"layers.1.hidden_norm.weight": norm}))
    np.testing.assert_array_equal(both.params.layers[1].attention_norm, norm)
    with pytest.raises(CheckpointError, match="layers.1.input_layernorm.weight and layers.1.hidden_norm.weight differ"):
        load(head(num_layers=2, tensors={"layers.1.hidden_norm.weight": norm + 1}))


def test_heads_that_a_layout_cannot_hold(head, tmp_path):
    loaded = load(head(layout="eagle1"))
    reduced = replace(loaded.params, lm_head=jnp.ones((16, 2)), ids=jnp.array([1, 3]))
    save = partial(drafts.save, tmp_path / "out")
    with pytest.raises(ValueError, match="an EAGLE-1 checkpoint cannot hold a reduced vocabulary"):
        save(replace(loaded.config, draft_vocab_size=2), reduced, layout="safeailab")
    with pytest.raises(ValueError, match="layout='sglang': must be one of safeailab, speculators"):
        save(loaded.config, loaded.params, layout="sglang")
    with pytest.raises(ValueError, match="dtype='int4'"):
        save(loaded.config, loaded.params, layout="safeailab", dtype="int4")
    loaded = load(head(qkv_bias=True))
    with pytest.raises(ValueError, match="biases for all of q, k, v and o"):
        save(loaded.config, loaded.params, layout="speculators")
    both = replace(loaded.params, input_norm=jnp.ones(48), fc_norms=(jnp.ones(16),) * 3)
    with pytest.raises(ValueError, match="both input_norm and fc_norms"):
        save(loaded.config, both, layout="safeailab")
    loaded = load(head(**HEADS["latent"]))
    with pytest.raises(ValueError, match="EAGLE-4 head has layout='safeailab', without latent attention, 1 captured"):
        save(replace(loaded.config, rank=2, capture_layers=(1,)), loaded.params, layout="safeailab")
    assert not (tmp_path / "out").exists()


def test_a_model_with_a_head(head, tmp_path, monkeypatch):
    target = replace(toy.TARGET, hidden_size=16)
    language_model.save(tmp_path / "target", target, toy.random_params(target), dtype="float32")
    language_model.save(tmp_path / "lm", toy.DRAFT, toy.random_params(toy.DRAFT), dtype="float32")
    assert not eagle.matches(Source(tmp_path / "target"))
    ids = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}
    for options, version in ((dict(layout="eagle1"), 1), (dict(eagle_config=ids), 3)):
        directory = head(**options)
        assert eagle.matches(Source(directory))
        loaded = jspec.load(tmp_path / "target", draft=directory, dtype="float32")
        assert isinstance(loaded.draft, EagleHead) and loaded.draft.version == version
        assert equal(loaded.params.draft, load(directory, target).params)
        assert f"EAGLE-{version} head" in repr(loaded) and loaded.tokenizer is None
    assert isinstance(jspec.load(tmp_path / "target", draft=tmp_path / "lm").draft, Llama)

    asked = {}

    def snapshot_download(name, allow_patterns, ignore_patterns):
        asked[name] = allow_patterns
        return str(tmp_path / name.split("/")[1])

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", snapshot_download)
    jspec.load("somebody/target", draft="somebody/head", dtype="float32")
    assert "pytorch_model.bin" in asked["somebody/head"] and "pytorch_model.bin" not in asked["somebody/target"]


def test_an_embedding_of_its_own_that_is_not_used_is_named(head, tmp_path):
    """Most heads have a copy of the target's."""
    target = replace(toy.TARGET, hidden_size=16)
    params = toy.random_params(target)
    language_model.save(tmp_path / "target", target, params, dtype="bfloat16")
    ids = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}
    copy = np.asarray(params.embed, np.float32)
    for embed, differs in ((copy, False), (copy[::-1], True)):
        directory = head(eagle_config=ids, tensors={"embed_tokens.weight": np.ascontiguousarray(embed)})
        with pytest.warns(UserWarning, match="embed_requires_grad") if differs else contextlib.nullcontext():
            loaded = jspec.load(tmp_path / "target", draft=directory, dtype="float32")
        assert loaded.params.draft.embed is None
    # Nothing to compare.
    directory = head(eagle_config=ids, tensors={"embed_tokens.weight": np.zeros((3, 5), np.float32)})
    assert jspec.load(tmp_path / "target", draft=directory, dtype="float32").params.draft.embed is None
