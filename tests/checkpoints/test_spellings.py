"""Public spellings of drafts: equal ones propose the same tokens, others do not, and the rest is refused by name."""

import contextlib
import dataclasses
import functools
import warnings

import numpy as np
import pytest
import qwen
import spellings
from eagle_files import TARGET, V
from scaled_files import equal
from spelling_tables import OTHER, SAME
from spellings import BASES, both, inside, padded, proposals, speculators, tensors, top, write

from jspec.checkpoints import drafts
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.source import Source
from jspec.drafters import Eagle

CLASSES = {
    **{"Eagle3DeepseekV2ForCausalLM": "latent attention"},
    **{"Qwen3XPressModel": "", "LiLiCorrDraftModel": "", "LagunaDFlashModel": "", "Qwen3OmniDSparkModel": ""},
    **{"MuseSparkDSparkModel": "", "Gemma4DSparkModel": "Gemma"},
    **{"DominoDraftModel": "Domino", "EagleLlama4ForCausalLM": "Llama 4"},
}
REFUSED = [
    *(
        (base, top(**{key: value}), f"{key}={value!r}")
        for base in ("eagle3", "dflash")
        for key, value in {
            **{"use_gemma_norm": True, "enable_qwen35_gated_q_proj": True, "rope_dim": 4},
            **dict(attention_value_scale=0.7, shift_label=True, draft_shift=True, use_rope=False, unheard_of=3),
            **dict(position_embedding_type="none", enable_moe=True, attention_sink_bias=True, residual_multiplier=0.5),
            **{"residual_alpha": 0.5, "norm_name": "layernorm", "anchor_token_id": 3, "mtp_norm": True},
            **{"output_scale": 2.0, "linear_scale": 2.0, "tie_fc": True, "use_bidirectional_attention": False},
            **{"attn_norm": True, "efficient_lm_head_config": {"rank": 4}, "parallel_drafting": True, "mlp_bias": True},
        }.items()
    ),
    *(("eagle3", top(architectures=[name]), f"architectures={name}.*{what}") for name, what in CLASSES.items()),
    *(("dflash", top(architectures=[name]), f"architectures={name}.*{what}") for name, what in CLASSES.items()),
    (
        "eagle1",
        lambda raw, t: ({"model_type": "eagle", "model": raw, "truncated_vocab_size": 9}, t),
        "truncated_vocab_size=9: must be 61",
    ),
    *(
        (base, top(architectures=None, model_type="gemma3_text"), r"model_type=gemma3_text \(layers of Gemma\)")
        for base in ("eagle1", "eagle3", "dflash")
    ),
    *(
        ("eagle1", top(**{key: True}), f"not supported in an EAGLE-1 head: {key}=True")
        for key in ("norm_output", "norm_before_residual", "fc_norm")
    ),
    *((base, top(rope_scaling={"type": "yarn"}), "'rope_scaling.factor' is missing") for base in ("eagle3", "dflash")),
    ("eagle3", top(dspark_bonus_anchor=True), "dspark_bonus_anchor=True"),
    ("eagle3", top(input_embedding_scale=2.0), "input_embedding_scale=2.0"),
    (
        "dspark",
        top(sample_from_anchor=True, dspark_bonus_anchor=True),
        "dspark_bonus_anchor=True: must be False with sample_from_anchor=True",
    ),
    ("eagle3", top(attention_bias="true"), "attention_bias='true': must be"),
    ("eagle3", top(attention_head_dim=16), "head_dim=8, but attention_head_dim=16: must be the same"),
    ("eagle3", top(norm_type="layer"), "norm_type='layer'"),
    ("dflash", inside("dflash_config", attention_mode="mla"), "attention_mode='mla'"),
    ("eagle3", top(qkv_bias=True), "qkv_bias=True, but there are no tensors 'q_proj.bias'"),
    ("eagle1", top(bias=True), "bias=True, but there are no tensors 'fc.bias'"),
    (
        "eagle3",
        both(speculators("eagle3"), inside("transformer_layer_config", attention_bias=True)),
        "transformer_layer_config.attention_bias=True, but there are no tensors 'q_proj.bias'",
    ),
    (
        "eagle3",
        top(rope_scaling={"type": "yarn", "factor": 8.0}, initial_context_length=16),
        "'rope_scaling.original_max_position_embeddings' is missing.* initial_context_length=16",
    ),
    (
        "dflash",
        tensors(lambda t: {**t, "model.fc.weight": t["fc.weight"]}),
        "'(model.)?fc.weight' and '(model.)?fc.weight' are two tensors of one name",
    ),
    ("eagle3", top(architectures=["PEagleDraftModel"]), "PEagleDraftModel is of P-EAGLE.*'mask_hidden' is missing"),
    ("eagle3", top(ptd_token_id=4), "ptd_token_id=4 is of P-EAGLE, but the tensor 'mask_hidden' is missing"),
    ("pard", top(pard_token=V), "pard_token=61: must be below vocab_size=61"),
    ("pard", top(ptd_token_id=4), "pard_token=60 and ptd_token_id=4 must be the same"),
    ("eagle3", top(block_size=4), r"block_size=4 \(must be absent\)"),
    ("eagle3", top(causal_head=False), r"causal_head=False \(must be True\)"),
    (
        "eagle3",
        inside("eagle_config", use_aux_hidden_state=False),
        "eagle_config.use_aux_hidden_state=False: must be true",
    ),
    (
        "eagle3",
        top(eagle_aux_hidden_state_layer_ids=[0, 3, 6]),
        r"eagle_aux_hidden_state_layer_ids=.*\(what enters\) and eagle_config.*\(what leaves\) are different layers",
    ),
    (
        "eagle3",
        top(target_layer_ids=[1, 2, 3]),
        r"target_layer_ids=.*\(what leaves\) and eagle_config.*\(what leaves\) are different layers",
    ),
    ("eagle3", top(num_target_layers=9), "num_target_layers=9: the target has 8"),
    ("eagle3", top(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    ("eagle3", top(rope_scaling={"type": "axial"}), "'axial'"),
    ("eagle3", top(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"}), "NVFP4.*must have"),
    (
        "eagle3",
        speculators("eagle3", norm_before_residual=None),
        "'norm_before_residual' is missing.*false in spec.*true in vLLM",
    ),
    (
        "dflash",
        both(top(is_causal=False), inside("dflash_config", causal_head=True)),
        "is_causal=False, but dflash_config.causal_head=True",
    ),
    ("dflash", top(mask_token_id=3), "mask_token_id=3, but dflash_config.mask_token_id=60: must be the same"),
    (
        "dflash",
        inside("dflash_config", num_target_layers=9),
        "num_target_layers=8, but dflash_config.num_target_layers=9",
    ),
    ("dflash", top(layer_types=["sliding_attention"] * 2), "'sliding_window' is missing"),
    ("dflash", top(use_sliding_window=True, sliding_window=5), "'max_window_layers' is missing"),
    ("dflash", top(selector_rank=4), "selector_rank=4 with selector_top_k=0: must both be set"),
    ("dflash", top(conv_group_size=4), "conv_kernel_size=0 with conv_group_size=4: must both be set"),
    ("dflash", top(conv_kernel_size=2, conv_group_size=4), "layers.0.attention_conv.base_kernel' is missing"),
    (
        "dflash2",
        both(
            top(architectures=["DFlashDraftModel"]),
            inside("dflash_config", **dict.fromkeys(("selector_rank", "selector_top_k"), "absent")),
        ),
        "3 unused tensor.*: candidate_selector",
    ),
    ("eagle3", top(selector_rank=4), "selector_rank=4"),
    *(
        ("eagle3 latent", change, f"{words}")
        for change, words in (
            (top(mla_use_nope=True), r"mla_use_nope=True \(must be False\)"),
            (top(use_mla=False), r"use_mla=False \(must be True\)"),
            (top(rope_interleave=False), r"rope_interleave=False \(must be True\)"),
            (top(is_neox_style=True), "is_neox_style=True: must be false with latent attention"),
            (top(qk_head_dim=12), "qk_head_dim=12: must be 10"),
            (top(num_key_value_heads=2), "num_key_value_heads=2: must be num_attention_heads=4"),
            (top(use_sliding_window=True, max_window_layers=0, sliding_window=5), "sliding_window=5: latent attention"),
            (top(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling=.*must be yarn or none"),
            (top(index_topk=8), "index_topk=8"),
            (top(kv_lora_rank=None), "'kv_lora_rank' is missing"),
            (top(qk_rope_head_dim=3), "qk_rope_head_dim=3: must be even"),
            (top(q_lora_rank=None), "'midlayer.self_attn.q_proj.weight' is missing"),
            (speculators("eagle3"), "model_type='kimi_k2' is not supported"),
            (top(architectures=["DeepseekDFlashDraftModel"]), "DeepseekDFlashDraftModel"),
        )
    ),
    (
        "dspark",
        inside("dflash_config", projector_type="dspark", shift_label=False),
        r"shift_label=False \(must be True\)",
    ),
    (
        "dflash",
        both(top(dspark_block_size=4), tensors(lambda t: {"mtp.0.x": np.zeros(1)})),
        "dspark_block_size=4, a module",
    ),
]
"""Base, change, and the words of the error."""

WARNS = ("padded by", "a mask among", "two thetas", "the target's depth", "inputs by default")
"""Spellings with a warning."""


@pytest.fixture(scope="module")
def of_base(tmp_path_factory):
    """The draft of a base, and its proposals."""

    @functools.cache
    def of(base):
        loaded = spellings.read(write(tmp_path_factory.mktemp("base"), base))
        return loaded, proposals(loaded, base)

    return of


def cases(table):
    return [(base, name) for base, changes in table.items() for name in changes]


def spelled(name):
    """A warning, where the spelling needs one."""
    return pytest.warns(UserWarning) if name.startswith(WARNS) else contextlib.nullcontext()


def test_there_are_enough_of_them():
    assert len(cases(SAME)) >= 80 and set(SAME) == set(BASES)


@pytest.mark.parametrize(("base", "name"), cases(SAME))
def test_the_same_proposals(of_base, tmp_path, base, name):
    """Most spellings are read as the same configuration and weights, whose forward is the same."""
    with spelled(name):
        loaded = spellings.read(write(tmp_path / "draft", base, SAME[base][name]))
    same, expected = of_base(base)
    if loaded.config == same.config and equal(loaded.params, same.params):
        return
    drafted = proposals(loaded, base)
    np.testing.assert_array_equal(drafted[0], expected[0])
    for rows, others in zip(drafted, expected, strict=True):
        np.testing.assert_allclose(rows, others, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["eagle3 whole", "standalone"])
def test_a_shorter_vocabulary(of_base, tmp_path, base):
    """Tokens without a row are never proposed; with the target's embedding, the others are as before."""
    with pytest.warns(UserWarning, match=f"vocab_size={V - 30}.*the ids from {V - 30} on are taken for padding"):
        drafted = proposals(spellings.read(write(tmp_path / "draft", base, padded(-30))), base)[0]
    assert drafted[:, 1:].max() < V - 30
    if base != "standalone":
        expected = of_base(base)[1][0]
        same = expected[:, 1] < V - 30
        assert same.any()
        np.testing.assert_array_equal(drafted[same, 1], expected[same, 1])


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3])
def test_a_window_of_a_head_is_that_of_its_drafter(tmp_path, width):
    """Layers that slide draft like full ones under a window of the same length, in chains and trees."""
    slides = write(tmp_path / "slides", "eagle3", top(layer_types=["sliding_attention"], sliding_window=4))
    full = write(tmp_path / "full", "eagle3")
    drafters = (Eagle(depth=4, width=width), Eagle(depth=4, width=width, window=4))
    drafted = [
        proposals(spellings.read(directory), "eagle3", drafter, rounds=6)[0]
        for directory, drafter in zip((slides, full), drafters, strict=True)
    ]
    np.testing.assert_array_equal(*drafted)


@pytest.mark.slow(unless=("eagle3-pairs", "dflash-causal", "dspark-anchor"))
@pytest.mark.parametrize(("base", "name"), cases(OTHER))
def test_other_proposals(of_base, tmp_path, base, name):
    """The target can tell these apart: the table above would be empty words otherwise."""
    drafted = proposals(spellings.read(write(tmp_path / "draft", base, OTHER[base][name])), base)[0]
    expected = of_base(base)[1][0]
    assert drafted.shape != expected.shape or (drafted != expected)[:, 1:].mean() > 0.1


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refusals(tmp_path, case):
    base, change, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        spellings.read(write(tmp_path / "draft", base, change))
    assert "draft" in str(caught.value), "names the file"


@pytest.mark.slow
def test_a_target_of_another_family_changes_no_reading(tmp_path):
    """A draft is read by the sizes of its target alone, so the tables hold for the targets of every family."""
    target = dataclasses.replace(
        qwen.KINDS["dense"],
        **{name: getattr(TARGET, name) for name in ("vocab_size", "hidden_size", "max_length")},
        is_full_attention=(False, True) * (TARGET.num_layers // 2),
    )
    for index, (base, name) in enumerate([*cases(SAME), *cases(OTHER)]):
        if base in ("standalone", "pard"):
            continue
        directory = write(tmp_path / str(index), base, (SAME[base] | OTHER.get(base, {}))[name])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            configs = [drafts.plan(Source(directory), x, "float32").config for x in (TARGET, target)]
        assert configs[0] == configs[1], (base, name)
