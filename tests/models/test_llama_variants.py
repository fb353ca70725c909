"""Families that are Llama with options: output and logits equal `transformers`, and other options are refused."""

import hf
import pytest
from parity import check_logits, check_output, check_refused, check_saved, check_unused, edit

import jspec
from jspec.checkpoints import language_model
from jspec.checkpoints.fields import Fields
from jspec.drafters import Ngram, Standalone

pytestmark = pytest.mark.filterwarnings("ignore:.*long_factor is not used")
DRAFTERS = (
    None,
    Ngram(depth=12),
    Standalone(depth=4),
    Standalone(depth=4, width=3, num_nodes=24),
    jspec.Eagle(depth=4, width=3),
    jspec.Suffix(),
)
CASES = [
    (kind, drafter, (1, 5, 16)[(i + k) % 3], (None, 20, 7)[(i + 2 * k) % 3])
    for i, kind in enumerate(hf.VARIANTS)
    for k, drafter in enumerate(DRAFTERS)
    if (i + k) % 2
]
"""Kind, drafter, page size and columns of a chunk: every second pair of the first two."""


@pytest.mark.slow(unless=("qwen2-drafter1", "mistral-windows-drafter10", "olmo3-drafter1"))
@pytest.mark.parametrize(("kind", "drafter", "page_size", "chunk"), CASES)
def test_greedy_output_equals_transformers(pair, kind, drafter, page_size, chunk, monkeypatch):
    out = check_output(pair(kind), drafter, page_size, chunk, monkeypatch)
    if isinstance(drafter, Standalone):
        assert out.stats.accept_length > 1.2


def as_on_the_hub(raw):
    """The older generation's format."""
    rope = raw.pop("rope_parameters")
    if "full_attention" in rope:
        rope = rope["full_attention"]
    raw["rope_theta"], kind = rope.pop("rope_theta"), rope.pop("rope_type")
    raw |= {"partial_rotary_factor": rope.pop("partial_rotary_factor", None)}
    raw["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    raw["torch_dtype"] = raw.pop("dtype")


@pytest.mark.parametrize("old_config", [False, True], ids=["new config", "old config"])
@pytest.mark.parametrize("kind", hf.VARIANTS)
def test_logits_equal_transformers(tmp_path, kind, old_config):
    oracle = hf.build(kind, seed=3)
    hf.save(oracle, tmp_path, sharded=old_config)
    if old_config:
        edit(tmp_path, as_on_the_hub)
    check_logits(oracle, tmp_path, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("qwen2-windows", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ("mistral", {"head_dim": 32, "rope_parameters": {**hf.LLAMA3_ROPE}}),
        ("smollm3", {"attention_bias": True, "no_rope_layers": None, "tie_word_embeddings": False}),
        ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
        ("olmo2", {"num_key_value_heads": 1}),
        ("olmo3", {"layer_types": ["full_attention"] * 5, "rope_parameters": None}),
        ("phi3", {"sliding_window": None, "num_key_value_heads": 4}),
        ("granite", {"attention_bias": True, "tie_word_embeddings": True}),
        ("glm4", {"attention_bias": False, "head_dim": 32, "num_key_value_heads": 4}),
        ("glm", {"attention_bias": False, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    ],
)
def test_logits_equal_transformers_with_other_options(tmp_path, kind, changes):
    oracle = hf.build(kind, seed=4, **changes)
    check_logits(oracle, hf.save(oracle, tmp_path), atol=1e-4)


@pytest.mark.slow(unless=("qwen2", "phi3-long", "glm4", "olmo3"))
@pytest.mark.parametrize("kind", hf.VARIANTS)
def test_our_checkpoint_loads_in_transformers_and_here(tmp_path, pair, kind):
    check_saved(tmp_path, pair(kind), atol=1e-5)


@pytest.mark.parametrize(("kind", "windows"), [("phi3", 0), ("olmo3", 4)])
def test_a_window_of_all_layers_as_long_as_the_context_is_none(kind, windows):
    """In OLMo 3, layers with windows rotate otherwise, so theirs stay."""
    raw = {**hf.build(kind, sliding_window=512).config.to_dict(), "architectures": [type(hf.build(kind)).__name__]}
    config = language_model.parse_config(Fields(raw))
    assert sum(map(bool, config.windows)) == windows and config.max_length == 512
    assert language_model.parse_config(Fields(language_model.describe(config))) == config


def test_an_unused_tensor_is_an_error(tmp_path):
    hf.save(hf.build("mistral"), tmp_path)
    check_unused(tmp_path, "model.layers.1.self_attn.q_proj.bias")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types: sliding_attention"),
        ("qwen2", {"attention_bias": False}, "attention_bias=False"),
        ("mistral", {"layer_types": ["sliding_attention"] * 2}, "layer_types="),
        ("mistral", {"sliding_window": 0}, "sliding_window=0: must be from 1"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\]: must have 4 entries"),
        ("smollm3", {"mlp_bias": True}, "mlp_bias=True"),
        ("olmo3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters has the keys"),
        ("phi3", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("phi3-long", {"partial_rotary_factor": 1.0, "rope_parameters": {"rope_type": "longrope"}}, "short_factor"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier=0: must be above 0"),
        ("glm4", {"partial_rotary_factor": 0.45, "rope_parameters": None}, "must rotate a positive, even number"),
    ],
)
def test_unsupported_configs_are_errors(tmp_path, kind, change, message):
    oracle = hf.build(kind)
    check_refused(tmp_path, {**oracle.config.to_dict(), "architectures": [type(oracle).__name__], **change}, message)


def test_a_family_without_support_is_refused_with_the_list_of_others(tmp_path):
    raw = {"architectures": ["FalconForCausalLM"], "model_type": "falcon"}
    check_refused(
        tmp_path, raw, r"architectures=\['FalconForCausalLM'\] is not supported; must be one of Llama.*Qwen2For"
    )
