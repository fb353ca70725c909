"""EAGLE heads as in their papers and in the engines that serve them, in plain numpy and float64.

Everything here reads the config.json and the tensors of a checkpoint, as they lie on disk, and nothing of jspec: the
oracle of the tests that load such a checkpoint.
"""

import numpy as np

Tensors = dict[str, np.ndarray]
"""Weights by name, [out, in]."""


def fuse(raw: dict, t: Tensors, hidden: np.ndarray) -> np.ndarray:
    """hidden [N, C], captured from the target -> features [N, E]."""
    if version(t) == 1:
        return hidden
    eps, names = layer_config(raw)["rms_norm_eps"], ["fc_norm.{}.weight", "aux_norm_{}.weight"]
    for name, chunks in zip(names, [range(9), ("low", "mid", "high")], strict=True):
        norms = [t[name.format(i)] for i in chunks if name.format(i) in t]
        if norms:
            parts = np.split(hidden, len(norms), axis=-1)
            hidden = np.concatenate([norm(x, w, eps) for x, w in zip(parts, norms, strict=True)], axis=-1)
    if "input_norm.weight" in t:
        hidden = norm(hidden, t["input_norm.weight"], eps)
    return linear(hidden, t, "fc")


def forward(raw: dict, t: Tensors, embed: np.ndarray, head: np.ndarray, tokens: np.ndarray, feature: np.ndarray):
    """Logits [N, Vd] and next features [N, E] after each of N (token, feature) pairs, the first at position 0.

    embed [V, E], head [V, E]: the target's, for a head that has none of its own or whose copy is frozen.
    """
    config = layer_config(raw)
    eps = config["rms_norm_eps"]
    if config["hidden_size"] != embed.shape[1] or raw.get("embed_requires_grad", "mask_hidden" in t):
        embed = t["embed_tokens.weight"]
    e = embed[tokens].astype(np.float64)
    if version(t) == 1:
        x = read = linear(np.concatenate([e, feature], axis=-1), t, "fc")
    else:
        first = "midlayer." if "midlayer.hidden_norm.weight" in t else "layers.0."
        g = norm(feature, t[first + "hidden_norm.weight"], eps)
        x = g if raw.get("norm_before_residual") else feature
        read = np.concatenate([norm(e, t[first + "input_layernorm.weight"], eps), g], axis=-1)
    for n in range(config["num_hidden_layers"]):
        prefix = "midlayer." if n == 0 and "midlayer.mlp.up_proj.weight" in t else f"layers.{n}."
        if n:
            name = "input_layernorm" if prefix + "input_layernorm.weight" in t else "hidden_norm"
            read = norm(x, t[f"{prefix}{name}.weight"], eps)
        x = x + attention(config, t, prefix + "self_attn.", read)
        y = norm(x, t[prefix + "post_attention_layernorm.weight"], eps)
        gate, up = linear(y, t, prefix + "mlp.gate_proj"), linear(y, t, prefix + "mlp.up_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, t, prefix + "mlp.down_proj")
    if version(t) == 1:
        return x @ head.astype(np.float64).T, x
    y = norm(x, t["norm.weight"], eps)
    logits = linear(y, t, "lm_head") if "lm_head.weight" in t else y @ head.astype(np.float64).T
    if candidates := raw.get("efficient_lm_head_config"):
        low = linear(linear(y, t, "efficient_lm_head_down_proj"), t, "efficient_lm_head")
        least = np.sort(low, axis=-1)[:, -candidates["num_candidates"], None]
        logits = np.where(low >= least, logits, -np.inf)
    return logits, y if raw.get("norm_output") else x


def attention(config: dict, t: Tensors, prefix: str, read: np.ndarray) -> np.ndarray:
    """Causal attention, one query at a time."""
    if prefix + "kv_b_proj.weight" in t:
        return latent_attention(config, t, prefix, read)
    heads, dim = config["num_attention_heads"], config["head_dim"]
    q, k, v = (linear(read, t, f"{prefix}{name}_proj").reshape(len(read), -1, dim) for name in "qkv")
    if prefix + "q_norm.weight" in t:
        q = norm(q, t[prefix + "q_norm.weight"], config["rms_norm_eps"])
        k = norm(k, t[prefix + "k_norm.weight"], config["rms_norm_eps"])
    q, k = rotate(q, config.get("rope_theta", 1e4)), rotate(k, config.get("rope_theta", 1e4))
    out, window = np.zeros_like(q), config.get("sliding_window") or len(read)
    for position in range(len(read)):
        for h in range(heads):
            kv = h * k.shape[1] // heads
            seen = slice(max(0, position + 1 - window), position + 1)
            score = np.exp(k[seen, kv] @ q[position, h] / dim**0.5)
            out[position, h] = score / score.sum() @ v[seen, kv]
    return linear(out.reshape(len(read), -1), t, prefix + "o_proj")


def latent_attention(config: dict, t: Tensors, prefix: str, read: np.ndarray) -> np.ndarray:
    """Attention as in DeepSeek-V2, section 2.1, with keys and values of each head, one query at a time."""
    heads, eps, count = config["num_attention_heads"], config["rms_norm_eps"], len(read)
    rank, flat, value = config["kv_lora_rank"], config["qk_nope_head_dim"], config["v_head_dim"]
    if prefix + "q_proj.weight" in t:
        q = linear(read, t, prefix + "q_proj")
    else:
        q = norm(linear(read, t, prefix + "q_a_proj"), t[prefix + "q_a_layernorm.weight"], eps)
        q = linear(q, t, prefix + "q_b_proj")
    q = q.reshape(count, heads, -1)
    row = linear(read, t, prefix + "kv_a_proj_with_mqa")
    latent = norm(row[:, :rank], t[prefix + "kv_a_layernorm.weight"], eps)
    k, v = np.split(linear(latent, t, prefix + "kv_b_proj").reshape(count, heads, -1), [flat], axis=-1)
    turned = rotate_pairs(config, np.concatenate([q[..., flat:], row[:, None, rank:]], axis=1))
    out = np.zeros((count, heads, value))
    for position in range(count):
        for h in range(heads):
            score = k[: position + 1, h] @ q[position, h, :flat] + turned[: position + 1, -1] @ turned[position, h]
            score = np.exp(score * sharpness(config) / q.shape[-1] ** 0.5)
            out[position, h] = score / score.sum() @ v[: position + 1, h]
    return linear(out.reshape(count, -1), t, prefix + "o_proj")


def sharpness(config: dict) -> float:
    """DeepSeek's factor on scores with YaRN."""
    yarn = config.get("rope_scaling") or {}
    return (0.1 * yarn.get("mscale_all_dim", 0) * np.log(yarn.get("factor", 1)) + 1) ** 2


def rotate_pairs(config: dict, x: np.ndarray) -> np.ndarray:
    """Rotary positions: elements 2 i and 2 i + 1 of a head are a complex number. With YaRN, slow ones turn less."""
    half, theta, yarn = x.shape[-1] // 2, config.get("rope_theta", 1e4), config.get("rope_scaling")
    speed, magnitude = theta ** (-np.arange(half) / half), 1.0
    if yarn:
        length, factor = yarn["original_max_position_embeddings"], yarn["factor"]
        fast, slow = (half * np.log(length / (2 * np.pi * turns)) / np.log(theta) for turns in (32, 1))
        fast, slow = max(np.floor(fast), 0), min(np.ceil(slow), 2 * half - 1)
        share = np.clip((np.arange(half) - fast) / (slow - fast), 0, 1)
        speed = speed * (1 - share) + speed / factor * share
        ours, all_dims = (0.1 * yarn[key] * np.log(factor) + 1 for key in ("mscale", "mscale_all_dim"))
        magnitude = ours / all_dims
    angle = np.arange(len(x))[:, None, None] * speed
    turned = magnitude * (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary positions: element i and element i + D/2 of a head are a complex number."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def linear(x: np.ndarray, t: Tensors, name: str) -> np.ndarray:
    y = x @ t[name + ".weight"].astype(np.float64).T
    return y + t[name + ".bias"] if name + ".bias" in t else y


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def version(t: Tensors) -> int:
    return 3 if "norm.weight" in t else 1


def layer_config(raw: dict) -> dict:
    return raw.get("transformer_layer_config", raw)


def target_ids(t: Tensors) -> np.ndarray:
    """The target's id for each of the draft's."""
    return np.array([i + int(offset) for i, offset in enumerate(t["d2t"])])
