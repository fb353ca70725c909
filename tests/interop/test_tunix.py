"""`TunixRollout`, with a stand-in for Tunix's configuration."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.core.prefill import jitted_prefill
from jspec.core.types import Params
from jspec.interop.tunix import TunixRollout
from jspec.runner import programs

PROMPTS = ["def f(x):", "for i in", "def f(x):"]
OPTIONS = dict(slots=2, context=64, page_size=4)
PAD = 0


@dataclasses.dataclass
class Config:
    """The fields of Tunix's RolloutConfig that are read."""

    max_tokens_to_generate: int = 6
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: object = None
    max_prompt_length: int = 8
    eos_tokens: list[int] | None = None
    return_logprobs: bool = True


class Trainer:
    """The tokenizer of a trainer."""

    def pad_id(self):
        return PAD

    def eos_id(self):
        return 1


@pytest.fixture(scope="module")
def model():
    return jspec.load("bundled:python-tiny", dtype="float32")


@pytest.fixture(scope="module")
def rollout(model):
    made = TunixRollout(model=model, pad_id=PAD, rollout_actor="the module", drafter="ngram", **OPTIONS)
    yield made
    made.engine.close()


def sampled(model, seeds, **options):
    settings = dict(sampling=jspec.Sampling(temperature=0.9), max_new_tokens=6, logprobs=True)
    return jspec.generate(model, PROMPTS, drafter=None, seed=seeds, **settings | options)


@pytest.mark.slow
def test_samples_are_those_of_plain_sampling(model, rollout):
    first, second = rollout.generate(PROMPTS, Config()), rollout.generate(PROMPTS, Config())
    for out, seeds in ((first, [0, 1, 2]), (second, [3, 4, 5])):
        wanted = sampled(model, seeds)
        assert [row.tolist() for row in out.tokens] == wanted.tokens and out.text == wanted.text
        for got, expected in zip(out.logprobs, wanted.sampled_logprobs, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-4)
    assert out.logits is None and first.tokens[0].tolist() != first.tokens[2].tolist()
    for row, prompt in zip(first.left_padded_prompt_tokens, PROMPTS, strict=True):
        ids = model.tokenizer.encode(prompt)
        assert row.tolist() == [PAD] * (8 - len(ids)) + ids
    for seed in (7, np.int64(7), jnp.int32(7)):
        again = rollout.generate(PROMPTS, Config(seed=seed, return_logprobs=False))
        assert [row.tolist() for row in again.tokens] == sampled(model, 7).tokens and again.logprobs is None
    keyed = [rollout.generate(PROMPTS[:1], Config(seed=jax.random.key(i))).tokens[0].tolist() for i in (0, 0, 1)]
    assert keyed[0] == keyed[1] != keyed[2]
    greedy = rollout.generate(PROMPTS, Config(temperature=0.0, top_k=-1, top_p=None))
    assert [row.tolist() for row in greedy.tokens] == sampled(model, 0, sampling=None).tokens


@pytest.mark.slow
def test_log_probabilities_of_completions(model, rollout):
    prompts = np.array([[PAD, PAD, 5, 6], [7, 8, 9, 10], [PAD, PAD, PAD, 11]])
    completions = np.array([[12, 13, PAD], [14, 15, 16], [PAD, PAD, PAD]])
    got = rollout.get_per_token_logps(jnp.array(prompts), jnp.array(completions))
    wanted = np.zeros((3, 3))
    wanted[0, :2] = jspec.score(model, [5, 6, 12, 13]).logprobs[2:]
    wanted[1] = jspec.score(model, [7, 8, 9, 10, 14, 15, 16]).logprobs[4:]
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    mask = np.array([[1, 0, 0], [1, 1, 1], [0, 0, 0]])
    np.testing.assert_allclose(rollout.get_per_token_logps(prompts, completions, mask), wanted * mask, atol=1e-5)
    padding_as_token = rollout.get_per_token_logps(prompts[:1], completions[:1], np.ones((1, 3)))
    np.testing.assert_allclose(padding_as_token[0], jspec.score(model, [5, 6, 12, 13, PAD]).logprobs[2:], atol=1e-5)


@pytest.mark.slow
def test_new_weights_of_a_trainer_compile_nothing(model):
    """The trainer holds its weights in a dict of its own; `to_params` makes the engine's of them."""
    leaves, structure = jax.tree.flatten(model.params.target)

    def to_params(weights):
        return jax.tree.unflatten(structure, [weights[str(i)] for i in range(len(leaves))])

    rollout = TunixRollout(model=model, tokenizer=Trainer(), to_params=to_params, drafter="ngram", **OPTIONS)
    config = Config(seed=3, return_logprobs=False)
    with rollout.engine:
        before = rollout.generate(PROMPTS, config)
        trained = {str(i): leaf + 0.02 * jnp.ones_like(leaf) for i, leaf in enumerate(leaves)}
        count = [f._cache_size() for f in (programs.burst, programs.read, jitted_prefill)]
        rollout.update_params(trained, filter_types=(object,))
        after = rollout.generate(PROMPTS, config)
        assert [f._cache_size() for f in (programs.burst, programs.read, jitted_prefill)] == count
        changed = dataclasses.replace(model, params=Params(to_params(trained), model.params.draft))
        wanted = sampled(changed, 3).tokens
        assert [row.tolist() for row in after.tokens] == wanted != [row.tolist() for row in before.tokens]
        with pytest.raises(ValueError, match=r"params\.target\.embed: is float32\[.*; must be float32"):
            rollout.update_params(trained | {"0": leaves[0][:-1]})


@pytest.mark.slow
def test_what_the_trainer_asks_for(rollout):
    """Without a model, which may share its weights with the trainer's, the trainer updates the engine."""
    assert (rollout.pad_id(), rollout.eos_id(), rollout.model()) == (PAD, rollout.engine.model.eos[0], None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_prompt_length=1), r"prompts\[0\]: has \d+ tokens; must have at most max_prompt_length=1"),
        (dict(max_tokens_to_generate=0), "max_new_tokens=0"),
        (dict(temperature=-1.0), "temperature=-1.0"),
        (dict(top_p=1.5), "top_p=1.5"),
        (dict(eos_tokens=[5, 6]), r"eos_tokens=\[5, 6\]: must be those of the model"),
        (dict(seed=-1), "seed=-1"),
    ],
)
def test_options_that_cannot_be_honored_are_refused(rollout, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        rollout.generate(PROMPTS, Config(**options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda r: r.generate([], Config()), "prompts"),
        (lambda r: r.generate("text", Config()), "prompts='text'"),
        (lambda r: r.generate(PROMPTS, Config(), images=[1]), "images: not supported"),
        (lambda r: r.get_per_token_logps([[PAD, PAD]], [[5]]), r"prompt_tokens\[0\]: is empty"),
        (lambda r: r.get_per_token_logps([[5]], [[5], [6]]), r"shapes \(1, 1\) and \(2, 1\)"),
        (lambda r: r.get_per_token_logps([[5]], [[5, 6]], [[0, 1]]), r"completion_mask\[0\]: has gaps"),
        (lambda r: TunixRollout(model=r.engine.model), "pad_id=None"),
        (lambda r: TunixRollout(model=r.engine.model, pad_id=10**6), "pad_id=1000000"),
        (lambda r: TunixRollout(model=r.engine.model, pad_id=0, slots=0), "slots=0"),
    ],
)
def test_wrong_calls_are_refused(rollout, call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(rollout)


def test_it_is_a_rollout_engine_of_tunix():
    base = pytest.importorskip("tunix.rl.rollout.base_rollout", reason="needs tunix: pip install google-tunix")
    assert issubclass(TunixRollout, base.BaseRollout)
    assert not TunixRollout.__abstractmethods__
