"""Mistakes with leaves, rules, drafters, modules and targets of one's own: each is an error that names it.

The tables of test_own.py, test_named.py, tests/checkpoints/test_names.py and tests/analysis/ have further ones.
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
from jspec.core import accept, tree
from jspec.core.types import Acceptance, DraftTree, ForwardOutput, Params
from jspec.drafters import Ngram

MODEL = jspec.Model("toy", toy.TARGET, Params(toy.params().target), None, (7,))
EMBED = {"embed": jnp.asarray(np.random.default_rng(0).normal(size=(23, 4)), jnp.float32)}


def apply(params, tokens):
    return params["embed"][tokens] @ params["embed"].T


FUNCTION = jspec.from_function(apply, EMBED, max_length=32)


def generate(**options):
    return jspec.generate(MODEL, [[1, 2, 3]], max_new_tokens=4, **({"drafter": "ngram"} | options))


# Rules


def rule(**fields):
    """`coupled` with changed fields."""

    def mine(key, draft_tree, logits, position):
        result = accept.coupled(key, draft_tree, logits, position)
        return dataclasses.replace(result, **{name: change(result) for name, change in fields.items()})

    return mine


class UnhashableRule:
    __hash__ = None

    def __call__(self, *args):
        return accept.coupled(*args)


RULES = {
    "a class": (Acceptance, TypeError, "accept=Acceptance: must be an object, not a class"),
    "unhashable": (UnhashableRule(), TypeError, "accept=.*: must be hashable, because it is part of the program"),
    "returns a pair": (lambda *args: (1, 2), TypeError, r"accept=<lambda>: returns \(int, int\); must return a jspec"),
    "returns nothing": (lambda *args: None, TypeError, "accept=<lambda>: returns NoneType"),
    "returns tokens": (lambda k, t, z, p: t.tokens, TypeError, "accept=<lambda>: returns an array"),
    "tokens in floats": (
        rule(tokens=lambda r: r.tokens.astype(jnp.float32)),
        ValueError,
        r"accept=mine: returns tokens float32\[1, \d\]; must be int32\[1, N\]",
    ),
    "tokens of one sequence": (rule(tokens=lambda r: r.tokens[0]), ValueError, r"tokens int32\[\d\]; must be int32"),
    "too few tokens": (rule(tokens=lambda r: r.tokens[:, :0]), ValueError, r"tokens int32\[1, 0\]; must have a column"),
    "lengths in floats": (
        rule(length=lambda r: r.length.astype(jnp.float32)),
        ValueError,
        r"accept=mine: returns length float32\[1\]; must be int32\[1\]",
    ),
    "lengths with an axis": (rule(length=lambda r: r.length[:, None]), ValueError, r"length int32\[1, 1\]"),
    "one length": (rule(length=lambda r: r.length[0]), ValueError, r"length int32\[\]; must be int32\[1\]"),
    "no length": (rule(length=lambda r: None), ValueError, "returns length of type NoneType"),
    "a path in floats": (rule(path=lambda r: r.tokens / 2), ValueError, r"accept=mine: returns path float32"),
}


@pytest.mark.parametrize("mine, error, message", RULES.values(), ids=RULES)
def test_mistakes_of_rules_are_named(mine, error, message):
    with pytest.raises(error, match=message):
        generate(accept=mine)


# Drafters


def drafter(**methods):
    return type("Mine", (Ngram,), methods)(n=2, depth=3)


def drafts(result):
    """A drafter whose `draft` returns this of a state."""
    return drafter(draft=lambda self, params, s: result(s))


class WithParts:
    """An object with some attributes of a drafter."""

    depth, capture_layers = 2, ()


DRAFTERS = {
    "a class": (Ngram, TypeError, "drafter=Ngram is not a drafter: give an object, not a class"),
    "without methods": (WithParts(), TypeError, "WithParts is not a drafter: it has no bind, init, draft, extend"),
    "unhashable": (drafter(__hash__=None), TypeError, "drafter=Mine.*: must be hashable"),
    "binds to nothing": (
        drafter(bind=lambda *args: None),
        TypeError,
        "Mine.bind: must return a drafter, but this NoneType has no depth",
    ),
    "a list of layers": (drafter(capture_layers=[1]), TypeError, r"Mine\(capture_layers=\[1\]\): must be a tuple"),
    "a layer that is not there": (
        drafter(capture_layers=(9,)),
        ValueError,
        r"Mine\(capture_layers=9\): must be from 0 to 3",
    ),
    "a layer that is no int": (drafter(capture_layers=("1",)), TypeError, r"Mine\(capture_layers='1'\)"),
    "returns a tree alone": (
        drafts(lambda s: tree.chain(s.root)),
        TypeError,
        r"Mine.draft: returns DraftTree; must return \(jspec.core.types.DraftTree, state\)",
    ),
    "returns tokens": (drafts(lambda s: (s.root, None)), TypeError, r"Mine.draft: returns \(an array, NoneType\)"),
    "returns nothing": (drafts(lambda s: None), TypeError, "Mine.draft: returns NoneType"),
    "tokens in floats": (
        drafts(lambda s: (DraftTree(s.root.astype(jnp.float32)), None)),
        ValueError,
        r"Mine.draft: returns tokens float32\[1, 1\]; must be int32\[1, N\]",
    ),
    "tokens without an axis": (drafts(lambda s: (DraftTree(s.root[0]), None)), ValueError, r"tokens int32\[1\]"),
    "another batch": (
        drafts(lambda s: (tree.chain(jnp.zeros((2, 3), jnp.int32)), None)),
        ValueError,
        r"tokens int32\[2, 3\]; must be int32\[1, N\]",
    ),
    "parents of another shape": (
        drafts(lambda s: (dataclasses.replace(tree.chain(s.root), parents=jnp.zeros((1, 2), jnp.int32)), None)),
        ValueError,
        r"returns parents int32\[1, 2\]; must be int32\[1, 1\]",
    ),
    "too long": (
        drafts(lambda s: (tree.chain(jnp.repeat(s.root, 6, axis=1)), None)),
        ValueError,
        "Mine.draft: returns a chain of 5 drafts; must have at most depth=3",
    ),
    "a state that grows": (
        drafter(
            init=lambda self, *args: jnp.zeros(1, jnp.int32),
            draft=lambda self, params, s: (tree.chain(s.root), s.draft),
            extend=lambda self, params, s, committed: jnp.zeros(1 if committed.first else 2, jnp.int32),
        ),
        ValueError,
        r"Mine.extend: returns a state of another form: it is int32\[2\], but was int32\[1\]; must stay the same",
    ),
    "a state that is dropped": (
        drafter(
            init=lambda self, *args: {"seen": jnp.zeros(1, jnp.int32)},
            draft=lambda self, params, s: (tree.chain(s.root), s.draft),
            extend=lambda self, params, s, committed: s.draft if committed.first else None,
        ),
        ValueError,
        r"Mine.extend: returns a state of another form: \['seen'\] is missing, but was int32\[1\]",
    ),
}


@pytest.mark.slow(
    unless=("a state that grows", "returns a tree alone", "tokens in floats", "returns nothing", "another batch")
)
@pytest.mark.parametrize("mine, error, message", DRAFTERS.values(), ids=DRAFTERS)
def test_mistakes_of_drafters_are_named(mine, error, message):
    with pytest.raises(error, match=message):
        generate(drafter=mine)


# Weights


def deleted():
    """Weights that a program has taken, as a step of training does."""
    params = {"embed": jnp.array(EMBED["embed"])}
    model = jspec.from_function(apply, params, max_length=32)
    params["embed"].delete()
    return model


LLAMA = MODEL.params.target
WEIGHTS = {
    "a number": (lambda: FUNCTION.with_params(5), r"params.target\['embed'\] is missing"),
    "a list": (lambda: FUNCTION.with_params([EMBED["embed"]]), r"params.target\[0\] is not one of its weights"),
    "another key": (lambda: FUNCTION.with_params({"em": EMBED["embed"]}), r"\['em'\] is not one of its weights"),
    "one more": (lambda: FUNCTION.with_params(EMBED | {"x": jnp.ones(3)}), r"params.target\['x'\] is not one of its"),
    "one more layer": (
        lambda: MODEL.with_params(dataclasses.replace(LLAMA, layers=LLAMA.layers * 2)),
        r"params.target.layers\[2\].attention_norm is not one of its weights",
    ),
    "a layer less": (
        lambda: MODEL.with_params(dataclasses.replace(LLAMA, layers=LLAMA.layers[:1])),
        r"params.target.layers\[1\].attention_norm is missing",
    ),
    "a tuple as a list": (
        lambda: MODEL.with_params(dataclasses.replace(LLAMA, layers=list(LLAMA.layers))),
        "their structure is not that of the model: its containers are of other types",
    ),
    "a norm that is cut": (
        lambda: MODEL.with_params(dataclasses.replace(LLAMA, norm=LLAMA.norm[:-1])),
        r"params.target.norm: is float32\[31\]; must be float32\[32\]",
    ),
    "a shape": (
        lambda: FUNCTION.with_params({"embed": jax.ShapeDtypeStruct((23, 4), jnp.float32)}),
        r"params.target\['embed'\]: is of type ShapeDtypeStruct; must be float32\[23, 4\]",
    ),
    "deleted": (
        lambda: FUNCTION.with_params(deleted().params.target),
        r"params.target\['embed'\]: has been deleted, as donate_argnums of jax.jit does",
    ),
    "deleted later": (
        lambda: jspec.generate(deleted(), [[1]], max_new_tokens=2),
        r"model='apply': params.target\['embed'\]: has been deleted",
    ),
    "deleted and scored": (lambda: jspec.score(deleted(), [1, 2]), "has been deleted"),
    "deleted in an engine": (lambda: jspec.Engine(deleted(), slots=1), "has been deleted"),
    "deleted for a function": (
        lambda: jspec.from_function(apply, deleted().params.target, max_length=9),
        r"params\['embed'\]: has been deleted",
    ),
    "deleted under a name": (
        lambda: jspec.from_named(toy.TARGET, {"model.norm.weight": deleted().params.target["embed"]}),
        "arrays: model.norm.weight has been deleted",
    ),
    "no draft's": (
        lambda: FUNCTION.with_params(Params(EMBED, EMBED)),
        r"params.draft\['embed'\] is not one of its weights",
    ),
}


@pytest.mark.parametrize("call, message", WEIGHTS.values(), ids=WEIGHTS)
def test_weights(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Leaves of other families than Llama


LAYER = "model.layers.0."
LEAVES = {
    "no scalar": ("dense", {LAYER + "layer_scalar": None}, "'model.layers.0.layer_scalar' is missing"),
    "a scalar without an axis": ("dense", {LAYER + "layer_scalar": jnp.ones(())}, r"layer_scalar has shape \(\)"),
    "values where keys are values": (
        "dense",
        {"model.layers.2.self_attn.v_proj.weight": jnp.ones((16, 32))},
        "unused tensor.*model.layers.2.self_attn.v_proj.weight",
    ),
    "norms of the other width": (
        "dense",
        {"model.layers.2.self_attn.q_norm.weight": jnp.ones(8)},
        r"model.layers.2.self_attn.q_norm.weight has shape \(8,\), but config.json implies \(16,\)",
    ),
    "no inputs of layers": (
        "shared",
        {"model.embed_tokens_per_layer.weight": None},
        "'model.embed_tokens_per_layer.weight' is missing",
    ),
    "a narrow MLP": (
        "shared",
        {"model.layers.3.mlp.up_proj.weight": jnp.ones((64, 32))},
        r"model.layers.3.mlp.up_proj.weight has shape \(64, 32\), but config.json implies \(128, 32\)",
    ),
    "an expert less": (
        "experts",
        {LAYER + "experts.down_proj": jnp.ones((5, 32, 16))},
        r"experts.down_proj has shape \(5, 32, 16\)",
    ),
    "no router": ("experts", {LAYER + "router.proj.weight": None}, "'model.layers.0.router.proj.weight' is missing"),
    "a head beside a tied embedding": (
        "dense",
        {"lm_head.weight": jnp.ones((61, 32))},
        "lm_head.weight must be left out, or be equal",
    ),
}


@pytest.mark.parametrize("kind, changes, message", LEAVES.values(), ids=LEAVES)
def test_wrong_leaves_are_named(kind, changes, message):
    config, arrays = gemma.KINDS[kind], arrays_of(gemma.KINDS[kind], gemma.params(kind))
    given = {name: array for name, array in (arrays | changes).items() if array is not None}
    with pytest.raises(ValueError, match=message):
        jspec.from_named(config, given)


# Modules and targets


@pytest.fixture(scope="module")
def modules():
    linen, nnx = (pytest.importorskip(f"flax.{name}") for name in ("linen", "nnx"))

    class Fine(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            return linen.Dense(23)(linen.Embed(23, 4)(tokens))

    class Random(Fine):
        @linen.compact
        def __call__(self, tokens):
            return linen.Dropout(0.5, deterministic=False)(linen.Embed(23, 4)(tokens))

    class Masked(Fine):
        @linen.compact
        def __call__(self, tokens, mask):
            return linen.Embed(23, 4)(tokens)

    class Pair(Fine):
        @linen.compact
        def __call__(self, tokens):
            return linen.Embed(23, 4)(tokens), None

    class NoCall(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(23, 4, rngs=nnx.Rngs(0))

    class Dropout(NoCall):
        def __init__(self):
            super().__init__()
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, tokens):
            return self.drop(self.embed(tokens))

    variables = Fine().init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    return {each.__name__: each for each in (Fine, Random, Masked, Pair, NoCall, Dropout)} | {"variables": variables}


MODULES = {
    "a class": (lambda m: (m["Fine"], m["variables"]), "module is of type type: must be a module of flax.nnx or"),
    "nothing": (lambda m: (None, None), "module is of type NoneType"),
    "random": (lambda m: (m["Random"](), m["variables"]), "Random.* fails .*needs PRNG for .dropout"),
    "two arguments": (lambda m: (m["Masked"](), m["variables"]), "Masked.* fails .*missing 1 required .*'mask'"),
    "a pair": (lambda m: (m["Pair"](), m["variables"]), "Pair returns tuple; must return one array of logits"),
    "no variables": (lambda m: (m["Fine"](), {"params": {}}), 'Fine.* fails .*"params" .*is empty'),
    "variables without params": (lambda m: (m["Fine"](), m["variables"]["params"]), "Fine.* fails .*is empty"),
    "no call": (lambda m: (m["NoCall"](), None), "NoCall.* fails .*'NoCall' object is not callable"),
    "dropout": (lambda m: (m["Dropout"](), None), "depend on later tokens; .*random, such as dropout, must be off"),
}


@pytest.mark.parametrize("make, message", MODULES.values(), ids=MODULES)
def test_modules_that_cannot_be_read_are_refused(make, message, modules, needs):
    needs("flax")
    module, variables = make(modules)
    with pytest.raises((TypeError, ValueError), match=message):
        jspec.from_module(module, variables, max_length=9)


@dataclasses.dataclass(frozen=True)
class Target:
    """A target whose forward returns what `result` makes of logits; it keeps nothing."""

    result: object
    vocab_size: int = 23
    hidden_size: int = 4
    num_layers: int = 1
    max_length: int = 64

    def init_cache(self, params, batch, capacity, page_size):
        return FUNCTION.target.init_cache(params, batch, capacity, page_size)

    def embed(self, params, tokens):
        return params["embed"][tokens]

    unembed = embed

    def forward(self, params, draft_tree, cache, start, *, capture_layers=(), select=None):
        out = FUNCTION.target.forward(params, draft_tree, cache, start, select=select)
        return self.result(out)


TARGETS = {
    "returns logits": (lambda out: out.logits, TypeError, "Target.forward: returns an array; must return a jspec"),
    "returns a pair": (lambda out: (out.logits, out.rows), TypeError, r"returns \(an array, an array\); must return"),
    "logits in half precision": (
        lambda out: dataclasses.replace(out, logits=out.logits.astype(jnp.bfloat16)),
        ValueError,
        r"Target.forward: returns logits bfloat16\[1, 1, 23\]; must be float32\[B, 1, 23\]",
    ),
    "logits of fewer tokens": (
        lambda out: dataclasses.replace(out, logits=out.logits[:, :, :22]),
        ValueError,
        r"returns logits float32\[1, 1, 22\]; must be float32\[B, 1, 23\]",
    ),
    "logits without an axis": (
        lambda out: ForwardOutput(out.logits[0], out.rows, None),
        ValueError,
        r"returns logits float32\[1, 23\]",
    ),
}


@pytest.mark.parametrize("result, error, message", TARGETS.values(), ids=TARGETS)
def test_mistakes_of_targets_are_named(result, error, message):
    with pytest.raises(error, match=message):
        jspec.generate(jspec.from_target(Target(result), EMBED), [[1, 2, 3]], drafter="ngram", max_new_tokens=4)


def test_these_and_other_tables_have_more_than_sixty_mistakes():
    tables = (RULES, DRAFTERS, WEIGHTS, LEAVES, MODULES, TARGETS)
    assert sum(map(len, tables)) >= 60
