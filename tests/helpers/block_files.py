"""Random block drafts on disk, in every layout and with every option."""

from pathlib import Path

import numpy as np
from eagle_files import TARGET, V, config_of_layers, random_weight, reduced_vocabulary, write_edited, write_layer

from jspec.checkpoints import block
from jspec.checkpoints.plan import Checkpoint
from jspec.checkpoints.source import Source
from jspec.models import Llama

WINDOW = dict(layer_types=["full_attention", "sliding_attention"], use_sliding_window=True, sliding_window=5)
RANK = 3
CONVOLUTIONS = dict(conv_kernel_size=2, conv_group_size=4)
SELECTOR = dict(selector_rank=RANK, selector_top_k=5)
DFLASH2 = dict(architectures=["DFlash2DraftModel"], inner=CONVOLUTIONS | SELECTOR)
DRAFTS = {
    "z-lab": dict(),
    "z-lab default layers": dict(target_layer_ids=None),
    "z-lab sliding": dict(layer=WINDOW),
    "z-lab sliding both ways": dict(layer=WINDOW, is_causal=False),
    "z-lab window": dict(inner=dict(use_swa=True, swa_window_size=6, causal=True)),
    "z-lab logits": dict(inner=dict(final_logit_softcapping=2.0, output_multiplier=0.7)),
    "z-lab biases": dict(attention_bias=True, embed=True, lm_head=True, rope_theta=500.0),
    "z-lab causal": dict(inner=dict(causal_head=True)),
    "z-lab convolutions": dict(inner=dict(conv_kernel_size=4, conv_group_size=16)),
    "z-lab selector": dict(inner=SELECTOR, draft_vocab=23, draft_vocab_size=23),
    "dflash2": DFLASH2,
    "dflash2 sliding": dict(DFLASH2, layer=WINDOW, is_causal=False, embed=True, lm_head=True),
    "deepspec": dict(layout="deepspec"),
    "deepspec vanilla": dict(layout="deepspec", markov="vanilla", confidence="hidden"),
    "deepspec gated": dict(layout="deepspec", markov="gated", confidence="markov"),
    "deepspec rnn": dict(layout="deepspec", markov="rnn", confidence="markov"),
    "specforge dflash": dict(layout="specforge"),
    "specforge dspark": dict(layout="specforge", markov="gated", projector_type="dspark"),
    "speculators dflash": dict(layout="speculators", draft_vocab=23),
    "speculators dspark": dict(layout="speculators", draft_vocab=23, markov="rnn", next_token=True, layer=WINDOW),
    "speculators fill-in": dict(layout="speculators", markov="vanilla", layer=WINDOW, sliding_window_non_causal=True),
    "speculators dflash2": dict(
        layout="speculators", speculators_model_type="dflash2", **CONVOLUTIONS | SELECTOR, sample_from_anchor=False
    ),
    "speculators narrow": dict(layout="speculators", width=8, embed=True, lm_head=True, next_token=True),
}


def load(directory: Path, target: Llama = TARGET, dtype: str = "float32") -> Checkpoint:
    return block.KIND.plan(Source(directory), target, dtype, None).read()


def make_draft(directory: Path, change=None, *, tensors: dict | None = None, drop=(), **options) -> Path:
    """Writes a `random_draft`. change: edits config.json; tensors, drop: tensors that are added and removed."""
    return write_edited(directory, random_draft(**options), change, tensors, drop)


def random_draft(
    layout: str = "z-lab",
    *,
    seed: int = 0,
    width: int = 16,
    num_layers: int = 2,
    block_size: int = 4,
    draft_vocab: int | None = None,
    markov: str | None = None,
    confidence: str | None = None,
    next_token: bool | None = None,
    target_layer_ids: list[int] | None = [1, 3, 6],  # noqa: B006
    attention_bias: bool = False,
    embed: bool = False,
    lm_head: bool = False,
    projector_type: str = "dflash",
    layer: dict | None = None,
    inner: dict | None = None,
    **top,
) -> tuple[dict, dict[str, np.ndarray]]:
    """config.json and tensors of a draft for a target of 8 layers and width 16.

    layout: "z-lab", "deepspec", "specforge" or "speculators".
    target_layer_ids: layers by what leaves them; None: the key is missing, which means layers 1 and 5.
    layer, inner: further keys of the layers and of `dflash_config`. top: further keys of config.json.
    """
    random = np.random.default_rng(seed)
    t: dict[str, np.ndarray] = {}

    def weight(name: str, *shape: int):
        t[name] = random_weight(random, name, *shape)

    rank = RANK if markov else 0
    for n in range(num_layers):
        prefix = f"layers.{n}."
        write_layer(weight, prefix, width, norms="qk", qkv_bias=attention_bias, o_bias=attention_bias)
        weight(prefix + "input_layernorm.weight", width)
    weight("fc.weight", width, 16 * (2 if target_layer_ids is None else len(target_layer_ids)))
    for name in ("hidden_norm.weight", "norm.weight"):
        weight(name, width)
    write_dflash2(weight, {**(inner or {}), **top}, num_layers, width)
    own = layout == "deepspec"
    if embed or own:
        weight("embed_tokens.weight", V, width)
    if lm_head or own or draft_vocab:
        weight("lm_head.weight", draft_vocab or V, width)
    write_heads(weight, markov, confidence, width, draft_vocab or V)
    if draft_vocab:
        t |= reduced_vocabulary(random, draft_vocab)
    layers = {"model_type": "qwen3", **config_of_layers(width, num_layers), "attention_bias": attention_bias}
    layers |= layer or {}
    method = {"block_size": block_size, "mask_token_id": V - 1}
    method_heads = {
        "markov_rank": rank,
        "markov_head_type": markov or "vanilla",
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence == "markov",
    }
    ids = {} if target_layer_ids is None else {"target_layer_ids": target_layer_ids}
    if layout == "z-lab":
        section = {"mask_token_id": V - 1, **ids, **(inner or {})}
        raw = {"architectures": ["DFlashDraftModel"], **layers, "block_size": block_size, "num_target_layers": 8}
        return {**raw, "dflash_config": section, **top}, t
    if layout == "deepspec":
        return {"architectures": ["Qwen3DSparkModel"], **layers, **method, **method_heads, **ids, **top}, t
    if layout == "specforge":
        section = {"projector_type": projector_type, **method, **method_heads, **ids}
        name = "DSparkDraftModel" if projector_type == "dspark" else "DFlashDraftModel"
        return {"architectures": [name], **layers, "dflash_config": section, **top}, t
    assert target_layer_ids is not None
    kind = "dspark" if markov or next_token else "dflash"
    raw = {"speculators_model_type": kind, "transformer_layer_config": layers, **method}
    raw |= {"aux_hidden_state_layer_ids": [i + 1 for i in target_layer_ids], "draft_vocab_size": draft_vocab or V}
    raw |= method_heads if kind == "dspark" else {}
    raw |= {} if next_token is None else {"sample_from_anchor": next_token}
    return {**raw, **top}, t


def write_heads(weight, markov: str | None, confidence: str | None, width: int, vocab: int) -> None:
    """Adds the tensors of a Markov head and a confidence head."""
    rank = RANK if markov else 0
    if markov:
        weight("markov_head.markov_w1.weight", V, rank)
        weight("markov_head.markov_w2.weight", vocab, rank)
        reads, out, name = {"vanilla": (0, 0, ""), "gated": (width + rank, rank, "gate_proj")}.get(
            markov, (2 * rank + width, 3 * rank, "joint_proj")
        )
        if name:
            weight(f"markov_head.{name}.weight", out, reads)
            weight(f"markov_head.{name}.bias", out)
    if confidence:
        weight("confidence_head.proj.weight", 1, width + (rank if confidence == "markov" else 0))
        weight("confidence_head.proj.bias", 1)


def write_dflash2(weight, sizes: dict, num_layers: int, width: int) -> None:
    """Adds the tensors of convolutions and selector with `weight(name, *shape)`."""
    if taps := sizes.get("conv_kernel_size"):
        for name in (f"layers.{n}.{part}_conv." for n in range(num_layers) for part in ("attention", "mlp")):
            weight(name + "base_kernel", 2, taps, width)
            weight(name + "kernel_projection.weight", 2 * taps * (width // sizes["conv_group_size"]), width)
    if rank := sizes.get("selector_rank"):
        weight("candidate_selector.hidden_projection.weight", rank, width)
        for name in ("predecessor", "successor"):
            weight(f"candidate_selector.{name}_codebook", V, rank)
