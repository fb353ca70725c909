"""Options of a family's config.json that are not supported are errors with their names, before a weight is read."""

import functools

import hf
import pytest
from parity import check_refused

from jspec.checkpoints import language_model
from jspec.checkpoints.fields import Fields

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
QUANTIZED = "quantization_config"
REFUSED = [
    ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("qwen2", {"layer_types": [SLIDING] * 2}, "layer_types: sliding_attention"),
    ("qwen2", {"attention_bias": False}, "attention_bias=False"),
    ("mistral", {"layer_types": [SLIDING] * 2}, "layer_types="),
    ("mistral", {"sliding_window": 0}, "sliding_window=0: must be from 1"),
    ("smollm3", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\]: must have 4 entries"),
    ("smollm3", {"mlp_bias": True}, "mlp_bias=True"),
    ("olmo3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters has the keys"),
    ("phi3", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ("phi3-long", {"partial_rotary_factor": 1.0, "rope_parameters": {"rope_type": "longrope"}}, "short_factor"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier=0: must be above 0"),
    ("glm4", {"partial_rotary_factor": 0.45, "rope_parameters": None}, "must rotate a positive, even number"),
    ("gemma3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("gemma3", {"attention_bias": True}, "attention_bias"),
    ("gemma3", {"hidden_activation": "silu"}, "hidden_activation='silu'"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("gemma3", {"tie_word_embeddings": False}, "tie_word_embeddings"),
    ("gemma3", {"layer_types": [FULL] * 3}, "must be 4 of"),
    ("gemma3", {"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters has the keys \['rope_type'\]"),
    ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "factor=4.0, but .*full_attention.factor=8.0"),
    (
        "gemma3",
        {"rope_local_base_freq": 5.0},
        "rope_theta has two values, 5.0 and .*sliding_attention.rope_theta=10000.0",
    ),
    ("gemma3", {"num_key_value_heads": 3}, "is not a multiple of kv_heads=3"),
    ("gemma3", {"hidden_size": "absent"}, "'hidden_size' is missing"),
    ("gemma4-shared", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("gemma4-shared", {"attention_bias": True}, "attention_bias"),
    ("gemma4-shared", {"hidden_activation": "silu"}, "hidden_activation='silu'"),
    ("gemma4-shared", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ("gemma4-shared", {"tie_word_embeddings": False}, "tie_word_embeddings"),
    ("gemma4-shared", {"vocab_size_per_layer_input": 50}, "vocab_size_per_layer_input=50 with vocab_size=97"),
    ("gemma4-shared", {"layer_types": [SLIDING] * 4}, "the last layer must be full_attention"),
    ("gemma4-shared", {"layer_types": [FULL] * 3}, "must be 4 of"),
    ("gemma4-shared", {"layer_types": [LINEAR] * 4}, "must be 4 of sliding_attention, full_attention"),
    ("gemma4-shared", {"per_layer_config": {"1": {"rope_theta": 1.0}}}, "per_layer_config of layer 1"),
    (
        "gemma4-shared",
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1.0}}},
        "rope_type='yarn' is not supported; must be default or proportional",
    ),
    ("gemma4-shared", {"num_kv_shared_layers": 3}, "layer 1 has no layer of its kind to share with among the first 1"),
    ("gemma4-shared", {"num_key_value_heads": 3}, "is not a multiple of kv_heads=3"),
    ("gemma4-shared", {"sliding_window": None}, "sliding_window=None: must be an int"),
    ("gemma4-shared", {"head_dim": "absent"}, "'head_dim' is missing"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("gpt_oss", {"layer_types": [SLIDING] * 4}, "must be 3 of sliding_attention, full_attention"),
    ("gpt_oss", {"layer_types": [LINEAR] * 3}, "must be 3 of sliding_attention, full_attention"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window=None: must be an int"),
    ("gpt_oss", {"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads=3"),
    ("gpt_oss", {"num_experts_per_tok": 7}, "chosen=7: must be between 1 and 6"),
    ("gpt_oss", {"num_local_experts": "absent"}, "'num_local_experts' is missing"),
    ("gpt_oss", {"rope_parameters": "absent"}, "'rope_theta' is missing"),
    ("gpt_oss", {"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, "rope_type='axial' is not supported"),
    ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit=0: must be above 0"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "is not supported; must have quant_method='mxfp4'"),
    ("deepseek-v3", {QUANTIZED: {"quant_method": "mxfp4"}}, f"{QUANTIZED}=.*mxfp4.* is not supported"),
    ("deepseek-v3", {QUANTIZED: dict(quant_method="fp8", fmt="e4m3", weight_block_size=None)}, "weight_block_size"),
    ("deepseek-v3", {"attention_bias": True}, "attention_bias=True"),
    ("deepseek-v3", {"rope_interleave": False}, "rope_interleave=False"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "not supported in deepseek_v3: scoring_func='softmax'"),
    ("deepseek-v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
    ("deepseek-v3", {"n_shared_experts": None}, "n_shared_experts=None"),
    ("deepseek-v3", {"n_group": 3}, "groups=3 must divide the number of experts \\(8\\)"),
    ("deepseek-v3", {"topk_group": 5}, "kept_groups=5"),
    ("deepseek-v3", {"n_group": 8}, "best_of_group=2: must be between 1 and 1"),
    ("deepseek-v3", {"num_experts_per_tok": 5}, "chosen=5: must be between 1 and 4, the experts of kept_groups=2"),
    ("deepseek-v32", {"q_lora_rank": None}, "q_lora_rank=None"),
    ("deepseek-v32", {"index_topk": "absent"}, "'index_topk' is missing"),
    ("deepseek-v32", {"mlp_layer_types": ["sparse", "dense"]}, "must have one entry per layer, dense ones first"),
    ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
    ("deepseek-v2", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ("deepseek-v2", {"rope_parameters": {"rope_type": "axial"}}, "rope_type='axial' is not supported"),
    ("deepseek-v2", {"kv_lora_rank": "absent"}, "'kv_lora_rank' is missing"),
    ("deepseek-v2", {"kv_lora_rank": None}, "kv_lora_rank=None: must be an int"),
    ("qwen3_next", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("qwen3_next", {"is_causal": False}, "is_causal=False"),
    ("qwen3_next", {"text_config": {"is_causal": False}}, "text_config.is_causal=False"),
    ("qwen3_next", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate=False"),
    ("qwen3_next", {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
    ("qwen3_next", {"layer_types": [SLIDING] * 3}, "must be 3 of linear_attention, full_attention"),
    ("qwen3_next", {"layer_types": [LINEAR]}, "must be 3 of"),
    ("qwen3_next", {"rope_parameters": {"rope_type": "axial", "rope_theta": 1.0}}, "must be default or linear or"),
    (
        "qwen3_next",
        {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.2}},
        "partial_rotary_factor=0.2: must rotate a positive, even number",
    ),
    ("qwen3_next", {"linear_num_value_heads": 3}, "value_heads=3 is not a multiple of key_heads=2"),
    ("qwen3_next", {"num_key_value_heads": 3}, "is not a multiple of num_kv_heads=3"),
    ("qwen3_next", {"num_experts": 0, "intermediate_size": "absent"}, "'intermediate_size' is missing"),
    ("qwen3_next", {"linear_key_head_dim": "absent"}, "'linear_key_head_dim' is missing"),
    ("qwen3_next", {"linear_key_head_dim": None}, "linear_key_head_dim=None: must be an int"),
    ("qwen3_moe", {"num_experts": None, "num_local_experts": None}, "num_experts=None: must be an int"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "chosen=9: must be between 1 and 8"),
    ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size=None: must be an int"),
    ("qwen3_5_moe", {"norm_topk_prob": False}, r"norm_topk_prob=False \(must be True\)"),
]
"""Family of `hf.build`, what is changed, and the error. `transformers` ignores the last key: the weights of experts of
Qwen3.5 are normalized in any case, and those of Qwen3-Next by the key."""


@functools.cache
def config_json(family):
    model = hf.build(family)
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


@pytest.mark.filterwarnings("ignore:.*long_factor is not used")
@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_an_option_that_is_not_supported_is_refused(tmp_path, family, change, message):
    check_refused(tmp_path, {**config_json(family), **change}, message)


def test_a_family_without_support_is_refused_with_the_list_of_others(tmp_path):
    raw = {"architectures": ["FalconForCausalLM"], "model_type": "falcon"}
    check_refused(
        tmp_path, raw, r"architectures=\['FalconForCausalLM'\] is not supported; must be one of Llama.*Qwen2For"
    )


@pytest.mark.parametrize(("kind", "windows"), [("phi3", 0), ("olmo3", 4)])
def test_a_window_of_all_layers_as_long_as_the_context_is_none(kind, windows):
    """In OLMo 3, layers with windows rotate otherwise, so theirs stay."""
    raw = {**hf.build(kind, sliding_window=512).config.to_dict(), "architectures": [type(hf.build(kind)).__name__]}
    config = language_model.parse_config(Fields(raw))
    assert sum(map(bool, config.windows)) == windows and config.max_length == 512
    assert language_model.parse_config(Fields(language_model.family_by_config(config).describe(config))) == config
