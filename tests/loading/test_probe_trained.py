"""The probe with heads that are trained here for `python-tiny`: EAGLE-1 and MTP heads, which no bundled model has.

They begin as the target's last layer. A misreading is planted in what a head learns to read, or in its weights.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.analysis.evaluate import heldout_prompts
from jspec.core.types import Params
from jspec.drafters import readings
from jspec.loading.model import probe_draft
from jspec.models import EagleHead, EagleParams, MtpHeads, MtpParams
from jspec.models.layers import ForwardBatch

AS_SHIPPED = True
pytestmark = pytest.mark.slow

STEPS, BATCH, NEW = 150, 16, 40


@functools.cache
def written():
    """The target of the trained heads, and 256 texts that it wrote after pieces of the held-out ones."""
    model = jspec.load("bundled:python-tiny", dtype="float32")
    ids = [model.tokenizer.encode(prompt) for prompt in heldout_prompts()]
    pieces = [text[at : at + 8] for at in range(0, 80, 8) for text in ids if len(text) >= at + 8]
    return model, readings.write(model.params, np.array(pieces[:256], np.int32), target=model.target, new=NEW)


def begin(kind):
    """The configuration of a head with the weights of the target's last layer, and its weights."""
    model, _ = written()
    target, weights = model.target, model.params.target
    identity, last = jnp.eye(target.hidden_size), weights.layers[-1]
    both = jnp.concatenate([identity, identity]) / 2
    if kind == "mtp":
        ones = jnp.ones(target.hidden_size)
        return MtpHeads(dataclasses.replace(target, num_layers=1), 1), (
            MtpParams(ones, ones, both, last, weights.norm),
        )
    names = [field.name for field in dataclasses.fields(EagleHead)]
    shape = {name: getattr(target, name) for name in names if hasattr(target, name)} | {"num_layers": 1}
    widths = {"draft_vocab_size": target.vocab_size, "target_hidden_size": target.hidden_size}
    config = EagleHead(**shape, **widths, version=1, capture_layers=(target.num_layers + 1,))
    rest = dict.fromkeys(("embed", "fc_bias", "fc_norms", "input_norm", "hidden_norm", "norm", "lm_head", "ids"))
    return config, EagleParams(fc=both, layers=(dataclasses.replace(last, attention_norm=None),), **rest)


@functools.cache
def train(kind, seed=0, **changes):
    """A head that learns the target's distribution under a view: of the reading of checkpoints, with these changes."""
    optax, attention = pytest.importorskip("optax"), pytest.importorskip("jspec.train.model").CausalAttention((None,))
    (model, text), (config, weights) = written(), begin(kind)
    view = dataclasses.replace(readings.as_read(model.params, model.target, config), **changes)
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-3, STEPS))

    def loss(weights, tokens, hidden, probs):
        params, rows = Params(model.params.target, weights), tokens.shape[1] - 2
        feature = jnp.take(hidden, np.array(view.layers), axis=2).reshape(*tokens.shape, -1)
        feature = feature[:, 1 + view.shift : 1 + view.shift + rows]
        place = jnp.arange(rows, dtype=jnp.int32)[None]
        out = view.draft.apply(params, model.target, ForwardBatch(tokens[:, 2:], place, attention, None), feature)
        return -jnp.mean(jnp.sum(probs * jax.nn.log_softmax(out.logits[:, -NEW:]), axis=-1))

    @jax.jit
    def step(weights, state, rows):
        grads = jax.grad(loss)(weights, text.tokens[rows], text.hidden[rows], text.probs[rows])
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state)
        return optax.apply_updates(weights, updates), state

    state, random = optimizer.init(weights), np.random.default_rng(seed)
    for _ in range(STEPS):
        weights, state = step(weights, state, random.integers(0, len(text.tokens), BATCH))
    return dataclasses.replace(model, draft=config, params=Params(model.params.target, weights))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ("eagle", "mtp"))
def test_a_trained_head_is_not_warned_of(kind, seed):
    fit = probe_draft(train(kind, seed))
    assert fit.warning("it") is None and len(fit.others) >= 4


@pytest.mark.parametrize(
    ("kind", "changes", "name"),
    (
        ("eagle", {"layers": (3,)}, "hidden states before the final norm"),
        ("mtp", {"layers": (3,)}, "hidden states before the final norm"),
        ("eagle", {"shift": 1}, "hidden states one position later"),
        ("eagle", {"shift": -1}, "hidden states one position earlier"),
    ),
    ids=str,
)
def test_a_head_trained_on_other_states_is_named(kind, changes, name):
    assert f"with {name}" in probe_draft(train(kind, **changes)).warning("it")


@pytest.mark.parametrize("kind", ("eagle", "mtp"))
def test_exchanged_inputs_are_named(kind):
    model = train(kind)
    weights = model.params.draft
    if kind == "mtp":
        weights = (dataclasses.replace(weights[0], projection=jnp.roll(weights[0].projection, 128, axis=0)),)
    else:
        weights = dataclasses.replace(weights, fc=jnp.roll(weights.fc, 128, axis=0))
    fit = probe_draft(dataclasses.replace(model, params=Params(model.params.target, weights)))
    assert "with token and hidden state in the other order" in fit.warning("it")
