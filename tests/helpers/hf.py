"""Tiny random Hugging Face checkpoints of all families, made with `transformers`, the oracle of the parity tests."""

import json
from pathlib import Path

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA4 = {
    **BASE,
    "pad_token_id": 0,
    "global_head_dim": 32,
    "sliding_window": 8,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_VALUES_ARE_KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_KINDS = {
    "dense": {**_VALUES_ARE_KEYS, "layer_types": [_SLIDING, _SLIDING, _FULL]},
    "shared": {
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": BASE["vocab_size"],
    },
    "experts": {
        **_VALUES_ARE_KEYS,
        "layer_types": [_SLIDING, _FULL],
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
}
"""Features of some sizes of Gemma 4: 12B and 31B, E2B and E4B, and 26B-A4B."""

GEMMA3 = {
    **BASE,
    "pad_token_id": 0,
    "num_hidden_layers": 4,
    "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
}
_NO_DIM = {key: value for key, value in BASE.items() if key != "head_dim"}
_ROPE_1E5 = {"rope_type": "default", "rope_theta": 1e5}
_OLMO3_ROPE = {
    _SLIDING: {"rope_type": "default", "rope_theta": 5e5},
    _FULL: {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 5e5},
}
_LONG = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.0, 2.0, 3.0, 4.0]}
VARIANTS = {
    "qwen2": ("Qwen2", {**_NO_DIM, "rope_parameters": _ROPE_1E5}),
    "qwen2-windows": (
        "Qwen2",
        {**_NO_DIM, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "mistral": ("Mistral", {**BASE, "sliding_window": None, "rope_parameters": _ROPE_1E5}),
    "mistral-windows": ("Mistral", {**BASE, "sliding_window": 8}),
    "smollm3": ("SmolLM3", {**_NO_DIM, "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    "olmo2": ("Olmo2", {**_NO_DIM, "rope_parameters": _ROPE_1E5}),
    "olmo3": ("Olmo3", {**_NO_DIM, "num_hidden_layers": 5, "sliding_window": 8, "rope_parameters": _OLMO3_ROPE}),
    "phi3": ("Phi3", {**_NO_DIM, "sliding_window": 8}),
    "phi3-long": (
        "Phi3",
        {
            **{**_NO_DIM, "hidden_size": 48, "original_max_position_embeddings": 256},
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.67, **_LONG},
        },
    ),
    "granite": (
        "Granite",
        {
            **{**_NO_DIM, "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 2.5},
            "residual_multiplier": 0.7,
        },
    ),
    "glm": ("Glm", {**BASE, "attention_bias": True}),
    "glm4": ("Glm4", BASE),
}
"""Kind -> prefix of its classes, and its settings. The first part of a kind is the model_type."""
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK = {
    **{key: value for key, value in BASE.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
}
_NO_HEADS = {"num_nextn_predict_layers": 0}
"""`transformers` writes no tensors of MTP heads."""
DEEPSEEK_KINDS = {
    "v2": {"q_lora_rank": None, "topk_method": "greedy", "num_experts_per_tok": 3},
    "v2_groups": {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0, "rope_parameters": _YARN},
    "v3": {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "rope_parameters": _YARN, **_NO_HEADS},
    # With fewer heads many scores are 0, and the choice among equal scores is arbitrary.
    "v32": {"rope_parameters": _YARN, "index_topk": 16, "index_head_dim": 24, "index_n_heads": 16, **_NO_HEADS},
}
"""V2-Lite, V2, V3 and V3.2: how queries are projected, experts chosen, positions scaled and tokens selected."""

GPT_OSS = {
    **BASE,
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
    "swiglu_limit": 1.5,
}
"""With a bound that some values of the gate exceed."""


def gemma4_config(kind: str, **changes):
    """The configuration of a text model of a kind in `GEMMA4_KINDS`."""
    import transformers

    settings = {**GEMMA4, **GEMMA4_KINDS[kind], **changes}
    return transformers.Gemma4TextConfig(**{**settings, "num_hidden_layers": len(settings["layer_types"])})


QWEN3_NEXT = {
    **BASE,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24)
_LINEAR = "linear_attention"
_QWEN3_NEXT_FAMILIES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_EXPERTS, "layer_types": [_LINEAR, _FULL, _LINEAR]}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {"layer_types": [_LINEAR, _FULL]}),
    "qwen3_5_moe": (
        *("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
        {**_EXPERTS, "layer_types": [_LINEAR] * 3 + [_FULL]},
    ),
}


def qwen3_next(family: str, **changes):
    """A `transformers` model with recurrent layers; `family` is a key of `_QWEN3_NEXT_FAMILIES`."""
    import transformers

    config, model, own = _QWEN3_NEXT_FAMILIES[family]
    settings = {**QWEN3_NEXT, **own, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **changes}
    settings["num_hidden_layers"] = len(settings["layer_types"])
    if family == "qwen3_5_moe":
        del settings["intermediate_size"]
    return getattr(transformers, model)(getattr(transformers, config)(**settings))


def assistant_config(kind: str, *, ordered: bool = False, **changes) -> dict:
    """config.json of an assistant for a target of a kind in `GEMMA4_KINDS`.

    ordered: with an LM head of 12 clusters, of which 5 are chosen. changes: of both text models.
    """
    layers = {"layer_types": [_SLIDING] * 3 + [_FULL], "num_hidden_layers": 4, "num_kv_shared_layers": 4}
    own = {"hidden_size": 48, "vocab_size_per_layer_input": 0, **layers}
    shape = _VALUES_ARE_KEYS if "attention_k_eq_v" in GEMMA4_KINDS[kind] else {}
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": GEMMA4["hidden_size"],
        "use_ordered_embeddings": ordered,
        "num_centroids": 12,
        "centroid_intermediate_top_k": 5,
        "tie_word_embeddings": True,
        "text_config": {**GEMMA4, **shape, **changes, **own},
    }


def build_assistant(raw: dict, seed: int = 7):
    """The assistant that `assistant_config` describes, with random weights.

    Raises:
      ValueError: this version of `transformers` cannot build one, as 5.23.0 cannot.
    """
    import torch
    import transformers

    settings = {name: value for name, value in raw.items() if name not in ("architectures", "model_type")}
    text = transformers.Gemma4TextConfig(**settings.pop("text_config"))
    model = transformers.Gemma4AssistantForCausalLM(transformers.Gemma4AssistantConfig(text_config=text, **settings))
    if raw["use_ordered_embeddings"]:
        order = torch.randperm(text.vocab_size, generator=torch.Generator().manual_seed(seed))
        model.masked_embedding.token_ordering.copy_(order)
    return randomize(model, seed)


def set_gate(model, settings: dict):
    """A gpt-oss with the gate of these settings. `transformers` up to 5.17 has constants, whatever the settings say."""
    for layer in model.model.layers:
        layer.mlp.experts.limit = settings["swiglu_limit"]
        layer.mlp.experts.alpha = settings.get("swiglu_alpha", 1.702)
    return model


def build(family: str, seed: int = 0, **changes):
    """A model with random weights.

    family: "llama", "qwen3", "qwen3_moe", "gemma3", "gpt_oss", a key of `VARIANTS`, one of `qwen3_next`, or "gemma4-"
      and a kind in `GEMMA4_KINDS`, or "deepseek-" and a kind in `DEEPSEEK_KINDS`.
    changes: of its configuration; a list may be a tuple.
    """
    import transformers

    changes = {name: list(value) if isinstance(value, tuple) else value for name, value in changes.items()}
    if family == "llama":
        config = transformers.LlamaConfig(**{**BASE, "rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5, **changes})
        model = transformers.LlamaForCausalLM(config)
    elif family == "qwen3_moe":
        model = _build_qwen3_moe(changes)
    elif family == "gpt_oss":
        settings = {**GPT_OSS, **changes}
        model = set_gate(transformers.GptOssForCausalLM(transformers.GptOssConfig(**settings)), settings)
    elif family.startswith("deepseek-"):
        model = _build_deepseek(family.removeprefix("deepseek-"), changes)
    elif family in VARIANTS:
        prefix, settings = VARIANTS[family]
        config = getattr(transformers, f"{prefix}Config")(**{**settings, **changes})
        config.eos_token_id = None  # some families have ids of their own vocabulary
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    elif family == "gemma3":
        settings = {**GEMMA3, **changes}
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**settings))
    elif family.startswith("gemma4-"):
        model = transformers.Gemma4ForCausalLM(gemma4_config(family.removeprefix("gemma4-"), **changes))
    elif family in _QWEN3_NEXT_FAMILIES:
        model = qwen3_next(family, **changes)
    else:
        rope = {"rope_type": "default", "rope_theta": 1e6}
        settings = {**BASE, "rope_parameters": rope, "tie_word_embeddings": True, **changes}
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings))
    return randomize(model, seed)


def _build_qwen3_moe(changes):
    import transformers

    rope = {"rope_type": "default", "rope_theta": 1e6}
    experts = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}
    settings = {**BASE, "rope_parameters": rope, **experts, **changes}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**settings))


def _build_deepseek(kind: str, changes):
    import transformers

    name = f"DeepseekV{kind[1:].split('_')[0]}"
    config = getattr(transformers, name + "Config")(**{**DEEPSEEK, **DEEPSEEK_KINDS[kind], **changes})
    return getattr(transformers, name + "ForCausalLM")(config)


def randomize(model, seed: int = 0):
    """The model with weights that are spread enough to keep logits apart."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    stored = ("layer_scalar", "e_score_correction_bias")
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(stored)]
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *buffers]:
            if weight.ndim >= 2:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
            else:
                # Norms and biases are random too; otherwise a dropped or swapped weight would go unnoticed.
                noise = 0.2 * torch.randn(weight.shape, generator=generator)
                weight.copy_(noise + (1.0 if "norm" in name or "scal" in name else 0.0))
    return model.eval()


def save(model, directory: Path, *, sharded: bool = False, old_config: bool = False) -> Path:
    """Writes a checkpoint, optionally in shards and with a config.json in the older generation's format."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory, max_shard_size="20KB" if sharded else "1GB")
    if old_config:
        path = directory / "config.json"
        raw = json.loads(path.read_text())
        rope = raw.pop("rope_parameters")
        rope = rope.get(_FULL, rope)
        raw["rope_theta"], kind = rope.pop("rope_theta"), rope.pop("rope_type")
        raw["partial_rotary_factor"] = rope.pop("partial_rotary_factor", None)
        raw["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
        raw["torch_dtype"] = raw.pop("dtype")
        path.write_text(json.dumps(raw))
    return directory


def add_mtp(directory: Path, heads: int = 1, seed: int = 5) -> dict:
    """Puts random MTP heads into a checkpoint in one file, named as on the hub, which `save` does not write.

    Of DeepSeek each is one more layer, with copies of the embedding and the LM head; Qwen's single one has names of its
    own. Returns all tensors of the checkpoint.
    """
    import numpy as np
    from safetensors.numpy import load_file, save_file

    config, path = json.loads((directory / "config.json").read_text()), directory / "model.safetensors"
    tensors, rng = load_file(path), np.random.default_rng(seed)

    def random(*shape):
        values = rng.normal(size=shape).astype(np.float32)
        return values * np.float32(shape[-1] ** -0.5) if len(shape) > 1 else 1 + values * np.float32(0.2)

    width, qwen = config["hidden_size"], config["model_type"].startswith("qwen")
    full = config["layer_types"].index(_FULL) if qwen else config["num_hidden_layers"] - 1
    for index in range(heads):
        root = "mtp." if qwen else f"model.layers.{config['num_hidden_layers'] + index}."
        names = (
            ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm") if qwen else ("enorm", "hnorm", "shared_head.norm")
        )
        own = {f"{root}{name}.weight": random(width) - np.float32(qwen) for name in names}
        own[root + ("fc.weight" if qwen else "eh_proj.weight")] = random(width, 2 * width)
        if not qwen:
            own[root + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
            own[root + "shared_head.head.weight"] = tensors["lm_head.weight"]
        for name, like in tensors.items():
            if name.startswith(layer := f"model.layers.{full}."):
                centered = qwen and name.endswith("norm.weight")
                own[name.replace(layer, root + "layers.0." if qwen else root)] = random(*like.shape) - np.float32(
                    centered
                )
        tensors |= own
    save_file(tensors, path, metadata={"format": "pt"})
    if not qwen:
        (directory / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": heads}))
    return tensors


def greedy(model, prompt: list[int], max_new_tokens: int, **options) -> list[int]:
    """New tokens of `transformers`' own greedy decoding."""
    import torch

    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, **options
    )
    return out[0, len(prompt) :].tolist()


def margin(model, prompt: list[int], ours: list[int], theirs: list[int]) -> str:
    """Describes where two continuations diverge, and the gap between the oracle's logits of the two tokens."""
    import torch

    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return f"lengths differ: {len(ours)} and {len(theirs)}"
    with torch.no_grad():
        logits = model(torch.tensor([prompt + theirs[:at]])).logits[0, -1]
    gap = float(logits[theirs[at]] - logits[ours[at]])
    return f"new token {at}: {ours[at]} instead of {theirs[at]}, whose logit is {gap:.2e} higher"


def noisy_pair(build, noise: float, directory: Path):
    """A model with a noisy copy of it as its draft, both read from checkpoints, and the model that is their oracle.

    build: makes the same model at each call. noise: of each weight, in its standard deviations.
    """
    import torch

    import jspec
    from jspec.checkpoints import language_model
    from jspec.core.types import Params

    exact, noisy = build(), build()
    with torch.no_grad():
        for weight in noisy.parameters():
            added = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
            weight.add_(noise * weight.std(correction=0) * added)
    target, draft = (
        language_model.load(save(model, directory / name), dtype="float32")
        for name, model in (("target", exact), ("draft", noisy))
    )
    return jspec.Model("noisy", target.config, Params(target.params, draft.params), None, (), draft.config), exact


def continuations(model, lengths, new_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Random prompts of these lengths, and the new tokens of `transformers`' own greedy decoding."""
    import numpy as np

    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.config.get_text_config().vocab_size, n).tolist() for n in lengths]
    return prompts, [greedy(model, prompt, new_tokens) for prompt in prompts]
