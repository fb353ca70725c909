"""Models of the user's own: a function in plain JAX, a module of linen and one of nnx, as target and as draft."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jspec
from jspec.core.loop import decode
from jspec.core.prefill import jitted_prefill
from jspec.core.types import Params
from jspec.runner import programs

VOCAB, WIDTH, LENGTH = 23, 16, 48
PROMPTS = [[3, 1, 4, 1, 5], [2], [7, 1, 8, 2, 8, 1, 8]]
TREE = jspec.Standalone(depth=3, width=2, num_nodes=6)


def attend(x, q, k, v, o):
    """One head of causal attention."""
    scores = jnp.einsum("bqd,bkd->bqk", x @ q, x @ k) / 4
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
    return x + jax.nn.softmax(jnp.where(causal[None], scores, -1e9)) @ (x @ v) @ o


def apply(params, tokens):
    """A transformer of one layer."""
    x = params["embed"][tokens] + params["position"][None, : tokens.shape[1]]
    x = attend(x, *params["layer"])
    return (x + jnp.tanh(x @ params["up"]) @ params["down"]) @ params["embed"].T * 2


def weights(seed=0, noise=0.0):
    shapes = {"embed": (VOCAB, WIDTH), "position": (LENGTH, WIDTH), "up": (WIDTH, 32), "down": (32, WIDTH)}
    rng, other = np.random.default_rng(seed), np.random.default_rng(99)

    def normal(shape):
        return jnp.array(rng.normal(size=shape) + noise * other.normal(size=shape), jnp.float32) / 2

    params = {name: normal(shape) for name, shape in shapes.items()}
    return params | {"layer": [normal((WIDTH, WIDTH)) for _ in range(4)]}


def naive(params, prompt, count, function=apply):
    """Argmax, one token at a time."""
    step = jax.jit(function)
    tokens = list(prompt)
    for _ in range(count):
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(tokens)] = tokens
        tokens.append(int(step(params, row)[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def model():
    target = jspec.from_function(apply, weights(), max_length=LENGTH, eos=[VOCAB - 1])
    return target.with_draft(jspec.from_function(apply, weights(noise=0.1), max_length=LENGTH))


@pytest.fixture(scope="module")
def texts(model):
    texts = [naive(model.params.target, prompt, 20) for prompt in PROMPTS]
    return [text[: text.index(VOCAB - 1) + 1] if VOCAB - 1 in text else text for text in texts]


def test_repr_names_the_function_and_the_draft(model):
    assert repr(model) == "Model('apply': a function of tokens, vocabulary 23, float32; draft apply)"


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, "ngram", jspec.Standalone(depth=3), TREE], ids=str)
def test_output_is_that_of_a_naive_loop(model, texts, drafter):
    out = jspec.generate(model, PROMPTS, drafter=drafter, max_new_tokens=20)
    assert out.tokens == texts
    if drafter is TREE:
        assert out.stats.accept_length > 1.5


@pytest.mark.slow
def test_an_engine_a_stream_and_a_pure_function_give_the_same(model, texts):
    for drafter in (TREE, jspec.Standalone(depth=3)):
        alone = jspec.generate(model, PROMPTS, drafter=drafter, max_new_tokens=20)
        with jspec.Engine(model, drafter=drafter, slots=2, page_size=4, prefill_tokens=4) as engine:
            out = engine.generate(PROMPTS, max_new_tokens=20)
            assert out.tokens == texts and out.stats.rounds.tolist() == alone.stats.rounds.tolist()
            again = engine.generate(PROMPTS * 3, max_new_tokens=20)  # prompts that are known
            assert again.tokens == texts * 3
            np.testing.assert_allclose(engine.score(PROMPTS[0]).logprobs[1:], scored(model, PROMPTS[0]), atol=1e-5)
    pieces = [piece for piece in jspec.stream(model, PROMPTS[0], drafter=TREE, max_new_tokens=20)]
    assert sum((piece.tokens for piece in pieces), []) == texts[0]

    @jax.jit
    def complete(params, ids, key):
        return jspec.generate_ids(params, ids, jnp.array([5]), key, target=model.target, max_new_tokens=20)

    ids = complete(model.params, jnp.array([PROMPTS[0]]), jax.random.key(0))
    assert ids.tokens[0, 5:].tolist()[: len(texts[0])] == texts[0]


def scored(model, prompt):
    logits = apply(model.params.target, jnp.array([prompt]))[0]
    return [float(jax.nn.log_softmax(row)[token]) for row, token in zip(logits[:-1], prompt[1:], strict=True)]


def test_score_is_that_of_the_function(model):
    np.testing.assert_allclose(jspec.score(model, PROMPTS[2]).logprobs[1:], scored(model, PROMPTS[2]), atol=1e-5)


@pytest.mark.slow
def test_drafted_rounds_are_those_of_a_model_with_a_cache():
    """The same network as a function and as a model with keys and values: the same tokens, rounds and drafts."""
    cached = jspec.Model("toy", toy.TARGET, toy.params(), None, (7,), toy.NEAR)

    def function(config, params, tokens):
        cache = config.init_cache(params, tokens.shape[0], 4, 4)
        return config.forward(params, jspec.core.types.DraftTree(tokens), cache, None).logits

    target, draft = (
        jspec.from_function(functools.partial(function, config), weights, max_length=64, eos=[7])
        for config, weights in ((toy.TARGET, cached.params.target), (toy.NEAR, cached.params.draft))
    )
    model = target.with_draft(draft)
    for drafter in (jspec.Standalone(depth=3), jspec.Standalone(depth=4, width=3, num_nodes=9)):
        for sampling in (None, jspec.Sampling(temperature=0.8, top_k=20)):
            options = dict(drafter=drafter, max_new_tokens=24, sampling=sampling)
            got, expected = (jspec.generate(either, PROMPTS, **options) for either in (model, cached))
            assert got.tokens == expected.tokens and got.origin == expected.origin
            np.testing.assert_array_equal(got.stats.rounds, expected.stats.rounds)
            np.testing.assert_array_equal(got.stats.accept_counts, expected.stats.accept_counts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_modules_of_flax(kind, needs):
    needs("flax")
    from flax import linen, nnx

    if kind == "linen":

        class Language(linen.Module):
            @linen.compact
            def __call__(self, tokens):
                x = linen.Embed(VOCAB, WIDTH)(tokens)
                mean = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None]
                return linen.Dense(VOCAB)(linen.tanh(linen.Dense(32)(jnp.concatenate([x, mean], -1))))

        module = Language()
        variables = module.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
        make = functools.partial(jspec.from_module, Language(), max_length=LENGTH)
        model, other = make(variables), make(jax.tree.map(lambda x: 1.01 * x, variables))
        call = module.apply
    else:

        class Language(nnx.Module):
            def __init__(self, rngs):
                self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
                self.up, self.down = nnx.Linear(2 * WIDTH, 32, rngs=rngs), nnx.Linear(32, VOCAB, rngs=rngs)

            def __call__(self, tokens):
                x = self.embed(tokens)
                mean = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None]
                return self.down(jnp.tanh(self.up(jnp.concatenate([x, mean], -1))))

        module = Language(nnx.Rngs(0))
        model, other = (jspec.from_module(Language(nnx.Rngs(seed)), max_length=LENGTH) for seed in (0, 1))
        model = jspec.from_module(module, max_length=LENGTH)
        graph, variables = nnx.split(module)

        def call(state, tokens):
            return nnx.merge(graph, state)(tokens)

        leaves = jax.tree.leaves(model.params.target)
        assert any(leaf is module.down.kernel[...] for leaf in leaves), "weights are taken by reference"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        texts = [naive(variables, prompt, 12, call) for prompt in PROMPTS]
        drafted = model.with_draft(other)
        for drafter in ("ngram", jspec.Standalone(depth=2, width=2)):
            assert jspec.generate(drafted, PROMPTS, drafter=drafter, max_new_tokens=12).tokens == texts
        count = decode._cache_size()
        jspec.generate(other.with_draft(model), PROMPTS, drafter=drafter, max_new_tokens=12)
        assert decode._cache_size() == count, "a module of the same structure compiles nothing"
        with jspec.Engine(drafted, slots=2, drafter=drafter, page_size=4) as engine:
            assert engine.generate(PROMPTS, max_new_tokens=12).tokens == texts


@pytest.mark.slow
def test_new_weights_compile_nothing(model):
    before = jspec.generate(model, PROMPTS, drafter=TREE, max_new_tokens=20)
    sizes = [f._cache_size() for f in (decode, jitted_prefill, programs.burst)]
    changed = model.with_params(weights(seed=5))
    after = jspec.generate(changed, PROMPTS, drafter=TREE, max_new_tokens=20)
    assert [f._cache_size() for f in (decode, jitted_prefill, programs.burst)] == sizes
    limited = [
        naive(changed.params.target, prompt, len(new)) for prompt, new in zip(PROMPTS, after.tokens, strict=True)
    ]
    assert after.tokens == limited != before.tokens
    assert changed.params.draft is model.params.draft
    assert model.with_params(Params(weights(5), weights(6))).params.draft["embed"].shape == (VOCAB, WIDTH)


PARAMS = {"embed": np.random.default_rng(1).normal(size=(VOCAB, 4)).astype(np.float32)}


def plus(result):
    """A function with this result."""
    return lambda params, tokens: result(params["embed"][tokens] @ params["embed"].T)


NINE = plus(lambda logits: logits[..., :9])
WRONG = {
    "no function": (dict(function=5), "function is of type int"),
    "a method of another signature": (dict(function=lambda tokens: tokens), "function: <lambda>.* fails .*TypeError"),
    "not callable with tokens": (dict(function=plus(lambda x: x @ x)), "function: <lambda>.* fails"),
    "a tuple": (dict(function=plus(lambda x: (x, x))), "returns tuple; must return one array"),
    "nothing": (dict(function=plus(lambda x: None)), "returns NoneType"),
    "integers": (dict(function=plus(lambda x: x.astype(jnp.int32))), r"returns int32\[2, 8, 23\]"),
    "the last token only": (dict(function=plus(lambda x: x[:, -1])), r"returns float32\[2, 23\]"),
    "one sequence": (dict(function=plus(lambda x: x[0])), r"returns float32\[8, 23\]"),
    "transposed": (dict(function=plus(lambda x: x.swapaxes(0, 1))), r"returns float32\[8, 2, 23\]"),
    "later tokens": (
        dict(function=plus(lambda x: x + x.sum(1, keepdims=True))),
        "depend on later tokens; must be causal",
    ),
    "the fourth token leaks": (dict(function=plus(lambda x: x + x[:, 3:4])), "depend on later tokens"),
    "the next token leaks a little": (
        dict(function=plus(lambda x: x + 0.01 * jnp.roll(x, -1, axis=1).at[:, -1].set(0))),
        "depend on later tokens",
    ),
    "NaN": (dict(function=plus(lambda x: x.at[0, 2, 5].set(jnp.nan))), "<lambda> returns logits that are NaN"),
    "infinity": (dict(function=plus(lambda x: x.at[0, 2, 5].set(jnp.inf))), r"<lambda> returns logits that are \+inf"),
    "the reverse": (dict(function=plus(lambda x: x[:, ::-1])), "depend on later tokens"),
    "unhashable": (dict(function=functools.partial(plus(lambda x: x), [])), "function"),
    "another vocabulary": (dict(vocab_size=22), "vocab_size=22: .* returns logits of 23 tokens"),
    "no vocabulary": (dict(vocab_size=0), "vocab_size=0"),
    "a length of 1": (dict(max_length=1), "max_length=1"),
    "a length that is no int": (dict(max_length=4.5), "max_length=4.5"),
    "an end outside": (dict(eos=[23]), r"eos\[0\]=23"),
    "an end that is no list": (dict(eos=7), "eos=7"),
    "a tokenizer of others": (dict(tokenizer="gpt2"), "tokenizer is of type str"),
    "a name that is no text": (dict(name=5), "name"),
    "a check that is no flag": (dict(check=1), "check=1"),
}


def test_logits_that_forbid_tokens_and_half_precision_are_causal():
    for change in (lambda x: x.at[..., 3].set(-jnp.inf), lambda x: x.astype(jnp.bfloat16)):
        assert jspec.from_function(plus(change), PARAMS, max_length=16).target.vocab_size == VOCAB


@pytest.mark.parametrize("options, message", WRONG.values(), ids=WRONG)
def test_wrong_functions_are_refused(options, message):
    arguments = {"function": plus(lambda x: x), "params": PARAMS, "max_length": 16} | options
    with pytest.raises((ValueError, TypeError), match=message):
        jspec.from_function(**arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m: m.with_params({}), "structure"),
        (lambda m: m.with_params(None), "structure"),
        (
            lambda m: m.with_params(m.params.target | {"embed": jnp.ones((VOCAB - 1, WIDTH))}),
            r"params.*'embed'.*\[22, 16\]",
        ),
        (lambda m: m.with_params(m.params.target | {"up": jnp.ones((WIDTH, 32), jnp.bfloat16)}), "'up'.*bfloat16"),
        (lambda m: m.with_params(m.params.target | {"up": 5}), "'up'.*int"),
        (lambda m: m.with_draft("bundled:python-tiny"), "draft is of type str"),
        (
            lambda m: m.with_draft(jspec.from_function(plus(lambda x: x[..., :9]), PARAMS, max_length=9)),
            "vocabulary of 9",
        ),
        (lambda m: jspec.generate(m, PROMPTS, drafter="eagle", max_new_tokens=4), "Eagle"),
        (lambda m: jspec.generate(m.with_draft(None), PROMPTS, drafter=TREE, max_new_tokens=4), "Standalone needs"),
        (lambda m: jspec.generate(m, PROMPTS, max_new_tokens=48), "context of 48"),
        (lambda m: jspec.generate(m, "text"), "tokenizer"),
        (lambda m: jspec.from_module(apply, max_length=9), "module is of type function"),
    ],
)
def test_wrong_uses_are_refused(model, change, message, needs):
    needs("flax")
    with pytest.raises((ValueError, TypeError), match=message):
        change(model)


def test_modules_without_their_variables_are_refused(needs):
    needs("flax")
    from flax import linen, nnx

    with pytest.raises(ValueError, match="variables=None: a module of linen needs"):
        jspec.from_module(linen.Dense(4), max_length=9)
    with pytest.raises(ValueError, match="variables: a module of nnx holds its own"):
        jspec.from_module(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), {}, max_length=9)


def test_a_model_without_a_draft_is_that_of_before(model):
    bare = model.with_draft(None)
    assert bare.draft is None and bare.params.draft is None and bare.params.target is model.params.target
    assert dataclasses.replace(bare, draft=model.draft).target == model.target
