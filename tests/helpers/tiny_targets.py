"""Tiny targets of all families that can be split over devices, their random weights, and prompts for them."""

import dataclasses
from typing import Any

import deepseek
import gemma
import numpy as np
import oss
import qwen
import toy
from random_models import random_weights

import jspec
from jspec.cache import RecurrentLayer
from jspec.models.decoder import ModelParams
from jspec.models.llama import Llama
from jspec.models.moe import Routed, RoutedParams, Router

TIED = dataclasses.replace(
    toy.TARGET, vocab_size=64, num_layers=1, num_heads=8, num_kv_heads=4, tie_embeddings=True, qk_norm=False
)
BIASED = dataclasses.replace(TIED, attention_bias=True, tie_embeddings=False)
EXPERTS = dataclasses.replace(
    toy.TARGET, experts=Routed(Router(count=4, chosen=2, normalize=True), width=16), dense_layers=(1,)
)
BLOCKS = dataclasses.replace(
    TIED,
    tie_embeddings=False,
    qk_norm=True,
    head_dim=32,
    intermediate_size=256,
    num_layers=2,
    experts=Routed(Router(count=4, chosen=2, normalize=True), width=256),
    dense_layers=(0,),
)
"""Two devices have whole blocks of 128 rows each."""
TARGETS = {"odd vocabulary": toy.TARGET, "tied": TIED, "biased": BIASED, "experts": EXPERTS, "blocks": BLOCKS}
LATENTS = {
    "latents": dataclasses.replace(deepseek.MLA, num_layers=1, mtp_layers=1),
    "latents in one step": dataclasses.replace(
        deepseek.MLA, dense_layers=2, latent=dataclasses.replace(deepseek.MLA.latent, q_rank=None)
    ),
    "indexed latents": dataclasses.replace(deepseek.KINDS["dsa"], num_layers=1),
}
"""Targets with one row for all heads."""
DIFFERENT = {
    "windows": dataclasses.replace(gemma.KINDS["shared"], vocab_size=64),
    "windows and experts": dataclasses.replace(gemma.KINDS["experts"], vocab_size=64),
    "sinks": dataclasses.replace(oss.KINDS["sinks"], vocab_size=64),
}
"""Targets whose layers differ, with rings."""
_HYBRID = dict(
    is_full_attention=(False, True), state=RecurrentLayer(key_heads=4, value_heads=8, key_dim=8, value_dim=12)
)
HYBRIDS = {
    "states": dataclasses.replace(qwen.KINDS["dense"], **_HYBRID, mtp_layers=1),
    "states and experts": dataclasses.replace(qwen.KINDS["experts"], **_HYBRID),
}
"""Targets with a recurrent layer and one of attention."""
HEAD = dataclasses.replace(toy.HEAD, hidden_size=32, num_kv_heads=2, head_dim=16)
PROMPTS = toy.PROMPTS
SAMPLED = jspec.Sampling(temperature=0.8, top_p=0.9)


def weights(config: Any, seed: int = 0) -> Any:
    """Random weights, with biases and experts, of a configuration of any family."""
    if isinstance(config, qwen.Qwen3Next):
        return hybrid_weights(config, seed)
    if not isinstance(config, Llama):
        return random_weights(config, seed)
    made, random = toy.random_params(config, seed), toy._matrices(seed + 1)
    layers = []
    for index, layer in enumerate(made.layers):
        changes = {}
        if config.attention_bias:
            changes = {"qkv_bias": random(1, layer.qkv.shape[1])[0] / 4, "o_bias": random(1, config.hidden_size)[0] / 4}
        if (routed := config.layer_experts(index)) is not None:
            count, width, inner = routed.router.count, config.hidden_size, routed.width
            gate_up = np.stack([random(width, 2 * inner) for _ in range(count)])
            down = np.stack([random(inner, width) for _ in range(count)])
            experts = RoutedParams(random(count, width) * np.float32(4), None, gate_up, down)
            changes |= {"experts": experts, "gate_up": None, "down": None}
        layers.append(dataclasses.replace(layer, **changes))
    return dataclasses.replace(made, layers=tuple(layers))


def hybrid_weights(config: qwen.Qwen3Next, seed: int = 0) -> ModelParams:
    """Random weights of a hybrid in which a token depends most on the one before it, which an MTP head sees, too."""
    made = random_weights(config, seed)

    def weaker(layer, share=0.25):
        layer = dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, o=share * layer.mixer.o))
        return layer if layer.down is None else dataclasses.replace(layer, down=share * layer.down)

    def agreeing(head, share=0.25):
        projection = share * np.array(head.projection)
        projection[: config.hidden_size] = np.eye(config.hidden_size)
        changes = {"token_norm": np.ones(config.hidden_size, np.float32), "norm": made.norm, "projection": projection}
        return dataclasses.replace(head, layer=weaker(head.layer), **changes)

    mtp = tuple(map(agreeing, made.mtp))
    return dataclasses.replace(made, layers=tuple(map(weaker, made.layers)), mtp=mtp)


TREE = dict(depth=3, width=3, num_nodes=8)
KINDS = {
    "greedy": dict(sampling=None),
    "mixed": dict(sampling=[None, SAMPLED, SAMPLED]),
    "rejection": dict(sampling=SAMPLED, accept="rejection"),
}
