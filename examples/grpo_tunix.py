"""GRPO with Tunix, whose rollouts are drafted by a head that learns from them.

Tunix trains any model of jspec here: `Policy` is a module of nnx around the model's own forward. The reward is the
share of capital letters, as in `grpo.py`.

pip install "jspec-decoding[train]" google-tunix
python examples/grpo_tunix.py --model SmolLM2-135M-Instruct.Q4_1.gguf --draft HEAD
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

import jspec
from jspec.core import tree
from jspec.interop.tunix import TunixRollout
from jspec.train.online import Learn

TOPICS = ("rain", "bread", "trains", "moons", "winter", "gardens", "seas", "music")


class Policy(nnx.Module):
    """A target as a module, with weights in float32."""

    def __init__(self, model: jspec.Model):
        self.target = dataclasses.replace(model.target, exact=False)
        leaves, self.structure = jax.tree.flatten(model.params.target)
        self.weights = nnx.List([nnx.Param(leaf.astype(jnp.float32)) for leaf in leaves])

    def __call__(self, tokens, positions, cache=None, attention_mask=None):
        """Logits of texts [B, T] with padding before and after them, and no cache."""
        # Move each text to the first column, where its positions begin.
        width, padding = tokens.shape[1], (positions == 0).sum(1, keepdims=True) - 1
        column = jnp.arange(width, dtype=jnp.int32)[None]
        moved = jnp.take_along_axis(tokens, (column + padding) % width, axis=1)
        params = self.structure.unflatten([weight[...] for weight in self.weights])
        empty = self.target.init_cache(params, len(tokens), 4, 4)
        logits = self.target.forward(params, tree.chain(moved), empty, None).logits
        return jnp.take_along_axis(logits, ((column - padding) % width)[:, :, None], axis=1), None


class Tokenizer:
    """The tokenizer of a model, as Tunix calls it."""

    def __init__(self, model: jspec.Model):
        assert model.tokenizer is not None
        self.encode, self.decode = model.tokenizer.encode, model.tokenizer.decode
        self.eos_id = self.bos_id = lambda: model.eos[0]
        self.pad_id = lambda: model.target.vocab_size - 1


def main() -> None:
    """Trains, and prints the reward and the accept length of every policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:python-small")
    parser.add_argument("--draft", help="an EAGLE-3 head or a block draft (default: that of a bundled model)")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate of the policy")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--samples", type=int, default=8, help="rollouts of each prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    model = jspec.load(options.model, draft=options.draft)
    chat = not options.model.startswith("bundled:")
    prompts = [f"Write about {topic} in CAPITALS." if chat else f"class {topic.title()}:\n" for topic in TOPICS]
    if chat:
        assert model.tokenizer is not None
        prompts = [model.tokenizer.chat_text([{"role": "user", "content": prompt}]) for prompt in prompts]
    # Rollouts by jspec: weights of the trainer, in the dtype and the structure of the engine's.
    structure, dtype = jax.tree.structure(model.params.target), model.params.target.embed.dtype

    def to_params(state):
        return structure.unflatten([leaf.astype(dtype) for leaf in jax.tree.leaves(state)])

    sizes = {"slots": 2 * options.samples, "context": 64 + options.new_tokens}
    rollout = functools.partial(TunixRollout, model=model, to_params=to_params, learn=Learn(), **sizes)
    # The cluster of one device.
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(options.rate))
    cluster = RLCluster(
        actor=Policy(model),
        tokenizer=Tokenizer(model),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=rollout,
            training_config=RLTrainingConfig(
                actor_optimizer=optimizer, eval_every_n_steps=10**9, max_steps=options.steps
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=options.new_tokens, max_prompt_length=64, temperature=1.0
            ),
        ),
    )
    rewards = []

    def capitals(prompts, completions, **fields):
        shares = [sum(map(str.isupper, text)) / max(sum(map(str.isalpha, text)), 1) for text in completions]
        rewards.append(np.mean(shares))
        return shares

    learner = GRPOLearner(cluster, GRPOConfig(num_generations=options.samples, beta=0.0), capitals)
    pairs = [np.array([prompts[(2 * i + j) % len(prompts)] for j in range(2)]) for i in range(options.steps)]
    learner.train([{"prompts": pair} for pair in pairs])
    for version in cluster.rollout.engine.metrics().acceptance_by_version:
        reward, length = rewards[version.version], 1 + sum(version.by_position)
        print(f"policy {version.version}: reward {reward:.3f}, accept length {length:.2f}")


if __name__ == "__main__":
    main()
