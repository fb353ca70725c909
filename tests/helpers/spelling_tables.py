"""Spellings of drafts in tables: those with the proposals of a base, those with others."""

import numpy as np
from block_files import CONVOLUTIONS, SELECTOR
from eagle_files import V
from spellings import (
    IDS,
    WINDOW,
    YARN,
    both,
    first_layer,
    inside,
    interleaved,
    lift,
    mask_in,
    move,
    narrow,
    padded,
    prefixed,
    rename,
    speculators,
    tensors,
    top,
    vocabulary,
    without,
)

INPUTS = [layer + 1 for layer in IDS]
FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"a": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
}
CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": False}
ROPE = {"rope_type": "default", "rope_theta": 1e4}


def flat_head(t):
    """The tensors of a Markov head without its module, and a confidence head that also reads its embedding."""
    t = {name.removeprefix("markov_head."): x for name, x in t.items() if not name.startswith("confidence_head.")}
    rank = t["markov_w1.weight"].shape[1]
    width = t["norm.weight"].shape[0] + rank
    return t | {
        "confidence_proj.weight": np.zeros((1, width), np.float32),
        "confidence_proj.bias": np.zeros(1, np.float32),
    }


def turned(t, axis):
    """Kernels of convolutions with sides (0) or taps (1) in the other order."""
    stored = dict(t)
    for name in (name for name in t if name.endswith("base_kernel")):
        projection = name.replace("base_kernel", "kernel_projection.weight")
        shape = *t[name].shape[:2], -1, t[projection].shape[1]
        stored[name] = np.flip(t[name], axis)
        stored[projection] = np.flip(t[projection].reshape(shape), axis).reshape(t[projection].shape)
    return stored


def exchanged(t):
    """The codebooks of a selector in each other's place."""
    first, second = (f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor"))
    return {**t, first: t[second], second: t[first]}


def speculative_tokens(count):
    return {"speculators_config": {"proposal_methods": [{"speculative_tokens": count}]}}


SAME = {
    "eagle1": {
        "a class of vLLM": top(architectures=["EagleLlamaForCausalLM"]),
        "a class of Qwen2": top(architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
        "names of a model": tensors(prefixed),
        "a bias that its code ignores": top(attention_bias=True),
        "a nested model": lambda raw, t: ({"model_type": "eagle", "model": raw}, t),
        "a vocabulary beside": lambda raw, t: ({"model_type": "eagle", "model": raw, "truncated_vocab_size": V}, t),
        "rows of pairs": both(top(is_neox_style=False), interleaved),
        "what transformers writes": top(
            **{"use_cache": True, "initializer_range": 0.02, "transformers_version": "5.24.0", "dtype": "bfloat16"},
            **{"pad_token_id": 0, "attention_dropout": 0.0, "_name_or_path": "x", "return_dict": True, "bias": False},
        ),
    },
    "eagle3": {
        "a class of vLLM": top(architectures=["Eagle3LlamaForCausalLM"]),
        "a class of Qwen3": top(architectures=["Qwen3ForCausalLMEagle3"], model_type="qwen3"),
        "DeepSpec": top(
            **{"architectures": ["Qwen3Eagle3Model"], "draft_num_hidden_layers": 1, "step_loss_decay": 0.8},
            **{"ttt_length": 7, "layer_types": ["full_attention"], "target_model_name_or_path": "x"},
        ),
        "layers.0": first_layer("layers.0."),
        "names of a model": tensors(prefixed),
        "names of a model, layers.0": both(first_layer("layers.0."), tensors(prefixed)),
        "a bias that its code ignores": top(attention_bias=True, bias=True),
        "inputs at the top": both(top(eagle_config="absent"), top(eagle_aux_hidden_state_layer_ids=INPUTS)),
        "outputs at the top": both(top(eagle_config="absent"), top(target_layer_ids=IDS, num_target_layers=8)),
        "both lists": top(eagle_aux_hidden_state_layer_ids=INPUTS),
        "inputs in the section": inside("eagle_config", eagle_aux_hidden_state_layer_ids="absent", layer_ids=INPUTS),
        "one list twice": both(
            inside("eagle_config", eagle_aux_hidden_state_layer_ids=INPUTS),
            top(eagle_aux_hidden_state_layer_ids=INPUTS),
        ),
        "outputs in the section": inside(
            "eagle_config", eagle_aux_hidden_state_layer_ids="absent", target_layer_ids=IDS
        ),
        "options of ModelOpt": inside(
            "eagle_config",
            **{"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False},
            **{"next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1},
            **{"eagle_decoder_type": "llama", "has_lm_head": True, "eagle_report_acc": True},
        ),
        "theta of the newer generation": top(rope_parameters=ROPE),
        "two equal thetas": top(rope_theta=1e4, rope_parameters=ROPE),
        "two thetas": top(rope_theta=1e6, rope_parameters=ROPE),
        "no scaling": top(rope_scaling={"type": "default"}),
        "what AngelSlim copies from Hunyuan": top(
            **{"attention_head_dim": 8, "norm_type": "rms", "use_rotary_pos_emb": True, "use_cla": False, "pad_id": 2},
            **{"cla_share_factor": 2, "class_num": 0, "dense_list": [32, 0], "pool_type": "last", "im_start_id": 4},
            **{"text_end_id": 7, "mask_init_id": 12, "org_vocab_size": V, "use_qk_norm": True, "eod_token_id": 1},
        ),
        "tokens and losses of others": top(
            **{"image_token_id": 3, "vision_start_token_id": 1, "eos_token_index": [1, 2], "audio_start_token_id": 4},
            **{"confidence_head_alpha": 1.0, "l1_loss_alpha": 0.1, "model_name": "x", "decoder_start_token_id": 2},
        ),
        "mrope": top(rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]}),
        "linear by 1": top(rope_scaling={"type": "linear", "factor": 1.0}),
        "dynamic": top(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "yarn by 1": top(rope_scaling={**YARN, "factor": 1.0}),
        "rows of pairs": both(top(is_neox_style=False), interleaved),
        "rows of pairs for rope": both(top(rope_is_neox_style=False), interleaved),
        "rows of halves": top(is_neox_style=True, rope_is_neox_style=True),
        "ids by frequency": vocabulary("frequency"),
        "ids by frequency without marks": vocabulary("frequency", marks=False),
        "ids by frequency as they are": vocabulary("frequency", offsets=False),
        "ids as they are": vocabulary("ids", offsets=False),
        "no marks": vocabulary("ids", marks=False),
        "padded by 3": padded(3),
        "padded by 128": padded(128),
        "the target's depth": top(num_hidden_layers=40),
        "full layers": top(layer_types=["full_attention"], sliding_window=4096, use_sliding_window=False),
        "speculators": speculators("eagle3", aux_hidden_state_layer_ids=INPUTS),
        "speculators for Qwen2": both(
            speculators("eagle3", eagle_aux_hidden_state_layer_ids=INPUTS),
            inside("transformer_layer_config", model_type="qwen2"),
        ),
        "keys of the target": top(
            num_experts=64, moe_intermediate_size=8, norm_topk_prob=True, mtp_num_hidden_layers=1
        ),
        "training": top(
            **{"max_anchors": 3072, "ttt_length": 7, "train_args": {"lr": 1e-4}, "has_no_defaults_at_init": False},
            **{"loss_decay_gamma": 4.0, "ce_loss_alpha": 0.1, "target_model_type": "qwen3_moe", "mask_token": "<m>"},
        ),
        "without effect": top(pretraining_tp=2, has_embed_tokens=False, num_aux_layers=3),
        "off": top(use_gemma_norm=False, enable_moe=False, use_anything=False, causal=True, is_causal=True),
    },
    "eagle3 whole": {
        "padded by 3": padded(3),
        "padded by 128": padded(128),
        "both maps": tensors(lambda t: {**t, "d2t": np.zeros(V, np.int64), "t2d": np.ones(V, bool)}),
    },
    "eagle3 default layers": {
        "no list": top(eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": []}),
        "inputs by default": top(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}),
        "as outputs": top(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
        "as inputs": top(eagle_aux_hidden_state_layer_ids=[2, 4, 5]),
    },
    "eagle3 normed": {
        "in the section": move("eagle_config", "norm_before_fc"),
        "by tensors": top(norm_before_fc="absent", fc_norm="absent"),
        "rows of pairs": both(top(is_neox_style=False), interleaved),
    },
    "eagle3 fp8": {
        "with scales": both(tensors(narrow), top(quantization_config=FP8)),
        "with scales of ModelOpt": both(
            tensors(narrow), top(quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
        ),
        "as ModelOpt exports drafts": both(
            tensors(narrow),
            top(
                quantization_config={
                    "producer": {"name": "modelopt", "version": "0.40.0"},
                    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["fc"]},
                }
            ),
        ),
        "with scales of channels of ModelOpt": both(
            tensors(narrow),
            top(quantization_config={"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
        ),
    },
    "eagle3 yarn": {
        "older name": top(rope_scaling={**{k: v for k, v in YARN.items() if k != "rope_type"}, "type": "yarn"}),
        "newer section": both(top(rope_scaling="absent"), top(rope_parameters={**YARN, "rope_theta": 1e4})),
        "length beside": both(
            top(rope_scaling={k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}),
            top(original_max_position_embeddings=16),
        ),
    },
    "eagle3 latent": {
        "a class of vLLM": top(architectures=["Eagle3DeepseekV3ForCausalLM"], model_type="deepseek_v3"),
        "a class of SpecForge": top(architectures=["DeepseekV3ForCausalLMEagle3"], model_type="deepseek_v3"),
        "a class of SGLang": top(architectures=["DeepseekV2ForCausalLMEagle3"], model_type="deepseek_v2"),
        "no class": top(architectures=None),
        "layers.0": first_layer("layers.0."),
        "names of a model": tensors(prefixed),
        "pairs": top(rope_interleave=True, is_neox_style=False, use_mla=True, mla_use_nope=False),
        "heads of transformers": top(head_dim=8, qk_head_dim=10),
        "options of ModelOpt": both(
            inside("eagle_config", use_mtp_layernorm=False, next_layer_regular=True, eagle_decoder_type="kimik2"),
            top(
                **{"aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 8},
                **{"moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "seq_aux": True},
                **{"num_experts_per_tok": 8, "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.8},
                **{"scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc", "norm_topk_prob": True},
                **{"pretraining_tp": 1, "attention_bias": False, "tf_legacy_loss": False},
            ),
        ),
    },
    "dflash": {
        "names of a model": tensors(prefixed),
        "block_size in the section": move("dflash_config", "block_size"),
        "all at the top": lift("dflash_config", mask_token_id="mask_token_id", target_layer_ids="target_layer_ids"),
        "names of DeepSeek-V4": both(
            lift("dflash_config", mask_token_id="dspark_noise_token_id", target_layer_ids="dspark_target_layer_ids"),
            rename(block_size="dspark_block_size"),
        ),
        "noise in the section": inside("dflash_config", mask_token_id="absent", noise_token_id=V - 1),
        "a section of another name": rename(dflash_config="dspark_config"),
        "inputs": inside("dflash_config", target_layer_ids="absent", aux_hidden_state_layer_ids=INPUTS),
        "depth in the section": move("dflash_config", "num_target_layers"),
        "a share of the target": top(partial_rotary_factor=0.25),
        "a share in the newer section": top(rope_parameters={**ROPE, "partial_rotary_factor": 0.25}),
        "two thetas": top(rope_theta=1e6, rope_parameters=ROPE),
        "rows of pairs": both(top(is_neox_style=False), interleaved),
        "rows of pairs in the section": both(inside("dflash_config", rope_is_neox_style=False), interleaved),
        "both ways": inside("dflash_config", causal=False),
        "both ways at the top": top(is_causal=False),
        "not JetSpec's": inside("dflash_config", causal_head=False, draft_shift=False),
        "SpecForge": inside("dflash_config", projector_type="dflash", markov_rank=0),
        "full layers": top(layer_types=["full_attention"] * 2, sliding_window=4, use_sliding_window=False),
        "a window later than its layers": top(use_sliding_window=True, max_window_layers=28, sliding_window=4),
        "padded by 3": padded(3),
        "speculators": speculators("dflash", aux_hidden_state_layer_ids=INPUTS),
        "speculators without a kind of layers": both(
            speculators("dflash", aux_hidden_state_layer_ids=INPUTS),
            inside("transformer_layer_config", model_type="absent"),
        ),
        "no bonus anchor": top(dspark_bonus_anchor=False),
        "features of all layers": inside("dflash_config", use_aux_hidden_state=True),
        "what AngelSlim writes": top(architectures=["QwenDFlashDraftModel"], attention_backend="flex_attention"),
        "what SpecForge writes": inside("dflash_config", attention_mode="gqa"),
        "what z-lab writes": top(
            **{"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "max_window_layers": 2, "dtype": "bfloat16"},
            **{"tie_word_embeddings": False, "use_cache": True, "bos_token_id": 1, "eos_token_id": [2, 3]},
        ),
    },
    "dflash embedding": {"a mask among rows of padding": both(padded(3), mask_in(V + 1))},
    "dflash reduced": {
        "ids by frequency": vocabulary("frequency"),
        "ids as they are": vocabulary("frequency", offsets=False),
        "padded by 3": padded(3),
    },
    "dflash fp8": {
        "with scales": both(tensors(narrow), top(quantization_config=FP8)),
        "with scales and rows of pairs": both(
            interleaved, tensors(narrow), top(quantization_config=FP8, is_neox_style=False)
        ),
    },
    "dflash window": {
        "mixed kinds, without the flag": top(use_sliding_window=False),
        "of the section": both(
            top(layer_types="absent"), inside("dflash_config", use_swa=True, swa_window_size=5, causal=True)
        ),
        "window at the top": both(top(layer_types="absent"), inside("dflash_config", use_swa=True, is_causal=True)),
        "another window at the top": both(
            top(layer_types="absent", sliding_window=4096),
            inside("dflash_config", use_swa=True, swa_window_size=5, causal=True),
        ),
        "from a layer on": top(layer_types="absent", use_sliding_window=True, max_window_layers=0),
        "causal by name": inside("dflash_config", causal=True),
    },
    "dflash window both ways": {
        "MiMo": both(
            top(layer_types="absent", sliding_window="absent"),
            inside("dflash_config", use_swa=True, swa_window_size=5, causal="absent"),
        ),
        "ModelOpt": both(
            top(layer_types=["full_attention"] * 2), inside("dflash_config", use_swa=True, swa_window_size=5)
        ),
        "at the top": both(inside("dflash_config", causal="absent"), top(is_causal=False)),
        "speculators": speculators("dflash", aux_hidden_state_layer_ids=INPUTS, sliding_window_non_causal=True),
    },
    "jetspec": {
        "causal_head": inside("dflash_config", causal="absent", causal_head=True),
        "is_causal": inside("dflash_config", causal="absent", is_causal=True),
        "at the top": both(inside("dflash_config", causal="absent"), top(causal_head=True)),
        "its class": both(inside("dflash_config", causal="absent"), top(architectures=["JetSpecDraftModel"])),
        "named twice": top(is_causal=True),
    },
    "dflash2": {
        "SGLang, by the fields": top(architectures=["DFlashDraftModel"]),
        "by the projector": both(
            top(architectures=["DFlashDraftModel"]), inside("dflash_config", projector_type="dflash2")
        ),
        "sizes at the top": lift("dflash_config", **{key: key for key in (*CONVOLUTIONS, *SELECTOR)}),
        "both ways": top(is_causal=False),
        "block_size in the section": move("dflash_config", "block_size"),
        "a scale of one": inside("dflash_config", input_embedding_scale=1.0),
        "rows of pairs": both(top(is_neox_style=False), interleaved),
        "names of a model": tensors(prefixed),
        "padded by 3": padded(3),
        "speculators": speculators("dflash2", aux_hidden_state_layer_ids=INPUTS, sample_from_anchor=False),
    },
    "dspark": {
        "SpecForge's class": top(architectures=["DSparkDraftModel"]),
        "DFlash by name": top(architectures=["DFlashDraftModel"]),
        "in a section": both(
            move("dflash_config", "markov_rank", "markov_head_type", "block_size", "mask_token_id", "target_layer_ids"),
            top(architectures=["DFlashDraftModel"]),
        ),
        "by the projector": both(
            top(architectures=["DFlashDraftModel"]), inside("dflash_config", projector_type="dspark")
        ),
        "ModelOpt": both(
            move("dflash_config", "markov_rank", "markov_head_type", "mask_token_id", "target_layer_ids"),
            top(architectures=["DFlashDraftModel"], enable_confidence_head="absent"),
            top(confidence_head_with_markov="absent", num_anchors="absent"),
            inside("dflash_config", projector_type="dspark", shift_label=True, use_confidence_head=True, causal=False),
            tensors(flat_head),
        ),
        "stated": top(sample_from_anchor=True, num_anchors=512, confidence_temperatures=[1.0]),
        "no bonus anchor": top(dspark_bonus_anchor=False),
        "a confidence head by its tensors": top(enable_confidence_head="absent", confidence_head_with_markov="absent"),
        "rank of DeepSeek-V4": rename(markov_rank="dspark_markov_rank"),
        "rows of pairs": both(top(rope_is_neox_style=False), interleaved),
        "padded by 3": padded(3),
        "speculators, stated": speculators(
            "dspark", aux_hidden_state_layer_ids=INPUTS, sample_from_anchor=True, **CONFIDENCE
        ),
        "speculators, as many drafts as rows": speculators(
            "dspark", aux_hidden_state_layer_ids=INPUTS, **CONFIDENCE, **speculative_tokens(4)
        ),
    },
    "dspark fill-in": {
        "a bonus anchor": top(sample_from_anchor="absent", dspark_bonus_anchor=True),
        "speculators": speculators("dspark", aux_hidden_state_layer_ids=INPUTS, **CONFIDENCE),
        "speculators, fewer drafts than rows": speculators(
            "dspark", aux_hidden_state_layer_ids=INPUTS, **CONFIDENCE, **speculative_tokens(3)
        ),
    },
    "p-eagle": {
        "PARD's key": rename(ptd_token_id="pard_token"),
        "a key of vLLM": top(parallel_drafting=True),
        "a class of speculators": top(architectures=["PEagleDraftModel"], mask_token_id=V - 1),
        "three axes": tensors(lambda t: {**t, "mask_hidden": t["mask_hidden"][None]}),
        "names of a model": tensors(prefixed),
        "a mask among the padding": both(padded(3), mask_in(V + 1)),
        "speculators": both(
            rename(ptd_token_id="mask_token_id"), speculators("peagle", eagle_aux_hidden_state_layer_ids=INPUTS)
        ),
        "speculators' defaults": both(
            rename(ptd_token_id="mask_token_id"),
            speculators("peagle", eagle_aux_hidden_state_layer_ids=INPUTS, norm_before_residual=None),
        ),
    },
    "pard": {"the key of heads": rename(pard_token="ptd_token_id"), "both keys": top(ptd_token_id=V - 1)},
    "standalone": {
        "padded by 3": padded(3),
        "padded by 128": padded(128),
        "the older generation": both(top(rope_parameters="absent"), top(rope_theta=1e4, rope_scaling=None)),
        "mrope": top(rope_parameters={**ROPE, "type": "mrope", "rope_type": "mrope", "mrope_section": [2, 1, 1]}),
    },
}
"""Base -> spellings with the same proposals."""
OTHER = {
    "eagle3": {
        "pairs": top(is_neox_style=False),
        "theta": top(rope_theta=100.0),
        "yarn": top(rope_scaling=YARN),
        "layers": top(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}),
        "residual": top(norm_before_residual=True),
        "output": top(norm_output=True),
        "window": top(layer_types=["sliding_attention"], sliding_window=3),
        "the last state": both(top(eagle_config={"use_aux_hidden_state": False}), without("fc.weight")),
    },
    "eagle3 latent": {
        "theta": top(rope_theta=100.0),
        "yarn": top(rope_scaling=YARN),
        "epsilon": top(rms_norm_eps=0.5),
        "residual": top(norm_before_residual=True),
        "output": top(norm_output=True),
    },
    "dflash": {
        "pairs": top(is_neox_style=False),
        "causal": inside("dflash_config", causal_head=True),
        "anchor": top(sample_from_anchor=True),
        "layers": inside("dflash_config", target_layer_ids=[0, 3, 5]),
        "mask": inside("dflash_config", mask_token_id=7),
        "yarn": top(rope_scaling=YARN),
        "linear": top(rope_scaling={"type": "linear", "factor": 4.0}),
        "window": top(**WINDOW),
        "one window": top(layer_types=["sliding_attention", "full_attention"], sliding_window=5),
    },
    "dflash2": {
        "sides": tensors(lambda t: turned(t, 0)),
        "taps": tensors(lambda t: turned(t, 1)),
        "codebooks": tensors(exchanged),
        "fewer candidates": inside("dflash_config", selector_top_k=1),
    },
    "dspark": {"anchor": top(sample_from_anchor=False)},
    "p-eagle": {
        "mask": top(ptd_token_id=3),
        "hidden": tensors(lambda t: {**t, "mask_hidden": -t["mask_hidden"]}),
        "embedding": top(embed_requires_grad=False),
    },
    "pard": {"mask": top(pard_token=3), "no mask": top(pard_token="absent")},
}
