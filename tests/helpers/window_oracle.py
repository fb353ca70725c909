"""A stack of decoder layers over a whole text, under any mask, in plain numpy and float64: no cache and no rounds.

It reads weights as jspec has them, matrices [in, out].
"""

from typing import Any

import numpy as np


def band(length: int, window: int | None, keep_first: int = 0) -> np.ndarray:
    """Which positions each position of a text sees, Bool[T, T]: the last `window`, its own included; and the first."""
    query, key = np.arange(length)[:, None], np.arange(length)[None]
    near = key > query - (length if window is None else window)
    return (key <= query) & (near | (key < keep_first))


def language_model(config: Any, own: Any, tokens: list[int], seen: np.ndarray) -> np.ndarray:
    """Logits [T, V] after each token."""
    x = wide(own.embed)[tokens]
    for layer in own.layers:
        x = decoder_layer(config, layer, x, norm(x, layer.attention_norm, config), seen)
    return norm(x, own.norm, config) @ (wide(own.embed).T if own.lm_head is None else wide(own.lm_head))


def eagle(config: Any, own: Any, embedded: np.ndarray, feature: np.ndarray, seen: np.ndarray):
    """Logits [T, Vd] and next features [T, E] after each pair of a token's embedding and a feature, for EAGLE-3."""
    x = feature
    for index, layer in enumerate(own.layers):
        read = norm(x, layer.attention_norm, config) if index else norm(embedded, layer.attention_norm, config)
        read = read if index else np.concatenate([read, norm(x, own.hidden_norm, config)], axis=1)
        x = decoder_layer(config, layer, x, read, seen)
    return norm(x, own.norm, config) @ wide(own.lm_head), x


def decoder_layer(config: Any, layer: Any, x: np.ndarray, read: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The residual stream [T, E] after a layer whose attention reads `read` and sees the positions of `seen`."""
    x = x + attend(config, layer, read, seen) @ wide(layer.o)
    gate, up = np.split(norm(x, layer.mlp_norm, config) @ wide(layer.gate_up), 2, axis=1)
    return x + gate / (1 + np.exp(-gate)) * up @ wide(layer.down)


def attend(config: Any, layer: Any, read: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Heads [T, H D]."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = (read @ wide(layer.qkv)).reshape(len(read), heads + 2 * kv_heads, dim)
    q, k, v = np.split(qkv, [heads, heads + kv_heads], axis=1)
    if layer.q_norm is not None:
        q, k = norm(q, layer.q_norm, config), norm(k, layer.k_norm, config)
    q, k = (rotate(heads, config.rope.theta) for heads in (q, k))
    k, v = (np.repeat(each, heads // kv_heads, axis=1) for each in (k, v))
    scores = np.where(seen[None], np.einsum("thd,shd->hts", q, k) * dim**-0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v).reshape(len(read), -1)


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary positions: row p of [T, H, D] is at position p of the text."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(
        1j * np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    )
    return np.concatenate([turned.real, turned.imag], axis=-1)


def norm(x: np.ndarray, weight: Any, config: Any) -> np.ndarray:
    """The root-mean-square norm."""
    return wide(weight) * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.rms_norm_eps)


def wide(x: Any) -> np.ndarray:
    """In float64."""
    return np.asarray(x, np.float64)
