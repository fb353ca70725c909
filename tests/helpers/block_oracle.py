"""Block drafts as in their papers and in the code of their authors, in plain numpy and float64, one row at a time.

Everything here reads the config.json and the tensors of a checkpoint, as they lie on disk, and nothing of jspec: the
oracle of the tests that load such a checkpoint.
"""

import numpy as np
from eagle_oracle import Tensors, linear, norm


def option(raw: dict, key: str, default=None):
    """A key of the method, wherever a layout has it."""
    inner = raw.get("dflash_config") or {}
    return inner.get(key, raw.get(key, default))


def layer_config(raw: dict) -> dict:
    return raw.get("transformer_layer_config", raw)


def next_token(raw: dict) -> bool:
    """Whether row j predicts the token at its position + 1."""
    if "speculators_model_type" in raw:
        return raw.get("sample_from_anchor", False)
    dspark = "DSpark" in raw["architectures"][0] or option(raw, "projector_type") == "dspark"
    return option(raw, "sample_from_anchor", dspark)


def entering_layers(raw: dict, target_layers: int) -> list[int]:
    """The layers of the target whose inputs the draft reads."""
    if "speculators_model_type" in raw:
        return raw["aux_hidden_state_layer_ids"]
    ids, count = option(raw, "target_layer_ids"), layer_config(raw)["num_hidden_layers"]
    if ids is None:
        ids = [round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count)]
    return [i + 1 for i in ids]


def feature(raw: dict, t: Tensors, hidden: np.ndarray) -> np.ndarray:
    """hidden [T, C], captured from the target -> features [T, E]."""
    return norm(linear(hidden, t, "fc"), t["hidden_norm.weight"], layer_config(raw)["rms_norm_eps"])


def context(raw: dict, t: Tensors, layer: int, g: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values [K, D] of each committed position in a layer."""
    return [keys(raw, t, layer, row, position) for position, row in enumerate(g)]


def keys(raw: dict, t: Tensors, layer: int, row: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
    config, prefix = layer_config(raw), f"layers.{layer}.self_attn."
    k, v = (linear(row, t, f"{prefix}{name}_proj").reshape(-1, config["head_dim"]) for name in "kv")
    k = norm(k, t[prefix + "k_norm.weight"], config["rms_norm_eps"])
    return rotate(k, position, config.get("rope_theta", 1e4)), v


def rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * position * theta ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag], axis=-1)


def sees(raw: dict, layer: int) -> tuple[int | None, bool]:
    """The window of a layer, and whether it is causal inside the block."""
    config, inner = layer_config(raw), raw.get("dflash_config") or {}
    kind = config.get("layer_types", ["full_attention"] * 99)[layer]
    window = config["sliding_window"] if kind == "sliding_attention" else None
    causal = window is not None and not raw.get("sliding_window_non_causal", False)
    if inner.get("use_swa"):
        window = inner["swa_window_size"]
    for stated in (inner.get("causal"), inner.get("causal_head"), raw.get("is_causal"), config.get("is_causal")):
        causal = causal if stated is None else stated
    return window, causal


def block(
    raw: dict,
    t: Tensors,
    embed: np.ndarray,
    head: np.ndarray,
    hidden: np.ndarray,
    root: int,
    limit: int | None = None,
    keep_first: int = 0,
):
    """Outputs [gamma, E] and logits [gamma, Vd] of the rows that predict, after the committed positions of `hidden`.

    embed [V, E], head [V, E]: the target's, for a draft without its own.
    limit, keep_first: the drafter's window; the first positions are those of layers without a window of their own.
    """
    config, g = layer_config(raw), feature(raw, t, hidden)
    eps, start, size = config["rms_norm_eps"], len(hidden), option(raw, "block_size")
    embed, head = t.get("embed_tokens.weight", embed), t.get("lm_head.weight", head)
    tokens = [root] + [option(raw, "mask_token_id")] * (size - 1)
    x = [embed[token].astype(np.float64) for token in tokens]
    for n in range(config["num_hidden_layers"]):
        past, (window, causal) = context(raw, t, n, g), sees(raw, n)
        prefix = f"layers.{n}."
        before, after = convolutions(
            raw, t, prefix + "attention_conv", [norm_of(t, prefix + "input_", row, eps) for row in x]
        )
        own = [keys(raw, t, n, row, start + j) for j, row in enumerate(before)]
        attended = []
        for j in range(size):
            place, seen = start + j, []
            for position, pair in enumerate([*past, *own]):
                inside = window is None or abs(place - position) < window
                if limit is not None and place - position >= limit:
                    inside = window is None and position < keep_first
                if inside and not (causal and position > place):
                    seen.append(pair)
            attended.append(attend(config, t, prefix + "self_attn.", before[j], place, seen))
        x = [row + branch for row, branch in zip(x, after(attended), strict=True)]
        normed = [norm_of(t, prefix + "post_attention_", row, eps) for row in x]
        before, after = convolutions(raw, t, prefix + "mlp_conv", normed)
        mlp = []
        for y in before:
            gate, up = linear(y, t, prefix + "mlp.gate_proj"), linear(y, t, prefix + "mlp.up_proj")
            mlp.append(linear(gate / (1 + np.exp(-gate)) * up, t, prefix + "mlp.down_proj"))
        x = [row + branch for row, branch in zip(x, after(mlp), strict=True)]
    out = np.array([norm(row, t["norm.weight"], eps) for row in x])
    out = out if next_token(raw) else out[1:]
    logits = out @ head.astype(np.float64).T * option(raw, "output_multiplier", 1.0)
    cap = option(raw, "final_logit_softcapping")
    return out, logits if not cap else cap * np.tanh(logits / cap)


def norm_of(t: Tensors, prefix: str, row: np.ndarray, eps: float) -> np.ndarray:
    return norm(row, t[f"{prefix}layernorm.weight"], eps)


def convolutions(raw: dict, t: Tensors, name: str, normed: list[np.ndarray]):
    """The inputs of a branch, and a function from its outputs to what is added; without convolutions, themselves."""
    if not option(raw, "conv_kernel_size"):
        return normed, list
    base, group = t[f"{name}.base_kernel"].astype(np.float64), option(raw, "conv_group_size")
    moving = [linear(row, t, f"{name}.kernel_projection").reshape(*base.shape[:2], -1) for row in normed]

    def convolve(side: int, rows: list[np.ndarray]) -> list[np.ndarray]:
        out = []
        for j in range(len(rows)):
            total = np.zeros_like(rows[j])
            for tap in range(min(base.shape[1], j + 1)):
                for h in range(len(total)):
                    total[h] += (base[side, tap, h] + moving[j][side, tap, h // group]) * rows[j - tap][h]
            out.append(total)
        return out

    return convolve(0, normed), lambda rows: convolve(1, rows)


def attend(config: dict, t: Tensors, prefix: str, row: np.ndarray, position: int, seen: list) -> np.ndarray:
    q = linear(row, t, prefix + "q_proj").reshape(-1, config["head_dim"])
    q = rotate(norm(q, t[prefix + "q_norm.weight"], config["rms_norm_eps"]), position, config.get("rope_theta", 1e4))
    out = []
    for h in range(len(q)):
        kv = h * len(seen[0][0]) // len(q)
        score = np.exp([k[kv] @ q[h] / config["head_dim"] ** 0.5 for k, _ in seen])
        out.append(sum(weight * v[kv] for weight, (_, v) in zip(score / score.sum(), seen, strict=True)))
    return linear(np.concatenate(out), t, prefix + "o_proj")


def correct(raw: dict, t: Tensors, out: np.ndarray, logits: np.ndarray, path: list[int]) -> np.ndarray:
    """Logits [Vd] of the prediction after a path: the root, then the drafts; -inf for what a selector leaves out."""
    if option(raw, "selector_rank"):
        return select(raw, t, out[len(path) - 1], logits[len(path) - 1], path[-1])
    if not option(raw, "markov_rank", 0):
        return logits[len(path) - 1]
    w1, w2 = (t[f"markov_head.markov_w{i}.weight"].astype(np.float64) for i in (1, 2))
    state = np.zeros(w1.shape[1])
    for k, token in enumerate(path):
        latent, kind = w1[token], option(raw, "markov_head_type")
        if kind == "gated":
            gate = linear(np.concatenate([out[k], latent]), t, "markov_head.gate_proj")
            latent = latent / (1 + np.exp(-gate))
        if kind == "rnn":
            joint = linear(np.concatenate([state, latent, out[k]]), t, "markov_head.joint_proj")
            u, v, o = np.split(joint, 3)
            u = 1 / (1 + np.exp(-u))
            state, latent = u * state + (1 - u) * np.tanh(v), np.tanh(o)
    return logits[len(path) - 1] + w2 @ latent


def select(raw: dict, t: Tensors, row: np.ndarray, logits: np.ndarray, before: int) -> np.ndarray:
    selector = "candidate_selector."
    gate, scores = linear(row, t, selector + "hidden_projection"), np.full_like(logits, -np.inf)
    first, second = (t[f"{selector}{name}_codebook"].astype(np.float64) for name in ("predecessor", "successor"))
    for index in np.argsort(-logits, kind="stable")[: option(raw, "selector_top_k")]:
        token = index + t["d2t"][index] if "d2t" in t else index
        scores[index] = logits[index] + sum(first[before] * gate * second[token])
    return scores
