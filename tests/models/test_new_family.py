"""A new family is a configuration, a checkpoint module and one entry of a table: here is one, defined in this file."""

import ast
import dataclasses
from pathlib import Path
from types import ModuleType

import deepseek
import gemma
import jax
import jax.numpy as jnp
import numpy as np
import oss
import pytest
import qwen
import toy
from jaxtyping import Array, Float
from random_models import RandomTensors

import jspec
from jspec.bench import weights
from jspec.cache import LayerKeys, MhaCache
from jspec.checkpoints import language_model
from jspec.checkpoints.config import describe_shape, read_layer_count, read_shape
from jspec.checkpoints.family import Family
from jspec.core.struct import struct
from jspec.core.types import Params
from jspec.models import assistant, eagle_head, gemma4, gpt_oss, layers, llama, mtp_head, qwen3_next
from jspec.models import deepseek as deepseek_model
from jspec.models.decoder import Decoder, ModelParams
from jspec.models.rope import Rope
from jspec.models.sizes import tree_bytes
from jspec.models.weights import linear, plain

# models/minimal.py: attention layers without MLPs


@struct
class MinimalLayer:
    norm: Float[Array, " E"]
    qkv: Float[Array, "E QKV"]
    o: Float[Array, "E E"]


@dataclasses.dataclass(frozen=True)
class Minimal(Decoder):
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    max_length: int
    intermediate_size: int = 0
    rms_norm_eps: float = 1e-6

    def weights(self):
        width = self.hidden_size
        return ModelParams(
            embed=plain("embed.weight", self.vocab_size, width),
            layers=tuple(
                MinimalLayer(
                    norm=plain(f"layers.{i}.norm.weight", width),
                    qkv=linear(width, {f"layers.{i}.qkv.weight": 3 * width}),
                    o=linear(width, {f"layers.{i}.o.weight": width}),
                )
                for i in range(self.num_layers)
            ),
            norm=plain("norm.weight", width),
        )

    def empty_cache(self, batch, capacity, page_size, dtype):
        keys = self.layer_keys(0)
        shape = dict(layers=self.num_layers, kv_heads=keys.kv_heads, head_dim=keys.head_dim, dtype=dtype)
        return MhaCache.empty(batch, capacity, page_size, **shape)

    def layer_keys(self, layer):
        return LayerKeys(self.num_heads, self.hidden_size // self.num_heads)

    def layer_rotation(self, layer, positions, dtype):
        return Rope().rotation(positions, self.layer_keys(layer).head_dim, dtype)

    def layer_scale(self, layer):
        return self.layer_keys(layer).head_dim ** -0.5

    def run_layer(self, layer, x, rotation, reading):
        qkv = layers.linear(self.norm(x, layer.norm), layer.qkv)
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * self.num_heads, -1), 3, axis=2)
        q, k = layers.rotate(q, rotation), layers.rotate(k, rotation)
        k, v = reading.rows(k, v)
        x = reading.take(x)
        seen = reading.attend(q, k, v, scale=self.layer_scale(reading.layer))
        return x + layers.linear(seen.reshape(x.shape), layer.o), (k, v)


# checkpoints/minimal.py

ARCHITECTURES = {"MinimalForCausalLM": "minimal"}


def parse_config(config):
    return Minimal(**read_shape(config), num_layers=read_layer_count(config))


def describe(config):
    return describe_shape("MinimalForCausalLM", "minimal", config)


FAMILY = Family(Minimal, ARCHITECTURES, parse_config, describe)

# The rest of this file is the test

CONFIG = Minimal(vocab_size=61, hidden_size=32, num_layers=2, num_heads=2, max_length=512)


@pytest.fixture
def checkpoint(monkeypatch, tmp_path):
    """A directory of a model with random weights, and these weights."""
    monkeypatch.setattr(language_model, "FAMILIES", (*language_model.FAMILIES, FAMILY))
    params = weights.random_weights(CONFIG.param_shapes(jnp.float32), CONFIG.vocab_size)
    language_model.save(tmp_path, CONFIG, params, dtype="float32", eos=(3,))
    return tmp_path, params


def test_it_is_unknown_without_its_entry(checkpoint, monkeypatch):
    directory, params = checkpoint
    monkeypatch.setattr(language_model, "FAMILIES", language_model.FAMILIES[:-1])
    with pytest.raises(ValueError, match="MinimalForCausalLM.* is not supported"):
        jspec.load(directory)
    with pytest.raises(ValueError, match="Minimal is not the configuration of a family"):
        language_model.save(directory, CONFIG, params)


@pytest.mark.slow
def test_it_loads_and_generates(checkpoint):
    directory, params = checkpoint
    model = jspec.load(directory, dtype="float32")
    assert model.target == CONFIG and model.eos == (3,) and "2 layers" in repr(model)
    toy.assert_same(model.params.target, params)
    plain = jspec.generate(model, [1, 2, 1, 2], max_new_tokens=12, drafter="plain").tokens
    assert jspec.generate(model, [1, 2, 1, 2], max_new_tokens=12, drafter=jspec.Ngram()).tokens == plain


@pytest.mark.slow
def test_a_new_family_drafts_for_itself(checkpoint):
    directory, _ = checkpoint
    model = jspec.load(directory, draft=directory, dtype="float32")
    assert "draft of 2 layers" in repr(model)
    out = jspec.generate(model, [5, 6, 7], max_new_tokens=12, drafter=jspec.Standalone(depth=3))
    assert out.tokens == jspec.generate(model, [5, 6, 7], max_new_tokens=12, drafter="plain").tokens
    assert out.stats.accept_length > 2, "it agrees with itself"


def test_benchmarks_know_its_bytes(checkpoint):
    _, params = checkpoint
    every = tree_bytes(params)
    assert CONFIG.forward_bytes(params) == every
    both, sizes = Params(params, params), dict(batch=1, context=100)
    keys = 100 * 2 * 2 * 2 * 16 * 4
    assert weights.round_bytes(both, CONFIG, None, depth=0, **sizes) == every + keys
    assert weights.round_bytes(both, CONFIG, CONFIG, depth=3, **sizes) == 4 * (every + keys)


@pytest.mark.slow
def test_an_assistant_can_be_trained_for_it(checkpoint):
    learner = pytest.importorskip("jspec.train.assistant", reason='needs optax: pip install -e ".[train]"')
    _, params = checkpoint
    target = learner.require_keys(CONFIG)
    config = learner.AssistantLearner.configure(
        dataclasses.replace(target, intermediate_size=48), learner.AssistantShape()
    )
    draft = learner.AssistantLearner(None, "float32", config, target)
    made = draft.init(params, None, jax.random.key(0))
    assert jax.tree.map(np.shape, made) == jax.tree.map(lambda leaf: leaf.shape, config.param_shapes(jnp.float32))


# The same holds for all families


@pytest.mark.parametrize(
    ("config", "read"),
    [
        *((config, gemma4.Gemma4) for config in gemma.KINDS.values()),
        *((config, qwen3_next.Qwen3Next) for config in qwen.KINDS.values()),
        (dataclasses.replace(qwen.KINDS["dense"], mtp_layers=1), qwen3_next.Qwen3Next),
        *((config, deepseek_model.Deepseek) for config in deepseek.KINDS.values()),
        (dataclasses.replace(deepseek.MLA, mtp_layers=2), deepseek_model.Deepseek),
        *((config, gpt_oss.GptOss) for config in oss.KINDS.values()),
        (toy.TARGET, llama.Llama),
        (dataclasses.replace(toy.TARGET, qk_norm=True, attention_bias=True, tie_embeddings=False), llama.Llama),
    ],
)
def test_weights_have_the_shapes_of_their_configuration(config, read):
    family = next(family for family in language_model.FAMILIES if family.config is read)
    made = family.read_params(config, RandomTensors(0))
    shapes = config.param_shapes(np.float32)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)


def classes_of(module: ModuleType) -> set[str]:
    return {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}


@pytest.mark.slow
def test_only_its_own_files_ask_for_a_family():
    """A drafter may check for its own kind; others ask the configuration."""
    modules = (llama, gemma4, deepseek_model, qwen3_next, gpt_oss, eagle_head, mtp_head, assistant)
    known = set().union(*map(classes_of, modules))
    root = Path(jspec.__file__).parent
    for path in sorted(root.glob("**/*.py")):
        if path.parent.name in ("models", "checkpoints", "drafters"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                asked = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                assert not asked & known, f"{path}:{node.lineno}"
