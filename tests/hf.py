"""Tiny random Hugging Face checkpoints of both families, made with `transformers`, the oracle of the parity tests."""

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


def build(family: str, seed: int = 0, **changes):
    """A model with weights spread enough that logits stand apart. `family` is "llama" or "qwen3"."""
    import torch
    import transformers

    if family == "llama":
        config = transformers.LlamaConfig(**{**BASE, "rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5, **changes})
        model = transformers.LlamaForCausalLM(config)
    else:
        rope = {"rope_type": "default", "rope_theta": 1e6}
        settings = {**BASE, "rope_parameters": rope, "tie_word_embeddings": True, **changes}
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
            else:
                # Norms and biases too, or a weight that is dropped or swapped would not show.
                noise = 0.2 * torch.randn(weight.shape, generator=generator)
                weight.copy_(noise + (1.0 if "norm" in name else 0.0))
    return model.eval()


def save(model, directory: Path, *, sharded: bool = False, old_config: bool = False) -> Path:
    """Writes a checkpoint, in shards and with a config.json of the older generation where asked."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory, max_shard_size="20KB" if sharded else "1GB")
    if old_config:
        path = directory / "config.json"
        raw = json.loads(path.read_text())
        rope = raw.pop("rope_parameters")
        raw["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        raw["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
        raw["torch_dtype"] = raw.pop("dtype")
        path.write_text(json.dumps(raw))
    return directory


def greedy(model, prompt: list[int], max_new_tokens: int, **options) -> list[int]:
    """New tokens of `transformers`' own greedy decoding."""
    import torch

    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, **options
    )
    return out[0, len(prompt) :].tolist()


def margin(model, prompt: list[int], ours: list[int], theirs: list[int]) -> str:
    """Says where two continuations part and how far apart the oracle's logits of the two tokens are there."""
    import torch

    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return f"lengths differ: {len(ours)} and {len(theirs)}"
    with torch.no_grad():
        logits = model(torch.tensor([prompt + theirs[:at]])).logits[0, -1]
    gap = float(logits[theirs[at]] - logits[ours[at]])
    return f"new token {at}: {ours[at]} instead of {theirs[at]}, whose logit is {gap:.2e} higher"
