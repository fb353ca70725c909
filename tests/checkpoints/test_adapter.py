"""LoRA adapters of peft, merged as a checkpoint is read: logits and texts are peft's own."""

import hf
import lora
import lora_files
import numpy as np
import parity
import pytest

import jspec

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = {
    "llama": ("llama", {}),
    "rslora": ("llama", {"use_rslora": True, "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7}}),
    "alpha": ("qwen3", {"alpha_pattern": {r"^model.layers.0.self_attn.(k|v)_proj": 20, "mlp.down_proj": 1}}),
    "layers": ("qwen3", {"layers_to_transform": [1], "layers_pattern": "layers", "target_modules": ["q_proj"]}),
    "regex": ("llama", {"target_modules": r".*\.0\.(self_attn|mlp)\.(q_proj|down_proj)", "use_dora": True}),
    "all": ("gemma3", {"target_modules": "all-linear", "exclude_modules": ["o_proj"]}),
    "dora": ("gemma3", {"use_dora": True, "target_modules": [*lora_files.ATTENTION]}),
    "saved": ("llama", {"modules_to_save": ["embed_tokens", "lm_head", "input_layernorm"]}),
    "tied head": ("qwen3", {"modules_to_save": ["lm_head"]}),
    "tied embedding": ("qwen3", {"target_modules": ["embed_tokens", "q_proj"]}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "latent": ("deepseek-v3", {"target_modules": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]}),
    "recurrent": ("qwen3_next", {"target_modules": ["in_proj_qkvz", "out_proj", "shared_expert.down_proj"]}),
    "experts": ("qwen3_moe", {"target_modules": [*lora_files.ATTENTION], "target_parameters": EXPERTS}),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A function from a case to the directories of base and adapter, and the oracle."""
    done = {}

    def build(case):
        family, options = CASES[case]
        if case not in done:
            done[case] = lora.pair(family, tmp_path_factory.mktemp("lora"), **options)
        return done[case]

    return build


@pytest.mark.slow(unless=("llama", "rslora", "tied head", "experts", "all"))
@pytest.mark.parametrize("case", CASES)
def test_logits_and_texts_are_those_of_peft(built, case):
    base, adapter, oracle = built(case)
    model = jspec.load(base, adapter=adapter, dtype="float32")
    ids = np.random.default_rng(1).integers(0, 97, (2, 40)).astype(np.int32)
    with lora.torch.no_grad():
        expected = oracle(input_ids=lora.torch.tensor(ids.astype(np.int64))).logits.numpy()
        oracle.disable_adapter_layers()
        plain = oracle(input_ids=lora.torch.tensor(ids.astype(np.int64))).logits.numpy()
        oracle.enable_adapter_layers()
    logits = parity.read(model.target, model.params.target, ids).logits
    np.testing.assert_allclose(logits, expected, atol=1e-5 * max(1, np.abs(expected).max()), rtol=0)
    assert np.abs(plain - expected).max() > 0.1
    prompts, texts = hf.continuations(oracle, (1, 9), 12)
    assert jspec.generate(model, prompts, max_new_tokens=12).tokens == texts


@pytest.mark.slow
@pytest.mark.parametrize("case", ["rslora", "alpha", "layers", "all", "fused"])
def test_an_engine_with_the_adapter_has_the_texts_of_peft(built, case):
    base, adapter, oracle = built(case)
    prompts, texts = hf.continuations(oracle, (1, 9), 12)
    with jspec.Engine(jspec.load(base, dtype="float32"), adapters={"x": adapter}, slots=2, context=64) as engine:
        plain = engine.submit(prompts[1], max_new_tokens=12)
        assert engine.generate(prompts, adapter="x", max_new_tokens=12).tokens == texts
        assert plain.result().tokens != texts[1]
