"""Weights as other libraries of JAX hold them: the same model as from Hugging Face names, and errors with the path.

The layouts are written here once more, from Hugging Face's to the library's, as the converters of those libraries do.
"""

import dataclasses

import gemma
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from random_models import arrays_of

import jspec
from jspec.checkpoints import named as named_arrays
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.names import LIBRARIES
from jspec.models.decoder import ModelParams
from jspec.models.moe import Routed, RoutedParams, Router
from jspec.models.stack import LayerParams

LLAMA = dataclasses.replace(toy.TARGET, qk_norm=False)
TIED = dataclasses.replace(toy.TARGET, tie_embeddings=True)
EXPERTS = dataclasses.replace(toy.TARGET, experts=Routed(Router(count=3, chosen=2, normalize=True), width=16))


def weights_of(config, seed=0):
    """Random weights, with random norms and experts."""
    if type(config) in (type(kind) for kind in gemma.KINDS.values()):
        kind = next(name for name, other in gemma.KINDS.items() if other == config)
        return gemma.params(kind, seed)
    rng, made = np.random.default_rng(seed), toy.random_params(config, seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    def layer_of(layer: LayerParams) -> LayerParams:
        changes = {name: normal(len(getattr(layer, name))) for name in ("attention_norm", "mlp_norm")}
        if config.qk_norm:
            changes |= {name: normal(config.head_dim) for name in ("q_norm", "k_norm")}
        if config.experts:
            count, inner, width = config.experts.router.count, config.experts.width, config.hidden_size
            experts = RoutedParams(
                normal(count, width), None, normal(count, width, 2 * inner), normal(count, inner, width)
            )
            changes |= {"gate_up": None, "down": None, "experts": experts}
        return dataclasses.replace(layer, **changes)

    layers = tuple(map(layer_of, made.layers))
    return ModelParams(made.embed, layers, normal(config.hidden_size), made.lm_head)


def hugging_face(config, seed=0):
    named = arrays_of(config, weights_of(config, seed))
    return {name.removesuffix(".weight"): np.asarray(array) for name, array in named.items()}


def llama_parts(config, held):
    """For each layer its index, a function from a name to an array, and the experts' arrays stacked."""
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."

        def get(name, prefix=prefix):
            return held[prefix + name]

        def stacked(name, prefix=prefix):
            each = [held[f"{prefix}mlp.experts.{x}.{name}_proj"].T for x in range(config.experts.router.count)]
            return np.stack(each)

        yield index, get, stacked


def to_tunix_llama(config, held):
    width, dim = config.hidden_size, config.head_dim
    tree = {"embedder.input_embedding": held["model.embed_tokens"], "final_norm.w": held["model.norm"]}
    if "lm_head" in held:
        tree["lm_head.w"] = held["lm_head"].T
    for index, get, stacked in llama_parts(config, held):
        path = f"layers.{index}."
        for name in "qkv":
            tree[f"{path}attn.{name}_proj.w"] = get(f"self_attn.{name}_proj").T.reshape(width, -1, dim)
        tree[f"{path}attn.o_proj.w"] = get("self_attn.o_proj").T.reshape(-1, dim, width)
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            tree[f"{path}attn.{name}.w"] = get(f"self_attn.{name}")
        for name in ("input_layernorm", "post_attention_layernorm"):
            tree[f"{path}{name}.w"] = get(name)
        if config.experts:
            tree[f"{path}mlp.router.kernel"] = get("mlp.gate").T
        for name in ("gate", "up", "down"):
            if config.experts:
                tree[f"{path}mlp.{name}_proj"] = stacked(name)
            else:
                tree[f"{path}mlp.{name}_proj.kernel"] = get(f"mlp.{name}_proj").T
    return tree


def to_maxtext(config, held, scan, spare=0):
    """spare: rows by which the vocabulary is padded."""
    width, dim, count = config.hidden_size, config.head_dim, config.num_layers

    def neighbors(x):
        half = dim // 2
        return np.stack([x[..., :half], x[..., half:]], axis=-1).reshape(x.shape) if not config.qk_norm else x

    tree = {
        "token_embedder.embedding": np.pad(held["model.embed_tokens"], ((0, spare), (0, 0))),
        "decoder.decoder_norm.scale": held["model.norm"],
    }
    if "lm_head" in held:
        tree["decoder.logits_dense.kernel"] = np.pad(held["lm_head"].T, ((0, 0), (0, spare)))
    layers = []
    for _, get, stacked in llama_parts(config, held):
        q, k, v = (get(f"self_attn.{name}_proj").T.reshape(width, -1, dim) for name in "qkv")
        scale = np.float32(1 if config.qk_norm else dim**-0.5)
        layer = {
            "self_attention.query.kernel": neighbors(q) * scale,
            "self_attention.key.kernel": neighbors(k),
            "self_attention.value.kernel": v,
            "self_attention.out.kernel": get("self_attn.o_proj").T.reshape(-1, dim, width),
            "pre_self_attention_layer_norm.scale": get("input_layernorm"),
            "post_self_attention_layer_norm.scale": get("post_attention_layernorm"),
        }
        if config.qk_norm:
            layer |= {f"self_attention.{n}_norm.scale": get(f"self_attn.{n[0]}_norm") for n in ("query", "key")}
        if config.experts:
            layer |= {"moe_block.gate.kernel": get("mlp.gate").T}
        for name, theirs in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down")):
            if config.experts:
                layer[f"moe_block.{name}"] = stacked(theirs)
            else:
                layer[f"mlp.{name}.kernel"] = get(f"mlp.{theirs}_proj").T
        layers.append(layer)
    if scan:
        tree |= {f"decoder.layers.{name}": np.stack([each[name] for each in layers], axis=1) for name in layers[0]}
    else:
        tree |= {f"decoder.layers_{i}.{name}": layers[i][name] for i in range(count) for name in layers[i]}
    return {f"params.{path}": leaf for path, leaf in tree.items()}


def to_gemma(config, held, ours):
    """ours: "tunix" or "gemma"."""
    tunix = ours == "tunix"
    width, size, layers = config.hidden_size, config.per_layer_size, config.num_layers
    tree = {"embedder.input_embedding": held["model.embed_tokens"], "final_norm.scale": held["model.norm"]}
    if size:
        table = "per_layer_input_embedding" if tunix else "per_layer_embeddings"
        projection = held["model.per_layer_model_projection"].T.reshape(width, layers, size)
        tree |= {
            f"embedder.{table}": held["model.embed_tokens_per_layer"].reshape(-1, layers, size),
            "embedder.per_layer_model_projection.w": projection,
            "embedder.per_layer_projection_norm.scale": held["model.per_layer_projection_norm"],
        }
    for index in range(layers):
        kind = config.attention[index]
        dim, kv = kind.head_dim, kind.kv_heads
        path, before = (f"layers.{index}." if tunix else f"layer_{index}."), f"model.layers.{index}."
        layer = {name.removeprefix(before): array for name, array in held.items() if name.startswith(before)}

        def by_head(name, layer=layer, dim=dim):
            return layer[f"self_attn.{name}_proj"].reshape(-1, dim, width).transpose(0, 2, 1)

        norm = "_{}_norm" if tunix else "{}_norm"
        tree[f"{path}attn.q_einsum.w"] = by_head("q")
        tree[f"{path}attn.attn_vec_einsum.w"] = layer["self_attn.o_proj"].T.reshape(-1, dim, width)
        tree[f"{path}attn.{norm.format('query')}.scale"] = layer["self_attn.q_norm"]
        if config.kv_source_layer(index) != index:  # made, and never used
            tree[f"{path}attn.{norm.format('key')}.scale"] = np.ones(dim, np.float32)
            tree[f"{path}attn.kv_einsum.w"] = np.ones((2, kv, width, dim), np.float32)
        else:
            tree[f"{path}attn.{norm.format('key')}.scale"] = layer["self_attn.k_norm"]
            if kind.values_are_keys:
                tree[f"{path}attn.k_einsum.w"] = by_head("k")
            else:
                tree[f"{path}attn.kv_einsum.w"] = np.stack([by_head("k"), by_head("v")])
        names = {
            "pre_attention_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            "pre_ffw_norm": "pre_feedforward_layernorm",
        }
        if config.experts and tunix:
            names |= {"moe_pre_ffw_norm": "pre_feedforward_layernorm_2"}
            names |= {"moe_post_ffw_norm": "post_feedforward_layernorm_2"}
            names |= {"dense_post_ffw_norm": "post_feedforward_layernorm_1"}
        elif config.experts:
            names |= {"pre_ffw_norm": "pre_feedforward_layernorm_2", "pre_ffw2_norm": "pre_feedforward_layernorm"}
            names |= {"post_ffw1_norm": "post_feedforward_layernorm_2"}
            names |= {"post_ffw2_norm": "post_feedforward_layernorm_1"}
        tree |= {f"{path}{name}.scale": layer[theirs] for name, theirs in names.items()}
        tree[f"{path}skip_scale"] = layer["layer_scalar"]
        if size:
            tree |= {
                f"{path}per_layer_input_gate.w": layer["per_layer_input_gate"].T,
                f"{path}per_layer_projection.w": layer["per_layer_projection"].T,
                f"{path}post_per_layer_input_norm.scale": layer["post_per_layer_input_norm"],
            }
        gate, up, down = (layer[f"mlp.{name}_proj"] for name in ("gate", "up", "down"))
        mlp = f"{path}mlp2." if config.experts and not tunix else f"{path}mlp."
        if tunix:
            kernels = {"gate_proj": gate.T, "up_proj": up.T, "down_proj": down.T}
            tree |= {f"{mlp}{name}.kernel": kernel for name, kernel in kernels.items()}
        else:
            tree |= {f"{mlp}gating_einsum": np.stack([gate, up]), f"{mlp}linear": down.T}
        if config.experts:
            count, inner = config.experts.router.count, config.experts.width
            moe = f"{path}moe." if tunix else f"{path}mlp."
            tree |= {
                f"{moe}router_logits": layer["router.proj"].T,
                f"{moe}router_scale": layer["router.scale"],
                f"{moe}per_expert_scale": layer["router.per_expert_scale"],
                f"{moe}gating_einsum": layer["experts.gate_up_proj"].reshape(count, 2, inner, width),
                f"{moe}linear": layer["experts.down_proj"].transpose(0, 2, 1),
            }
    return tree if tunix else {f"transformer/{path.replace('.', '/')}": leaf for path, leaf in tree.items()}


def nested(flat):
    """Nested dictionaries of leaves by path."""
    tree = {}
    for path, leaf in flat.items():
        *parts, last = path.replace("/", ".").split(".")
        inner = tree
        for part in parts:
            inner = inner.setdefault(int(part) if part.isdigit() else part, {})
        inner[last] = leaf
    return tree


CASES = {
    "tunix-llama": ("tunix", LLAMA, to_tunix_llama),
    "tunix-qwen3": ("tunix", toy.TARGET, to_tunix_llama),
    "tunix-tied": ("tunix", TIED, to_tunix_llama),
    "tunix-experts": ("tunix", EXPERTS, to_tunix_llama),
    "maxtext-llama": ("maxtext", LLAMA, lambda c, h: to_maxtext(c, h, True)),
    "maxtext-apart": ("maxtext", LLAMA, lambda c, h: to_maxtext(c, h, False)),
    "maxtext-padded": ("maxtext", LLAMA, lambda c, h: to_maxtext(c, h, True, spare=3)),
    "maxtext-qwen3": ("maxtext", toy.TARGET, lambda c, h: to_maxtext(c, h, True)),
    "maxtext-tied": ("maxtext", TIED, lambda c, h: to_maxtext(c, h, True)),
    "maxtext-experts": ("maxtext", EXPERTS, lambda c, h: to_maxtext(c, h, True)),
    "maxtext-experts-apart": ("maxtext", EXPERTS, lambda c, h: to_maxtext(c, h, False)),
    **{
        f"{ours}-gemma-{kind}": (ours, config, lambda c, h, ours=ours: to_gemma(c, h, ours))
        for kind, config in gemma.KINDS.items()
        for ours in ("tunix", "gemma")
    },
}


@pytest.mark.slow(unless=("tunix-qwen3", "maxtext-llama", "gemma-gemma-shared"))
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_under_hugging_face_names(case):
    names, config, convert = CASES[case]
    arrays = convert(config, hugging_face(config))
    toy.assert_same(jspec.from_named(config, arrays, names=names).params.target, weights_of(config))
    tree = nested(arrays)
    count = named_arrays._fuse._cache_size()
    toy.assert_same(jspec.from_named(config, tree, names=names).params.target, weights_of(config))
    other = nested(convert(config, hugging_face(config, seed=1)))
    toy.assert_same(jspec.from_named(config, other, names=names).params.target, weights_of(config, seed=1))
    assert named_arrays._fuse._cache_size() == count, "other weights compile nothing"
    traced = jax.jit(lambda tree: jspec.from_named(config, tree, names=names).params.target)(tree)
    toy.assert_same(traced, weights_of(config))


def test_states_of_modules_are_taken(needs):
    needs("flax")
    from flax import nnx

    arrays = to_tunix_llama(TIED, hugging_face(TIED))
    state = nnx.State(jax.tree.map(lambda x: nnx.Param(jnp.asarray(x)), nested(arrays)))
    toy.assert_same(jspec.from_named(TIED, state, names="tunix").params.target, weights_of(TIED))


def test_libraries_know_the_documented_models():
    known = {name: {kind.__name__ for kind in library.layouts} for name, library in LIBRARIES.items()}
    assert known == {"gemma": {"Gemma4"}, "maxtext": {"Llama"}, "tunix": {"Llama", "Gemma4"}}


def without(path):
    return lambda tree: {name: leaf for name, leaf in tree.items() if name != path}


def changed(path, change):
    return lambda tree: tree | {path: change(tree.get(path))}


Q, SCAN = "layers.1.attn.q_proj.w", "params.decoder.layers.self_attention.query.kernel"
WRONG = {
    "missing": ("tunix-llama", without(Q), rf"params: {Q} is missing; must have the shape \(32, 4, 16\)"),
    "transposed": (
        "tunix-llama",
        changed(Q, lambda x: x.transpose(1, 0, 2)),
        rf"params: {Q} has shape \(4, 32, 16\), but the configuration implies \(32, 4, 16\)",
    ),
    "flat heads": ("tunix-llama", changed(Q, lambda x: x.reshape(32, -1)), rf"{Q} has shape \(32, 64\)"),
    "integers": ("tunix-llama", changed(Q, lambda x: x.astype(np.int8)), rf"params: {Q} has dtype int8"),
    "no array": ("tunix-llama", changed(Q, lambda x: "x"), rf"{Q} is of type str"),
    "an adapter": (
        "tunix-llama",
        changed("layers.0.attn.q_proj.w_lora_a", lambda x: np.ones((32, 2), np.float32)),
        "params: 1 leaves are not used by this model: layers.0.attn.q_proj.w_lora_a; must be left out",
    ),
    "norms of heads": (
        "tunix-qwen3",
        without("layers.0.attn.q_norm.w"),
        r"layers.0.attn.q_norm.w is missing; must have the shape \(16,\)",
    ),
    "a head beside a tied embedding": (
        "tunix-tied",
        changed("lm_head.w", lambda x: np.ones((32, 61), np.float32)),
        "not used by this model: lm_head.w",
    ),
    "one expert less": (
        "tunix-experts",
        changed("layers.0.mlp.up_proj", lambda x: x[:2]),
        r"layers.0.mlp.up_proj has shape \(2, 32, 16\)",
    ),
    "a layer less": (
        "maxtext-llama",
        changed(SCAN, lambda x: x[:, :1]),
        r"layers.self_attention.query.kernel has shape",
    ),
    "stacked on axis 0": (
        "maxtext-llama",
        changed(SCAN, lambda x: x.swapaxes(0, 1)),
        r"query.kernel has shape \(2, 32",
    ),
    "a layer that is missing": (
        "maxtext-apart",
        without("params.decoder.layers_1.mlp.wo.kernel"),
        "decoder.layers_1.mlp.wo.kernel is missing",
    ),
    "a cut vocabulary": (
        "maxtext-llama",
        changed("params.token_embedder.embedding", lambda x: x[:60]),
        r"token_embedder.embedding has shape \(60, 32\)",
    ),
    "twice": (
        "maxtext-llama",
        changed("decoder.decoder_norm.scale", lambda x: np.ones(32, np.float32)),
        "two leaves have the path decoder.decoder_norm.scale",
    ),
    "names of another": (
        "gemma-gemma-dense",
        lambda tree: {name.replace("layer_", "layers/"): leaf for name, leaf in tree.items()},
        "layer_0.attn.q_einsum.w is missing",
    ),
}


@pytest.mark.parametrize("case, change, message", WRONG.values(), ids=WRONG)
def test_wrong_leaves_are_named(case, change, message):
    names, config, convert = CASES[case]
    arrays = change(convert(config, hugging_face(config)))
    with pytest.raises(CheckpointError, match=message):
        jspec.from_named(config, arrays, names=names, dtype="float32")


BIASED = dataclasses.replace(LLAMA, attention_bias=True)


@pytest.mark.parametrize(
    "config, names, message",
    [
        (LLAMA, "torch", "names='torch': must be one of transformers, gemma, maxtext, tunix"),
        (LLAMA, 5, "names=5: must be one of"),
        (LLAMA, None, "names=None: must be one of"),
        (LLAMA, "gemma", "names='gemma': known for Gemma4, and this model is of type Llama"),
        (gemma.KINDS["dense"], "maxtext", "names='maxtext': known for Llama, and this model is of type Gemma4"),
        (BIASED, "tunix", "layers.0.self_attn.[kqv]_proj.bias has no name in this library"),
        (BIASED, "maxtext", "layers.0.self_attn.[kqv]_proj.bias has no name in this library"),
    ],
)
def test_wrong_names_are_refused(config, names, message):
    with pytest.raises(ValueError, match=message):
        jspec.from_named(config, {"x": np.ones(3, np.float32)}, names=names)
