"""Reinforcement learning of a flax module, whose rollouts are drafted.

The engine takes the trainer's newest weights without a copy or a compilation. The reward here counts even tokens.

pip install "jspec-decoding[train]"
python examples/rl_loop.py --steps 30
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jspec
from jspec.core.types import Params

VOCABULARY, LENGTH, NEW_TOKENS = 32, 24, 16


class Policy(nnx.Module):
    """A small causal transformer: tokens [B, T] to logits [B, T, V]."""

    def __init__(self, rngs, width=32, layers=2):
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.position = nnx.Embed(LENGTH, width, rngs=rngs)
        self.attention = nnx.List([nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs) for _ in range(layers)])
        self.mlp = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        """Logits of the next token at every position."""
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + attention(x, mask=nnx.make_causal_mask(tokens))
            x = x + mlp(nnx.gelu(x))
        return self.head(x)


@nnx.jit
def train(policy, optimizer, tokens, advantage):
    """One step of policy gradient on rollouts [B, T] of equal length."""

    def loss(policy):
        logprobs = jax.nn.log_softmax(policy(tokens[:, :-1]))
        sampled = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=2)[:, -NEW_TOKENS:, 0]
        return -(advantage[:, None] * sampled).mean()

    optimizer.update(policy, nnx.grad(loss)(policy))


def main() -> None:
    """Alternates between rollouts and steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()

    policy = Policy(nnx.Rngs(0))
    optimizer = nnx.Optimizer(policy, optax.adam(3e-3), wrt=nnx.Param)
    prompts = [[1, 2], [3, 4], [5, 6], [7, 8]]
    sampling = jspec.Sampling(temperature=1.0)
    with jspec.Engine(
        jspec.from_module(policy, max_length=LENGTH), drafter="suffix", slots=32, context=LENGTH
    ) as engine:
        for step in range(options.steps):
            rollouts = engine.generate(prompts, n=8, max_new_tokens=NEW_TOKENS, sampling=sampling, seed=step)
            tokens = np.array([[*rollout.prompt, *rollout.tokens] for rollout in rollouts], np.int32)
            reward = (tokens[:, -NEW_TOKENS:] % 2 == 0).mean(1)
            train(policy, optimizer, tokens, jnp.asarray(reward - reward.mean(), jnp.float32))
            engine.update(Params(nnx.state(policy)))
            print(f"step {step}: reward {reward.mean():.2f}, accept length {rollouts.stats.accept_length:.2f}")


if __name__ == "__main__":
    main()
