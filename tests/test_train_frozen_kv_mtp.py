"""Training of assistants: what is trained is what is served, it makes drafts better, and what it writes loads again."""

import dataclasses

import gemma
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

pytest.importorskip("optax", reason='needs optax: pip install -e ".[train]"')
pytest.importorskip("orbax.checkpoint", reason='needs orbax-checkpoint: pip install -e ".[train]"')

from jspec import accept, decode, stopping  # noqa: E402
from jspec.drafters import FrozenKvMtp  # noqa: E402
from jspec.train import assistant, learner  # noqa: E402
from jspec.train.assistant import AssistantLearner  # noqa: E402
from jspec.train.learner import DraftRecipe, DraftSetup  # noqa: E402
from jspec.types import Params  # noqa: E402

STEPS = 3
TEXTS = np.random.default_rng(2).integers(0, 61, (3, 20)).astype(np.int32)
TARGETS = {
    "llama": dataclasses.replace(toy.TARGET, qk_norm=False),
    "qwen3": dataclasses.replace(toy.TARGET, tie_embeddings=True),
    "dense": gemma.KINDS["dense"],
    # Its layers 2 and 3 have the keys of 0 and 1.
    "shared": gemma.KINDS["shared"],
}
SLOWLY = pytest.mark.slow


def target_params(name):
    return gemma.params(name) if name in gemma.KINDS else toy.random_params(TARGETS[name])


@pytest.mark.parametrize(
    ("name", "target_head"),
    [("llama", False), ("qwen3", True), ("shared", False), pytest.param("dense", True, marks=SLOWLY)],
)
def test_what_is_trained_is_what_is_served(name, target_head):
    """Step k of row p is the k-th forward of a round whose cache holds the rows 0 to p, when it reads that text."""
    target = TARGETS[name]
    config = assistant.configure(target, hidden_size=48, target_head=target_head)
    own = dataclasses.replace(toy.random_assistant(config), **({"head": None} if target_head else {}))
    params, tokens = Params(target_params(name), own), jnp.asarray(TEXTS)
    draft = AssistantLearner(config, target)
    setup = DraftSetup(draft, DraftRecipe(steps=2), "float32")

    @jax.jit
    def unroll(params, tokens):
        seen, _ = learner.observe(setup, params.target, tokens, None)
        handed, found = draft.begin(params, seen), []
        for step in range(STEPS):
            logits, handed = draft.forward(params, tokens, seen, handed, step)
            found.append((logits, handed))
        return found

    trained = unroll(params, tokens)
    # Prompts that end at x[p + 1], which is in no cache yet: behind 2 rows, and behind more than two windows.
    length = jnp.array([3, 12, 18], jnp.int32) - 1
    bound = FrozenKvMtp(depth=STEPS).bind(target, config)
    keys = jax.vmap(jax.random.key)(jnp.arange(3, dtype=jnp.uint32))
    given = params, tokens, length, length + 4, keys, stopping.init(None, 3)
    s = decode.jitted_prefill(*given, target=target, drafter=bound, accept=accept.greedy, capacity=32, page_size=4)
    apply, hidden = jax.jit(config.apply, static_argnums=1), s.draft
    for step in range(STEPS):
        token = jnp.take_along_axis(tokens, length[:, None] + step, axis=1, mode="clip")
        out = apply(params, target, token, hidden, s.cache, s.length - 1, s.length - 2)
        hidden = out.hidden
        for row, p in enumerate(np.asarray(length) - 1):
            if p + step + 1 < TEXTS.shape[1]:
                np.testing.assert_allclose(out.logits[row, 0], trained[step][0][row, p], atol=2e-5)
                np.testing.assert_allclose(out.hidden[row, 0], trained[step][1][row, p], atol=2e-5)
