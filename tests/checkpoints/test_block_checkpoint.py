"""Block drafts of every layout: read like the oracle, written back unchanged, rejected if inconsistent."""

import json
from dataclasses import replace
from functools import partial

import block_files
import block_oracle as oracle
import families
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import toy
from block_files import DRAFTS, TARGET, V, load, random_draft
from eagle_files import edit, write
from hostile import TOKENIZER
from safetensors.numpy import load_file
from scaled_files import assert_close_in_int8, equal

import jspec
from jspec.checkpoints import block, drafts, language_model
from jspec.checkpoints.language_model import CheckpointError
from jspec.checkpoints.source import Source
from jspec.core.types import Params
from jspec.models import Llama, ModelParams
from jspec.models.quantized import is_matrix, widen

START = 9
"""Committed positions before the block."""


@pytest.fixture
def draft(tmp_path):
    """A function that writes a random draft."""
    return partial(block_files.make_draft, tmp_path / "draft")


@partial(jax.jit, static_argnums=0)
def run(config, params, hidden, tokens, path):
    """The rows of the context, outputs of the rows that predict, their logits, and those after each prefix of a path.

    The context is committed in two parts, the second with columns that are not valid.
    """
    cache, zero = config.init_cache(params.draft, 1, 16, 4), jnp.zeros(1, jnp.int32)
    positions = jnp.arange(hidden.shape[1], dtype=jnp.int32)[None]
    _, rows = config.read(params.draft, hidden, positions)
    cache = cache.commit(rows, zero, None, zero + 4)
    _, later = config.read(params.draft, hidden[:, 4:], positions[:, 4:])
    cache = cache.commit(later, zero + 4, None, zero + START - 4)
    block = START + jnp.arange(config.block_size, dtype=jnp.int32)[None]
    out = config.apply(params, TARGET, tokens, block, cache, zero + START)[:, -config.depth :]
    logits = config.unembed(params, TARGET, out)
    state, corrected = config.begin(params.draft, 1), []
    scores, ids = config.candidates(params.draft, logits)
    for k in range(config.depth):
        row = slice(k, k + 1)
        row_ids = ids[:, row] if config.selector_rank else ids
        row_logits, state = config.correct(params.draft, state, path[:, row], out[:, row], scores[:, row], row_ids)
        if config.selector_rank:
            index = row_ids if params.draft.ids is None else jnp.searchsorted(params.draft.ids, row_ids)
            row_logits = jnp.full_like(logits[:, row], -jnp.inf).at[0, 0, index[0, 0]].set(row_logits[0, 0])
        corrected.append(row_logits[:, 0])
    return rows, out, logits, jnp.stack(corrected, axis=1)


@pytest.mark.slow(unless=("deepspec rnn", "z-lab sliding", "speculators fill-in"))
@pytest.mark.parametrize("name", DRAFTS)
def test_a_block_equals_the_oracle(draft, name):
    directory = draft(**DRAFTS[name])
    raw, stored = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    loaded = load(directory)
    config, random = loaded.config, np.random.default_rng(7)
    assert list(config.capture_layers) == oracle.entering_layers(raw, 8)
    assert config.next_token == oracle.next_token(raw)
    embed, lm_head = random.standard_normal((2, V, 16)).astype(np.float32) / 4
    hidden = random.standard_normal((1, START + 2, 16 * len(config.capture_layers))).astype(np.float32)
    path = random.integers(0, V, (1, config.depth)).astype(np.int32)
    tokens = np.full((1, config.block_size), V - 1, np.int32)
    tokens[0, 0] = path[0, 0]

    target = ModelParams(embed, (), np.ones(16, np.float32), lm_head.T)
    rows, out, logits, corrected = jax.device_get(run(config, Params(target, loaded.params), hidden, tokens, path))
    expected, base = oracle.block(raw, stored, embed, lm_head, hidden[0, :START], path[0, 0])
    for n in range(config.num_layers):
        past = oracle.context(raw, stored, n, oracle.feature(raw, stored, hidden[0]))
        for i in range(2):
            np.testing.assert_allclose(rows[n][i][0], [pair[i] for pair in past], atol=1e-5)
    np.testing.assert_allclose(out[0], expected, atol=1e-5)
    np.testing.assert_allclose(logits[0], base, atol=1e-5)
    after = [oracle.correct(raw, stored, expected, base, list(path[0, : k + 1])) for k in range(config.depth)]
    np.testing.assert_allclose(corrected[0], after, atol=1e-5)
    changes = np.nan_to_num(np.abs(corrected - logits), posinf=0).max() > 0.1
    assert (config.markov is not None or config.selector_rank > 0) == changes


@pytest.mark.parametrize("name", DRAFTS)
def test_round_trip_in_each_layout(draft, tmp_path, name):
    loaded = load(draft(**DRAFTS[name]))
    config = loaded.config
    unsuited = {
        "deepspec": not config.next_token or any(config.windows) or config.draft_vocab_size < V,
        "speculators": (None, True) in zip(config.windows, config.causal, strict=True) or "logits" in name,
        "z-lab": config.next_token or config.markov or config.confidence or len(set(config.causal)) > 1,
    }
    for layout in block.LAYOUTS:
        out, write_draft = tmp_path / layout, partial(drafts.save, layout=layout, dtype="float32")
        if unsuited[layout]:
            with pytest.raises(ValueError, match=f"layout='{layout}' (cannot hold|requires)"):
                write_draft(out, config, loaded.params)
            assert not out.exists()
            continue
        write_draft(out, config, loaded.params)
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
        again = load(out)
        assert again.config == config and equal(again.params, loaded.params)
        assert block.KIND.matches(Source(out))
        # In 8 bits.
        write_draft(out, config, loaded.params, weights="int8")
        again = load(out)
        assert again.config == config
        assert_close_in_int8(again.params, loaded.params)


def test_what_other_programs_read(draft, tmp_path):
    language_model.save(tmp_path / "target", toy.DRAFT, toy.random_params(toy.DRAFT))
    loaded = load(draft(**DRAFTS["deepspec gated"]))
    save = partial(drafts.save, tmp_path / "out", loaded.config, loaded.params)
    save(layout="deepspec")
    raw, stored = json.loads((tmp_path / "out/config.json").read_text()), load_file(tmp_path / "out/model.safetensors")
    assert raw["architectures"] == ["Qwen3DSparkModel"] and raw["model_type"] == "qwen3" and raw["num_anchors"] == 512
    assert raw["target_layer_ids"] == [1, 3, 6] and raw["markov_head_type"] == "gated" and raw["markov_rank"] == 3
    assert stored["markov_head.gate_proj.weight"].shape == (3, 19)
    assert stored["fc.weight"].shape == (16, 48) and stored["fc.weight"].dtype == ml_dtypes.bfloat16
    save(layout="speculators", verifier=str(tmp_path / "target"))
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["architectures"] == ["DSparkSpeculator"] and raw["speculators_model_type"] == "dspark"
    assert raw["aux_hidden_state_layer_ids"] == [2, 4, 7] and raw["sample_from_anchor"] is True
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    verifier = {"name_or_path": str(tmp_path / "target"), "architectures": ["LlamaForCausalLM"]}
    assert raw["speculators_config"]["verifier"] == verifier
    with pytest.raises(ValueError, match="layout='specforge': must be one of deepspec, z-lab, speculators"):
        save(layout="specforge")


@pytest.mark.slow(unless=("deepspec rnn", "z-lab"))
@pytest.mark.parametrize("name", DRAFTS)
def test_every_tensor_is_needed_and_checked(draft, name):
    """A draft with a missing tensor or one of another shape is rejected, except where that changes the meaning."""
    directory = draft(**DRAFTS[name])
    expected, stored = load(directory), load_file(directory / "model.safetensors")
    raw = json.loads((directory / "config.json").read_text())
    shared = {"embed_tokens.weight", "lm_head.weight"} if expected.config.hidden_size == 16 else set()
    shared -= {"lm_head.weight"} if expected.params.ids is not None else set()
    for key in stored:
        write(directory, raw, {name: tensor for name, tensor in stored.items() if name != key})
        if key in shared:
            assert not equal(load(directory).params, expected.params)
        elif key != "t2d":
            problem = "reduced vocabulary|another width" if key in ("embed_tokens.weight", "lm_head.weight") else key
            with pytest.raises(CheckpointError, match=problem):
                load(directory)
        write(directory, raw, {**stored, key: stored[key][:-1]})
        with pytest.raises(CheckpointError, match=f"{key} has shape"):
            load(directory)


@pytest.mark.parametrize("name", ["mask_hidden", "layers.2.mlp.up_proj.weight", "layers.0.attention_conv.base_kernel"])
def test_an_unused_tensor(draft, name):
    with pytest.raises(CheckpointError, match=f"1 unused tensor.*this block draft does not read them: {name}"):
        load(draft(tensors={name: np.zeros(2, np.float32)}))


def test_the_mask_may_have_an_embedding_of_its_own(needs, draft):
    torch = needs("torch")
    directory, vector = draft(**DRAFTS["deepspec"]), np.arange(16, dtype=np.float32)
    expected = load(directory).params
    for saved in (vector, vector[None], {"mask_token_id": V - 1, "embedding": vector}):
        tensors = {"embedding": torch.from_numpy(vector)}
        content = {**saved, **tensors} if isinstance(saved, dict) else torch.from_numpy(saved)
        torch.save(content, directory / "mask_embedding.pt")
        loaded = load(directory)
        np.testing.assert_array_equal(loaded.params.mask_embed, vector)
        assert equal(replace(loaded.params, mask_embed=None), expected)
    # The forward is that of an embedding with this row.
    row = expected.embed.at[V - 1].set(vector)
    hidden, random = np.ones((1, START + 2, 48), np.float32), np.zeros((1, 4), np.int32)
    target = ModelParams(None, (), np.ones(16, np.float32), None)
    tokens = np.array([[3, V - 1, V - 1, V - 1]], np.int32)
    both = [
        run(loaded.config, Params(target, weights), hidden, tokens, random)[1]
        for weights in (loaded.params, replace(expected, embed=row))
    ]
    np.testing.assert_array_equal(*both)
    for saved, message in (
        (torch.ones(3), "must hold one tensor of 16 values"),
        ({"mask_token_id": 3, "embedding": torch.ones(16)}, "mask_token_id=3, but config.json has 60"),
        (torch.full((16,), torch.inf), "NaN or infinite"),
        ("text", "must hold one tensor"),
    ):
        torch.save(saved, directory / "mask_embedding.pt")
        with pytest.raises(CheckpointError, match=message):
            load(directory)


def inside(**changes):
    return lambda raw: {**raw, "dflash_config": edit(raw["dflash_config"], **changes)}


def outside(**changes):
    return lambda raw: edit(raw, **changes)


def in_layers(**changes):
    return lambda raw: {**raw, "transformer_layer_config": edit(raw["transformer_layer_config"], **changes)}


KINDS = "sliding_attention, full_attention"


REFUSED = (
    ("z-lab", inside(mask_token_id="absent"), "'mask_token_id' is missing"),
    ("z-lab", outside(block_size="absent"), "'block_size' is missing"),
    ("z-lab", outside(block_size=1), "block_size=1: must be at least 2"),
    ("z-lab", inside(mask_token_id=61), "mask_token_id=61: must be from 0 to 60"),
    ("z-lab", inside(target_layer_ids=[3, 0]), r"target_layer_ids=\[3, 0\]: must ascend, from -1 to at most 7"),
    ("z-lab", inside(target_layer_ids=[0, 3, 8]), "must ascend, from -1 to at most 7, as the target has 8"),
    ("z-lab", inside(target_layer_ids=[]), "must ascend"),
    ("z-lab", outside(num_target_layers=9), "num_target_layers=9: the target has 8 layers"),
    ("z-lab", outside(vocab_size=1086), "vocab_size=1086, but the target has 61 tokens: must be the same"),
    ("z-lab", outside(hidden_size=24), "draft of another width needs the tensors"),
    ("z-lab", inside(attention_sink_bias=True), "not supported in a block draft: dflash_config.attention_sink_bias"),
    ("z-lab", inside(attention_value_scale=0.7), "attention_value_scale=0.7"),
    ("z-lab", inside(projector_type="domino"), "projector_type='domino'"),
    ("z-lab", outside(architectures=["DFlash2DraftModel"]), "'conv_kernel_size' is missing"),
    *(
        ("dflash2", inside(**{key: "absent"}), f"'{key}' is missing")
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    ),
    ("dflash2", inside(conv_kernel_size=5), "conv_kernel_size=5: must be at most 4|must be from 1 to 4"),
    ("dflash2", inside(conv_group_size=3), "conv_group_size=3: must divide hidden_size=16"),
    ("dflash2", inside(selector_top_k=62), "selector_top_k=62: must be from 1 to 61"),
    ("dflash2", inside(selector_rank=-1), "selector_rank=-1: must be"),
    ("z-lab selector", inside(selector_top_k=24), "selector_top_k=24: must be from 1 to 23"),
    ("z-lab selector", inside(selector_top_k=0), "selector_rank=3 with selector_top_k=0: must both be set"),
    ("z-lab selector", inside(markov_rank=3), "markov='vanilla': must be None with a selector"),
    ("dflash2", inside(input_embedding_scale=0.0), "input_embedding_scale=0.0: must be above 0"),
    ("z-lab", outside(layer_types=["full_attention"] * 3), f"layer_types=.*: must be 2 of {KINDS}"),
    ("z-lab", outside(layer_types=["linear_attention"] * 2), f"layer_types=.*: must be 2 of {KINDS}"),
    ("z-lab sliding", outside(sliding_window="absent"), "'sliding_window' is missing"),
    ("z-lab sliding", outside(sliding_window=3), "a window of 3 positions: must be at least block_size=4"),
    ("z-lab", outside(dspark_block_size=5), "block_size=4, but dspark_block_size=5: must be the same"),
    ("z-lab", outside(quantization_config={"bits": 4}), "quantization_config"),
    ("z-lab logits", inside(logit_scale=2.0), "has both output_multiplier and logit_scale"),
    ("deepspec rnn", outside(markov_head_type="lstm"), "markov_head_type='lstm': must be one of vanilla, gated, rnn"),
    ("deepspec rnn", outside(sample_from_anchor=False), "markov='rnn': requires next_token"),
    ("deepspec", outside(enable_confidence_head=True, confidence_head_with_markov=True), "requires a Markov head"),
    ("speculators dflash", outside(speculators_model_type="dflash2"), "'conv_kernel_size' is missing"),
    ("speculators dflash", outside(shift_label=True), "shift_label=True"),
    ("speculators dflash", outside(aux_hidden_state_layer_ids="absent"), "'aux_hidden_state_layer_ids' is missing"),
    ("speculators dflash", outside(aux_hidden_state_layer_ids=[1, 9]), "from 0 to at most 8"),
    ("speculators dflash", outside(draft_vocab_size=62), "draft_vocab_size=62: must be between 1 and vocab_size=61"),
    ("speculators dflash", in_layers(model_type="gpt_oss"), "model_type='gpt_oss' is not supported; .* qwen3"),
    ("speculators dflash", outside(target_hidden_size=32), "target_hidden_size=32: must be 16, the target's width"),
)


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_configurations_that_are_refused(draft, name, change, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        load(draft(change, **DRAFTS[name]))
    assert "draft" in str(caught.value), "names the file"


def test_a_soft_cap_of_the_target(draft):
    """The target's own LM head caps its logits: a draft that shares it states the same bound, or none."""

    class Capped(Llama):
        soft_cap = 2.0

    capped = Capped(**{name: getattr(TARGET, name) for name in TARGET.__dataclass_fields__})
    with pytest.raises(CheckpointError, match="shares the LM head of a target with a soft cap of 2.0"):
        load(draft(inside(final_logit_softcapping=3.0)), capped)
    assert load(draft(), capped).config.soft_cap is None
    same = inside(final_logit_softcapping=2.0)
    assert load(draft(same), capped).config.soft_cap is None
    assert load(draft(same, lm_head=True), capped).config.soft_cap == 2.0
    assert load(draft(same)).config.soft_cap == 2.0


@pytest.mark.parametrize("name", DRAFTS)
def test_the_table_of_drafts_finds_it(draft, name):
    directory = draft(**DRAFTS[name])
    checkpoint = drafts.plan(Source(directory), TARGET, "float32").read()
    assert checkpoint.config.drafter == "block"
    shapes, stored = checkpoint.config.param_shapes(jnp.float32), checkpoint.params
    assert equal(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (shapes,)), jax.tree.map(jnp.zeros_like, (stored,)))


@pytest.mark.slow
@pytest.mark.parametrize("weights", (None, "fp8"))
def test_generate_with_a_draft_from_a_directory(tmp_path, weights):
    """A random draft changes nothing but the number of rounds, which are those of the widened weights."""
    raw, stored = random_draft("deepspec", markov="vanilla", target_layer_ids=[0, 1])
    wide = {name: t for name, t in stored.items() if name not in ("fc.weight", "embed_tokens.weight", "lm_head.weight")}
    small = toy.DRAFT
    language_model.save(
        tmp_path / "target",
        replace(small, num_layers=2),
        toy.random_params(replace(small, num_layers=2)),
        dtype="float32",
    )
    wide["fc.weight"] = stored["fc.weight"][:, :32]
    (tmp_path / "target" / "tokenizer.json").write_bytes(TOKENIZER)
    write(tmp_path / "draft", edit(raw, vocab_size=61), wide)
    model = jspec.load(tmp_path / "target", draft=tmp_path / "draft", dtype="float32", weights=weights)
    narrow = [is_matrix(leaf) for leaf in jax.tree.leaves(model.params.draft, is_leaf=is_matrix)]
    assert any(narrow) == (weights is not None)
    assert "DSpark block draft of 4 tokens" in repr(model)
    ids, length, key = np.array([[3, 4, 5]], np.int32), np.array([3], np.int32), jax.random.key(0)
    static = dict(target=model.target, draft=model.draft, max_new_tokens=12)
    plain, chain, tree = (
        jspec.generate_ids(model.params, ids, length, key, drafter=drafter, **static)
        for drafter in (None, "block", jspec.Block(depth=3, width=3))
    )
    np.testing.assert_array_equal(chain.tokens, plain.tokens)
    np.testing.assert_array_equal(tree.tokens, plain.tokens)
    if weights is not None:
        wide = jax.tree.map(widen, model.params, is_leaf=is_matrix)
        expected = jspec.generate_ids(wide, ids, length, key, drafter="block", **static)
        np.testing.assert_array_equal(chain.tokens, expected.tokens)
        np.testing.assert_array_equal(chain.stats.rounds, expected.stats.rounds)


EMBEDDINGS = {
    "z-lab": (dict(layout="z-lab"), "scaled"),
    "z-lab, stated": (dict(layout="z-lab", inner={"input_embedding_scale": 2.0}), 2.0),
    "z-lab, its own": (dict(layout="z-lab", embed=True), 1.0),
    "DFlash2": (dict(layout="z-lab", **block_files.DFLASH2), 1.0),
    "speculators": (dict(layout="speculators"), 1.0),
    "speculators, its own": (dict(layout="speculators", embed=True), 1.0),
}


@pytest.mark.parametrize("name", EMBEDDINGS)
@pytest.mark.parametrize("family", ["gemma3", "granite", "qwen2"])
def test_the_factor_on_embeddings(tmp_path, family, name):
    """z-lab's drafts are trained on the target's scaled rows, and others on its table."""
    target, params = families.KINDS[family], families.params(family)
    options, factor = EMBEDDINGS[name]
    raw, stored = random_draft(width=32, target_layer_ids=[0, 1], **options)
    raw |= {"num_target_layers": 3} if "num_target_layers" in raw else {}
    stored["fc.weight"] = np.ones((32, 64), np.float32)
    loaded = load(write(tmp_path / "draft", raw, stored), target)
    tokens = jnp.arange(12).reshape(3, 4)
    rows = np.asarray(stored.get("embed_tokens.weight", params.embed), np.float32)[np.array(tokens)]
    expected = target.embed(params, tokens) if factor == "scaled" else factor * rows
    embedded = loaded.config.embed(Params(params, loaded.params), target, tokens)
    np.testing.assert_allclose(embedded, expected, rtol=1e-6)
    # Written files say so, in the layouts that can.
    for layout in ("z-lab", "speculators"):
        if layout == "speculators" and loaded.config.embed_scale not in (None, 1.0):
            with pytest.raises(ValueError, match="speculators' cannot hold embed_scale"):
                drafts.save(tmp_path / layout, loaded.config, loaded.params, layout=layout)
            continue
        drafts.save(tmp_path / layout, loaded.config, loaded.params, layout=layout, dtype="float32")
        assert load(tmp_path / layout, target).config == loaded.config


def test_a_confidence_head_makes_a_dspark(tmp_path):
    raw, stored = random_draft("deepspec", confidence="hidden", next_token=None)
    raw = edit(raw, architectures=["DFlashDraftModel"], enable_confidence_head="absent", markov_rank=0)
    config = load(write(tmp_path / "draft", raw, stored)).config
    assert config.confidence == "hidden" and config.next_token


def test_sliding_layers_of_dflash2_in_speculators_layout_see_both_ways(draft):
    raw = {**block_files.DFLASH2, "layer": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}}
    options = {key: raw.pop(key) for key in ("layout", "inner") if key in raw}
    options = {**raw, **options, "layout": "speculators", "speculators_model_type": "dflash2"}
    sizes = options.pop("inner", {})
    assert load(draft(**options, **sizes)).config.causal == (False, False)
    assert load(draft(**options, **sizes, sliding_window_non_causal=False)).config.causal == (True, True)
