"""Random EAGLE heads on disk, in every layout and with every option."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jspec.checkpoints import eagle
from jspec.checkpoints.plan import Checkpoint
from jspec.checkpoints.source import Source
from jspec.models import Llama

V = 61
"""Tokens of the target's vocabulary."""

TARGET = Llama(
    vocab_size=V,
    hidden_size=16,
    intermediate_size=32,
    num_layers=8,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    max_length=512,
)
_MASK = np.random.default_rng(3).standard_normal((1, 48)).astype(np.float32)
LATENT = dict(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.5}
EAGLE4: dict[str, Any] = {
    **dict(layout="eagle4", draft_vocab=None, fc_norm="fc_norm", norm_output=True, num_aux_hidden_states=3),
    **dict(layer_types=["sliding_attention"], sliding_window=5, use_sliding_window=True),
    **dict(efficient_lm_head_config={"type": "low_rank", "rank": 6, "num_candidates": 9}),
}
HEADS = {
    "eagle1": dict(layout="eagle1"),
    "eagle1 biases": dict(layout="eagle1", fc_bias=True, qkv_bias=True, embed=True, bias=False),
    "eagle1 two layers": dict(layout="eagle1", fc_bias=True, num_layers=2, rope_theta=500.0),
    "eagle3": dict(),
    "eagle3 shared head": dict(draft_vocab=None, lm_head=False),
    "eagle3 whole vocabulary": dict(draft_vocab=None),
    "eagle3 narrow": dict(width=8, embed=True, target_hidden_size=16),
    "eagle3 own embedding": dict(embed=True, embed_requires_grad=True, fc_bias=True),
    "eagle3 fc_norm": dict(fc_norm="fc_norm", norm_output=True),
    "eagle3 aux_norm": dict(fc_norm="aux_norm", use_aux_norm=True, o_bias=True, qkv_bias=True),
    "eagle3 norm_before_fc": dict(norm_before_fc=True, norm_before_residual=True),
    "eagle3 two layers": dict(num_layers=2, later_norm="hidden_norm", qk_norm=True),
    "latent": dict(latent=LATENT),
    "latent two layers": dict(latent=LATENT, num_layers=2, fc_norm="fc_norm", norm_output=True),
    "latent yarn": dict(
        **dict(latent={**LATENT, "q_lora_rank": None}, rope_scaling=_YARN, rope_theta=100.0, draft_vocab=None),
        rms_norm_eps=0.05,
    ),
    "p-eagle": dict(
        **{"num_layers": 2, "embed": True, "ptd_token_id": 5, "parallel_drafting": True, "fc_norm": "fc_norm"},
        tensors={"mask_hidden": _MASK},
    ),
    "p-eagle speculators": dict(
        **{"layout": "speculators", "embed": True, "mask_token_id": 5, "speculators_model_type": "peagle"},
        **dict(architectures=["PEagleSpeculator"], norm_before_residual=True, tensors={"mask_hidden": _MASK[None]}),
    ),
    "eagle4": EAGLE4,
    "speculators": dict(layout="speculators", norm_before_residual=True),
    "speculators qwen3": dict(layout="speculators", qk_norm=True, norm_output=True, fc_norm="fc_norm"),
    "speculators two layers": dict(layout="speculators", num_layers=2, norm_before_fc=True),
    "speculators biases": dict(layout="speculators", o_bias=True, qkv_bias=True, draft_vocab=None),
}


def load(directory: Path, target: Llama = TARGET, dtype: str = "float32") -> Checkpoint:
    return eagle.KIND.plan(Source(directory), target, dtype, None).read()


def edit(raw: dict, **changes) -> dict:
    """A config.json with other values; the value "absent" removes a key."""
    return {key: value for key, value in {**raw, **changes}.items() if value != "absent"}


def write(directory: Path, raw: dict, tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, directory / "model.safetensors")
    return directory


def make_head(
    directory: Path, change: Callable[[dict], dict] | None = None, *, tensors: dict | None = None, drop=(), **options
) -> Path:
    """Writes `any_head`. change: edits config.json; tensors, drop: tensors that are added and removed."""
    return write_edited(directory, any_head(**options), change, tensors, drop)


def write_edited(
    directory: Path, made: tuple[dict, dict[str, np.ndarray]], change: Callable[[dict], dict] | None, tensors, drop
) -> Path:
    """Writes config.json and tensors of a draft. The other arguments as of `make_head`."""
    raw, stored = made
    stored = {name: t for name, t in {**stored, **(tensors or {})}.items() if name not in drop}
    return write(directory, raw if change is None else change(raw), stored)


def random_weight(random: np.random.Generator, name: str, *shape: int) -> np.ndarray:
    spread = random.standard_normal(shape)
    # Norms and biases are random too; otherwise a dropped or swapped one would go unnoticed.
    values = spread * shape[-1] ** -0.5 if len(shape) == 2 else 0.2 * spread + (name.endswith(".weight"))
    return values.astype(np.float32)


HEADS_OF_LAYER, KV_HEADS, DIM, MLP = 4, 2, 8, 24


def write_layer(weight, prefix: str, width: int, reads: int | None = None, *, norms=(), qkv_bias=False, o_bias=False):
    """Adds the tensors of a decoder layer with `weight(name, *shape)`, but for the norm of its attention.

    reads: inputs of its attention; None: `width`. norms: which of q and k have one.
    """
    reads = width if reads is None else reads
    shapes = {"q": (HEADS_OF_LAYER * DIM, reads), "k": (KV_HEADS * DIM, reads), "v": (KV_HEADS * DIM, reads)}
    for name, shape in (shapes | {"o": (width, HEADS_OF_LAYER * DIM)}).items():
        weight(f"{prefix}self_attn.{name}_proj.weight", *shape)
        if o_bias if name == "o" else qkv_bias:
            weight(f"{prefix}self_attn.{name}_proj.bias", shape[0])
        if name in norms:
            weight(f"{prefix}self_attn.{name}_norm.weight", DIM)
    for name, shape in (("gate", (MLP, width)), ("up", (MLP, width)), ("down", (width, MLP))):
        weight(f"{prefix}mlp.{name}_proj.weight", *shape)
    weight(prefix + "post_attention_layernorm.weight", width)


def latent_shapes(reads: int, width: int, latent: dict) -> dict[str, tuple[int, ...]]:
    """The tensors of latent attention of these sizes. reads: its inputs."""
    rank, rows, flat, turning, value = (latent[key] for key in LATENT)
    queries = HEADS_OF_LAYER * (flat + turning)
    first = {"q_a_proj": (rank, reads), "q_a_layernorm": (rank,), "q_b_proj": (queries, rank)}
    shapes = {
        **(first if rank else {"q_proj": (queries, reads)}),
        "kv_a_proj_with_mqa": (rows + turning, reads),
        "kv_a_layernorm": (rows,),
        "kv_b_proj": (HEADS_OF_LAYER * (flat + value), rows),
        "o_proj": (width, HEADS_OF_LAYER * value),
    }
    return {name + ".weight": shape for name, shape in shapes.items()}


def config_of_layers(width: int, num_layers: int) -> dict:
    """Their keys in config.json."""
    return {
        "vocab_size": V,
        "hidden_size": width,
        "intermediate_size": MLP,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS_OF_LAYER,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    }


def reduced_vocabulary(random: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """The maps of a vocabulary of random tokens."""
    ids = np.sort(random.permutation(V)[:size])
    return {"d2t": ids - np.arange(size), "t2d": np.isin(np.arange(V), ids)}


def random_head(
    layout: str = "eagle3",
    *,
    seed: int = 0,
    width: int = 16,
    target_width: int = 16,
    num_layers: int = 1,
    draft_vocab: int | None = 23,
    lm_head: bool = True,
    fc_bias: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    fc_norm: str | None = None,
    norm_before_fc: bool = False,
    later_norm: str = "input_layernorm",
    embed: bool = False,
    **top,
) -> tuple[dict, dict[str, np.ndarray]]:
    """config.json and tensors of a head for a target of 8 layers.

    layout: "eagle1", "eagle3" (SafeAILab, SpecForge), "eagle4" or "speculators".
    fc_norm: "fc_norm" or the older "aux_norm"; later_norm: name of the attention's norm in later layers.
    embed: whether it has its own embedding. top: further keys of config.json.
    """
    random = np.random.default_rng(seed)
    t: dict[str, np.ndarray] = {}

    def weight(name: str, *shape: int):
        t[name] = random_weight(random, name, *shape)

    three = layout != "eagle1"
    for n in range(num_layers):
        prefix = "midlayer." if layout == "eagle3" and n == 0 else f"layers.{n}."
        options = dict(norms="qk" if qk_norm else (), qkv_bias=qkv_bias, o_bias=o_bias)
        write_layer(weight, prefix, width, 2 * width if three and n == 0 else width, **options)
        if n or three:
            weight(f"{prefix}{later_norm if n else 'input_layernorm'}.weight", width)
        if n == 0 and three:
            weight(prefix + "hidden_norm.weight", width)
    weight("fc.weight", width, 3 * target_width if three else 2 * width)
    if fc_bias:
        weight("fc.bias", width)
    if three:
        weight("norm.weight", width)
    if fc_norm:
        for name in (0, 1, 2) if fc_norm == "fc_norm" else ("low", "mid", "high"):
            weight(f"fc_norm.{name}.weight" if fc_norm == "fc_norm" else f"aux_norm_{name}.weight", target_width)
    if norm_before_fc:
        weight("input_norm.weight", 3 * target_width)
    if three and lm_head:
        weight("lm_head.weight", draft_vocab or V, width)
    if three and draft_vocab:
        t |= reduced_vocabulary(random, draft_vocab)
    if embed:
        weight("embed_tokens.weight", V, width)
    layer = config_of_layers(width, num_layers) | {"model_type": "llama"}
    if layout == "eagle1":
        return {"architectures": ["LlamaForCausalLM"], **layer, **top}, t
    flags = {"draft_vocab_size": draft_vocab, "norm_before_fc": norm_before_fc, "fc_norm": fc_norm is not None}
    if layout in ("eagle3", "eagle4"):
        return {"architectures": [f"LlamaForCausalLME{layout[1:]}"], **layer, **flags, **top}, t
    layer["model_type"] = "qwen3" if qk_norm else "llama"
    raw = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "norm_before_residual": False}
    return {**raw, "transformer_layer_config": layer, **flags, **top}, t


def any_head(layout: str = "eagle3", *, latent: dict | None = None, **options) -> tuple[dict, dict[str, np.ndarray]]:
    """As `random_head`. latent: the sizes of latent attention, by their keys in config.json."""
    raw, t = random_head(layout, **options)
    random = np.random.default_rng(1)
    if layout == "eagle4":
        rank = raw["efficient_lm_head_config"]["rank"]
        shapes = {"efficient_lm_head": (V, rank), "efficient_lm_head_down_proj": (rank, raw["hidden_size"])}
        t |= {f"{name}.weight": random_weight(random, name, *shape) for name, shape in shapes.items()}
    if latent is None:
        return raw, t
    for output in [name for name in t if name.endswith(".self_attn.o_proj.weight")]:
        prefix = output.removesuffix("o_proj.weight")
        width, reads = t[output].shape[0], t[prefix + "q_proj.weight"].shape[1]
        t = {name: x for name, x in t.items() if not name.startswith(prefix)}
        shapes = latent_shapes(reads, width, latent)
        t |= {prefix + name: random_weight(random, name, *shape) for name, shape in shapes.items()}
    changes = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "head_dim": None}
    return {**raw, **latent, **changes, "num_key_value_heads": HEADS_OF_LAYER}, t
